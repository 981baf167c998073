"""The ClientApp: a node that Flower starts for each message, whose answers are those of every other node."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedtide.core.errors import FedtideError, refused, unknown, within
from fedtide.core.memory import MemoryStore
from fedtide.fleets.client import ClientRows
from fedtide.remote.node import Node
from fedtide.runs.build import host_of
from fedtide.site.files import check_own
from fedtide.site.flower import TICKETS
from fedtide.site.flower_records import ASK, WHO, packed, sealed, unpacked
from fedtide.site.rows import FileRows
from fedtide.site.seat import algorithm_without_rows, check_size, check_versions
from fedtide.site.site import Site
from fedtide.site.tickets import Ticket

CONFIG = "--node-config"
"""What tells a SuperNode which node of the roster it is."""
KEYS = ("name", "data", "home")


def app_of(folder: Path) -> ClientApp:
    """Return the ClientApp of a study.

    Args:
        folder: the app's package, as Flower has unpacked it.
    """
    app = ClientApp()

    def who(message: Message, context: Context) -> Message:
        try:
            header = {"name": _seat(folder, context)[0]}
        except FedtideError as mistake:
            header = {"error": str(mistake)}
        return Message(packed(header, sealed(b"")), reply_to=message)

    def ask(message: Message, context: Context) -> Message:
        _, node = _seat(folder, context)
        header, payload = node.handle(*unpacked(message.content))
        return Message(packed(header, sealed(payload)), reply_to=message)

    app.query(WHO.partition(".")[2])(who)
    app.train(ASK.partition(".")[2])(ask)
    return app


def _seat(folder: Path, context: Context) -> tuple[str, Node]:
    """Return the name of a SuperNode in the roster, and its node."""
    return seat_of(folder, tuple(context.node_config.items()), bool(context.run_config.get("rehearsal")))


@cache  # where Flower keeps a process for several messages, rows are read once
def seat_of(folder: Path, config: tuple[tuple[str, Any], ...], rehearsal: bool) -> tuple[str, Node]:
    """Return the name and the node that a SuperNode's owner has chosen with `--node-config`.

    Args:
        folder: the app's package.
        config: `name` in the roster; `data`, a file of rows for each of its clients, with commas between; `home`, the
            folder of what they keep, by default one of its name.
        rehearsal: play with the study's own rows, as the simulation deals them.

    Raises:
        FedtideError: a key is unknown or missing, or the rows are not those of the study.
    """
    given = dict(config)
    for key, value in given.items():
        if key not in KEYS:
            raise unknown(CONFIG, key, KEYS)
        if not isinstance(value, str):
            raise refused(f"{CONFIG}: {key}", value, f'a text, as in: {key}="berlin"')
    if "name" not in given:
        raise FedtideError(f'{CONFIG}: name: found none, allowed: one of the roster, as in: name="berlin"')
    names = sorted(path.stem for path in (folder / TICKETS).iterdir())
    if (name := given["name"]) not in names:
        raise unknown(f"{CONFIG}: name", name, names)
    home = Path(given.get("home", name)).absolute()
    check_own(home)
    ticket = Ticket.read(folder / TICKETS / f"{name}.toml")
    check_versions(ticket)
    study = ticket.experiment
    rows: ClientRows
    if rehearsal:
        site = Site.read(folder)
        host = host_of(site.experiment, site.method, site.seed, MemoryStore(None))
        study, algorithm, rows = site.experiment, host.algorithm, host.population
    else:
        if "data" not in given:
            raise FedtideError(f"{CONFIG}: data: found none, allowed: a file of rows for each client of {name}")
        data = [Path(path) for path in given["data"].split(",")]
        with within(CONFIG):
            check_size(ticket)
            algorithm = algorithm_without_rows(study, ticket.rows)
            rows = FileRows.read(data, ticket.clients, ticket.rows, study.data.split, study.data.transforms)
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    return name, Node(
        algorithm,
        ticket.seed,
        rows,
        home / ("rehearsal" if rehearsal else "memory") / ticket.digest,
        run=ticket.digest,
        partial_work=study.timing.partial_work,
        threads=study.fleet.threads,
        clients=frozenset(ticket.clients),
    )
