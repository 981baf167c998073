"""The memory store: rows by version, replayed, settled, saved and restored, in RAM and in files."""

import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtide.core import codec
from fedtide.core.errors import FedtideError
from fedtide.core.memory import SMALL, MemoryStore, Stored
from fedtide.core.trees import same
from helpers.examples import examples

BOTH = pytest.mark.parametrize("small", [SMALL, 0], ids=["in RAM", "in files"])


def row_of(memory: MemoryStore, client: int, now: tuple[int, int]):
    """Return a client's row before `now`, still in its file if it is large."""
    return memory.lend([client], now, whole=False).get(client, (None, None))[1]


def store(folder, small: int = SMALL) -> MemoryStore:
    return MemoryStore(folder / "memory", small)


def put(memory: MemoryStore, client: int, version: tuple[int, int], row) -> None:
    memory.stage(client, row)
    memory.commit(version, [client])


def row(number: float):
    return {"c": torch.full((3,), float(number)), "count": int(number)}


def files(folder) -> set[str]:
    return {path.name for path in (folder / "memory").glob("*")}


# -- versions ----------------------------------------------------------------------------------------------------------


def test_rows_larger_than_the_limit_are_files_and_smaller_ones_are_not(tmp_path):
    memory = MemoryStore(tmp_path / "memory", small=100)
    put(memory, 0, (0, 0), {"x": torch.zeros(25)})
    put(memory, 1, (0, 0), {"x": torch.zeros(26)})
    assert not isinstance(row_of(memory, 0, (1, 0)), Stored)
    assert isinstance(row_of(memory, 1, (1, 0)), Stored)
    assert files(tmp_path) == {row_of(memory, 1, (1, 0)).file}


@BOTH
def test_what_is_kept_does_not_change_with_what_was_given(tmp_path, small):
    memory, given_row = store(tmp_path, small), row(1)
    put(memory, 0, (0, 0), given_row)
    given_row["c"].zero_()
    assert same(memory.read(0, (1, 0)), row(1))


def test_without_a_folder_every_row_stays_in_ram():
    memory = MemoryStore(None, small=0)
    put(memory, 0, (0, 0), row(1))
    assert same(memory.read(0, (1, 0)), row(1))


# -- a round that is held ----------------------------------------------------------------------------------------------


@BOTH
def test_what_only_a_held_round_needed_goes_with_the_next_row_or_checkpoint(tmp_path, small):
    left = []
    for end in ("row", "checkpoint"):
        memory = store(tmp_path / end, small)
        for number, held in ((0, None), (1, (1, 0))):
            memory.hold(held)
            put(memory, 7, (number, 0), row(number))
        memory.hold(None)
        assert len(memory._rows[7]) == 2
        if end == "row":
            put(memory, 7, (2, 0), row(2))
        else:
            memory.settle((2, 0))
        left.append(files(tmp_path / end))
        assert len(memory._rows[7]) == 1
    assert left == ([{"7.2.0.safetensors"}, {"7.1.0.safetensors"}] if small == 0 else [set(), set()])


def test_a_store_that_is_cleared_holds_nothing(tmp_path):
    memory = store(tmp_path)
    memory.hold((0, 0))
    memory.clear()
    for number in range(3):
        put(memory, 7, (number, 0), row(number))
    assert len(memory._rows[7]) == 1


# -- a round that is played again --------------------------------------------------------------------------------------


# -- files -------------------------------------------------------------------------------------------------------------


def test_only_what_can_be_asked_for_again_stays_on_disk(tmp_path):
    memory = store(tmp_path, small=0)
    for number in range(6):
        put(memory, 7, (number, 0), row(number))
        assert len(files(tmp_path)) == 1
    memory.settle((6, 0))
    for number in range(6, 10):
        put(memory, 7, (number, 0), row(number))
        assert len(files(tmp_path)) == 2
    assert same(memory.read(7, (6, 0)), row(5))
    memory.settle((10, 0))
    assert len(files(tmp_path)) == 1
    assert same(memory.read(7, (10, 0)), row(9))


def test_a_staged_file_is_named_after_the_process_and_becomes_the_row(tmp_path):
    memory = store(tmp_path, small=0)
    memory.name = "123"
    memory.stage(7, row(1))
    staged = memory.hand_over()[7]
    memory.stage(7, row(2))
    assert isinstance(staged, Stored)
    assert "123" in staged.file
    assert memory.read(7, (9, 0)) is None
    memory.commit((0, 0), [7])
    assert same(memory.read(7, (1, 0)), row(2))
    assert files(tmp_path) == {staged.file, row_of(memory, 7, (1, 0)).file}


