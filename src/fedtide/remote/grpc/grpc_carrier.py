"""The carrier over gRPC, at the server: nodes come in through the door, show their key, and are asked."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fedtide.core.bounds import HEADER
from fedtide.core.errors import FedtideError
from fedtide.remote.grpc import stream_protocol as protocol
from fedtide.remote.grpc.door import Door, check_files
from fedtide.remote.grpc.stream_protocol import DISAGREEMENT, METHOD, MOST, SCHEME, Broken, Head, Message
from fedtide.remote.messages import OpenQuestion, Question, Response, from_json
from fedtide.remote.node_answers import one_line
from fedtide.wire.keys import verify_signature

INTRODUCTION = 10.0
"""Seconds in which a node has to show its key."""
GRACE, LOOK = 2.0, 0.05
"""Seconds that streams have to end in when the server does, and between two looks at them."""
OPTIONS = [
    *protocol.BOTH,
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", 2),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 2),
]


@dataclass
class Open(OpenQuestion):
    """A question without an answer.

    Attributes:
        header: of it, as JSON.
        sent: whether it has gone out.
        answered: whether the answer has come, and waits to be pulled.
    """

    header: bytes
    sent: bool = False
    answered: bool = False

    @property
    def message(self) -> Message:
        """The question as it is sent now."""
        question, seconds = self.question, {"seconds": max(self.left, 0.0)}
        return Message("question", question.id, seconds, self.header, question.payload)


@dataclass(eq=False)
class Stream:
    """The stream to a node that is connected.

    Attributes:
        name: of the node.
        key: its public key.
        out: what is to be sent: messages, names of questions; None ends the stream.
        ended: whether nothing counts any more that comes over it.
    """

    name: str
    key: str
    out: asyncio.Queue[Message | str | None] = field(default_factory=asyncio.Queue)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class GrpcCarrier:
    """A way to nodes over gRPC. It runs in a thread of its own, from when it is made until it is closed.

    A question is sent when its node is there, and again when the node comes back without having answered it. If no
    answer comes within its seconds, the response says so.

    Args:
        host: the interface where it listens.
        port: its port; 0 takes one that is free.
        run: digest of the study.
        authority: the folder with ca.crt, server.crt and server.key; a new certificate holds from the next connection.
        nodes: for how many nodes there have to be open files.

    Raises:
        FedtideError: the port cannot be opened, or the system allows too few open files.
    """

    def __init__(self, host: str, port: int, *, run: str, authority: Path, nodes: int) -> None:
        check_files(nodes)
        self._grpc = protocol.library()
        self._run, self._folder = run, authority
        self._authority = (authority / "ca.crt").read_bytes()
        self._lock = threading.Lock()
        self._names: dict[str, str] = {}
        self._expected: frozenset[str] = frozenset()
        self._removed: set[str] = set()
        self._open: dict[str, Open] = {}
        self._arrived: list[tuple[str, Message]] = []
        self._streams: dict[str, Stream] = {}
        self._over: float | None = None
        self._best: int | None = None
        self._informed: set[str] = set()
        self._ended = threading.Event()
        self._knocked: dict[str, str] = {}
        self._disagreeing: set[str] = set()
        self._warned: set[str] = set()
        self._loop = asyncio.new_event_loop()
        started: Future[int] = Future()
        self._thread = threading.Thread(target=self._run_loop, args=(host, port, started), daemon=True)
        self._thread.start()
        self.port = started.result()

    # -- what a fleet calls, from its own thread ----------------------------------------------------------------------

    def admit(self, keys: Mapping[str, str], expected: frozenset[str] = frozenset()) -> None:
        """Know these nodes from now on, by their public keys, "KIND BASE64", and no others.

        Questions at a node whose key is not among them any more are over.

        Args:
            keys: by name.
            expected: names of nodes that may come and be let in later; it is noted when one of them comes (`knocked`).
        """
        names = {key: name for name, key in keys.items()}
        with self._lock:
            gone = {name for key, name in self._names.items() if names.get(key) != name}
            self._names, self._expected = names, expected
            self._removed |= gone
            for waiting in self._open.values():
                if waiting.question.node in gone:
                    self._arrive(waiting, "its key was removed")
            self._knocked = {name: key for name, key in self._knocked.items() if keys.get(name) != key}
            self._disagreeing &= expected | keys.keys()
            self._warned &= expected | keys.keys()
        for name in gone:
            self._say(name, None)

    def present(self) -> frozenset[str]:
        """Return the names of the nodes that can be asked now."""
        with self._lock:
            return frozenset(name for name, stream in self._streams.items() if self._names.get(stream.key) == name)

    def knocked(self) -> dict[str, str]:
        """Return the keys, by name, with which expected nodes came that are not let in."""
        with self._lock:
            return dict(self._knocked)

    def rows_apart(self) -> tuple[int, int]:
        """Return the number of nodes whose rows do not agree with the study, and of those whose owners were warned.

        It is what nodes said when they came last. A name without an admitted key is anyone's who has its ticket.
        """
        with self._lock:
            return len(self._disagreeing), len(self._warned)

    def removed(self) -> frozenset[str]:
        """Return the names of nodes whose keys were removed since the last call."""
        with self._lock:
            names, self._removed = frozenset(self._removed), set()
            return names

    def push(self, questions: Sequence[Question]) -> None:
        """Send questions on their way."""
        for question in questions:
            waiting = Open(question, json.dumps(question.header).encode())
            with self._lock:
                self._open[question.id] = waiting
                if len(waiting.header) > HEADER:
                    self._arrive(waiting, "was not asked: it stands for too many clients")
                    continue
            self._say(question.node, question.id)

    def drop(self, questions: Sequence[str]) -> None:
        """Wait for answers to some questions no longer."""
        for name in questions:
            with self._lock:
                waiting = self._open.pop(name, None)
            if waiting is not None:
                self._say(waiting.question.node, Message("drop", name))

    def pull(self) -> list[Response]:
        """Return the responses since the last pull."""
        with self._lock:
            arrivals, self._arrived = self._arrived, []
        done = [response for arrival in arrivals if (response := self._response(*arrival)) is not None]
        for waiting in [question for question in list(self._open.values()) if question.left <= 0]:
            allowed = f"within its {waiting.question.expires:g} s"
            never = f"cannot be reached: was not connected {allowed}"
            done.append(self._close(waiting, error=f"late: no answer {allowed}" if waiting.sent else never))
            self._say(waiting.question.node, Message("drop", waiting.question.id))
        return done

    def finish(self, seconds: float = 0.0, best: int | None = None) -> None:
        """Tell nodes that the study is over, those that are away if they come within so many seconds, and hang up.

        Args:
            seconds: for nodes that are away.
            best: rounds of the model that was best, which nodes have kept; None if no one is.
        """
        self._best = best
        self._over = time.monotonic() + seconds
        self.close(seconds)

    def close(self, seconds: float = 0.0) -> None:
        """Hang up."""
        if not self._ended.is_set():  # a thread whose join was interrupted is taken for one that has ended
            self._loop.call_soon_threadsafe(self._closing.set)
            self._ended.wait(seconds + 10 * GRACE)

    def _response(self, node: str, message: Message) -> Response | None:
        """Return the response to a question; None if it was answered before, or is another node's."""
        waiting = self._open.get(message.id)
        if waiting is None or waiting.question.node != node:
            return None
        if (error := message.extra.get("error")) is not None:
            return self._close(waiting, error=one_line(error) or "failed")
        try:
            return self._close(waiting, from_json(message.header), message.payload)
        except FedtideError as reason:
            return self._close(waiting, error=f"sent what cannot be read ({reason})")

    def _arrive(self, waiting: Open, error: str) -> None:
        """Note, with the lock, why a question has no answer."""
        waiting.answered = True
        self._arrived.append((waiting.question.node, Message("answer", waiting.question.id, {"error": error})))

    def _close(self, waiting: Open, header: Any = None, payload: bytes = b"", error: str = "") -> Response:
        with self._lock:
            del self._open[waiting.question.id]
        return waiting.respond(header, payload, error)

    def _say(self, node: str, what: Message | str | None) -> None:
        """Have something said to a node that is there: a message, the question of a name; None ends its stream."""

        def deliver() -> None:
            if (stream := self._streams.get(node)) is not None:
                stream.ended.set() if what is None else stream.out.put_nowait(what)

        if not self._ended.is_set():
            self._loop.call_soon_threadsafe(deliver)

    # -- what happens in the carrier's thread -------------------------------------------------------------------------

    def _run_loop(self, host: str, port: int, started: Future[int]) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # it ends what is left of streams, too
            runner.run(self._serve(host, port, started))

    async def _serve(self, host: str, port: int, started: Future[int]) -> None:
        try:
            server = await self._opened(host, port)
        except BaseException as error:
            self._ended.set()
            started.set_exception(error)
            return
        try:
            started.set_result(self._door.port)
            await self._closing.wait()
            await self._say_farewell()
            await server.stop(GRACE)
            await self._door.close()
        finally:
            self._ended.set()

    async def _opened(self, host: str, port: int) -> Any:
        """Return the server of gRPC, and let in who comes."""
        self._closing, grpc = asyncio.Event(), self._grpc
        server = grpc.aio.server(options=OPTIONS)
        try:
            talk = grpc.stream_stream_rpc_method_handler(self._talk)
            service, method = METHOD[1:].split("/")
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: talk}),))
            certificate = _certificate_reader(grpc, self._folder)
            if (first := certificate()) is None:
                raise FedtideError(f"{self._folder}: server.key and server.crt have to be there")
            credentials = grpc.dynamic_ssl_server_credentials(first, certificate)
            self._door = Door(server.add_secure_port("127.0.0.1:0", credentials))
            await server.start()
            await self._door.open(host, port)
        except BaseException:
            await server.stop(None)
            raise
        return server

    async def _say_farewell(self) -> None:
        """End all streams; if the study is over wait a while for nodes that have not heard so."""
        for stream in self._streams.values():
            self._part(stream)
        while self._over is not None and time.monotonic() < self._over and set(self._names.values()) - self._informed:
            await asyncio.sleep(LOOK)
        for _ in range(int(GRACE / LOOK)):
            if self._streams:
                await asyncio.sleep(LOOK)

    def _part(self, stream: Stream) -> None:
        """End a stream, as the server does."""
        if self._over is not None:
            stream.out.put_nowait(Message("over", extra={} if self._best is None else {"best": self._best}))
        stream.out.put_nowait(None)

    async def _talk(self, unused: Any, context: Any) -> None:
        """Serve one stream: find out whose it is, and ask. It takes the place of an earlier one of the same node."""
        del unused
        here, _, port = context.peer().rpartition(":")
        guest = self._door.guest(int(port)) if here == "ipv4:127.0.0.1" else None
        status = self._grpc.StatusCode
        if guest is None:
            return await context.abort(status.PERMISSION_DENIED, "nodes come in at the server's address")
        try:
            async with asyncio.timeout(INTRODUCTION):
                name, key = await self._introduced(context)
            stream = Stream(name, key)
            with self._lock:
                if self._names.get(key) != name:  # removed meanwhile
                    raise _Refused("its key is not admitted")
                before, self._streams[name] = self._streams.get(name), stream
                self._knocked.pop(name, None)  # it may have come with another key before
                waiting = [
                    question
                    for question in self._open.values()
                    if question.question.node == name and not question.answered
                ]
        except (Broken, TimeoutError):
            return await context.abort(status.INVALID_ARGUMENT, "its key was not shown in time")
        except _Noted:
            return await context.write(next(Message("noted").pieces()))
        except _Refused as why:
            return await context.abort(status.UNAUTHENTICATED, str(why))
        if before is not None:
            before.ended.set()
        self._door.know(guest)
        stream.out.put_nowait(Message("welcome"))
        for question in waiting:
            stream.out.put_nowait(question.question.id)
        if self._closing.is_set():
            self._part(stream)
        ways = [
            asyncio.create_task(way)
            for way in (self._write(context, stream), self._read(context, stream), stream.ended.wait())
        ]
        try:
            done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            broken = [error for way in done if isinstance(error := way.exception(), Broken)]
        finally:
            with self._lock:
                if self._streams.get(name) is stream:
                    del self._streams[name]
            for way in ways:
                way.cancel()
            self._door.doubt(guest)
        if stream.ended.is_set():
            twin = self._names.get(key) == name
            reason = "a node with the same key is connected" if twin else "its key is not admitted"
            await context.abort(status.UNAUTHENTICATED, reason)
        if broken:
            await context.abort(status.INVALID_ARGUMENT, str(broken[0]))

    async def _introduced(self, context: Any) -> tuple[str, str]:
        """Have a node show its key; return the name with which that is admitted, and the key.

        Raises:
            Broken: it says something else.
            _Noted: it came to say that its rows do not agree with the study.
            _Refused: it is not let in; the text says why.
        """
        asked = protocol.make_nonce()
        await context.write(next(Message("challenge", extra={"nonce": asked, "scheme": SCHEME}).pieces()))
        piece = await context.read()
        if piece is self._grpc.aio.EOF:
            raise Broken
        head = Head.of(piece)
        if head.kind not in (protocol.INTRODUCTION, DISAGREEMENT) or head.header or head.payload:
            raise Broken
        if (scheme := head.extra.get("scheme")) != SCHEME:
            other = scheme if type(scheme) is int and 0 <= scheme < 10**6 else "?"
            raise _Refused(f"it speaks version {other} of the protocol, and this server version {SCHEME}")
        values = [head.extra.get(value) for value in ("name", "key", "nonce", "signature", "run")]
        name, key, own_nonce, signature, run = (value if isinstance(value, str) else "" for value in values)
        if run != self._run:
            raise _Refused(f"another study is served here ({self._run}); ask the site's owner for a new ticket")
        if not verify_signature(key, signature, protocol.claim_bytes(run, self._authority, name, asked, own_nonce)):
            raise _Refused("the key was not shown")
        with self._lock:
            admitted = self._names.get(key)
            may_come = admitted is None and name in self._expected
            if admitted == name or (may_come and name not in self._names.values()):
                self._disagreeing.discard(name)
                self._warned.discard(name)
                if head.kind == DISAGREEMENT:
                    self._disagreeing.add(name)
                    raise _Noted
                if head.extra.get("warned") is True:
                    self._warned.add(name)
            if may_come:
                self._knocked[name] = key
        if admitted is None:
            raise _Refused("its key is not admitted")
        if admitted != name:
            raise _Refused(f"its key is that of {admitted}")
        return admitted, key

    async def _write(self, context: Any, stream: Stream) -> None:
        """Send what is to be said, until the stream is to end."""
        while (item := await stream.out.get()) is not None:
            message, seconds = item, INTRODUCTION
            if isinstance(item, str):
                with self._lock:
                    waiting = self._open.get(item)
                if waiting is None:  # it is over, and nothing of it is kept
                    continue
                message, waiting.sent, seconds = waiting.message, True, max(waiting.left, 0.0) + GRACE
            assert isinstance(message, Message)
            try:
                async with asyncio.timeout(seconds):
                    for piece in message.pieces():
                        await context.write(piece)
            except TimeoutError:
                raise Broken("a node does not take what it is sent") from None
            if message.kind == "over":
                self._informed.add(stream.name)

    async def _read(self, context: Any, stream: Stream) -> None:
        """Take answers, until the stream ends."""
        end, wanted = self._grpc.aio.EOF, partial(self._wanted, stream)
        while (message := await protocol.next_message(context.read, end, wanted)) is not None:
            if message.kind == "answer":
                with self._lock:
                    if not self._counts(stream):
                        continue
                    if (waiting := self._open.get(message.id)) is not None:
                        waiting.answered = True
                    self._arrived.append((stream.name, message))

    def _counts(self, stream: Stream) -> bool:
        """Tell whether what comes over a stream counts: it is the last one of its node, whose key is admitted."""
        return self._streams.get(stream.name) is stream and self._names.get(stream.key) == stream.name

    def _wanted(self, stream: Stream, head: Head) -> bool:
        """Tell whether a message is kept; an answer to nothing, or another one, is read and thrown away.

        Raises:
            Broken: it is larger than it may be.
        """
        answer = head.kind == "answer"
        with self._lock:
            waiting = self._open.get(head.id) if answer else None
            mine = waiting is not None and waiting.question.node == stream.name and not waiting.answered
            mine = mine and self._counts(stream)
            most = waiting.question.largest if mine and waiting is not None else MOST if answer else 0
            too_large = head.header > (HEADER if answer else 0) or head.payload > most
            if mine and waiting is not None and too_large:
                self._arrive(waiting, f"sent more than the {most} bytes that an answer may have")
        if too_large:
            raise Broken("a message is larger than it may be")
        return not answer or mine


class _Noted(Exception):
    """A node came only to say that its rows do not agree with the study."""


class _Refused(Exception):
    """A node is not let in; the text says why."""


def _certificate_reader(grpc: Any, folder: Path) -> Callable[[], Any]:
    """Return a function that gives gRPC the server's certificate if it was made anew, and None if it is as before.

    One that was given is gRPC's own, which frees it: given twice it would be freed twice.
    """
    last: list[tuple[bytes, ...]] = []

    def read() -> Any:
        try:
            files = tuple((folder / name).read_bytes() for name in ("server.key", "server.crt"))
        except OSError:  # it is just made
            return None
        if last == [files]:
            return None
        last[:] = [files]
        return grpc.ssl_server_certificate_configuration([files])

    return read
