"""A node's end of its stream: it calls the server, shows its key, hands questions on, and brings answers back.

A stream that is lost is made anew. A question that comes again while it is worked on is not worked on twice.
"""

import asyncio
import os
import random
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from fedtide.core.atomic import write_text
from fedtide.core.bounds import HEADER
from fedtide.core.errors import FedtideError
from fedtide.remote.grpc import stream_protocol as protocol
from fedtide.remote.grpc.stream_protocol import DISAGREEMENT, METHOD, MOST, SCHEME, Broken, Head, Message
from fedtide.wire.keys import sign, spell_public

WAIT = 366 * 86400.0
"""Maximum number of seconds that a question may take, which is that of durations in a study."""
SHORTEST, AWAY, LONGEST = 1.0, 2.0, 15.0
"""Seconds until a lost stream is tried anew: at first; at most, if nobody is there; and if a server refuses."""
INTRODUCTION = 30.0
"""Seconds in which a server has to let a node in, or say why not."""
SHORT = 10.0
"""Seconds in which a server has to note that a node cannot take part; a person waits for it."""
MINUTE = 60.0
"""Seconds after which a line is said once more."""
CONNECTED = "connected"
"""News that a node is connected."""
BEST = "best"
"""Name of the file in a folder of judged models with the rounds of the one that is best."""
LARGEST_ROUND = 2**31 - 1
QUESTIONS = 1000
"""Questions that may wait at a node."""
OPTIONS = [*protocol.BOTH, ("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]


@dataclass(frozen=True)
class Cause:
    """An error of gRPC or of the server, and its meaning.

    Args:
        pattern: of what is said.
        line: what it means, and what to do.
        kind: "wrong" ends a node that is just started: its ticket, or its address, will not do. "over" ends one that
            runs: nothing at the server will mend it. "away" if nobody is there, whom many attempts could bother.
    """

    pattern: str
    line: str
    kind: Literal["", "wrong", "over", "away"] = ""


NOT_IN, ASK = "the server does not let this node in", "ask its owner for a new ticket"
OTHER_NAME = r"its key is admitted there as that of '\1'; use the ticket of '\1'"
CLOCK = "the server's certificate is not valid now: set this machine's clock, or ask the server's owner for a new one"
NO_TLS = "it does not speak TLS: something else than 'fedtide serve' listens there; ask its owner for the address"
CAUSES = (
    Cause("its key is not admitted", f"{NOT_IN}: its key is not admitted there (its owner runs 'fedtide admit')"),
    Cause("a node with the same key", f"{NOT_IN}: a node with the same key is connected"),
    Cause(r"its key is that of ([\w.-]{1,100})", f"{NOT_IN}: {OTHER_NAME}", "over"),
    Cause("the key was not shown", f"{NOT_IN}: it did not prove its key; key and ticket are not those of one node"),
    Cause("was silent|not shown in time", f"{NOT_IN}, and does not say why"),
    Cause("message is larger than it may be", "the server takes no answer that is so large"),
    Cause(r"broken: (.*)", r"it does not speak as 'fedtide serve' does (\1)"),
    Cause("another study is served", f"the server plays another study than that of this ticket: {ASK}", "over"),
    Cause("it speaks version", "the server has another version of fedtide: install the same", "over"),
    Cause(
        "Domain name not found|[Mm]isformatted domain|Name or service not known|nodename nor servname",
        "this machine finds no such host; ask its owner for it",
        "wrong",
    ),
    Cause("errors resolving|DNS|lookup error", "this machine cannot look up where that is (is it connected?)"),
    Cause("CERTIFICATE_VERIFY_FAILED.*(expired|not yet valid)", CLOCK, "wrong"),
    Cause(
        "not valid for peer|[Hh]ostname|[Pp]eer name",
        f"the server's certificate is for another address than this one: {ASK}",
        "wrong",
    ),
    Cause(
        "CERTIFICATE_VERIFY_FAILED",
        f"the server's certificate is of another authority than the ticket's: {ASK}",
        "wrong",
    ),
    Cause("SSL_ERROR_SSL", NO_TLS, "wrong"),
    Cause("[Pp]roxy|CONNECT", "the proxy of your environment does not let this node through: see what it allows"),
    Cause(
        "read failed|Socket closed|reset by peer|GOAWAY|EOF|OK|error from Core",
        "the server closed the connection, or a proxy before it did",
        "away",
    ),
    Cause("", "it cannot be reached now (is it up, and is its address right?)", "away"),
)


def meaning(message: str) -> Cause:
    """Return the meaning of an error of gRPC or of the server.

    >>> meaning("its key is that of oslo").line
    "the server does not let this node in: its key is admitted there as that of 'oslo'; use the ticket of 'oslo'"
    """
    matches = ((re.search(cause.pattern, message), cause) for cause in CAUSES)
    cause = next(replace(cause, line=match.expand(cause.line)) for match, cause in matches if match)
    has_proxy = any(os.environ.get(name) for name in ("grpc_proxy", "https_proxy", "http_proxy"))
    by_proxy = cause.kind == "away" and has_proxy
    return replace(cause, line=f"{cause.line}; see whether the proxy of your environment is up") if by_proxy else cause


@dataclass(frozen=True)
class Caller:
    """The server that a node calls, and the node itself.

    Args:
        address: HOST:PORT.
        authority: the certificate of the site's authority, as PEM.
        run: digest of the study.
        name: of the node.
        key: its private key.
        warned: whether its owner was warned of its rows, which the server counts.
    """

    address: str
    authority: bytes
    run: str
    name: str
    key: Any
    warned: bool = False


class Closed(Exception):
    """The server ended the stream, or could not be reached; the text says why."""


def reason_of(error: Closed | Broken | TimeoutError) -> str:
    """Return why a stream with a server is over, as `meaning` reads it."""
    if isinstance(error, TimeoutError):
        return "was silent"
    return f"broken: {error}" if isinstance(error, Broken) else str(error)


Answer = Callable[[bytes, bytes, float], tuple[bytes, bytes]]
"""Answers a question: header, payload and seconds in, header and payload out."""


class Failed(Exception):
    """A question has no answer; the text goes to the server."""


@dataclass
class Line:
    """A node's stream to its server.

    Args:
        caller: the server that is called, and the node that calls.
        answer: answers one question; it is called in a thread. It raises `Failed` if there is no answer.
        say: is told in a line what a person should know.
        let_in: file that exists once the server has let the node in. From then on the node goes on trying, whatever is
            wrong there, also if it is started again. None is never.
        judged: folder of the models that the node was judged with; the server's last word says which was best. None
            keeps none.
    """

    caller: Caller
    answer: Answer
    say: Callable[[str], None]
    let_in: Path | None = None
    judged: Path | None = None
    _waiting: dict[str, tuple[Message, float]] = field(default_factory=dict)
    _out: asyncio.Queue[Message] | None = None
    _recent: dict[str, float] = field(default_factory=dict)
    _last: str = ""
    _said: str = ""
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Answer questions until the study is over.

        Raises:
            FedtideError: the server is not that of the ticket, or will never let this node in.
        """
        work = asyncio.create_task(self._work())
        pause = SHORTEST
        try:
            while True:
                began = time.monotonic()
                try:
                    if await self._talk():
                        return self.say("the study is over")
                    why = "Socket closed"
                except (Closed, Broken, TimeoutError) as error:
                    why = reason_of(error)
                cause = meaning(why)
                is_new = self.let_in is None or not self.let_in.exists()
                if cause.kind == "over" or (cause.kind == "wrong" and is_new):
                    raise FedtideError(f"server {self.caller.address}: {cause.line}")
                line = f"server {self.caller.address}: {cause.line}; this node tries again"
                self._tell(line, "away" if cause.kind == "away" else line)
                lasted = time.monotonic() - began > 2 * LONGEST
                pause = SHORTEST if lasted else min(1.5 * pause, AWAY if cause.kind == "away" else LONGEST)
                await asyncio.sleep(pause * random.uniform(0.7, 1.0))
        finally:
            work.cancel()

    def _tell(self, line: str, news: str) -> None:
        """Say a line whose news is neither that of the last line, nor of one that came within a minute.

        A node that has said that it is away also says that it is back.
        """
        now = time.monotonic()
        self._recent = {
            earlier: at for earlier, at in self._recent.items() if now - at < MINUTE or earlier == self._last
        }
        if news != self._last and (news not in self._recent or (news == CONNECTED != self._said)):
            self.say(line)
            self._said = news
        self._recent[news] = now
        self._last = news

    async def _talk(self) -> bool:
        """Keep one stream until it ends; tell whether the study is over."""
        grpc = protocol.library()
        async with channel_to(self.caller) as channel:
            call = channel.stream_stream(METHOD)()
            try:
                async with asyncio.timeout(INTRODUCTION):
                    await _introduce(self.caller, call, grpc.aio.EOF, protocol.INTRODUCTION, "welcome")
                self._tell(f"connected to the server at {self.caller.address}", CONNECTED)
                if self.let_in is not None:
                    with suppress(OSError):  # a folder that cannot be written to costs answers, not the node
                        self.let_in.touch()
                return await self._exchange(call, grpc.aio.EOF)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                raise Closed(await _why(call)) from None
            finally:
                call.cancel()

    async def _exchange(self, call: Any, end: Any) -> bool:
        """Take questions, and send answers, until the stream ends; tell whether the study is over."""
        out: asyncio.Queue[Message] = asyncio.Queue(1)
        self._out = out
        ways = [asyncio.create_task(way) for way in (self._read(call, end), _write(call, out))]
        try:
            done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            if any(way.result() for way in done):
                return True
            raise Closed(await _why(call))
        finally:
            if self._out is out:
                self._out = None
            while not out.empty():  # an answer that waits to be sent is asked for again
                out.get_nowait()
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _read(self, call: Any, end: Any) -> bool:
        """Take what the server says until it ends the stream; tell whether it says that the study is over."""
        while (message := await protocol.next_message(call.read, end, self._wanted)) is not None:
            if message.kind == "over":
                self._note_best(message.extra.get("best"))
                return True
            if message.kind == "drop":
                self._waiting.pop(message.id, None)
            elif message.kind == "question":
                seconds = message.extra.get("seconds")
                if not isinstance(seconds, int | float) or not 0 <= seconds <= WAIT:
                    raise Broken("a question does not say how long it may take")
                self._waiting[message.id] = message, time.monotonic() + seconds
                self._news.set()
        return False

    def _note_best(self, best: object) -> None:
        """Note the rounds of the best model, if the server says them and the node has such models."""
        if self.judged is not None and self.judged.is_dir() and type(best) is int and 0 <= best <= LARGEST_ROUND:
            try:
                write_text(self.judged / BEST, str(best))
            except OSError as error:
                self.say(f"{self.judged}: {error}")

    def _wanted(self, head: Head) -> bool:
        """Tell whether a message is kept: one that is waiting, or at work, is not taken twice."""
        size = sum(len(question.header) + len(question.payload) for question, _ in self._waiting.values())
        if head.header > HEADER or head.payload > MOST - size or len(self._waiting) > QUESTIONS:
            raise Broken("the server asks more at a time than a node takes")
        return head.kind != "question" or head.id not in self._waiting

    async def _work(self) -> None:
        """Have questions answered, one after the other, and send each answer on the stream that there is then."""
        while True:
            if not self._waiting:
                self._news.clear()
                await self._news.wait()
                continue
            name, (question, until) = next(iter(self._waiting.items()))
            left = until - time.monotonic()
            if left > 0:
                try:
                    header, payload = await asyncio.to_thread(self.answer, question.header, question.payload, left)
                    reply = Message("answer", name, {}, header, payload)
                except Failed as why:
                    reply = Message("answer", name, {"error": str(why)[:300]})
                except Exception as error:  # the next question is worked on all the same
                    reply = Message("answer", name, {"error": f"failed: {type(error).__name__}"})
                    self.say(f"a question failed: {type(error).__name__}: {error}")
                if name in self._waiting and self._out is not None:
                    await self._out.put(reply)  # who does not take answers gets no other ones
            self._waiting.pop(name, None)


async def tell_disagreement(caller: Caller) -> None:
    """Tell a server that the rows of a node do not agree with the study, and nothing else of them.

    Raises:
        FedtideError: the server was not told.
    """
    grpc = protocol.library()
    try:
        async with asyncio.timeout(SHORT), channel_to(caller) as channel:
            call = channel.stream_stream(METHOD)()
            try:
                await _introduce(caller, call, grpc.aio.EOF, DISAGREEMENT, "noted")
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                raise Closed(await _why(call)) from None
            finally:
                call.cancel()
    except (Closed, Broken, TimeoutError) as error:
        raise FedtideError(f"server {caller.address}: {meaning(reason_of(error)).line}") from None


async def _introduce(caller: Caller, call: Any, end: Any, kind: str, wanted: str) -> None:
    """Show the node's key, and wait for the server's word that it is wanted or noted."""
    head = Head.of(await _piece(call, end))
    asked = head.extra.get("nonce")
    if head.kind != "challenge" or not isinstance(asked, str) or not re.fullmatch("[0-9a-f]{64}", asked):
        raise Broken("the server does not ask who this is")
    nonce = protocol.make_nonce()
    claim = protocol.claim_bytes(caller.run, caller.authority, caller.name, asked, nonce)
    introduction = {
        "scheme": SCHEME, "run": caller.run, "name": caller.name, "nonce": nonce,
        "key": spell_public(caller.key.public_key()), "signature": sign(caller.key, claim),
    }  # fmt: skip
    if caller.warned:
        introduction["warned"] = True
    await call.write(next(Message(kind, extra=introduction).pieces()))
    if Head.of(await _piece(call, end)).kind != wanted:
        raise Broken("the server does not let this node in, and does not say why")


async def _piece(call: Any, end: Any) -> bytes:
    piece = await call.read()
    if piece is end:
        raise Closed(await _why(call))
    return piece


async def _write(call: Any, out: asyncio.Queue[Message]) -> bool:
    while True:
        for piece in (await out.get()).pieces():
            await call.write(piece)


async def _why(call: Any) -> str:
    """Return the reason of the server, or of gRPC, for the end of a stream."""
    return f"{await call.code()} {await call.details()}"


def channel_to(caller: Caller) -> Any:
    """Return a channel of gRPC, through the proxy that https_proxy names if there is one."""
    grpc = protocol.library()
    credentials = grpc.ssl_channel_credentials(caller.authority)
    return grpc.aio.secure_channel(f"dns:///{caller.address}", credentials, options=OPTIONS)
