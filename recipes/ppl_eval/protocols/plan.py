"""Windows to batches: a pure function of document lengths, protocol and batch size, never of the number of
ranks.

A batch is as wide as its longest window, so batches are made of windows of like length: of every group of
neighbouring windows, batches take the longest first. Groups rather than the whole run, so that any batch can
be told without a list of all windows.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ppl_eval.protocols.base import IntArray, Protocol, Windows

# Windows looked at together when the whole plan is walked: some MB of index arrays, however long the plan.
_CHUNK = 1 << 18
# Batches of a group: the more, the more alike the windows of a batch, and the longer the sort that finds one.
_BATCHES_OF_GROUP = 256


@dataclass(frozen=True)
class Plan:
    """Random access to the windows of a run: batch b holds those at the places [b * batch_size, (b + 1) *
    batch_size) of the order in which batches take windows.

    Attributes:
        protocol: where the windows of a document lie.
        length_D: tokens of each document.
        first_window_D1: id of each document's first window, and the number of all windows at the end; int64
            [D + 1].
        batch_size: windows of a batch; the last may be short.
        num_windows: windows of the run, after ``max_windows``.
    """

    protocol: Protocol
    length_D: IntArray
    first_window_D1: IntArray
    batch_size: int
    num_windows: int

    @property
    def num_batches(self) -> int:
        """Batches of the run."""
        return -(-self.num_windows // self.batch_size)

    @property
    def is_whole(self) -> bool:
        """Whether every window of every document is in the run."""
        return self.num_windows == int(self.first_window_D1[-1])

    def windows_per_document(self) -> IntArray:
        """Windows of the run in each document, up to the last document that has one; int64."""
        last = int(np.searchsorted(self.first_window_D1, self.num_windows, side="left"))
        return np.diff(np.minimum(self.first_window_D1[: last + 1], self.num_windows))

    def windows(self, first: int, last: int) -> Windows:
        """The windows with ids [first, last)."""
        assert 0 <= first <= last <= self.num_windows, (first, last, self.num_windows)
        return self.locate(np.arange(first, last, dtype=np.int64))

    def locate(self, window_id: IntArray) -> Windows:
        """The windows with these ids."""
        document = np.searchsorted(self.first_window_D1, window_id, side="right").astype(np.int64) - 1
        start, score_start, stop, prefix = self.protocol.locate(
            self.length_D[document], window_id - self.first_window_D1[document]
        )
        return Windows(document, start, score_start, stop, prefix)

    def batch_ids(self, batch: int) -> IntArray:
        """The ids of the windows of one batch."""
        first = batch * self.batch_size
        return self.ids(first, min(first + self.batch_size, self.num_windows))

    def ids(self, first: int, last: int) -> IntArray:
        """The ids of the windows at the places [first, last) of the order in which batches take them."""
        assert 0 <= first <= last <= self.num_windows, (first, last, self.num_windows)
        if self.batch_size == 1:
            return np.arange(first, last, dtype=np.int64)
        begin, end = self._groups(first, last)
        window_ids = np.arange(begin, end, dtype=np.int64)
        # Stable: windows of one length stay in their order.
        order = np.lexsort((-self.locate(window_ids).num_inputs, window_ids // self._group_size))
        return window_ids[order[first - begin : last - begin]]

    def places(self, window_id: IntArray) -> IntArray:
        """The places of windows, by their ids, in the order in which batches take them."""
        if self.batch_size == 1 or not len(window_id):
            return window_id
        places = np.empty_like(window_id)
        step = max(1, _CHUNK // self._group_size) * self._group_size
        for chunk in np.unique(window_id // step):
            first, last = int(chunk) * step, min((int(chunk) + 1) * step, self.num_windows)
            place_of = np.empty(last - first, dtype=np.int64)
            place_of[self.ids(first, last) - first] = np.arange(first, last)
            here = (window_id >= first) & (window_id < last)
            places[here] = place_of[window_id[here] - first]
        return places

    @property
    def _group_size(self) -> int:
        return self.batch_size * _BATCHES_OF_GROUP

    def _groups(self, first: int, last: int) -> tuple[int, int]:
        size = self._group_size
        return first // size * size, min(-(-last // size) * size, self.num_windows)

    def notes(self) -> list[str]:
        """What a reader of the result must know about windows, tails and samples that are left out."""
        if not self.is_whole:
            in_all = int(self.first_window_D1[-1])
            return [f"max_windows: only the first {self.num_windows} of {in_all} windows are scored"]
        return self.protocol.notes(self.length_D)

    def expected_targets(self) -> int:
        """Targets that the plan says must be scored, before any label mask.

        From the protocol's closed formula, which does not look at windows, for the documents that are whole
        in the run; a document cut by ``max_windows`` is counted window by window.
        """
        cut = int(np.searchsorted(self.first_window_D1, self.num_windows, side="right")) - 1
        whole = int(self.protocol.num_targets(self.length_D[:cut]).sum(dtype=np.int64))
        first, last = int(self.first_window_D1[cut]), self.num_windows
        return whole + sum(
            int(self.windows(start, min(start + _CHUNK, last)).num_targets.sum())
            for start in range(first, last, _CHUNK)
        )

    def targets_at(self, first: int, last: int) -> int:
        """Targets of the windows at the places [first, last), before any label mask, counted one by one."""
        return sum(
            int(self.locate(self.ids(start, min(start + _CHUNK, last))).num_targets.sum())
            for start in range(first, last, _CHUNK)
        )


def make_plan(
    protocol: Protocol, offsets_D1: npt.NDArray[np.int64], batch_size: int, max_windows: int | None = None
) -> Plan:
    """Lay out the windows of all documents.

    Args:
        protocol: how a document becomes windows.
        offsets_D1: where each document starts in the token stream, and where the last one ends; int64 [D +
            1].
        batch_size: windows of a batch.
        max_windows: keep only the first so many windows; None keeps all.

    Example:
        A document of 11 tokens in windows of 4, of which each scores all but its first token:

        >>> from ppl_eval.protocols import disjoint
        >>> plan = make_plan(disjoint(4, keep_tail=True), np.array([0, 11]), batch_size=2)
        >>> windows = plan.windows(0, plan.num_windows)
        >>> windows.score_start.tolist(), windows.stop.tolist()
        ([1, 5, 9], [4, 8, 11])
        >>> plan.num_batches, plan.expected_targets()
        (2, 8)

    Raises:
        ValueError: if no document has a window.
    """
    length_D = np.diff(offsets_D1)
    first_window_D1 = np.zeros(len(length_D) + 1, dtype=np.int64)
    np.cumsum(protocol.num_windows(length_D), out=first_window_D1[1:])
    num_windows = int(first_window_D1[-1])
    if num_windows == 0:
        longest = int(length_D.max(initial=0))
        raise ValueError(
            f"the text has {int(offsets_D1[-1])} tokens (longest document: {longest}), not enough for one"
            f" window of the protocol {protocol.name} with {protocol.parameters}; use a smaller"
            " protocol.max_seq_len, protocol.keep_tail=true where the protocol has it, or more text"
        )
    if max_windows is not None:
        num_windows = min(num_windows, max_windows)
    return Plan(protocol, length_D, first_window_D1, batch_size, num_windows)
