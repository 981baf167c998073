"""The record: appended line by line, cut off at the checkpoint, readable at every moment."""

import csv
import json

import pytest
import torch

from fedtide.core.errors import FedtideError
from fedtide.core.record import CLIENT_COLUMNS, FILES, Mark, Record, plain, read_lines, run_lock, whole

HEADER = ",".join(CLIENT_COLUMNS) + "\n"


def write(folder, rounds, marks=None) -> dict[str, Mark]:
    record = Record(folder, marks)
    for number in rounds:
        record.append("rounds.jsonl", {"round": number, "facts": {"loss": 0.5}})
        record.append("timings.jsonl", {"round": number, "seconds": 0.1})
        record.clients(
            [
                (number, "train_clients", 3, "day", 10, 0.5, 1.25, None),
                (number, "train_clients", 4, "night", 0, None, None, 1),
            ]
        )
    reached = record.marks()
    record.close()
    return reached


def text(folder, name: str) -> str:
    return (folder / name).read_text(encoding="utf-8")


def test_a_line_is_whole_as_soon_as_it_is_written(tmp_path):
    record = Record(tmp_path)
    record.append("rounds.jsonl", {"round": 0})
    assert text(tmp_path, "rounds.jsonl") == '{"round": 0}\n'
    record.append("timings.jsonl", {"round": 0, "seconds": 1.5})
    assert text(tmp_path, "timings.jsonl") == '{"round": 0, "seconds": 1.5}\n'
    record.clients([(0, "train_clients", 3, "day", 10, 0.5, 1.25, None)])
    assert text(tmp_path, "clients.csv") == HEADER + "0,train_clients,3,day,10,0.5,1.25,\n"
    record.close()


def test_where_groups_drift_there_is_a_column_more(tmp_path):
    Record(tmp_path, truth=True).close()
    assert text(tmp_path, "clients.csv") == HEADER.strip() + ",truth\n"
    Record(tmp_path, {"clients.csv": whole(tmp_path / "clients.csv")}, truth=True).close()
    assert text(tmp_path, "clients.csv") == HEADER.strip() + ",truth\n"


def test_a_new_record_starts_with_empty_files_and_the_columns(tmp_path):
    write(tmp_path / "a" / "b", range(3))
    write(tmp_path / "a" / "b", [])
    assert text(tmp_path / "a" / "b", "rounds.jsonl") == ""
    assert text(tmp_path / "a" / "b", "timings.jsonl") == ""
    assert text(tmp_path / "a" / "b", "clients.csv") == HEADER


def test_the_marks_are_those_of_the_files(tmp_path):
    assert write(tmp_path, range(4)) == {name: whole(tmp_path / name) for name in FILES}


