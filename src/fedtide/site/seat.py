"""A node at its owner's: its seat, all checked before anything is sent; its start; its worker; and its predictions.

A node's folder holds NAME.key, which is secret and never travels, and NAME.pub, which the site admits. It has a copy
of the ticket, the place of the policy, the memory of its clients, and the model that they were evaluated with.
"""

import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch

from fedtide.config import Experiment
from fedtide.core.atomic import append, check_free, is_locked, write_text
from fedtide.core.base import PARTS, Algorithm, Memory, Moment, Payload
from fedtide.core.errors import UNREADABLE, FedtideError, Words, refused, unknown
from fedtide.core.memory import MemoryStore
from fedtide.data.rows import Rows
from fedtide.data.sources.texts import names_of_files
from fedtide.data.transforms import shape_after
from fedtide.draw.prose import counted
from fedtide.fleets.engines import Host
from fedtide.models.transformer import Transformer
from fedtide.remote.asks import REFUSED
from fedtide.remote.grpc import stream_protocol as protocol
from fedtide.remote.grpc.line import Caller, tell_disagreement
from fedtide.remote.machine_facts import RecentLog, tell
from fedtide.remote.node import Node
from fedtide.remote.node_memory import JudgedModels
from fedtide.remote.policy import SCORE, Policy
from fedtide.runs.build import host_of, task_of
from fedtide.runs.export import CHECKED, Model, described, names_of_classes, prepared, table
from fedtide.runs.privacy import check_delta
from fedtide.runs.trained import Models
from fedtide.site import certificates
from fedtide.site.accounts import OWN, Budget, describe_budget, ledger_for, warn_of_budget
from fedtide.site.bases import at_base, count_trained, find_base
from fedtide.site.client_rows import (
    FileRows,
    algorithm_without_rows,
    describe_columns,
    read_inputs,
    zero_row,
    zero_rows,
)
from fedtide.site.far_rows import Doubt, far_from_study
from fedtide.site.live_rows import LiveRows
from fedtide.site.machine import Health, Log, check_own, read_private_key
from fedtide.site.node_process import (
    JUDGED,
    RULES,
    RUNS_ALREADY,
    LineSettings,
    answer_questions,
    node_command,
    write_log,
    write_settings,
)
from fedtide.site.owner import Owner, Peers, describe_terms, read_policy
from fedtide.site.site import TOKENIZING, Site, installed_versions
from fedtide.site.tickets import RowsAbout, Ticket
from fedtide.transforms.watch import WATCH, Watch
from fedtide.wire.keys import library
from fedtide.wire.masks import Masker
from fedtide.wire.pipeline import FLOATING

NO_RULES = Path("none")
"""Value of --policy that forgets the policy of a node."""
RECORD = "asked.jsonl"
"""File in a node's folder with all questions and answers."""
NUMBERS = 1_000_000_000
"""Maximum number of parameters of a network that a ticket may name."""
DELTA = 0.1
"""Maximum expected number of clients of whom a private study tells more than its epsilon."""
THREADS = 64
"""Maximum number of threads that a ticket may name, or as many as a machine has cores."""


