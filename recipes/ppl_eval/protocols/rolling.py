"""Every token of every document once, as in lm-evaluation-harness."""

from dataclasses import dataclass

import numpy as np

from ppl_eval.protocols.base import IntArray, Located, Protocol, ceil_div, check_whole_number


@dataclass(frozen=True)
class Rolling(Protocol):
    """Every token of every document once, as lm-evaluation-harness scores ``loglikelihood_rolling`` tasks.

    Per document, with the prefix token p: window 0 sees p, x0..x(L-2) and scores x0..x(L-1); each later
    window scores the next w = min(P, remaining) tokens, P = L - ``context_len`` + 1, which end before
    position e, and sees x(e-L-1)..x(e-2). So the short last window has more context. Scored: all n tokens.
    Denominators: tokens, and for ``word_perplexity``, ``byte_perplexity`` and ``bits_per_byte`` the words and
    bytes of the original text.

    BOS: none in the tokens; p is BOS, or EOS where the tokenizer has no BOS. With ``each_window``, p also
    takes the place of the first token that each later window sees. (lm-eval's ``hf`` model leaves BOS in the
    tokens to the tokenizer: one that adds BOS then has it twice, unless lm-eval runs with
    ``add_bos_token=False``. Double BOS is refused here.)

    Reference: ``get_rolling_token_windows`` and ``make_disjoint_window`` in ``lm_eval/utils.py``, which the
    tests hold this closed form against; ``HFLM.loglikelihood_rolling`` calls them with ``context_len`` 1.

    Args:
        max_seq_len: L, most tokens that the model sees at once.
        context_len: fewest context tokens of a later window, from 1 to L.
        bos: BOS policy.
        special_tokens: ``parse`` or ``text``, see ``Protocol``.

    Raises:
        ValueError: for a parameter out of range.
    """

    max_seq_len: int
    context_len: int = 1
    bos: str = "never"
    special_tokens: str = "parse"
    prefix_rule = "bos_or_eos"

    def __post_init__(self) -> None:
        """Check the parameters."""
        super().__post_init__()
        check_whole_number("context_len", self.context_len, 1, self.max_seq_len)

    @property
    def _step(self) -> int:
        # P, the most tokens that a later window scores.
        return self.max_seq_len - self.context_len + 1

    def num_windows(self, length: IntArray) -> IntArray:
        """Count the first window and those that the rest is cut into."""
        return (length > 0) + ceil_div(np.maximum(length - self.max_seq_len, 0), self._step)

    def locate(self, length: IntArray, index: IntArray) -> Located:
        """Locate windows by what they score; each but the first reaches back as far as it may."""
        first = index == 0
        score_start = np.where(first, 0, self.max_seq_len + (index - 1) * self._step)
        stop = np.minimum(self.max_seq_len + index * self._step, length)
        start = np.where(first, 0, stop - self.max_seq_len - 1 + self.each_window)
        return start, score_start, stop, first | self.each_window

    def num_targets(self, length: IntArray) -> IntArray:
        """Count all tokens."""
        return length
