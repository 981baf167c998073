"""Who calls a server: nodes in threads of this process, and callers that keep to nothing, over gRPC and over sockets."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import ssl
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedtide.core.errors import FedtideError
from fedtide.remote import proof
from fedtide.remote.line import Known, Line, channel_to
from fedtide.remote.pieces import METHOD, SCHEME, Message, library, next_message
from helpers.federation import Federation, until
from helpers.processes import used


def echo(header: bytes, payload: bytes, seconds: float) -> tuple[bytes, bytes]:
    """Answer with the question."""
    return header, payload


class Near:
    """A node in a thread of this process.

    Args:
        known: who is called, and who calls.
        answer: answers a question.
    """

    def __init__(self, known: Known, answer: Callable[..., tuple[bytes, bytes]] = echo) -> None:
        self.lines: list[str] = []
        self.error = ""
        self._line = Line(known, answer, self.lines.append)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner, suppress(asyncio.CancelledError):
            runner.run(self._run())

    async def _run(self) -> None:
        self._task = asyncio.current_task()
        try:
            await self._line.run()
        except FedtideError as error:
            self.error = str(error)

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return not self._thread.is_alive()

    def wait(self, seconds: float = 20.0) -> None:
        """Wait until it ends by itself."""
        self._thread.join(seconds)
        assert self.over

    def close(self) -> None:
        """End it, if it has not ended."""
        until(lambda: self.over or hasattr(self, "_task"), 5.0)
        with suppress(RuntimeError):  # it has just ended
            self._loop.call_soon_threadsafe(self._task.cancel)
        self.wait()

    def __enter__(self) -> Near:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def near(federation: Federation, name: str, answer: Callable[..., tuple[bytes, bytes]] = echo) -> Near:
    """Let a node in, and wait until it is there."""
    made = Near(federation.known(name), answer)
    until(lambda: name in federation.carrier.present(), 20.0)
    return made


@contextmanager
def quiet() -> Iterator[None]:
    """See that nothing is logged, as whoever calls could fill a disk with it."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler, root = Keep(logging.WARNING), logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
    assert found == []


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
async def stream(known: Known, **options: Any) -> AsyncIterator[Any]:
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


def introduction(known: Known, asked: str, **changes: Any) -> bytes:
    """What a node says of itself, with other words where they are given; `claim` changes what is signed."""
    own = proof.nonce()
    signed = {"run": known.run, "authority": known.authority, "name": known.name, "asked": asked, "own": own}
    claim = proof.claim(**signed | changes.pop("claim", {}))
    said = {
        "scheme": SCHEME, "run": known.run, "name": known.name, "key": proof.public_line(known.key), "nonce": own,
        "signature": proof.signed(known.key, claim),
    }  # fmt: skip
    return next(Message("introduction", said=said | changes).pieces())


async def enter(call: Any, known: Known, **changes: Any) -> None:
    """Show a key, and be let in."""
    challenge = await said_by(call)
    await call.write(introduction(known, challenge.said["nonce"], **changes))
    assert (await said_by(call)).kind == "welcome"


async def send(call: Any, message: Message) -> None:
    """Say something."""
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
DATA, HEADERS, RESET, SETTINGS, PING, CONTINUATION = 0, 1, 3, 4, 6, 9


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


def call_of(number: int, path: str = METHOD, more: bytes = b"") -> bytes:
    """The frame that begins a call of a method."""
    words = [(b"\x04", None, path), (b"\x01", None, "x"), (b"\x00", "te", "trailers"),
             (b"\x00", "content-type", "application/grpc")]  # fmt: skip
    block = b"\x83\x87"  # POST, https
    for first, name, value in words:
        block += first + (b"" if name is None else bytes([len(name)]) + name.encode())
        block += bytes([len(value)]) + value.encode()
    return frame(HEADERS, block + more, number, flags=4)


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


def elsewhere(known: Known, port: int) -> Known:
    """The same node at another port."""
    return replace(known, address=f"127.0.0.1:{port}")


def as_json(content: bytes) -> Any:
    """What a header says."""
    return json.loads(content)
