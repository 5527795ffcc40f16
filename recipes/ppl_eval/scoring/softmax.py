"""NLL from logits, row by row, by one of two rules of softmax."""

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

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
