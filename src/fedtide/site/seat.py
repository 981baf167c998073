"""A node's seat in a federation: its ticket, key, rows and policy, all checked before anything is sent; then its start.

A node's folder holds NAME.key, which is secret and never travels, and NAME.pub, which the site admits. It has a copy
of the ticket, the place of the policy, the memory of its clients, and the model that they were evaluated with.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import torch

from fedtide.core.atomic import write_text
from fedtide.core.base import PARTS, Algorithm
from fedtide.core.errors import FedtideError, refused
from fedtide.data.transforms import shape_after
from fedtide.remote.grpc import stream_protocol as protocol
from fedtide.remote.node import Node
from fedtide.remote.policy import SCORE, Policy
from fedtide.site import certificates
from fedtide.site.accounts import OWN, describe_budget, ledger_for
from fedtide.site.client_rows import FileRows, algorithm_without_rows, describe_columns, zero_row
from fedtide.site.machine import Health, Log, check_own
from fedtide.site.node_process import LineSettings, node_command, write_settings
from fedtide.site.owner import describe_terms, read_policy
from fedtide.site.site import installed_versions
from fedtide.site.tickets import Ticket
from fedtide.wire.keys import library
from fedtide.wire.pipeline import FLOATING

NO_RULES = Path("none")
"""Value of --policy that forgets the policy of a node."""
RULES = "policy.path"
"""File in a node's folder with the place of its policy."""
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
    """

    ticket: Ticket
    home: Path
    data: tuple[Path, ...]
    rows: FileRows
    policy: Policy = Policy()
    rules: Path | None = None

    @staticmethod
    def read(ticket: Path, data: Sequence[Path], policy: Path | None = None, home: Path | None = None) -> "Seat":
        """Read a ticket from its file, and all that `of` checks."""
        return Seat.of(Ticket.read(ticket), data, policy, home)

    @staticmethod
    def of(ticket: Ticket, data: Sequence[Path], policy: Path | None = None, home: Path | None = None) -> "Seat":
        """Read and check all of a seat; nothing is written.

        Args:
            ticket: the ticket of the site.
            data: files of rows.
            policy: the file of the node's own rules; None allows whatever the study asks.
            home: the node's folder; None is one of the node's name here.

        Raises:
            FedtideError: a file is damaged, or does not fit the study or this machine.
        """
        library()
        ticket.check_clock(datetime.now(UTC))
        check_versions(ticket)
        study = ticket.experiment
        rows = FileRows.read(data, ticket.clients, ticket.rows, study.data.split, study.data.transforms)
        seat = Seat(ticket, home or Path(ticket.node), tuple(data), rows, read_policy(policy), policy)
        seat.check_home()
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
            before, now = (
                {"digest": ticket.digest, "authority": _authority(ticket)[:16], "clients": list(ticket.clients)}
                for ticket in (Ticket.read(self.copy), self.ticket)
            )
            for key in before:
                if before[key] != now[key]:
                    where = f"{self.home}: belongs to another study or site: {key}"
                    raise refused(where, before[key], f"{now[key]}, or --home with a new folder")
        others = sorted(self.home.glob("*.key"))
        if others and not self.key.exists():  # two nodes would share the memory of one
            allowed = f"--home with a folder of '{self.ticket.node}' alone"
            raise FedtideError(f"{self.home}: is the folder of node '{others[0].stem}'; allowed: {allowed}")

    def settle(self) -> bool:
        """Make the node's folder and key if they are missing, note its policy; tell whether the key is new."""
        self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_text(self.home / RULES, "" if self.rules is None else str(self.rules.absolute()))
        if not self.copy.exists():
            self.ticket.write(self.copy)
        new = not self.key.exists()
        make = certificates.make_node_key if new else certificates.write_public_key
        make(self.key, self.public, self.ticket.node)
        return new

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm whose works the node does, made from the ticket alone."""
        check_size(self.ticket)
        try:
            return algorithm_without_rows(self.ticket.experiment, self.ticket.rows)
        except RuntimeError as error:  # torch, for a network that is too large
            raise FedtideError(f"study: its model cannot be made here ({str(error).splitlines()[0]})") from None

    def node(self, **more: Any) -> Node:
        """Return the node of the seat, with further settings."""
        ticket, memory = self.ticket, self.home / "memory" / self.ticket.digest
        clients, threads = frozenset(ticket.clients), ticket.experiment.fleet.threads
        return Node(
            self.algorithm, ticket.seed, self.rows, memory, ticket.digest, threads=threads, clients=clients, **more
        )

    @property
    def settings(self) -> dict[str, object]:
        """The settings of the node's worker, see `fedtide.site.work`."""
        return {
            "ticket": str(self.copy.absolute()),
            "data": [str(path.absolute()) for path in self.data],
            "policy": None if self.rules is None else str(self.rules.absolute()),
            "home": str(self.home.absolute()),
        }

    @property
    def line(self) -> LineSettings:
        """The settings of the node's stream."""
        home, ticket = self.home.absolute(), self.ticket
        key = str(self.key.absolute())
        return LineSettings(ticket.address, str(home / "ca.crt"), ticket.digest, ticket.node, key)

    def describe(self) -> Iterator[str]:
        """Say in lines which server it trusts, and which rows and rules it has."""
        ticket = self.ticket
        yield f"server: {ticket.address}, authority SHA-256 {_authority(ticket)}"
        for path, client in zip(self.data, ticket.clients, strict=True):
            yield f"rows: {path}: {', '.join(f'{self.rows.count(client, part)} {part}' for part in PARTS)}"
            if columns := describe_columns(path, ticket.rows):
                yield f"columns: {path}: {columns}"
        yield f"study: {ticket.experiment.rounds} rounds; questions and answers are written to {self.home / RECORD}"
        yield f"rules: {'none' if self.rules is None else self.rules}"
        questions = (*self.algorithm.works, SCORE)
        if unasked := [name for name in self.policy.questions or () if name not in questions]:
            yield f"warning: your policy allows '{unasked[0]}'; this study asks: {', '.join(questions)}"
        clients = ticket.registered
        if self.policy.fewest > clients:
            yield f"warning: your policy wants {self.policy.fewest} clients in a sum, and the site has {clients}"
        wire = ticket.experiment.wire
        if wire is not None and wire.privacy is not None and (delta := wire.privacy.delta) * clients > DELTA:
            yield f"warning: delta {delta:g} is too large for {clients} clients; ask for one well below 1/{clients}"
        here = installed_versions()
        for name in ("torch", "numpy"):
            if name in here and here[name] != (server := ticket.versions.get(name, here[name])):
                yield f"warning: {name} is {here[name]} here and {server} at the server; last bits may differ"

    def describe_study(self) -> Iterator[str]:
        """Say in lines what taking part means, found by a trial of the study."""
        study, algorithm, about, clients = self.ticket.experiment, self.algorithm, self.ticket.rows, self.ticket.clients
        wire = FLOATING if study.wire is None else study.wire.build().within(self.policy.clip)
        like = zero_row(about, self.rows.transforms)
        yield from describe_terms(algorithm, like, about.classes, self.policy, self.ticket.registered, wire)
        yield from describe_budget(ledger_for(study, algorithm), wire, clients, self.home / OWN, self.policy.epsilon)


