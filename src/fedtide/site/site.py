"""A site: the folder of a server for real clients.

    study.toml         the configuration, every default written out, with one method and one seed
    site.toml          digest, time of making, versions, and what rows look like
    roster.toml        the nodes: names, ids of their clients, and keys once these are admitted
    authority/         ca.crt, ca.key (secret), server.crt, server.key (secret)
    tickets/           NAME.ticket for each node
    run/               the run folder, once the site is served
    private/           what noise needs after a crash, while a private study is served (secret)
    status.json        the nodes that are connected, while the site is served
    keys               public keys for masks that nodes have said, if sums are masked

`fedtide deploy` makes all but the last four at once, and never writes over anything.
"""

import platform
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from pydantic import Field

from fedtide._version import version_of
from fedtide.config import Experiment, Method, read, slug, to_toml
from fedtide.config.settings import Deploy
from fedtide.core.atomic import lock, write_bytes, write_text
from fedtide.core.errors import FedtideError, refused, unknown
from fedtide.core.files import read_toml
from fedtide.fields.types import Flag, Strict, checked
from fedtide.runs.digest import digest_of
from fedtide.runs.privacy import check_delta
from fedtide.site import certificates
from fedtide.site.bases import check_base
from fedtide.site.tickets import SCHEME, AboutSite, Ids, NodeName, Ticket, study_for
from fedtide.wire.masks import exposed

TOKENIZING = ("transformers", "tokenizers", "peft", "gguf")
"""Packages that read a base and make tokens of texts."""
PACKAGES = ("fedtide", "torch", "numpy", "grpcio", *TOKENIZING)
"""Packages whose versions nodes compare with the server's."""


class Member(Strict):
    """A node of the roster.

    Args:
        name: name of the node and of its ticket.
        clients: ids of the clients that it stands for.
        key: public key, "KIND BASE64" as OpenSSH writes it; None until it is admitted.
        left: whether it has left for good (`fedtide forget`), and is admitted no more.
    """

    name: NodeName
    clients: Ids
    key: Annotated[str, Field(max_length=1000)] | None = None
    left: Flag = False


class Roster(Strict):
    """All nodes that may take part.

    Args:
        node: the nodes.
    """

    node: Annotated[tuple[Member, ...], Field(min_length=1, max_length=100_000)]

    @staticmethod
    def of(names: str, where: str = "--nodes", first: int = 0) -> "Roster":
        """Return new nodes from "berlin,lyon:2,oslo": names, with the number of clients; `first` is the first id.

        >>> [(node.name, node.clients) for node in Roster.of("berlin,lyon:2,oslo").node]
        [('berlin', (0,)), ('lyon', (1, 2)), ('oslo', (3,))]
        """
        parts = [part.strip().partition(":") for part in names.split(",")]
        nodes, end = [], first
        for name, colon, count in parts:
            if colon and not re.fullmatch("[1-9][0-9]{0,5}", count):
                raise refused(where, f":{count}", "a whole number of 1 or more, as in lyon:2")
            begin, end = end, end + int(count or 1)
            nodes.append({"name": name, "clients": tuple(range(begin, end))})
        return Roster.checked({"node": nodes}, where, first)

    @staticmethod
    def checked(values: Any, where: str, first: int = 0) -> "Roster":
        """Return a roster from nested values; `where` begins the error, and `first` is the first id."""
        roster = checked(Roster, values, where)
        names = [node.name for node in roster.node]
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise refused(where, twice[0], "each name once on a roster")
        ids = sorted(client for node in roster.node for client in node.clients)
        if ids != list(range(first, first + len(ids))):
            raise refused(f"{where}: ids of clients", ids[:20], "each from 0 on, and each once")
        for key, count in Counter(node.key for node in roster.node if node.key is not None).items():
            certificates.check_public_key(key, where)
            if count > 1:
                raise refused(f"{where}: key", certificates.fingerprint(key), "another key for each node")
        return roster

    @property
    def clients(self) -> int:
        """Number of clients."""
        return sum(len(node.clients) for node in self.node)


