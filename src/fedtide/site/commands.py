"""The commands of real clients, which import what they need when they run: `fedtide --help` does not wait for it."""

from __future__ import annotations

import signal
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.table import Table

from fedtide.core.errors import FedtideError, printable
from fedtide.report.terminal import console, say
from fedtide.runs.request import Scale, recipe

if TYPE_CHECKING:
    from fedtide.config import Experiment

Sets = Annotated[list[str], Parameter(name="--set", show_default=False)]
Kills = Annotated[bool, Parameter(negative="--no-kills")]


def deploy(
    experiment: str,
    /,
    *,
    method: str | None = None,
    nodes: str | None = None,
    address: str | None = None,
    out: Path = Path("site"),
    flower: Path | None = None,
    scale: Scale | None = None,
    set_: Sets = [],  # noqa: B006 - never changed
) -> int:
    """Make a site for real clients: roster, own authority and certificates, and a ticket for each node.

    Args:
        experiment: a TOML file, or recipe:NAME; its rows say what those of the nodes look like.
        method: the name of the one of its methods that is deployed.
        nodes: names, as in berlin,lyon,oslo; lyon:3 stands for three clients.
        address: HOST:PORT at which nodes reach this machine, in place of deploy.address.
        out: the folder that is made; it must not exist.
        flower: write an app to this folder instead, which your own SuperLink and SuperNodes of Flower run.
        scale: size of a recipe.
        set_: override a value, e.g. --set data.partition.alpha=0.1; may be repeated.
    """
    from fedtide.config import read
    from fedtide.site.site import Roster, make_site

    file = recipe(experiment.removeprefix("recipe:")) if experiment.startswith("recipe:") else Path(experiment)
    if flower is not None:
        return _flower(read(file, scale=scale, sets=set_), method, nodes, flower, experiment)
    if method is None or nodes is None:
        raise FedtideError(
            f"{'--method' if method is None else '--nodes'}: no value given; fedtide deploy --help says what it is"
        )
    settings = read(file, scale=scale, sets=set_)
    site = make_site(settings, method, Roster.of(nodes), out, address, experiment)
    _say(f"site: {out} ({site.method.name}, digest {site.digest}, {site.address})")
    for node in site.roster.node:
        ticket = site.ticket(node)
        _say(f"ticket: {out / 'tickets' / f'{node.name}.ticket'} (seal {ticket.seal})")
    let_in = f"fedtide admit {out} NODE NODE.pub"
    _say(f"next: fedtide rehearse {out}; send each node its ticket; {let_in}; fedtide serve {out}")
    return 0


def _flower(settings: Experiment, method: str | None, nodes: str | None, out: Path, where: str) -> int:
    """Write an app for Flower, and say how it is run."""
    from fedtide.site.flower import write_app

    played, about, roster = write_app(settings, method, nodes, out, where)
    _say(f"app: {out} ({played.name}, digest {about.digest}, {len(roster.node)} nodes)")
    _say(f"""each node: flower-supernode ... --node-config 'name="{roster.node[0].name}" data="ROWS"'""")
    _say(f"then: flwr run {out}")
    return 0


def admit(site: Path, node: str, public_key: Path, /) -> int:
    """Let the key of a node in; a served site takes notice within seconds.

    Args:
        site: the folder of the site.
        node: its name in the roster.
        public_key: NODE.pub, which fedtide join made.
    """
    from fedtide.site.certificates import fingerprint
    from fedtide.site.site import admit as let_in

    found, done = let_in(site, node, public_key)
    assert found.key is not None
    ids = ", ".join(map(str, found.clients))
    _say(f"{found.name} (client {ids}) {done}: {fingerprint(found.key)}")
    _say(f"compare this fingerprint with what fedtide join prints at {found.name}, by another way than the key came")
    return 0


def invite(site: Path, nodes: str, /) -> int:
    """Add nodes to a site, and write their tickets; a served site takes them in after the round.

    Args:
        site: the folder of the site.
        nodes: names, as in paris,porto; porto:2 stands for two clients.
    """
    from fedtide.site.site import invite as add

    for ticket in add(site, nodes):
        _say(f"ticket: {site / 'tickets' / f'{ticket.node}.ticket'} (seal {ticket.seal})")
    return 0


def status(site: Path, /) -> int:
    """Say how a site is: who is connected, and what each node was asked, sent and showed.

    Args:
        site: the folder of the site.
    """
    from fedtide.site.site import Site
    from fedtide.site.status import HEADER, lines, reasons, rows

    found, now = Site.read(site, imports=False), datetime.now(UTC)
    for line in lines(found, now):
        _say(line)
    table = Table(*HEADER, box=None, pad_edge=False)
    for row in rows(found, now):
        table.add_row(*map(printable, row))
    console().print(table)
    for line in reasons(found):
        _say(line)
    return 0


