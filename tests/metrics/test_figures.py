"""Figures of runs, domains, positions, documents and windows, from scores made by hand."""

import math
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppl_eval import protocols
from ppl_eval.data.token_data import TokenData
from ppl_eval.metrics import figures as metrics
from ppl_eval.metrics.accumulator import Accumulator
from ppl_eval.metrics.denominators import CoveredText
from ppl_eval.metrics.totals import WindowScores
from ppl_eval.metrics.window_records import in_order, records_of
from ppl_eval.protocols.base import Protocol
from ppl_eval.protocols.batches import Batch, WindowBatches, expected_hash_sums
from ppl_eval.protocols.plan import Plan, make_plan
from ppl_eval.results import records
from ppl_eval.scoring import finite

DOMAINS = ("easy", "hard", "absent")
WINDOWS_AT_ONCE = 3  # so few that documents go over the edges of chunks


def made(lengths: list[int], protocol: Protocol, domain_D: list[int] | None = None) -> tuple[Plan, TokenData]:
    offsets = np.cumsum([0, *lengths])
    data = TokenData(
        tokens=np.arange(offsets[-1], dtype=np.uint16) % 100,
        offsets_D1=offsets,
        num_bytes_D=10 * np.array(lengths),
        num_words_D=2 * np.array(lengths),
        num_documents=len(lengths),
        fingerprint={"bos_tokens": []},
        domains=("all",) if domain_D is None else DOMAINS,
        domain_D=None if domain_D is None else np.array(domain_D, dtype=np.int32),
    )
    return make_plan(protocol, offsets, batch_size=2), data


def scored(batch: Batch) -> WindowScores:
    """A token's NLL depends on where it is in the stream and in its window; every seventh is right."""
    scored_BT = batch.labels_BT.numpy() != -100
    column_BT = np.broadcast_to(np.arange(scored_BT.shape[1]), scored_BT.shape)
    nll_BT = np.where(scored_BT, 0.1 * (1 + batch.document_B[:, None]) + 1 / (1 + column_BT), 0.0)
    correct_BT = (scored_BT & (batch.labels_BT.numpy() % 7 == 0)).astype(np.int64)
    return WindowScores(
        nll_BT.sum(axis=1),
        (nll_BT**2).sum(axis=1),
        scored_BT.sum(axis=1),
        correct_BT.sum(axis=1),
        nll_BT,
        correct_BT,
    )


def recorded(batch: Batch, sums: Accumulator) -> np.ndarray:
    return records_of(batch, scored(batch), len(sums.positions), sums.bucket_width)


def records_by_rank(plan: Plan, data: TokenData, num_ranks: int) -> list[np.ndarray]:
    batches = WindowBatches(plan, data, prefix_token=1)
    found = [records_of(batches[index], scored(batches[index])) for index in range(plan.num_batches)]
    return [in_order(np.concatenate([found[0][:0], *found[rank::num_ranks]])) for rank in range(num_ranks)]


def accumulators(plan: Plan, data: TokenData, num_ranks: int, **asked) -> list[Accumulator]:
    batches = WindowBatches(plan, data, prefix_token=1)
    ranks = [Accumulator(plan, data, **asked) for _ in range(num_ranks)]
    # Backwards, as nothing may depend on the order.
    for index in reversed(range(plan.num_batches)):
        sums = ranks[index % num_ranks]
        sums.add(recorded(batches[index], sums))
    return ranks


def joined(ranks: list[Accumulator]) -> Accumulator:
    vectors = []
    for sums in ranks:
        sums.reduce(lambda vector: vectors.append(vector) or vector)  # type: ignore[func-returns-value]
    ranks[0].reduce(lambda _: np.sum(vectors, axis=0))
    return ranks[0]


