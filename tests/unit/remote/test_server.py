"""The server's end of streams, and callers that keep to nothing: what they may not do, and what that costs."""

import asyncio
import shutil
import socket
import ssl
import threading
import time
from contextlib import closing, suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("cryptography")
pytest.importorskip("grpc")

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from fedtide.core.bounds import HEADER
from fedtide.core.errors import FedtideError
from fedtide.remote.grpc import door
from fedtide.remote.grpc import grpc_carrier as server
from fedtide.remote.grpc.grpc_carrier import GrpcCarrier
from fedtide.remote.grpc.line import channel_to, tell_disagreement
from fedtide.remote.grpc.stream_protocol import METHOD, PIECE, Broken, Head, Message
from fedtide.site import certificates
from fedtide.wire.keys import spell_public
from helpers.callers import (
    elsewhere,
    ended,
    enter,
    introduction,
    left_open,
    near,
    plain,
    run,
    said_by,
    send,
    small,
    stream,
)  # fmt: skip
from helpers.federation import RUN, until


@pytest.fixture
def rome(federation):
    """A node that is let in, and does what the test says."""
    yield federation.known("rome")
    until(lambda: "rome" not in federation.carrier.present(), 10.0)


def answers(federation, node="berlin"):
    response = federation.ask(node, {"a": 1}, b"tree", seconds=30.0)
    assert (response.error, response.payload, response.header) == ("", b"tree", {"a": 1})


def pulled(federation, seconds=0.3):
    """What comes within some time."""
    found, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        found += federation.carrier.pull()
        time.sleep(0.02)
    return found


# -- who is let in ----------------------------------------------------------------------------------------------------


def test_a_stream_that_never_speaks_is_ended(federation, rome, monkeypatch):
    monkeypatch.setattr(server, "INTRODUCTION", 0.3)

    async def talk():
        async with stream(rome) as call:
            assert (await said_by(call)).kind == "challenge"
            return await ended(call)

    assert run(talk()) == "INVALID_ARGUMENT: its key was not shown in time"


def test_an_introduction_that_was_recorded_lets_nobody_in(federation, rome):
    async def talk():
        async with stream(rome) as first, stream(rome) as second:
            recorded = introduction(rome, (await said_by(first)).extra["nonce"])
            await first.write(recorded)
            assert (await said_by(first)).kind == "welcome"
            await said_by(second)
            await second.write(recorded)
            return await ended(second)

    assert run(talk()) == "UNAUTHENTICATED: the key was not shown"
    answers(federation)


SHOWN = "UNAUTHENTICATED: the key was not shown"
CASES = {
    "signed for another run": ({"claim": {"run": "f" * 16}}, SHOWN),
    "signed for another name": ({"claim": {"name": "berlin"}}, SHOWN),
    "signed for another authority": ({"claim": {"authority": b"another"}}, SHOWN),
    "signed for another stream": ({"claim": {"asked": "0" * 64}}, SHOWN),
    "signed with another nonce": ({"claim": {"nonce": "0" * 64}}, SHOWN),
    "no signature": ({"signature": ""}, SHOWN),
    "a signature that is none": ({"signature": ["30"]}, SHOWN),
    "no key": ({"key": None}, SHOWN),
    "a key that is none": ({"key": {"a": []}}, SHOWN),
    "half a letter": ({"key": "\ud800", "name": "\ud800"}, SHOWN),
    "another run": ({"run": "f" * 16}, f"UNAUTHENTICATED: another study is served here ({RUN}); ask"),
    "no run": ({"run": None}, "UNAUTHENTICATED: another study is served here"),
    "another version": ({"scheme": 2}, "UNAUTHENTICATED: it speaks version 2 of the protocol, and this server"),
    "no version": ({"scheme": "\ud800\x1b[31m"}, "UNAUTHENTICATED: it speaks version ? of the protocol"),
    "a payload": ({"payload": 5}, "INVALID_ARGUMENT: its key was not shown"),
    "a header": ({"header": 5}, "INVALID_ARGUMENT: its key was not shown"),
    "another kind": ({"kind": "answer"}, "INVALID_ARGUMENT: its key was not shown"),
}


@pytest.mark.parametrize("case", CASES)
def test_who_does_not_show_the_key_is_told_so(federation, rome, case):
    changes, words = CASES[case]

    async def talk():
        async with stream(rome) as call:
            await call.write(introduction(rome, (await said_by(call)).extra["nonce"], **changes))
            return await ended(call)

    assert run(talk()).startswith(words)
    assert "rome" not in federation.carrier.present()