@dataclass(frozen=True)
class Site:
    """A server for real clients.

    Args:
        root: its folder.
        experiment: the study, with one method and one seed.
        about: facts beside the study.
        roster: the nodes.
    """

    root: Path
    experiment: Experiment
    about: AboutSite
    roster: Roster

    @staticmethod
    def read(root: Path, imports: bool = True) -> "Site":
        """Read the folder of a site.

        Args:
            imports: whether code that the study names is imported; False executes nothing.

        Raises:
            FedtideError: the folder is no site, or one of its files was damaged or changed.
        """
        values = read_toml(_marker(root))
        if values.get("scheme") != SCHEME:
            raise refused(f"{root / 'site.toml'}: scheme", values.get("scheme"), str(SCHEME), "another version made it")
        about = checked(AboutSite, values, str(root / "site.toml"))
        experiment = read(root / "study.toml", timed=False, imports=imports)
        site, path = Site(root, experiment, about, read_roster(root)), root / "study.toml"
        if len(experiment.method) != 1 or len(experiment.seeds) != 1 or experiment.sweep:
            raise FedtideError(f"{path}: was changed: a site has one method, one seed and no sweep")
        if digest_of(experiment, site.method, site.seed) != about.digest:
            check_base(about.base, experiment)
            but = "only [deploy] may change; for another study make another site with: fedtide deploy"
            raise FedtideError(f"{path}: was changed, and nodes have tickets of what it was ({about.digest}); {but}")
        check_fewest(site.deploy, site.roster.clients, str(path))
        return site

    def check_version(self) -> None:
        """Raise if another version of this package made the site: its nodes would play other numbers, or refuse."""
        here, before = installed_versions().get("fedtide"), self.about.versions.get("fedtide")
        if here != before:
            allowed = f"{before}, as in the tickets of its nodes: pip install fedtide=={before}, or make another site"
            raise refused(f"{self.root}: version of fedtide", here, allowed)

    def write(self) -> None:
        """Write the three files that make a folder a site."""
        write_bytes(self.root / "study.toml", to_toml(self.experiment).encode(), new=True)
        about = self.about.model_dump(mode="json", exclude_none=True)
        write_bytes(self.root / "site.toml", tomli_w.dumps(about).encode(), new=True)
        write_roster(self.root, self.roster)

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
        """Address and times of the server."""
        return self.experiment.deploy or Deploy()

    @property
    def fewest(self) -> int:
        """The number of clients that a round waits for before it begins."""
        wire = self.experiment.wire
        return max(self.deploy.fewest, 1 if wire is None else wire.fewest)

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
        """The secret folder of what noise needs after a crash."""
        return self.root / "private"

    @property
    def keys(self) -> Path:
        """The file of public keys for masks that nodes have said."""
        return self.root / "keys"

    @property
    def status(self) -> Path:
        """The status file, which the server writes."""
        return self.root / "status.json"

    @property
    def lock(self) -> Path:
        """The file whose lock the server holds as long as it runs."""
        return self.root / "server.lock"

    def ticket(self, node: Member) -> Ticket:
        """Return the ticket of a node."""
        return self.ticket_of(node, self.deploy.address, (self.authority / "ca.crt").read_text(encoding="ascii"))

    def ticket_of(self, node: Member, address: str, authority: str) -> Ticket:
        """Return the ticket of a node for a server at an address, with the certificate of its authority."""
        return Ticket(
            **dict(self.about),
            node=node.name,
            clients=node.clients,
            registered=self.roster.clients,
            address=address,
            authority=authority,
            seed=self.seed,
            study=study_for(self.experiment),
        )

    def write_tickets(self, nodes: tuple[Member, ...]) -> list[Ticket]:
        """Write the tickets of some nodes, and return them."""
        tickets = [self.ticket(node) for node in nodes]
        for node, ticket in zip(nodes, tickets, strict=True):
            path = self.ticket_file(node)
            path.unlink(missing_ok=True)  # a command that was killed left it: the name is not in the roster
            ticket.write(path)
        return tickets

    def ticket_file(self, node: Member) -> Path:
        """Return the file of a node's ticket."""
        return self.root / "tickets" / f"{node.name}.ticket"


def _marker(root: Path) -> Path:
    """Return the file by which a folder is a site; raise if it is missing."""
    if not (root / "site.toml").is_file():
        raise FedtideError(f"{root}: not a site (no site.toml in it); fedtide deploy makes one")
    return root / "site.toml"


def read_roster(root: Path) -> Roster:
    """Return the nodes of a site, whose number may have grown."""
    return Roster.checked(read_toml(root / "roster.toml"), str(root / "roster.toml"))