def test_whatever_came_after_the_checkpoint_is_cut_off(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    write(whole, range(5))
    marks = write(cut, range(3))
    for name in FILES:
        with open(cut / name, "a", encoding="utf-8") as file:
            file.write('{"round": 3, "fac')  # the process died here
    write(cut, range(3, 5), marks)
    for name in FILES:
        assert text(cut, name) == text(whole, name)


@pytest.mark.parametrize("name", ["rounds.jsonl", "clients.csv"])
@pytest.mark.parametrize("left", [None, 5])
def test_a_record_shorter_than_its_checkpoint_says_is_one_clear_line(tmp_path, name, left):
    """Filling the gap with nothing would leave a record that no one can read."""
    marks = write(tmp_path, range(3))
    if left is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(text(tmp_path, name)[:left])
    with pytest.raises(FedtideError, match=name):
        Record(tmp_path, marks).close()


@pytest.mark.parametrize("name", FILES)
def test_a_digit_that_was_changed_before_the_checkpoint_is_one_clear_line(tmp_path, name):
    marks = write(tmp_path, range(3))
    (tmp_path / name).write_text(text(tmp_path, name).replace("1", "2", 1))
    with pytest.raises(FedtideError, match=rf"{name}: damaged \(its sha256 is not the one that was written\)"):
        Record(tmp_path, marks).close()


def test_a_file_beside_the_record_is_counted_on_too(tmp_path):
    beside = tmp_path / "shift.safetensors"
    beside.write_bytes(b"who came when")
    record = Record(tmp_path / "run", beside=beside)
    marks = record.marks()
    record.close()
    assert marks["../shift.safetensors"] == whole(beside)
    beside.write_bytes(b"who left when")
    with pytest.raises(FedtideError, match=r"shift.safetensors: damaged"):
        Record(tmp_path / "run", marks, beside=beside)


def test_a_run_is_played_by_one_process_at_a_time(tmp_path):
    """A file is locked for whoever opened it, so that a second holder stands for a second process."""
    with run_lock(tmp_path):
        taken = pytest.raises(FedtideError, match=r"rounds.jsonl: another process is playing this run; wait for it")
        with taken, run_lock(tmp_path):
            pass
        Record(tmp_path).close()
    with run_lock(tmp_path):
        pass


@pytest.mark.parametrize("group", ["day", "Zürich", "day, cloudy", 'the "late" ones', "two\nlines"])
def test_a_group_may_have_any_name(tmp_path, group):
    record = Record(tmp_path)
    record.clients([(0, "train_clients", 3, group, 10, 0.5, 1.25, None, "Zoë")])
    record.close()
    with open(tmp_path / "clients.csv", encoding="utf-8", newline="") as file:
        (row,) = csv.DictReader(file)
    assert row == {
        "round": "0", "view": "train_clients", "client": "3", "group": group, "rows": "10", "accuracy": "0.5",
        "loss": "1.25", "slot": "", "name": "Zoë",
    }  # fmt: skip


# -- forgetting --------------------------------------------------------------------------------------------------------


def test_a_record_has_a_file_for_forgetting_only_where_it_is_measured(tmp_path):
    write(tmp_path / "without", range(2))
    assert sorted(path.name for path in (tmp_path / "without").iterdir()) == sorted(FILES)
    record = Record(tmp_path, forgetting=True)
    record.append("forgetting.jsonl", {"round": 0, "mean": float("nan")})
    marks = record.marks()
    record.append("forgetting.jsonl", {"round": 1, "mean": 0.5})
    record.close()
    assert read_lines(tmp_path, "forgetting.jsonl") == [{"round": 0, "mean": None}, {"round": 1, "mean": 0.5}]
    Record(tmp_path, marks, forgetting=True).close()
    assert text(tmp_path, "forgetting.jsonl") == '{"round": 0, "mean": null}\n'
    (tmp_path / "forgetting.jsonl").unlink()
    with pytest.raises(FedtideError, match=r"forgetting.jsonl: damaged \(it is 27 bytes shorter than"):
        Record(tmp_path, marks, forgetting=True).close()


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1),
        (True, True),
        (None, None),
        ("nan", "nan"),
        (0.1, 0.1),
        (float("nan"), None),
        (float("inf"), None),
        (float("-inf"), None),
        (torch.tensor(float("nan")), None),
        (torch.tensor(3), 3),
        (torch.tensor([[1.5, float("-inf")], [0.0, 2.0]]), [[1.5, None], [0.0, 2.0]]),
        (torch.tensor([True, False]), [True, False]),
        (torch.zeros(0), []),
        ({"a": (1.0, float("nan")), 3: [float("inf")]}, {"a": [1.0, None], "3": [None]}),
    ],
)
def test_a_value_becomes_json_and_what_is_not_finite_becomes_null(value, expected):
    made = plain(value)
    assert made == expected
    json.dumps(made, allow_nan=False)


# -- reading -----------------------------------------------------------------------------------------------------------


def test_whole_lines_are_read_wherever_the_last_one_was_cut_off(tmp_path):
    """Closing braces of inner tables come before the end of a line."""
    line = json.dumps(
        {"round": 1, "facts": {"loss": 0.5, "more": {}}, "scores": {"train_clients": {"groups": {"a": 1.0}}}}
    )
    for length in range(len(line)):
        (tmp_path / "rounds.jsonl").write_text('{"round": 0}\n' + line[:length])
        assert read_lines(tmp_path) == [{"round": 0}]
    (tmp_path / "rounds.jsonl").write_text('{"round": 0}\n' + line + "\n")
    assert len(read_lines(tmp_path)) == 2
