"""The ServerApp: the rounds of `fedtide serve`, whose questions Flower carries."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from fedtide.core.atomic import making
from fedtide.core.errors import FedtideError
from fedtide.remote.answers import one_line
from fedtide.remote.messages import Question, Response
from fedtide.report.page import write_report
from fedtide.runs import folder as runs
from fedtide.site.flower import FILES
from fedtide.site.flower_records import ASK, WHO, packed, sealed, unpacked
from fedtide.site.log import Log
from fedtide.site.serve import Latest, judge_of, play_rounds
from fedtide.site.site import Site

LOOK = 1.0
"""Seconds between two looks at which SuperNodes are there."""
PULL = 0.2
"""Seconds between two looks at what came."""
AGAIN = 5.0
"""Seconds until a question that failed is sent once more."""
ATTEMPTS = 3
"""How often a question is sent at most."""
WAIT = 300.0
"""Seconds within which a SuperNode has to say who it is."""


@dataclass
class Open:
    """A question without an answer.

    Args:
        question: what is asked.
        asked: when.
        message: Flower's name of the message that is on its way; "" where none is.
        sent: how often it was sent.
        again: when it may be sent again.
    """

    question: Question
    asked: float
    message: str = ""
    sent: int = 0
    again: float = 0.0

    def left(self, now: float) -> float:
        """Return the seconds within which an answer counts."""
        return self.asked + self.question.expires - now


class GridCarrier:
    """A way to nodes over a Flower `Grid`.

    A SuperNode says itself which node of the roster it is; of two with one name the first one is, as long as it is
    there. A question is sent when its node is there, and up to three times where Flower says that it failed.

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
        self._came: list[Response] = []
        self._looked = self._pulled = float("-inf")

    def present(self) -> frozenset[str]:
        """Return the names of the nodes that can be asked now."""
        self._turn()
        return frozenset(self._nodes)

    def removed(self) -> frozenset[str]:
        """Return no name: who may take part is Flower's business."""
        return frozenset()

    def push(self, questions: Sequence[Question]) -> None:
        """Send questions on their way."""
        now = time.monotonic()
        self._open |= {question.id: Open(question, now) for question in questions}
        self._send(now)

    def drop(self, questions: Sequence[str]) -> None:
        """Wait for answers to some questions no longer; Flower has handed them out."""
        for name in questions:
            self._open.pop(name, None)

    def pull(self) -> list[Response]:
        """Return what came since the last pull."""
        self._turn()
        came, self._came = self._came, []
        return came

    def _turn(self) -> None:
        """Do what is due."""
        now = time.monotonic()
        if now - self._pulled < PULL:
            return
        self._pulled = now
        self._look(now)
        self._send(now)
        at = {each.message: each for each in self._open.values() if each.message}
        for reply in self._grid.pull_messages([*self._who, *at]) if self._who or at else ():
            message = reply.metadata.reply_to_message_id
            if message in self._who:
                self._introduce(self._who.pop(message), reply)
            elif message in at:
                self._read(at[message], reply, now)
        for each in list(self._open.values()):
            if each.left(now) <= 0:
                self._end(each, now, f"no answer within {each.question.expires:g} s")

    def _look(self, now: float) -> None:
        """Ask SuperNodes that are new who they are, and forget those that are gone."""
        if now - self._looked < LOOK:
            return
        self._looked = now
        there = set(self._grid.get_node_ids())
        self._nodes = {name: node for name, node in self._nodes.items() if node in there}
        self._met = {node: until for node, until in self._met.items() if node in there and now < until}
        new = sorted(there - self._met.keys())
        messages = [Message(packed({}, sealed(b"")), node, WHO, ttl=WAIT) for node in new]
        for node, message in zip(new, self._grid.push_messages(messages) if new else (), strict=False):
            if message:
                self._who[message], self._met[node] = node, now + WAIT

    def _introduce(self, node: int, reply: Message) -> None:
        """Note which node of the roster a SuperNode says that it is."""
        try:
            told = _told(reply)[0]
        except FedtideError as error:
            told = {"error": str(error)}
        wrong, name = told.get("error"), told.get("name")
        if isinstance(name, str):
            if self._nodes.setdefault(name, node) == node:
                self._met[node] = float("inf")
                return self._say(f"{one_line(name)} is connected")
            wrong = f"says that it is {name}, as SuperNode {self._nodes[name]} does"
        self._say(f"SuperNode {node} cannot take part: {one_line(str(wrong))}")

    def _send(self, now: float) -> None:
        """Send what is not on its way, to those who are there."""
        due = [
            each
            for each in self._open.values()
            if not each.message and each.question.node in self._nodes and each.again <= now < now + each.left(now)
        ]
        if not due:
            return
        trees = {id(each.question.payload): each.question.payload for each in due}
        records = {key: sealed(payload) for key, payload in trees.items()}
        messages = [
            Message(
                packed(each.question.header, records[id(each.question.payload)]),
                self._nodes[each.question.node],
                ASK,
                ttl=each.left(now),
            )
            for each in due
        ]
        for each, message in zip(due, self._grid.push_messages(messages), strict=False):
            each.message, each.again = message or "", now + AGAIN

    def _read(self, each: Open, reply: Message, now: float) -> None:
        """Take an answer; where Flower says that there is none, have the question sent once more."""
        each.sent += 1
        try:
            header, payload = _told(reply)
        except FedtideError as error:
            if each.sent == ATTEMPTS:
                return self._end(each, now, str(error))
            each.message, each.again = "", now + AGAIN
            return None
        if len(payload) > each.question.largest:
            return self._end(each, now, f"sent more than the {each.question.largest} bytes that an answer may have")
        return self._end(each, now, "", header, payload)

    def _end(
        self, each: Open, now: float, error: str, header: dict[str, object] | None = None, payload: bytes = b""
    ) -> None:
        asked = each.question
        del self._open[asked.id]
        self._came.append(Response(asked.id, asked.node, header or {}, payload, now - each.asked, error))


