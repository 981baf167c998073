"""A node's worker without torch that sends back what it gets; or many nodes in one process, for bench/messages.py."""

import asyncio
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from fedtide.remote.grpc.line import Line
from fedtide.site.node_process import LineSettings


def echo(line: Connection) -> None:
    """Send back what comes."""
    line.send_bytes(b"ready")
    while True:
        line.recv_bytes()
        payload = line.recv_bytes()
        line.send_bytes(b"{}")
        line.send_bytes(payload)


async def many(root: Path, port: str, names: list[str]) -> None:
    """Keep a stream for each node."""
    lines = []
    for name in names:
        authority, key = str(root / "authority" / "ca.crt"), str(root / name / "key")
        known = LineSettings(f"127.0.0.1:{port}", authority, "0123456789abcdef", name, key).server
        lines.append(Line(known, lambda header, payload, seconds: (b"{}", payload), lambda line: None))
    await asyncio.gather(*(line.run() for line in lines))


if __name__ == "__main__":
    if len(sys.argv) > 3:
        asyncio.run(many(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
    else:
        echo(Connection(int(sys.argv[-1])))
