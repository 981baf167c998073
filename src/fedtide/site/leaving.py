"""Leaving a site for good: a node is locked out, and rounds that its answers are in are played again without it.

Nodes keep each version of what their clients remember, and the server says which of them counts. So a server that
begins anew needs no change at the other nodes: their tickets and keys stay.

Choices:
    - ours: a node leaves with all of its clients.
    - ours: rounds of masked sums are not played again, because nodes open a question for one list of clients. Nor are
      those of a private study, because every other client would spend its budget twice.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedtide.core import checkpoint
from fedtide.core.atomic import flush
from fedtide.core.errors import in_shell, missing
from fedtide.core.record import ASKS, LEDGER, check_marks, read_lines
from fedtide.draw.prose import counted
from fedtide.remote.asks import ANSWERED
from fedtide.runs import folder
from fedtide.runs.unlearn import name_rounds, state_of
from fedtide.site.accounts import ledger_for
from fedtide.site.client_rows import algorithm_without_rows
from fedtide.site.serve import hold
from fedtide.site.site import Roster, Site, locked, write_roster
from fedtide.wire.ledger import read


def take_out(root: Path, name: str) -> list[str]:
    """Take a node out of a site for good, set the study back if it has to be, and say in lines what was done.

    After a kill the same command ends what was begun.

    Args:
        root: the site, whose server is stopped.
        name: name of the node.

    Raises:
        FedtideError: its server runs, there is no such node, or a file is damaged.
    """
    site = Site.read(root, imports=False)
    with hold(site), locked(root):
        site = Site.read(root, imports=False)
        node = next((node for node in site.roster.node if node.name == name), None)
        if node is None:
            raise missing("NODE", name, [node.name for node in site.roster.node])
        if (about := checkpoint.check(site.record / "checkpoints", config=None)) is not None:
            check_marks(site.record, about.records)  # it tells what the node has answered
        gone = node.model_copy(update={"key": None, "left": True})
        nodes = tuple(gone if other.name == name else other for other in site.roster.node)
        write_roster(root, Roster(node=nodes))  # first: whatever follows, the server lets it in no more
        lines = [f"{name}: is locked out for good, with {counted(len(node.clients), 'client')}"]
        count = sum(len(other.clients) for other in nodes if not other.left)
        if count < site.fewest:
            lines.append(f"too few are left: a round waits for {counted(site.fewest, 'client')}, and there are {count}")
        return [*lines, *_set_back(site, name, node.clients)]


def _set_back(site: Site, name: str, clients: Sequence[int]) -> Iterator[str]:
    """Put the run of a site aside if a node that has left is in what is saved; say in lines what was done."""
    root, wire = site.root, site.experiment.wire
    about = checkpoint.check(site.record / "checkpoints", config=None)
    # The record of a round is written after its sums are released, so a kill leaves some that only the ledger has.
    released = {line.round for line in read(site.record / LEDGER) if set(line.clients) & set(clients)}
    serve = f"fedtide serve {in_shell(root)}"
    took = sorted({*rounds_of(read_lines(site.record, ASKS), name), *released})
    saved = 0 if about is None else about.round
    if not took:
        yield f"{name}: never answered and was never judged: nothing to play again"
        return
    yield f"{name}: answered or was judged in {name_rounds(took)}"
    if wire is not None and wire.privacy is not None:
        yield from describe_released(site, clients)
        yield "nothing is set back, because every other client would spend its budget twice"
    elif wire is not None and wire.secure:
        yield "cannot be taken back: masked sums of these rounds, and the models that are made of them"
        yield "nothing is set back, because nodes open a round for one list of clients; without it: a new site"
    elif took[0] >= saved:
        yield f"nothing is set back: {counted(saved, 'saved round')} are without it"
    else:
        aside, before = folder.unused(root, f"run-with-{name}"), state_of(site.record)
        os.rename(site.run, aside)
        flush(root)
        yield f"state: {before} after {counted(saved, 'round')} with it, which are in {aside}; delete it when you like"
        yield f"cannot be taken back: models that other nodes were sent after round {took[0]}"
        yield f"all rounds are played again without it; other nodes keep tickets and keys: {serve}"
        return
    yield f"to go on without it: {serve}"


def rounds_of(lines: Sequence[Mapping[str, Any]], name: str) -> list[int]:
    """Return the rounds in which a client of a node answered or was judged, sorted.

    >>> asked = {"nodes": {"lyon": {"clients": {"3": "answered"}}, "oslo": {"clients": {"4": "late"}}}}
    >>> line = {"round": 2, "asks": [asked], "scored": {"berlin": {"down": 9, "up": 8}}}
    >>> [rounds_of([line], name) for name in ("lyon", "oslo", "berlin")]
    [[2], [], [2]]
    """
    return [
        line["round"]
        for line in lines
        if line.get("scored", {}).get(name, {}).get("up")
        or any(ANSWERED in ask["nodes"].get(name, {}).get("clients", {}).values() for ask in line["asks"])
    ]


def describe_released(site: Site, clients: Sequence[int]) -> Iterator[str]:
    """Say in lines what a private study has released with some clients."""
    ledger = ledger_for(site.experiment, algorithm_without_rows(site.experiment, site.about.rows))
    assert ledger is not None  # the caller asks it of private studies alone
    spent = ledger.fresh(lines=read(site.record / LEDGER))
    for client in clients:
        rounds = spent.released(client)
        epsilon = f"epsilon {spent.epsilon(client):.3g} at delta {spent.delta:g}"
        sums = f"noised sums of {name_rounds(rounds)}, with {epsilon}" if rounds else "no sum"
        yield f"client {client}: released, and cannot be taken back: {sums}"
