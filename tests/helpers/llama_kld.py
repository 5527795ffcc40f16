"""What ``llama-perplexity --kl-divergence`` computes, in float64, from the logits of both models.

Written after ``log_softmax`` (both) and ``kl_divergence`` of llama.cpp's tools/perplexity/perplexity.cpp.
"""

from typing import Any

import numpy as np


def log_probabilities(logits_NV: np.ndarray) -> np.ndarray:
    """Plain log-softmax."""
    shifted = logits_NV - logits_NV.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def base_file(logits_NV: np.ndarray) -> np.ndarray:
    """The reference's log-probabilities as its base file gives them back: 65,536 levels over the 16 nats
    below the largest, and nothing put in the place of what is cut off."""
    largest = logits_NV.max(axis=1, keepdims=True)
    smallest = np.maximum(logits_NV.min(axis=1, keepdims=True), largest - 16)
    scale = (largest - smallest) / 65535
    levels = np.where(logits_NV > smallest, np.rint((logits_NV - smallest) / scale), 0)
    normaliser = np.log(np.exp(logits_NV - largest).sum(axis=1, keepdims=True))
    return np.asarray(scale * levels + (smallest - largest - normaliser))


def statistics(
    base_NV: np.ndarray, logits_NV: np.ndarray, targets_N: np.ndarray, cut: float = -16
) -> dict[str, Any]:
    """The printed figures.

    Args:
        base_NV: the reference's log-probabilities: of ``base_file`` or ``log_probabilities``.
        logits_NV: the model's logits.
        targets_N: the targets.
        cut: log-probability below which llama-perplexity leaves a token out of the KLD.
    """
    logp_NV = log_probabilities(logits_NV)
    kept = base_NV > cut
    p_NV = np.where(kept, np.exp(base_NV), 0.0)
    kld_N = (p_NV * np.where(kept, base_NV - logp_NV, 0.0)).sum(axis=1)
    rows = np.arange(len(targets_N))
    nll_N, base_N = -logp_NV[rows, targets_N], -base_NV[rows, targets_N]
    change_N = np.exp(-nll_N) - np.exp(-base_N)
    count = len(targets_N)
    return {
        "kld": kld_N,
        "change": change_N,
        "kl_mean": kld_N.mean(),
        "kl_stderr": np.sqrt((np.square(kld_N).mean() - kld_N.mean() ** 2) / (count - 1)),
        "ln_ratio": nll_N.mean() - base_N.mean(),
        "change_mean": change_N.mean(),
        "change_rms": np.sqrt(np.square(change_N).mean()),
        "same_top": (logp_NV.argmax(axis=1) == base_NV.argmax(axis=1)).mean(),
        "percentile": lambda values, q: np.percentile(values, q),
    }
