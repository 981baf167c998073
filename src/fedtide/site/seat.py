"""A node's seat in a federation: its ticket, its key, its rows and its rules, all checked before anything is sent.

A node's folder holds NAME.key, which is secret and never travels, NAME.pub, which the site admits, a copy of the
ticket, where its rules are, what its clients keep between rounds, and with what they were evaluated.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from fedtide.config import Experiment
from fedtide.core.atomic import replacing
from fedtide.core.base import PARTS, Algorithm, Shard
from fedtide.core.errors import FedtideError, refused
from fedtide.data.population import features
from fedtide.data.rows import Rows
from fedtide.data.transforms import Prepare, apply_transforms, shape_after
from fedtide.runs.build import algorithm_of, task_of
from fedtide.site import certificates
from fedtide.site.files import check_own
from fedtide.site.policy import SCORE, Policy
from fedtide.site.rows import FileRows, columns_in_words
from fedtide.site.site import versions
from fedtide.site.tickets import RowsAbout, Ticket
from fedtide.wire.masks import library

NO_RULES = Path("none")
"""What a person says in place of a file of rules to drop those that a node had."""
RULES = "policy.path"
"""File in a node's folder that says where its rules are."""
RECORD = "asked.jsonl"
"""File in a node's folder with what was asked and sent."""
NUMBERS = 1_000_000_000
"""Parameters of a network that a ticket may name."""
DELTA = 0.1
"""Clients of all that a private study may tell more of than its epsilon."""
THREADS = 64
"""Threads that a ticket may name, or as many as a machine has cores."""


@dataclass(frozen=True)
class Seat:
    """All that a node needs to take part.

    Args:
        ticket: what the site says.
        home: the node's folder; it need not be there yet.
        data: a file of rows for each of its clients, in the order of their ids.
        rows: what is in them.
        policy: the node's own rules.
        rules: the file that they are from.
    """

    ticket: Ticket
    home: Path
    data: tuple[Path, ...]
    rows: FileRows
    policy: Policy = Policy()
    rules: Path | None = None

    @staticmethod
    def read(ticket: Path, data: Sequence[Path], policy: Path | None = None, home: Path | None = None) -> Seat:
        """Read a ticket from its file, and all that `of` checks."""
        return Seat.of(Ticket.read(ticket), data, policy, home)

    @staticmethod
    def of(found: Ticket, data: Sequence[Path], policy: Path | None = None, home: Path | None = None) -> Seat:
        """Read and check all of it; nothing is written.

        Args:
            found: the ticket that came from the site.
            data: files of rows.
            policy: the file of the node's own rules; None allows whatever the study asks.
            home: the node's folder; None is one of the node's name here.

        Raises:
            FedtideError: a file is damaged, or does not fit the study or this machine.
        """
        library()
        found.check_clock(datetime.now(UTC))
        check_versions(found)
        study = found.experiment
        rows = FileRows.read(data, found.clients, found.rows, study.data.split, study.data.transforms)
        rules = Policy() if policy is None else Policy.read(policy)
        seat = Seat(found, home_of(found, home), tuple(data), rows, rules, policy)
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
        """Raise if the node's folder is that of another study, of another user, or not a folder."""
        if self.home.is_file():
            raise refused("--home", str(self.home), "a folder, or a new name", "it is a file")
        check_own(self.home)
        if self.copy.exists():
            before = Ticket.read(self.copy)
            pairs = {
                "digest": (before.digest, self.ticket.digest),
                "authority": (_short(before), _short(self.ticket)),
                "clients": (list(before.clients), list(self.ticket.clients)),
            }
            for key, (mine, told) in pairs.items():
                if mine != told:
                    raise FedtideError(
                        f"{self.home}: belongs to another study or site ({key} {mine}, and the ticket says {told}); "
                        "allowed: --home with a new folder"
                    )
        others = sorted(self.home.glob("*.key"))
        if others and not self.key.exists():  # two nodes would share what is kept for one
            raise FedtideError(
                f"{self.home}: is the folder of node '{others[0].stem}'; allowed: --home with a folder of "
                f"'{self.ticket.node}' alone"
            )

    def settle(self) -> bool:
        """Make the node's folder and key where there are none, note its rules; tell whether the key is new."""
        self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(self.home / RULES) as note:
            note.write_text("" if self.rules is None else str(self.rules.absolute()), encoding="utf-8")
        if not self.copy.exists():
            self.ticket.write(self.copy)
        if new := not self.key.exists():
            certificates.make_node_key(self.key, self.public, self.ticket.node)
        else:
            certificates.write_public_key(self.key, self.public, self.ticket.node)
        return new

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm whose works the node does, made from the ticket alone."""
        check_size(self.ticket)
        try:
            return algorithm_without_rows(self.ticket.experiment, self.ticket.rows)
        except RuntimeError as error:  # torch, of a network that is too large
            raise FedtideError(f"study: its model cannot be made here ({str(error).splitlines()[0]})") from None

    @property
    def like(self) -> Shard:
        """A row of zeros as the model sees it, from which a trial of the study can be made up."""
        return like(self.ticket.rows, self.rows.transforms)

    def said(self) -> Iterator[str]:
        """Say what it trusts, and which rows it holds, in lines for people."""
        ticket = self.ticket
        authority = certificates.authority_fingerprint(ticket.authority.encode())
        yield f"server: {ticket.address}, authority SHA-256 {authority}"
        for path, client in zip(self.data, ticket.clients, strict=True):
            counts = self.rows.counts(client)
            yield f"rows: {path}: {', '.join(f'{counts[part]} {part}' for part in PARTS)}"
            if columns := columns_in_words(path, ticket.rows):
                yield f"columns: {path}: {columns}"
        yield f"study: {ticket.experiment.rounds} rounds; what is asked and sent will stand in {self.home / RECORD}"
        yield f"rules: {'none' if self.rules is None else self.rules}"
        asked = (*self.algorithm.works, SCORE)
        if unasked := [name for name in self.policy.questions or () if name not in asked]:
            yield f"warning: your rules allow '{unasked[0]}', which this study never asks; it asks: {', '.join(asked)}"
        if self.policy.fewest > ticket.registered:
            yield (
                f"warning: every question is refused: your rules want {self.policy.fewest} clients in a sum, and the "
                f"site has {ticket.registered}"
            )
        wire = ticket.experiment.wire
        if wire is not None and wire.privacy is not None and wire.privacy.delta * ticket.registered > DELTA:
            yield (
                f"warning: with probability {wire.privacy.delta:g} (delta) the study may tell more than its epsilon: "
                f"of {ticket.registered} clients too much, ask its owner for a delta far below one over their number"
            )
        yield from warnings(ticket)


def _short(ticket: Ticket) -> str:
    return certificates.authority_fingerprint(ticket.authority.encode())[:16]


def home_of(ticket: Ticket, home: Path | None) -> Path:
    """Return the node's folder: the one that is named, or one of the node's name here."""
    return Path(ticket.node) if home is None else home


def rules_of(home: Path, policy: Path | None) -> Path | None:
    """Return the file of a node's own rules: the one that is named, else the one that it was started with before.

    Args:
        home: the node's folder.
        policy: what the person said; `NO_RULES` for none, whatever there was before.
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
    """Raise for a network or a number of threads that would bring this machine down, before anything is made."""
    study, about = ticket.experiment, ticket.rows
    most = max(THREADS, os.cpu_count() or 1)
    if study.fleet.threads > most:
        raise refused("study: fleet.threads", study.fleet.threads, f"at most {most} on this machine")
    try:
        with torch.device("meta"):  # shapes alone
            shape = shape_after(study.data.transforms, "rows", about.shape)
            network = study.model.build(shape, about.classes)
        count = sum(each.numel() for each in (*network.parameters(), *network.buffers()))
    except RuntimeError as error:
        raise FedtideError(f"study: its model cannot be made ({str(error).splitlines()[0]})") from None
    if count > NUMBERS:
        raise refused("study: numbers of its model", f"{count:,}", f"at most {NUMBERS:,}")


