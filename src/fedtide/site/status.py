"""Status of a site: the connected nodes, and what each node was asked, sent and showed."""

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated

from pydantic import AwareDatetime, Field

from fedtide.config.settings import bind_address
from fedtide.core.atomic import is_locked, write_text
from fedtide.core.errors import FedtideError, in_shell
from fedtide.core.files import read_bytes
from fedtide.core.record import ASKS, read_lines
from fedtide.draw.prose import counted
from fedtide.fields.types import Strict, Text, Whole, checked
from fedtide.remote.asks import LastAnswer, NodeRecord, closed_in, nodes_of, read_asks
from fedtide.remote.fleet import UNITS
from fedtide.report.formats import bytes_of
from fedtide.site import certificates
from fedtide.site.accounts import describe_spent, ledger_for, warn_of_budget
from fedtide.site.client_rows import algorithm_without_rows
from fedtide.site.site import Member, Site
from fedtide.wire.masks import fewest_in_unit

OVER, ENDED = "over", "ended"
"""What a server does when all rounds are played, and when it was ended before."""
CHOSEN = ("clusters", "branches")
"""Kinds of models of which each client may choose one, so that a masked sum has a part for each."""
MOST = 10_000
"""Maximum number of nodes of which a status has the last answer."""
STALE = 60
"""Seconds after which a status that was not written again is of a server that is gone, on systems without locks."""
HEADER = ("node", "clients", "key", "connected", "asked", "answered", "late or lost", "refused",
          "shown beside scores", "received", "sent")  # fmt: skip

Line = Annotated[Text, Field(max_length=1000)]


class Status(Strict):
    """Status of a served site, as its server writes it every few seconds.

    Args:
        at: time of writing.
        round: the current round, from 0.
        rounds: number of rounds in all.
        phase: the server's activity, in words.
        present: names of the nodes that are connected.
        problem: something for a person to look at; "" if all is well.
        waiting: the nodes that the server waits for, with the way in for each.
        heard: the last answers of nodes.
        disagreeing: number of nodes whose rows do not agree with the study.
        warned: number of nodes whose owners were warned of their rows.
    """

    at: AwareDatetime
    round: Whole
    rounds: Whole
    phase: Line
    present: tuple[Line, ...]
    problem: Line = ""
    waiting: Annotated[tuple[Line, ...], Field(max_length=1000)] = ()
    heard: Annotated[tuple[LastAnswer, ...], Field(max_length=MOST)] = ()
    disagreeing: Whole = 0
    warned: Whole = 0

    def write(self, path: Path) -> None:
        """Write the status in place of the one before."""
        write_text(path, json.dumps(self.model_dump(mode="json")))

    @staticmethod
    def read(path: Path) -> "Status | None":
        """Read the status that a server wrote; None if no server ever ran.

        Raises:
            FedtideError: the file is damaged.
        """
        if not path.exists():
            return None
        try:
            values = json.loads(read_bytes(path))
        except (ValueError, RecursionError) as error:
            raise FedtideError(f"{path}: damaged or not JSON ({error})") from None
        return checked(Status, values, str(path))

    def is_gone(self, site: Site, now: datetime) -> bool:
        """Tell whether the server that wrote this runs no longer."""
        is_held = is_locked(site.lock)
        return (now - self.at).total_seconds() > STALE if is_held is None else not is_held


def describe_way_in(root: Path, node: Member, key: str | None = None) -> str:
    """Say why a node that is waited for is not there, and how it can come in.

    Args:
        root: the site.
        node: the node of the roster.
        key: fingerprint of the key with which it knocked and was not let in; None if it did not knock.
    """
    if node.left:
        return f"{node.name}: has left for good"
    if node.key is None:
        knock = "" if key is None else f"; it came with the key {key}, which you compare with its owner, then"
        return f"{node.name}: not admitted{knock}: fedtide admit {in_shell(root)} {node.name} {node.name}.pub"
    if key == certificates.fingerprint(node.key):  # it knocked before it was admitted
        return f"{node.name}: admitted, and let in when it calls again, within seconds"
    if key is not None:
        mend = f"if its own key is lost, remove its line 'key' from {root / 'roster.toml'} and admit the new one"
        return f"{node.name}: it comes with another key than the admitted one, {key}: {mend}"
    return f"{node.name}: not connected: fedtide join {node.name}.ticket --data ROWS, where its rows are"


def describe_plan(site: Site, now: datetime) -> Iterator[str]:
    """Say in lines what `fedtide serve` will do."""
    ca = site.authority / "ca.crt"
    certificates.check_authority(read_bytes(ca), str(ca), now)
    yield from describe_site(site)
    deploy, rounds = site.deploy, site.experiment.rounds
    left = rounds - len(read_lines(site.record, ASKS))
    if left <= 0:
        yield f"rounds: all {rounds} are played; see them with: fedtide report {in_shell(site.run)}"
        return
    yield f"rounds: {left} of {rounds} are left"
    yield "listens: at port {1} of {0}, the only one".format(*bind_address(site.deploy.address))
    begin = "when the one before is over" if deploy.every is None else f"every {deploy.every} ({deploy.zone})"
    yield f"rounds: begin {begin}, if {counted(site.fewest, 'client')} or more are connected"
    yield f"answers: a question waits {deploy.deadline} for them"
    yield from (f"node {describe_way_in(site.root, node)}" for node in site.roster.node)


