"""What trackers are told: all that the record says, each round once, whatever was killed."""

import json

import pytest

import fedtide as ft
from fedtide.config import from_dict, resolved
from fedtide.config.settings import TensorBoard, WandB, read_tracker
from fedtide.core.errors import FedtideError
from fedtide.core.record import read_lines
from fedtide.runs.experiment import RunsDisplay
from fedtide.tracking import feed
from fedtide.tracking.feed import Tracked, Tracking, values_of
from helpers.toys import toy


class Kept:
    """A tracker in memory; what is tracked again begins anew, as files do."""

    runs: dict = {}  # noqa: RUF012 - emptied by the fixture

    def __init__(self, track, about):
        self.about = about
        Kept.runs[about.place] = self.told = []
        self.closed = None

    def write(self, step, values):
        self.told.append((step, values))

    def close(self, *, finished):
        self.closed = finished


@pytest.fixture
def kept(monkeypatch):
    Kept.runs = {}
    monkeypatch.setattr(feed, "TRACKERS", dict.fromkeys(feed.TRACKERS, Kept))
    monkeypatch.setattr("fedtide.config.settings.find_spec", lambda name: object())
    return Kept.runs


def tracked(**changes):
    return from_dict(resolved(toy("fedavg", rounds=4, eval_every=2)) | {"track": {"kind": "tensorboard"}} | changes)


def of_record(root):
    return [(line["round"] + 1, values_of(line)) for line in read_lines(root / "toy" / "0")]


def test_a_run_that_is_played_tells_all_that_its_record_says(kept, tmp_path):
    ft.run(tracked(), tmp_path / "run", quiet=True)
    assert kept == {"toy/0": of_record(tmp_path / "run")}
    (*_, (step, last)) = kept["toy/0"]
    assert step == 4
    assert {"up", "down", "held_out_clients/accuracy", "held_out_clients/accuracy_day"} <= last.keys()
    noted = json.loads((tmp_path / "run" / "track" / "track.json").read_text())
    assert noted["whole"] == {"tensorboard": ["toy/0"]}


def test_it_decides_no_number(kept, tmp_path):
    for name, track in (("with", {"kind": "tensorboard"}), ("without", None)):
        ft.run(tracked(track=track), tmp_path / name, quiet=True)
    paths = [tmp_path / name / "toy" / "0" / "rounds.jsonl" for name in ("with", "without")]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    digests = {path.name for path in tmp_path.glob("*/toy/0/checkpoints/*/state.safetensors")}
    assert digests == {"state.safetensors"}


def test_a_record_beyond_the_checkpoint_is_told_once(kept, tmp_path):
    """As a kill leaves it: rounds are recorded, and told, that no checkpoint holds."""
    root = tmp_path / "run"
    whole = tmp_path / "whole"
    ft.run(tracked(checkpoint_every=2), whole, quiet=True)
    ft.run(tracked(checkpoint_every=2), root, quiet=True)
    (root / "track" / "track.json").unlink()
    for path in sorted((root / "toy" / "0" / "checkpoints").iterdir())[1:]:
        for each in path.iterdir():
            each.unlink()
        path.rmdir()
    with open(root / "toy" / "0" / "rounds.jsonl", "a") as file:
        file.write('{"round": 4, "half')
    ft.resume(root, quiet=True)
    assert kept["toy/0"] == of_record(root) == of_record(whole)


def test_a_run_that_ended_untold_is_told_at_the_next_resume(kept, tmp_path):
    root = tmp_path / "run"
    ft.run(tracked(), root, quiet=True)
    (root / "track" / "track.json").write_text('{"study": "0a", "whole": {}}')
    kept.clear()
    ft.resume(root, quiet=True)
    assert kept == {"toy/0": of_record(root)}
    kept.clear()
    ft.resume(root, quiet=True)
    assert kept == {}


def test_a_run_folder_is_tracked_afterwards(kept, tmp_path):
    root = tmp_path / "run"
    ft.run(tracked(track=None), root, quiet=True)
    with pytest.raises(FedtideError, match=r"its config.toml has no \[track\]; allowed: fedtide track .* tensorboard"):
        ft.track(root)
    ft.track(root, "mlflow")
    assert kept == {"toy/0": of_record(root)}


def test_where_a_tracker_fails_the_run_goes_on(kept, tmp_path, monkeypatch):
    def broken(self, step, values):
        raise ConnectionError("no\nserver")

    monkeypatch.setattr(Kept, "write", broken)
    said = []
    experiment = tracked()
    display = Tracking(experiment, tmp_path, RunsDisplay(), said.append)
    from fedtide.runs.experiment import execute

    assert execute(experiment, tmp_path, workers=1, display=display)
    assert said == [f"tracking ended (ConnectionError: no server); later: fedtide track {tmp_path}"]
    assert len(read_lines(tmp_path / "toy" / "0")) == 4


def test_a_missing_library_is_one_line_before_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr("fedtide.config.settings.find_spec", lambda name: None)
    with pytest.raises(
        FedtideError, match=r'track.kind: "tensorboard" needs its library; pip install "fedtide\[track\]"'
    ):
        ft.run(tracked(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_damaged_note_is_one_line(tmp_path):
    (tmp_path / "track").mkdir()
    (tmp_path / "track" / "track.json").write_text("[]")
    with pytest.raises(FedtideError, match=r"track.json: damaged; without it runs are tracked as new ones"):
        Tracked(tmp_path, TensorBoard())


def test_trackers_as_words():
    assert read_tracker("wandb:mine") == WandB(project="mine")
    with pytest.raises(FedtideError, match=r"track: found 'tensorbord', did you mean"):
        read_tracker("tensorbord")
