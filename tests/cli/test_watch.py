"""`fedtide watch` as a person types it: windows, alarms, the page, and a command for each alarm."""

import json
import os
import re
import sys

import pytest

from fedtide.api import watching
from fedtide.laws.case import toy
from fedtide.runs.preflight import preflight
from fedtide.transforms import windows
from helpers.shell import done, refused
from helpers.studies import A, finished, lines_of, run_of, study

pytestmark = pytest.mark.usefixtures("here", "undrawn")

WATCHED = {**A, "name": "seen", "transforms": [{"kind": "watch", "windows": 2, "train": "never"}]}
TELL = "import sys; open('told.jsonl', 'a').write(sys.stdin.read())"


@pytest.fixture
def alarmed(monkeypatch, here):
    """A run whose third window, the first after the reference, alarms."""
    monkeypatch.setattr(windows, "tells_drift", lambda scores, streams: len(scores) == 3)
    return finished(here / "run", study(A, WATCHED, rounds=5, eval_every=5))


def folder_of(root):
    return next(path.parent for path in root.rglob("alarms.jsonl"))


def test_windows_alarms_and_the_page(alarmed, capsys):
    kinds = [json.loads(line)["kind"] for line in (folder_of(alarmed) / "alarms.jsonl").read_text().splitlines()]
    assert kinds == ["inputs", "predictions", "labels", "meaning"]
    assert [line["facts"]["watch"]["rows"] > 0 for line in lines_of(folder_of(alarmed))] == [True] * 5
    capsys.readouterr()
    assert done("watch", alarmed) == 0
    out = capsys.readouterr().out
    assert len(re.findall(r"^[1-5] +\d+ ", out, re.MULTILINE)) == 5
    assert out.count("alarm: ") == 4
    assert "Labels of every window are counted" in out
    page = (alarmed / "watch.html").read_text()
    assert page.count('class="alarm"') == 4
    assert "accuracy, %" in page
    assert "http-equiv" not in page  # the run is over


def test_the_page_of_the_folder_one_is_in_has_its_name(alarmed, monkeypatch):
    monkeypatch.chdir(alarmed)
    assert done("watch", ".") == 0
    assert "Watch: run<" in (alarmed / "watch.html").read_text()


def test_a_note_says_that_nobody_trained_the_model_that_is_watched():
    notes = preflight(toy("fedavg", {"transforms": [{"kind": "watch", "train": "never"}]})).notes
    assert "method 'toy (watched, trains never)': a random model is watched, because no init_from names one" in notes


def test_clusters_have_a_table_of_their_own(here, monkeypatch, capsys):
    monkeypatch.setattr(windows, "tells_drift", lambda scores, streams: len(scores) == 2)
    transforms = [{"kind": "watch", "windows": 1}]
    clustered = {**A, "name": "clusters", "algorithm": "fielding", "cohort": "everyone", "transforms": transforms}
    root = finished(here / "run", study(clustered, rounds=4, eval_every=4))
    assert done("watch", root) == 0
    assert re.search(r"window \d: group \d: \w+: ", capsys.readouterr().out)
    assert "Groups in the last window" in (root / "watch.html").read_text()


def test_each_alarm_is_told_to_a_command_once(alarmed, here, capsys):
    for _ in range(2):
        assert done("watch", alarmed, "--on-alarm", f'{sys.executable} -c "{TELL}"') == 0
    told = [json.loads(line) for line in (here / "told.jsonl").read_text().splitlines()]
    assert [alarm["kind"] for alarm in told] == ["inputs", "predictions", "labels", "meaning"]
    assert {alarm["round"] for alarm in told} == {2}
    (folder_of(alarmed) / "watch.json").unlink()
    capsys.readouterr()
    assert done("watch", alarmed, "--on-alarm", f"{sys.executable} -c \"import sys; sys.exit('no mail')\"") == 0
    assert capsys.readouterr().out.count("ended with status 1 no mail; the alarm is told again with") == 1
    assert not (folder_of(alarmed) / "watch.json").exists()
    assert "found '/nowhere/mail', allowed: a program that can be run" in refused(
        capsys, here, "watch", alarmed, "--on-alarm", "/nowhere/mail"
    )


def test_a_command_may_print_any_bytes(alarmed, capsys):
    write = "import sys; [file.buffer.write(b'M\\xfcller') for file in (sys.stdout, sys.stderr)]; sys.exit({})"
    assert done("watch", alarmed, "--on-alarm", f'{sys.executable} -c "{write.format(1)}"') == 0
    assert "ended with status 1 M\N{REPLACEMENT CHARACTER}ller" in capsys.readouterr().out
    assert done("watch", alarmed, "--on-alarm", f'{sys.executable} -c "{write.format(0)}"') == 0
    assert (folder_of(alarmed) / "watch.json").exists()


