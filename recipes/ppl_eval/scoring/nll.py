"""Hidden states and head to NLL per token: the head runs over scored rows only, in chunks, with log-softmax
in float32."""

from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX

from ppl_eval.config import activity
from ppl_eval.metrics.totals import TokenComparison, WindowScores
from ppl_eval.models.decoder import Decoder
from ppl_eval.models.engines import scorable
from ppl_eval.parallel import context_parallel, tensor_parallel
from ppl_eval.parallel import fsdp as sharding
from ppl_eval.protocols.batches import Batch
from ppl_eval.scoring.divergence import compare_logits
from ppl_eval.scoring.softmax import Softmax, token_nll

# dtypes of what `token_nll` returns
_OUTPUTS = (torch.float32, torch.bool, torch.int64, torch.int64, torch.float32)
# ... and of what a reference adds: the fields of ``TokenComparison``
_COMPARED = (torch.float32, torch.float32, torch.float32, torch.int64)


class Beside(NamedTuple):
    """A reference whose hidden states of the same scored rows are there.

    Attributes:
        model: the reference.
        hidden_ND: its hidden states.
    """

    model: Decoder
    hidden_ND: torch.Tensor


class ScoringModel(nn.Module):
    """A decoder and its head, scored in one forward, so that sharding, compilation and gradients-off wrap one
    call.

    Args:
        decoder: the decoder. It is made to stop before its head: the logits of a whole batch never exist.
        max_logits_bytes: most memory that logits may take at once, all copies that scoring makes of them
            included.
        softmax: ``exact`` or ``torch``; see ``token_nll``.
        details: whether ``forward`` returns the details of ``token_nll`` too. They take a few rows of logits
            beside the chunk, which is the same, so that NLL keeps its bits.
        vocab_group: the ranks over which the head's rows are split (``tensor_parallel.split_model``); None if
            each rank has them all.
        sequence_group: the ranks over which sequences are split (``context_parallel.split_attention``); None
            if they are not.
    """

    def __init__(
        self,
        decoder: Decoder | nn.Module,
        max_logits_bytes: int,
        *,
        softmax: str = "exact",
        details: bool = False,
        vocab_group: dist.ProcessGroup | None = None,
        sequence_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.model = scorable(decoder)
        self.decoder = self.model.module
        self.sequence_group = sequence_group
        vocab_columns, vocab_start = self.model.vocab_size, 0
        if vocab_group is not None:
            size, rank = vocab_group.size(), vocab_group.rank()
            vocab_start, _ = tensor_parallel.bounds(vocab_columns, size, rank)
            # The same on all ranks, though parts differ by one: they must cut the rows into the same chunks.
            vocab_columns = -(-vocab_columns // size)
        self.softmax = Softmax(softmax, vocab_start, vocab_group, details)
        dtype = self.model.embed_unit().weight.dtype
        self.rows_per_chunk = rows_per_chunk(vocab_columns, dtype, max_logits_bytes, softmax)
        self.model.stop_before_head()
        # Not before the first forward: FSDP gathers nothing outside of one.
        self._head_is_checked = self._parts_are_checked = False

    def forward(
        self,
        tokens_BT: torch.Tensor,
        labels_BT: torch.Tensor,
        input_pos_BT: torch.Tensor | None = None,
        mask_BTT: torch.Tensor | None = None,
        *,
        beside: Beside | None = None,
        rows_only: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        """Score a batch.

        Args:
            tokens_BT: inputs; int64.
            labels_BT: targets aligned with the inputs, -100 where nothing is scored; int64.
            input_pos_BT: positions; None for 0 to T - 1. Not with a ``sequence_group``.
            mask_BTT: True where a token sees another; None for causal. Not with a ``sequence_group``.
            beside: the reference to compare with, after a call of its scorer with the same batch.
            rows_only: stop before the head, for ``beside``.

        Returns:
            What ``token_nll`` does, of the scored targets in row-major order; the same on all ranks that
            score the batch together. With ``beside``, the fields of ``TokenComparison`` come after them; with
            ``rows_only``, hidden states [N, D] of this rank's scored positions are all.
        """
        scored_BT = labels_BT != CROSS_ENTROPY_IGNORE_IDX
        if self.sequence_group is None:
            if mask_BTT is None:
                hidden_BTD = self.model.hidden(tokens_BT, None, tokens_BT.shape[1])
            else:
                assert input_pos_BT is not None
                hidden_BTD = self.model.hidden_of_branches(tokens_BT, input_pos_BT, mask_BTT)
            hidden_ND = hidden_BTD[scored_BT]
            if rows_only:
                return (self._checked(hidden_ND),)
            return self._score_hidden(hidden_ND, labels_BT[scored_BT], beside)
        assert mask_BTT is None
        if not self._parts_are_checked:
            context_parallel.check_parts(self.model, self.sequence_group, tokens_BT.device)
            self._parts_are_checked = True
        part = context_parallel.Part(tokens_BT.shape[1], self.sequence_group, tokens_BT.device)
        part_tokens_BT, part_labels_BT, input_pos = part.take(tokens_BT, labels_BT)
        part_scored_BT = part_labels_BT != CROSS_ENTROPY_IGNORE_IDX
        hidden_BTD = self.model.hidden(part_tokens_BT, input_pos, part.num_positions)
        if rows_only:
            return (self._checked(hidden_BTD[part_scored_BT]),)
        found = self._score_hidden(hidden_BTD[part_scored_BT], part_labels_BT[part_scored_BT], beside)
        # Ranks and ids of tokens are exact in float32: no vocabulary has 2^24.
        values_KBT = hidden_BTD.new_zeros(len(found), *part_labels_BT.shape, dtype=torch.float32)
        values_KBT[:, part_scored_BT] = torch.stack([values_N.float() for values_N in found])
        joined_KN = part.join(values_KBT)[:, scored_BT]
        return tuple(values_N.to(own.dtype) for values_N, own in zip(joined_KN, found, strict=True))

    def _score_hidden(
        self, hidden_ND: torch.Tensor, targets_N: torch.Tensor, beside: Beside | None
    ) -> tuple[torch.Tensor, ...]:
        kinds = [*(_OUTPUTS if self.softmax.details else _OUTPUTS[:2]), *(_COMPARED if beside else ())]
        outputs = tuple(torch.empty(len(targets_N), dtype=kind, device=hidden_ND.device) for kind in kinds)
        self._checked(hidden_ND)
        with ExitStack() as heads:
            for model in (self.model, *(() if beside is None else (beside.model,))):
                heads.enter_context(sharding.whole_head(model))
            for first in range(0, len(targets_N), self.rows_per_chunk):
                activity.tick()
                chunk = slice(first, first + self.rows_per_chunk)
                logits_NV, targets_K = self.model.head(hidden_ND[chunk]), targets_N[chunk]
                compared: tuple[torch.Tensor, ...] = ()
                if beside is not None:
                    compared = self._compare(logits_NV, beside.model.head(beside.hidden_ND[chunk]), targets_K)
                found = (*token_nll(logits_NV, targets_K, self.softmax), *compared)
                for output_N, values_K in zip(outputs, found, strict=True):
                    output_N[chunk] = values_K
        return outputs

    def _compare(
        self, logits_KV: torch.Tensor, reference_KV: torch.Tensor, targets_K: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        rule = self.softmax._replace(details=False)
        kl_K, reverse_kl_K, top_rank_K = compare_logits(reference_KV, logits_KV, rule.vocab_start, rule.group)
        # Last, as it overwrites them.
        return token_nll(reference_KV, targets_K, rule)[0], kl_K, reverse_kl_K, top_rank_K

    def _checked(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Hold the head against the engine's own in the first batch; return the same rows."""
        if not self._head_is_checked:
            with sharding.whole_head(self.model):
                self.model.check_head(hidden_ND.device)
            self._head_is_checked = True
        return hidden_ND


def rows_per_chunk(vocab_size: int, dtype: torch.dtype, max_logits_bytes: int, softmax: str = "exact") -> int:
    """Return how many scored rows go through the head at once.

    A row's logits exist in float32, which ``exact`` overwrites and beside which ``torch`` needs
    log-probabilities; before that, in the model's dtype too if it is another.

    Raises:
        ValueError: if not even one row fits.
    """
    more = 0 if dtype == torch.float32 else dtype.itemsize
    bytes_per_row = vocab_size * (4 + (max(4, more) if softmax == "torch" else more))
    if bytes_per_row > max_logits_bytes:
        raise ValueError(
            f"max_logits_mib leaves a chunk {max_logits_bytes / 2**20:g} MiB, but the logits of one token of"
            f" this vocabulary ({vocab_size}) take {bytes_per_row / 2**20:.2f} MiB; raise max_logits_mib"
        )
    return max_logits_bytes // bytes_per_row


@torch.no_grad()
def score_batch(
    scorer: ScoringModel, batch: Batch, device: torch.device, reference: ScoringModel | None = None
) -> WindowScores:
    """Score a batch on a device; one forward, whatever is in it, and one of the reference.

    Args:
        scorer: the model.
        batch: the batch.
        device: where both are.
        reference: the model that it is compared with, if there is one.
    """
    tokens_BT, labels_BT = batch.tokens_BT.to(device), batch.labels_BT.to(device)
    beside = None
    if reference is not None:
        (hidden_ND,) = reference(tokens_BT, labels_BT, rows_only=True)
        beside = Beside(reference.model, hidden_ND)
    nll_N, correct_N, *more = scorer(tokens_BT, labels_BT, beside=beside)
    scores = window_scores(nll_N, correct_N, batch.labels_BT, len(batch.window_ids_B))
    more = [values_N.cpu().numpy() for values_N in more]
    if beside is not None:
        more, compared = more[: -len(_COMPARED)], more[-len(_COMPARED) :]
        scores = scores._replace(comparison=TokenComparison(*compared))
    return scores._replace(details_N=tuple(more))


def window_scores(
    nll_N: torch.Tensor, correct_N: torch.Tensor, labels_BT: torch.Tensor, num_windows: int
) -> WindowScores:
    """Sum per-token results to windows, in float64.

    The sums are made by numpy on the host: torch may split a sum over threads, and then its bits depend on
    how many there are.

    Args:
        nll_N: NLL of the scored targets in row-major order; float32.
        correct_N: whether each was the most likely token; bool.
        labels_BT: the batch's labels, on the host.
        num_windows: windows in the batch (0 for a dummy).
    """
    scored_BT = (labels_BT != CROSS_ENTROPY_IGNORE_IDX).numpy()
    nll_BT = np.zeros(scored_BT.shape, dtype=np.float64)
    nll_BT[scored_BT] = nll_N.cpu().numpy()
    correct_BT = np.zeros(scored_BT.shape, dtype=np.int64)
    correct_BT[scored_BT] = correct_N.cpu().numpy()
    return WindowScores(
        nll_BT.sum(axis=1)[:num_windows],
        np.square(nll_BT).sum(axis=1)[:num_windows],
        scored_BT.sum(axis=1, dtype=np.int64)[:num_windows],
        correct_BT.sum(axis=1)[:num_windows],
        nll_BT[:num_windows],
        correct_BT[:num_windows],
    )
