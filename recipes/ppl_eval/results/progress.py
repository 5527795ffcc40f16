"""What a person sees while a long evaluation runs: a bar on a terminal, plain lines elsewhere; rank 0
only."""

import sys
import time
from collections.abc import Callable
from typing import TextIO

from tqdm import tqdm

from ppl_eval.metrics.totals import Totals
from ppl_eval.protocols.base import exp_or_infinity

_LINE_EVERY_SECONDS = 10.0


class Progress:
    """Tokens done, running perplexity, tokens/s and time left, of this rank's share.

    Ranks do not exchange anything while they score, so rank 0 shows its own share; the others are done about
    when it is.

    Args:
        expected_tokens: targets of the whole run.
        dp_degree: data-parallel degree.
        enabled: False on all ranks but one.
        stream: where to show it; None is stderr.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        expected_tokens: int,
        dp_degree: int,
        enabled: bool,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.expected_tokens, self.enabled = expected_tokens, enabled
        self.stream = stream = stream or sys.stderr
        self._share = "" if dp_degree == 1 else f" (rank 0 of {dp_degree})"
        self._clock = clock
        self._begin = self._last_line = clock()
        self._bar = None
        if enabled and stream.isatty():
            self._bar = tqdm(
                total=expected_tokens // dp_degree,
                unit=" tokens",
                unit_scale=True,
                desc=f"scoring{self._share}",
                file=stream,
            )

    def update(self, totals: Totals, share: float) -> None:
        """Show where this rank is.

        Args:
            totals: its totals so far.
            share: which part of the run it scores, as far as it is known by now.
        """
        if not self.enabled or not totals.num_tokens:
            return
        expected_tokens = max(totals.num_tokens, round(self.expected_tokens * share))
        perplexity = f"{exp_or_infinity(totals.ce_loss()):.4f}"
        if self._bar is not None:
            self._bar.set_postfix_str(f"perplexity {perplexity}", refresh=False)
            self._bar.total = expected_tokens
            self._bar.update(totals.num_tokens - self._bar.n)
            return
        now = self._clock()
        if now - self._last_line >= _LINE_EVERY_SECONDS:
            self._last_line = now
            speed = totals.num_tokens / (now - self._begin)
            left = (expected_tokens - totals.num_tokens) / speed
            print(
                f"scored {totals.num_tokens:,} of {expected_tokens:,} tokens{self._share}, perplexity so"
                f" far {perplexity}, {speed:,.0f} tokens/s, {left:,.0f} s left",
                file=self.stream,
                flush=True,
            )

    def close(self) -> None:
        """Leave the terminal as it should be."""
        if self._bar is not None:
            self._bar.close()