def write_records(plan: Plan, data: TokenData, ranks: list[np.ndarray], folder: Path, covered) -> None:
    """Gather as ranks do: those that don't write say what they add, then the writer hears the sums."""
    sent: list[list[np.ndarray]] = []
    for own in ranks[1:]:
        chunks: list[np.ndarray] = []
        send = lambda v, chunks=chunks: (chunks.append(v.copy()), _ones(v))[1]  # noqa: E731
        for _ in records.gather(own, plan, send, WINDOWS_AT_ONCE):
            pass
        sent.append(chunks)
    turn = iter(range(1 << 30))

    def add(vector: np.ndarray) -> np.ndarray:
        chunk = next(turn)
        return vector + sum(chunks[chunk] for chunks in sent)

    kinds = {"per_window": True, "per_document": True}
    records.write(
        folder,
        ranks[0],
        plan,
        data,
        covered=covered,
        add_over_ranks=add,
        **kinds,
        windows_at_once=WINDOWS_AT_ONCE,
    )


def _ones(vector: np.ndarray) -> np.ndarray:
    rows = vector.copy().reshape(-1, 1 + len(records._SENT))
    rows[:, 0] = 1
    return rows.ravel()


LENGTHS, DOMAIN_D = [10, 3, 25, 1, 7], [0, 1, 0, 1, 1]


def test_domains_add_up_to_the_run() -> None:
    plan, data = made(LENGTHS, protocols.rolling(8), DOMAIN_D)
    covered = CoveredText(data.num_bytes_D, data.num_words_D, "original documents")
    found = metrics.all_figures(joined(accumulators(plan, data, 1)), protocols.rolling(8), data, covered)
    easy, hard, absent = (found["domains"][name] for name in DOMAINS)
    assert [part["num_tokens"] for part in (easy, hard, absent)] == [35, 11, 0]
    for name in ("num_tokens", "num_windows", "num_bytes", "num_words"):
        assert easy[name] + hard[name] == found[name]
    assert easy["nll_sum"] + hard["nll_sum"] == pytest.approx(found["nll_sum"], rel=1e-15)
    # Micro: tokens weigh the same; macro, and named so: domains do.
    assert found["ce_loss"] == pytest.approx((easy["nll_sum"] + hard["nll_sum"]) / 46, rel=1e-15)
    assert found["macro_ce_loss"] == pytest.approx((easy["ce_loss"] + hard["ce_loss"]) / 2, rel=1e-15)
    assert found["macro_perplexity"] == pytest.approx(math.exp(found["macro_ce_loss"]))
    # Nothing was scored there, and nothing is made up.
    assert absent["perplexity"] is None
    assert absent["top1_accuracy"] is None
    assert absent["ce_loss_stderr"] is None


def test_a_domain_is_as_sure_as_a_run_of_its_documents_alone() -> None:
    random = np.random.default_rng(3)
    lengths, domain_D = random.integers(1, 90, 60).tolist(), random.integers(0, 2, 60).tolist()
    plan, data = made(lengths, protocols.rolling(8), domain_D)
    together = joined(accumulators(plan, data, 2)).domains
    for index, name in enumerate(DOMAINS[:2]):
        alone, _ = made([n for n, d in zip(lengths, domain_D, strict=True) if d == index], plan.protocol)
        blocks = together[name].blocks
        expected = Accumulator(alone, data).run.blocks
        assert blocks.starts.tolist() == expected.starts.tolist()
        assert blocks.kind == "documents"
        # Every window of the domain went into the block that it belongs to.
        ends = np.append(blocks.starts[1:], alone.num_windows)
        targets = alone.windows(0, alone.num_windows).num_targets
        assert blocks.num_tokens == [targets[a:b].sum() for a, b in zip(blocks.starts, ends, strict=True)]


def test_one_domain_is_not_told_twice() -> None:
    plan, data = made(LENGTHS, protocols.rolling(8))
    found = metrics.all_figures(joined(accumulators(plan, data, 1)), protocols.rolling(8), data, None)
    assert "domains" not in found
    assert "macro_perplexity" not in found
    assert "positions" not in found


