"""`fedtide forget`: a run folder is played again as if a client had never taken part."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

import fedtide as ft
from fedtide.core.record import first_work_in
from fedtide.runs import folder
from fedtide.runs.unlearn import Leaving
from helpers.shell import contents, done, refused, written
from helpers.studies import SCAFFOLD, A, finished, lines_of, record_of, study
from helpers.toys import TOY

pytestmark = pytest.mark.usefixtures("here", "undrawn")

LOCAL = {"local": {"lr": 0.1, "batch_size": 4}, "cohort": 4}
METHODS = [
    A,
    SCAFFOLD,
    {"name": "ifca", "algorithm": "ifca", **LOCAL},
    {"name": "fedtem", "algorithm": "fedtem", **LOCAL},
    {"name": "fedtkm", "algorithm": "fedtkm", **LOCAL},
]
"""Sums; memory of clients; models of clusters; branches of a mixture."""

PRIVATE = {"epsilon": 8.0, "delta": 0.01, "clip": {"delta": 1.0, "loss": 2.0}, "noise": "plain", "distance": 2}


def joined(root: Path, name: str = "A") -> dict[int, int]:
    """The first round of each client that worked in a run."""
    return first_work_in(lines_of(root / name.lower() / "0"))


def late(root: Path, name: str = "A") -> tuple[int, int]:
    """A client that joined last, and when."""
    return max(joined(root, name).items(), key=lambda pair: pair[1])


def test_the_bits_are_those_of_a_run_without_it(here, capsys):
    finished(here / "x", study(*METHODS))
    client, first = late(here / "x")
    assert first > 0
    before = contents(here / "x")
    capsys.readouterr()
    assert done("forget", "x", client, "--workers", 1, "--json") == 0
    runs = json.loads(capsys.readouterr().out)["comparisons"]
    assert contents(here / "x") == before
    data = {**TOY["data"], "without_clients": [str(client)]}
    finished(here / "alone", study(*METHODS, data=data))
    new = f"x-without-{client}"
    assert record_of(here / new) == record_of(here / "alone")
    assert not [verdict.wrong for verdict in ft.verify(here / new) if verdict.wrong]
    for method, run in zip(METHODS, runs, strict=True):
        name = method["name"]
        assert client not in joined(here / new, name)
        lines = [lines_of(here / root / name.lower() / "0") for root in ("x", new)]
        began = joined(here / "x", name).get(client, 6)
        assert [line["facts"] for line in lines[0][:began]] == [line["facts"] for line in lines[1][:began]]
        assert run["first"] == (None if began == 6 else began)
        assert run["same"] >= began
        assert (run["states"][0] == run["states"][1]) == (began == 6)
    rows = (here / new / "a" / "0" / "clients.csv").read_text().splitlines()
    assert not [row for row in rows if row.split(",")[2] == str(client)]
    assert f"Without client {client}, which has left." in (here / new / "report.html").read_text()


def test_a_run_folder_that_is_not_finished_is_refused(here, capsys):
    folder.create(study(A, SCAFFOLD), here / "my x")
    line = refused(capsys, here, "forget", "my x", "3")
    assert "my x: 2 of 2 runs are not finished; go on with: fedtide resume 'my x'; or begin" in line
    assert not (here / "my x-without-3").exists()


def test_killed_on_the_way_the_same_command_goes_on(here, shell):
    written(here / "study.toml", SCAFFOLD, rounds=24, checkpoint_every=1)
    finished(here / "x", ft.config.read(here / "study.toml"))
    client, _ = late(here / "x", "scaffold")
    assert done("forget", "x", client, "--out", "whole", "--workers", 1, "--quiet") == 0
    new, killed = here / f"x-without-{client}", 0
    for rounds in (1, 8):
        process = shell.start("forget", "x", client, cwd=here)
        record, limit = new / "scaffold" / "0" / "rounds.jsonl", time.monotonic() + 60
        while not record.is_file() or record.read_bytes().count(b"\n") < rounds:
            assert time.monotonic() < limit, process.err
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
    assert killed
    assert done("forget", "x", client, "--workers", 1, "--quiet") == 0
    assert record_of(new) == record_of(here / "whole")


@pytest.mark.parametrize("name", [".", "a/.."])
def test_a_run_folder_can_be_the_folder_one_is_in(here, monkeypatch, name):
    root = finished(here / "x", study(A))
    client, _ = late(root)
    monkeypatch.chdir(root)
    for command in ("report", "verify", "resume"):
        assert done(command, name, "--quiet") == 0
    assert done("forget", name, client, "--workers", 1, "--quiet") == 0
    assert (here / f"x-without-{client}" / "report.html").is_file()


def test_nothing_is_played_for_a_client_that_never_worked_and_was_never_judged(here, capsys):
    root = finished(here / "x", study({**A, "cohort": 1}, rounds=2, eval_splits=["held_out_clients"]))
    away = next(client for client in range(8) if client not in joined(root))
    assert done("forget", "x", away) == 0
    assert "nothing to play again" in capsys.readouterr().out
    assert not (here / f"x-without-{away}").exists()


@pytest.mark.parametrize("changes", [
    {}, {"eval_splits": ["held_out_clients"], "forgetting": {"rounds": [1], "eval_clients": 8}},
])  # fmt: skip
def test_a_client_that_was_judged_is_forgotten_although_it_never_worked(here, changes):
    """Evaluations decide which models stay, and when a run stops."""
    root = finished(here / "x", study({**A, "cohort": 1}, rounds=2, **changes))
    away = next(client for client in range(8) if client not in joined(root))
    (run,) = ft.forget("x", away, quiet=True).comparisons
    assert (run.first, run.same) == (None, 2)
    rows = (here / f"x-without-{away}" / "a" / "0" / "clients.csv").read_text().splitlines()
    assert not [row for row in rows if row.split(",")[2] == str(away)]


def test_whose_rows_are_pooled_has_worked(here):
    pooled = {"name": "C", "algorithm": "centralized", "local": A["local"]}
    root = finished(here / "x", study(pooled, rounds=2, shift={"who": "always"}))
    assert set(joined(root, "C").values()) == {0}


def test_what_cannot_be_forgotten_is_one_line(here, capsys):
    finished(here / "x", study(A, rounds=2, data={**TOY["data"], "held_out_clients": {"clients": 2}}))
    client, _ = late(here / "x")
    for name in ("zz", "9" * 20):
        assert f"CLIENT: found '{name}', allowed: the number of a client" in refused(capsys, here, "forget", "x", name)
    assert "CLIENT: found 8, but the others are held out" in refused(capsys, here, "forget", "x", 8)
    assert "nowhere: not a run folder" in refused(capsys, here, "forget", "nowhere", 1)
    finished(here / "other", study(A, rounds=3))
    said = refused(capsys, here, "forget", "x", client, "--out", "other")
    assert "other: already exists, allowed: a new or empty folder" in said
    assert done("forget", "x", client, "--quiet") == 0
    assert f"is without {client} already" in refused(capsys, here, "forget", f"x-without-{client}", client)
    state = next((here / "x" / "a" / "0").glob("checkpoints/*/state.safetensors"))
    state.write_bytes(state.read_bytes()[:-1] + b"\0\0")
    (here / "x" / "a" / "0" / "rounds.jsonl").write_text("{}\n")
    assert "rounds.jsonl" in refused(capsys, here, "forget", "x", client, "--out", "y")


@pytest.mark.parametrize("more", [{}, {"scores": 900.0}])
def test_a_private_run_says_what_cannot_be_taken_back(here, more):
    wire = {"secure": False, "fewest": 1, "privacy": PRIVATE | more}
    root = finished(here / "x", study(A, wire=wire))
    released = [json.loads(line) for line in (root / "a" / "0" / "ledger.jsonl").read_text().splitlines()]
    client = released[0]["clients"][0]
    rounds = sorted({line["round"] for line in released if client in line["clients"]})
    assert any(line["question"].startswith("score") for line in released) == bool(more)
    result = ft.forget("x", client, quiet=True)
    (run,) = result.comparisons
    assert list(run.released) == rounds
    assert "cannot be taken back" in list(run.lines())[-1]
    ledger = Path(result.folder, "a", "0", "ledger.jsonl").read_text().splitlines()
    assert not [line for line in map(json.loads, ledger) if client in line["clients"]]


def named(*names: str) -> Path:
    """A finished study whose clients have these names."""
    lines = ["client,a,b,label"]
    lines += [f"{name},{n % 7 + 100 * (name == 'far')},{n % 5},{n % 2}" for name in names for n in range(30)]
    Path("rows.csv").write_text("\n".join(lines) + "\n")
    source = {"kind": "csv", "path": "rows.csv", "label": "label", "client": "client", "features": ["a", "b"]}
    data = {"source": source, "partition": {"kind": "natural"}}
    values = {"rounds": 2, "data": data, "model": {"kind": "linear"}, "method": [{**A, "cohort": 2}]}
    return finished(Path("x"), ft.config.from_dict(values))


def test_scales_of_features_are_without_it(here):
    """Then no round is as it was, and a client that never worked is not without effect."""
    named("near", "mid", "far", "off")
    result = ft.forget("x", "far", quiet=True)
    assert result.folder == Path("x-without-far")
    assert result.comparisons[0].same == 0


def test_clients_of_nearly_the_same_name_leave_into_folders_of_their_own(here):
    """A name without a letter or a digit makes no folder's name either."""
    root = named("a/b", "a&b", "..", "c")
    for name, new in (("a/b", "x-without-a-b"), ("a&b", "x-without-client-"), ("..", "x-without-client-")):
        place = Leaving.of(root, name).place
        assert str(place).startswith(new)
        assert ft.forget("x", name, quiet=True).folder == place  # and once more it goes on
        assert Leaving.of(root, name).place == place
    assert len(list(here.glob("x-without-*"))) == 3
