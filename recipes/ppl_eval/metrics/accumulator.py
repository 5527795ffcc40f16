"""What a rank adds up while it scores: sums of the run, its domains, its blocks and its position buckets.

Everything here is an exact integer sum, so ranks join theirs by adding one int64 vector.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ppl_eval.data.token_data import TokenData
from ppl_eval.metrics.comparison import ComparedBucket, ComparedSums
from ppl_eval.metrics.standard_error import Blocks
from ppl_eval.metrics.totals import Totals, WindowScores, join_value_limbs
from ppl_eval.metrics.window_records import WINDOW_SUMS, Records, bucket_width
from ppl_eval.protocols.base import IntArray
from ppl_eval.protocols.plan import Plan

AddVectors = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]


class PartSums:
    """Sums of a set of documents.

    Args:
        num_windows: windows of the set.
        document_starts: first window of each document that has one, counted inside the set.
        compared: whether the run has a reference.
    """

    def __init__(self, num_windows: int, document_starts: IntArray, compared: bool = False) -> None:
        self.totals = Totals()
        self.blocks = Blocks(num_windows, document_starts)
        self.compared = ComparedSums(num_windows, document_starts) if compared else None

    def add(self, records: Records, window_B: IntArray, weights_B: IntArray | None) -> None:
        """Add windows, by their number in the set."""
        nll_sum_B, nll_sq_sum_B, num_tokens_B, num_correct_B = (records[name] for name in WINDOW_SUMS)
        scores = WindowScores(
            nll_sum_B, nll_sq_sum_B, num_tokens_B, num_correct_B, num_excluded_B=records["num_excluded"]
        )
        self.totals.add(scores, weights_B)
        self.blocks.add(window_B, scores.nll_sum_B, scores.num_tokens_B)
        if self.compared is not None:
            self.compared.add(records, window_B)

    def pack(self) -> IntArray:
        """Return all sums as one int64 vector."""
        compared = [] if self.compared is None else [self.compared.pack()]
        return np.concatenate([self.totals.pack(), self.blocks.pack(), *compared])

    def unpack(self, vector: IntArray) -> None:
        """Take over a sum of ``pack`` vectors."""
        sizes = [len(self.totals.pack()), len(self.blocks.pack())]
        totals, blocks, compared = np.split(vector, np.cumsum(sizes))
        self.totals = Totals.unpack(totals)
        self.blocks.unpack(blocks)
        if self.compared is not None:
            self.compared.unpack(compared)


class Accumulator:
    """All sums of a rank.

    Args:
        plan: the plan.
        data: its tokens.
        num_position_buckets: in how many parts the positions of a window are summed apart; 0 for none.
        compared: whether the run has a reference.

    Attributes:
        run: sums of all windows.
        domains: sums of each domain, by name; empty if there is only one.
        positions: sums by how many tokens the model saw before a target: bucket i has the targets after
            i * width + 1 to (i + 1) * width of them.
        compared_positions: sums of the comparison by the same; empty without a reference.
        excluded_W: ids of the windows that were left out, ascending; int64. Of this rank, until ``reduce``
            and ``join_excluded`` have joined the ranks.
    """

    def __init__(
        self, plan: Plan, data: TokenData, num_position_buckets: int = 0, *, compared: bool = False
    ) -> None:
        self._plan, self._domain_D = plan, data.domain_D
        num_windows_D = plan.windows_per_document()
        with_windows = np.flatnonzero(num_windows_D)
        self.run = PartSums(plan.num_windows, plan.first_window_D1[with_windows], compared)
        self.domains: dict[str, PartSums] = {}
        if data.domain_D is not None and len(data.domains) > 1:
            domain_D = data.domain_D[: len(num_windows_D)]
            # First window of each document, counted inside its domain.
            self._start_D = np.zeros(len(num_windows_D), dtype=np.int64)
            for index, name in enumerate(data.domains):
                documents = np.flatnonzero(domain_D == index)
                stops = np.cumsum(num_windows_D[documents])
                self._start_D[documents] = stops - num_windows_D[documents]
                starts = self._start_D[documents[num_windows_D[documents] > 0]]
                num_windows = int(stops[-1]) if len(stops) else 0
                self.domains[name] = PartSums(num_windows, starts, compared)
        self.bucket_width = bucket_width(plan.protocol.max_seq_len, num_position_buckets)
        self.positions = [Totals() for _ in range(num_position_buckets)]
        self.compared_positions = [ComparedBucket() for _ in self.positions] if compared else []
        self.excluded_W: IntArray = np.zeros(0, dtype=np.int64)

    def add(self, records: Records) -> None:
        """Add scored windows."""
        window_ids_B = records["window_id"]
        windows = self._plan.locate(window_ids_B)
        weights_B = self._plan.protocol.window_weights(windows)
        self.run.add(records, window_ids_B, weights_B)
        self.run.totals.num_windows_in_parts += int(records["in_parts"].sum())
        excluded_B = records["num_excluded"] > 0
        hash_sums_B4 = records["scored_hash_sums"]
        self.run.totals.scored_hash_sums += hash_sums_B4[~excluded_B].sum(axis=0, dtype=np.uint64)
        self.run.totals.excluded_hash_sums += hash_sums_B4[excluded_B].sum(axis=0, dtype=np.uint64)
        if excluded_B.any():
            self.excluded_W = np.union1d(self.excluded_W, window_ids_B[excluded_B])
        if self.domains:
            assert self._domain_D is not None
            domain_B = self._domain_D[windows.document]
            inside_B = window_ids_B - self._plan.first_window_D1[windows.document]
            window_B = self._start_D[windows.document] + inside_B
            for index, domain in enumerate(self.domains.values()):
                here_B = domain_B == index
                if here_B.any():
                    part_B = None if weights_B is None else weights_B[here_B]
                    domain.add(records[here_B], window_B[here_B], part_B)
        for index, bucket in enumerate(self.positions):
            limbs = records["bucket_nll"][:, index].sum(axis=0, dtype=np.int64)
            bucket.nll_fixed += join_value_limbs(limbs.tolist())
            bucket.num_tokens += int(records["bucket_tokens"][:, index].sum())
            bucket.num_correct += int(records["bucket_correct"][:, index].sum())
            bucket.num_excluded_tokens += int(records["bucket_excluded"][:, index].sum())
        for index, compared in enumerate(self.compared_positions):
            compared.add(records, index)

    def reduce(self, add_over_ranks: AddVectors) -> None:
        """Replace this rank's sums by those of all ranks.

        Args:
            add_over_ranks: sums an int64 vector over ranks; called once.
        """
        parts: list[PartSums] = [self.run, *self.domains.values()]
        vectors = [part.pack() for part in parts]
        vectors += [bucket.pack() for bucket in self.positions]
        vectors += [bucket.pack() for bucket in self.compared_positions]
        joined = add_over_ranks(np.concatenate(vectors))
        cuts = np.cumsum([len(vector) for vector in vectors])[:-1]
        pieces = np.split(joined, cuts)
        for part, piece in zip(parts, pieces, strict=False):
            part.unpack(piece)
        pieces = pieces[len(parts) :]
        self.positions = [Totals.unpack(piece) for _, piece in zip(self.positions, pieces, strict=False)]
        for bucket, piece in zip(self.compared_positions, pieces[len(self.positions) :], strict=True):
            bucket.unpack(piece)

    def join_excluded(self, rank: int, world_size: int, add_over_ranks: AddVectors) -> None:
        """Replace the ids of this rank's excluded windows by those of all ranks; after ``reduce``.

        Where no rank has any, which ``reduce`` told all of them, nothing is sent.
        """
        num_excluded = self.run.totals.num_excluded_windows
        if not num_excluded:
            return
        counts_R = np.zeros(world_size, dtype=np.int64)
        counts_R[rank] = len(self.excluded_W)
        counts_R = add_over_ranks(counts_R)
        assert counts_R.sum() == num_excluded
        begin = int(counts_R[:rank].sum())
        ids_W = np.zeros(num_excluded, dtype=np.int64)
        ids_W[begin : begin + len(self.excluded_W)] = self.excluded_W
        self.excluded_W = np.sort(add_over_ranks(ids_W))

    def check_not_empty(self) -> None:
        """See that something was scored, and not all left out; after ``reduce``.

        Raises:
            ValueError: if nothing is left to divide by.
        """
        totals = self.run.totals
        weighted = self._plan.protocol.window_weights(self._plan.windows(0, 1)) is not None
        if totals.num_excluded_windows and (not totals.num_tokens or weighted > bool(totals.window_weights)):
            raise ValueError(
                f"nan is 'exclude', and nothing is left: the NLL of {totals.num_excluded_windows} of"
                f" {totals.num_excluded_windows + totals.num_windows} windows is not finite, those that are"
                " left have no tokens to score. Try dtype=fp32, and look for NaN in the checkpoint"
            )

    def check_coverage(self, expected_tokens: int, expected_windows: int) -> None:
        """See that exactly the targets of the plan were scored or left out, each once; after ``reduce``.

        Raises:
            RuntimeError: if not, which is a fault in this program.
        """
        totals = self.run.totals
        num_tokens = totals.num_tokens + totals.num_excluded_tokens
        num_windows = totals.num_windows + totals.num_excluded_windows
        hash_sums = totals.scored_hash_sums + totals.excluded_hash_sums
        same_number = (num_tokens, num_windows) == (expected_tokens, expected_windows)
        if not same_number or (hash_sums != totals.expected_hash_sums).any():
            raise RuntimeError(
                f"{num_tokens} tokens in {num_windows} windows were scored or excluded, but the plan has"
                f" {expected_tokens} in {expected_windows}{' others' if same_number else ''}: a fault in this"
                " program. No result was written"
            )
