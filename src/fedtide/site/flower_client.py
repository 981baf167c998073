"""The ClientApp: a node that Flower starts for each message, and the messages that travel with Flower."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedtide.core.errors import FedtideError, refused, unknown, within
from fedtide.remote.messages import from_json
from fedtide.remote.node import Node
from fedtide.site.client_rows import FileRows
from fedtide.site.deploying import TICKETS
from fedtide.site.machine import check_own
from fedtide.site.seat import Seat, check_versions
from fedtide.site.tickets import Ticket
from fedtide.site.work import node_of

WHO, ASK = "query.who", "train.ask"
"""Flower's types of our messages: the name of a node, and a question to its clients."""
CONFIG = "--node-config"
"""The option by which a SuperNode knows its node of the roster."""
KEYS = ("name", "data", "home")


def seal(payload: bytes) -> ArrayRecord:
    """Return bytes as a record, which is carried once even if several nodes receive it."""
    return ArrayRecord({"tree": Array("uint8", (len(payload),), "fedtide.tree", payload)})


def pack(header: Mapping[str, Any], tree: ArrayRecord) -> RecordDict:
    """Return the content of a message: a header of plain JSON and sealed bytes."""
    return RecordDict({"header": ConfigRecord({"json": json.dumps(dict(header))}), "tree": tree})


def unpack(content: RecordDict) -> tuple[dict[str, Any], bytes]:
    """Return header and payload of a message, which may be anybody's.

    Raises:
        FedtideError: the content is something else.
    """
    try:
        return from_json(str(content["header"]["json"])), bytes(content["tree"]["tree"].data)
    except (KeyError, TypeError, AttributeError) as error:
        raise FedtideError(f"sent something else than an answer ({type(error).__name__})") from None


def app_of(folder: Path) -> ClientApp:
    """Return the ClientApp of a study.

    Args:
        folder: the app's package, as Flower has unpacked it.
    """
    app = ClientApp()

    def seat(context: Context) -> tuple[str, Node]:
        return seat_of(folder, tuple(context.node_config.items()), bool(context.run_config.get("rehearsal")))

    def who(message: Message, context: Context) -> Message:
        try:
            header = {"name": seat(context)[0]}
        except FedtideError as mistake:
            header = {"error": str(mistake)}
        return Message(pack(header, seal(b"")), reply_to=message)

    def ask(message: Message, context: Context) -> Message:
        _, node = seat(context)
        header, payload = node.handle(*unpack(message.content))
        return Message(pack(header, seal(payload)), reply_to=message)

    app.query(WHO.partition(".")[2])(who)
    app.train(ASK.partition(".")[2])(ask)
    return app


@cache  # rows are read once if Flower keeps a process for several messages
def seat_of(folder: Path, config: tuple[tuple[str, Any], ...], rehearsal: bool) -> tuple[str, Node]:
    """Return the name and the node that a SuperNode's owner has chosen with `--node-config`.

    Args:
        folder: the app's package.
        config: `name` is that in the roster. `data` has a file of rows for each of its clients, with commas between.
            `home` is the folder of the clients' memory, by default one of its name.
        rehearsal: play with the study's own rows, as the simulation deals them.

    Raises:
        FedtideError: a key is unknown or missing, or the rows are not those of the study.
    """
    settings = dict(config)
    for key, value in settings.items():
        if key not in KEYS:
            raise unknown(CONFIG, key, KEYS)
        if not isinstance(value, str):
            raise refused(f"{CONFIG}: {key}", value, f'a text, as in: {key}="berlin"')
    if "name" not in settings:
        raise FedtideError(f'{CONFIG}: name: found none, allowed: one of the roster, as in: name="berlin"')
    names = sorted(path.stem for path in (folder / TICKETS).iterdir())
    if (name := settings["name"]) not in names:
        raise unknown(f"{CONFIG}: name", name, names)
    home = Path(settings.get("home", name)).absolute()
    check_own(home)
    ticket = Ticket.read(folder / TICKETS / f"{name}.toml")
    check_versions(ticket)
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    if rehearsal:
        return name, node_of({"site": str(folder), "home": str(home / "rehearsal"), "name": name})
    if "data" not in settings:
        raise FedtideError(f"{CONFIG}: data: found none, allowed: a file of rows for each client of {name}")
    data, study = tuple(Path(path) for path in settings["data"].split(",")), ticket.experiment
    with within(CONFIG):
        rows = FileRows.read(data, ticket.clients, ticket.rows, study.data.split, study.data.transforms)
        return name, Seat(ticket, home, data, rows).node()