def test_positions() -> None:
    plan, data = made([20], protocols.disjoint(10, keep_tail=True))
    sums = joined(accumulators(plan, data, 1, num_position_buckets=3))
    found = metrics.all_figures(sums, plan.protocol, data, None)["positions"]
    assert [bucket["context_tokens"] for bucket in found] == [[1, 4], [5, 8], [9, 12]]
    # Two windows of nine targets; input t is the (t+1)th token that the model sees.
    assert [bucket["num_tokens"] for bucket in found] == [8, 8, 2]
    assert found[0]["ce_loss"] == pytest.approx(0.1 + (1 + 1 / 2 + 1 / 3 + 1 / 4) / 4, rel=1e-15)
    assert math.fsum(b["nll_sum"] for b in found) == pytest.approx(sums.run.totals.nll_sum, rel=1e-15)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=30),
    st.sampled_from(
        [protocols.rolling(8), protocols.strided(8, 3, "hf_doc"), protocols.per_sample(9, "window")]
    ),
    st.integers(2, 5),
    st.data(),
)
def test_any_number_of_ranks_gives_the_same_figures(lengths, protocol, num_ranks, drawn) -> None:
    domain_D = drawn.draw(st.lists(st.integers(0, 1), min_size=len(lengths), max_size=len(lengths)))
    if not protocol.num_windows(np.array(lengths)).any():
        return
    plan, data = made(lengths, protocol, domain_D)
    found = [
        metrics.all_figures(joined(accumulators(plan, data, n, num_position_buckets=4)), protocol, data, None)
        for n in (1, num_ranks)
    ]
    assert found[0] == found[1]


def test_records_are_the_same_from_any_number_of_ranks(tmp_path: Path) -> None:
    plan, data = made(LENGTHS, protocols.rolling(8), DOMAIN_D)
    covered = CoveredText(data.num_bytes_D, data.num_words_D, "original documents")
    tables = []
    for num_ranks in (1, 2, 3):
        folder = tmp_path / str(num_ranks)
        folder.mkdir()
        write_records(plan, data, records_by_rank(plan, data, num_ranks), folder, covered)
        tables.append([pq.read_table(folder / name) for name in ("windows.parquet", "documents.parquet")])
        assert sorted(path.name for path in folder.iterdir()) == ["documents.parquet", "windows.parquet"]
    assert tables[0] == tables[1] == tables[2]

    windows, documents = (table.to_pydict() for table in tables[0])
    run = joined(accumulators(plan, data, 1)).run.totals
    assert windows["window_id"] == list(range(plan.num_windows))
    assert windows["document"] == plan.windows(0, plan.num_windows).document.tolist()
    assert windows["domain"][:4] == ["easy", "easy", "hard", "easy"]
    assert math.fsum(windows["nll_sum"]) == run.nll_sum
    assert sum(windows["num_tokens"]) == run.num_tokens
    assert sum(windows["num_correct"]) == run.num_correct
    assert documents["document"] == [0, 1, 2, 3, 4]
    assert documents["num_tokens"] == LENGTHS
    assert documents["num_bytes"] == data.num_bytes_D.tolist()
    assert documents["num_windows"] == plan.windows_per_document().tolist()
    assert math.fsum(documents["nll_sum"]) == pytest.approx(run.nll_sum, rel=1e-15)
    assert documents["perplexity"][0] == pytest.approx(math.exp(documents["nll_sum"][0] / 10))


def test_every_documented_column_is_there_and_no_other() -> None:
    listed = [line.split()[0] for line in (records.__doc__ or "").splitlines() if line.startswith("    ")]
    assert listed == records._WINDOWS.names


def test_a_lost_window_is_noticed() -> None:
    plan, data = made(LENGTHS, protocols.rolling(8))
    own = records_by_rank(plan, data, 2)[0]
    with pytest.raises(AssertionError, match="recorded by no rank"):
        list(records.gather(own, plan, lambda vector: vector))