@pytest.mark.parametrize("said", [b"", b"\0" * 1000, b"[" * 4000, b"GET / HTTP/1.1", b'{"kind":' * 500],
                         ids=["nothing", "zeros", "brackets", "http", "openings"])  # fmt: skip
def test_who_says_something_else_is_told_so(federation, rome, said):
    async def talk():
        async with stream(rome) as call:
            await said_by(call)
            await call.write(said)
            return await ended(call)

    assert run(talk()).startswith("INVALID_ARGUMENT: its key was not shown")
    answers(federation)


def test_who_says_more_than_a_stranger_may_is_cut_off(federation, rome):
    """Even while it speaks: gRPC tells the caller then that writing failed, and not why."""

    async def talk():
        async with stream(rome) as call:
            await said_by(call)
            with suppress(grpc.aio.AioRpcError):
                await call.write(bytes(PIECE))
                assert await call.read() is grpc.aio.EOF

    run(talk())
    assert "rome" not in federation.carrier.present()
    answers(federation)


def test_a_key_that_is_not_admitted_is_noted_for_names_that_are_expected(federation):
    key = ec.generate_private_key(ec.SECP384R1())

    async def talk(name):
        known = replace(federation.known("rome"), key=key, name=name)
        async with stream(known) as call:
            await call.write(introduction(known, (await said_by(call)).extra["nonce"]))
            return await ended(call)

    for name in ("stranger", "anyone", ""):
        assert run(talk(name)) == "UNAUTHENTICATED: its key is not admitted"
    assert federation.carrier.knocked() == {"stranger": spell_public(key.public_key())}


def test_a_node_that_was_let_in_is_not_said_to_come_with_another_key(federation, rome):
    other = replace(federation.known("rome"), key=ec.generate_private_key(ec.SECP384R1()))

    async def talk(known):
        async with stream(known) as call:
            await call.write(introduction(known, (await said_by(call)).extra["nonce"]))
            return (await said_by(call)).kind if known is rome else await ended(call)

    run(talk(other))
    assert "rome" in federation.carrier.knocked()
    assert run(talk(rome)) == "welcome"
    assert "rome" not in federation.carrier.knocked()


# -- nodes whose rows are not those of the study ----------------------------------------------------------------------


def test_nodes_whose_rows_do_not_agree_are_counted_until_they_come_with_others(federation, rome):
    """The server learns how many they are; a stranger's word counts for a name whose key is not admitted yet alone."""
    carrier, other = federation.carrier, ec.generate_private_key(ec.SECP384R1())
    refused = "the server does not let this node in: its key is not admitted there"

    def tell(known):
        run(tell_disagreement(known))

    with pytest.raises(FedtideError, match=refused):
        tell(replace(rome, key=other))
    with pytest.raises(FedtideError, match=refused):
        tell(replace(rome, key=other, name="nobody"))
    assert carrier.rows_apart() == (0, 0)
    knocked = carrier.knocked()
    for _ in range(2):
        tell(rome)
        tell(replace(rome, key=other, name="stranger"))
    assert carrier.rows_apart() == (2, 0)
    assert carrier.knocked() == knocked
    assert "rome" not in carrier.present()

    async def come(known):
        async with stream(known) as call:
            more = {"warned": known.warned} if known.warned else {}
            await enter(call, known, **more)

    for warned, count in ((True, 1), ("yes", 0), (1, 0), (False, 0)):
        run(come(replace(rome, warned=warned)))
        assert carrier.rows_apart() == (1, count)
    carrier.admit(dict(federation.keys), frozenset())
    assert carrier.rows_apart() == (0, 0)
    federation.admit()


@pytest.mark.parametrize("case", CASES)
def test_who_does_not_show_the_key_is_not_counted(federation, rome, case):
    changes, words = CASES[case]

    async def talk():
        async with stream(rome) as call:
            await call.write(
                introduction(rome, (await said_by(call)).extra["nonce"], **{"kind": "disagreement"} | changes)
            )
            return await ended(call)

    assert run(talk()).startswith(words)
    assert federation.carrier.rows_apart() == (0, 0)


# -- the same key twice -----------------------------------------------------------------------------------------------


def test_a_node_that_comes_again_takes_the_place_of_its_earlier_stream(federation, rome):
    """Its network may have been lost without a word; a second node with its key is told of by the first."""

    async def talk():
        async with stream(rome) as lost, stream(rome) as back:
            await enter(lost, rome)
            await enter(back, rome)
            federation.push("rome", {"q": 1})
            question = await said_by(back)
            await send(back, Message("answer", question.id, {}, question.header, b"back"))
            assert (await asyncio.to_thread(federation.pull)).payload == b"back"
            return await ended(lost)

    assert run(talk()) == "UNAUTHENTICATED: a node with the same key is connected"


