"""Requests to rows of tokens: what the model runs, so that a context that several requests share runs once.

A row is a run of tokens. That of one request is its context and continuation, and is scored like any window.
Requests with the same context share a row: the context without its last token, then for each request a branch
of that last token and the continuation. A branch sees the context and itself, and has the positions that it
would have alone. So every continuation sees what it sees alone; only the kernel differs, by rounding.

Rows and batches depend on the requests and the batch size alone, never on the number of ranks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX

# Shorter contexts are not worth a mask.
_SHORTEST_SHARED = 4


class Request(NamedTuple):
    """Tokens whose log-likelihood is asked for.

    Attributes:
        context: at least one token.
        continuation: the targets; at least one token.
    """

    context: tuple[int, ...]
    continuation: tuple[int, ...]


class Row(NamedTuple):
    """What the model sees at once.

    Attributes:
        context: its tokens.
        continuations: of the requests, one after the other.
        requests: their numbers, in the same order.
    """

    context: tuple[int, ...]
    continuations: tuple[tuple[int, ...], ...]
    requests: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Return how many tokens the model sees."""
        return len(self.context) - 1 + sum(map(len, self.continuations))

    @property
    def is_shared(self) -> bool:
        """Return whether it has several branches, and needs a mask."""
        return len(self.requests) > 1


class Inputs(NamedTuple):
    """Tensors of a batch of rows.

    Attributes:
        tokens_BT: int64.
        labels_BT: targets aligned with the inputs, -100 where nothing is scored; int64.
        input_pos_BT: positions; None for 0 to T - 1.
        mask_BTT: True where a token sees another; None for causal.
    """

    tokens_BT: torch.Tensor
    labels_BT: torch.Tensor
    input_pos_BT: torch.Tensor | None
    mask_BTT: torch.Tensor | None


def truncate(context: Sequence[int], continuation: Sequence[int], max_length: int) -> Request:
    """Return a request that fits the model, cut on the left as lm-eval's Hugging Face model cuts it.

    Raises:
        ValueError: if there is no continuation, or it is longer than the model's context.
    """
    if not 0 < len(continuation) <= max_length:
        raise ValueError(
            f"a continuation has {len(continuation)} tokens; it must have 1 to {max_length}, what the"
            " model sees (max_seq_length)"
        )
    kept = [*context, *continuation][-(max_length + 1) :]
    return Request(tuple(kept[: -len(continuation)]), tuple(continuation))


def rows_of(requests: Sequence[Request], max_length: int, share: bool = True) -> list[Row]:
    """Put requests into rows, in the order of their first request.

    Args:
        requests: what is asked for.
        max_length: most tokens of a row.
        share: run a context that requests share once; False gives each request a row of its own.
    """
    rows: list[Row] = []
    place: dict[tuple[int, ...], int] = {}
    for number, (context, continuation) in enumerate(requests):
        index = place.get(context)
        if index is not None and rows[index].num_tokens + len(continuation) <= max_length:
            old = rows[index]
            rows[index] = Row(context, (*old.continuations, continuation), (*old.requests, number))
            continue
        rows.append(Row(context, (continuation,), (number,)))
        if share and len(context) >= _SHORTEST_SHARED:
            place[context] = len(rows) - 1
    return rows


def batches_of_rows(rows: Sequence[Row], batch_size: int) -> list[list[Row]]:
    """Return rows of similar length and the same kind together, the longest first."""
    batches: list[list[Row]] = []
    for shared in (False, True):
        alike = [row for row in rows if row.is_shared == shared]
        alike.sort(key=lambda row: -row.num_tokens)  # Stable: equal lengths stay in order.
        batches += [alike[i : i + batch_size] for i in range(0, len(alike), batch_size)]
    return batches


def inputs_of(rows: Sequence[Row]) -> Inputs:
    """Return the tensors of a batch; rows are all shared, or none is."""
    shape = len(rows), max(row.num_tokens for row in rows)
    tokens_BT = torch.zeros(shape, dtype=torch.int64)
    labels_BT = torch.full(shape, CROSS_ENTROPY_IGNORE_IDX, dtype=torch.int64)
    input_pos_BT = torch.zeros(shape, dtype=torch.int64)
    # Padding sees itself, since a softmax over nothing has no value.
    mask_BTT = torch.eye(shape[1], dtype=torch.bool).repeat(len(rows), 1, 1)
    for b, row in enumerate(rows):
        begin = len(row.context) - 1
        tokens_BT[b, :begin] = torch.tensor(row.context[:-1], dtype=torch.int64)
        input_pos_BT[b, :begin] = torch.arange(begin)
        mask_BTT[b, :begin, :begin] = torch.ones(begin, begin, dtype=torch.bool).tril_()
        first = begin
        for continuation in row.continuations:
            branch = slice(first, first + len(continuation))
            tokens_BT[b, branch] = torch.tensor((row.context[-1], *continuation[:-1]))
            labels_BT[b, branch] = torch.tensor(continuation)
            input_pos_BT[b, branch] = torch.arange(begin, begin + len(continuation))
            mask_BTT[b, branch, :begin] = True
            own = torch.ones(len(continuation), len(continuation), dtype=torch.bool)
            mask_BTT[b, branch, branch] = own.tril_()
            first = branch.stop
    if not rows[0].is_shared:
        return Inputs(tokens_BT, labels_BT, None, None)
    return Inputs(tokens_BT, labels_BT, input_pos_BT, mask_BTT)
