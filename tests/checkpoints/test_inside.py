"""Files of a checkpoint are inside its folder; the links of the Hugging Face cache are the one exception."""

import pytest

from helpers import tiny_checkpoints as tiny
from ppl_eval.checkpoints.inside import inside_folder
from ppl_eval.checkpoints.load import load_state_dict

HASH = "0123456789abcdef" * 4


@pytest.fixture
def snapshot(tmp_path):
    """A model as huggingface_hub caches it: all files of a snapshot are links to blobs."""
    model = tmp_path / "models--owner--name"
    at = model / "snapshots" / ("a" * 40)
    at.mkdir(parents=True)
    section = tiny.write_hf(at, tiny.random_weights(tiny.tied), num_files=2)
    (model / "blobs").mkdir()
    for number, path in enumerate(sorted(at.iterdir())):
        blob = model / "blobs" / f"{number:064x}"
        path.rename(blob)
        path.symlink_to(f"../../blobs/{blob.name}")
    return at, section


def test_hugging_faces_cache_is_read(snapshot):
    at, section = snapshot
    assert all(path.is_symlink() for path in at.iterdir())
    assert len(load_state_dict(section).identity) == 2


@pytest.mark.parametrize(
    "target", ["../../../models--other--one/blobs/" + HASH, "../../refs/main", "../../blobs/config.json"]
)
def test_other_links_out_of_a_snapshot_are_refused(snapshot, target):
    at, _ = snapshot
    there = at / target
    there.parent.mkdir(parents=True, exist_ok=True)
    there.touch()
    (at / "extra.json").symlink_to(target)
    with pytest.raises(ValueError, match=r"extra\.json is a link to .*, outside the checkpoint's folder"):
        inside_folder(at, "extra.json", "test")


def test_links_inside_and_folders_below(tmp_path):
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "a.pth").touch()
    (tmp_path / "b.pth").symlink_to("original/a.pth")
    assert inside_folder(tmp_path, "original/a.pth", "test").is_file()
    assert inside_folder(tmp_path, "b.pth", "test").is_file()


@pytest.mark.parametrize("name", ["", "..", "a/../../b", "/etc/passwd", "../blobs/" + HASH, "C:/x"])
def test_names_that_lead_out(tmp_path, name):
    with pytest.raises(ValueError, match="not inside the checkpoint's folder"):
        inside_folder(tmp_path, name, "test")