def test_another_process_stages_and_this_one_commits(tmp_path):
    ours, theirs = store(tmp_path, small=0), store(tmp_path, small=0)
    theirs.name = "worker"
    theirs.stage(7, row(5))
    for client, aside in theirs.hand_over().items():
        ours.stage(client, aside)
    ours.commit((0, 0), [7])
    assert same(ours.read(7, (1, 0)), row(5))
    theirs.borrow(ours.lend([7, 8], (1, 0), whole=False))
    assert same(theirs.read(7, (1, 0)), row(5))
    assert theirs.read(7, (0, 0)) is theirs.read(8, (1, 0)) is None
    assert not theirs.hand_over()


def test_rows_travel_whole_where_files_cannot_be_reached(tmp_path):
    ours, theirs = store(tmp_path / "ours", small=0), MemoryStore(None)
    put(ours, 7, (0, 0), row(5))
    theirs.borrow(ours.lend([7], (1, 0), whole=True))
    assert same(theirs.read(7, (1, 0)), row(5))
    theirs.stage(7, row(6))
    for client, aside in theirs.hand_over().items():
        ours.stage(client, aside)
    ours.commit((1, 0), [7])
    assert isinstance(row_of(ours, 7, (2, 0)), Stored)
    assert same(ours.read(7, (2, 0)), row(6))


# -- checkpoints -------------------------------------------------------------------------------------------------------


@BOTH
def test_restore_becomes_what_was_saved(tmp_path, small):
    memory = store(tmp_path, small)
    for client in (3, 1, 20):
        put(memory, client, (client, 1), row(client))
    put(memory, 4, (2, 0), {"other": torch.zeros(2, 2), "kind": "x"})
    memory.save(tmp_path / "saved", (30, 0))
    back = store(tmp_path, small)
    back.restore(tmp_path / "saved", (30, 0))
    for client in (1, 3, 4, 20, 5):
        assert same(back.read(client, (30, 0)), memory.read(client, (30, 0)))
        assert same(row_of(back, client, (3, 1)), row_of(memory, client, (3, 1)))


def test_restoring_removes_the_files_of_later_rounds_and_of_the_dead(tmp_path):
    memory = store(tmp_path, small=0)
    put(memory, 7, (0, 0), row(1))
    memory.save(tmp_path / "saved", (1, 0))
    memory.settle((1, 0))
    kept = files(tmp_path)
    put(memory, 7, (1, 0), row(2))
    put(memory, 8, (1, 0), row(2))
    memory.stage(9, row(3))
    assert len(files(tmp_path)) == 4
    fresh = store(tmp_path, small=0)
    fresh.restore(tmp_path / "saved", (1, 0))
    assert files(tmp_path) == kept
    assert same(fresh.read(7, (1, 0)), row(1))


def test_a_checkpoint_removes_what_a_killed_worker_put_aside_and_no_other_file(tmp_path):
    memory, killed = store(tmp_path, small=0), store(tmp_path, small=0)
    killed.name = "123"
    killed.stage(7, row(1))
    put(memory, 7, (0, 0), row(1))
    memory.stage(8, row(2))
    (tmp_path / "memory" / "mine.txt").touch()
    memory.settle((1, 0))
    assert files(tmp_path) == {row_of(memory, 7, (1, 0)).file, "staged--2-8", "mine.txt"}
    memory.commit((1, 0), [8])
    assert same(memory.read(8, (2, 0)), row(2))


def test_a_crash_between_a_checkpoint_and_settling_loses_nothing(tmp_path):
    memory = store(tmp_path, small=0)
    put(memory, 7, (0, 0), row(1))
    memory.save(tmp_path / "first", (1, 0))
    memory.settle((1, 0))
    put(memory, 7, (1, 0), row(2))
    memory.save(tmp_path / "second", (2, 0))  # and then the power fails: the second may never have been renamed
    for name, expected in (("second", 2), ("first", 1)):
        shutil.copytree(tmp_path / "memory", tmp_path / name[0] / "memory")
        fresh = store(tmp_path / name[0], small=0)
        fresh.restore(tmp_path / name, (expected, 0))
        assert same(fresh.read(7, (expected, 0)), row(expected))


def test_a_start_from_the_beginning_forgets_everything(tmp_path):
    memory = store(tmp_path, small=0)
    put(memory, 7, (0, 0), row(1))
    memory.stage(8, row(1))
    memory.clear()
    assert files(tmp_path) == set()
    assert memory.read(7, (9, 0)) is None
    store(tmp_path / "never made").clear()


def read_as_written(memory: MemoryStore, written: dict, now: tuple[int, int]) -> None:
    """Every client's newest row before now is what it should be."""
    for client in range(4):
        seen = [value for (c, *version), value in sorted(written.items()) if c == client and tuple(version) < now]
        assert same(memory.read(client, now), row(seen[-1]) if seen else None)