def introduction(ticket: Ticket) -> Iterator[str]:
    """Say what a ticket is, and its seal, in lines for people: before anything is done that the ticket says."""
    ids = ", ".join(map(str, ticket.clients))
    yield f"ticket: {ticket.node} (client {ids}) of {ticket.study.get('title') or 'a study'} {ticket.digest}"
    yield f"seal: {ticket.seal} (the site prints the same; compare them by another way than the ticket came)"


def like(about: RowsAbout, transforms: tuple[Prepare, ...]) -> Shard:
    """Return a row of zeros as the model sees it."""
    x, none = features(blank(about).x), torch.zeros(1, dtype=torch.int64)
    return Shard(apply_transforms(transforms, x), none, none)


def algorithm_without_rows(experiment: Experiment, about: RowsAbout) -> Algorithm:
    """Return the algorithm of a study, made where its rows are not: at a node, or at a server of real clients."""
    method = experiment.method[0]
    return algorithm_of(method, task_of(experiment, method, blank(about)), experiment.data.directory)


def blank(about: RowsAbout) -> Rows:
    """Return a row of zeros."""
    x = torch.zeros(1, *about.shape, dtype=getattr(torch, about.dtype))
    return Rows("rows", x, torch.zeros(1, dtype=torch.int64), about.classes)


def check_versions(ticket: Ticket) -> None:
    """Raise where another version of this package made the ticket."""
    here, there = versions().get("fedtide"), ticket.versions.get("fedtide")
    if here != there:
        raise refused("version of fedtide", here, f"{there}, as at the server: pip install fedtide=={there}")


def warnings(ticket: Ticket) -> Iterator[str]:
    """Say which packages differ from the server's: sums are right, and their last bits others than simulated ones."""
    here = versions()
    for name in ("torch", "numpy"):
        if name in here and name in ticket.versions and here[name] != ticket.versions[name]:
            there = ticket.versions[name]
            yield f"warning: {name} is {here[name]} here and {there} at the server; last bits may differ"
