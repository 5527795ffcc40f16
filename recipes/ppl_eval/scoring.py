"""Hidden states and head to NLL per token: the head runs over scored rows only, in chunks, with log-softmax
in float32."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torchtune.modules import TransformerDecoder

from ppl_eval.batches import Batch
from ppl_eval.tokens import IGNORE_INDEX
from ppl_eval.totals import WindowScores


class ScoringModel(nn.Module):
    """A decoder and its head, scored in one forward, so that sharding, compilation and gradients-off wrap one
    call.

    Args:
        decoder: a torchtune decoder. Its ``unembed`` is replaced by the final norm alone: the logits of a
            whole batch never exist.
        max_logits_bytes: most memory that logits may take at once, all copies that scoring makes of them
            included.
    """

    def __init__(self, decoder: TransformerDecoder, max_logits_bytes: int) -> None:
        super().__init__()
        self.decoder = decoder
        self.max_logits_bytes = max_logits_bytes
        decoder.unembed = lambda hidden_BTD: decoder.norm(hidden_BTD)

    def forward(self, tokens_BT: torch.Tensor, labels_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Score a batch.

        Args:
            tokens_BT: inputs; int64.
            labels_BT: targets aligned with the inputs, -100 where nothing is scored; int64.

        Returns:
            ``nll_N`` (nats, float32) and ``correct_N`` (whether the target was the most likely token) of the
            scored targets, in row-major order.
        """
        hidden_BTD = self.decoder(tokens_BT)
        scored_BT = labels_BT != IGNORE_INDEX
        return self._score_rows(hidden_BTD[scored_BT], labels_BT[scored_BT])

    def _score_rows(
        self, hidden_ND: torch.Tensor, targets_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        vocab_size = self.decoder.tok_embeddings.num_embeddings
        rows = rows_per_chunk(vocab_size, hidden_ND.dtype, self.max_logits_bytes)
        softcap = getattr(self.decoder, "final_logit_softcap", None)
        nll_N = torch.empty(len(targets_N), dtype=torch.float32, device=hidden_ND.device)
        correct_N = torch.empty(len(targets_N), dtype=torch.bool, device=hidden_ND.device)
        for first in range(0, len(targets_N), rows):
            chunk = slice(first, first + rows)
            logits_NV = self.decoder.output(hidden_ND[chunk]).float()
            if softcap is not None:
                logits_NV = logits_NV.div_(softcap).tanh_().mul_(softcap)
            correct_N[chunk] = logits_NV.argmax(dim=-1) == targets_N[chunk]
            nll_N[chunk] = F.cross_entropy(logits_NV, targets_N[chunk], reduction="none")
        return nll_N, correct_N


def rows_per_chunk(vocab_size: int, dtype: torch.dtype, max_logits_bytes: int) -> int:
    """Scored rows that go through the head at once.

    A row's logits exist in the model's dtype, in float32 and as the float32 log-softmax, all at the same
    moment.

    Raises:
        ValueError: if not even one row fits.
    """
    bytes_per_row = vocab_size * (dtype.itemsize * (dtype != torch.float32) + 4 + 4)
    if bytes_per_row > max_logits_bytes:
        raise ValueError(
            f"max_logits_mib allows {max_logits_bytes / 2**20:g} MiB, but the logits of one token of this"
            f" vocabulary ({vocab_size}) take {bytes_per_row / 2**20:.2f} MiB; raise max_logits_mib"
        )
    return max_logits_bytes // bytes_per_row


def score_batch(scorer: ScoringModel, batch: Batch, device: torch.device) -> WindowScores:
    """Score a batch on a device; one forward, whatever is in it."""
    labels_BT = batch.labels_BT.to(device)
    nll_N, correct_N = scorer(batch.tokens_BT.to(device), labels_BT)
    return window_scores(nll_N, correct_N, batch.labels_BT, len(batch.window_ids_B))


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
    scored_BT = (labels_BT != IGNORE_INDEX).numpy()
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