def _told(reply: Message) -> tuple[dict[str, object], bytes]:
    """Return what a reply says; raise with Flower's words where it is an error."""
    if reply.has_error():
        raise FedtideError(f"Flower's error {reply.error.code}: {one_line(str(reply.error.reason))}")
    return unpacked(reply.content)


def app_of(folder: Path) -> ServerApp:
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
        root: folder of the site, which is made where there is none; that of a rehearsal is `root`-rehearsal.
        rehearsal: nodes have the rows of the study, and those take part that its simulation draws.
        log: takes what happens.

    Raises:
        FedtideError: the folder is that of another study, or the study cannot be played.
    """
    root = root.absolute().with_name(f"{root.name}-rehearsal" if rehearsal else root.name)
    if not root.exists():
        with making(root, 0o700) as made:
            for name in FILES:
                shutil.copyfile(folder / name, made / name)
    site, said = Site.read(root), Site.read(folder)
    if site.digest != said.digest:
        raise FedtideError(
            f"{root}: belongs to another study (digest {site.digest}, and the app has {said.digest}); allowed: another "
            "folder, flwr run APP --run-config 'site=\"FOLDER\"'"
        )
    if not site.run.exists():
        runs.create(site.experiment, site.run)
    carrier = GridCarrier(grid, lambda line: log.say("node", line))
    fleet, judge = judge_of(site, carrier, rehearsal, log)
    log.say("served", f"{site.method.name}, {site.experiment.rounds} rounds; the site is {root}")
    for progress in play_rounds(site, fleet, judge, log, Latest(root, site.roster, log)):
        shown = "" if progress.accuracy is None else f": accuracy {progress.accuracy:.4f}"
        log.say("round", f"round {progress.round} of {progress.rounds}{shown}", **vars(progress))
    log.say("over", f"report: {write_report([site.run])}")