def test_failed_writing_leaves_nothing_behind(tmp_path: Path) -> None:
    plan, data = made(LENGTHS, protocols.rolling(8))
    own = records_by_rank(plan, data, 1)[0]

    def fail(_: np.ndarray) -> np.ndarray:
        raise RuntimeError("a rank died")

    with pytest.raises(RuntimeError, match="a rank died"):
        records.write(
            tmp_path, own, plan, data, covered=None, add_over_ranks=fail, per_window=True, per_document=True
        )
    assert list(tmp_path.iterdir()) == []


def test_a_dummy_batch_counts_nothing() -> None:
    plan, data = made(LENGTHS, protocols.rolling(8), DOMAIN_D)
    sums = Accumulator(plan, data, num_position_buckets=2)
    dummy = WindowBatches(plan, data, prefix_token=1)[-1]
    none = WindowScores(*(np.zeros(0) for _ in range(2)), *(np.zeros(0, dtype=np.int64) for _ in range(2)))
    shape = (0, dummy.labels_BT.shape[1])
    none = none._replace(nll_BT=np.zeros(shape), correct_BT=np.zeros(shape, dtype=np.int64))
    sums.add(records_of(dummy, none, 2, sums.bucket_width))
    assert torch.equal(dummy.labels_BT, torch.full((1, 1), -100))
    assert sums.run.totals.num_windows == sums.run.totals.num_tokens == 0


def without(batch: Batch, sums: Accumulator, *windows: int) -> np.ndarray:
    """Records of a batch in which these windows have a NaN."""
    scores = scored(batch)
    bad_B = np.isin(batch.window_ids_B, windows)
    scores.nll_BT[bad_B, 0] = math.nan
    sums_B = scores.nll_BT.sum(axis=1)
    scores = scores._replace(nll_sum_B=sums_B, nll_sq_sum_B=(scores.nll_BT**2).sum(axis=1))
    return records_of(batch, finite.exclude(batch, scores), len(sums.positions), sums.bucket_width)


def test_an_excluded_window_leaves_every_sum() -> None:
    """Windows of 8 with stride 4 over 20 tokens score 7, 4, 4, 4; the script's weights are 7, 3, 3, 3."""
    plan, data = made([20], protocols.strided(8, 4, "hf_doc"))
    batches = WindowBatches(plan, data)
    sums, rest = (Accumulator(plan, data, num_position_buckets=2) for _ in range(2))
    for index in range(plan.num_batches):
        sums.add(without(batches[index], sums, 1, 2))
        records = recorded(batches[index], rest)
        rest.add(records[~np.isin(records["window_id"], [1, 2])])
    totals = sums.run.totals
    assert (totals.num_tokens, totals.num_windows, totals.window_weights) == (11, 2, 10)
    assert (totals.num_excluded_tokens, totals.num_excluded_windows) == (8, 2)
    assert sums.excluded_W.tolist() == [1, 2]
    # Each scores what comes after 4 to 7 tokens, and the first bucket ends with those after 4.
    assert [bucket.num_excluded_tokens for bucket in sums.positions] == [2, 6]
    for name in ("nll_fixed", "token_nll_sq_fixed", "weighted_nll_fixed", "num_correct"):
        assert getattr(totals, name) == getattr(rest.run.totals, name)
    assert sums.run.blocks.nll_fixed == rest.run.blocks.nll_fixed
    totals.expected_hash_sums = expected_hash_sums(plan, data, 0, 1)
    sums.check_coverage(expected_tokens=19, expected_windows=4)
    # A window that was left out and scored as well, or neither, is noticed as ever.
    totals.excluded_hash_sums = totals.excluded_hash_sums + 1
    with pytest.raises(RuntimeError, match="19 tokens in 4 windows were scored or excluded"):
        sums.check_coverage(expected_tokens=19, expected_windows=4)


