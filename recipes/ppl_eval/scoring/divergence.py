"""How far the next-token distribution of a model is from that of a reference, from the logits of both.

With logits a of the reference P and b of the model Q, their largest m and n, and y_v = (a_v - m) - (b_v - n),

    KL(P || Q) = sum over v of p_v (ln p_v - ln q_v) = E_P[e^-y - 1 + y] + ln(1 + r) - r,  r = E_P[e^-y - 1].

Terms of that sum are never negative and of second order in y, where those of the definition are of first
order and cancel: two models that differ in the third digit of their logits have a KL of 1e-6, which float32
would lose. Differences of close logits are exact. A token that the model rules out (a logit of minus
infinity) and the reference does not makes the KL infinite.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

from ppl_eval.scoring.token_details import count_above, first_largest, row_groups, sum_rows

# Sums of a row, in this order: e^(a-m), e^(b-n), then twice (of P, then of Q) the sum of e^-y - 1 and of
# e^-y - 1 + y; and how many tokens the model places before the reference's most likely one.
_NUM_SUMS = 7


class Divergence(NamedTuple):
    """What is found for each row.

    Attributes:
        kl_N: KL(reference || model), nats; float32.
        reverse_kl_N: KL(model || reference), nats; float32.
        top_rank_N: rank under the model of the reference's most likely token, 1 where both agree; of equal
            ones the lower id comes first, as in argmax; int64.
    """

    kl_N: torch.Tensor
    reverse_kl_N: torch.Tensor
    top_rank_N: torch.Tensor


def compare_logits(
    reference_NV: torch.Tensor,
    logits_NV: torch.Tensor,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
) -> Divergence:
    """Compare two models' distributions over the whole vocabulary, row by row.

    Beside the logits a few rows of them exist at a time, and one number a row of each sum.

    Args:
        reference_NV: the reference's logits, float32; with a group this rank's columns of the vocabulary.
        logits_NV: the model's, likewise. Neither is changed.
        vocab_start: first token of this rank's columns.
        group: the ranks over which the vocabulary is split; they communicate twice, a few numbers a row.

    Returns:
        The same on every rank of the group. NaN where one of the logits is NaN.
    """
    max_2N, top_N, value_N = _tops(reference_NV, logits_NV, vocab_start, group)
    sums_N7 = reference_NV.new_empty(len(reference_NV), _NUM_SUMS, dtype=torch.float64)
    for rows in row_groups(logits_NV):
        found_6K = _partial_sums(reference_NV[rows], logits_NV[rows], max_2N[:, rows])
        lost_K = found_6K.isnan().any(dim=0)
        if lost_K.any():
            # Infinite differences of tokens that have no probability.
            reference_LV, logits_LV = reference_NV[rows][lost_K], logits_NV[rows][lost_K]
            max_2L = max_2N[:, rows][:, lost_K]
            found_6K[:, lost_K] = _partial_sums(reference_LV, logits_LV, max_2L, infinite=True)
        sums_N7[rows, :6] = found_6K.T.double()
    sums_N7[max_2N.isnan().any(dim=0), :6] = torch.nan
    sums_N7[:, 6] = count_above(logits_NV, value_N, top_N - vocab_start)
    if group is not None:
        dist.all_reduce(sums_N7, group=group)
    mass_N, other_mass_N, first_N, second_N, other_first_N, other_second_N, above_N = sums_N7.unbind(dim=1)
    return Divergence(
        _divergence(mass_N, first_N, second_N),
        _divergence(other_mass_N, other_first_N, other_second_N),
        1 + above_N.long(),
    )


def _divergence(mass_N: torch.Tensor, first_N: torch.Tensor, second_N: torch.Tensor) -> torch.Tensor:
    r_N = first_N / mass_N
    # Rounding may leave less than nothing.
    return (second_N / mass_N + (r_N.log1p() - r_N)).clamp_min(0.0).float()


def _tops(
    reference_NV: torch.Tensor, logits_NV: torch.Tensor, vocab_start: int, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the largest logit of each row of both (2, N), the reference's most likely token (of equals the
    first), and the model's logit of it."""
    top_N1 = first_largest(reference_NV)[:, None]
    found_N4 = torch.cat(
        [
            reference_NV.amax(dim=1, keepdim=True).double(),
            logits_NV.amax(dim=1, keepdim=True).double(),
            (vocab_start + top_N1).double(),
            logits_NV.gather(1, top_N1).double(),
        ],
        dim=1,
    )
    if group is not None:
        # One message instead of three that depend on each other. Ranks have their columns in order, so the
        # first of equals is the first token.
        parts_RN4 = found_N4.new_empty(group.size(), *found_N4.shape)
        dist.all_gather(list(parts_RN4), found_N4, group=group)
        first_N = parts_RN4[:, :, 0].argmax(dim=0)
        found_N4 = parts_RN4[first_N, torch.arange(len(first_N), device=first_N.device)]
        found_N4[:, 1] = parts_RN4[:, :, 1].amax(dim=0)
    kind = logits_NV.dtype
    return found_N4[:, :2].T.to(kind), found_N4[:, 2].long(), found_N4[:, 3].to(kind)


def _partial_sums(
    reference_KV: torch.Tensor, logits_KV: torch.Tensor, max_2K: torch.Tensor, *, infinite: bool = False
) -> torch.Tensor:
    """Return the first six sums over the columns here; float32 (6, K).

    Args:
        reference_KV: the reference's logits.
        logits_KV: the model's.
        max_2K: the largest of each row of both, over the whole vocabulary.
        infinite: expect logits of minus infinity.
    """
    y_KV = reference_KV - max_2K[0, :, None]
    other_KV = logits_KV - max_2K[1, :, None]
    p_KV, q_KV = y_KV.exp(), other_KV.exp()
    y_KV.sub_(other_KV)
    if infinite:
        y_KV.nan_to_num_(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    del other_KV
    sums = [sum_rows(p_KV), sum_rows(q_KV)]
    for own_KV, others_KV, sign in ((p_KV, q_KV, 1.0), (q_KV, p_KV, -1.0)):
        # e^-y is out of range where the other model is far surer of a token; there nothing cancels.
        far_KV = y_KV < -1 if sign > 0 else y_KV > 1
        change_KV = torch.special.expm1(y_KV * -sign).mul_(own_KV)
        change_KV = torch.where(far_KV, others_KV - own_KV, change_KV)
        linear_KV = own_KV * y_KV
        if infinite:
            linear_KV.nan_to_num_(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
        sums += [sum_rows(change_KV), sum_rows(linear_KV.mul_(sign).add_(change_KV))]
    return torch.stack(sums)
