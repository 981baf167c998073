"""Files of clients' memory: known by digest, and the only files that a store ever removes."""

from __future__ import annotations

import pytest
import torch

from fedtide.core import codec
from fedtide.core.errors import FedtideError
from fedtide.core.memory import MemoryStore


@pytest.fixture
def store(tmp_path) -> MemoryStore:
    made = MemoryStore(tmp_path / "memory", small=0)
    for client in (1, 2):
        made.stage(client, {"c": torch.full((4,), float(client))})
        made.commit((0, 0), [client])
    made.save(tmp_path / "index", (1, 0))
    return made


def again(store: MemoryStore, tmp_path) -> MemoryStore:
    back = MemoryStore(store.directory, small=0)
    back.restore(tmp_path / "index", (1, 0))
    return back


def test_a_bit_that_was_flipped_anywhere_is_one_clear_line(store, tmp_path):
    path = store.directory / "1.0.0.safetensors"
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(FedtideError, match=r"1.0.0.safetensors: damaged"):
            again(store, tmp_path).read(1, (1, 0))


def test_a_missing_file_is_one_clear_line(store, tmp_path):
    (store.directory / "2.0.0.safetensors").unlink()
    with pytest.raises(FedtideError, match=r"2.0.0.safetensors: missing"):
        again(store, tmp_path).check_files()


def test_only_files_of_the_stores_own_names_are_removed(store, tmp_path):
    """Those of writers that were killed in the middle of a file too."""
    store.stage(3, {"c": torch.ones(1)})
    (store.directory / ".tmpp85VGk").touch()
    names = ("notes.txt", "1.safetensors", "staged-mine", "9.9.9.safetensors.bak", ".tmp-mine")
    mine = [store.directory / name for name in names]
    for path in mine:
        path.touch()
    (store.directory / "8.8.8.safetensors").mkdir()
    again(store, tmp_path)
    assert sorted(path.name for path in store.directory.iterdir()) == sorted(
        ["1.0.0.safetensors", "2.0.0.safetensors", "8.8.8.safetensors", *(path.name for path in mine)]
    )
    store.clear()
    assert all(path.exists() for path in mine)


@pytest.mark.parametrize("client", ["../../victim/1", "/etc/1", 1.5, None])
def test_an_index_names_no_file_but_its_own(store, tmp_path, client):
    codec.to_file(tmp_path / "index", {"groups": {}, "files": [[client, 0, 0, "0" * 64]]})
    with pytest.raises(FedtideError, match="damaged"):
        again(store, tmp_path).check_files()


def test_a_link_is_refused_and_what_is_behind_it_stays(store, tmp_path):
    behind = tmp_path / "elsewhere"
    store.directory.rename(behind)
    store.directory.symlink_to(behind)
    (behind / "5.0.0.safetensors").touch()
    for begin in (lambda: again(store, tmp_path), store.clear):
        with pytest.raises(FedtideError, match=r"memory: is a link, allowed: a folder of this run alone"):
            begin()
    assert (behind / "5.0.0.safetensors").exists()
