"""Checkpoints: written whole or not at all, of one configuration and one format, and damage is one clear line."""

import json
from pathlib import Path

import pytest
import torch

from fedtide.core import checkpoint
from fedtide.core.base import Weights
from fedtide.core.errors import FedtideError
from fedtide.core.loop import Start
from fedtide.core.memory import MemoryStore
from fedtide.core.record import Mark
from fedtide.core.trees import same


def state(number: float) -> Weights:
    return Weights({"w": torch.full((8,), float(number))}, {"mean": torch.zeros(1)})


def saved(folder: Path, number: int, *, config: str = "abc", memory: MemoryStore | None = None, stay=()) -> None:
    start = Start(state(number), number, 1.5 * number)
    marks = {"rounds.jsonl": Mark(10 * number, "0" * 64)}
    checkpoint.save(folder, start, memory or MemoryStore(None), config=config, marks=marks, keep=stay)


def keep(memory: MemoryStore, client: int, version: tuple[int, int], row) -> None:
    memory.stage(client, row)
    memory.commit(version, [client])


def loaded(folder: Path, config: str = "abc", memory: MemoryStore | None = None):
    return checkpoint.load(folder, memory or MemoryStore(None), config=config)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_saved_is_loaded(tmp_path):
    saved(tmp_path / "c", 3)
    back = loaded(tmp_path / "c")
    assert same(back[0].state, state(3))
    assert (back[0].round, back[0].seconds) == (3, 4.5)
    assert dict(back[1]) == {"rounds.jsonl": Mark(30, "0" * 64)}


def test_there_is_no_checkpoint_yet(tmp_path):
    assert loaded(tmp_path / "never made") is None
    (tmp_path / "empty").mkdir()
    assert loaded(tmp_path / "empty") is None


def test_the_memory_of_the_clients_goes_with_it(tmp_path):
    memory = MemoryStore(tmp_path / "memory", small=8)
    for client, values in ((1, 1), (2, 100)):
        keep(memory, client, (2, 0), {"c": torch.ones(values)})
    saved(tmp_path / "c", 3, memory=memory)
    back = MemoryStore(tmp_path / "memory", small=8)
    loaded(tmp_path / "c", memory=back)
    assert same(back.read(1, (3, 0)), {"c": torch.ones(1)})
    assert same(back.read(2, (3, 0)), {"c": torch.ones(100)})


def test_the_newest_is_kept_and_read(tmp_path):
    for number in (2, 4, 6, 8, 10):
        saved(tmp_path, number)
    assert names(tmp_path) == ["00000010"]
    assert loaded(tmp_path)[0].round == 10


def test_a_checkpoint_of_the_same_round_replaces_the_old_one(tmp_path):
    saved(tmp_path, 3, config="old")
    saved(tmp_path, 3, config="new")
    assert names(tmp_path) == ["00000003"]
    assert loaded(tmp_path, "new")[0].round == 3
    assert [number for number, _ in checkpoint.check(tmp_path, config="new").marks] == [3]


def test_memory_of_an_earlier_round_leaves_that_of_the_newest_checkpoint(tmp_path):
    memory = MemoryStore(tmp_path / "memory", small=0)
    for number in (2, 4):
        keep(memory, 1, (number - 1, 0), {"c": torch.full((1,), float(number))})
        saved(tmp_path / "c", number, memory=memory, stay=[2])
    early, newest = (MemoryStore(tmp_path / "memory", small=0) for _ in range(2))
    checkpoint.kept_memory(tmp_path / "c", 2, early)
    assert same(early.read(1, (2, 0)), {"c": torch.tensor([2.0])})
    loaded(tmp_path / "c", memory=newest)
    newest.check_files()
    assert same(newest.read(1, (4, 0)), {"c": torch.tensor([4.0])})


# -- a crash while it is written ---------------------------------------------------------------------------------------


class Crash(BaseException):
    """The end of the process, which nobody catches."""


def crashes(*given, **named):
    raise Crash


