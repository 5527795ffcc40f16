"""A folder of data sets: their names, their figures, and what is refused."""

import json
import math

import pytest

from helpers.runs import many, result_of
from helpers.tiny import TEXT, write_config
from ppl_eval.data import suite

LINES = TEXT.splitlines()


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    texts = {"flores/deu": LINES[:15], "flores/eng": LINES[15:50], "news/eng": LINES[50:90]}
    for name, lines in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / f"{name}.devtest").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "news" / "fra").mkdir()
    for shard, lines in (("b", LINES[90:100]), ("a", LINES[100:])):
        (folder / "news" / "fra" / f"{shard}.txt").write_text("\n".join(lines), encoding="utf-8")
    (folder / ".cache").mkdir()
    (folder / "news" / ".DS_Store").write_bytes(b"\0")
    return folder


@pytest.fixture(scope="module")
def results(tiny, sets, tmp_path_factory):
    scratch = tmp_path_factory.mktemp("suite")
    config = write_config(
        scratch / "config.yaml",
        tiny.folder,
        tiny.text,
        batch_size=4,
        dataset={"_component_": "ppl_eval.data.suite", "folder": str(sets), "levels": 2, "unit": "line"},
        protocol={"_component_": "ppl_eval.protocols.rolling", "max_seq_len": 48},
    )
    found = {}
    for ranks in (1, 2, 3):
        argv = ["--config", str(config), f"output_dir={scratch / str(ranks)}"]
        finished = many(ranks, [argv], scratch, {"PPL_EVAL_HOME": str(scratch / "home")})
        assert finished.code == 0, finished.output
        found[ranks] = result_of(scratch / str(ranks)), finished.output
    return found


def test_every_number_of_ranks_has_the_same_figures(results):
    names = ("domains", "sets", "languages", "macro_bits_per_byte", "macro_perplexity", "nll_sum_hex")
    one, two, three = (json.dumps([results[ranks][0][name] for name in names]) for ranks in (1, 2, 3))
    assert one == two == three


def test_sets_and_languages_are_sums_of_their_domains(results, sets):
    result, _ = results[2]
    domains = result["domains"]
    assert list(domains) == ["flores/deu", "flores/eng", "news/eng", "news/fra"]
    assert domains["flores/deu"]["num_bytes"] == sum(len(line.encode()) for line in LINES[:15])
    groups = {**result["sets"], **result["languages"]}
    members = {
        "flores": ["flores/deu", "flores/eng"],
        "news": ["news/eng", "news/fra"],
        "deu": ["flores/deu"],
        "eng": ["flores/eng", "news/eng"],
        "fra": ["news/fra"],
    }
    assert sorted(groups) == sorted(members)
    for name, of in members.items():
        nll, size = (math.fsum(domains[d][key] for d in of) for key in ("nll_sum", "num_bytes"))
        bits = [domains[d]["bits_per_byte"] for d in of]
        group = groups[name]
        assert group["micro_bits_per_byte"] == pytest.approx(nll / size / math.log(2), rel=1e-14)
        assert group["macro_bits_per_byte"] == pytest.approx(sum(bits) / len(bits), rel=1e-14)
        low, high = group["bits_per_byte_interval_95"]
        assert low < group["micro_bits_per_byte"] < high
        if len(of) == 1:
            assert [low, high] == pytest.approx(domains[of[0]]["bits_per_byte_interval_95"])
    bits = [domain["bits_per_byte"] for domain in domains.values()]
    assert result["macro_bits_per_byte"] == pytest.approx(sum(bits) / 4, rel=1e-14)
    assert result["macro_bits_per_byte"] != result["bits_per_byte"]


def test_the_interval_is_that_of_nll_in_bits(results):
    result, _ = results[1]
    for part in (result, *result["domains"].values()):
        scale = part["num_tokens"] / part["num_bytes"] / math.log(2)
        assert part["bits_per_byte_stderr"] == pytest.approx(part["ce_loss_stderr"] * scale, rel=1e-12)
        low, high = part["bits_per_byte_interval_95"]
        assert (low + high) / 2 == pytest.approx(part["bits_per_byte"], rel=1e-12)
        bounds = [math.log(bound) * scale for bound in part["perplexity_interval_95"]]
        assert [low, high] == pytest.approx(bounds, rel=1e-9)


def test_the_screen_shows_them(results):
    result, output = results[3]
    lines = [line.split() for line in output.splitlines()]
    assert ["domain", "tokens", "bits", "per", "byte", "95", "%", "interval", "perplexity"] in lines
    for name, part in result["domains"].items():
        row = next(line for line in lines if line[:1] == [name])
        assert row[2] == f"{part['bits_per_byte']:.5f}"
    assert ["all,", "macro", f"{result['macro_bits_per_byte']:.5f}"] in [line[:3] for line in lines]
    expected = ["language", "eng,", "macro", f"{result['languages']['eng']['macro_bits_per_byte']:.5f}"]
    assert expected in lines


def test_one_level_takes_all_files_of_a_set(sets):
    source = suite(str(sets), unit="line")
    assert list(source.parameters["sources"]) == ["flores", "news"]
    named = source.parameters["sources"]["news"]["paths"]
    assert [path.removeprefix(f"{sets}/news/") for path in named] == ["eng.devtest", "fra/a.txt", "fra/b.txt"]


@pytest.mark.parametrize(
    ("make", "levels", "words"),
    [
        (["a.txt", "a.jsonl"], 1, "two sets that are called a"),
        (["a.txt"], 2, "is a file, not the folder of a set"),
        ([], 1, "holds no data set"),
        (["a/.hidden"], 1, "holds no file"),
        (["a.txt"], 3, "must be 1"),
    ],
)
def test_refused(tmp_path, make, levels, words):
    for name in make:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "x"}')
    with pytest.raises(ValueError, match=words):
        suite(str(tmp_path), levels)
    with pytest.raises(ValueError, match="which is no folder"):
        suite(str(tmp_path / "absent"))