def write_roster(root: Path, roster: Roster) -> None:
    """Write the nodes of a site, in place of those before."""
    values = roster.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    write_text(root / "roster.toml", f"# The nodes; fedtide admit writes keys.\n\n{tomli_w.dumps(values)}")


def installed_versions() -> dict[str, str]:
    """Return the versions of the packages that compute and carry answers."""
    versions = {name: version for name in PACKAGES if (version := version_of(name))}
    return {"python": platform.python_version(), **versions}


def check_fewest(deploy: Deploy, clients: int, where: str) -> None:
    """Raise if a round waits for more clients than there are, and so for ever; `where` begins the error."""
    if deploy.fewest > clients:
        raise refused(f"{where}: deploy.fewest", deploy.fewest, f"1 to {clients}, as many clients as there are")


def check_hidden(study: Experiment, roster: Roster, where: str) -> None:
    """Raise if the server and few nodes together could learn what clients of other nodes answer, in spite of masks."""
    wire, holders = study.wire, {client: node.name for node in roster.node for client in node.clients}
    if wire is None or not wire.secure or not (few := exposed(holders, wire.fewest)):
        return
    largest = sorted(roster.node, key=lambda node: len(node.clients), reverse=True)[:few]
    count, names = sum(len(node.clients) for node in largest), ", ".join(node.name for node in largest)
    these = "this node" if few == 1 else "these nodes"
    but = f"{wire.fewest - few} clients or more at other nodes, or {these} and the server could learn their answers"
    raise refused(f"{where}: --nodes", f"{count} of {len(holders)} clients at {names}", but)


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Lock the site for this command, because two changes of the roster at once would lose one."""
    with open(_marker(root), "rb") as file:
        lock(file.fileno())
        yield


def invite(root: Path, names: str) -> list[Ticket]:
    """Add nodes to the roster of a site, with clients of the next ids, and write their tickets.

    Args:
        root: the site.
        names: as for `Roster.of`.

    Raises:
        FedtideError: a name is taken.
    """
    with locked(root):
        site = Site.read(root, imports=False)
        site.check_version()
        new = Roster.of(names, "NODES", site.roster.clients).node
        waiting = {node.name: node for node in site.roster.node if node.key is None and not node.left}
        if all(node.name in waiting and len(node.clients) == len(waiting[node.name].clients) for node in new):
            return [Ticket.read(site.ticket_file(node)) for node in new]  # they were invited before
        values = {"node": [node.model_dump() for node in (*site.roster.node, *new)]}
        site = replace(site, roster=Roster.checked(values, "NODES"))
        check_hidden(site.experiment, site.roster, "NODES")
        if site.experiment.privacy is not None:
            check_delta(site.experiment.privacy, site.roster.clients, "NODES: ")
        tickets = site.write_tickets(new)
        try:
            write_roster(root, site.roster)
        except OSError:
            for node in new:
                site.ticket_file(node).unlink(missing_ok=True)
            raise
    return tickets


def admit(root: Path, name: str, public: Path) -> tuple[Member, str]:
    """Admit the key of a node; return the node and what was done.

    Args:
        root: the site.
        name: name of the node. The name in the file is the word of its sender, and has to agree.
        public: the file NAME.pub that the node made.

    Raises:
        FedtideError: no node has that name, the file names another, another node has the key, or this node has another.
    """
    with locked(root):
        roster = read_roster(root)
        nodes = {node.name: node for node in roster.node}
        if name not in nodes:
            raise unknown("node", name, list(nodes))
        node = nodes[name]
        if node.left:
            raise FedtideError(f"node '{name}': has left for good; allowed: a new name, with fedtide invite")
        key, sender = certificates.read_public_key(public)
        if sender and sender != name:
            raise refused(f"{public}: node", sender, name)
        if node.key == key:
            return node, "was admitted before"
        if owner := next((other.name for other in roster.node if other.key == key), None):
            raise FedtideError(f"{public}: is the key of '{owner}', allowed: a key of its own for each node")
        if node.key is not None:
            but = f"if it is lost, remove its line 'key' from {root / 'roster.toml'} and admit again"
            key = certificates.fingerprint(node.key)
            raise FedtideError(f"{public}: '{name}' was admitted with another key ({key}); {but}")
        nodes[name] = node.model_copy(update={"key": key})
        write_roster(root, Roster(node=tuple(nodes.values())))
        return nodes[name], "is admitted"