@dataclass(frozen=True)
class Seat:
    """All that a node needs to take part.

    Args:
        ticket: the ticket of the site.
        home: the node's folder, which need not exist yet.
        data: a file of rows for each of its clients, in the order of their ids.
        rows: the rows of these files.
        policy: the node's own rules.
        rules: the file of these rules.
        base: the folder or GGUF file of the study's pretrained base at this node; None if it has none.
        live: the rows that its clients hold now, which a study that is watched counts; None counts validation rows.
    """

    ticket: Ticket
    home: Path
    data: tuple[Path, ...]
    rows: FileRows
    policy: Policy = Policy()
    rules: Path | None = None
    base: Path | None = None
    live: LiveRows | None = None

    @staticmethod
    def read(
        ticket: Ticket,
        data: Sequence[Path],
        rules: Path | None = None,
        home: Path | None = None,
        base: str | None = None,
        watch: Sequence[Path] = (),
    ) -> "Seat":
        """Read and check all of a seat; nothing is written.

        Args:
            ticket: the ticket of the site.
            data: files of rows.
            rules: the file of the node's own rules; None allows whatever the study asks.
            home: the node's folder; None is one of the node's name here.
            base: the owner's copy of the study's base, see `fedtide.site.bases.find_base`.
            watch: files of the rows that clients hold now, which are not opened yet; () for none.

        Raises:
            FedtideError: a file is damaged, or does not fit the study or this machine.
        """
        library()
        ticket.check_clock(datetime.now(UTC))
        check_versions(ticket)
        if base is not None and ticket.base is None:
            raise refused("--base", base, "none, because the study has no pretrained base")
        policy = read_policy(rules)
        place = None if ticket.base is None else find_base(ticket.base, base)
        study = at_base(ticket.experiment, place)
        if study.privacy is not None:
            check_delta(study.privacy, ticket.registered, "study: ")
        check_size(study, ticket.rows)
        rows = FileRows.read(data, ticket.clients, ticket.rows, study.data.split, study.data.transforms, base=place)
        live = None
        if watch:
            if len(watch) != len(ticket.clients):
                allowed = f"{len(ticket.clients)}, one for each client of the ticket, in order"
                raise refused("--watch", f"{len(watch)} files", allowed)
            if twice := [path for path, count in Counter(path.resolve() for path in watch).items() if count > 1]:
                raise refused("--watch", Words(f"{twice[0]} twice"), "another file for each client")
            live = LiveRows(
                rows, dict(zip(ticket.clients, watch, strict=True)), ticket.rows, home or Path(ticket.node), base=place
            )
        seat = Seat(ticket, home or Path(ticket.node), tuple(data), rows, policy, rules, place, live)
        seat.check_home()
        if live is not None and WATCH not in seat.algorithm.works:
            raise refused("--watch", str(watch[0]), "none, because the study is not watched")
        questions = [*seat.algorithm.works, SCORE]
        for name in seat.policy.questions or ():
            if name not in questions:
                raise unknown(f"{rules}: questions", name, questions)
        return seat

    @property
    def key(self) -> Path:
        """The node's private key."""
        return self.home / f"{self.ticket.node}.key"

    @property
    def public(self) -> Path:
        """The node's public key."""
        return self.home / f"{self.ticket.node}.pub"

    @property
    def copy(self) -> Path:
        """The copy of the ticket."""
        return self.home / f"{self.ticket.node}.ticket"

    def check_home(self) -> None:
        """Raise if the node's folder is that of another study, node or user, or no folder."""
        if self.home.is_file():
            raise refused("--home", str(self.home), "a folder, or a new name", "it is a file")
        check_own(self.home)
        if self.copy.exists():
            before = Ticket.read(self.copy)
            for key in ("digest", "authority", "clients"):
                if getattr(before, key) != getattr(self.ticket, key):
                    but = f"its {key} is not that of this ticket; allowed: --home with a new folder"
                    raise FedtideError(f"{self.home}: belongs to another study or site, because {but}")
        others = sorted(self.home.glob("*.key"))
        if others and not self.key.exists():  # two nodes would share the memory of one
            allowed = f"--home with a folder of '{self.ticket.node}' alone"
            raise FedtideError(f"{self.home}: is the folder of node '{others[0].stem}'; allowed: {allowed}")

    def settle(self) -> bool:
        """Make the node's folder and key if they are missing; tell whether the key is new.

        Raises:
            FedtideError: another process runs this node.
        """
        if is_locked(self.home / "run" / "alive"):
            raise FedtideError(f"{self.home}: {RUNS_ALREADY}")
        self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_own(self.home)  # another user may have made it meanwhile
        if not self.copy.exists():
            self.ticket.write(self.copy)
        new = not self.key.exists()
        make = certificates.make_node_key if new else certificates.write_public_key
        make(self.key, self.public, self.ticket.node)
        return new

    @cached_property
    def study(self) -> Experiment:
        """The study of the ticket, with its base at this node."""
        return at_base(self.ticket.experiment, self.base)

    @cached_property
    def algorithm(self) -> Algorithm:
        """The algorithm whose works the node does, made from the ticket and its base alone."""
        study = self.study
        check_size(study, self.ticket.rows)
        try:
            return algorithm_without_rows(study, self.ticket.rows)
        except RuntimeError as error:  # torch, for a network that is too large
            raise FedtideError(f"study: its model cannot be made here ({str(error).splitlines()[0]})") from None

    def node(self, **more: Any) -> Node:
        """Return the node of the seat, with further settings."""
        ticket, memory = self.ticket, self.home / "memory" / self.ticket.digest
        clients, threads = frozenset(ticket.clients), ticket.experiment.fleet.threads
        rules = more.get("policy", Policy)
        live = {} if self.live is None else {WATCH: replace(self.live, policy=rules)}
        return Node(
            self.algorithm,
            ticket.seed,
            self.rows,
            memory,
            ticket.digest,
            live=live,
            threads=threads,
            clients=clients,
            rounds=ticket.experiment.rounds,
            **more,
        )

    @property
    def settings(self) -> dict[str, object]:
        """The settings of the node's worker, see `fedtide.site.seat`."""
        return {
            "ticket": str(self.copy.absolute()),
            "data": [str(path.absolute()) for path in self.data],
            "policy": None if self.rules is None else str(self.rules.absolute()),
            "home": str(self.home.absolute()),
            "base": None if self.base is None else str(self.base),
            "watch": [] if self.live is None else [str(path.absolute()) for path in self.live.files.values()],
        }

    @property
    def line(self) -> LineSettings:
        """The settings of the node's stream."""
        home, ticket = self.home.absolute(), self.ticket
        key = str(self.key.absolute())
        return LineSettings(
            ticket.address, str(home / "ca.crt"), ticket.digest, ticket.node, key, warned=self.is_warned
        )

    @cached_property
    def doubts(self) -> list[Doubt]:
        """Warnings of rows that are far from those of the study."""
        return [doubt for path in self.data for doubt in far_from_study(path, self.ticket.rows)]

    @property
    def is_warned(self) -> bool:
        """Tell whether the server counts this node among those whose owners were warned."""
        return not self.ticket.is_private and any(doubt.is_common for doubt in self.doubts)

    def describe(self) -> Iterator[str]:
        """Say in lines which server it trusts, and which rows and rules it has."""
        ticket = self.ticket
        authority = certificates.authority_fingerprint(ticket.authority.encode())
        yield f"server: {ticket.address}, authority SHA-256 {authority}"
        for path, client in zip(self.data, ticket.clients, strict=True):
            yield f"rows: {path}: {', '.join(f'{self.rows.count(client, part)} {part}' for part in PARTS)}"
            if columns := describe_columns(path, ticket.rows):
                yield f"columns: {path}: {columns}"
        people = self.rows.people.rows
        if isinstance(people, Rows) and people.cut:
            yield f"rows: {people.cut} of {len(people)} texts are cut to {ticket.rows.shape[0]} tokens"
        if self.live is not None:
            windows = next(one for one in self.algorithm.transforms if isinstance(one, Watch))
            yield from self.live.describe(labels=windows.labels != "never")
        if ticket.base is not None:
            yield f"base: {self.base}, digest {ticket.base.digest} as in the study; it is only read, and never sent"
        yield from (f"warning: {doubt.text}" for doubt in self.doubts)
        if self.is_warned:
            yield "warning: the server is told that rows here are far from the study's, and not of what"
        yield f"study: {ticket.experiment.rounds} rounds; questions and answers are written to {self.home / RECORD}"
        yield f"rules: {'none' if self.rules is None else self.rules}"
        clients = ticket.registered
        if self.policy.fewest > clients:
            yield f"warning: your policy wants {self.policy.fewest} clients in a sum, and the site has {clients}"
        privacy = ticket.experiment.privacy
        if privacy is not None and (delta := privacy.delta) * clients > DELTA:
            yield f"warning: delta {delta:g} is too large for {clients} clients; ask for one well below 1/{clients}"
        yield from warn_of_budget(ledger_for(ticket.experiment, self.algorithm), clients)
        here = installed_versions()
        for name in ("torch", "numpy", *(TOKENIZING if ticket.base is not None else ())):
            if name in here and here[name] != (server := ticket.versions.get(name, here[name])):
                yield f"warning: {name} is {here[name]} here and {server} at the server; last bits may differ"

    def describe_study(self) -> Iterator[str]:
        """Say in lines what taking part means, found by a trial of the study."""
        study, algorithm, about, clients = self.study, self.algorithm, self.ticket.rows, self.ticket.clients
        wire = FLOATING if study.wire is None else study.wire.build().within(self.policy.clip)
        like = zero_row(about, self.rows.people.transforms)
        yield from describe_terms(algorithm, like, about.classes, self.policy, self.ticket.registered, wire)
        yield from describe_budget(ledger_for(study, algorithm), wire, clients, self.home / OWN, self.policy)