def join(
    ticket: Path,
    /,
    *,
    data: list[Path],
    policy: Path | None = None,
    home: Path | None = None,
    dry: bool = False,
    health: int | None = None,
    log_json: bool = False,
) -> int:
    """Take part with the rows of this machine, which stay here: make a key, check everything, run the node.

    Args:
        ticket: the file that came from the site.
        data: a CSV, Parquet or NPZ file with the rows of the client; as many as the ticket has clients, in order.
        policy: a file with rules of your own: what is never revealed, and which questions are answered; by default that
            of the last time, and "none" drops it.
        home: the node's folder, with its key and what its clients keep; by default one of its name here.
        dry: say what would be asked, sent, revealed and kept, and do nothing.
        health: a port of the loopback at which programs of this machine are told how the node is.
        log_json: write the log as lines of JSON.
    """
    from fedtide.site.budget import OWN, in_words, ledger_for
    from fedtide.site.certificates import fingerprint, read_public_key
    from fedtide.site.log import Log
    from fedtide.site.seat import Seat, home_of, introduction, rules_of
    from fedtide.site.terms import what_it_means
    from fedtide.site.tickets import Ticket
    from fedtide.wire.clip import within

    log = Log(log_json)
    tell = partial(log.say, "check") if log_json else _say
    found = Ticket.read(ticket)
    for line in introduction(found):
        tell(line)
    rules = rules_of(home_of(found, home), policy)
    seat = Seat.of(found, data, rules, home)
    for line in seat.said():
        tell(line)
    if dry:
        about = seat.ticket.rows
        study, algorithm = seat.ticket.experiment, seat.algorithm
        wire = None if study.wire is None else within(study.wire.build(), seat.policy.clip)
        for line in what_it_means(algorithm, seat.like, about.classes, seat.policy, seat.ticket.registered, wire):
            tell(line)
        for line in in_words(
            ledger_for(study, algorithm), wire, seat.ticket.clients, seat.home / OWN, seat.policy.epsilon
        ):
            tell(line)
        return 0
    from fedtide.site.join import join as take_part

    if seat.settle():
        words = f"fedtide admit SITE {seat.ticket.node} {seat.public.name}"
        tell(f"key: made; send {seat.public} to the site, which lets it in with: {words}")
    tell(f"key: {fingerprint(read_public_key(seat.public)[0])} (the site compares this fingerprint)")
    return take_part(seat, log=log, health=health)


def serve(site: Path, /, *, dry: bool = False, health: int | None = None, log_json: bool = False) -> int:
    """Play a site with real clients; after a stop or a crash the same command goes on with the same bits.

    Args:
        site: the folder of the site.
        dry: say what it will do, and do nothing.
        health: a port of the loopback at which programs of this machine are told how the server is.
        log_json: write the log as lines of JSON.
    """
    from fedtide.site.files import check_own
    from fedtide.site.log import Log
    from fedtide.site.serve import serve as play
    from fedtide.site.site import Site
    from fedtide.site.status import intent

    found = Site.read(site, imports=not dry)
    check_own(site)
    if dry:
        for line in intent(found, datetime.now(UTC)):
            _say(line)
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a service is stopped as by Ctrl-C
    return play(found, log=Log(log_json), health=health)


def rehearse(site: Path, /, *, rounds: int = 3, kills: Kills = True, log_json: bool = False) -> int:
    """Play some rounds with a server and nodes on this machine, and compare the weights with those of a simulation.

    Exit status 1 where they differ.

    Args:
        site: the folder of the site; all of it happens in its subfolder rehearsal, which is made anew.
        rounds: how many.
        kills: kill one node and the server once.
        log_json: write the log as lines of JSON.
    """
    from fedtide.site.log import Log
    from fedtide.site.rehearse import rehearse as play
    from fedtide.site.site import Site

    return play(Site.read(site), rounds=rounds, kills=kills, log=Log(log_json))


def replay(run_folder: Path, /, *, data: list[Path] = [], out: Path | None = None) -> int:  # noqa: B006 - never changed
    """Play a deployment again in simulation, where rows are at hand; exit status 1 where the weights differ.

    A private run takes its sums as they were released, and needs no rows; with them their noise is looked at, too.

    Args:
        run_folder: `run` in the folder of a site.
        data: a file of rows for each client, in the order of their ids; without it the study's own rows are taken, and
            none for a private run.
        out: the run folder of the simulation; by default `replay` beside the run folder.
    """
    from fedtide.site.replay import replay as play

    found = play(run_folder, data, out)
    _say(f"replay: {found.folder}")
    if found.noise:
        sizes = [each.deviation for each in found.noise]
        _say(f"noise: {min(sizes):.3f} to {max(sizes):.3f} times what the ledger says, in {len(sizes)} sums")
    if unlikely := [each for each in found.noise if not each.likely]:
        _say(
            f"what was released in round {unlikely[0].round} is not what these rows' clients answer with the ledger's "
            f"noise: it is {unlikely[0].deviation:.3g} times as far from that"
        )
        return 1
    if found.equal:
        _say(f"after {found.rounds} rounds the weights are those of the deployment, bit for bit")
        return 0
    first = "" if found.differs is None else f"; the records differ from round {found.differs} on"
    _say(f"after {found.rounds} rounds the weights are not those of the deployment{first}")
    whose = (
        "files in the order of the clients' ids" if data else "the study's own rows; --data takes those of the clients"
    )
    _say(f"it was played with {whose}")
    return 1


def _say(text: str) -> None:
    say(text, console())
