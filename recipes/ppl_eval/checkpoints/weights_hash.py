"""What the scored weights are: a hash of the bytes that ranks read, taken while they load them.

A tensor is cut along its first dimension into blocks of whole rows. A block's hash (xxHash3, 128 bits) covers
the tensor's name, dtype and shape under torchtune's names, the block's place, and its bytes before they are
cast to the run's dtype; the model's hash is the sum of its blocks' modulo 2^128. The order of reading, and
who reads which part, do not matter, so a sharded model has the hash of a whole one. It guards against
mistakes and decay, not against attackers.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from ppl_eval.checkpoints.quantized_tensors import plain_tensors

# A rank reads up to one block more than its share at each end of a tensor, so blocks are small.
BLOCK_BYTES = 256 * 1024
MODULUS = 1 << 128

Sums = tuple[int, int]


class WeightsHash:
    """The hash of what one rank loads.

    Attributes:
        part: which part of the model the rank keeps; ranks with equal parts read the same rows.
        read: sum over all blocks in which the rank keeps a row.
        counted: sum over those that this rank counts, so that every block is counted by one rank of each
            copy of the model.
    """

    def __init__(self) -> None:
        self.part = 0
        self.read = self.counted = 0
        self._threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self._threads, "hash") if self._threads > 1 else None

    @contextmanager
    def reading(
        self, name: str, tensor: torch.Tensor, rows: tuple[int, int] | None = None, *, counted: bool = True
    ) -> Iterator[None]:
        """Hash a tensor in threads, beside what the block does with it.

        Args:
            name: torchtune's name of the weight.
            tensor: all of it, as the checkpoint holds it; its quantised parts are hashed one by one.
            rows: [first, last) of the rows that this rank keeps; None for all.
            counted: whether this rank counts the blocks that begin in its rows.
        """
        tasks = [
            task
            for index, part in enumerate(plain_tensors(tensor))
            for task in self._tasks(f"{name}/{index}", part, rows, counted)
        ]
        futures: list[Future[Sums]] = (
            [self._pool.submit(_sums, *task) for task in tasks] if self._pool else []
        )
        yield
        for read, own in [future.result() for future in futures] or [_sums(*task) for task in tasks]:
            self.read = (self.read + read) % MODULUS
            self.counted = (self.counted + own) % MODULUS

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def row(self) -> npt.NDArray[np.int64]:
        """Return the part and both sums as int64 [5], for the other ranks."""
        words = [n >> shift & (2**64 - 1) for n in (self.read, self.counted) for shift in (64, 0)]
        return np.array([self.part, *words], dtype=np.uint64).view(np.int64)

    def _tasks(
        self, name: str, tensor: torch.Tensor, rows: tuple[int, int] | None, counted: bool
    ) -> list[tuple[Any, ...]]:
        """Divide the blocks of a tensor among the threads."""
        table = tensor.reshape(1) if tensor.dim() == 0 else tensor.detach()
        first, last = rows or (0, table.shape[0])
        if first >= last or table.numel() == 0:
            return []
        rows_of_block = max(1, BLOCK_BYTES // (table[0].numel() * table.element_size()))
        begin, end = first // rows_of_block, -(-last // rows_of_block)
        step = max(1, -(-(end - begin) // self._threads))
        header = f"{name} {tensor.dtype} {list(tensor.shape)} "
        # A block is counted by whoever keeps its first row.
        owned = (first, last) if counted else (0, 0)
        return [
            (header, table, range(i, min(i + step, end)), rows_of_block, owned)
            for i in range(begin, end, step)
        ]


def _sums(
    header: str, table: torch.Tensor, blocks: range, rows_of_block: int, owned: tuple[int, int]
) -> Sums:
    """Hash some blocks of a tensor; return the sum over all, and over those that begin in ``owned``."""
    whole = _bytes(table) if table.is_contiguous() else None
    read = counted = 0
    for block in blocks:
        first, last = block * rows_of_block, (block + 1) * rows_of_block
        found = xxhash.xxh3_128(f"{header}{first}".encode())
        found.update(_bytes(table[first:last].contiguous()) if whole is None else whole[first:last])
        read += found.intdigest()
        counted += found.intdigest() if owned[0] <= first < owned[1] else 0
    return read, counted


def _bytes(table: torch.Tensor) -> Any:
    return table.cpu().reshape(-1).view(torch.uint8).reshape(table.shape[0], -1).numpy()
