"""Hidden states and head to NLL per token: the head runs over scored rows only, in chunks, with log-softmax
in float32."""

from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX
from torchtune.modules import TransformerDecoder

from ppl_eval.config import activity
from ppl_eval.metrics.totals import WindowScores
from ppl_eval.parallel import context_parallel, tensor_parallel
from ppl_eval.parallel import fsdp as sharding
from ppl_eval.protocols.batches import Batch


class Softmax(NamedTuple):
    """How NLL is computed from logits, and over which ranks the vocabulary is split.

    Attributes:
        rule: ``exact`` or ``torch``; see ``token_nll``.
        vocab_start: first token of this rank's columns.
        group: the ranks over which the vocabulary is split; None if each has all of it.
    """

    rule: str = "exact"
    vocab_start: int = 0
    group: dist.ProcessGroup | None = None


EXACT = Softmax()


def token_nll(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, softmax: Softmax = EXACT
) -> tuple[torch.Tensor, torch.Tensor]:
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
            sums in one. A NaN in any part makes the row's NLL NaN.

    Returns:
        ``nll_N`` (nats, float32) and ``correct_N`` (whether the target is the most likely token; of equals,
        as in argmax, the first); the same on every rank of the group.
    """
    if softmax.group is not None:
        return _split_nll(logits_NV, targets_N, softmax.vocab_start, softmax.group)
    max_N = logits_NV.amax(dim=-1)
    target_N = logits_NV.gather(1, targets_N[:, None]).squeeze(1)
    # As `argmax == target`, in the time of a maximum: only rows whose target ties for it need a search.
    correct_N = target_N == max_N
    rows = correct_N.nonzero().squeeze(1)
    correct_N[rows] = logits_NV[rows].argmax(dim=-1) == targets_N[rows]
    if softmax.rule == "torch":
        return F.cross_entropy(logits_NV, targets_N, reduction="none"), correct_N
    return _sum_of_exp(logits_NV, max_N).log() + (max_N - target_N), correct_N


def _sum_of_exp(logits_NV: torch.Tensor, max_N: torch.Tensor) -> torch.Tensor:
    exp_NV = logits_NV.sub_(max_N[:, None]).exp_()
    if len(exp_NV) == 1:
        # torch divides the sum of a single row among its threads, and its bits depend on their number.
        return torch.cat([exp_NV, exp_NV]).sum(dim=1)[:1]
    return exp_NV.sum(dim=1)


def _split_nll(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, vocab_start: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``exact`` NLL where each rank of a group has some columns of the vocabulary."""
    column_N1 = (targets_N - vocab_start)[:, None]
    num_columns = logits_NV.shape[1]
    elsewhere_N1 = (column_N1 < 0) | (column_N1 >= num_columns)
    max_N1 = logits_NV.amax(dim=1, keepdim=True)
    dist.all_reduce(max_N1, dist.ReduceOp.MAX, group=group)

    target_N1 = logits_NV.gather(1, column_N1.clamp(0, num_columns - 1)).masked_fill(elsewhere_N1, 0.0)
    column_V = torch.arange(num_columns, device=logits_NV.device)
    earlier_N1 = ((logits_NV == max_N1) & (column_V < column_N1)).any(dim=1, keepdim=True)
    max_N = max_N1.squeeze(1)
    exp_sum_N1 = _sum_of_exp(logits_NV, max_N)[:, None]
    sums_N3 = torch.cat([exp_sum_N1, target_N1, earlier_N1.to(logits_NV.dtype)], dim=1)
    dist.all_reduce(sums_N3, group=group)
    exp_sum_N, target_N, earlier_N = sums_N3.unbind(dim=1)
    return exp_sum_N.log() + (max_N - target_N), (target_N == max_N) & (earlier_N == 0)


