"""A server of real clients: it plays a site's study, saves after every round, and goes on after a stop or a crash."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from fedtide.config.settings import bind_address
from fedtide.core.atomic import lock, open_lock
from fedtide.core.base import Algorithm, Facts, Simulation
from fedtide.core.errors import FedtideError
from fedtide.core.memory import MemoryStore
from fedtide.core.record import ALARMS, LEDGER, read_lines
from fedtide.core.rng import Rng
from fedtide.draw.html import render
from fedtide.draw.prose import counted
from fedtide.evaluate.judge import Judge, views
from fedtide.evaluate.metrics import OVER_CLIENTS
from fedtide.fields.types import DAY, seconds_of
from fedtide.fleets.engines import Host
from fedtide.fleets.this_machine import remove_left_behind
from fedtide.fleets.totals import Vectors
from fedtide.remote.asks import LastAnswer
from fedtide.remote.fleet import RemoteFleet
from fedtide.remote.grpc.grpc_carrier import GrpcCarrier
from fedtide.remote.messages import Carrier
from fedtide.remote.node_answers import one_line
from fedtide.remote.schedule import Present, RealClock, Rehearsed, RoundClock, WallClock, Who
from fedtide.report.page import write_report
from fedtide.runs import folder
from fedtide.runs.build import host_of, metrics_of
from fedtide.runs.privacy import server_wire
from fedtide.runs.runner import Progress, Run
from fedtide.site import certificates
from fedtide.site.accounts import forget, open_safe, private_wire
from fedtide.site.client_rows import host_without_rows
from fedtide.site.live import View
from fedtide.site.machine import Health, Log
from fedtide.site.site import Roster, Site, read_roster
from fedtide.site.status import ENDED, MOST, OVER, Status, describe_rows, describe_way_in
from fedtide.wire.keys import library
from fedtide.wire.masks import Bundle, verified
from fedtide.wire.noise import simulated_noise
from fedtide.wire.pipeline import Wire

WAITED = 20
"""Maximum number of nodes for which the server says how they can come in; a table has the others."""
WRITE = 1.0
"""Seconds between two writings of the status file."""
LOOK = 1.0
"""Seconds between two looks at the keys of the roster."""
SETTLE = 20.0
"""Seconds for which a server waits for admitted nodes beyond the fewest, when it is started or if nobody answered."""
AGAIN = 300.0
"""Seconds after which the server says again for which nodes it waits."""


@dataclass
class RosterFile:
    """The roster of a site as it was last written well; it is read while people edit it.

    Args:
        root: the site.
        roster: the roster as it was read at first.
        log: takes each mistake in it once.
        mistake: the mistake in it now; "" if there is none.
    """

    root: Path
    roster: Roster
    log: Log
    mistake: str = ""
    _stamp: tuple[int, int, int] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self) -> Roster:
        """Return the roster; the one before if it cannot be read, or lacks nodes that it had."""
        path = self.root / "roster.toml"
        with self._lock:
            try:
                status = path.stat()
                stamp = status.st_mtime_ns, status.st_size, status.st_ino
                if stamp == self._stamp:
                    return self.roster
                roster = read_roster(self.root)
                clients = {node.name: node.clients for node in roster.node}
                if lacking := [node.name for node in self.roster.node if clients.get(node.name) != node.clients]:
                    but = "or its clients were changed; to lock a node out, remove its line 'key'"
                    raise FedtideError(f"{path}: node '{lacking[0]}' was removed, {but}")
                self.roster, self._stamp, self.mistake = roster, stamp, ""
            except (FedtideError, OSError) as error:
                if str(error) != self.mistake:
                    self.log.say("roster", f"{error}; the roster is kept as it was")
                self._stamp, self.mistake = None, str(error)
            return self.roster


@dataclass
class Reporter:
    """Tells people and programs how a server is: a log and a status file.

    Args:
        site: the site.
        log: takes events.
        carrier: tells which nodes are connected.
        latest: the roster, whose mistakes are reported; None reports none.
        round: number of rounds that are over.
        phase: the server's activity, in words.
        missing: number of clients that have to come before a round begins.
        problem: the error by which the server ends.
        fleet: tells the last answers of nodes; None before the first round.
    """

    site: Site
    log: Log
    carrier: GrpcCarrier
    latest: RosterFile | None = None
    round: int = 0
    phase: str = "starting"
    missing: int = 0
    problem: str = ""
    fleet: RemoteFleet | None = None
    _heard: dict[str, LastAnswer] = field(default_factory=dict)
    _present: frozenset[str] = frozenset()
    _waiting: tuple[str, ...] = ()
    _rows: tuple[str, ...] = ()
    _said: float = 0.0
    _since: float | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def look(self) -> Status:
        """Return the status, and say which nodes came and went."""
        with self._lock:
            before, self._present = self._present, self.carrier.present()
            for name in sorted(before ^ self._present):
                online = name in self._present
                self.log.say("node", f"{name} {'is connected' if online else 'is gone'}", node=name, online=online)
            waiting = f"waiting for {self.missing} more {'client' if self.missing == 1 else 'clients'}"
            keys = {name: certificates.fingerprint(key) for name, key in self.carrier.knocked().items()}
            roster = self.site.roster if self.latest is None else self.latest.read()
            away = [node for node in roster.node if self.missing and not node.left and node.name not in self._present]
            disagreeing, warned = self.carrier.rows_apart()
            before_rows, self._rows = self._rows, tuple(describe_rows(disagreeing, warned))
            for line in self._rows:
                if line not in before_rows:
                    self.log.say("rows", line, disagreeing=disagreeing, warned=warned)
            if self.fleet is not None:  # a fleet that was made anew has heard nothing yet
                self._heard |= self.fleet.heard
            return Status(
                at=datetime.now(UTC),
                round=self.round,
                rounds=self.site.experiment.rounds,
                phase=waiting if self.missing else self.phase,
                present=tuple(sorted(self._present)),
                waiting=tuple(describe_way_in(self.site.root, node, keys.get(node.name)) for node in away[:WAITED]),
                problem=(self.problem or ("" if self.latest is None else self.latest.mistake))[:1000],
                heard=tuple(self._heard[name] for name in sorted(self._heard)[:MOST]),
                disagreeing=disagreeing,
                warned=warned,
            )

    def page(self) -> str:
        """Return a page with the status."""
        status = self.look()
        view, title = View.of(self.site, status, False), self.site.experiment.title or "a study"
        content = view.table(status.at)
        values = {"title": title, "lines": view.lines, "content": content, "log": view.log}
        return render("status.html", about="", environments=(), **values)

    def wait_for(self, missing: int, number: int) -> None:
        """Note how many clients a round waits for; say which nodes, when these change and every few minutes.

        Raises:
            FedtideError: they did not come within `deploy.wait`.
        """
        self.missing = missing
        status, now, limit = self.look(), time.monotonic(), self.site.deploy.wait
        self._since = None if not missing else now if self._since is None else self._since
        if self._since is not None and limit is not None and now - self._since > seconds_of(limit):
            names = ", ".join(line.partition(":")[0] for line in status.waiting)
            late = f"{missing} more clients did not come within {limit}, which is deploy.wait ({names})"
            raise FedtideError(
                f"{self.site.root}: round {max(number, 0) + 1}: {late}; serve the site again once they come"
            )
        waiting = tuple(line.partition(":")[0] for line in status.waiting)
        if missing and (waiting != self._waiting or now - self._said > AGAIN):
            for line in (f"{status.phase} before round {max(number, 0) + 1} begins", *status.waiting):
                self.log.say("waiting", line)
            self._said = now
        self._waiting = waiting

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Note that the server ends, and the error by which it does."""
        try:
            yield
        except BaseException as error:
            self.problem, self.missing, self.phase = one_line(error), 0, ENDED
            raise

    def write(self) -> None:
        """Write the status file.

        Raises:
            FedtideError: it cannot be written.
        """
        try:
            self.look().write(self.site.status)
        except OSError as error:
            if not self.site.root.is_dir():
                but = "put the folder back, or end this server and start it where the folder is"
                raise FedtideError(f"{self.site.root}: was moved or removed while it is served; {but}") from None
            but = "then the rounds cannot be saved either"
            raise FedtideError(f"{self.site.status}: cannot be written ({error.strerror or error}): {but}") from None