# -- answers ----------------------------------------------------------------------------------------------------------


def test_an_answer_counts_once_and_for_its_own_question(federation, rome):
    async def talk():
        async with stream(rome) as call:
            await enter(call, rome)
            federation.push("rome", {"q": 1}, b"x")
            question = await said_by(call)
            for name in ("nothing", "", "1.berlin", question.id + " "):
                await send(call, Message("answer", name, {}, b"{}", b"no"))
            for payload in (b"first", b"second", b"third"):
                await send(call, Message("answer", question.id, {}, b'{"n": 1}', payload))
            await send(call, Message("answer", question.id, {"error": "no"}))
            first = await asyncio.to_thread(pulled, federation)
            await send(call, Message("answer", question.id, {}, b'{"n": 2}', b"again"))
            return first, await asyncio.to_thread(pulled, federation)

    (first,), none = run(talk())
    assert (first.payload, first.header, first.error) == (b"first", {"n": 1}, "")
    assert none == []


def test_a_node_answers_no_question_of_another(federation, rome):
    wait = threading.Event()

    def slow(header, payload, seconds):
        wait.wait(10.0)
        return header, payload

    with near(federation, "oslo", slow):
        federation.push("oslo", {"q": 1}, b"theirs")
        name = f"{federation._number}.oslo"

        async def talk():
            async with stream(rome) as call:
                await enter(call, rome)
                await send(call, Message("answer", name, {}, b"{}", b"mine"))
                await send(call, Message("answer", name, {"error": "mine"}))
                return await asyncio.to_thread(pulled, federation)

        assert run(talk()) == []
        wait.set()
        assert federation.pull().payload == b"theirs"


def test_an_answer_that_is_late_counts_nothing(federation, rome):
    async def talk():
        async with stream(rome) as call:
            await enter(call, rome)
            federation.push("rome", {"q": 1}, seconds=0.3)
            question = await said_by(call)
            late = await asyncio.to_thread(federation.pull)
            assert (await said_by(call)).kind == "drop"
            await send(call, Message("answer", question.id, {}, b"{}", b"x"))
            return late, await asyncio.to_thread(pulled, federation)

    late, none = run(talk())
    assert late.error == "late: no answer within its 0.3 s"
    assert none == []


@pytest.mark.parametrize("came", [0, 2])
@pytest.mark.parametrize("case", ["an old stream", "a removed key"])
def test_what_an_old_stream_or_a_removed_key_still_sends_does_not_count(federation, rome, monkeypatch, case, came):
    """However many pieces of its answer had come before."""
    carrier, key = federation.carrier, federation.keys["rome"]
    old = server.Stream("rome", key)
    monkeypatch.setitem(carrier._streams, "rome", old)
    federation.push("rome", {"q": 1})
    name = f"{federation._number}.rome"
    pieces = [*Message("answer", name, {}, b"{}", b"x").pieces(), grpc.aio.EOF]
    assert carrier._wanted(old, head := Head.of(pieces[0]))

    async def read():
        if len(pieces) == 4 - came and case == "an old stream":
            monkeypatch.setitem(carrier._streams, "rome", server.Stream("rome", key))
        elif len(pieces) == 4 - came:
            monkeypatch.setattr(carrier, "_names", {})
        return pieces.pop(0)

    run(carrier._read(SimpleNamespace(read=read), old))
    assert pulled(federation, 0.1) == []
    assert not carrier._wanted(old, head)
    carrier.drop([name])


@pytest.mark.parametrize("item", ["a question", Message("welcome")], ids=["question", "message"])
def test_a_node_that_takes_nothing_is_left_in_time(federation, monkeypatch, item):
    monkeypatch.setattr(server, "INTRODUCTION", 0.1)
    monkeypatch.setattr(server, "GRACE", 0.1)
    if item == "a question":
        federation.push("nobody", {}, seconds=0.1)
        item = f"{federation._number}.nobody"
    stuck = server.Stream("nobody", "")
    stuck.out.put_nowait(item)

    async def write(piece):
        await asyncio.sleep(60.0)

    with pytest.raises(Broken, match="a node does not take what it is sent"):
        run(asyncio.wait_for(federation.carrier._write(SimpleNamespace(write=write), stuck), 5.0))
    pulled(federation)


