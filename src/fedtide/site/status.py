"""How a site is: who is connected, and what each node was asked, sent and showed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from fedtide.config.settings import bind_address
from fedtide.core.atomic import replacing
from fedtide.core.errors import FedtideError
from fedtide.fields.types import Flag, Strict, Text, Whole, checked
from fedtide.remote.asks import NodeRecord, nodes_of, read_asks
from fedtide.report.measures import bytes_of
from fedtide.site import certificates
from fedtide.site.files import read_bytes
from fedtide.site.private import spent
from fedtide.site.seat import algorithm_without_rows
from fedtide.site.site import Member, Site

LARGEST = 20_000_000
"""Bytes of a status file."""
STALE = 60
"""Seconds after which a status that was not written again is that of a server that is gone."""


class Connected(Strict):
    """Whether a node is connected.

    Args:
        online: now.
        since: when it last came or went; None if it never came.
    """

    online: Flag
    since: datetime | None = None


class Status(Strict):
    """How a served site is, as its server writes it every few seconds.

    Args:
        at: when this was written.
        round: the current round, from 0.
        rounds: how many there are to be.
        phase: what the server does, in words.
        nodes: by name.
        problem: what a person has to look at; "" where all is well.
        waiting: whom the server waits for, and how each of them can come in.
    """

    at: datetime
    round: Whole
    rounds: Whole
    phase: Annotated[Text, Field(max_length=1000)]
    nodes: dict[str, Connected]
    problem: Annotated[Text, Field(max_length=1000)] = ""
    waiting: Annotated[tuple[Annotated[Text, Field(max_length=1000)], ...], Field(max_length=1000)] = ()

    def write(self, path: Path) -> None:
        """Write it in place of what was written before."""
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(self.model_dump(mode="json")), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Status | None:
        """Read what a server wrote; None where no server ever ran.

        Raises:
            FedtideError: it is damaged.
        """
        if not path.exists():
            return None
        try:
            values = json.loads(read_bytes(path, LARGEST))
        except (ValueError, RecursionError) as error:
            raise FedtideError(f"{path}: damaged or not JSON ({error})") from None
        return checked(Status, values, str(path))

    def age(self, now: datetime) -> float:
        """Return the seconds since this was written."""
        return (now - (self.at if self.at.tzinfo else self.at.replace(tzinfo=UTC))).total_seconds()


def way_in(root: Path, node: Member, found: Connected | None, knocked: str | None, now: datetime) -> str:
    """Say why a node that is waited for is not there, and how it can come in.

    Args:
        root: the site.
        node: of the roster.
        found: when it was last seen; None if it never was.
        knocked: the fingerprint of the key with which it came and was not let in; None if it did not.
        now: the time.
    """
    if node.key is None:
        came = "" if knocked is None else f"; it came with the key {knocked}, which you compare with its owner, then"
        return f"{node.name}: not admitted{came}: fedtide admit {root} {node.name} {node.name}.pub"
    if knocked is not None:
        return (
            f"{node.name}: it comes with another key than the one that is admitted, {knocked}: if it has lost its own, "
            f"remove its line 'key' from {root / 'roster.toml'} and admit the new one"
        )
    if found is None or found.since is None:
        return f"{node.name}: never seen: fedtide join {node.name}.ticket --data ROWS, where its rows are"
    return f"{node.name}: last seen {_ago((now - found.since).total_seconds())}: see what fedtide join says there"


def intent(site: Site, now: datetime) -> Iterator[str]:
    """Say in lines what `fedtide serve` will do."""
    ca = site.authority / "ca.crt"
    certificates.check_authority(read_bytes(ca, LARGEST), str(ca), now)
    yield from about(site)
    deploy, rounds = site.deploy, site.experiment.rounds
    played = len(read_asks(site.record))
    if played >= rounds:
        yield f"rounds: all {rounds} are played; see them with: fedtide report {site.run}"
        return
    yield f"rounds: {rounds - played} of {rounds} are left"
    yield "listens: at port {1} of {0}, the only one".format(*bind_address(site.address))
    each = "when the one before is over" if deploy.every is None else f"every {deploy.every} ({deploy.zone})"
    clients = f"{deploy.fewest} {'client is' if deploy.fewest == 1 else 'clients are'}"
    yield f"begins a round: {each}, once {clients} there"
    few = "" if deploy.fewest == 1 else f"; fewer than {deploy.fewest} count for nothing"
    yield f"waits for answers: {deploy.deadline} from when the question went out{few}"
    before = Status.read(site.status)
    for node in site.roster.node:
        found = None if before is None else before.nodes.get(node.name)
        if found is not None and found.online and before is not None:
            found = Connected(online=False, since=before.at)
        yield f"node {way_in(site.root, node, found, None, now)}"


def about(site: Site) -> Iterator[str]:
    """Say in lines what a site is."""
    title = site.experiment.title or "a study"
    yield f"site: {title}, {site.method.name}, digest {site.digest}, at {site.address}"
    wire = site.experiment.wire
    if wire is not None and wire.secure:
        yield f"sums: masked, opened for {wire.fewest} clients or more"
    if wire is not None and wire.privacy is not None:
        yield from spent(site, algorithm_without_rows(site.experiment, site.about.rows))
    until = certificates.read_certificate(site.authority / "server.crt").not_valid_after_utc
    yield f"certificate: until {until:%Y-%m-%d}; fedtide serve makes a new one in its last 30 days"


HEADER = ("node", "clients", "key", "connected", "asked", "answered", "late", "refused", "shown by client", "received",
          "sent")  # fmt: skip


def lines(site: Site, now: datetime) -> Iterator[str]:
    """Say in lines how a site is."""
    yield from about(site)
    status = Status.read(site.status)
    if status is None:
        yield f"server: never served; start it with: fedtide serve {site.root}"
        return
    age = status.age(now)
    if age > STALE:
        yield f"server: not running; last seen {_ago(age)}, {status.phase}; go on with: fedtide serve {site.root}"
    else:
        yield f"server: round {status.round} of {status.rounds}, {status.phase} ({_ago(age)})"
    if status.problem:
        yield f"problem: {status.problem}"
    if age <= STALE:
        yield from (f"waits for {line}" for line in status.waiting)


def rows(site: Site, now: datetime) -> Iterator[tuple[str, ...]]:
    """Return a row for each node of the roster, in the order of `HEADER`."""
    status = Status.read(site.status)
    alive = status is not None and status.age(now) <= STALE
    told = {node.name: node for node in nodes_of(read_asks(site.record))}
    for node in site.roster.node:
        found = told.get(node.name, NodeRecord(node.name))
        there = status.nodes.get(node.name) if status is not None and alive else None
        yield (
            node.name,
            _ids(node.clients),
            "not admitted" if node.key is None else certificates.fingerprint(node.key)[:19],
            "-" if not alive else _connected(there, now),
            str(found.asked),
            *(str(found.words[word]) for word in ("answered", "late", "refused")),
            ", ".join(sorted(found.shown)) or "nothing",
            bytes_of(found.down),
            bytes_of(found.up),
        )


def reasons(site: Site) -> Iterator[str]:
    """Say why answers were refused or lost, the most frequent reason of each node first."""
    for node in nodes_of(read_asks(site.record)):
        for reason, count in node.reasons.most_common(3):
            yield f"{node.name}: {reason} ({count} times)"


def _ids(clients: tuple[int, ...]) -> str:
    whole = list(clients) == list(range(clients[0], clients[-1] + 1))
    return f"{clients[0]}-{clients[-1]}" if whole and len(clients) > 1 else ", ".join(map(str, clients))


def _connected(found: Any, now: datetime) -> str:
    if found is None or (found.since is None and not found.online):
        return "never"
    since = "" if found.since is None else f" since {_ago((now - found.since).total_seconds()).removesuffix(' ago')}"
    return f"{'yes' if found.online else 'no'},{since}" if since else "yes" if found.online else "no"


def _ago(age: float) -> str:
    for length, word in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if age >= 2 * length:
            return f"{age / length:.0f} {word} ago"
    seconds = f"{max(age, 0):.0f}"
    return f"{seconds} {'second' if seconds == '1' else 'seconds'} ago"
