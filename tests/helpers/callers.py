"""Who calls a server: nodes in this process, and callers that keep to nothing, with gRPC and with sockets."""

import asyncio
import json
import logging
import os
import socket
import ssl
import struct
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

from fedtide.core.errors import FedtideError
from fedtide.remote.grpc.grpc_carrier import GrpcCarrier
from fedtide.remote.grpc.line import Caller, Line, channel_to
from fedtide.remote.grpc.stream_protocol import METHOD, SCHEME, Message, claim_bytes, library, make_nonce, next_message
from fedtide.wire.keys import sign, spell_public
from helpers.federation import Federation, until
from helpers.processes import used

T = TypeVar("T")


def echo(header: bytes, payload: bytes, seconds: float) -> tuple[bytes, bytes]:
    """Answer with the question."""
    return header, payload


class Loop:
    """The loop of all callers of this process, which stays: gRPC bears no loops that come and go."""

    _there: asyncio.AbstractEventLoop | None = None

    @classmethod
    def there(cls) -> asyncio.AbstractEventLoop:
        """The loop, which runs in a thread of its own."""
        if cls._there is None:
            cls._there = asyncio.new_event_loop()
            threading.Thread(target=cls._there.run_forever, daemon=True).start()
        return cls._there


def run(work: Coroutine[Any, Any, T]) -> T:
    """Do something in the loop of all callers, and return what comes of it."""
    return asyncio.run_coroutine_threadsafe(work, Loop.there()).result(60.0)


@contextmanager
def one_loop() -> Iterator[None]:
    """Have servers that are made in this process live in the loop of all callers.

    Outside tests a process has one loop for its whole life. With several, that come and go, gRPC may lose what it has
    to tell one of them.
    """

    def serve(self: GrpcCarrier, host: str, port: int, started: Future[int]) -> None:
        self._loop.close()
        self._loop = Loop.there()
        asyncio.run_coroutine_threadsafe(self._serve(host, port, started), self._loop).result()

    before = GrpcCarrier._run_loop
    GrpcCarrier._run_loop = serve  # type: ignore[method-assign]
    try:
        yield
    finally:
        GrpcCarrier._run_loop = before  # type: ignore[method-assign]


class Near:
    """A node in this process.

    Args:
        known: who is called, and who calls.
        answer: answers a question.
        judged: folder of the models that it was judged with.
    """

    def __init__(
        self, known: Caller, answer: Callable[..., tuple[bytes, bytes]] = echo, judged: Path | None = None
    ) -> None:
        self.lines: list[str] = []
        self.error = ""
        self._line = Line(known, answer, self.lines.append, judged=judged)
        self._over = threading.Event()
        self._task = asyncio.run_coroutine_threadsafe(self._run(), Loop.there())

    async def _run(self) -> None:
        try:
            await self._line.run()
        except FedtideError as error:
            self.error = str(error)
        finally:
            self._over.set()

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self._over.is_set()

    def wait(self, seconds: float = 20.0) -> None:
        """Wait until it ends by itself."""
        assert self._over.wait(seconds)

    def close(self) -> None:
        """End it, if it has not ended."""
        self._task.cancel()
        if not self._task.done() or not self._task.cancelled():
            self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def near(federation: Federation, name: str, answer: Callable[..., tuple[bytes, bytes]] = echo) -> Near:
    """Let a node in, and wait until it is there."""
    until(lambda: name not in federation.carrier.present(), 20.0)  # one of the same name may just have ended
    made = Near(federation.known(name), answer)
    until(lambda: name in federation.carrier.present(), 20.0)
    return made


@contextmanager
def quiet() -> Iterator[None]:
    """See that nothing is logged, as whoever calls could fill a disk with it, and that no error is unforeseen.

    What gRPC alone would say is let pass: that a stream has gone, which it is told not to say, and that another loop of
    this process took an event.
    """
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            if not text.startswith(("ExecuteBatchError raised in core", "Exception in callback PollerCompletionQueue")):
                found.append(text)

    library()
    handler, root, theirs = Keep(logging.WARNING), logging.getLogger(), logging.getLogger("grpc")
    root.addHandler(handler)
    theirs.setLevel(logging.WARNING)
    try:
        yield
    finally:
        root.removeHandler(handler)
        theirs.setLevel(logging.CRITICAL)
    assert not found, found


