"""Rollback of a run: its next round begins with an earlier model that is kept.

Rounds go on in their numbers, because clients, ledgers and the record have counted those that were.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from fedtide.cohorts.in_flight import Flight
from fedtide.core import checkpoint
from fedtide.core.atomic import append
from fedtide.core.errors import FEW, FedtideError, in_shell, refused
from fedtide.core.record import ASKS, LEDGER, ROLLBACKS, check_marks, read_lines, rolled_back, run_lock, stopped_after
from fedtide.core.trees import Tree, children, is_node
from fedtide.runs.digest import digest_to_read
from fedtide.runs.folder import Planned, go_on, load, plan


@dataclass(frozen=True)
class Rollback:
    """A line of the record: `after` so many rounds, the next one begins with the model after `to` rounds."""

    after: int
    to: int

    def write(self, folder: Path) -> None:
        """Add the line to the record of a run."""
        append(folder / ROLLBACKS, json.dumps(vars(self)))


def roll_back(folder: Path, number: int) -> tuple[Rollback, Path]:
    """Write into the record of a simulated run that its next round begins with an earlier model; change nothing else.

    Its clients go on with what they kept then, too. No code that the configuration names is run.

    Args:
        folder: of the run, RUN/METHOD/SEED, or a run folder with one run.
        number: rounds of the model, one that is kept.

    Returns:
        The rollback, and the run folder.

    Raises:
        FedtideError: there is no such run, it is played now or over, or no such model is kept.
    """
    root, run = _find(folder)
    if not run.folder.is_dir():
        raise FedtideError(f"{run.folder}: was never played, so there is no earlier model")
    asks = run.folder / ASKS
    if asks.is_file() and asks.stat().st_size:
        raise FedtideError(f"{run.folder}: its clients are real; allowed: the folder of its site")
    with run_lock(run.folder):
        config = digest_to_read(run)
        about = check_open(run.folder, root, config=config, rounds=run.experiment.rounds)
        rollback = check_kept(run.folder, about, number, name=run.method.name, go_on=go_on(root))
        rollback.write(run.folder)
    return rollback, root


def _find(folder: Path) -> tuple[Path, Planned]:
    """Return a run folder and the run that is meant."""
    above = folder.parent.parent
    root = above if (above / "config.toml").is_file() and not (folder / "config.toml").is_file() else folder
    runs = plan(load(root, imports=False), root)
    matches = [run for run in runs if folder in (root, run.folder)]
    if len(matches) != 1:
        but = "it has several runs" if matches else "it is not one of its runs"
        allowed = ", ".join(str(run.folder) for run in runs[:FEW])
        raise refused("FOLDER", str(folder), f"{allowed}{', ...' * (len(runs) > FEW)}", but)
    return root, matches[0]


def check_open(folder: Path, root: Path, *, config: str | None, rounds: int) -> checkpoint.About:
    """Return the description of a run's newest checkpoint; raise if it has none, is over, or its record is damaged.

    Args:
        folder: of the run.
        root: its run folder.
        config: digest of its configuration; None if that is not known.
        rounds: of the run.
    """
    about = checkpoint.check(folder / "checkpoints", config=config)
    if about is None:
        raise FedtideError(f"{folder}: no round is saved yet, so there is no earlier model")
    check_marks(folder, about.records)
    rolled_back(folder)  # raises if its file is damaged
    if about.round >= rounds or stopped_after(folder) is not None:
        numbers = " or ".join(map(str, sorted(about.there)))
        command = f"fedtide export {in_shell(root)} --model N, with N {numbers}"
        raise FedtideError(f"{folder}: the study is over; allowed: {command}")
    return about


def check_kept(folder: Path, about: checkpoint.About, number: int, *, name: str, go_on: str) -> Rollback:
    """Return a rollback if it is allowed.

    Args:
        folder: of the run.
        about: its newest checkpoint.
        number: rounds of the model.
        name: of the method.
        go_on: command that plays the run on.

    Raises:
        FedtideError: no such model is kept, more was played than is saved, or clients are at work over several rounds.
    """
    places = sorted(about.there)
    if number not in places:
        because = "" if about.kept else "no earlier models were kept: `keep` says how many, by validation rows"
        raise refused("ROUND", number, ", ".join(map(str, places)), because)
    asked, released = ([line["round"] for line in read_lines(folder, record)] for record in (ASKS, LEDGER))
    # A sum that was released is of the model with which its round began, and is taken when the round is played again.
    began = (
        rolled_back(folder).get(about.round, about.round) if max(released, default=-1) >= about.round else about.round
    )
    if number != began and max([*asked, *released], default=-1) >= about.round:
        but = f"round {max([*asked, *released])} was played, and is not saved yet; first: {go_on}"
        raise refused("ROUND", number, f"{began} alone", but)
    if _in_flight(checkpoint.kept_state(folder / "checkpoints", number, config=about.config)):
        raise refused("ROUND", number, f"none, because clients of {name} are at work over several rounds")
    return Rollback(about.round, number)


def _in_flight(tree: Tree) -> bool:
    """Tell whether a state counts on clients that are at work."""
    return isinstance(tree, Flight) or (is_node(tree) and any(_in_flight(child) for _, child in children(tree)))
