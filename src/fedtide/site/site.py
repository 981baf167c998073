"""A site: the folder of a server for real clients.

    study.toml         the configuration, every default written out, with one method and one seed
    site.toml          its digest, when it was made, the versions here, and what rows look like
    roster.toml        who takes part: names, ids of their clients, and keys once they are admitted
    authority/         ca.crt, ca.key (secret), server.crt, server.key (secret)
    tickets/           NAME.ticket for each node
    run/               the run folder, once served
    private/           what noise needs to go on after a crash, while a private study is served (secret)
    status.json        who is connected, while it is served

All but the last three are made at once by `fedtide deploy`, which never writes over anything.
"""

from __future__ import annotations

import platform
import tomllib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import tomli_w
from pydantic import Field

from fedtide.config import Experiment, Method, from_dict, read, resolved, slug, to_toml
from fedtide.config.settings import Deploy, Local, WireSettings, split_address
from fedtide.core.atomic import making, replacing
from fedtide.core.errors import FedtideError, refused, unknown
from fedtide.core.memory import MemoryStore
from fedtide.data.partition import IID, Natural
from fedtide.data.rows import Rows
from fedtide.data.sources import CSV, NPZ
from fedtide.fields.types import Strict, checked
from fedtide.learn.device import CPU
from fedtide.remote.fleet import SIMULATION_ONLY
from fedtide.runs.build import host_of, rows_of
from fedtide.runs.digest import digest_of
from fedtide.runs.preflight import preflight
from fedtide.runs.private import plan_without_sampling
from fedtide.site import certificates
from fedtide.site.budget import ledger_for
from fedtide.site.files import read_toml, write_new
from fedtide.site.tickets import (
    READ,
    SCHEME,
    Digest,
    Ids,
    NodeName,
    RowsAbout,
    Ticket,
    Versions,
    check_portable,
    study_for,
)
from fedtide.wire.masks import hidden, library

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LARGEST = 20_000_000
"""Bytes of a site's file."""
PACKAGES = ("fedtide", "torch", "numpy", "grpcio")
"""Packages whose versions nodes compare with the server's."""


class Member(Strict):
    """A place where clients live.

    Args:
        name: its name, that of its ticket.
        clients: ids of the clients that it stands for.
        key: its public key, "KIND BASE64" as OpenSSH writes it; None until it is admitted.
    """

    name: NodeName
    clients: Ids
    key: Annotated[str, Field(max_length=1000)] | None = None


class Roster(Strict):
    """Everybody who may take part.

    Args:
        node: the places.
    """

    node: Annotated[tuple[Member, ...], Field(min_length=1, max_length=100_000)]

    @staticmethod
    def of(names: str, where: str = "--nodes") -> Roster:
        """Return a roster of new nodes from "berlin,lyon:2,oslo": names, with how many clients each stands for.

        >>> [(node.name, node.clients) for node in Roster.of("berlin,lyon:2,oslo").node]
        [('berlin', (0,)), ('lyon', (1, 2)), ('oslo', (3,))]
        """
        parts = [part.strip().partition(":") for part in names.split(",")]
        for _, colon, count in parts:
            if colon and not (
                count.isascii() and count.isdigit() and 1 <= int(count[:8]) <= 1_000_000 and len(count) < 8
            ):
                raise refused(where, f":{count}", "a whole number of 1 or more, as in lyon:2")
        counts = [int(count) if colon else 1 for _, colon, count in parts]
        ends = list(accumulate(counts))
        given = [
            {"name": name, "clients": tuple(range(end - count, end))}
            for (name, *_), count, end in zip(parts, counts, ends, strict=True)
        ]
        return Roster.checked({"node": given}, where)

    @staticmethod
    def checked(values: Any, where: str) -> Roster:
        """Return a roster from nested values; `where` begins the error."""
        made = checked(Roster, values, where)
        names = [node.name for node in made.node]
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise refused(where, twice[0], "each name once")
        ids = sorted(client for node in made.node for client in node.clients)
        if ids != list(range(len(ids))):
            raise refused(f"{where}: ids of clients", ids[:20], "each from 0 on, and each once")
        keys = [node.key for node in made.node if node.key is not None]
        for key, count in Counter(keys).items():
            certificates.check_public_key(key, where)
            if count > 1:
                raise FedtideError(
                    f"{where}: two nodes have the key {certificates.fingerprint(key)}, allowed: one of its own each"
                )
        return made

    @property
    def clients(self) -> int:
        """Number of clients."""
        return sum(len(node.clients) for node in self.node)

    def named(self, name: str, where: str) -> Member:
        """Return the node of a name; `where` begins the error."""
        found = {node.name: node for node in self.node}
        if name not in found:
            raise unknown(where, name, list(found))
        return found[name]


