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
        scores = WindowScores(nll_sum_B, nll_sq_sum_B, num_tokens_B, num_correct_B)
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

    def add(self, records: Records) -> None:
        """Add scored windows."""
        window_ids_B = records["window_id"]
        windows = self._plan.locate(window_ids_B)
        weights_B = self._plan.protocol.window_weights(windows)
        self.run.add(records, window_ids_B, weights_B)
        self.run.totals.scored_hash_sums += records["scored_hash_sums"].sum(axis=0, dtype=np.uint64)
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
        for index, compared in enumerate(self.compared_positions):
            compared.add(records, index)

    def reduce(self, add_over_ranks: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]) -> None:
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

    def check_coverage(self, expected_tokens: int, expected_windows: int) -> None:
        """See that exactly the targets of the plan were scored, each once; after ``reduce``.

        Raises:
            RuntimeError: if not, which is a fault in this program.
        """
        totals = self.run.totals
        same_number = (totals.num_tokens, totals.num_windows) == (expected_tokens, expected_windows)
        if not same_number or (totals.scored_hash_sums != totals.expected_hash_sums).any():
            raise RuntimeError(
                f"{totals.num_tokens} tokens in {totals.num_windows} windows were scored, but the plan has"
                f" {expected_tokens} in {expected_windows}{' others' if same_number else ''}: a fault in this"
                " program. No result was written"
            )