def rules_of(home: Path, policy: Path | None) -> Path | None:
    """Return the file of a node's policy: the one that is named, else the one of the last start.

    Args:
        home: the node's folder.
        policy: the person's choice; `NO_RULES` for none, whatever there was before.
    """
    if policy is not None:
        return None if policy == NO_RULES else policy
    note = home / RULES
    before = note.read_bytes().decode() if note.is_file() else ""
    if before and not Path(before).is_file():
        but = f"or --policy {NO_RULES} to have none from now on"
        raise FedtideError(f"{before}: the rules that this node had before are gone; allowed: --policy FILE, {but}")
    return Path(before) if before else None


def check_size(study: Experiment, about: RowsAbout) -> None:
    """Raise if a network or a number of threads would bring this machine down, before anything is made."""
    most = max(THREADS, os.cpu_count() or 1)
    if study.fleet.threads > most:
        raise refused("study: fleet.threads", study.fleet.threads, f"at most {most} on this machine")
    shape = shape_after(study.data.transforms, "rows", about.shape)
    try:
        if isinstance(study.model, Transformer):  # its base is on this machine already
            count = count_trained(study.model, shape[0], about.classes)
        else:
            with torch.device("meta"):  # shapes alone
                network = study.model.build(shape, about.classes)
            count = sum(tensor.numel() for tensor in (*network.parameters(), *network.buffers()))
    except RuntimeError as error:
        raise FedtideError(f"study: its model cannot be made ({str(error).splitlines()[0]})") from None
    if count > NUMBERS:
        raise refused("study: numbers of its model", f"{count:,}", f"at most {NUMBERS:,}")


