"""The door of a server to the network: strangers are few, short and small, counted from when they connect.

It passes bytes on to gRPC on the loopback, and knows nothing of what is in them. A connection is a stranger's until the
server says that a node has shown its key on it.
"""

import asyncio
import errno
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_network
from typing import Any

from fedtide.core.errors import FedtideError

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

STRANGERS, TURN = 64, 2.0
"""Connections at a time on which no node has shown its key. One more is ended at once, or the oldest from the busiest
address in its place: if that has had its turn of so many seconds, or the new one's address is less busy."""
SECONDS = 10.0
"""Seconds that one of them may last."""
ALLOWED = 2**16
"""Bytes that it may send."""
FILES, SPARE = 3, 200
"""Open files of one connection: its two ends here, and that of gRPC; and those of the rest of a server."""
QUEUE, AT_ONCE = 1000, 4
"""Connections that the system keeps until they are taken, and how many of them are taken before others are ended."""
CHUNK = 2**18
"""Bytes that are passed on at a time."""
LINGER = 5.0
"""Seconds in which the last bytes of a connection have to be taken."""
WHY = {
    errno.EADDRINUSE: "is taken, maybe because this site is served already: end the program that has it",
    errno.EACCES: "may not be opened by this user: choose a port above 1023",
}
"""Reasons why a port cannot be opened."""


@dataclass(eq=False)
class Guest:
    """A connection.

    Attributes:
        address: where it comes from.
        writer: to it.
        since: when it came.
        is_node: whether a node has shown its key on it.
        sent: bytes that it sent.
    """

    address: str
    writer: asyncio.StreamWriter
    since: float = field(default_factory=time.monotonic)
    is_node: bool = False
    sent: int = 0

    def end(self) -> None:
        """End the connection now."""
        self.writer.transport.abort()


@dataclass
class Door:
    """Takes connections and passes them on.

    Args:
        behind: the port of the loopback where gRPC listens.
    """

    behind: int
    _strangers: dict[Guest, asyncio.TimerHandle] = field(default_factory=dict)
    _guests: dict[int, Guest] = field(default_factory=dict)
    _server: Any = None

    async def open(self, host: str, port: int) -> None:
        """Listen.

        Raises:
            FedtideError: the port is taken, or the address is none of this machine.
        """
        try:
            self._server = await asyncio.start_server(self._take, host, port, limit=CHUNK, backlog=AT_ONCE)
            for listening in self._server.sockets:
                with listening.dup() as same:
                    same.listen(QUEUE)
        except OSError as error:
            why = WHY.get(error.errno or 0, f"cannot be opened ({error.strerror or error})")
            raise FedtideError(f"deploy.address: port {port} of {host} {why}") from None

    @property
    def port(self) -> int:
        """The port of the door."""
        return int(self._server.sockets[0].getsockname()[1])

    def guest(self, port: int) -> Guest | None:
        """Return the connection that gRPC sees from a port of the loopback; None for one that did not come this way."""
        return self._guests.get(port)

    def know(self, guest: Guest) -> None:
        """Take a connection for that of a node."""
        guest.is_node = True
        self._forget(guest)

    def doubt(self, guest: Guest) -> None:
        """Take a connection for a stranger's again: the stream of its node has ended."""
        if guest.is_node and guest in self._guests.values():
            guest.is_node, guest.sent, guest.since = False, 0, time.monotonic()
            if not self._count(guest):
                guest.end()

    async def close(self) -> None:
        """Listen no longer, and end all connections."""
        if self._server is not None:
            for listening in self._server.sockets:
                asyncio.get_running_loop().remove_reader(listening.fileno())
            await asyncio.sleep(0.01)  # what was just accepted has to be a connection, or nobody ends it
            self._server.close()
        for guest in (*self._strangers, *self._guests.values()):
            guest.end()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        guest = Guest(_network(str((writer.get_extra_info("peername") or ("?",))[0])), writer)
        if not self._count(guest):
            return guest.end()
        back, port = None, 0
        try:
            answers, back = await asyncio.open_connection("127.0.0.1", self.behind, limit=CHUNK)
            port = back.get_extra_info("sockname")[1]
            self._guests[port] = guest
            ways = [asyncio.create_task(way) for way in (_pass_on(reader, back, guest), _pass_on(answers, writer))]
            _, left = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in left:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
        except (OSError, asyncio.CancelledError):  # it is gone, or the server closes
            pass
        finally:
            self._forget(guest)
            self._guests.pop(port, None)
            for end in filter(None, (writer, back)):  # what is on its way still arrives, if it does so soon
                end.close()
                asyncio.get_running_loop().call_later(LINGER, end.transport.abort)

    def _count(self, guest: Guest) -> bool:
        """Count a stranger; tell whether there is room for it."""
        if len(self._strangers) >= STRANGERS and not self._make_room(guest.address):
            return False
        self._strangers[guest] = asyncio.get_running_loop().call_later(SECONDS, guest.end)
        return True

    def _make_room(self, address: str) -> bool:
        """End a stranger in favor of a new one from an address, if that is fair; tell whether it was."""
        counts = Counter(guest.address for guest in self._strangers)
        ((busiest, most),) = counts.most_common(1)
        oldest = next(guest for guest in self._strangers if guest.address == busiest)
        if counts[address] + 1 >= most and time.monotonic() - oldest.since < TURN:
            return False
        self._forget(oldest)
        oldest.end()
        return True

    def _forget(self, guest: Guest) -> None:
        if (timer := self._strangers.pop(guest, None)) is not None:
            timer.cancel()


def _network(address: str) -> str:
    """Return the address by which strangers are counted: of IPv6 the 64 bits that one machine may have all of.

    >>> _network("192.0.2.7"), _network("2001:db8::1:2")
    ('192.0.2.7', '2001:db8::/64')
    """
    return str(ip_network(f"{address.partition('%')[0]}/64", strict=False)) if ":" in address else address


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, guest: Guest | None = None) -> None:
    """Pass on what comes, until it ends; of a stranger no more than it may send."""
    with suppress(OSError):
        while data := await reader.read(CHUNK):
            if guest is not None and not guest.is_node:
                guest.sent += len(data)
                if guest.sent > ALLOWED:
                    return
            writer.write(data)
            await writer.drain()


def check_files(nodes: int) -> None:
    """Have this process open as many files as its nodes and as many strangers as come in need.

    Raises:
        FedtideError: the system does not allow it.
    """
    if resource is None:
        return
    wanted = FILES * (nodes + STRANGERS) + SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            but = f"raise it with: ulimit -n {wanted}"
            raise FedtideError(f"open files: found a limit of {hard}, allowed: {wanted} for {nodes} nodes; {but}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
