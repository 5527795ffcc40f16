"""Ids on a hub: from a cache laid out as huggingface_hub lays it out, without a hub."""

import pytest
from huggingface_hub import constants

from ppl_eval.checkpoints.hub import download, parse, snapshot_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_what_is_an_id(tmp_path, monkeypatch):
    assert parse("org/name") == ("org/name", None)
    assert parse("org/na.me-1@v1.0") == ("org/na.me-1", "v1.0")
    assert parse("org/name@refs/pr/1") == ("org/name", "refs/pr/1")
    for folder in ("/models/x", "./org/name", "a/b/c", "name", "~/x/y", "../name"):
        assert parse(folder) is None, folder
    # A folder that is there is a folder.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert parse("org/name") is None


def test_a_hub_out_of_reach_is_said_in_words(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    # Nothing listens on port 9 of this machine.
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ValueError, match=r"neither a folder here nor in .*127\.0\.0\.1:9 cannot be reached"):
        download("org/name", None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"checkpoint org/name@v1 is neither .*HF_HUB_OFFLINE is set"):
        download("org/name", "v1")


def test_a_snapshot_says_what_it_is(tmp_path):
    snapshot = tmp_path / "models--org--na--me" / "snapshots" / COMMIT
    assert snapshot_of(str(snapshot)) == {"id": "org/na--me", "commit": COMMIT}
    assert snapshot_of(str(tmp_path)) is None