def introduce(ticket: Ticket) -> Iterator[str]:
    """Say in lines what a ticket is, with its seal, before anything is done that the ticket says."""
    ids = f"client{'s' * (len(ticket.clients) > 1)} {', '.join(map(str, ticket.clients))}"
    yield f"ticket: {ticket.node} ({ids}) of {ticket.study.get('title') or 'a study'} {ticket.digest}"
    yield f"seal: {ticket.seal} (ask the owner of the site for the seal that fedtide deploy printed, by telephone)"


def tell_server(ticket: Ticket, home: Path) -> str:
    """Tell the server that a node's rows do not agree with the study, and nothing else; say in a line what it learned.

    A node that never joined has no key yet, and shows one that is thrown away.

    Args:
        ticket: the ticket of the site.
        home: the node's folder.
    """
    if ticket.is_private:
        return "the server is told nothing of that, because the study is private"
    try:
        path = home / f"{ticket.node}.key"
        key = read_private_key(path) if path.exists() else certificates.draw_node_key()
        caller = Caller(ticket.address, ticket.authority.encode("ascii"), ticket.digest, ticket.node, key)
        asyncio.run(tell_disagreement(caller))
    except (FedtideError, OSError) as error:
        return f"the server does not know that this node cannot take part ({error})"
    return "the server was told that rows of this node do not agree with the study, and nothing else of them"


def check_versions(ticket: Ticket) -> None:
    """Raise if another version of this package made the ticket."""
    here, server = installed_versions().get("fedtide"), ticket.versions.get("fedtide")
    if here != server:
        raise refused("version of fedtide", here, f"{server}, as at the server: pip install fedtide=={server}")


