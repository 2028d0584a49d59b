"""Files and folders that are written whole or not at all."""

import pytest

from rlt_gym.core.files import atomic_folder


def test_a_folder_appears_when_it_is_complete(tmp_path):
    target = tmp_path / "new" / "folder"
    with atomic_folder(target) as written:
        (written / "a").write_text("1")
        assert not target.exists()
    assert (target / "a").read_text() == "1" and [path.name for path in target.parent.iterdir()] == ["folder"]


def test_an_error_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError, match="stop"), atomic_folder(tmp_path / "folder") as written:
        (written / "a").write_text("1")
        raise RuntimeError("stop")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_kept(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").write_text("1")
    with pytest.raises(OSError, match="not empty"), atomic_folder(tmp_path / "folder") as written:
        (written / "a").write_text("2")
    assert [path.name for path in tmp_path.rglob("*")] == ["folder", "mine"]