@contextmanager
def small(megabytes: float) -> Iterator[None]:
    """See that this process never uses so much more memory."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    before = used(os.getpid(), "VmRSS")
    top = used(os.getpid(), "VmHWM")
    yield
    assert used(os.getpid(), "VmHWM") < max(before + megabytes, top + megabytes / 2)


# -- over gRPC ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def stream(known: Caller, **options: Any) -> AsyncIterator[Any]:
    """A stream on a connection of its own, on which nothing was said."""
    async with channel_to(known) as channel:
        call = channel.stream_stream(METHOD)(**options)
        try:
            yield call
        finally:
            call.cancel()


async def said_by(call: Any) -> Message:
    """The next message of a server."""
    async with asyncio.timeout(10.0):
        message = await next_message(call.read, library().aio.EOF, lambda head: True)
    assert message is not None
    return message


def introduction(known: Caller, asked: str, **changes: Any) -> bytes:
    """What a node says of itself, with other words where they are given; `claim` changes what is signed."""
    own = make_nonce()
    signed = {"run": known.run, "authority": known.authority, "name": known.name, "asked": asked, "nonce": own}
    claim = claim_bytes(**signed | changes.pop("claim", {}))
    said = {
        "scheme": SCHEME, "run": known.run, "name": known.name, "nonce": own,
        "key": spell_public(known.key.public_key()), "signature": sign(known.key, claim),
    }  # fmt: skip
    return next(Message("introduction", extra=said | changes).pieces())


async def enter(call: Any, known: Caller, **changes: Any) -> None:
    """Show a key, and be let in."""
    challenge = await said_by(call)
    await call.write(introduction(known, challenge.extra["nonce"], **changes))
    assert (await said_by(call)).kind == "welcome"


async def send(call: Any, message: Message) -> None:
    for piece in message.pieces():
        await call.write(piece)


async def ended(call: Any) -> str:
    """Wait until the server ends a stream, and return what it says."""
    with suppress(library().aio.AioRpcError, asyncio.InvalidStateError):
        async with asyncio.timeout(10.0):
            while await call.read() is not library().aio.EOF:
                continue
    async with asyncio.timeout(10.0):
        return f"{(await call.code()).name}: {await call.details()}"


# -- over sockets ---------------------------------------------------------------------------------------------------

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = 4


def plain(port: int, source: str = "127.0.0.1") -> socket.socket:
    """A connection that has said nothing."""
    return socket.create_connection(("127.0.0.1", port), timeout=10.0, source_address=(source, 0))


def secure(federation: Federation, port: int | None = None) -> ssl.SSLSocket:
    """A connection over TLS that speaks HTTP/2, and has begun."""
    context = ssl.create_default_context(cafile=str(federation.authority / "ca.crt"))
    context.set_alpn_protocols(["h2"])
    raw = plain(federation.port if port is None else port)
    try:
        made = context.wrap_socket(raw, server_hostname="127.0.0.1")
    except OSError:
        raw.close()
        raise
    made.sendall(PREFACE + frame(SETTINGS))
    return made


def frame(kind: int, payload: bytes = b"", number: int = 0, flags: int = 0) -> bytes:
    """A frame of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, number) + payload


def left_open(connection: socket.socket, seconds: float = 0.0) -> bool:
    """Whether the other end has not ended a connection; what it says is read."""
    connection.settimeout(seconds or 0.001)
    try:
        while connection.recv(100_000):
            continue
        return False
    except (TimeoutError, ssl.SSLWantReadError):
        return True
    except OSError:
        return False


def elsewhere(known: Caller, port: int) -> Caller:
    """The same node at another port."""
    return replace(known, address=f"127.0.0.1:{port}")


def as_json(content: bytes) -> Any:
    """What a header says."""
    return json.loads(content)