def join(seat: Seat, *, log: Log, health: int | None = None) -> NoReturn:
    """Run the node of a seat until it is ended; this process becomes the one that is connected.

    Args:
        health: a port of this machine at which programs can ask how the node is; None opens none.

    Raises:
        FedtideError: the port is taken.
    """
    protocol.library()
    if health is not None:
        Health(health, dict).close()  # raises if the port is taken
    home = seat.home.absolute()
    (home / "ca.crt").write_text(seat.ticket.authority, encoding="ascii")
    line = replace(seat.line, json=log.lines)
    command = node_command(write_settings(home, {**seat.settings, "health": health}, line))
    work = seat.home / "run" / "worker.log"
    log.say("node", f"{seat.ticket.node} runs until the study is over, or Ctrl-C; the log of its work is {work}")
    sys.stdout.flush()
    os.execv(command[0], command)  # this frees all that the checks needed


# -- the worker --------------------------------------------------------------------------------------------------------

REFUSALS, REFUSED_OF = 100, 100
"""Refused questions, and questions for keys, of a minute that are written down, with as many clients and names. More
could fill the disk. Any other question that is answered is written down whole."""
SLOW = 2.5
"""Seconds that a question takes in a round in which a rehearsal kills a process."""


def node_of(settings: Mapping[str, Any], log: Callable[[str], None] = write_log) -> Node:
    """Build a node.

    Args:
        settings: paths of a seat: `ticket`, `data`, `policy`, `home`, `base`, `watch`. For a rehearsal with the rows of
            a site: `site`, `home`, and `name` if that is not the folder's.
        log: takes what went wrong.
    """
    folder = Path(settings["home"])
    if "site" in settings:
        site = Site.read(Path(settings["site"]))
        experiment, name, key = site.experiment, settings.get("name", folder.name), folder / "key"
        members = {member.name: member for member in site.roster.node}
        host = host_of(experiment, site.method, site.seed)
        node = Node(
            host.algorithm,
            site.seed,
            host.population,
            folder / "memory" / site.digest,
            run=site.digest,
            partial_work=experiment.timing.partial_work,
            threads=experiment.fleet.threads,
            log=log,
            clients=frozenset(members[name].clients),
            policy=partial(Policy, questions=(*host.algorithm.works, SCORE)),  # the rows are those of the study
            rounds=experiment.rounds,
        )

        def trusts(node: str, key: str) -> str | None:
            return None if node in members and members[node].key == key else "its key is not that of the roster"

    else:
        policy = None if settings["policy"] is None else Path(settings["policy"])
        data, watch = ([Path(path) for path in settings.get(key, ())] for key in ("data", "watch"))
        seat = Seat.read(Ticket.read(Path(settings["ticket"])), data, policy, folder, settings.get("base"), watch)
        experiment, name, key = seat.study, seat.ticket.node, seat.key
        study = ledger_for(experiment, seat.algorithm)
        clip = None if experiment.wire is None else experiment.wire.build().clip
        budget = None if study is None or clip is None else Budget(study, clip, folder / OWN)
        owner = Owner(policy, folder / "judged.jsonl", experiment.rounds, log, budget)
        rules = {"policy": owner.policy, "refuses": owner.refuses, "shown": owner.shown}
        node = seat.node(**rules, log=log, judged=JudgedModels(folder / JUDGED))
        trusts = Peers(folder / "peers.json", owner.policy, log).trusts
    wire = FLOATING if experiment.wire is None else experiment.wire.build()
    masker = None
    if wire.secure:
        masker = Masker(node.run, name, read_private_key(key), trusts, folder / "opened")
    return replace(node, wire=wire, masker=masker)


