"""The interface of sources: domains of several, and a class of a user's own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from helpers.own_components import ListDataset
from helpers.sources import tokens_of
from helpers.text_forms import DOCUMENTS, rows, write_jsonl, write_plain
from helpers.tiny_tokenizers import hf_encoder
from ppl_eval.config import own_code
from ppl_eval.config.components import instantiate
from ppl_eval.data import domains, text_files
from ppl_eval.data.documents import digest_of
from ppl_eval.data.token_data import TokenData
from ppl_eval.tokenization.tokenizer import TextEncoder


def test_domains(tmp_path: Path) -> None:
    by_column = text_files(str(write_jsonl(tmp_path)), domain_column="kind")
    assert [part.domain for part in by_column.parts([])] == [row["kind"] for row in rows()]
    sources = {
        "docs": {"_component_": "ppl_eval.data.text_files", "paths": str(write_plain(tmp_path))},
        "rows": {"_component_": "ppl_eval.data.text_files", "paths": str(tmp_path / "corpus.jsonl")},
    }
    both = domains(sources)
    assert list(both.read()) == DOCUMENTS * 2
    assert "domains_sha256" in digest_of(both.parts([]))
    with pytest.raises(ValueError, match=r"sources\.x.*_component_"):
        domains({"x": "path"})
    with pytest.raises(ValueError, match="empty"):
        domains({})


@pytest.fixture
def allowed() -> Iterator[None]:
    """As after ``allow_components=helpers`` on the command line."""
    own_code.allow(["helpers"])
    yield
    own_code.allow([])


def own(encoder: TextEncoder, cache: Path, **arguments: Any) -> TokenData:
    """Tokens of a user's own source, by the dotted path that a config has."""
    section = OmegaConf.create({"_component_": "helpers.own_components.Countdown", **arguments})
    return tokens_of(instantiate("dataset", section), encoder, cache)


@pytest.mark.usefixtures("allowed")
def test_a_users_own_source(encoder: TextEncoder, tmp_path: Path) -> None:
    data = own(encoder, tmp_path, sizes=[3, 2], remark="counted")
    assert data.tokens.tolist() == [3, 2, 1, 2, 1]
    assert data.offsets_D1.tolist() == [0, 3, 5]
    assert data.num_documents == 2
    assert data.notes == ("counted",)
    assert data.num_bytes_D is None
    assert set(data.fingerprint) == {
        "countdown_sha256",
        "tokenizer_sha256",
        "special_tokens",
        "join",
        "bos_tokens",
    }
    silent, other = own(encoder, tmp_path, sizes=[3, 2]), own(encoder, tmp_path, sizes=[2, 3])
    assert silent.notes == ()
    assert silent.tokens.filename == data.tokens.filename != other.tokens.filename
    assert other.tokens.tolist() == [2, 1, 3, 2, 1]
    section = {"_component_": "helpers.own_components.Countdown"}
    merged = domains({"a": {**section, "sizes": [2]}, "b": {**section, "sizes": [1]}})
    assert tokens_of(merged, encoder, tmp_path).tokens.tolist() == [2, 1, 1]


@pytest.mark.usefixtures("allowed")
def test_kinds_are_not_mixed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    text = {"_component_": "ppl_eval.data.text_files", "paths": str(tmp_path / "a.txt")}
    with pytest.raises(ValueError, match=r"mixes kinds of sources \(a: TextSource, b: Countdown\)"):
        domains({"a": text, "b": {"_component_": "helpers.own_components.Countdown", "sizes": [1]}})


@pytest.mark.usefixtures("allowed")
def test_what_is_no_source_is_named_with_what_it_lacks(encoder: TextEncoder, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"returned ListDataset, .*no name, .*goes into ppl_eval\.data\.sft"):
        tokens_of(ListDataset([]), encoder, tmp_path)
    section = {"_component_": "helpers.own_components.ListDataset", "samples": []}
    with pytest.raises(ValueError, match=r"^dataset\.sources\.x: its _component_ returned ListDataset"):
        domains({"x": section})


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> TextEncoder:
    return hf_encoder(tmp_path_factory.mktemp("tokenizer"))
