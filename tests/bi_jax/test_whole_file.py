"""A file gets its new content whole or not at all, and nothing is left beside it."""

import os
import stat
import threading
from pathlib import Path

import pytest

from bi_jax.whole_file import WholeFile


def test_it_appears_at_the_end_and_only_if_it_was_written(tmp_path: Path):
    target = tmp_path / "out.txt"
    with WholeFile(target) as file:
        file.write("new")
    assert target.read_text() == "new" and stat.S_IMODE(target.stat().st_mode) & 0o600 == 0o600
    with pytest.raises(KeyboardInterrupt), WholeFile(target):
        raise KeyboardInterrupt
    assert target.read_text() == "new" and list(tmp_path.iterdir()) == [target]


def test_a_link_stays_a_link_and_permissions_stay(tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "real.txt", tmp_path / "link.txt"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    with WholeFile(link) as file:
        file.write("new")
    assert link.is_symlink() and target.read_text() == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert list(target.parent.iterdir()) == [target]


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    with WholeFile(pipe) as file:
        file.write("through")
    reader.join()
    assert read == ["through"] and stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_full_disk_is_named_and_leaves_the_old_file(tmp_path: Path, monkeypatch):
    with pytest.raises(OSError, match="/dev/full"), WholeFile("/dev/full") as file:
        file.write("x")
    target = tmp_path / "out.txt"
    target.write_text("old")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    said = r"No space left on device: .*out\.txt"
    with pytest.raises(OSError, match=said), WholeFile(target) as file:
        file.write("new")
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]


def test_what_cannot_be_written_is_said_on_entering(tmp_path: Path, monkeypatch):
    target = tmp_path / "out.txt"
    target.write_text("old")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everything
    for bad, words in ((tmp_path, "folder"), (tmp_path / "no" / "x", "No such"), (target, "may")):
        with pytest.raises(OSError, match=words) as caught, WholeFile(bad):
            pytest.fail("entered")
        assert caught.value.filename == str(bad)
    assert list(tmp_path.iterdir()) == [target]