# -- against a model that remembers everything -------------------------------------------------------------------------


@examples(60)
@given(
    st.lists(st.lists(st.lists(st.integers(0, 3), max_size=3, unique=True), max_size=2), min_size=1, max_size=6),
    st.lists(st.sampled_from(["go on", "checkpoint", "crash"]), min_size=12, max_size=12),
    st.sampled_from([0, SMALL]),
    st.sets(st.integers(0, 5)),
)
def test_any_series_of_rounds_checkpoints_and_crashes_reads_as_if_every_version_were_kept(
    tmp_path_factory, rounds, events, small, held
):
    """`rounds[r][a]` are the clients that answer ask `a` of round `r`; a crash goes back to the last checkpoint.

    Rounds that are `held` can be read again when they are over, ask by ask.
    """
    folder = tmp_path_factory.mktemp("model")
    memory, written = store(folder, small), {}
    memory.save(folder / "saved", (0, 0))
    number, safe = 0, 0
    for event in events:
        if number == len(rounds):
            break
        memory.hold((number, 0) if number in held else None)
        for ask, clients in enumerate(rounds[number]):
            read_as_written(memory, written, (number, ask))
            for client in clients:
                written[client, number, ask] = 100 * number + 10 * ask + client
                put(memory, client, (number, ask), row(written[client, number, ask]))
        for ask in range(len(rounds[number]) + 1) if number in held else ():
            read_as_written(memory, written, (number, ask))
        number += 1
        if event == "checkpoint":
            memory.save(folder / "saved", (number, 0))
            memory.settle((number, 0))
            safe = number
        elif event == "crash":
            memory = store(folder, small)
            memory.restore(folder / "saved", (safe, 0))
            written = {key: value for key, value in written.items() if key[1] < safe}
            number = safe


# -- files of clients' memory ------------------------------------------------------------------------------------------


@pytest.fixture
def filled(tmp_path) -> MemoryStore:
    made = MemoryStore(tmp_path / "memory", small=0)
    for client in (1, 2):
        made.stage(client, {"c": torch.full((4,), float(client))})
        made.commit((0, 0), [client])
    made.save(tmp_path / "index", (1, 0))
    return made


def again(filled: MemoryStore, tmp_path) -> MemoryStore:
    back = MemoryStore(filled.directory, small=0)
    back.restore(tmp_path / "index", (1, 0))
    return back


def test_a_bit_that_was_flipped_anywhere_is_one_clear_line(filled, tmp_path):
    path = filled.directory / "1.0.0.safetensors"
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(FedtideError, match=r"1.0.0.safetensors: damaged"):
            again(filled, tmp_path).read(1, (1, 0))


def test_a_missing_file_is_one_clear_line(filled, tmp_path):
    (filled.directory / "2.0.0.safetensors").unlink()
    with pytest.raises(FedtideError, match=r"2.0.0.safetensors: missing"):
        again(filled, tmp_path).check_files()


def test_only_files_of_the_stores_own_names_are_removed(filled, tmp_path):
    """Those of writers that were killed in the middle of a file too."""
    filled.stage(3, {"c": torch.ones(1)})
    (filled.directory / ".tmpp85VGk").touch()
    names = ("notes.txt", "1.safetensors", "staged-mine", "9.9.9.safetensors.bak", ".tmp-mine")
    mine = [filled.directory / name for name in names]
    for path in mine:
        path.touch()
    (filled.directory / "8.8.8.safetensors").mkdir()
    again(filled, tmp_path)
    assert sorted(path.name for path in filled.directory.iterdir()) == sorted(
        ["1.0.0.safetensors", "2.0.0.safetensors", "8.8.8.safetensors", *(path.name for path in mine)]
    )
    filled.clear()
    assert all(path.exists() for path in mine)


@pytest.mark.parametrize("client", ["../../victim/1", "/etc/1", 1.5, None])
def test_an_index_names_no_file_but_its_own(filled, tmp_path, client):
    codec.to_file(tmp_path / "index", {"groups": {}, "files": [[client, 0, 0, "0" * 64]]})
    with pytest.raises(FedtideError, match="damaged"):
        again(filled, tmp_path).check_files()


def test_a_link_is_refused_and_what_is_behind_it_stays(filled, tmp_path):
    behind = tmp_path / "elsewhere"
    filled.directory.rename(behind)
    filled.directory.symlink_to(behind)
    (behind / "5.0.0.safetensors").touch()
    for begin in (lambda: again(filled, tmp_path), filled.clear):
        with pytest.raises(FedtideError, match=r"memory: is a link, allowed: a folder of this run alone"):
            begin()
    assert (behind / "5.0.0.safetensors").exists()
