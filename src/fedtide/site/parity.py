"""Deployed = simulated, bit for bit: a rehearsal shows it before a study, and a replay shows it after one.

A rehearsal plays server and nodes of a site on this machine, with TLS and keys, over the rows of the study. It kills
one node and the server on the way, and compares the result with the simulation.

A replay plays a deployment again in simulation from its record, if the rows of its clients are at hand. The same
clients take part and the same answers count. So the weights are those of the deployment, if processor and versions are
the same. The noise of a private run is secret. Its sums are taken as they were released, so no rows are needed. Equal
weights then show that they are made of releases alone, which the budget covers. If rows are at hand, the noise of each
sum is compared with the ledger's, too.
"""

import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedtide.config import from_dict, resolved
from fedtide.config.settings import Deploy
from fedtide.core import checkpoint, codec
from fedtide.core.atomic import check_new, making, sha256
from fedtide.core.errors import FedtideError, refused
from fedtide.core.memory import MemoryStore
from fedtide.core.record import ASKS, read_lines, rolled_back, run_lock
from fedtide.core.trees import same
from fedtide.evaluate.judge import Judge, View, views
from fedtide.fleets.engines import Host
from fedtide.fleets.this_machine import end_with_parent
from fedtide.laws.case import difference
from fedtide.models.model_files import locate_model
from fedtide.models.transformer import Transformer
from fedtide.remote.offline import replayed
from fedtide.runs import folder
from fedtide.runs.build import host_of, metrics_of, model_of
from fedtide.runs.digest import digest_of, verify_runs
from fedtide.runs.folder import Planned
from fedtide.runs.rollback import Rollback
from fedtide.runs.runner import Run
from fedtide.site import certificates
from fedtide.site.accounts import Recorded, recorded_sums
from fedtide.site.client_rows import FileRows, host_without_rows
from fedtide.site.machine import Log
from fedtide.site.node_process import LineSettings, node_command, write_settings
from fedtide.site.serve import serve
from fedtide.site.site import Roster, Site
from fedtide.site.status import Status
from fedtide.wire.keys import library
from fedtide.wire.noise import Noise

DEADLINE = "5m"
"""For the answers to one question: a killed node is back within seconds, or a minute on a busy machine."""
STALLED = 900.0
"""Seconds without a round after which a rehearsal is given up."""
LOOK = 0.2
"""Seconds between two looks at the server's status."""
MIDST = 1.0
"""Seconds after the beginning of a round at which a process is killed."""
COMPARED = ("asked", "answered", "refused", "trained", "seconds", "epsilon", "facts")
"""Keys of a round's record that have to be the same; evaluations are compared by accuracy."""


def rehearse(site: Site, *, rounds: int = 3, kills: bool = True, log: Log) -> int:
    """Play a few rounds of a site here, compare them with the simulation, and return the exit status.

    Args:
        site: the site; all happens in its subfolder `rehearsal`, which is made anew.
        kills: whether a node is killed in its second round, and the server in its third.

    Raises:
        FedtideError: the site cannot be rehearsed, or is just now, or its server fails.
    """
    library()
    if rounds < 1:
        raise refused("--rounds", rounds, "1 or more")
    with run_lock(site.root, "site.toml"):  # another rehearsal would remove the folder of this one
        return _rehearse(site, rounds, kills, log)


def _rehearse(site: Site, rounds: int, kills: bool, log: Log) -> int:
    copy = make_rehearsal(site, rounds)
    log.say(
        "rehearsal", f"{len(copy.roster.node)} nodes and their server at {copy.deploy.address}; logs are in {copy.root}"
    )
    if copy.experiment.privacy is not None:
        log.say("noise", "noise follows from the seed here, as in the simulation; a served site has the system's")
    began = time.monotonic()
    with ExitStack() as stack:
        server = stack.enter_context(server_of(copy, log))
        wait_for_server(copy, server)  # before that it would let no node in
        rounds = copy.experiment.rounds
        kills = kills and rounds > 0
        plan = [(min(1, rounds - 1), copy.roster.node[0].name), (min(2, rounds - 1), "")] if kills else []
        slow = [after for after, _ in plan]
        nodes = {
            node.name: stack.enter_context(node_of_rehearsal(copy, node.name, log, slow)) for node in copy.roster.node
        }
        watch_rounds(copy, server, plan, nodes, log)
    log.say("played", f"{rounds} rounds in {time.monotonic() - began:.0f} s; the simulation plays them now")
    lines = list(compare_with_simulation(copy))
    for line in lines[:5]:
        log.say("differs", line)
    if lines:
        log.say("result", "deployed and simulated differ: the lines above say where first")
        return 1
    log.say("result", f"deployed = simulated, bit for bit: {rounds} rounds of {copy.method.name}")
    return 0