@dataclass
class WatchedNode:
    """A node whose questions and answers are written down, and which tells programs of its machine how it is.

    Args:
        node: answers.
        since: time at which it was ready.
        record: file with a line for each question: its clients, what became of them, and the bytes that were sent.
        slow: rounds whose questions take so many seconds, because a rehearsal kills a process in them.
        answered: number of questions since then.
        last: the last question, and the time of its answer.
        tells: returns what the server is told of this machine with an answer.
    """

    node: Node
    since: datetime
    record: Path
    slow: Mapping[int, float] = field(default_factory=dict)
    answered: int = 0
    last: dict[str, Any] | None = None
    tells: Callable[[], dict[str, Any]] = dict
    _idle: dict[int, int] = field(default_factory=dict)

    def handle(self, header: Mapping[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        """Answer a question; nothing is sent of a client that is not written down."""
        if self.slow:
            time.sleep(self.slow.get(header.get("moment", {}).get("round"), 0.0))
        answer, sent = self.node.handle(header, payload)
        if answer.get("clients"):
            try:
                if self._note(header, answer["clients"], len(payload), len(sent), machine := self.tells()) and machine:
                    answer = {**answer, "machine": machine}
            except OSError:
                but = f"{REFUSED}the node cannot write down what it sends; see whether its disk is full"
                words = {
                    client: word if word.startswith(REFUSED) else but for client, word in answer["clients"].items()
                }
                answer, sent = {**answer, "clients": words, "kept": []}, b""
        question = {key: str(header.get(key))[:100] for key in ("kind", "question")}
        self.last = {"at": datetime.now(UTC).isoformat(), "seconds": answer["seconds"], **question}
        self.answered += 1
        return answer, sent

    def _note(
        self, header: Mapping[str, Any], words: Mapping[str, str], received: int, sent: int, machine: dict[str, Any]
    ) -> bool:
        """Write down a question, and what is sent to the server; return False for one of too many that cost nothing."""
        refused = all(word.startswith(REFUSED) for word in words.values())
        idle, minute = refused or header["kind"] == "keys", int(time.time() // 60)
        if idle and self._idle.get(minute, 0) >= REFUSALS:
            self._idle[minute] += 1
            return False
        skipped = sum(max(count - REFUSALS, 0) for then, count in self._idle.items() if then != minute)
        self._idle = {minute: self._idle.get(minute, 0) + idle}
        reveal = header.get("reveal", [])
        line = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "round": header["moment"]["round"],
            **{key: header[key] for key in ("kind", "question")},
            "reveal": [name[:100] for name in reveal[:REFUSED_OF]] if refused else reveal,
            "members": header.get("members", 0),
            "clients": dict(list(words.items())[: REFUSED_OF if refused else None]),
            "received": received,
            "sent": sent,
        }
        if machine:
            line["machine"] = machine
        if skipped:
            line["not noted"] = skipped
        if header["kind"] == "unmask" and not refused:
            line["opened"] = header["alive"]
        self.record.parent.mkdir(parents=True, exist_ok=True)
        append(self.record, json.dumps(line))
        return True

    def status(self) -> dict[str, Any]:
        """Return how the node is, in plain JSON."""
        return {"run": self.node.run, "since": self.since.isoformat(), "answered": self.answered, "last": self.last}


# -- predictions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False, kw_only=True)
class JudgedModel(Models):
    """The model that a client was evaluated with."""

    received: Payload
    memory: Memory

    def _receive(self, client: int | None) -> tuple[Payload, Memory]:
        return self.received, self.memory


def predict_at_node(
    folder: Path, path: Path, out: Path, client: str | None = None, model: str | None = None
) -> tuple[str, int, int]:
    """Predict the rows of a CSV, Parquet or NPZ file, and write a CSV file with their classes and probabilities.

    Args:
        folder: the node's folder.
        path: the file, with the features of the study; a label is not read. Texts may be JSON lines, too.
        out: the new file.
        client: number of one of the node's clients; needed if there are several.
        model: last, best, or the number of rounds of a model that the node has; None means the last.

    Returns:
        A name of the client, the round of the evaluation whose model predicted, and the number of rows.

    Raises:
        FedtideError: the node was never started or evaluated, has no such model, or the rows are not the study's.
    """
    check_free(out)
    judged, ticket, base, number = _read_model(folder, client, model)
    about = ticket.rows
    if about.predicts_next:
        raise refused("the study: rows", "sequences", "rows with one label each")
    rows, cut = read_inputs(path, about, base)
    if cut:
        print(f"fedtide: {path}: {cut} of {len(rows)} rows are cut to {about.shape[0]} tokens", file=sys.stderr)
    x = prepared(rows, getattr(torch, about.dtype), ticket.experiment.data.transforms)
    write_text(out, table(judged.predict(x).told, names_of_classes(judged), names_of_files(path)), new=True)
    return f"{ticket.node}, client {number}", judged.moment.round, len(x)


def model_at_node(folder: Path, client: str | None = None, model: str | None = None) -> tuple[str, Model]:
    """Return a name for a file, and a model that a client was evaluated with.

    Args:
        folder: the node's folder.
        client: id of one of the node's clients; needed if there are several.
        model: last, best, or the number of rounds of a model that the node has; None means the last.

    Raises:
        FedtideError: the node was never started or evaluated, has no such model, or which of several networks predicts
            depends on the row.
    """
    judged, ticket, base, number = _read_model(folder, client, model)
    about = described(judged, at_base(ticket.experiment, base), f"client {number}")
    part = "" if model in (None, "last") else f"-{model}"
    return f"{ticket.node}-client-{number}{part}", Model(judged.task, judged.parts(), judged.trial_rows(CHECKED), about)


def _read_model(folder: Path, name: str | None, which: str | None) -> tuple[JudgedModel, Ticket, Path | None, int]:
    """Return a model of a client in a node's folder, the node's ticket and base, and the client that is meant."""
    try:
        settings = json.loads((folder / "run" / "worker.json").read_text(encoding="utf-8"))
        files = [settings[key] for key in ("policy", "base") if settings.get(key) is not None]
        for path in (settings["home"], *files, *settings.get("data", ()), *settings.get("watch", ())):
            Path(path)  # raises for what is no path
        ticket = Ticket.read(Path(settings["ticket"]))
    except (OSError, *UNREADABLE):
        but = "not the folder of a node that was started; start it with: fedtide join"
        raise FedtideError(f"{folder}: {but}") from None
    numbers = {str(client): client for client in ticket.clients}
    client = ticket.clients[0] if name is None and len(numbers) == 1 else numbers.get(name or "")
    if client is None and name is None:
        allowed = " or ".join(f"--client {number}" for number in numbers)
        raise FedtideError(f"{folder}: this node has {counted(len(numbers), 'client')}: add {allowed}")
    if client is None:
        raise refused("--client", name, ", ".join(numbers))
    base = None if settings.get("base") is None else Path(settings["base"])
    experiment = at_base(ticket.experiment, base)
    node, judged = node_of(settings), JudgedModels(folder / JUDGED).read(which)
    assert isinstance(node.rows, FileRows)
    received, memory = node.last_evaluation(judged, client)
    model = JudgedModel(
        title=f"{experiment.title or 'a study'}, {experiment.method[0].name}",
        host=Host(node.algorithm, node.rows.people, node.seed, MemoryStore(None)),
        task=task_of(experiment, experiment.method[0], zero_rows(ticket.rows)),
        state=None,
        moment=Moment(**judged.header["moment"]),
        decide_per=judged.header["grouping"],
        received=received,
        memory=memory,
    )
    return model, ticket, base, client


# -- the program -------------------------------------------------------------------------------------------------------


def main(path: Path, line: int) -> None:
    """Answer questions on a line to the node's process, with the settings of a file."""
    settings = json.loads(path.read_text(encoding="utf-8"))
    slow = dict.fromkeys(settings.get("slow", ()), SLOW)
    log = RecentLog(write_log)
    node = node_of(settings, log)
    record, tells = Path(settings["home"]) / RECORD, partial(tell, node.policy, log)
    watch = WatchedNode(node, datetime.now(UTC), record, slow, tells=tells)
    with ExitStack() as stack:
        if (port := settings.get("health")) is not None:
            write_log(f"health: {stack.enter_context(closing(Health(port, watch.status))).address}")
        write_log("ready")
        answer_questions(Connection(line), watch.handle, write_log)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