@pytest.mark.parametrize(
    ("error", "words"),
    [("it broke", "it broke"), ("", "failed"), (3, "3"), (["a"], "['a']"), ("a\nb\x1b[31m", "a b"), ("\ud800", "")],
)
def test_an_error_of_a_node_is_one_line(federation, rome, error, words):
    async def talk():
        async with stream(rome) as call:
            await enter(call, rome)
            federation.push("rome", {"q": 1})
            await send(call, Message("answer", (await said_by(call)).id, {"error": error}))
            return await asyncio.to_thread(federation.pull)

    found = run(talk()).error
    assert found
    assert "\n" not in found
    assert "\x1b" not in found
    assert words in found
    found.encode()


TOO_LARGE = "INVALID_ARGUMENT: a message is larger than it may be"
BROKEN_OFF = "INTERNAL: Internal error from Core"
"""What gRPC says at a caller that was still sending."""
LARGE = {
    "an answer": (lambda name: Message("answer", name), {"payload": 1001}, "more than the 1000 bytes"),
    "its header": (lambda name: Message("answer", name), {"header": HEADER + 1}, "more than the 1000 bytes"),
    "an answer to nothing": (lambda name: Message("answer", "x"), {"payload": 2**40}, ""),
    "a message of another kind": (lambda name: Message("pong"), {"payload": 1}, ""),
    "one that says it is of a question": (lambda name: Message("pong", name), {"payload": 1000}, ""),
    "an error": (lambda name: Message("answer", name, {"error": "x"}), {"payload": 2**35}, "more than the 1000 bytes"),
}


@pytest.mark.parametrize("case", LARGE)
def test_what_is_larger_than_it_may_be_ends_the_stream_with_words(federation, rome, case):
    make, size, words = LARGE[case]

    async def talk():
        async with stream(rome) as call:
            await enter(call, rome)
            federation.push("rome", {"q": 1}, seconds=0.4, largest=1000)
            message = make((await said_by(call)).id)
            await call.write(next(replace(message, extra={**message.extra, **size}).pieces()))
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(bytes(1000))
            return await ended(call), await asyncio.to_thread(federation.pull)

    with small(50):
        said, response = run(talk())
    assert said in (TOO_LARGE, BROKEN_OFF)
    assert (words or "late: ") in response.error
    answers(federation)


def test_a_piece_that_grows_when_it_is_unpacked_is_not_unpacked(federation, rome):
    async def talk():
        async with channel_to(rome) as channel:
            call = channel.stream_stream(METHOD)(compression=grpc.Compression.Gzip)
            await said_by(call)
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(bytes(50_000_000))
            return await ended(call)

    with small(150):  # the caller's own pieces are among them
        assert not run(talk()).startswith(("OK", "UNAUTHENTICATED"))
    answers(federation)


# -- connections, streams and frames ----------------------------------------------------------------------------------


def test_the_port_behind_the_door_lets_nobody_in(federation, rome):
    direct = elsewhere(rome, federation.carrier._door.behind)

    async def talk():
        async with stream(direct) as call:
            return await ended(call)

    assert run(talk()) == "PERMISSION_DENIED: nodes come in at the server's address"


def test_of_a_thousand_streams_on_one_connection_few_are_open(federation, rome, monkeypatch):
    monkeypatch.setattr(door, "SECONDS", 1.5)

    async def talk():
        async with channel_to(rome) as channel:
            calls = [channel.stream_stream(METHOD)() for _ in range(1000)]
            heard = [asyncio.create_task(call.read()) for call in calls]
            await asyncio.sleep(0.8)
            count = sum(each.done() for each in heard)
            for call in calls:
                call.cancel()
            await asyncio.gather(*heard, return_exceptions=True)
            return count

    with small(100):
        assert run(talk()) <= 2
    answers(federation)


def test_a_stream_that_has_ended_makes_its_connection_a_strangers_again(federation, rome, monkeypatch):
    """Else a node, or one that was, could keep as many open as it likes."""
    monkeypatch.setattr(door, "SECONDS", 0.5)
    guests = federation.carrier._door._guests

    async def talk():
        async with channel_to(rome) as channel:
            call = channel.stream_stream(METHOD)()
            before = set(guests.values())
            await enter(call, rome)
            (own,) = set(guests.values()) - before
            assert own.is_node
            call.cancel()
            await asyncio.to_thread(until, lambda: not own.is_node, 5.0)
            await asyncio.to_thread(until, lambda: own not in guests.values(), 5.0)

    run(talk())
    answers(federation)


