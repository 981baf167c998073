"""The door: strangers are few, short and small, from when they connect; nodes come in meanwhile."""

import errno
import resource
import sys
import time
from collections import Counter
from contextlib import ExitStack, closing, suppress

import pytest

pytest.importorskip("cryptography")
pytest.importorskip("grpc")

from fedtide.core.errors import FedtideError
from fedtide.remote.grpc import door
from fedtide.remote.grpc.grpc_carrier import GrpcCarrier
from helpers.callers import left_open, near, plain, small
from helpers.federation import RUN, until


@pytest.fixture
def crowd():
    """Connections that are ended with the test."""
    with ExitStack() as stack:
        yield lambda *where, **how: stack.enter_context(plain(*where, **how))


def strangers(federation):
    return federation.carrier._door._strangers


def answers(federation):
    response = federation.ask("berlin", {"a": 1}, b"tree", seconds=30.0)
    assert (response.error, response.payload, response.header) == ("", b"tree", {"a": 1})


def test_of_500_that_never_speak_few_stay_and_not_for_long(federation, crowd, monkeypatch):
    monkeypatch.setattr(door, "SECONDS", 1.5)
    with small(100):
        all_of_them = [crowd(federation.port) for _ in range(500)]
        until(lambda: len(strangers(federation)) == door.STRANGERS, 10.0)
        until(lambda: sum(left_open(each) for each in all_of_them) <= door.STRANGERS, 10.0)
        with near(federation, "oslo"):
            answers(federation)
            assert federation.ask("oslo", {}).error == ""
        until(lambda: not any(left_open(each) for each in all_of_them), 10.0)
    until(lambda: not strangers(federation), 5.0)
    until(lambda: len(federation.carrier._door._guests) == 1, 5.0)
    answers(federation)


def test_descriptors_stay_within_what_is_checked_at_the_start(federation, crowd, monkeypatch):
    """However many connect at once, those of the server's other files are left."""
    made = Counter()
    take = door.Door._take

    async def counted(self, reader, writer):
        made["now"] += 1
        made["most"] = max(made["most"], made["now"])
        try:
            await take(self, reader, writer)
        finally:
            made["now"] -= 1

    monkeypatch.setattr(door.Door, "_take", counted)
    other = GrpcCarrier("127.0.0.1", 0, run=RUN, authority=federation.authority, nodes=1)
    with closing(other):
        for _ in range(600):
            crowd(other.port)
        until(lambda: made["now"] == door.STRANGERS, 10.0)
    assert made["most"] < door.STRANGERS + door.SPARE / door.FILES


def test_a_crowd_from_one_address_ends_nobody_from_another(federation, crowd):
    alone = crowd(federation.port, source="127.0.0.2")
    others = [crowd(federation.port) for _ in range(3 * door.STRANGERS)]
    until(lambda: sum(left_open(each) for each in others) < door.STRANGERS, 10.0)
    assert left_open(alone)
    by = Counter(guest.address for guest in list(strangers(federation)))
    assert by == {"127.0.0.2": 1, "127.0.0.1": door.STRANGERS - 1}
    answers(federation)


@pytest.mark.parametrize("first", [b"", b"\x16\x03\x01\x02\x00", b"GET / HTTP/1.1\r\n\r\n"], ids=["any", "tls", "http"])
def test_a_stranger_that_sends_more_than_it_may_is_ended(federation, crowd, first):
    one, sent = crowd(federation.port), 0
    with suppress(OSError):
        one.sendall(first)
        while sent < 50 * door.ALLOWED:  # what is on its way to somebody that reads no more
            sent += one.send(bytes(10_000))
            time.sleep(0.0005)
    assert not left_open(one, 5.0)
    answers(federation)


def test_a_node_stays_when_strangers_would_be_ended(federation, monkeypatch):
    monkeypatch.setattr(door, "SECONDS", 0.3)
    monkeypatch.setattr(door, "ALLOWED", 100_000)
    with near(federation, "rome"):
        for _ in range(4):
            assert federation.ask("rome", {}, bytes(50_000)).error == ""
            time.sleep(0.15)
        assert "rome" in federation.carrier.present()


def serve(federation, host, port):
    return GrpcCarrier(host, port, run=RUN, authority=federation.authority, nodes=1)


def test_a_port_that_is_taken_is_one_line(federation):
    with pytest.raises(FedtideError) as error:
        serve(federation, "127.0.0.1", federation.port)
    assert str(error.value).startswith(f"deploy.address: port {federation.port} of 127.0.0.1 is taken")
    assert "\n" not in str(error.value)


def test_a_port_that_one_may_not_open_is_one_line(federation, monkeypatch):
    async def refuse(*where, **how):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(door.asyncio, "start_server", refuse)
    with pytest.raises(FedtideError, match=r"may not be opened by this user: choose a port above 1023$"):
        serve(federation, "127.0.0.1", 80)


class Limits:
    """What a system says of open files."""

    RLIMIT_NOFILE, RLIM_INFINITY = resource.RLIMIT_NOFILE, resource.RLIM_INFINITY

    def __init__(self, soft, hard):
        self.now = (soft, hard)

    def getrlimit(self, what):
        return self.now

    def setrlimit(self, what, limits):
        self.now = limits


ANY = resource.RLIM_INFINITY
WANTED = 3 * (10 + 64) + 200


@pytest.mark.parametrize(
    ("found", "then"),
    [
        ((100, ANY), (WANTED, ANY)), ((100, 5000), (WANTED, 5000)), ((5000, 5000), (5000, 5000)),
        ((ANY, ANY), (ANY, ANY)), ((WANTED, WANTED), (WANTED, WANTED)),
    ],
)  # fmt: skip
def test_open_files_are_allowed_as_far_as_the_system_does(found, then, monkeypatch):
    monkeypatch.setattr(door, "resource", limits := Limits(*found))
    door.check_files(10)
    assert limits.now == then


def test_too_few_open_files_are_one_line(monkeypatch):
    monkeypatch.setattr(door, "resource", limits := Limits(100, 200))
    with pytest.raises(FedtideError) as error:
        door.check_files(10)
    assert str(error.value) == (
        f"open files: found a limit of 200, allowed: {WANTED} for 10 nodes; raise it with: ulimit -n {WANTED}"
    )
    assert limits.now == (100, 200)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_server_that_is_closed_has_no_files_left(federation):
    def count():
        from pathlib import Path

        return len(list(Path("/proc/self/fd").iterdir()))

    before = count()
    with closing(serve(federation, "127.0.0.1", 0)) as other:
        silent = [plain(other.port) for _ in range(20)]
    for each in silent:
        assert not left_open(each, 5.0)
        each.close()
    until(lambda: count() <= before + 2, 10.0)
