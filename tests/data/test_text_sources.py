"""Text in every form that people have: the same documents, and clear words where an argument is wrong."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from helpers.sources import listed
from helpers.text_forms import (
    DOCUMENTS,
    rows,
    write_arrow,
    write_csv,
    write_gz,
    write_json,
    write_jsonl,
    write_parquet,
    write_plain,
    write_saved,
    write_zst,
)
from ppl_eval.data import hub_text, python_docs, text_files
from ppl_eval.data.documents import digest_of

FORMS = [write_plain, write_jsonl, write_json, write_csv, write_parquet, write_arrow, write_gz, write_zst]


@pytest.mark.parametrize("write", FORMS)
def test_every_form_gives_the_same_documents_and_fingerprint(
    tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    source = text_files(str(write(tmp_path)))
    assert list(source.read()) == DOCUMENTS
    assert digest_of(source.parts([])) == digest_of(listed(DOCUMENTS).parts([]))


def test_saved_and_named_datasets_too(tmp_path: Path) -> None:
    saved = hub_text(str(write_saved(tmp_path)))
    assert list(saved.read()) == DOCUMENTS
    assert saved.stamp() is None  # It changed just now.
    # The library's own builders stand for a name on the hub.
    for streaming in (True, False):
        named = hub_text("json", split="train", data_files=str(write_jsonl(tmp_path)), streaming=streaming)
        assert list(named.read()) == DOCUMENTS
    splits = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(rows()[:3]), "test": datasets.Dataset.from_list(rows())}
    )
    splits.save_to_disk(str(tmp_path / "splits"))
    assert list(hub_text(str(tmp_path / "splits"), split="test").read()) == DOCUMENTS
    with pytest.raises(ValueError, match=r"split is 'valid'.*train, test"):
        list(hub_text(str(tmp_path / "splits"), split="valid").read())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"unit": "page"}, "unit is 'page'; allowed: file, line, blank_line"),
        ({"bad_lines": "warn"}, "bad_lines is 'warn'; allowed: error, skip"),
        ({"column": "text"}, "is no table"),
        ({"paths": "nothing*"}, "no file is named 'nothing\\*'"),
        ({"paths": []}, "empty"),
    ],
)
def test_arguments_are_checked(tmp_path: Path, arguments: dict[str, Any], told: str) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match=told):
        text_files(**{"paths": str(tmp_path / "a.txt"), **arguments})


def test_a_hub_dataset_needs_a_split_and_a_reachable_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"dataset\.split is missing"):
        hub_text("wikitext")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="save_to_disk"):
        list(hub_text("no/such-dataset", split="test").read())


def test_a_local_file_of_a_hub_dataset_is_named_once(tmp_path: Path) -> None:
    path = str(write_jsonl(tmp_path))
    (tmp_path / "link.jsonl").symlink_to(path)
    for files in (
        [path, path],
        {"train": [path, str(tmp_path / "link.jsonl")]},
        [path, str(tmp_path / "*.jsonl")],
    ):
        with pytest.raises(ValueError, match=r"data_files names .*\.jsonl more than once"):
            hub_text("json", split="train", data_files=files)
    # Each split may name it, and names on the hub are not looked at.
    hub_text("json", split="train", data_files={"train": [path], "test": [path]})
    hub_text("json", split="train", data_files=["no/such/file", "no/such/file"])


def test_python_docs_are_there() -> None:
    assert len(list(python_docs().read())) > 50
