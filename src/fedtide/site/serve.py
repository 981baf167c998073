"""A server of real clients: plays a site's study, saves after every round, and goes on after whatever ended it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedtide.config.settings import bind_address
from fedtide.core.base import Algorithm, Facts, Shard, Simulation
from fedtide.core.errors import FedtideError
from fedtide.core.memory import MemoryStore
from fedtide.core.record import read_rounds
from fedtide.core.rng import Rng
from fedtide.evaluate.judge import Judge, views
from fedtide.fields.types import seconds_of, zone_of
from fedtide.fleets.totals import Vectors
from fedtide.remote.answers import one_line
from fedtide.remote.fleet import RemoteFleet
from fedtide.remote.grpc.server import GrpcCarrier
from fedtide.remote.messages import Carrier
from fedtide.remote.schedule import Present, RealClock, Rehearsed, RoundClock, WallClock, Who
from fedtide.report.page import write_report
from fedtide.runs import folder
from fedtide.runs.build import host_of, metrics_of, wire_of
from fedtide.runs.private import server_wire
from fedtide.runs.runner import Progress, Run
from fedtide.site import certificates
from fedtide.site.log import Health, Log
from fedtide.site.private import forget, private_wire, safe_of
from fedtide.site.seat import algorithm_without_rows, like
from fedtide.site.site import Roster, Site, read_roster
from fedtide.site.status import Connected, Status, way_in
from fedtide.wire.answer_schema import Schemas, made_up
from fedtide.wire.ledger import LEDGER
from fedtide.wire.masks import Bundle, library, verified
from fedtide.wire.pipeline import Wire
from fedtide.wire.release import simulated_noise

WAITED = 20
"""Nodes of which is said how they can come in; a table has the others."""
TOLD = 3.0
"""Seconds between two writings of the status file."""
LOOK = 1.0
"""Seconds between two looks at whose keys are admitted."""
DAY = 86_400.0
"""Seconds between two looks at the server's certificate."""
SETTLE = 20.0
"""Seconds that a server, when it is started, gives nodes that are admitted to come in, beyond the fewest."""
AGAIN = 300.0
"""Seconds after which it is said again whom the server waits for."""
FIRST = 3.0
"""Seconds that nodes have to come back to a server that is started again before it is said whom it waits for."""


@dataclass(frozen=True)
class Unseen:
    """The clients of a site, of whose rows the server knows nothing (`fedtide.core.base.Holdings`).

    Args:
        registered: how many clients there are.
        has_val: whether they keep validation rows.
        row: a row as the model sees it, of zeros.
        classes: how many there are.
    """

    registered: int
    has_val: bool
    row: Shard
    classes: int

    @property
    def clients(self) -> Tensor:
        """All ids."""
        return torch.arange(self.registered)

    @property
    def held_out_clients(self) -> Tensor:
        """No ids: all clients may be asked to train."""
        return torch.arange(0)

    def counts(self, clients: Tensor, part: str) -> Tensor:
        """Return one row for each client, of the parts that the study has."""
        return torch.full((len(clients),), int(part != "val" or self.has_val))

    def few(self) -> tuple[Shard, int]:
        """Return the row of zeros and the number of classes."""
        return self.row, self.classes


@dataclass
class Latest:
    """The roster of a site as it was last written well; it is read while people edit it.

    Args:
        root: the site.
        known: as it was read at first.
        log: is told once of each thing that is wrong with it.
        wrong: what is wrong with it now; "" if nothing is.
    """

    root: Path
    known: Roster
    log: Log
    wrong: str = ""
    _stamp: tuple[int, int, int] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self) -> Roster:
        """Return it; if it cannot be read, or lacks nodes that were there, as it was before."""
        with self._lock:
            return self._read()

    def _read(self) -> Roster:
        wrong = ""
        try:
            about = (self.root / "roster.toml").stat()
            stamp = about.st_mtime_ns, about.st_size, about.st_ino
            if stamp == self._stamp:
                return self.known
            self._stamp = stamp
            found = read_roster(self.root)
            there = {node.name: node.clients for node in found.node}
            lacking = [node.name for node in self.known.node if there.get(node.name) != node.clients]
            if lacking:
                wrong = f"{self.root / 'roster.toml'}: node '{lacking[0]}' was removed, or its clients were changed; "
                wrong += "to lock a node out, remove its line 'key'"
            else:
                self.known = found
        except (FedtideError, OSError) as error:
            wrong = str(error)
        if wrong and wrong != self.wrong:
            self.log.say("roster", f"{wrong}; the roster is kept as it was")
        self.wrong = wrong
        return self.known


