"""Files that are whole or not there."""

import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from fedtide.core.atomic import check_new, making, naming, replacing, write_bytes, write_text
from fedtide.core.errors import FedtideError


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def failing(target, written: bool, error: type[BaseException]) -> None:
    with replacing(target) as temporary:
        if written:
            temporary.write_text("half")
        raise error


@pytest.mark.parametrize("old", [None, "the old page"])
def test_a_file_is_there_when_all_of_it_is_written(tmp_path, old):
    target = tmp_path / "page.html"
    if old is not None:
        target.write_text(old)
    with replacing(target) as temporary:
        temporary.write_text("half")
        assert temporary.parent == tmp_path
        assert (target.read_text() if target.exists() else None) == old
        temporary.write_text("all of it")
    assert names(tmp_path) == ["page.html"]
    assert target.read_text() == "all of it"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("old", [None, "the old page"])
def test_after_an_error_everything_is_as_it_was(tmp_path, old, written, error):
    target = tmp_path / "page.html"
    if old is not None:
        target.write_text(old)
    with pytest.raises(error):
        failing(target, written, error)
    assert names(tmp_path) == ([] if old is None else ["page.html"])
    assert old is None or target.read_text() == old


def test_what_was_killed_long_ago_is_removed_and_nothing_else(tmp_path):
    gone = ("x.0123456789abcdef.writing", "x.0123456789abcdef.writing.onnx", "x.making-0123456789abcdef")
    names = (*gone, "y.0123456789abcdef.writing", "x.mine.writing")
    for old in (*gone[:2], *names[3:]):
        (tmp_path / old).touch()
    (tmp_path / gone[2]).mkdir()
    young = tmp_path / "x.fedcba9876543210.writing"
    for old in names:
        os.utime(tmp_path / old, (0, 0))
    young.touch()
    write_text(tmp_path / "x", "all of it")
    assert {path.name for path in tmp_path.iterdir()} == {"x", young.name, *names[3:]}


def test_a_folder_is_not_replaced(tmp_path):
    target = tmp_path / "pages"
    target.mkdir()
    (target / "mine").write_text("x")
    with pytest.raises(OSError, match="is a folder") as error, replacing(target) as temporary:
        temporary.write_text("all of it")
    assert error.value.filename == str(target)
    assert names(tmp_path) == ["pages"]
    assert names(target) == ["mine"]


def test_what_was_never_written_is_an_error_and_leaves_nothing(tmp_path):
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "page.html"):
        pass
    assert names(tmp_path) == []


@pytest.mark.parametrize(("given", "named"), [(None, "page"), ("elsewhere", "elsewhere")])
def test_a_full_disk_is_named_by_the_file_that_it_has_no_room_for(given, named):
    with pytest.raises(OSError, match=f"No space left on device: '{named}'"), naming(Path("page")):
        raise OSError(28, "No space left on device", given)


@pytest.mark.parametrize("make", [replacing, making])
def test_an_error_of_a_temporary_name_tells_the_one_that_was_asked_for(tmp_path, make):
    with pytest.raises(FileNotFoundError) as error, make(tmp_path / "made") as temporary:
        (temporary / "none" / "x.txt").write_text("")
    assert error.value.filename == str(tmp_path / "made" / "none" / "x.txt")


def write_late(target) -> None:
    with replacing(target, new=True) as temporary:
        temporary.write_text("mine")
        target.write_text("theirs")


@pytest.mark.parametrize("links", [True, False])
def test_a_new_file_replaces_none_that_was_written_meanwhile(tmp_path, monkeypatch, links):
    target = tmp_path / "table.csv"
    if not links:
        monkeypatch.setattr("os.link", Mock(side_effect=PermissionError))
    write_bytes(target, b"mine", 0o600)
    assert (target.read_bytes(), target.stat().st_mode & 0o777) == (b"mine", 0o600)
    target.unlink()
    with pytest.raises(FedtideError, match=r"table.csv: is there already, allowed: a new file"):
        write_late(target)
    assert (names(tmp_path), target.read_text()) == (["table.csv"], "theirs")


def test_a_new_folder_is_new_or_empty_and_can_be_made(tmp_path, monkeypatch):
    check_new(tmp_path / "a" / "b")
    (tmp_path / "empty").mkdir()
    check_new(tmp_path / "empty")
    (tmp_path / "file").touch()
    for place, why in (("file", "already exists"), (".", "already exists"), ("file/run", "file is no folder")):
        with pytest.raises(FedtideError, match=why):
            check_new(tmp_path / place)
    monkeypatch.setattr("os.access", lambda path, mode: False)  # the user of a test may be root, who may write anywhere
    with pytest.raises(FedtideError, match=r"run: .* cannot be written to; allowed: a new folder where you may write"):
        check_new(tmp_path / "run")


def make_late(target) -> None:
    with making(target) as temporary:
        (temporary / "mine.txt").write_text("mine")
        target.mkdir()
        (target / "theirs.txt").write_text("theirs")


def test_a_folder_that_another_process_made_meanwhile_stays(tmp_path):
    with pytest.raises(FedtideError, match="made: already exists, allowed: a new or empty folder"):
        make_late(tmp_path / "made")
    assert names(tmp_path) == ["made"]
    assert names(tmp_path / "made") == ["theirs.txt"]