def _authority(ticket: Ticket) -> str:
    return certificates.authority_fingerprint(ticket.authority.encode())


def rules_of(home: Path, policy: Path | None) -> Path | None:
    """Return the file of a node's policy: the one that is named, else the one of the last start.

    Args:
        home: the node's folder.
        policy: the person's choice; `NO_RULES` for none, whatever there was before.
    """
    if policy is not None:
        return None if policy == NO_RULES else policy
    note = home / RULES
    before = note.read_text(encoding="utf-8").strip() if note.is_file() else ""
    if before and not Path(before).is_file():
        but = f"or --policy {NO_RULES} to have none from now on"
        raise FedtideError(f"{before}: the rules that this node had before are gone; allowed: --policy FILE, {but}")
    return Path(before) if before else None


def check_size(ticket: Ticket) -> None:
    """Raise if a network or a number of threads would bring this machine down, before anything is made."""
    study, about = ticket.experiment, ticket.rows
    most = max(THREADS, os.cpu_count() or 1)
    if study.fleet.threads > most:
        raise refused("study: fleet.threads", study.fleet.threads, f"at most {most} on this machine")
    try:
        with torch.device("meta"):  # shapes alone
            network = study.model.build(shape_after(study.data.transforms, "rows", about.shape), about.classes)
        count = sum(tensor.numel() for tensor in (*network.parameters(), *network.buffers()))
    except RuntimeError as error:
        raise FedtideError(f"study: its model cannot be made ({str(error).splitlines()[0]})") from None
    if count > NUMBERS:
        raise refused("study: numbers of its model", f"{count:,}", f"at most {NUMBERS:,}")


def introduce(ticket: Ticket) -> Iterator[str]:
    """Say in lines what a ticket is, with its seal, before anything is done that the ticket says."""
    ids = ", ".join(map(str, ticket.clients))
    yield f"ticket: {ticket.node} (client {ids}) of {ticket.study.get('title') or 'a study'} {ticket.digest}"
    yield f"seal: {ticket.seal} (the site prints the same; compare them by another way than the ticket came)"


def check_versions(ticket: Ticket) -> None:
    """Raise if another version of this package made the ticket."""
    here, server = installed_versions().get("fedtide"), ticket.versions.get("fedtide")
    if here != server:
        raise refused("version of fedtide", here, f"{server}, as at the server: pip install fedtide=={server}")


def join(seat: Seat, *, log: Log, health: int | None = None) -> NoReturn:
    """Run the node of a seat until it is ended; this process becomes the one that is connected.

    Args:
        seat: the seat.
        log: takes events.
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