@dataclass
class Watch:
    """What a server says of itself: a line where something happens, a status file, and a health address.

    Args:
        site: what is served.
        log: takes the lines.
        carrier: knows who is connected.
        latest: the roster, of which it says what is wrong; None says nothing of it.
        phase: what the server does, in words.
        round: how many rounds are over.
        next: when the next one begins, where a clock says so.
        missing: how many clients more have to be there for a round to begin.
    """

    site: Site
    log: Log
    carrier: GrpcCarrier
    latest: Latest | None = None
    phase: str = "starting"
    round: int = 0
    next: datetime | None = None
    missing: int = 0
    _since: dict[str, tuple[bool, datetime]] = field(default_factory=dict)
    _whom: tuple[str, ...] = ()
    _said: float = 0.0
    _quiet: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _wrong: str = ""

    def look(self) -> Status:
        """Return how the server is, and say who came and went."""
        with self._lock:
            return self._look()

    def _look(self) -> Status:
        now, there = datetime.now(UTC), self.carrier.present()
        for node in self.site.roster.node:
            before = self._since.get(node.name)
            online = node.name in there
            if before is None and not online:
                continue
            if before is None or before[0] != online:
                self._since[node.name] = (online, now)
                self.log.say(
                    "node", f"{node.name} {'is connected' if online else 'is gone'}", node=node.name, online=online
                )
        nodes = {name: Connected(online=online, since=since) for name, (online, since) in self._since.items()}
        more = f"{self.missing} more {'client' if self.missing == 1 else 'clients'}"
        phase = f"waiting for {more}" if self.missing else self.phase
        if phase == "playing" and self.next is not None and now < self.next:
            phase = f"waiting for {self.next:%H:%M:%S} ({self.site.deploy.zone}), when the next round begins"
        return Status(
            at=now,
            round=self.round,
            rounds=self.site.experiment.rounds,
            phase=phase,
            nodes={node.name: nodes.get(node.name, Connected(online=False)) for node in self.site.roster.node},
            waiting=self._ways_in(nodes, there, now) if self.missing else (),
            problem=self._wrong or ("" if self.latest is None else self.latest.wrong[:1000]),
        )

    def _ways_in(self, nodes: Mapping[str, Connected], there: frozenset[str], now: datetime) -> tuple[str, ...]:
        """Say of each node that is not there how it can come in."""
        knocked = {name: certificates.fingerprint(key) for name, key in self.carrier.knocked().items()}
        away = [node for node in self.site.roster.node if node.name not in there]
        return tuple(
            way_in(self.site.root, node, nodes.get(node.name), knocked.get(node.name), now) for node in away[:WAITED]
        )

    def waits(self, missing: int, number: int) -> None:
        """Note for how many clients a round waits; say for whom, when that changes and every few minutes."""
        self.missing = missing
        status = self.look()
        whom = tuple(line.partition(":")[0] for line in status.waiting)
        now = time.monotonic()
        if missing and now < self._quiet:
            return
        if missing and (whom != self._whom or now - self._said > AGAIN):
            for line in (f"{status.phase} before round {max(number, 0) + 1} begins", *status.waiting):
                self.log.say("waiting", line)
            self._said = now
        self._whom = whom

    def write(self) -> None:
        """Write the status file; where it cannot be written, say so once and go on."""
        wrong = ""
        try:
            self.look().write(self.site.status)
        except OSError as error:
            why = error.strerror or error
            wrong = f"{self.site.status} cannot be written ({why}). Then the rounds cannot be saved either"
        if wrong and wrong != self._wrong:
            self.log.say("disk", wrong)
        self._wrong = wrong

    def remember(self) -> None:
        """Know what the server before this one has played, and when nodes were last seen."""
        self.round = len(read_rounds(self.site.record))
        try:
            before = Status.read(self.site.status)
        except FedtideError:  # it is written anew
            return
        if before is None:
            return
        self._quiet = time.monotonic() + FIRST
        for name, node in before.nodes.items():
            if (seen := before.at if node.online else node.since) is not None:
                self._since[name] = (False, seen if seen.tzinfo else seen.replace(tzinfo=UTC))

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Write the status every few seconds meanwhile."""
        self.write()
        with _repeated(self.write, TOLD, self.log):
            yield
        self.write()


@contextmanager
def _repeated(work: Callable[[], None], seconds: float, log: Log) -> Iterator[None]:
    """Do some work every few seconds meanwhile; an error in it is said, and does not end it."""
    over, said = threading.Event(), ""

    def repeat() -> None:
        nonlocal said
        while not over.wait(seconds):
            try:
                work()
            except Exception as error:
                line = f"{type(error).__name__}: {one_line(error)}; it is tried again"
                if line != said:
                    log.say("failed", line)
                said = line

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def serve(site: Site, *, log: Log, health: int | None = None, rehearsed: bool = False) -> int:
    """Play the study of a site on its nodes until it is over; return the exit status.

    Args:
        site: its folder.
        log: takes what happens.
        health: a port of this machine at which programs can ask how the server is; None opens none.
        rehearsed: nodes have the rows of the study, and those take part that its simulation draws.

    Raises:
        FedtideError: it cannot be served.
    """
    library()
    _renew(site, log)
    host, port = bind_address(site.address)
    with ExitStack() as stack:
        carrier = stack.enter_context(
            GrpcCarrier(host, port, run=site.digest, authority=site.authority, nodes=len(site.roster.node))
        )
        latest = Latest(site.root, site.roster, log)
        watch = Watch(site, log, carrier, latest)
        _let_in(carrier, latest)
        stack.enter_context(_repeated(partial(_let_in, carrier, latest), LOOK, log))
        stack.enter_context(_repeated(partial(_renew, site, log), DAY, log))
        if not site.run.exists():
            folder.create(site.experiment, site.run)
        if health is not None:
            answers = stack.enter_context(Health(health, lambda: watch.look().model_dump(mode="json")))
            log.say("health", f"health: {answers.address}")
        watch.remember()
        stack.enter_context(watch.looking())
        log.say("served", f"nodes are let in at {site.address}", address=site.address)
        watch.phase, over = "playing", False
        settle = time.monotonic() + SETTLE

        def waits(there: int) -> bool:
            nonlocal settle
            roster = latest.read()
            if roster.clients > watch.site.roster.clients:
                raise _Grown
            enough = roster.clients if rehearsed else site.deploy.fewest
            admitted = sum(len(node.clients) for node in roster.node if node.key is not None)
            watch.waits(max(enough - there, 0), fleet.moment.round)
            if there >= enough and (there >= admitted or time.monotonic() > settle):
                settle = 0.0
                return False
            return True

        while not over:
            watch.site = site = replace(site, roster=latest.read())
            fleet, judge = judge_of(site, carrier, rehearsed, log, waits)
            try:
                for progress in play_rounds(site, fleet, judge, log, latest):
                    watch.round, over = progress.round, progress.round == progress.rounds
                    watch.next = next_round(fleet)
                    shown = "" if progress.accuracy is None else f": accuracy {progress.accuracy:.4f}"
                    log.say("round", f"round {progress.round} of {progress.rounds}{shown}", **vars(progress))
                    watch.write()
            except _Grown:
                continue
            over = over or latest.read().clients == site.roster.clients
        watch.phase = "over"
        if away := sum(node.key is not None and node.name not in carrier.present() for node in site.roster.node):
            log.say("over", f"the study is over; nodes away: {away}; they have {SETTLE:.0f} s to connect and learn it")
        forget(site)
        carrier.finish(SETTLE)
    log.say("over", f"report: {write_report([site.run])}")
    return 0


class _Grown(Exception):
    """The roster has grown while a round waits for clients to be there."""


def _let_in(carrier: GrpcCarrier, latest: Latest) -> None:
    """Let in those whose keys the roster has, and no others."""
    nodes = latest.read().node
    keys = {node.name: node.key for node in nodes if node.key is not None}
    carrier.admit(keys, frozenset(node.name for node in nodes))


def _renew(site: Site, log: Log) -> None:
    """Make the server's certificate anew if it ends soon; say what was done, or what is in the way."""
    if said := certificates.renew_if_due(site.authority, site.address):
        log.say("certificate", said)