def test_old_versions_of_tls_are_refused(federation):
    context = ssl.create_default_context(cafile=str(federation.authority / "ca.crt"))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    with suppress(ValueError, DeprecationWarning):
        context.minimum_version = ssl.TLSVersion.TLSv1_2
    with plain(federation.port) as raw, suppress(OSError), context.wrap_socket(raw, server_hostname="127.0.0.1") as one:
        assert one.version() == "TLSv1.2"
        assert "GCM" in one.cipher()[0] or "CHACHA" in one.cipher()[0]


# -- the server itself ------------------------------------------------------------------------------------------------


@pytest.fixture
def other(federation, tmp_path):
    """Another server of the site, with an authority's folder of its own."""
    shutil.copytree(federation.authority, tmp_path / "authority")
    carrier = GrpcCarrier("127.0.0.1", 0, run=RUN, authority=tmp_path / "authority", nodes=1)
    with closing(carrier) as made:
        yield made, tmp_path / "authority"


def serial_of(port):
    """The number of the certificate that a connection is shown."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with plain(port) as raw, context.wrap_socket(raw) as one:
        return x509.load_der_x509_certificate(one.getpeercert(binary_form=True)).serial_number


def test_a_certificate_that_is_made_anew_holds_from_the_next_connection(federation, other):
    carrier, folder = other
    known = elsewhere(federation.known("oslo"), carrier.port)
    carrier.admit({"oslo": federation.keys["oslo"]})

    async def talk():
        async with stream(known) as call:
            await enter(call, known)
            first = await asyncio.to_thread(serial_of, carrier.port)
            certificates.renew(folder, "127.0.0.1:1")
            second = await asyncio.to_thread(serial_of, carrier.port)
            assert first != second
            assert second == await asyncio.to_thread(serial_of, carrier.port)
            assert second == certificates.read_certificate(folder / "server.crt").serial_number
            (folder / "server.crt").unlink()  # while it is made anew once more, the last one holds
            assert await asyncio.to_thread(serial_of, carrier.port) == second
            carrier.push([server.Question("1", "oslo", {}, b"", 10.0, 100)])
            assert (await said_by(call)).kind == "question"  # the stream goes on
        async with stream(known) as call:
            await enter(call, known)  # and the ticket's authority is that of the new one

    run(talk())


@pytest.mark.parametrize("over", [False, True])
def test_a_server_that_closes_ends_all_streams_and_nobody_waits(federation, other, over):
    carrier, _ = other
    known = elsewhere(federation.known("oslo"), carrier.port)
    carrier.admit({"oslo": federation.keys["oslo"]})
    silent = [plain(carrier.port) for _ in range(5)]

    async def talk():
        async with stream(known) as call, stream(known) as unknown:
            await enter(call, known)
            await said_by(unknown)
            carrier.push([server.Question("1", "oslo", {}, bytes(3 * PIECE), 10.0, 100)])
            assert (await said_by(call)).kind == "question"
            closing = asyncio.create_task(asyncio.to_thread(carrier.finish if over else carrier.close))
            if over:
                assert (await said_by(call)).kind == "over"
            assert (await ended(call)).startswith(("OK", "UNAUTHENTICATED"))
            await closing

    run(talk())
    for each in silent:
        assert not left_open(each, 5.0)
        each.close()
    carrier.close()
    carrier.push([server.Question("2", "oslo", {}, b"", 0.0, 100)])  # what comes later is late
    assert {each.error[:5] for each in carrier.pull()} <= {"late:", "canno"}
    with pytest.raises(OSError):  # noqa: PT011 -- refused, on this system or that
        socket.create_connection(("127.0.0.1", carrier.port), timeout=2.0)


def test_a_key_that_is_removed_ends_its_stream_and_its_questions(federation, rome):
    async def talk():
        async with stream(rome) as call:
            await enter(call, rome)
            federation.push("rome", {"q": 1}, seconds=100.0)
            await said_by(call)
            keys = {name: key for name, key in federation.keys.items() if name != "rome"}
            federation.carrier.admit(keys, frozenset())
            assert "rome" not in federation.carrier.present()
            assert (await ended(call)).startswith(("OK", "UNAUTHENTICATED"))
            assert federation.pull().error == "its key was removed"
            assert federation.carrier.removed() == {"rome"}
            assert federation.carrier.removed() == frozenset()

    run(talk())
    federation.admit()


def test_questions_wait_for_a_node_that_comes_later(federation):
    federation.push("oslo", {"n": 1}, seconds=30.0)
    federation.push("nobody", {"n": 1}, seconds=0.2)
    assert federation.pull().error == "cannot be reached: was not connected within its 0.2 s"
    with near(federation, "oslo"):
        assert federation.pull().header == {"n": 1}