class AboutSite(Strict):
    """What a site knows beside its study.

    Args:
        scheme: version of tickets and of what travels.
        digest: of the study, which names its run.
        made: when.
        versions: of packages where it was made.
        rows: what rows look like.
    """

    scheme: Literal[1]
    digest: Digest
    made: datetime
    versions: Versions
    rows: RowsAbout


@dataclass(frozen=True)
class Site:
    """A server for real clients.

    Args:
        root: its folder.
        experiment: the study, with one method and one seed.
        about: what is known beside it.
        roster: who takes part.
    """

    root: Path
    experiment: Experiment
    about: AboutSite
    roster: Roster

    @staticmethod
    def read(root: Path, imports: bool = True) -> Site:
        """Read the folder of a site.

        Args:
            root: the folder.
            imports: whether code that the study names is imported; False executes nothing.

        Raises:
            FedtideError: it is none, or one of its files was damaged or changed.
        """
        values = read_toml(_checked(root) / "site.toml", LARGEST)
        if values.get("scheme") != SCHEME:
            raise refused(f"{root / 'site.toml'}: scheme", values.get("scheme"), str(SCHEME), "another version made it")
        about = checked(AboutSite, values, str(root / "site.toml"))
        experiment = read(root / "study.toml", timed=False, imports=imports)
        site = Site(root, experiment, about, read_roster(root))
        site.check()
        return site

    def check(self) -> None:
        """Raise if the study is not the one that the tickets were made for."""
        path = self.root / "study.toml"
        if len(self.experiment.method) != 1 or len(self.experiment.seeds) != 1 or self.experiment.sweep:
            raise FedtideError(f"{path}: was changed: a site has one method, one seed and no sweep")
        if digest_of(self.experiment, self.method, self.seed) != self.digest:
            raise FedtideError(
                f"{path}: was changed, and nodes have tickets of what it was (digest {self.digest}); only [deploy] may "
                "change; for another study make another site with: fedtide deploy"
            )
        check_fewest(self.deploy, self.roster.clients, str(path))

    @property
    def method(self) -> Method:
        """The method that is deployed."""
        return self.experiment.method[0]

    @property
    def seed(self) -> int:
        """The seed of its run."""
        return self.experiment.seeds[0]

    @property
    def digest(self) -> str:
        """The digest of the study, which names its run."""
        return self.about.digest

    @property
    def deploy(self) -> Deploy:
        """Where and when nodes are asked."""
        return self.experiment.deploy or Deploy()

    @property
    def address(self) -> str:
        """HOST:PORT at which nodes reach the server."""
        return self.deploy.address

    @property
    def authority(self) -> Path:
        """The folder of keys and certificates."""
        return self.root / "authority"

    @property
    def run(self) -> Path:
        """The run folder."""
        return self.root / "run"

    @property
    def record(self) -> Path:
        """The folder of the one run in the run folder."""
        return self.run / slug(self.method.name) / str(self.seed)

    @property
    def private(self) -> Path:
        """The folder of what noise needs to go on after a crash, which is secret."""
        return self.root / "private"

    @property
    def status(self) -> Path:
        """The file that says who is connected, while the site is served."""
        return self.root / "status.json"

    def ticket(self, node: Member) -> Ticket:
        """Return the ticket of a node."""
        return Ticket(
            scheme=SCHEME,
            node=node.name,
            clients=node.clients,
            registered=self.roster.clients,
            address=self.address,
            authority=(self.authority / "ca.crt").read_text(encoding="ascii"),
            digest=self.digest,
            seed=self.seed,
            made=self.about.made,
            versions=self.about.versions,
            rows=self.about.rows,
            study=study_for(self.experiment),
        )