@contextmanager
def repeat(work: Callable[[], None], seconds: float, log: Log) -> Iterator[None]:
    """Do some work now, every few seconds meanwhile, and at the end; a later error in it is said, and ends nothing."""
    work()
    over = threading.Event()

    def run() -> None:
        last, ended = "", False
        while not ended:
            ended = over.wait(seconds)
            try:
                work()
            except Exception as error:
                line = f"{type(error).__name__}: {one_line(error)}; it is tried again"
                if line != last:
                    log.say("failed", line)
                last = line

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def hold(site: Site) -> Iterator[None]:
    """Hold the lock by which `fedtide status` sees that a server runs.

    Raises:
        FedtideError: another server of the site holds it.
    """
    until = time.monotonic() + LOOK  # status looks at it for a moment
    with open_lock(site.lock) as file:
        while True:
            try:
                lock(file.fileno(), wait=False)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise FedtideError(f"{site.root}: a server plays this site already; end it first") from None
                time.sleep(LOOK / 10)
            except OSError:  # a file system without locks
                break
        yield


class _Grown(Exception):
    """The roster has grown while a round waits for clients."""


def serve(site: Site, *, log: Log, health: int | None = None, rehearsed: bool = False) -> int:
    """Play the study of a site on its nodes until it is over; return the exit status.

    Args:
        health: a port of this machine at which programs can ask how the server is; None opens none.
        rehearsed: nodes have the rows of the study, and its simulation draws the participants.

    Raises:
        FedtideError: the site cannot be served.
    """
    library()
    remove_left_behind()
    _renew(site, log)
    host, port = bind_address(site.deploy.address)
    with ExitStack() as stack:
        stack.enter_context(hold(site))
        nodes = len(site.roster.node)
        carrier = GrpcCarrier(host, port, run=site.digest, authority=site.authority, nodes=nodes)
        stack.callback(carrier.close)
        latest = RosterFile(site.root, site.roster, log)
        reporter = Reporter(site, log, carrier, latest, len(read_lines(site.record)))
        stack.enter_context(repeat(partial(_admit_keys, carrier, latest), LOOK, log))
        stack.enter_context(repeat(partial(_renew, site, log), DAY, log))
        if not site.run.exists():
            folder.create(site.experiment, site.run)
        if health is not None:
            answers = Health(health, lambda: reporter.look().model_dump(mode="json"), reporter.page)
            stack.callback(answers.close)
            log.say("health", f"health: {answers.address}; a page: {answers.address.removesuffix('health')}")
        stack.enter_context(repeat(reporter.write, WRITE, log))
        stack.enter_context(reporter.ending())
        log.say("served", f"nodes are let in at {site.deploy.address}", address=site.deploy.address)
        reporter.phase, over = "playing", False
        settle = time.monotonic() + SETTLE

        def waits(present: int) -> bool:
            nonlocal settle
            roster = latest.read()
            if roster.clients > reporter.site.roster.clients:
                raise _Grown
            enough = roster.clients if rehearsed else site.fewest
            admitted = sum(len(node.clients) for node in roster.node if node.key is not None)
            reporter.wait_for(max(enough - present, 0), fleet.moment.round)
            if present >= enough and (present >= admitted or time.monotonic() > settle):
                settle = 0.0
                return False
            return True

        while not over:
            reporter.site = site = replace(site, roster=latest.read())
            fleet, judge = judge_of(site, carrier, rehearsed, log, waits)
            reporter.fleet = fleet
            try:
                for progress in play_rounds(site, fleet, judge, log, latest):
                    reporter.round, over = progress.round, progress.round == progress.rounds
                    if fleet.queries and not any(len(query.answered) for query in fleet.queries):
                        settle = time.monotonic() + SETTLE  # others may come in, who answer
            except _Grown:
                continue
            over = over or latest.read().clients == site.roster.clients
        reporter.phase = OVER
        if away := sum(node.key is not None and node.name not in carrier.present() for node in latest.read().node):
            log.say("over", f"the study is over; nodes away: {away}; they have {SETTLE:.0f} s to connect and learn it")
        forget(site)
        carrier.finish(SETTLE, fleet.best)
    log.say("over", f"report: {write_report([site.run])}")
    return 0