@pytest.mark.parametrize("at", [
    "fedtide.core.codec.to_file", "fedtide.core.memory.MemoryStore.save", "pathlib.Path.write_text",
    "fedtide.core.checkpoint.flush", "pathlib.Path.rename",
])  # fmt: skip
def test_a_crash_before_the_end_leaves_the_old_one(tmp_path, monkeypatch, at):
    saved(tmp_path, 3)
    before = contents(tmp_path / "00000003")
    with monkeypatch.context() as patch:
        patch.setattr(at, crashes)
        with pytest.raises(Crash):
            saved(tmp_path, 5)
    assert contents(tmp_path / "00000003") == before
    assert loaded(tmp_path)[0].round == 3
    saved(tmp_path, 5)
    assert names(tmp_path) == ["00000005"]
    assert loaded(tmp_path)[0].round == 5


def test_the_memory_of_an_old_checkpoint_survives_a_crash(tmp_path, monkeypatch):
    memory = MemoryStore(tmp_path / "memory", small=0)
    keep(memory, 1, (0, 0), {"c": torch.ones(1)})
    saved(tmp_path / "c", 1, memory=memory)
    keep(memory, 1, (1, 0), {"c": torch.zeros(1)})
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", crashes)
        with pytest.raises(Crash):
            saved(tmp_path / "c", 2, memory=memory)
    back = MemoryStore(tmp_path / "memory", small=0)
    assert loaded(tmp_path / "c", memory=back)[0].round == 1
    assert same(back.read(1, (1, 0)), {"c": torch.ones(1)})


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_configuration_is_refused(tmp_path):
    saved(tmp_path, 3, config="abc")
    with pytest.raises(
        FedtideError,
        match=r"00000003: this checkpoint belongs to another configuration \(digest abc.*xyz.*the version of fedtide",
    ):
        loaded(tmp_path, "xyz")


@pytest.mark.parametrize("found", [0, 2, 4, "3", None, 2.5])
def test_a_checkpoint_of_another_format_is_refused(tmp_path, found):
    saved(tmp_path, 3)
    path = tmp_path / "00000003" / "checkpoint.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": found}))
    with pytest.raises(
        FedtideError, match=r"checkpoint.json: format: found .* but it was written by another version; allowed: 3"
    ):
        loaded(tmp_path)


@pytest.mark.parametrize("name", ["checkpoint.json", "state.safetensors", "memory.safetensors"])
def test_a_missing_part_is_one_clear_line(tmp_path, name):
    saved(tmp_path, 3)
    (tmp_path / "00000003" / name).unlink()
    with pytest.raises(FedtideError, match=f"00000003/{name}: .*(missing|no such file)") as error:
        loaded(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "null", '{"format": 3}', '{"format": 3, "config": "abc"}', "\udcff"]
)
def test_a_damaged_description_is_one_clear_line(tmp_path, text):
    saved(tmp_path, 3)
    (tmp_path / "00000003" / "checkpoint.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(FedtideError, match=r"checkpoint.json: "):
        loaded(tmp_path)


@pytest.mark.parametrize("name", ["checkpoint.json", "state.safetensors", "memory.safetensors"])
def test_a_flipped_bit_anywhere_is_one_clear_line(tmp_path, name):
    """Whoever resumes from damaged numbers gets a result that looks right and is wrong."""
    memory = MemoryStore(None)
    keep(memory, 0, (0, 0), {"c": torch.ones(4)})
    saved(tmp_path, 3, memory=memory)
    path = tmp_path / "00000003" / name
    whole = path.read_bytes()
    unnoticed, other = [], {}
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            loaded(tmp_path)
        except FedtideError:
            pass
        except Exception as error:
            other[place] = repr(error)
        else:
            unnoticed.append(place)
    assert not other, f"other errors: {other}"
    assert not unnoticed, f"{len(unnoticed)} of {len(whole)} flipped bits were not noticed"


def test_a_format_is_told_before_anything_else_is_read(tmp_path):
    """A checkpoint of a later version may hold anything."""
    saved(tmp_path, 3)
    folder = tmp_path / "00000003"
    (folder / "checkpoint.json").write_text('{"format": 99}')
    (folder / "state.safetensors").write_bytes(b"something new")
    with pytest.raises(FedtideError, match="format: found 99"):
        loaded(tmp_path)