def _checked(root: Path) -> Path:
    """Return the folder of a site; raise where it is none."""
    if not (root / "site.toml").is_file():
        raise FedtideError(f"{root}: not a site (no site.toml in it); fedtide deploy makes one")
    return root


def read_roster(root: Path) -> Roster:
    """Return who takes part in a site; it may have grown since it was last read."""
    return Roster.checked(read_toml(root / "roster.toml", LARGEST), str(root / "roster.toml"))


def write_roster(root: Path, roster: Roster) -> None:
    """Write who takes part in a site, in place of what was written before."""
    text = "# Who takes part; fedtide admit writes keys.\n\n" + tomli_w.dumps(_plain(roster))
    with replacing(root / "roster.toml") as temporary:
        temporary.write_text(text, encoding="utf-8")


def _plain(roster: Roster) -> dict[str, Any]:
    return roster.model_dump(mode="json", exclude_none=True)


def versions() -> dict[str, str]:
    """Return the versions of what computes and carries answers."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def chosen(experiment: Experiment, method: str, clients: int, address: str | None, where: str) -> Experiment:
    """Return the study of a site: one method with the first seed, dealt to as many clients as the roster has.

    Args:
        experiment: as its file says.
        method: name of one of its methods.
        clients: how many real clients there are; a rehearsal deals the study's rows to as many.
        address: HOST:PORT of the server, in place of the file's.
        where: how messages call the study.
    """
    named = {each.name: each for each in experiment.method}
    if method not in named:
        raise unknown(f"{where}: --method", method, list(named))
    if experiment.sweep:
        raise FedtideError(f"{where}: sweep: found one, allowed: none; --set chooses a value")
    check_portable(experiment, named[method])
    if named[method].decide_per == "oracle":
        but = "no server knows true groups of real clients"
        raise refused(f"method '{method}'.decide_per", "oracle", "client, batch, sample", but)
    for number, metric in enumerate(experiment.metrics):
        if metric.kind != "python":
            raise refused(f"metrics[{number}]", metric.kind, "metrics of what real clients send of an evaluation")
    deploy = experiment.deploy or Deploy()
    if address is not None:
        try:
            split_address(address)
        except ValueError as error:
            raise FedtideError(f"--address: {error}") from None
        deploy = deploy.model_copy(update={"address": address})
    check_fewest(deploy, clients, where)
    data = experiment.data
    if data.public_samples:
        raise refused(f"{where}: data.public_samples", data.public_samples, "0, because tickets carry no rows to nodes")
    if experiment.fleet.device != CPU:  # a site has one digest, and machines of nodes have devices of their own
        raise refused(f"{where}: fleet.device", experiment.fleet.device, "cpu, which servers and nodes compute on")
    rows = rows_of(experiment, experiment.seeds[0])
    if not isinstance(rows, Rows):
        raise FedtideError(f"{where}: data.source: makes rows as they are needed, which real clients do not")
    partition = data.partition or (IID() if rows.client is None else Natural())
    if hasattr(partition, "clients"):
        partition = cast(Any, replace)(partition, clients=clients)
    changes: dict[str, Any] = {
        "method": (named[method],),
        "seeds": experiment.seeds[:1],
        "data": data.model_copy(update={"partition": partition, "held_out_clients": type(data.held_out_clients)()}),
        "deploy": deploy,
        "wire": planned(experiment, named[method]),
        "fleet": Local(threads=experiment.fleet.threads, channels_last=experiment.fleet.channels_last),
        **dict.fromkeys(("baseline", "tune", "forgetting"), None),
        "claim": (),
    }
    made = experiment.model_copy(update=changes)
    return from_dict(tomllib.loads(to_toml(made)), where=where, timed=False)  # as the file of the site will be read


def planned(experiment: Experiment, method: Method) -> WireSettings | None:
    """Return how sums pass, with the plan of its privacy written out: servers and nodes calculate with the same."""
    wire = experiment.wire
    if wire is None or wire.privacy is None:
        return wire
    plan = plan_without_sampling(wire.privacy, experiment.rounds, 1, experiment.shift_of(method).period)
    privacy = wire.privacy.model_copy(update={"distance": plan.distance, "times": plan.times})
    return wire.model_copy(update={"privacy": privacy})


def check_fewest(deploy: Deploy, clients: int, where: str) -> None:
    """Raise where a round waits for more clients than there are, and so for ever; `where` begins the error."""
    if deploy.fewest > clients:
        raise refused(f"{where}: deploy.fewest", deploy.fewest, f"1 to {clients}, as many clients as there are")


def check_hidden(study: Experiment, roster: Roster, where: str) -> None:
    """Raise where masks would hide from no sum what clients of other nodes say from one node and the server."""
    wire, holders = study.wire, {client: node.name for node in roster.node for client in node.clients}
    if wire is None or not wire.secure or hidden(holders, wire.fewest):
        return
    largest = max(roster.node, key=lambda node: len(node.clients))
    but = "this node and the server together could compute the answers of the others"
    found = f"{len(largest.clients)} of {len(holders)} clients at {largest.name}"
    raise refused(f"{where}: --nodes", found, f"{wire.fewest - 1} clients or more beside those of any node", but)


def about_rows(experiment: Experiment, rows: Rows, directory: Path | None) -> RowsAbout:
    """Return what a node has to know to read its rows.

    Raises:
        FedtideError: files of nodes cannot hold such rows.
    """
    source = experiment.data.source
    if rows.steps is not None:
        raise FedtideError(f"data.source: rows of {rows.name} are sequences, which nodes cannot read from files yet")
    if rows.value is not None:
        but = "nodes read classes alone, and what numbers are standardized by is that of all rows"
        raise refused("data.target.kind", experiment.data.target.kind, "'classes'", but)
    if getattr(source, "scaled", False):
        but = "each node would scale by rows of its own"
        raise refused("data.source.scaled", True, "false, with features that are scaled before", but)
    if isinstance(source, CSV) and source.learns:
        but = "each node would find them in rows of its own"
        key, found = ("categories", list(source.categories)) if source.categories else ("missing", source.missing)
        raise refused(f"data.source.{key}", found, "features that are complete, and numbers", but)
    # Rows of sources of other kinds come to nodes as arrays.
    kind = source.kind if isinstance(source, CSV | NPZ) else "npz"
    settings = resolved(experiment)["data"]["source"] if source.kind == kind else {}
    values = {"kind": kind} | {key: settings[key] for key in READ[kind] if key in settings}
    if "names" in values:
        values["names"] = {key: name for key, name in values["names"].items() if key not in ("client", "domain")}
    columns = source.feature_names(directory) if isinstance(source, CSV) else ()
    return RowsAbout(
        shape=rows.shape,
        dtype=cast(Any, str(rows.x.dtype).removeprefix("torch.")),
        classes=rows.classes,
        labels=rows.label_names,
        columns=columns,
        source=values,
    )


def settled(
    experiment: Experiment, method: str, roster: Roster, address: str | None, where: str
) -> tuple[Experiment, AboutSite]:
    """Return the study of a site and what is known beside it; see `make_site`.

    Raises:
        FedtideError: the study cannot be deployed.
    """
    study = chosen(experiment, method, roster.clients, address, where)
    check_hidden(study, roster, where)
    preflight(study, where)
    host = host_of(study, study.method[0], study.seeds[0], MemoryStore(None))
    ledger_for(study, host.algorithm)
    dealt = host.population.registered
    if dealt != roster.clients:
        but = f"the study deals its rows to {dealt} clients"
        raise refused(f"{where}: --nodes", f"{roster.clients} clients", "as many; NAME:3 is a node with three", but)
    rows = cast(Rows, rows_of(study, study.seeds[0]))
    if known := [name for name in host.algorithm.traits.reveals if name in SIMULATION_ONLY]:
        but = f"it asks for '{known[0]}', which only a simulation knows"
        raise refused(f"{where}: --method", method, "one whose clients train together", but)
    directory = Path(study.data.directory) if study.data.directory else None
    return study, AboutSite(
        scheme=SCHEME,
        digest=digest_of(study, study.method[0], study.seeds[0]),
        made=datetime.now(UTC).replace(microsecond=0),
        versions=versions(),
        rows=about_rows(study, rows, directory),
    )


def make_site(experiment: Experiment, method: str, roster: Roster, root: Path, address: str | None, where: str) -> Site:
    """Make the folder of a site, all at once.

    Args:
        experiment: as its file says.
        method: name of one of its methods.
        roster: who takes part.
        root: the folder, which must not be there.
        address: HOST:PORT of the server, in place of the file's.
        where: how messages call the study.

    Raises:
        FedtideError: there is something at `root`, or the study cannot be deployed; nothing is written.
    """
    _check_free(root)
    library()
    study, about = settled(experiment, method, roster, address, where)
    try:
        with making(root, 0o700) as made:
            site = Site(made, study, about, roster)
            for folder in (site.authority, made / "tickets"):
                folder.mkdir(mode=0o700)
            certificates.make_authority(site.authority, site.address)
            write_new(made / "study.toml", to_toml(study).encode())
            write_new(made / "site.toml", tomli_w.dumps(about.model_dump(mode="json")).encode())
            write_roster(made, roster)
            for node in roster.node:
                site.ticket(node).write(made / "tickets" / f"{node.name}.ticket")
    except OSError:
        _check_free(root)  # another command may have been faster
        raise
    return replace(site, root=root)


def _check_free(root: Path) -> None:
    if root.exists() or root.is_symlink():
        raise FedtideError(f"{root}: already exists, and is left as it is; allowed: --out with another folder")


def admit(root: Path, name: str, public: Path) -> tuple[Member, str]:
    """Let the key of a node in, and return the node and what became of it.

    Args:
        root: the site.
        name: of the node. What stands in the file is the word of its sender, and has only to agree.
        public: the file NAME.pub that the node made.

    Raises:
        FedtideError: no node of that name, the file names another, another has the key, or this one has another key.
    """
    with _alone(root):
        return _admit(root, name, public)


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Hold the site for this command: of two that change the roster at once one would be lost."""
    with open(_checked(root) / "site.toml", "rb") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def invite(root: Path, names: str) -> list[Ticket]:
    """Add nodes to the roster of a site, with clients of the next ids, and write their tickets.

    Args:
        root: the site.
        names: as for `Roster.of`.

    Raises:
        FedtideError: a name is taken.
    """
    with _alone(root):
        site = Site.read(root, imports=False)
        more = [
            node.model_copy(update={"clients": tuple(client + site.roster.clients for client in node.clients)})
            for node in Roster.of(names, "NODES").node
        ]
        values = {"node": [node.model_dump() for node in (*site.roster.node, *more)]}
        grown = replace(site, roster=Roster.checked(values, str(root / "roster.toml")))
        check_hidden(site.experiment, grown.roster, "NODES")
        tickets = [grown.ticket(node) for node in more]
        for ticket in tickets:
            path = root / "tickets" / f"{ticket.node}.ticket"
            path.unlink(missing_ok=True)  # of a command that was killed: that name is not in the roster
            ticket.write(path)
        write_roster(root, grown.roster)
    return tickets


def _admit(root: Path, name: str, public: Path) -> tuple[Member, str]:
    roster = read_roster(root)
    node = roster.named(name, "node")
    key, written = certificates.read_public_key(public)
    if written and written != name:
        raise refused(f"{public}: node", written, name)
    if node.key == key:
        return node, "was admitted before"
    if owner := next((other.name for other in roster.node if other.key == key), None):
        raise FedtideError(f"{public}: is the key of '{owner}', allowed: a key of its own for each node")
    if node.key is not None:
        raise FedtideError(
            f"{public}: '{node.name}' was admitted with another key ({certificates.fingerprint(node.key)}); where "
            f"that is lost, remove its line 'key' from {root / 'roster.toml'} and admit again"
        )
    made = node.model_copy(update={"key": key})
    write_roster(root, Roster(node=tuple(made if each.name == node.name else each for each in roster.node)))
    return made, "is admitted"
