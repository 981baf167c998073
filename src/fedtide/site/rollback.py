"""Rollback of a site: the next round begins with an earlier model that its server has kept."""

import json
from dataclasses import dataclass

from fedtide.cohorts.in_flight import Flight
from fedtide.core import checkpoint
from fedtide.core.atomic import append
from fedtide.core.errors import FedtideError, refused
from fedtide.core.record import ASKS, LEDGER, ROLLBACKS, read_rounds, run_lock, stopped_after
from fedtide.core.trees import Tree, children, is_node
from fedtide.runs.digest import digest_of
from fedtide.site.client_rows import algorithm_without_rows
from fedtide.site.serve import hold
from fedtide.site.site import Site
from fedtide.site.tickets import check_portable


@dataclass(frozen=True)
class Rollback:
    """A line of the record: `after` so many rounds, the next one begins with the model after `to` rounds."""

    after: int
    to: int


def roll_back(site: Site, number: int) -> Rollback:
    """Write into the record of a site that its next round begins with an earlier model; nothing else is changed.

    Rounds go on in their numbers, because clients have counted those that were. No round is played again, so what nodes
    and ledgers wrote down stays true.

    Args:
        site: the site; no server plays it.
        number: rounds of the model, one that is kept.

    Raises:
        FedtideError: a server runs, the study is over, no such model is kept, or clients have gone on without it.
    """
    check_portable(site.experiment, site.method)  # no code of a site is run
    if not site.record.is_dir():
        raise FedtideError(f"{site.root}: was never served, so there is no earlier model")
    with site.lock.open("w") as file:
        hold(file, site.root)
        with run_lock(site.record):
            rollback = _checked(site, number)
            append(site.record / ROLLBACKS, json.dumps(vars(rollback)))
    return rollback


def _checked(site: Site, number: int) -> Rollback:
    """Return the rollback if it is allowed."""
    folder, config = site.record / "checkpoints", digest_of(site.experiment, site.method, site.seed)
    about = checkpoint.check(folder, config=config)
    if about is None:
        raise FedtideError(f"{site.record}: no round is saved yet, so there is no earlier model")
    if about.round >= site.experiment.rounds or stopped_after(site.record) is not None:
        raise FedtideError(f"{site.root}: the study is over; allowed: fedtide export {site.run} --model {number}")
    traits = algorithm_without_rows(site.experiment, site.about.rows).traits
    if traits.keeps or traits.remembers:
        but = "nodes have what clients kept in later rounds alone"
        raise refused("ROUND", number, f"none, because clients of {site.method.name} keep something", but)
    places = sorted({*about.kept, about.round})
    if number not in places:
        because = "" if about.kept else "the study keeps no earlier models: `keep` says how many"
        raise refused("ROUND", number, ", ".join(map(str, places)), because)
    begun = [line["round"] for name in (ASKS, LEDGER) for line in read_rounds(site.record, name)]
    if number != about.round and max(begun, default=-1) >= about.round:
        but = f"round {max(begun)} was played, and is not saved yet; first: fedtide serve {site.root}"
        raise refused("ROUND", number, f"{about.round} alone", but)
    if _in_flight(checkpoint.kept_state(folder, number, config=config)):
        raise refused("ROUND", number, f"none, because clients of {site.method.name} are at work over several rounds")
    return Rollback(about.round, number)


def _in_flight(tree: Tree) -> bool:
    """Tell whether a state counts on clients that are at work."""
    return isinstance(tree, Flight) or (is_node(tree) and any(_in_flight(child) for _, child in children(tree)))
