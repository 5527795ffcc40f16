"""Proof that every target was scored once: a hash of a set that does not depend on who scored what, or when.

Each (document, position) pair is hashed to four 64-bit numbers, and the hash of a set is their sum modulo
2^64 (a multiset hash after Bellare and Micciancio, "A new paradigm for collision-free hashing", 1997). Sums
over disjoint parts add up, so every rank hashes what it scored and one integer reduction joins them; a target
missed or scored twice changes the sum. It guards against mistakes, not attackers.
"""

import hashlib

import numpy as np
import numpy.typing as npt

from ppl_eval.protocols.base import IntArray

NUM_HASH_SUMS = 4
# splitmix64 (Steele, Lea and Flood, 2014): its increment and the two multipliers of its finaliser.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)

HashSums = npt.NDArray[np.uint64]


def mix64(x: HashSums) -> HashSums:
    """Scramble 64-bit numbers, one to one (splitmix64's finaliser)."""
    x = (x ^ (x >> _S30)) * _M1
    x = (x ^ (x >> _S27)) * _M2
    return x ^ (x >> _S31)


def hashes(document_N: IntArray, position_N: IntArray) -> HashSums:
    """Hash (document, position) pairs one by one: uint64 [N, NUM_HASH_SUMS]."""
    found = np.empty((len(document_N), NUM_HASH_SUMS), dtype=np.uint64)
    for i in range(NUM_HASH_SUMS):
        seed = mix64(np.full(1, i + 1, dtype=np.uint64) * _GOLDEN)
        document_hash = mix64(document_N.astype(np.uint64) + seed)
        found[:, i] = mix64(document_hash + position_N.astype(np.uint64) * _GOLDEN)
    return found


def hash_sums(document_N: IntArray, position_N: IntArray) -> HashSums:
    """Hash the set of (document, position) pairs: uint64 [NUM_HASH_SUMS], to be added modulo 2^64."""
    return hashes(document_N, position_N).sum(axis=0, dtype=np.uint64)


def digest(sums: HashSums, num_tokens: int) -> str:
    """Return the set's sha256 for the result: over the four sums and the number of pairs, little endian."""
    return hashlib.sha256(sums.astype("<u8").tobytes() + int(num_tokens).to_bytes(8, "little")).hexdigest()
