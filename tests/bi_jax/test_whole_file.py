"""A file gets its new content whole or not at all, and nothing is left beside it."""

import os
import stat
import threading
from pathlib import Path

import pytest

from bi_jax.whole_file import check_writable, write_whole


def test_it_is_made_or_replaced_and_asking_leaves_no_trace(tmp_path: Path):
    target = tmp_path / "out.txt"
    check_writable(target)
    assert not list(tmp_path.iterdir())
    for text in ("first", "second"):
        write_whole(target, text)
        assert target.read_text() == text
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(target.stat().st_mode) == 0o666 & ~mask
    assert list(tmp_path.iterdir()) == [target]


def test_a_link_stays_a_link_and_permissions_stay(tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "real.txt", tmp_path / "link.txt"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    check_writable(link)
    write_whole(link, "new")
    assert link.is_symlink() and target.read_text() == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert list(target.parent.iterdir()) == [target]


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    check_writable(pipe)
    write_whole(pipe, "through")
    reader.join()
    assert read == ["through"] and stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_full_disk_is_named_and_leaves_the_old_file(tmp_path: Path, monkeypatch):
    with pytest.raises(OSError, match="/dev/full"):
        write_whole("/dev/full", "x")
    target = tmp_path / "out.txt"
    target.write_text("old")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match=r"No space left on device: .*out\.txt"):
        write_whole(target, "new")
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]


def test_what_cannot_be_written_is_named(tmp_path: Path, monkeypatch):
    target = tmp_path / "out.txt"
    target.write_text("old")
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everything
    for bad, words in (
        (tmp_path, "folder"),
        (tmp_path / "no" / "x", "No such"),
        (target, "may not be written"),
        (tmp_path / "loop", "symbolic links"),
    ):
        with pytest.raises(OSError, match=words) as caught:
            check_writable(bad)
        assert caught.value.filename == str(bad)
    assert target.read_text() == "old" and not list(tmp_path.glob(".bi-jax-*"))