def test_a_command_may_leave_a_process_in_the_background(alarmed, here, capsys):
    assert done("watch", alarmed, "--on-alarm", "sh -c 'until [ -e over -o ! -d run ]; do sleep 0.1; done &'") == 0
    (here / "over").touch()
    assert "--on-alarm" not in capsys.readouterr().out
    assert (folder_of(alarmed) / "watch.json").exists()


def test_a_command_that_takes_too_long_is_ended_with_all_it_started(alarmed, here, capsys, monkeypatch):
    monkeypatch.setattr(watching, "PATIENCE", 1.0)
    os.mkfifo(here / "pipe")
    pipe = os.open(here / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    assert done("watch", alarmed, "--on-alarm", "sh -c '(exec >pipe; sleep 20; echo alive) & wait'") == 0
    os.set_blocking(pipe, True)
    assert os.read(pipe, 5) == b""
    os.close(pipe)
    assert "sh was ended after 1 s" in capsys.readouterr().out
    assert not (folder_of(alarmed) / "watch.json").exists()


def test_it_follows_a_run_until_its_last_round(alarmed, capsys, monkeypatch):
    """Two lines of the record are there, then all: each window is a line."""
    rounds = folder_of(alarmed) / "rounds.jsonl"
    whole = rounds.read_text()
    rounds.write_text("".join(whole.splitlines(keepends=True)[:2]))
    monkeypatch.setattr(watching.time, "sleep", lambda seconds: rounds.write_text(whole))
    capsys.readouterr()
    assert done("watch", alarmed, "--follow", "--on-alarm", "false") == 0
    out = capsys.readouterr().out
    retries = ["the next window", "the next call of this command"]
    assert re.findall("status 1; the alarm is told again with (.*)", out) == retries
    assert re.findall(r": Window (\d)", out) == ["1", "2", "3", "4", "5"]
    assert "about" in out


def test_a_stopped_run_goes_on_with_what_it_knew(tmp_path, monkeypatch):
    """The reference and scores come back from the checkpoint: records and alarms are those of a run without a stop."""
    monkeypatch.setattr(windows, "tells_drift", lambda scores, streams: len(scores) == 5)
    experiment = study(WATCHED, rounds=7, eval_every=7, checkpoint_every=1)
    whole, cut = (run_of(experiment, tmp_path / name) for name in ("whole", "cut"))
    list(whole.play())
    for stop in (2, 4, 7):
        list(cut.play(until=stop))
    assert (whole.folder / "alarms.jsonl").read_text().count("inputs") == 2  # the kind, and the words
    for name in ("rounds.jsonl", "alarms.jsonl"):
        assert (cut.folder / name).read_bytes() == (whole.folder / name).read_bytes()


BAD = [
    (["--on-alarm", "say 'it"], '--on-alarm: found "say \'it", allowed: a command with arguments'),
    (["--on-alarm", ""], "--on-alarm: found '', allowed: a command with arguments"),
    (["--method", "sen"], "--method: found 'sen', allowed: 'A', 'seen (watched, trains never)'"),
    (["--seed", "9"], "--seed: found '9'"),
]


@pytest.mark.parametrize(("words", "said"), BAD)
def test_wrong_options_are_one_line(alarmed, here, capsys, words, said):
    assert said in refused(capsys, here, "watch", alarmed, *words)


def test_what_cannot_be_watched_is_one_line(alarmed, here, capsys):
    assert "not a run folder" in refused(capsys, here, "watch", here / "nothing")
    part = next(alarmed.glob("*/*/rounds.jsonl")).parent
    assert refused(capsys, here, "watch", part) == f"{part}: is a part of a run; its run folder is {alarmed}"
    assert 'no method is watched; add transforms = ["watch"] to one' in refused(
        capsys, here, "watch", alarmed, "--method", "A"
    )
    (alarmed / "watch.html").write_text("mine")
    assert "watch.html" in refused(capsys, here, "watch", alarmed)
    (alarmed / "watch.html").unlink()
    (folder_of(alarmed) / "watch.json").write_text("[]")
    assert done("watch", alarmed, "--on-alarm", "true") == 2
    assert "watch.json: damaged" in capsys.readouterr().err
    record = folder_of(alarmed) / "rounds.jsonl"
    record.write_text(record.read_text().replace('"rows": ', '"rows": "x', 1).replace('"x', '"x", "y": ', 1))
    assert "rounds.jsonl: line 1 is damaged" in refused(capsys, here, "watch", alarmed)