def _admit_keys(carrier: GrpcCarrier, latest: RosterFile) -> None:
    """Let in the nodes whose keys the roster has, and no others."""
    nodes = latest.read().node
    keys = {node.name: node.key for node in nodes if node.key is not None}
    carrier.admit(keys, frozenset(node.name for node in nodes if not node.left))


def _renew(site: Site, log: Log) -> None:
    """Renew the server's certificate if it ends soon; say what was done, or what is in the way."""
    if line := certificates.renew_if_due(site.authority, site.deploy.address):
        log.say("certificate", line)


def judge_of(
    site: Site, carrier: Carrier, rehearsed: bool, log: Log, waits: Callable[[int], bool] = lambda present: False
) -> tuple[RemoteFleet, Judge]:
    """Return the fleet of a site's nodes, and the judge of its rounds."""
    experiment, method = site.experiment, site.method
    who: Who
    clock: RealClock
    if rehearsed:
        host = host_of(experiment, method, site.seed)
        who, clock = Rehearsed(host.population), RoundClock(experiment.timing.seconds or 1.0)
        # Noise follows from the seed, as in a simulation: rows of a rehearsal are the study's own.
        wire = server_wire(experiment, method, host, simulated_noise(site.seed), site.record / LEDGER, open_safe(site))
    else:
        host = host_without_rows(experiment, site.about.rows, site.roster.clients, MemoryStore(None))
        every = None if site.deploy.every is None else seconds_of(site.deploy.every)
        # Time is counted from the midnight before the site was made.
        who, clock = Present(site.seed), WallClock(site.about.made.timestamp(), site.deploy.zone, every)
        wire = private_wire(site, host)
    fleet = fleet_of(site, carrier, host, who, clock, wire, waits)
    algorithm = survive_failures(host.algorithm, fleet, log)
    judged = views(host.population, experiment.eval_clients, site.seed, experiment.eval_splits)
    metrics = [metric for metric in metrics_of(experiment) if wire.ledger is None or metric not in OVER_CLIENTS]
    return fleet, Judge(algorithm, fleet, judged, method.decide_per, metrics, over=experiment.accuracy_over)


