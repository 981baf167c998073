"""The `[deploy]` table: what a federation of real clients has beside a study."""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Annotated

from pydantic import Field

from fedtide.core.durations import Duration, Zone, kept_if
from fedtide.core.errors import shown
from fedtide.fields.strict import Strict
from fedtide.fields.types import Count, Positive

LABEL = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)")


def parted(address: str) -> tuple[str, int]:
    """Return host and port of an address; that of IPv6 stands in brackets.

    >>> parted("fl.example.org:8300"), parted("[::1]:8300")
    (('fl.example.org', 8300), ('::1', 8300))
    """
    host, _, port = address.rpartition(":")
    if host in ("0.0.0.0", "[::]"):
        raise ValueError(f"found {shown(address)}, allowed: a name or address at which others reach this machine")
    inside = host[1:-1] if host.startswith("[") and host.endswith("]") else ""
    if not (re.fullmatch(r"[0-9]{1,5}", port) and 1 <= int(port) <= 65535 and (_is_ip(inside, 6) or is_host(host))):
        raise ValueError(f"found {shown(address)}, allowed: HOST:PORT, such as 'fl.example.org:8300'")
    return inside or host, int(port)


def listening(address: str) -> tuple[str, int]:
    """Return the interface and the port where a server listens: the loopback, or all of a machine's interfaces.

    >>> listening("127.0.0.1:8300"), listening("fl.example.org:8300")
    (('127.0.0.1', 8300), ('0.0.0.0', 8300))
    """
    host, port = parted(address)
    if host == "localhost" or (_is_ip(host, 4) and ip_address(host).is_loopback):
        return "127.0.0.1", port
    if _is_ip(host, 6):
        return "::1" if ip_address(host).is_loopback else "::", port
    return "0.0.0.0", port


def is_host(host: str) -> bool:
    """Tell whether a text is an address of IPv4, or a name as DNS has it."""
    labels = host.split(".")
    name = len(host) <= 253 and all(LABEL.fullmatch(label) for label in labels) and not labels[-1].isdigit()
    return name or _is_ip(host, 4)


def _is_ip(text: str, version: int) -> bool:
    try:
        return ip_address(text).version == version and "%" not in text
    except ValueError:
        return False


Address = Annotated[str, kept_if(parted)]


class Deploy(Strict):
    """Settings of `fedtide deploy` and `fedtide serve`; a simulation ignores this table.

    Times are a number and one of s, m, h, d, such as "90s" or "1h".

    Args:
        address: HOST:PORT at which nodes reach the server; its certificate is made for this host, and for this
            machine itself. Where the host is no loopback the server listens on all interfaces.
        every: from the beginning of a round to that of the next, or longer where a round is not over by then; None
            begins the next as soon as one is over.
        deadline: for the answers to one question, from when it goes out; what comes later counts for nothing.
        fewest: clients that have to be there before a round begins, however long that takes, and answers to a question
            below which none counts.
        heaviest: largest weight that a client may give to its answer, mostly its number of rows; an answer with a
            larger one is refused. Near the rows of your largest client no other can outweigh it by a lie.
        zone: time zone of `every`, and of methods that know the time of the day, such as "Europe/Berlin".
    """

    address: Address = "127.0.0.1:8300"
    every: Duration | None = None
    deadline: Duration = "10m"
    fewest: Annotated[Count, Field(le=100_000)] = 1
    heaviest: Annotated[Positive, Field(le=1e12)] = 1e6
    zone: Zone = "UTC"