def make_rehearsal(site: Site, rounds: int, deadline: str = DEADLINE) -> Site:
    """Make the site of a rehearsal: that of the study with other rounds, keys of its own, and a free port."""
    root = site.root / "rehearsal"
    if root.is_symlink() or (root.exists() and not root.is_dir()):
        raise FedtideError(f"{root}: is no folder; remove it, because each rehearsal makes its folder anew")
    if root.exists():
        shutil.rmtree(root)
    shutil.copytree(site.authority, root / "authority")
    deploy = Deploy(address=f"127.0.0.1:{free_port()}", deadline=deadline)
    rounds = rounds if site.experiment.rounds else 0
    changed = site.experiment.model_copy(update={"rounds": rounds, "deploy": deploy, "eval_every": max(rounds, 1)})
    experiment = from_dict(resolved(changed), where=str(root), timed=False)
    digest = digest_of(experiment, experiment.method[0], experiment.seeds[0])
    nodes = []
    for node in site.roster.node:
        place = root / "nodes" / node.name
        place.mkdir(mode=0o700, parents=True)
        certificates.make_node_key(place / "key", place / "key.pub", node.name)
        nodes.append(node.model_copy(update={"key": certificates.read_public_key(place / "key.pub")[0]}))
    Site(root, experiment, site.about.model_copy(update={"digest": digest}), Roster(node=tuple(nodes))).write()
    return Site.read(root)


