"""Hidden states and head to NLL per token: the head runs over scored rows only, in chunks, with log-softmax
in float32."""

from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX

from ppl_eval.config import activity
from ppl_eval.metrics.totals import WindowScores
from ppl_eval.models.decoder import Decoder
from ppl_eval.models.engines import scorable
from ppl_eval.parallel import context_parallel, tensor_parallel
from ppl_eval.parallel import fsdp as sharding
from ppl_eval.protocols.batches import Batch
from ppl_eval.scoring.token_details import count_above, exp_sums, first_largest, sum_rows


class Softmax(NamedTuple):
    """How NLL is computed from logits, and over which ranks the vocabulary is split.

    Attributes:
        rule: ``exact`` or ``torch``; see ``token_nll``.
        vocab_start: first token of this rank's columns.
        group: the ranks over which the vocabulary is split; None if each has all of it.
        details: whether the target's rank, the most likely token and the entropy are asked for too.
    """

    rule: str = "exact"
    vocab_start: int = 0
    group: dist.ProcessGroup | None = None
    details: bool = False


# dtypes of what `token_nll` returns
_OUTPUTS = (torch.float32, torch.bool, torch.int64, torch.int64, torch.float32)
EXACT = Softmax()


def token_nll(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, softmax: Softmax = EXACT
) -> tuple[torch.Tensor, ...]:
    """Compute NLL from logits: nll = ln(sum over v of e^(x_v - m)) + m - x_target, with m the largest logit.

    ``exact`` adds the vocabulary up in a tree, so the result is within float32 rounding of a float64
    log-softmax, for whole rows and for rows split over ranks. ``torch`` calls torch's log-softmax, as
    transformers and lm-eval do: on CPU its float32 sum runs one term after the other, so that small terms
    vanish, and for 49,152 tokens NLL comes out 3e-6 of itself too low (docs/exactness.md).

    Args:
        logits_NV: logits, float32; overwritten under ``exact``. With a group this rank's columns of the
            vocabulary.
        targets_N: targets in the whole vocabulary; int64.
        softmax: the rule. The ranks of its group communicate twice: the largest logit of each row, then three
            sums in one; three times more for details. A NaN in any part makes the row's NLL NaN.

    Returns:
        ``nll_N`` (nats, float32) and ``correct_N`` (whether the target is the most likely token; of equals,
        as in argmax, the first); with details also ``rank_N`` (int64, 1 for the most likely token; of equals
        the lower id comes first), ``top_N`` (int64, the most likely token) and ``entropy_N`` (nats,
        float32). The same on every rank of the group.
    """
    if softmax.group is not None:
        return _split_nll(logits_NV, targets_N, softmax)
    max_N = logits_NV.amax(dim=-1)
    target_N = logits_NV.gather(1, targets_N[:, None]).squeeze(1)
    # As `argmax == target`, in the time of a maximum: only rows whose target ties for it need a search.
    correct_N = target_N == max_N
    rows = correct_N.nonzero().squeeze(1)
    correct_N[rows] = logits_NV[rows].argmax(dim=-1) == targets_N[rows]
    nll_N = F.cross_entropy(logits_NV, targets_N, reduction="none") if softmax.rule == "torch" else None
    if not softmax.details:
        if nll_N is None:
            nll_N = _sum_of_exp(logits_NV, max_N).log() + (max_N - target_N)
        return nll_N, correct_N
    rank_N = 1 + count_above(logits_NV, target_N, targets_N)
    top_N = first_largest(logits_NV)
    exp_sum_N, weighted_N = exp_sums(logits_NV, max_N)
    if nll_N is None:
        nll_N = exp_sum_N.log() + (max_N - target_N)
    return nll_N, correct_N, rank_N, top_N, exp_sum_N.log() - weighted_N / exp_sum_N


def _sum_of_exp(logits_NV: torch.Tensor, max_N: torch.Tensor) -> torch.Tensor:
    return sum_rows(logits_NV.sub_(max_N[:, None]).exp_())