def without_failures(
    algorithm: Algorithm, fleet: RemoteFleet, fail: Callable[[str, int, Exception], None]
) -> Algorithm:
    """Return an algorithm whose rounds never end a server by what clients answered: the state stays as it was.

    Args:
        algorithm: as simulations play it.
        fleet: the clients that it asks.
        fail: is told the last question, the round and the error.
    """

    def round(state: Any, asked: Simulation, rng: Rng) -> tuple[Any, Facts]:
        try:
            return algorithm.round(state, asked, rng)
        except (FedtideError, OSError):  # a ledger that cannot be written must end it
            raise
        except Exception as error:
            if not any(len(query.answered) for query in fleet.queries):
                raise  # no answer is to blame
            fail(fleet.queries[-1].ask.question, fleet.moment.round, error)
            return state, {}

    return replace(algorithm, round=round)


def judge_of(
    site: Site, carrier: Carrier, rehearsed: bool, log: Log, waits: Callable[[int], bool] = lambda there: False
) -> tuple[RemoteFleet, Judge]:
    """Return the fleet of a site's nodes, and who judges it."""
    experiment, method = site.experiment, site.method
    about = site.about.rows
    row = like(about, experiment.data.transforms)
    who: Who
    held: Any
    if rehearsed:
        host = host_of(experiment, method, site.seed, MemoryStore(None))
        algorithm, who, held = host.algorithm, Rehearsed(host.population), host.population
        # Known noise, which a simulation has, too: rows of a rehearsal are the study's own.
        draw, ledger = simulated_noise(site.seed), site.record / LEDGER
        wire = server_wire(experiment, method, host, draw, ledger, safe_of(site))
    else:
        algorithm = algorithm_without_rows(experiment, about)
        who, held = Present(site.seed), Unseen(site.roster.clients, experiment.data.split.val > 0, row, about.classes)
        if algorithm.check is not None:
            algorithm.check(held)
        wire = private_wire(site, algorithm, wire_of(experiment, method, algorithm, held.registered))
    clock = RoundClock(experiment.timing.seconds or 1.0) if rehearsed else clock_of(site)

    def fail(question: str, number: int, error: Exception) -> None:
        text = f"{method.name}: round {number} is not counted: answers to '{question}' end in {type(error).__name__}"
        log.say("failed", f"{text}: {one_line(error)}", method=method.name, question=question, round=number)

    fleet = fleet_of(site, carrier, algorithm, who, clock, made_up(row, about.classes), wire, waits)
    algorithm = without_failures(algorithm, fleet, fail)
    judged = views(held, experiment.eval_clients, site.seed, experiment.eval_splits)
    return fleet, Judge(algorithm, fleet, judged, method.decide_per, metrics_of(experiment))


