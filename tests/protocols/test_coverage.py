"""The set hash of scored targets: what it must see, and that ranks' shares of it add up."""

import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from helpers.windows import counted_tokens
from ppl_eval import protocols
from ppl_eval.protocols.batches import expected_hash_sums, scored_hash_sums
from ppl_eval.protocols.coverage import digest, hash_sums
from ppl_eval.protocols.plan import make_plan


def hash_of(pairs) -> list[int]:
    document, position = (np.array(column, dtype=np.int64) for column in zip(*pairs, strict=True))
    return hash_sums(document, position).tolist()


def test_a_token_missed_doubled_or_moved_changes_the_hash():
    whole = [(0, 1), (0, 2), (1, 1)]
    assert hash_of(whole) == hash_of(reversed(whole))
    for other in (whole[:2], [*whole, (0, 1)], [(0, 1), (0, 2), (1, 2)], [(1, 0), (0, 2), (1, 1)]):
        assert all(a != b for a, b in zip(hash_of(other), hash_of(whole), strict=True))


def splitmix64(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def test_the_hash_is_its_formula_in_integers():
    golden = 0x9E3779B97F4A7C15
    pairs = [(0, 1), (7, 2**33)]
    expected = []
    for i in range(1, 5):
        seed = splitmix64(i * golden % 2**64)
        hashes = [splitmix64((splitmix64((d + seed) % 2**64) + p * golden) % 2**64) for d, p in pairs]
        expected.append(sum(hashes) % 2**64)
    assert hash_of(pairs) == expected
    content = b"".join(value.to_bytes(8, "little") for value in [*expected, len(pairs)])
    assert digest(np.array(expected, dtype=np.uint64), len(pairs)) == hashlib.sha256(content).hexdigest()


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(2, 6), st.integers(1, 5))
def test_the_expected_hash_is_shared_out_without_gap(document_lengths, max_seq_len, num_ranks):
    data = counted_tokens(*document_lengths)
    protocol = protocols.disjoint(max_seq_len)
    if not protocol.num_windows(np.diff(data.offsets_D1)).sum():
        return
    plan = make_plan(protocol, data.offsets_D1, batch_size=2)
    shares = [expected_hash_sums(plan, data, rank, num_ranks) for rank in range(num_ranks)]
    assert (
        sum(shares).tolist() == scored_hash_sums(plan.windows(0, plan.num_windows), data).sum(axis=0).tolist()
    )
