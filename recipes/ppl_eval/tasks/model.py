"""lm-eval's model interface over our scorer: log-likelihoods of continuations and of whole texts.

lm-eval sees one process on every rank. Each rank makes all requests, runs the batches that are its own, and
learns the others' numbers in one sum, so no request is repeated to make ranks even, and every rank comes to
the same metrics.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX

from ppl_eval.config import activity
from ppl_eval.distributed.collectives import AddOverRanks
from ppl_eval.parallel.parallel_dims import ParallelDims
from ppl_eval.scoring.nll import ScoringModel
from ppl_eval.tasks.rows import Request, Row, batches_of_rows, inputs_of, rows_of, truncate
from ppl_eval.tokenization.tokenizer import TextEncoder

Pair = tuple[Any, Sequence[int], Sequence[int]]


@dataclass(frozen=True)
class Ranks:
    """Where this process stands among the others.

    Attributes:
        dims: degrees of parallelism.
        rank: this process.
        add: sums a vector over ranks; left out, there is one process.
    """

    dims: ParallelDims
    rank: int = 0
    add: AddOverRanks = lambda vector: vector


ALONE = Ranks(ParallelDims(1, 1, 1, 1, world_size=1))


class TaskModel(TemplateLM):
    """A scorer as lm-eval's evaluator calls it.

    Args:
        scorer: the decoder with its head.
        encoder: its tokenizer.
        max_length: most tokens that the model sees at once.
        batch_size: rows in a forward.
        device: where it computes.
        ranks: the processes.
        share: run a context that requests share once.
    """

    backend = "causal"

    def __init__(
        self,
        scorer: ScoringModel,
        encoder: TextEncoder,
        *,
        max_length: int,
        batch_size: int = 1,
        device: torch.device | None = None,
        ranks: Ranks = ALONE,
        share: bool = True,
    ) -> None:
        super().__init__()
        self._scorer, self._encoder, self._ranks = scorer, encoder, ranks
        self.max_length, self.batch_size = max_length, batch_size
        self._share = share and ranks.dims.cp == 1 and scorer.model.supports("branches") is None
        self._device = torch.device("cpu") if device is None else device
        self.tokens_run = 0

    @property
    def eot_token_id(self) -> int:
        """Return the id of EOS."""
        return self._known(self._encoder.eos_id, "EOS")

    @property
    def prefix_token_id(self) -> int:
        """Return what stands before a text without context: BOS, else EOS."""
        first = self._encoder.bos_id
        return self.eot_token_id if first is None else first

    def _known(self, token: int | None, name: str) -> int:
        if token is None:
            raise ValueError(f"this tokenizer has no {name} token, which the task needs")
        return token

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encode a text; by itself as the model's own tokenizer does, BOS included if it adds one."""
        ids = self._encoder.encode(string).tolist()
        bos = self._encoder.bos_id
        wanted = self._encoder.adds_bos if add_special_tokens is None else add_special_tokens
        # A text that spells BOS does not get another.
        spelled = add_special_tokens is None and bool(ids) and ids[0] == bos
        return [bos, *ids] if wanted and bos is not None and not spelled else ids

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, nats: every token once, in lm-eval's windows."""
        pairs: list[Pair] = []
        counts = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            own = [(None, *make_disjoint_window(window)) for window in windows]
            pairs += own
            counts.append(len(own))
        values = iter([value for value, _ in self._loglikelihood_tokens(pairs)])
        return [sum(next(values) for _ in range(count)) for count in counts]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Refuse: nothing is generated here."""
        raise ValueError(f"the task {requests[0].task_name!r} has the model generate text; {NO_GENERATION}")

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Return log-likelihood (nats), and whether greedy decoding gives the continuation."""
        asked = [truncate(context, continuation, self.max_length) for _, context, continuation in requests]
        if not asked:
            return []
        found = self._run(asked)
        return [(-float(nll_sum), bool(greedy)) for nll_sum, greedy in found]

    def _run(self, requests: Sequence[Request]) -> npt.NDArray[np.float64]:
        dims, rank = self._ranks.dims, self._ranks.rank
        batches = batches_of_rows(rows_of(requests, self.max_length, self._share), self.batch_size)
        found_R2 = np.zeros((len(requests), 2), dtype=np.float64)
        for first in range(0, len(batches), dims.dp_degree):
            index = first + dims.dp_rank(rank)
            if index < len(batches):
                scores = self._score(batches[index])
                if dims.is_counted(rank):
                    for number, values in scores:
                        found_R2[number] = values
            elif dims.forwards_are_shared:
                self._score(batches[0])  # Keeps the others company: its numbers are theirs.
        # Each number is one rank's, and zero elsewhere: the sum of the bits is the number.
        joined = self._ranks.add(found_R2.view(np.int64).ravel())
        found_R2 = joined.view(np.float64).reshape(found_R2.shape)
        if not np.isfinite(found_R2).all():
            bad = int(np.flatnonzero(~np.isfinite(found_R2[:, 0]))[0])
            raise ValueError(f"the model gives request {bad} no finite probability; try dtype=fp32")
        return found_R2

    @torch.no_grad()
    def _score(self, rows: list[Row]) -> list[tuple[int, tuple[float, bool]]]:
        inputs = inputs_of(rows)
        activity.tick()
        self.tokens_run += inputs.tokens_BT.numel()
        tokens_BT, labels_BT, input_pos_BT, mask_BTT = (
            None if tensor is None else tensor.to(self._device) for tensor in inputs
        )
        nll_N, correct_N, *_ = self._scorer(tokens_BT, labels_BT, input_pos_BT, mask_BTT)
        nll_N, correct_N = nll_N.double().cpu().numpy(), correct_N.cpu().numpy()
        scores, first = [], 0
        for row in rows:
            for number, continuation in zip(row.requests, row.continuations, strict=True):
                last = first + len(continuation)
                scores.append((number, (float(nll_N[first:last].sum()), bool(correct_N[first:last].all()))))
                first = last
        assert first == int((inputs.labels_BT != CROSS_ENTROPY_IGNORE_IDX).sum())
        return scores


NO_GENERATION = "perplexity and multiple choice are measured here; use lm-eval's own models for it"