class ScoringModel(nn.Module):
    """A decoder and its head, scored in one forward, so that sharding, compilation and gradients-off wrap one
    call.

    Args:
        decoder: a torchtune decoder. Its ``unembed`` is replaced by the final norm alone: the logits of a
            whole batch never exist.
        max_logits_bytes: most memory that logits may take at once, all copies that scoring makes of them
            included.
        softmax: ``exact`` or ``torch``; see ``token_nll``.
        vocab_group: the ranks over which the head's rows are split (``tensor_parallel.split_model``); None if
            each rank has them all.
        sequence_group: the ranks over which sequences are split (``context_parallel.split_attention``); None
            if they are not.
    """

    def __init__(
        self,
        decoder: TransformerDecoder,
        max_logits_bytes: int,
        *,
        softmax: str = "exact",
        vocab_group: dist.ProcessGroup | None = None,
        sequence_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.decoder = decoder
        self.sequence_group = sequence_group
        vocab_columns, vocab_start = decoder.tok_embeddings.num_embeddings, 0
        if vocab_group is not None:
            size, rank = vocab_group.size(), vocab_group.rank()
            vocab_start, _ = tensor_parallel.bounds(vocab_columns, size, rank)
            # The same on all ranks, though parts differ by one: they must cut the rows into the same chunks.
            vocab_columns = -(-vocab_columns // size)
        self.softmax = Softmax(softmax, vocab_start, vocab_group)
        self.rows_per_chunk = rows_per_chunk(
            vocab_columns, decoder.tok_embeddings.weight.dtype, max_logits_bytes, softmax
        )
        decoder.unembed = lambda hidden_BTD: decoder.norm(hidden_BTD)

    def forward(self, tokens_BT: torch.Tensor, labels_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Score a batch.

        Args:
            tokens_BT: inputs; int64.
            labels_BT: targets aligned with the inputs, -100 where nothing is scored; int64.

        Returns:
            ``nll_N`` (nats, float32) and ``correct_N`` (whether the target was the most likely token) of the
            scored targets, in row-major order; the same on all ranks that score the batch together.
        """
        scored_BT = labels_BT != CROSS_ENTROPY_IGNORE_IDX
        if self.sequence_group is None:
            return self._score_hidden(self.decoder(tokens_BT)[scored_BT], labels_BT[scored_BT])
        part = context_parallel.Part(tokens_BT.shape[1], self.sequence_group, tokens_BT.device)
        part_tokens_BT, part_labels_BT, input_pos = part.take(tokens_BT, labels_BT)
        part_scored_BT = part_labels_BT != CROSS_ENTROPY_IGNORE_IDX
        context_parallel.announce_length(self.decoder, part.num_positions)
        hidden_BTD = self.decoder(part_tokens_BT, input_pos=input_pos)
        nll_N, correct_N = self._score_hidden(hidden_BTD[part_scored_BT], part_labels_BT[part_scored_BT])
        values_2BT = nll_N.new_zeros(2, *part_labels_BT.shape)
        values_2BT[:, part_scored_BT] = torch.stack([nll_N, correct_N.float()])
        nll_BT, correct_BT = part.join(values_2BT)
        return nll_BT[scored_BT], correct_BT[scored_BT] > 0

    def _score_hidden(
        self, hidden_ND: torch.Tensor, targets_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        softcap = getattr(self.decoder, "final_logit_softcap", None)
        nll_N = torch.empty(len(targets_N), dtype=torch.float32, device=hidden_ND.device)
        correct_N = torch.empty(len(targets_N), dtype=torch.bool, device=hidden_ND.device)
        with sharding.whole_head(self.decoder):
            for first in range(0, len(targets_N), self.rows_per_chunk):
                activity.tick()
                chunk = slice(first, first + self.rows_per_chunk)
                logits_NV = self.decoder.output(hidden_ND[chunk]).float()
                if softcap is not None:
                    logits_NV = logits_NV.div_(softcap).tanh_().mul_(softcap)
                nll_N[chunk], correct_N[chunk] = token_nll(logits_NV, targets_N[chunk], self.softmax)
        return nll_N, correct_N


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
    nll_N, correct_N = scorer(batch.tokens_BT.to(device), labels_BT)
    return window_scores(nll_N, correct_N, batch.labels_BT, len(batch.window_ids_B))


def check_finite(batch: Batch, scores: WindowScores, where: str) -> None:
    """Refuse a batch whose NLL is NaN or infinite, and say which window it is.

    Args:
        batch: the batch.
        scores: what it scored.
        where: this process, for the message.

    Raises:
        ValueError: names the window, its document and its place in it.
    """
    bad_B = ~np.isfinite(scores.nll_sum_B)
    if bad_B.any():
        bad = int(np.flatnonzero(bad_B)[0])
        raise ValueError(
            f"window {batch.window_ids_B[bad]} (document {batch.document_B[bad]}, from its token"
            f" {batch.start_B[bad]}) has NLL {scores.nll_sum_B[bad]} on {where}: the model gives no finite"
            " probability there. Try dtype=fp32, and look for NaN in the checkpoint"
        )


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