def test_the_ids_of_excluded_windows_are_joined_over_ranks() -> None:
    plan, data = made([20, 30], protocols.rolling(4))
    batches = WindowBatches(plan, data, prefix_token=1)
    ranks = [Accumulator(plan, data) for _ in range(3)]
    for index in range(plan.num_batches):
        sums = ranks[index % 3]
        sums.add(without(batches[index], sums, 0, 3, 5, 9))
    assert [sums.excluded_W.tolist() for sums in ranks] == [[0], [3, 9], [5]]
    joined(ranks)
    vectors: list[list[np.ndarray]] = []
    for rank, sums in enumerate(ranks):
        sums.run.totals.num_excluded_windows = 4
        counts = np.array([1, 2, 1])
        sent: list[np.ndarray] = []
        answers = iter([counts, np.zeros(4, dtype=np.int64)])
        sums.join_excluded(rank, 3, lambda v, sent=sent, answers=answers: (sent.append(v), next(answers))[1])
        vectors.append(sent)
    assert np.sum([sent[0] for sent in vectors], axis=0).tolist() == [1, 2, 1]
    assert np.sort(np.sum([sent[1] for sent in vectors], axis=0)).tolist() == [0, 3, 5, 9]


def test_nothing_left_is_refused() -> None:
    plan, data = made([20], protocols.strided(8, 4, "hf_doc"))
    sums = Accumulator(plan, data)
    for batch in map(WindowBatches(plan, data).__getitem__, range(plan.num_batches)):
        sums.add(without(batch, sums, 0, 1, 2, 3))
    with pytest.raises(ValueError, match="nothing is left: the NLL of 4 of 4 windows is not finite"):
        sums.check_not_empty()


def test_windows_of_batches_that_went_through_in_parts_are_counted_over_ranks() -> None:
    """From the records, so after a restart and in a merge as well."""
    plan, data = made([20, 30], protocols.rolling(4))
    batches = WindowBatches(plan, data, prefix_token=1)
    ranks = [Accumulator(plan, data) for _ in range(2)]
    for index in range(plan.num_batches):
        scores = scored(batches[index])._replace(in_parts=index in (1, 2, 6))
        ranks[index % 2].add(records_of(batches[index], scores))
    # Seven batches of two windows, the last of one: 5 and 8 windows of 4.
    assert plan.num_windows == 13
    assert joined(ranks).run.totals.num_windows_in_parts == 5


@pytest.mark.parametrize(
    ("text", "noted"),
    [
        ("The quick brown fox jumps over the lazy dog.", False),
        ("Donaudampfschifffahrtsgesellschaft und Rechtsschutzversicherung", False),
        ("இந்த வாக்கியத்தின் சொற்கள் இடைவெளிகளால் பிரிக்கப்பட்டுள்ளன.", False),
        ("คำในประโยคนี้ไม่ได้คั่นด้วยช่องว่าง แต่ละวลีจึงนับเป็นหนึ่งคำ", True),
        ("敏捷的棕色狐狸跳过了懒狗。今天天气很好，我们去公园散步吧。 晚上再回家。", True),
        ("", False),
    ],
)
def test_words_are_doubted_where_white_space_does_not_separate_them(text, noted):
    notes = metrics.words_note({"num_bytes": len(text.encode()), "num_words": len(text.split())})
    assert bool(notes) == noted


def test_a_domain_is_doubted_in_a_text_that_has_spaces_as_a_whole():
    english, chinese = {"num_bytes": 6000, "num_words": 1000}, {"num_bytes": 600, "num_words": 2}
    whole = {"num_bytes": 6600, "num_words": 1002}
    unknown = {"num_bytes": None, "num_words": None}
    assert metrics.words_note({**whole, "domains": {"en": english, "none": unknown}}) == []
    (line,) = metrics.words_note({**whole, "domains": {"en": english, "zh": chinese}})
    assert "zh has 600 bytes and 2 of them" in line