def _split_nll(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, softmax: Softmax
) -> tuple[torch.Tensor, ...]:
    """Compute ``exact`` NLL where each rank of a group has some columns of the vocabulary."""
    group = softmax.group
    column_N1 = (targets_N - softmax.vocab_start)[:, None]
    num_columns = logits_NV.shape[1]
    elsewhere_N1 = (column_N1 < 0) | (column_N1 >= num_columns)
    max_N1 = logits_NV.amax(dim=1, keepdim=True)
    own_max_N = max_N1.squeeze(1).clone()
    dist.all_reduce(max_N1, dist.ReduceOp.MAX, group=group)

    target_N1 = logits_NV.gather(1, column_N1.clamp(0, num_columns - 1)).masked_fill(elsewhere_N1, 0.0)
    column_V = torch.arange(num_columns, device=logits_NV.device)
    earlier_N1 = ((logits_NV == max_N1) & (column_V < column_N1)).any(dim=1, keepdim=True)
    max_N = max_N1.squeeze(1)
    if softmax.details:
        value_N = target_N1.squeeze(1).clone()
        dist.all_reduce(value_N, group=group)
        above_N = count_above(logits_NV, value_N, column_N1.squeeze(1))
        top_N = softmax.vocab_start + first_largest(logits_NV)
        top_N[own_max_N != max_N] = torch.iinfo(torch.int64).max
        dist.all_reduce(top_N, dist.ReduceOp.MIN, group=group)
        exp_sum_N, weighted_N = exp_sums(logits_NV, max_N)
    else:
        exp_sum_N = _sum_of_exp(logits_NV, max_N)
    sums_N3 = torch.cat([exp_sum_N[:, None], target_N1, earlier_N1.to(logits_NV.dtype)], dim=1)
    dist.all_reduce(sums_N3, group=group)
    exp_sum_N, target_N, earlier_N = sums_N3.unbind(dim=1)
    nll_N, correct_N = exp_sum_N.log() + (max_N - target_N), (target_N == max_N) & (earlier_N == 0)
    if not softmax.details:
        return nll_N, correct_N
    sums_N2 = torch.stack([above_N.double(), weighted_N.double()], dim=1)
    dist.all_reduce(sums_N2, group=group)
    entropy_N = exp_sum_N.log() - sums_N2[:, 1].float() / exp_sum_N
    return nll_N, correct_N, 1 + sums_N2[:, 0].long(), top_N, entropy_N


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
    ) -> tuple[torch.Tensor, ...]:
        """Score a batch.

        Args:
            tokens_BT: inputs; int64.
            labels_BT: targets aligned with the inputs, -100 where nothing is scored; int64.
            input_pos_BT: positions; None for 0 to T - 1. Not with a ``sequence_group``.
            mask_BTT: True where a token sees another; None for causal. Not with a ``sequence_group``.

        Returns:
            What ``token_nll`` does, of the scored targets in row-major order; the same on all ranks that
            score the batch together.
        """
        scored_BT = labels_BT != CROSS_ENTROPY_IGNORE_IDX
        if self.sequence_group is None:
            if mask_BTT is None:
                hidden_BTD = self.model.hidden(tokens_BT, None, tokens_BT.shape[1])
            else:
                assert input_pos_BT is not None
                hidden_BTD = self.model.hidden_of_branches(tokens_BT, input_pos_BT, mask_BTT)
            return self._score_hidden(hidden_BTD[scored_BT], labels_BT[scored_BT])
        assert mask_BTT is None
        if not self._parts_are_checked:
            context_parallel.check_parts(self.model, self.sequence_group, tokens_BT.device)
            self._parts_are_checked = True
        part = context_parallel.Part(tokens_BT.shape[1], self.sequence_group, tokens_BT.device)
        part_tokens_BT, part_labels_BT, input_pos = part.take(tokens_BT, labels_BT)
        part_scored_BT = part_labels_BT != CROSS_ENTROPY_IGNORE_IDX
        hidden_BTD = self.model.hidden(part_tokens_BT, input_pos, part.num_positions)
        found = self._score_hidden(hidden_BTD[part_scored_BT], part_labels_BT[part_scored_BT])
        # Ranks and ids of tokens are exact in float32: no vocabulary has 2^24.
        values_KBT = hidden_BTD.new_zeros(len(found), *part_labels_BT.shape, dtype=torch.float32)
        values_KBT[:, part_scored_BT] = torch.stack([values_N.float() for values_N in found])
        joined_KN = part.join(values_KBT)[:, scored_BT]
        return tuple(values_N.to(own.dtype) for values_N, own in zip(joined_KN, found, strict=True))

    def _score_hidden(self, hidden_ND: torch.Tensor, targets_N: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kinds = _OUTPUTS if self.softmax.details else _OUTPUTS[:2]
        outputs = tuple(torch.empty(len(targets_N), dtype=kind, device=hidden_ND.device) for kind in kinds)
        with sharding.whole_head(self.model):
            if not self._head_is_checked:
                self.model.check_head(hidden_ND.device)
                self._head_is_checked = True
            for first in range(0, len(targets_N), self.rows_per_chunk):
                activity.tick()
                chunk = slice(first, first + self.rows_per_chunk)
                logits_NV = self.model.head(hidden_ND[chunk])
                found = token_nll(logits_NV, targets_N[chunk], self.softmax)
                for output_N, values_K in zip(outputs, found, strict=True):
                    output_N[chunk] = values_K
        return outputs


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
def score_batch(scorer: ScoringModel, batch: Batch, device: torch.device) -> WindowScores:
    """Score a batch on a device; one forward, whatever is in it."""
    labels_BT = batch.labels_BT.to(device)
    nll_N, correct_N, *details = scorer(batch.tokens_BT.to(device), labels_BT)
    scores = window_scores(nll_N, correct_N, batch.labels_BT, len(batch.window_ids_B))
    return scores._replace(details_N=tuple(values_N.cpu().numpy() for values_N in details))


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