def describe_site(site: Site) -> Iterator[str]:
    """Describe a site in lines."""
    title = site.experiment.title or "a study"
    yield f"site: {title}, {site.method.name}, digest {site.digest}, at {site.deploy.address}"
    yield from describe_sums(site)
    if site.experiment.privacy is not None:
        yield from describe_spent(site, algorithm_without_rows(site.experiment, site.about.rows))
    until = certificates.read_certificate(site.authority / "server.crt").not_valid_after_utc
    yield f"certificate: until {until:%Y-%m-%d}; fedtide serve makes a new one in its last 30 days"


def describe_sums(site: Site) -> Iterator[str]:
    """Say in lines who sees what clients of a site send, and whether its budget promises little."""
    wire = site.experiment.wire
    if wire is None:
        return
    if wire.secure:
        yield f"sums: masked, opened for {wire.fewest} clients or more"
        traits = algorithm_without_rows(site.experiment, site.about.rows).traits
        if wire.privacy is None and traits.models in CHOSEN:
            holders = {client: node.name for node in site.roster.node for client in node.clients}
            many = f"{fewest_in_unit(holders, wire.fewest)} clients or more choose it in a round"
            yield f"sums: that of a {UNITS[traits.models]} is opened if {many}; else it stays as it was"
    if wire.privacy is not None:
        if not wire.secure:
            yield "sums: not masked, because of secure = false: the server receives each client's answer without noise"
        algorithm = algorithm_without_rows(site.experiment, site.about.rows)
        yield from warn_of_budget(ledger_for(site.experiment, algorithm), site.roster.clients)


def describe_status(site: Site, now: datetime) -> Iterator[str]:
    """Describe the status of a site in lines."""
    yield from describe_site(site)
    status = Status.read(site.status)
    yield from describe_server(site, status, status is not None and status.is_gone(site, now))


def describe_server(site: Site, status: Status | None, is_gone: bool) -> Iterator[str]:
    """Say in lines what the server of a site does, by the status that it wrote last; None if none ever ran."""
    if status is None:
        yield f"server: never served; start it with: fedtide serve {in_shell(site.root)}"
        return
    if status.phase == OVER:
        yield f"server: all {status.rounds} rounds are played; see them with: fedtide report {in_shell(site.run)}"
    elif is_gone:
        how = "ended at" if status.phase == ENDED else "not running since"
        yield f"server: {how} {status.at:%Y-%m-%d %H:%M} UTC; go on with: fedtide serve {in_shell(site.root)}"
    else:
        yield f"server: round {status.round} of {status.rounds}, {status.phase}"
        yield f"rounds: begin if {counted(site.fewest, 'client')} or more are connected"
    if status.problem:
        yield f"problem: {status.problem}"
    if not is_gone:
        yield from describe_rows(status.disagreeing, status.warned)
        yield from (f"waits for {line}" for line in status.waiting)


def describe_rows(disagreeing: int, warned: int) -> Iterator[str]:
    """Say how many nodes have rows that do not agree with the study, and of how many the owners were warned.

    >>> list(describe_rows(1, 0))
    ['rows: 1 node cannot take part: its rows do not agree with the study; its owner knows why']
    """
    if disagreeing:
        rows, owners = ("its rows", "its owner knows") if disagreeing == 1 else ("their rows", "their owners know")
        yield f"rows: {counted(disagreeing, 'node')} cannot take part: {rows} do not agree with the study; {owners} why"
    if warned:
        owners = "its owner knows" if warned == 1 else "their owners know"
        yield f"rows: {counted(warned, 'node')} found rows far from the study's; {owners} in what"


def describe_key(node: Member) -> str:
    """Describe the key of a node in a word."""
    if node.left:
        return "has left"
    return "not admitted" if node.key is None else certificates.fingerprint(node.key)[:19]


def list_nodes(site: Site, now: datetime) -> Iterator[tuple[str, ...]]:
    """Return a row for each node of the roster, in the order of `HEADER`."""
    status = Status.read(site.status)
    present = None if status is None or status.is_gone(site, now) else status.present
    records = {record.name: record for record in nodes_of(read_asks(site.record))}
    for node in site.roster.node:
        record = records.get(node.name, NodeRecord(node.name))
        yield (
            node.name,
            ", ".join(map(str, node.clients)),
            describe_key(node),
            "-" if present is None else "yes" if node.name in present else "no",
            str(record.asked),
            *(str(record.words[word]) for word in ("answered", "late", "refused")),
            ", ".join(sorted(record.shown)) or "nothing",
            bytes_of(record.down),
            bytes_of(record.up),
        )


def list_reasons(site: Site) -> Iterator[str]:
    """Say which sums stayed masked, and why answers were refused or lost, the most frequent reasons of each node."""
    lines = read_asks(site.record)
    for few in closed_in(lines):
        yield f"{few.name}: its sum stayed masked {few.times} times: {few.needed} clients have to choose it in a round"
    for record in nodes_of(lines):
        for reason, count in record.reasons.most_common(3):
            yield f"{record.name}: {reason} ({count} times)"