def fleet_of(
    site: Site, carrier: Carrier, host: Host, who: Who, clock: RealClock, wire: Wire, waits: Callable[[int], bool]
) -> RemoteFleet:
    """Return the nodes of a site as a fleet."""
    deploy = site.deploy
    return RemoteFleet(
        carrier,
        {node.name: node.clients for node in site.roster.node},
        who,
        clock,
        run=site.digest,
        traits=host.algorithm.traits,
        patience=seconds_of(deploy.deadline),
        fewest=deploy.fewest,
        heaviest=deploy.heaviest,
        signed=partial(_is_signed, site),
        said=site.keys,
        vectors=Vectors.of(wire, host.algorithm, host.population.few()),
        waits=waits,
    )


def _is_signed(site: Site, name: str, key: Bundle, *about: object) -> bool:
    """Tell whether the registered key of a node signed its key for masks, or with `about` that for one sum."""
    try:
        roster = read_roster(site.root)
    except FedtideError:  # a person is writing it
        roster = site.roster
    registered = {node.name: node.key for node in roster.node}.get(name)
    return registered in (None, key.identity) and verified(site.digest, name, key, *about)


def survive_failures(algorithm: Algorithm, fleet: RemoteFleet, log: Log) -> Algorithm:
    """Return an algorithm whose state stays as it was if answers of clients end a round; the log is told."""

    def round(state: Any, asked: Simulation, rng: Rng) -> tuple[Any, Facts]:
        try:
            return algorithm.round(state, asked, rng)
        except (FedtideError, OSError):  # a ledger that cannot be written must end it
            raise
        except Exception as error:
            if not any(len(query.answered) for query in fleet.queries):
                if fleet.moment.round <= -algorithm.traits.before:
                    raise  # it is the first round: no answer is to blame
                text = f"round {fleet.moment.round}: earlier answers end in {type(error).__name__}: {one_line(error)}"
                but = "allowed: a new site, without the node that lies or the fault of the method"
                raise FedtideError(f"{text}; {but}") from error
            question, number = fleet.queries[-1].ask.question, fleet.moment.round
            text = f"round {number} is not counted: answers to '{question}' end in {type(error).__name__}"
            log.say("failed", f"{text}: {one_line(error)}", question=question, round=number)
            return state, {}

    return replace(algorithm, round=round)


def play_rounds(site: Site, fleet: RemoteFleet, judge: Judge, log: Log, latest: RosterFile) -> Iterator[Progress]:
    """Play the rounds that are left, until the roster grows; log each round, and each answer that did not count."""
    experiment = site.experiment.model_copy(update={"checkpoint_every": 1})
    before: dict[str, Any] = {}

    def look() -> bool:
        few = {name: counts for ask in fleet.record.asks for name, counts in ask.get("few", {}).items()}
        for name, (count, needed) in few.items():
            if before.get(name) != (count, needed):
                text = f"{name}: {counted(count, 'client')} chose it, {needed} are needed: its sum stayed masked"
                log.say("closed", text, name=name, clients=count, needed=needed)
        before.clear()
        before.update(few)
        for ask in fleet.record.asks:
            for name, node in ask["nodes"].items():
                for client, word in node["clients"].items():
                    if word not in ("answered", "abstained", "at work"):
                        text = f"{name}, client {client}, '{ask['question']}': {word}"
                        log.say("answer", text, node=name, client=client, question=ask["question"], word=word)
            for client, word in ask.get("amiss", {}).items():
                name = fleet.attendance.node_of[int(client)]
                text = f"{name}, client {client}, '{ask['question']}': {word}; the sum was opened by shares"
                log.say("shares", text, node=name, client=client, question=ask["question"], word=word)
        return latest.read().clients > site.roster.clients

    logged = len(read_lines(site.record, ALARMS))
    for progress in Run(experiment, site.method, site.seed, site.record).play(look, lambda run: judge):
        for alarm in read_lines(site.record, ALARMS)[logged:]:
            text = f"alarm in round {alarm['round'] + 1}: {alarm['text']}"
            log.say("alarm", text, **{name: value for name, value in alarm.items() if name != "text"})
            logged += 1
        accuracy = "" if progress.accuracy is None else f": accuracy {progress.accuracy:.4f}"
        accuracy += "" if progress.noise is None else f" ± {progress.noise:.4f}"
        log.say("round", f"round {progress.round} of {progress.rounds}{accuracy}", **vars(progress))
        yield progress
