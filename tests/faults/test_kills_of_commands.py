"""kill -9 of commands that change a site or a run folder, before each change of a file: the same command ends what was
begun, and what is left is what an undisturbed one leaves."""

import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

import fedtide as ft
from fedtide.core.record import ROLLBACKS, rolled_back
from fedtide.runs.folder import create
from fedtide.site.certificates import make_node_key
from fedtide.site.site import Site
from helpers.mortal import changes_in, killed_at
from helpers.near_sites import nodes_of, serve_near, site_of
from helpers.shell import contents, done
from helpers.studies import SCAFFOLD, A, record_of, run_of, study

from .test_kills import kept

KEPT = {"rounds": 6, "eval_every": 1, "checkpoint_every": 1, "keep": {"best": 6}, "data": {"split": {"val": 0.2}}}
LARGE = {"kind": "mlp", "hidden": [600]}
"""A model whose copy in a client's memory is a file."""
MANY = 40
"""Points of one command in `make faults`."""

pytestmark = pytest.mark.usefixtures("undrawn")


def left(root: Path) -> dict[str, bytes]:
    """What is in the folder of a site, but for its lock and what a killed command was writing."""
    return {
        name: content
        for name, content in contents(root).items()
        if Path(name).name != "server.lock" and not name.endswith(".writing")
    }


def points(request: pytest.FixtureRequest, seed: int, count: int, few: int) -> list[tuple[int, bool]]:
    """At which changes a command of so many is killed, and whether what it writes then is half written."""
    every = [(number, torn) for torn in (False, True) for number in range(1, count + 1)]
    most = MANY if request.config.getoption("--tries") else few
    return random.Random(f"{count} {seed}").sample(every, min(len(every), most))


def copied(template: Path, place: Path) -> Path:
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(template, place)
    return place


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Site:
    """A site that has played four rounds and keeps models, and a key that is not admitted."""
    place = tmp_path_factory.mktemp("site")
    source = {"kind": "csv", "path": str(place / "pilot.csv"), "client": "hospital"}
    deploy = {"address": "127.0.0.1:7400", "fewest": 2}
    site = site_of(place, played="FedAvg", deploy=deploy, **KEPT | {"data": {"source": source, "split": {"val": 0.2}}})
    serve_near(site, nodes_of(place, site, lambda name: ""), 4, judged=True)
    make_node_key(place / "lyon.key", place / "lyon.pub", "lyon")
    return site


COMMANDS = {
    "admit": lambda root: ["admit", root, "lyon", root.parent / "lyon.pub"],
    "rollback": lambda root: ["rollback", root, 2],
    "forget": lambda root: ["forget", root, "lyon"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_of_a_site_ends_what_a_killed_one_began(site, tmp_path, request, seed, name, tried: Counter[str]):
    """At no moment the site cannot be read, and no model, round, key or ticket is lost."""
    shutil.copy(site.root.parent / "lyon.pub", tmp_path / "lyon.pub")
    root = copied(site.root, tmp_path / "site")
    words = COMMANDS[name](root)
    count = changes_in(*words)
    whole, before = left(root), left(site.root)
    for change, torn in points(request, seed, count, 12):
        copied(site.root, root)
        killed_at(change, *words, torn=torn)
        tried[f"kills, {name} of a site"] += 1
        Site.read(root, imports=False)
        assert done("status", root) == 0
        assert {*left(root).values()} >= {*before.values()} - {before["roster.toml"]}, "nothing is lost"
        assert done(*words) == 0
        assert alike(left(root)) == alike(whole)


def alike(files: dict[str, bytes]) -> dict[str, bytes]:
    """Lines of rollbacks count once: the last of them holds."""
    return {
        name: b"\n".join(dict.fromkeys(content.splitlines())) if name.endswith(ROLLBACKS) else content
        for name, content in files.items()
    }


@pytest.mark.parametrize("method", [A, SCAFFOLD], ids=["FedAvg", "SCAFFOLD"])
def test_a_rollback_of_a_run_ends_what_a_killed_one_began(tmp_path, request, seed, method, tried: Counter[str]):
    experiment = study(method, **KEPT)
    create(experiment, tmp_path / "template")
    list(run_of(experiment, tmp_path / "template").play(until=4))
    root = copied(tmp_path / "template", tmp_path / "run")
    words = ["rollback", root, 2]
    count = changes_in(*words)
    list(run_of(experiment, root).play())
    whole = record_of(root)
    for change, torn in points(request, seed, count, 4):
        copied(tmp_path / "template", root)
        killed_at(change, *words, torn=torn)
        tried["kills, rollback of a run"] += 1
        assert [verdict.wrong for verdict in ft.verify(root)] == [None]
        assert rolled_back(run_of(experiment, root).folder) in ({}, {4: 2})
        assert done(*words) == 0
        list(run_of(experiment, root).play())
        assert record_of(root) == whole


def test_a_run_that_was_rolled_back_goes_on_after_kills(tmp_path, request, seed, tried: Counter[str]):
    """Files that clients kept by the model that was left are needed until the next checkpoint, and no longer."""
    experiment = study(SCAFFOLD, **KEPT | {"keep": {"best": 2}}, model=LARGE)
    template, root = tmp_path / "template", tmp_path / "run"
    create(experiment, template)
    list(run_of(experiment, template).play(until=4))
    assert list(template.glob("scaffold/0/memory/*"))
    kept_before = [int(path.name) for path in (template / "scaffold" / "0" / "checkpoints").iterdir()]
    assert done("rollback", template, min(kept_before)) == 0
    words = ["resume", copied(template, root), "--workers", 1]
    count, whole = changes_in(*words), kept(root)
    for change, torn in points(request, seed, count, 5):
        copied(template, root)
        killed_at(change, *words, torn=torn)
        tried["kills, resume after a rollback"] += 1
        assert [verdict.wrong for verdict in ft.verify(root)] == [None]
        assert done(*words) == 0
        assert kept(root) == whole


@pytest.mark.parametrize("method", [A, SCAFFOLD], ids=["FedAvg", "SCAFFOLD"])
def test_a_client_is_forgotten_by_the_command_that_a_kill_ended(tmp_path, request, seed, method, tried: Counter[str]):
    """The run with the client stays as it is, and that without it comes out the same."""
    experiment = study(method, rounds=3, checkpoint_every=1)
    create(experiment, tmp_path / "run")
    list(run_of(experiment, tmp_path / "run").play())
    before, new = contents(tmp_path / "run"), tmp_path / "run-without-1"
    words = ["forget", tmp_path / "run", 1, "--workers", 1]
    count = changes_in(*words)
    whole = kept(new)
    for change, torn in points(request, seed, count, 5):
        shutil.rmtree(new)
        killed_at(change, *words, torn=torn)
        tried["kills, forget of a run"] += 1
        assert contents(tmp_path / "run") == before
        assert done(*words) == 0
        assert contents(tmp_path / "run") == before
        assert kept(new) == whole


for _test in (
    test_a_command_of_a_site_ends_what_a_killed_one_began,
    test_a_rollback_of_a_run_ends_what_a_killed_one_began,
    test_a_run_that_was_rolled_back_goes_on_after_kills,
    test_a_client_is_forgotten_by_the_command_that_a_kill_ended,
):
    _test.each = MANY  # type: ignore[attr-defined]
