"""The two ends of a study that Flower carries: a node that it starts for each message, and the rounds of a server.

The ClientApp is a node, the ServerApp plays the rounds of `fedtide serve`.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedtide.core.atomic import making
from fedtide.core.errors import FedtideError, refused, unknown, within
from fedtide.remote.messages import OpenQuestion, Question, Response, from_json
from fedtide.remote.node import Node
from fedtide.remote.node_answers import one_line
from fedtide.runs import folder as runs
from fedtide.site.client_rows import FileRows
from fedtide.site.deploying import TICKETS
from fedtide.site.machine import Log, check_own
from fedtide.site.seat import Seat, check_versions, node_of
from fedtide.site.site import Site
from fedtide.site.tickets import Ticket

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


def client_app(folder: Path) -> ClientApp:
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
    check_own(home)  # another user may have made it meanwhile
    if rehearsal:
        return name, node_of({"site": str(folder), "home": str(home / "rehearsal"), "name": name})
    if "data" not in settings:
        raise FedtideError(f"{CONFIG}: data: found none, allowed: a file of rows for each client of {name}")
    data, study = tuple(Path(path) for path in settings["data"].split(",")), ticket.experiment
    with within(CONFIG):
        rows = FileRows.read(data, ticket.clients, ticket.rows, study.data.split, study.data.transforms)
        return name, Seat(ticket, home, data, rows).node()


# -- the server --------------------------------------------------------------------------------------------------------

LOOK = 1.0
"""Seconds between two looks at the SuperNodes that are there."""
PULL = 0.2
"""Seconds between two looks at replies."""
AGAIN = 5.0
"""Seconds until a question that failed is sent once more."""
ATTEMPTS = 3
"""Maximum number of times that a question is sent."""
WAIT = 300.0
"""Seconds within which a SuperNode has to say its name."""


@dataclass
class Open(OpenQuestion):
    """A question without an answer.

    Args:
        message: Flower's name of the message on its way; "" if there is none.
        sent: number of times that it was sent.
        again: time from which it may be sent again.
    """

    message: str = ""
    sent: int = 0
    again: float = 0.0

    def is_due(self, now: float) -> bool:
        """Tell whether it is to be sent."""
        return not self.message and self.again <= now and self.left > 0


class GridCarrier:
    """A way to nodes over a Flower `Grid`.

    A SuperNode says which node of the roster it is. Of two with one name the first counts, as long as it is there. A
    question is sent when its node is there, and up to three times if Flower says that it failed.

    Args:
        grid: Flower's way to the SuperNodes.
        say: takes a line for people.
    """

    def __init__(self, grid: Grid, say: Callable[[str], None]) -> None:
        self._grid, self._say = grid, say
        self._nodes: dict[str, int] = {}
        self._met: dict[int, float] = {}
        self._who: dict[str, int] = {}
        self._open: dict[str, Open] = {}
        self._responses: list[Response] = []
        self._looked = self._pulled = float("-inf")

    def present(self) -> frozenset[str]:
        """Return the names of the nodes that can be asked now."""
        self._turn()
        return frozenset(self._nodes)

    def removed(self) -> frozenset[str]:
        """Return no name: Flower decides who may take part."""
        return frozenset()

    def push(self, questions: Sequence[Question]) -> None:
        """Send questions on their way."""
        self._open |= {question.id: Open(question) for question in questions}
        self._send(time.monotonic())

    def drop(self, questions: Sequence[str]) -> None:
        """Stop waiting for answers to some questions, which Flower has handed out."""
        for name in questions:
            self._open.pop(name, None)

    def pull(self) -> list[Response]:
        """Return the responses since the last pull."""
        self._turn()
        responses, self._responses = self._responses, []
        return responses

    def _turn(self) -> None:
        """Do the work that is due."""
        now = time.monotonic()
        if now - self._pulled < PULL:
            return
        self._pulled = now
        self._look(now)
        self._send(now)
        sent = {waiting.message: waiting for waiting in self._open.values() if waiting.message}
        for reply in self._grid.pull_messages([*self._who, *sent]) if self._who or sent else ():
            message = reply.metadata.reply_to_message_id
            if message in self._who:
                self._introduce(self._who.pop(message), reply)
            elif message in sent:
                self._read(sent[message], reply, now)
        for waiting in list(self._open.values()):
            if waiting.left <= 0:
                self._end(waiting, error=f"no answer within {waiting.question.expires:g} s")

    def _look(self, now: float) -> None:
        """Ask new SuperNodes for their names, and forget those that are gone."""
        if now - self._looked < LOOK:
            return
        self._looked = now
        present = set(self._grid.get_node_ids())
        self._nodes = {name: node for name, node in self._nodes.items() if node in present}
        self._met = {node: until for node, until in self._met.items() if node in present and now < until}
        new = sorted(present - self._met.keys())
        messages = [Message(pack({}, seal(b"")), node, WHO, ttl=WAIT) for node in new]
        for node, message in zip(new, self._grid.push_messages(messages) if new else (), strict=False):
            if message:
                self._who[message], self._met[node] = node, now + WAIT

    def _introduce(self, node: int, reply: Message) -> None:
        """Note the name of a SuperNode in the roster."""
        header: dict[str, Any]
        try:
            header = _content(reply)[0]
        except FedtideError as error:
            header = {"error": str(error)}
        mistake, name = header.get("error"), header.get("name")
        if isinstance(name, str):
            if self._nodes.setdefault(name, node) == node:
                self._met[node] = float("inf")
                return self._say(f"{one_line(name)} is connected")
            mistake = f"says that it is {name}, as SuperNode {self._nodes[name]} does"
        self._say(f"SuperNode {node} cannot take part: {one_line(str(mistake))}")

    def _send(self, now: float) -> None:
        """Send the questions that are not on their way to nodes that are there."""
        due = [
            waiting for waiting in self._open.values() if waiting.question.node in self._nodes and waiting.is_due(now)
        ]
        if not due:
            return
        trees = {id(waiting.question.payload): seal(waiting.question.payload) for waiting in due}
        messages = []
        for waiting in due:
            question = waiting.question
            content = pack(question.header, trees[id(question.payload)])
            messages.append(Message(content, self._nodes[question.node], ASK, ttl=waiting.left))
        for waiting, message in zip(due, self._grid.push_messages(messages), strict=False):
            waiting.message, waiting.again = message or "", now + AGAIN

    def _read(self, waiting: Open, reply: Message, now: float) -> None:
        """Take an answer; if Flower says that there is none, have the question sent once more."""
        waiting.sent += 1
        try:
            header, payload = _content(reply)
        except FedtideError as error:
            if waiting.sent == ATTEMPTS:
                self._end(waiting, error=str(error))
            waiting.message, waiting.again = "", now + AGAIN
            return
        if len(payload) > (largest := waiting.question.largest):
            self._end(waiting, error=f"sent more than the {largest} bytes that an answer may have")
        else:
            self._end(waiting, header, payload)

    def _end(self, waiting: Open, header: Any = None, payload: bytes = b"", error: str = "") -> None:
        del self._open[waiting.question.id]
        self._responses.append(waiting.respond(header, payload, error))


def _content(reply: Message) -> tuple[dict[str, Any], bytes]:
    """Return header and payload of a reply; raise with Flower's words if it is an error."""
    if reply.has_error():
        raise FedtideError(f"Flower's error {reply.error.code}: {one_line(str(reply.error.reason))}")
    return unpack(reply.content)