def clock_of(site: Site) -> WallClock:
    """Return the clock of a site: real time, counted from the midnight before it was made."""
    every = site.deploy.every
    return WallClock(site.about.made.timestamp(), site.deploy.zone, None if every is None else seconds_of(every))


def next_round(fleet: RemoteFleet) -> datetime | None:
    """Return when the round after the one that is over begins; None where it begins at once."""
    clock = fleet.clock
    if not isinstance(clock, WallClock) or clock.every is None:
        return None
    left = fleet.moment.seconds + fleet.elapsed() - clock.seconds()
    return datetime.now(zone_of(clock.zone)) + timedelta(seconds=left)


def fleet_of(
    site: Site,
    carrier: Carrier,
    algorithm: Algorithm,
    who: Who,
    clock: RealClock,
    rows: Shard,
    wire: Wire | None = None,
    waits: Callable[[int], bool] = lambda there: False,
) -> RemoteFleet:
    """Return the nodes of a site as a fleet; `rows` are made up, as those of a client look."""
    deploy, schemas = site.deploy, Schemas(algorithm.works, rows)
    return RemoteFleet(
        carrier,
        {node.name: node.clients for node in site.roster.node},
        who,
        clock,
        run=site.digest,
        reveals=algorithm.traits.reveals,
        patience=seconds_of(deploy.deadline),
        fewest=deploy.fewest,
        first=algorithm.traits.first,
        deadline=algorithm.traits.deadline,
        schemas=schemas,
        heaviest=deploy.heaviest,
        signed=partial(_signed, site),
        vectors=None if wire is None else Vectors(wire, schemas),
        waits=waits,
    )


def _signed(site: Site, name: str, key: Bundle) -> bool:
    """Tell whether the registered key of a node signed its key for masks."""
    try:
        roster = read_roster(site.root)
    except FedtideError:  # a person is writing it
        roster = site.roster
    registered = {node.name: node.key for node in roster.node}.get(name)
    return registered in (None, key.identity) and verified(site.digest, name, key)


def play_rounds(site: Site, fleet: RemoteFleet, judge: Judge, log: Log, latest: Latest) -> Iterator[Progress]:
    """Play the rounds that are left, until the roster grows, and say whose answers did not count."""
    experiment = site.experiment.model_copy(update={"checkpoint_every": 1})

    def look() -> bool:
        for ask in fleet.asks:
            for name, node in ask["nodes"].items():
                for client, word in node["clients"].items():
                    if word not in ("answered", "abstained", "at work"):
                        text = f"{name}, client {client}, '{ask['question']}': {word}"
                        log.say("answer", text, node=name, client=client, question=ask["question"], word=word)
        return latest.read().clients > site.roster.clients

    yield from Run(experiment, site.method, site.seed, site.record).play(look, lambda run: judge)
