"""Windows side by side, as in the tables of quantisation papers."""

from dataclasses import dataclass

import numpy as np

from ppl_eval.protocols.base import IntArray, Located, Protocol, all_equal, ceil_div, tail_note


@dataclass(frozen=True)
class Disjoint(Protocol):
    """Windows side by side, as in the tables of the GPTQ and AWQ papers.

    Documents are joined by ``join`` and tokenised in one call; the stream is cut into W = floor(n/L) windows
    of L tokens. Scored: positions 1..L-1 of each. Denominator: scored tokens, W (L-1).

    BOS: the tokenizer's own, once, at the head of the stream. With ``each_window``, BOS goes before the L
    tokens of each window, and position 0 is scored too.

    Reference: ``llama_eval`` in ``llama.py`` of IST-DASLab/gptq; ``awq/entry.py`` of mit-han-lab/llm-awq. It
    averages window means, which is the same number, as all windows are equally long.

    Args:
        max_seq_len: L, tokens of a window.
        join: text between documents.
        keep_tail: score the n mod L tokens that are left too, in a shorter last window. The published tables
            drop them.
        bos: BOS policy.
        special_tokens: ``parse`` or ``text``, see ``Protocol``.

    Raises:
        ValueError: for a parameter out of range.
    """

    max_seq_len: int
    join: str = "\n\n"
    keep_tail: bool = False
    bos: str = "tokenizer"
    special_tokens: str = "parse"
    smallest_max_seq_len = 2

    def num_windows(self, length: IntArray) -> IntArray:
        """Count windows, the tail included where it is kept and has something to score."""
        # Without a prefix, a tail of one token has nothing to score.
        tail = self.keep_tail & (length % self.max_seq_len >= 2 - self.each_window)
        return length // self.max_seq_len + tail

    def locate(self, length: IntArray, index: IntArray) -> Located:
        """Locate windows side by side; the kept tail is shorter."""
        start = index * self.max_seq_len
        stop = np.minimum(start + self.max_seq_len, length)
        return start, start + 1 - self.each_window, stop, all_equal(index, self.each_window)

    def num_targets(self, length: IntArray) -> IntArray:
        """Count all tokens but the first of each window."""
        if not self.keep_tail:
            length = length - length % self.max_seq_len
        return length - (0 if self.each_window else ceil_div(length, self.max_seq_len))

    def notes(self, length: IntArray) -> list[str]:
        """Return how many tokens are dropped with the tail."""
        return [] if self.keep_tail else tail_note(length, self.max_seq_len)