def free_port() -> int:
    """Return a port of the loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# -- processes of a rehearsal ------------------------------------------------------------------------------------------


class Process:
    """A server or a node, which runs meanwhile, ends with this process, and whose lines are logged.

    Args:
        name: name in the log.
        command: makes the command of the process, anew for each start.
        log: takes its lines.
    """

    def __init__(self, name: str, command: Callable[[], Sequence[str]], log: Log) -> None:
        self._name, self._command, self._log = name, command, log

    def __enter__(self) -> "Process":
        self.process = subprocess.Popen(
            self._command(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        threading.Thread(target=self._pass_on, args=(self.process,), daemon=True).start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.process.terminate()
        self.process.wait()

    def restart(self) -> None:
        """Kill it, and start it again."""
        self.process.kill()
        self.__exit__()
        self.__enter__()

    def _pass_on(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self._log.say("said", f"{self._name}: {line.strip().partition(' ')[2]}")  # without its time


def server_of(site: Site, log: Log) -> Process:
    """Return the server of a rehearsal."""
    command = [sys.executable, "-P", "-m", "fedtide.site.parity", str(site.root.absolute())]
    return Process("server", lambda: command, log)


def node_of_rehearsal(site: Site, name: str, log: Log, slow: Sequence[int] = ()) -> Process:
    """Return a node of a rehearsal, which takes its time in the rounds `slow`."""
    root = site.root.absolute()
    place = root / "nodes" / name
    authority = str(root / "authority" / "ca.crt")
    line = LineSettings(site.deploy.address, authority, site.digest, name, str(place / "key"), with_parent=True)
    settings: dict[str, Any] = {"site": str(root), "home": str(place)}
    if slow:
        settings["slow"] = list(slow)
    return Process(name, lambda: node_command(write_settings(place, settings, line)), log)  # a start takes its file


def look_at_server(site: Site, server: Process, since: float) -> Status | None:
    """Return the status of the server after a moment.

    Raises:
        FedtideError: the server has failed, or nothing has happened since for too long.
    """
    time.sleep(LOOK)
    if server.process.poll():
        raise FedtideError(f"the server ended with status {server.process.returncode}; see the lines above")
    if time.monotonic() - since > STALLED:
        raise FedtideError(f"nothing happened for {STALLED:.0f} s; see the logs in {site.root}")
    return Status.read(site.status)


def wait_for_server(site: Site, server: Process) -> None:
    """Wait until the server lets nodes in."""
    began = time.monotonic()
    while (status := look_at_server(site, server, began)) is None or status.phase == "starting":
        continue


def watch_rounds(
    site: Site, server: Process, plan: Sequence[tuple[int, str]], nodes: Mapping[str, Process], log: Log
) -> None:
    """Wait until all rounds are over, and kill on the way: after so many rounds a node, or the server ("").

    Raises:
        FedtideError: the server or a node has failed, or nothing has happened for too long.
    """
    rounds, moved, left = -1, time.monotonic(), list(plan)
    while server.process.poll() is None:
        status = look_at_server(site, server, moved)
        for name, node in nodes.items():
            if node.process.poll():
                raise FedtideError(f"node {name} ended with status {node.process.returncode}; see the lines above")
        if status is None:
            continue
        if status.round != rounds:
            rounds, moved = status.round, time.monotonic()
        if left and rounds >= left[0][0] and status.phase == "playing":
            time.sleep(MIDST)
            _, killed = left.pop(0)
            log.say("kill", f"killing {f'node {killed}' if killed else 'the server'} in round {rounds + 1}")
            (nodes[killed] if killed else server).restart()
            moved = time.monotonic()
    look_at_server(site, server, moved)


# -- comparison --------------------------------------------------------------------------------------------------------


def compare_with_simulation(site: Site) -> Iterator[str]:
    """Play the simulation of a site whose rehearsal is over; say where the two differ."""
    place = site.root / "simulated"
    experiment = site.experiment.model_copy(update={"checkpoint_every": 1})
    list(Run(experiment, site.method, site.seed, place).play())
    yield from differences(site.record, place)


def differences(deployed: Path, simulated: Path) -> Iterator[str]:
    """Say where two records of one study differ: all of the rounds, and the first leaf of the last state.

    Args:
        deployed: folder of the run on nodes.
        simulated: folder of the run in simulation.
    """
    ours, theirs = ([_compared(line) for line in read_lines(place)] for place in (deployed, simulated))
    if len(ours) != len(theirs):
        yield f"rounds: {len(ours)}, and {len(theirs)} in simulation"
    for number, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        for key in one:
            if one[key] != other[key]:
                yield f"round {number}: {key}: {one[key]!r:.60}, and {other[key]!r:.60} in simulation"
    newest = [checkpoint.file_of(place) for place in (deployed, simulated)]
    rounds = [int(path.parent.name) for path in newest]
    if rounds[0] != rounds[1]:
        yield f"the last checkpoint is of round {rounds[0]}, and of {rounds[1]} in simulation"
        return
    state, simulated_state = (codec.from_file(path) for path in newest)
    if not same(state, simulated_state):
        yield f"after round {rounds[0] - 1}: state: {difference(state, simulated_state)}"


def _compared(line: Mapping[str, Any]) -> dict[str, Any]:
    scores = {view: scores.get("accuracy") for view, scores in line.get("scores", {}).items()}
    return {key: line.get(key) for key in COMPARED} | {"accuracy": scores}


# -- replay ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replayed:
    """The result of a replay.

    Args:
        rounds: number of rounds.
        equal: whether the server's state after the last is the same to the last bit.
        differs: the first round whose record differs; None if none does.
        folder: the run folder of the simulation.
        noise: the noise of each release of a private run, if rows are at hand.
    """

    rounds: int
    equal: bool
    differs: int | None
    folder: Path
    noise: tuple[Noise, ...] = ()


def replay(root: Path, data: Sequence[Path] = (), out: Path | None = None) -> Replayed:
    """Play the run of a site again in simulation.

    Args:
        root: its run folder, `run` in the folder of the site.
        data: a file of rows for each client, in the order of their ids. Without files the study's own rows are taken,
            and none for a private run.
        out: the run folder to make; None is `replay` beside the run folder.

    Raises:
        FedtideError: it is no run of real clients, has no checkpoint yet, or the rows are not those of its clients.
    """
    if not root.is_dir():
        raise FedtideError(f"{root}: no such folder")
    for verdict in verify_runs(folder.plan(folder.load(root, imports=False), root)):
        if verdict.wrong is not None:
            raise FedtideError(verdict.wrong)
    settings = folder.load(root)
    run = folder.plan(settings, root)[0]
    lines = read_lines(run.folder, ASKS)
    if not lines and not (root.parent / "roster.toml").is_file():
        raise FedtideError(f"{root}: its clients were simulated (no {ASKS}); allowed: the run folder of a site")
    saved = sorted(path.name for path in (run.folder / "checkpoints").glob("[0-9]*") if path.is_dir())
    if not saved:
        raise FedtideError(f"{run.folder}: no round is saved yet; allowed: a run with a checkpoint")
    place = out or root.parent / "replay"
    check_new(place, " with --out")
    with making(place) as temporary:
        copy = replace(run, folder=temporary / run.folder.relative_to(root))
        store = MemoryStore(copy.folder / "memory")
        recorded = None
        if data or settings.privacy is not None:
            site = Site.read(root.parent)
            host = host_without_rows(run.experiment, site.about.rows, site.roster.clients, store)
            if data:
                split, transforms = run.experiment.data.split, run.experiment.data.transforms
                model, clients = model_of(run.experiment), range(site.roster.clients)
                base = locate_model(model.path, model.package) if isinstance(model, Transformer) else None
                rows = FileRows.read(data, clients, site.about.rows, split, transforms, "roster", base)
                host = replace(host, population=rows.people)
            recorded = recorded_sums(site, host)
        else:
            host = host_of(run.experiment, run.method, run.seed, store)
        folder.create(settings, temporary)
        judged = views(host.population) if data or recorded is None else []
        equal, differs = _play_again(run, copy, host, lines, int(saved[-1]), judged, recorded)
    noise = tuple(recorded.noise) if recorded is not None and data else ()
    return Replayed(int(saved[-1]), equal, differs, place, noise)


def _play_again(
    run: Planned,
    copy: Planned,
    host: Host,
    lines: Sequence[Mapping[str, Any]],
    played: int,
    judged: list[View],
    recorded: Recorded | None,
) -> tuple[bool, int | None]:
    """Play the rounds of a run in another folder; tell whether the state is equal, and the first round that differs."""
    wire = replace(host.wire, server=recorded, sums_scores=False)  # models are played again, not what was told of them

    def judge_of(_: Run) -> Judge:
        fleet = replayed(host, lines, run.experiment.fleet.threads, wire)
        decide, over = run.method.decide_per, run.experiment.accuracy_over
        return Judge(host.algorithm, fleet, judged, decide, metrics_of(run.experiment), over=over)

    returns = rolled_back(run.folder)
    simulation = Run(copy.experiment, copy.method, copy.seed, copy.folder, keep=tuple(returns.values()))
    for after in sorted(number for number in returns if number < played):
        list(simulation.play(judge_of=judge_of, until=after))
        Rollback(after, returns[after]).write(copy.folder)
    list(simulation.play(judge_of=judge_of, until=played))
    state = Path("checkpoints") / f"{played:08d}" / checkpoint.FILES[0]
    equal = sha256(run.folder / state) == sha256(copy.folder / state)
    pairs = zip(read_lines(run.folder)[:played], read_lines(copy.folder), strict=False)
    keys = ("answered", "trained", "facts")
    other = (
        ours for ours, theirs in pairs if any(ours[key] != theirs.get(key, ours[key]) for key in keys if key in ours)
    )
    return equal, next((line["round"] for line in other), None)


if __name__ == "__main__":
    end_with_parent()
    try:
        sys.exit(serve(Site.read(Path(sys.argv[1])), log=Log(), rehearsed=True))
    except FedtideError as mistake:
        sys.exit(f"error: {mistake}")