def server_app(folder: Path) -> ServerApp:
    """Return the ServerApp of a study.

    Args:
        folder: the app's package, as Flower has unpacked it.
    """
    app = ServerApp()

    def main(grid: Grid, context: Context) -> None:
        config = context.run_config
        play(folder, grid, Path(str(config["site"])), rehearsal=bool(config["rehearsal"]), log=Log())

    app.main()(main)
    return app


def play(folder: Path, grid: Grid, root: Path, *, rehearsal: bool, log: Log) -> None:
    """Play the rounds of a study that are left, saving after each.

    Args:
        folder: the app's package.
        grid: Flower's way to the SuperNodes.
        root: folder of the site, made if it is missing; that of a rehearsal is `root`-rehearsal.
        rehearsal: nodes have the rows of the study, and its simulation draws the participants.

    Raises:
        FedtideError: the folder is that of another study, or the study cannot be played.
    """
    from fedtide.report.page import write_report  # nodes, which start for each message, do without them
    from fedtide.site.serve import RosterFile, judge_of, play_rounds

    root = root.absolute().with_name(f"{root.name}-rehearsal" if rehearsal else root.name)
    app = Site.read(folder)
    if not root.exists():
        with making(root, 0o700) as temporary:
            replace(app, root=temporary).write()
    site = Site.read(root)
    if site.digest != app.digest:
        allowed = "another folder, flwr run APP --run-config 'site=\"FOLDER\"'"
        raise FedtideError(f"{root}: belongs to study {site.digest}, not {app.digest}; allowed: {allowed}")
    if not site.run.exists():
        runs.create(site.experiment, site.run)
    carrier = GridCarrier(grid, lambda line: log.say("node", line))
    fleet, judge = judge_of(site, carrier, rehearsal, log)
    log.say("served", f"{site.method.name}, {site.experiment.rounds} rounds; the site is {root}")
    for _ in play_rounds(site, fleet, judge, log, RosterFile(root, site.roster, log)):
        continue
    log.say("over", f"report: {write_report([site.run])}")
