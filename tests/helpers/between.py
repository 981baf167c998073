"""What lies between a node and its server: proxies of CONNECT, lines that are cut, and servers that are others."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Self

from fedtide.remote.grpc.stream_protocol import METHOD, library
from helpers.callers import Loop, run


class Between:
    """Passes connections on, at a port of its own.

    Args:
        port: where they go.
        connect: where they go is told with CONNECT, as to a proxy, and noted in `asked`.
        refuse: what a proxy says instead; "" passes on.
        cut: draws the seconds after which a connection is reset; None leaves it.
    """

    def __init__(
        self, port: int = 0, *, connect: bool = False, refuse: str = "", cut: Callable[[], float] | None = None
    ) -> None:
        self._to, self._connect, self._refuse, self._cut = port, connect, refuse, cut
        self.asked: list[str] = []
        self.count = 0
        self._open: set[asyncio.StreamWriter] = set()
        self.port = run(self._start())

    async def _start(self) -> int:
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.count += 1
        ends = [writer]
        self._open.add(writer)
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            to = self._to
            if self._connect:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
                self.asked.append(head[0])
                to = int(head[0].split()[1].rpartition(":")[2])
                writer.write((self._refuse or "HTTP/1.1 200 OK").encode() + b"\r\n\r\n")
                if self._refuse:
                    return writer.close()
            answers, back = await asyncio.open_connection("127.0.0.1", to)
            ends.append(back)
            self._open.add(back)
            if self._cut is not None:
                asyncio.get_running_loop().call_later(self._cut(), writer.transport.abort)
            ways = [asyncio.create_task(_pass(reader, back)), asyncio.create_task(_pass(answers, writer))]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
        for end in ends:
            end.transport.abort()
            self._open.discard(end)

    def close(self) -> None:
        async def stop() -> None:
            self._server.close()
            for end in list(self._open):
                end.transport.abort()
            await asyncio.sleep(0.05)

        run(stop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(50_000):
            writer.write(data)
            await writer.drain()


def at_random(seed: int, shortest: float, longest: float) -> Callable[[], float]:
    """Draw seconds, of which most are short."""
    draw = random.Random(seed)
    return lambda: min(longest, shortest + draw.expovariate(3.0 / (longest - shortest)))


@asynccontextmanager
async def serving(
    folder: Path, talk: Callable[..., Any], host: str = "127.0.0.1", method: str = METHOD
) -> AsyncIterator[int]:
    """A server with the certificate of a folder that says on a stream what it likes; its port."""
    grpc = library()
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    service, name = method[1:].split("/")
    handler = grpc.stream_stream_rpc_method_handler(talk)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: handler}),))
    pair = [tuple((folder / each).read_bytes() for each in ("server.key", "server.crt"))]
    port = server.add_secure_port(f"{host}:0", grpc.ssl_server_credentials(pair))
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


@asynccontextmanager
async def listening(take: Callable[..., Any], host: str = "127.0.0.1") -> AsyncIterator[int]:
    """Something that listens and is no server of nodes; its port."""
    there: list[asyncio.StreamWriter] = []

    async def taken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there.append(writer)
        await take(reader, writer)

    server = await asyncio.start_server(taken, host, 0)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()
        for writer in there:
            writer.transport.abort()


__all__ = ["Between", "Loop", "at_random", "listening", "serving"]
