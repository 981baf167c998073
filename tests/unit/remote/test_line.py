"""A node's end of its stream: what it says where the server is away, is another one, or says what it should not."""

import asyncio
import itertools
import shutil
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import pytest

pytest.importorskip("cryptography")
pytest.importorskip("grpc")

from cryptography.hazmat.primitives.serialization import load_pem_private_key

from fedtide.core.bounds import HEADER
from fedtide.core.errors import FedtideError
from fedtide.fields.types import LONGEST
from fedtide.remote.grpc import line as lines
from fedtide.remote.grpc.line import CAUSES, Failed, Line, meaning
from fedtide.remote.grpc.stream_protocol import MOST, Message, claim_bytes, make_nonce, next_message
from fedtide.site import certificates
from fedtide.wire.keys import verify_signature
from helpers.between import Between, listening, serving
from helpers.callers import Near, echo, elsewhere, near, run
from helpers.federation import Federation, until


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    made = Federation(tmp_path_factory.mktemp("line"))
    made.known("rome")
    yield made
    made.close()


@pytest.fixture(scope="module")
def rome(federation):
    return federation.known("rome")


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(lines, "SHORTEST", 0.05)
    monkeypatch.setattr(lines, "LONGEST", 0.2)
    for name in ("https_proxy", "http_proxy", "grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


# -- servers that say what they should not ----------------------------------------------------------------------------


class Server:
    """A server with the site's certificate, whose streams go as a test says.

    Args:
        script: says what happens on a stream once a node was let in, or from its beginning.
        let_in: whether it asks who comes, and lets anybody in.
    """

    def __init__(self, federation, script, let_in=True):
        self._federation, self._script, self._let_in = federation, script, let_in
        self.streams = 0

    async def talk(self, unused, context):
        self.streams += 1
        self.context = context
        if self._let_in:
            await self.say(Message("challenge", extra={"nonce": make_nonce(), "time": time.time(), "scheme": 1}))
            self.introduction = await self.hear()
            await self.say(Message("welcome"))
        await self._script(self)

    async def say(self, message):
        for piece in message.pieces():
            await self.context.write(piece)

    async def ask(self, name, payload=b"x", **said):
        await self.say(Message("question", name, {"seconds": 30.0} | said, b'{"a": 1}', payload))

    async def hear(self):
        import grpc

        async with asyncio.timeout(5.0):
            return await next_message(self.context.read, grpc.aio.EOF, lambda head: True)


def played(federation, known, script, *, answer=echo, let_in=True, seconds=5.0, file=None):
    """Have a node talk with a server until the script is over, and return the server and what the node said."""
    found, over = [], asyncio.Event()

    async def once(server):
        if over.is_set():
            return
        try:
            await script(server)
        finally:
            over.set()

    async def play():
        made = Server(federation, once, let_in)
        async with serving(federation.authority, made.talk) as port:
            line = asyncio.create_task(Line(elsewhere(known, port), answer, found.append, file).run())
            async with asyncio.timeout(seconds):
                await over.wait()
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.1):
                        await asyncio.shield(line)
            line.cancel()
            await asyncio.gather(line, return_exceptions=True)
        return made

    return run(play()), found


def test_a_node_shows_its_key_for_its_server_alone(federation, rome):
    async def script(server):
        await server.say(Message("over"))

    server, said = played(federation, rome, script)
    shown = server.introduction.extra
    assert (shown["name"], shown["run"], shown["scheme"]) == (rome.name, rome.run, 1)
    assert shown["key"] == federation.keys["rome"]
    assert not verify_signature(
        shown["key"], shown["signature"], claim_bytes(rome.run, rome.authority, rome.name, "0" * 64, shown["nonce"])
    )
    assert said[-1] == "the study is over"


@pytest.mark.parametrize(
    "said",
    [{"nonce": None}, {"nonce": "ab"}, {"nonce": 'x", "oslo"'}, {"nonce": "0" * 64 + "\n"}, {"kind": "welcome"}],
    ids=["none", "short", "a text to sign", "more behind it", "another kind"],
)
def test_a_server_that_does_not_ask_as_it_should_gets_no_signature(federation, rome, said):
    async def script(server):
        await server.say(Message("challenge", extra={"nonce": "0" * 64} | said))
        assert await server.hear() is None

    _, lines = played(federation, rome, script, let_in=False)
    assert "it does not speak as 'fedtide serve' does (the server does not ask who this is)" in lines[0]


def test_a_server_that_ends_without_a_word_is_tried_again(federation, rome, monkeypatch):
    monkeypatch.setattr(lines, "MINUTE", 0.0)
    streams = itertools.count()

    async def script(server):
        if next(streams) == 2:
            await server.say(Message("over"))

    async def play():
        said, over = [], []
        made = Server(federation, script)
        async with serving(federation.authority, made.talk) as port:
            async with asyncio.timeout(10.0):
                over.append(await Line(elsewhere(rome, port), echo, said.append).run())
        return said, made.streams

    said, count = run(play())
    assert count == 3
    assert [each.partition(" ")[0] for each in said] == [
        "connected",
        "server",
        "connected",
        "server",
        "connected",
        "the",
    ]


QUESTIONS = {
    "no seconds": Message("question", "1", {}, b"{}"),
    "seconds that are no number": Message("question", "1", {"seconds": "5"}, b"{}"),
    "seconds before now": Message("question", "1", {"seconds": -1}, b"{}"),
    "seconds without an end": Message("question", "1", {"seconds": float("inf")}, b"{}"),
    "no number of seconds": Message("question", "1", {"seconds": float("nan")}, b"{}"),
    "more than a year": Message("question", "1", {"seconds": 367 * 86400}, b"{}"),
    "very many seconds": Message("question", "1", {"seconds": 10**400}, b"{}"),
}


@pytest.mark.parametrize("case", QUESTIONS)
def test_a_question_that_does_not_say_how_long_it_may_take_ends_the_stream(federation, rome, case):
    asked = []

    async def script(server):
        await server.say(QUESTIONS[case])
        with suppress(asyncio.CancelledError):
            await server.hear()

    _, said = played(federation, rome, script, answer=lambda *question: asked.append(question) or (b"{}", b""))
    assert "a question does not say how long it may take" in said[1]
    assert not asked


def test_a_question_may_take_as_long_as_a_study_says(federation, rome):
    """And a file that cannot be made costs nothing."""
    asked = []

    async def script(server):
        await server.say(Message("question", "1", {"seconds": LONGEST}, b"{}"))
        await server.hear()

    def answer(*question):
        asked.append(question)
        return b"{}", b""

    played(federation, rome, script, answer=answer, file=federation.root / "nowhere" / "let-in")
    assert len(asked) == 1


@pytest.mark.parametrize("size", [{"payload": MOST + 1}, {"header": HEADER + 1}])
def test_a_question_that_is_too_large_ends_the_stream(federation, rome, size):
    async def script(server):
        await server.context.write(next(Message("question", "1", {"seconds": 5.0, **size}).pieces()))
        with suppress(asyncio.CancelledError, TimeoutError):
            await server.hear()

    _, said = played(federation, rome, script)
    assert "the server asks more at a time than a node takes" in said[1]


def test_questions_that_wait_may_have_so_many_bytes_together(federation, rome, monkeypatch):
    monkeypatch.setattr(lines, "MOST", 1000)
    wait = threading.Event()

    async def script(server):
        for name in "abc":
            await server.ask(name, bytes(400))
        with suppress(asyncio.CancelledError, TimeoutError):
            await server.hear()
        wait.set()

    _, said = played(federation, rome, script, answer=lambda *question: (wait.wait(5.0), (b"{}", b""))[1])
    assert "the server asks more at a time than a node takes" in said[1]


def test_a_question_that_is_dropped_is_not_answered(federation, rome):
    asked, wait = [], threading.Event()

    def answer(header, payload, seconds):
        asked.append(payload)
        wait.wait(5.0)
        return b"{}", payload

    async def script(server):
        for name in "abc":
            await server.ask(name, name.encode())
        await asyncio.sleep(0.1)
        for name in ("a", "b", "nothing"):
            await server.say(Message("drop", name))
        await asyncio.sleep(0.1)
        wait.set()
        server.heard = await server.hear()

    server, _ = played(federation, rome, script, answer=answer)
    assert server.heard.id == "c"
    assert asked == [b"a", b"c"]


def test_questions_without_an_end_end_the_stream(federation, rome, monkeypatch):
    monkeypatch.setattr(lines, "QUESTIONS", 50)
    wait = threading.Event()

    async def script(server):
        try:
            for server.count in range(10_000):
                await server.ask(str(server.count))
        finally:
            wait.set()

    server, said = played(federation, rome, script, answer=lambda *question: (wait.wait(5.0), (b"{}", b""))[1])
    assert server.count < 9999
    assert any("tries again" in each for each in said)


def test_a_question_that_comes_twice_while_it_is_at_work_is_worked_on_once(federation, rome):
    """And again after its answer it is answered again: that answer may have been lost."""
    asked, wait = [], threading.Event()

    def answer(header, payload, seconds):
        asked.append(payload)
        wait.wait(5.0)
        return b"{}", payload * 2

    async def script(server):
        await server.ask("1", b"a")
        await server.ask("2", b"b")
        for _ in range(3):
            await server.ask("1", b"a")
            await server.ask("2", b"b")
        await asyncio.sleep(0.2)
        wait.set()
        server.heard = [await server.hear() for _ in range(2)]
        await server.ask("1", b"c")
        server.heard.append(await server.hear())
        await server.say(Message("over"))

    server, _ = played(federation, rome, script, answer=answer)
    assert asked == [b"a", b"b", b"c"]
    assert [(each.id, each.payload) for each in server.heard] == [("1", b"aa"), ("2", b"bb"), ("1", b"cc")]


def test_a_question_whose_time_is_over_is_not_worked_on(federation, rome):
    asked = []

    async def script(server):
        await server.ask("1", seconds=0)
        await server.ask("2", b"b")
        assert (await server.hear()).id == "2"

    played(federation, rome, script, answer=lambda header, payload, seconds: (asked.append(payload), (b"{}", b""))[1])
    assert asked == [b"b"]


@pytest.mark.parametrize(
    ("error", "words"),
    [(Failed("late: no answer in time"), "late: no answer in time"), (Failed("x" * 999), "x" * 300),
     (MemoryError(), "failed: MemoryError"), (OSError("a secret"), "failed: OSError")],
)  # fmt: skip
def test_whatever_goes_wrong_with_a_question_the_next_one_is_answered(federation, rome, error, words):
    """The server is told what kind of error it was, and no more; the node's owner is told the rest."""

    def answer(header, payload, seconds):
        if payload == b"bad":
            raise error
        return b"{}", b"good"

    async def script(server):
        await server.ask("1", b"bad")
        await server.ask("2")
        server.heard = [await server.hear() for _ in range(2)]

    server, said = played(federation, rome, script, answer=answer)
    assert server.heard[0].extra == {"error": words}
    assert server.heard[1].payload == b"good"
    assert any("a secret" in each for each in said) == isinstance(error, OSError)


def test_an_answer_goes_out_on_the_stream_that_there_is_then(federation, rome):
    """The one on which its question came is gone."""
    asked, wait, streams = [], threading.Event(), itertools.count()

    def answer(header, payload, seconds):
        asked.append(payload)
        wait.wait(5.0)
        return b"{}", payload

    heard = []

    async def script(server):
        number = next(streams)
        await server.ask("1", b"once")
        if number < 2:
            return
        await asyncio.sleep(0.1)
        wait.set()
        heard.append(await server.hear())
        await server.say(Message("over"))

    async def play():
        made = Server(federation, script)
        async with serving(federation.authority, made.talk) as port, asyncio.timeout(10.0):
            await Line(elsewhere(rome, port), answer, lambda text: None).run()

    run(play())
    assert asked == [b"once"]
    assert (heard[0].id, heard[0].payload) == ("1", b"once")


# -- what a server may say of a node, and what the node says then -----------------------------------------------------


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("its key is that of oslo", "its key is admitted there as that of"),
        ("another study is served here (x); ask", "the server plays another study than that of this ticket"),
        ("it speaks version 1 of the protocol", "the server has another version of fedtide: install the same"),
    ],
)
def test_what_nothing_at_the_server_mends_ends_a_node(federation, rome, said, words):
    import grpc

    async def script(server):
        await server.context.abort(grpc.StatusCode.UNAUTHENTICATED, said)

    async def play():
        made = Server(federation, script, let_in=False)
        async with serving(federation.authority, made.talk) as port, asyncio.timeout(10.0):
            await Line(elsewhere(rome, port), echo, lambda text: None).run()

    with pytest.raises(FedtideError) as error:
        run(play())
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_study_that_is_over_ends_a_node_that_just_comes(federation, monkeypatch):
    come = threading.Event()
    shown = federation.carrier._introduced

    async def slowly(context):
        found = await shown(context)
        come.set()
        await asyncio.sleep(0.3)
        return found

    monkeypatch.setattr(federation.carrier, "_introduced", slowly)
    first, last = federation.known("oslo"), federation.known("rome")
    with Near(first) as one:
        until(lambda: "oslo" in federation.carrier.present(), 20.0)
        come.clear()
        with Near(last) as two:
            assert come.wait(10.0)
            federation.carrier.finish()
            two.wait()
            one.wait()
    assert one.lines[-1] == two.lines[-1] == "the study is over"
    federation.serve()


@pytest.mark.parametrize(("best", "noted"), [(40, "40"), (None, None), (True, None), (-1, None), ("40", None)])
def test_the_last_word_of_a_server_says_which_model_was_best(federation, rome, tmp_path, best, noted):
    """A node that was judged with none has no use for it."""
    for folder in ("judged", "none"):
        until(lambda: "rome" not in federation.carrier.present(), 20.0)
        (tmp_path / "judged").mkdir(exist_ok=True)
        with Near(rome, judged=tmp_path / folder) as node:
            until(lambda: "rome" in federation.carrier.present(), 20.0)
            federation.carrier.finish(best=best)
            node.wait()
        federation.serve()
    found = tmp_path / "judged" / "best"
    assert (found.read_text() if found.exists() else None) == noted
    assert not (tmp_path / "none").exists()


# -- what a node is told of its server before it starts ---------------------------------------------------------------


async def first_words(known):
    """What a node says first of its server, or the error with which it ends; it is one line."""
    words = asyncio.get_running_loop().create_future()
    line = asyncio.create_task(Line(known, echo, lambda text: words.done() or words.set_result(text)).run())
    await asyncio.wait({line, words}, return_when=asyncio.FIRST_COMPLETED, timeout=10.0)
    line.cancel()
    (ended,) = await asyncio.gather(line, return_exceptions=True)
    found = f"error: {ended}" if isinstance(ended, FedtideError) else words.result()
    assert "\n" not in found
    return found.replace(known.address, "HERE")


def looked(known):
    return run(first_words(known))


GOES_ON = "; this node tries again"


def certified(folder, host="127.0.0.1", valid=timedelta(days=1)):
    """A folder with another certificate of its authority."""
    authority = load_pem_private_key((folder / "ca.key").read_bytes(), None)
    for name in ("server.key", "server.crt"):
        (folder / name).unlink()
    certificates._write_pair(folder, "server", authority, host, valid)
    return folder


@pytest.fixture
def folder(federation, tmp_path):
    shutil.copytree(federation.authority, tmp_path / "authority")
    return tmp_path / "authority"


async def never(unused, context):
    await context.abort(None)


def looked_at(folder, known, host="127.0.0.1", **how):
    """What is said of a server with the certificate of a folder."""

    async def play():
        async with serving(folder, never, host, **how) as port:
            return await first_words(replace(known, address=f"{host}:{port}"))

    return run(play())


def test_a_certificate_of_another_authority_is_an_error(rome, tmp_path):
    certificates.make_authority(tmp_path, "127.0.0.1:1")
    assert looked_at(tmp_path, rome) == (
        "error: server HERE: the server's certificate is of another authority than the ticket's: ask its owner for a "
        "new ticket"
    )


def test_a_certificate_that_has_ended_is_an_error(folder, rome):
    assert looked_at(certified(folder, valid=timedelta(seconds=-1)), rome) == (
        "error: server HERE: the server's certificate is not valid now: set this machine's clock, or ask the server's "
        "owner for a new one"
    )


def test_a_certificate_for_another_host_is_an_error(folder, rome):
    assert looked_at(certified(folder), rome, "127.0.0.2") == (
        "error: server HERE: the server's certificate is for another address than this one: ask its owner for a new "
        "ticket"
    )


def test_a_node_that_runs_does_not_say_who_it_is_to_another_server(folder, federation, rome, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    certificates.make_authority(other, "127.0.0.1:1")
    heard = []

    async def talk(unused, context):
        heard.append(context)

    async def play():
        async with serving(other, talk) as port:
            return await first_words(elsewhere(rome, port))

    assert "the server's certificate is of another authority than the ticket's" in run(play())
    assert heard == []


async def http(reader, writer):
    with suppress(OSError):
        await reader.read(1000)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
    writer.close()


async def hang_up(reader, writer):
    writer.close()


async def reset(reader, writer):
    writer.transport.abort()


async def silent(reader, writer):
    with suppress(OSError):
        await reader.read()
        await asyncio.sleep(3.0)
    writer.close()


@pytest.mark.parametrize(
    ("take", "words"),
    [
        (http, "error: server HERE: it does not speak TLS: something else than 'fedtide serve' listens there; ask its"),
        (hang_up, "server HERE: the server closed the connection"),
        (reset, "server HERE: the server closed the connection"),
        (silent, "server HERE: the server does not let this node in, and does not say why; this node tries again"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_something_else_that_listens_there_is_told(rome, take, words, monkeypatch):
    monkeypatch.setattr(lines, "INTRODUCTION", 1.0)

    async def play():
        async with listening(take) as port:
            return await first_words(elsewhere(rome, port))

    found = run(play())
    assert found.startswith(words)
    assert "\n" not in found


def test_nobody_there_is_told(rome):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        found = looked(elsewhere(rome, taken.getsockname()[1]))
    assert found == "server HERE: it cannot be reached now (is it up, and is its address right?)" + GOES_ON


def test_a_server_that_stays_away_is_told_once(rome, monkeypatch):
    said, reasons = [], ["Socket closed", "failed to connect to all addresses", "GOAWAY", "another study is served"]

    async def talk(self):
        raise lines.Closed(reasons.pop(0))

    monkeypatch.setattr(Line, "_talk", talk)
    monkeypatch.setattr(lines, "SHORTEST", 0.0)
    with pytest.raises(FedtideError, match="another study"):
        run(Line(rome, echo, said.append).run())
    (line,) = said
    assert "the server closed the connection" in line


def test_a_node_that_said_that_it_is_away_says_that_it_is_back(rome):
    said = []
    line = Line(rome, echo, said.append)
    for news in ("connected", "away", "away", "connected", "away", "connected"):
        line._tell(news, news)
    assert said == ["connected", "away", "connected"]  # the second loss came within a minute of the first


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            "address lookup failed for a.org:8300 os_error: Name or service not known syscall: getaddrinfo",
            "no such host",
        ),
        ("C-ares status is not ARES_SUCCESS qtype=A name=a.org: Domain name not found", "no such host"),
        ("errors resolving a.org:8300: [field:hostname lookup error: Timeout while contacting DNS servers]", "look up"),
        ("address lookup failed os_error: Temporary failure in name resolution: DNS resolution failed", "look up"),
    ],
)
def test_a_host_that_is_not_there_and_a_network_that_is_not_there_are_told_apart(said, words):
    found = meaning(said)
    assert words in found.line
    assert (found.kind == "wrong") == (words == "no such host")


def test_no_such_host_is_an_error(rome):
    found = looked(replace(rome, address="no.such.host.invalid:8300"))
    assert found in (
        "error: server HERE: this machine finds no such host; ask its owner for it",
        "server HERE: it cannot be reached now (is it up, and is its address right?)" + GOES_ON,  # within the seconds
        "server HERE: this machine cannot look up where that is (is it connected?)" + GOES_ON,
    )


# -- proxies ----------------------------------------------------------------------------------------------------------


def test_a_node_goes_through_the_proxy_of_its_machine(federation, rome, monkeypatch):
    with Between(connect=True) as proxy:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.port}")
        assert looked(rome) == "connected to the server at HERE"
        with near(federation, "rome"):
            found = federation.ask("rome", {"a": 1}, bytes(3_000_000))
            assert (found.error, len(found.payload)) == ("", 3_000_000)
        assert set(proxy.asked) == {f"CONNECT 127.0.0.1:{federation.port} HTTP/1.1"}


@pytest.mark.parametrize(
    "refuse", ["HTTP/1.1 403 Forbidden", "HTTP/1.1 407 Proxy Authentication Required", "HTTP/1.1 503 Down"]
)
def test_a_proxy_that_refuses_is_told(rome, monkeypatch, refuse):
    with Between(connect=True, refuse=refuse) as proxy:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.port}")
        found = looked(rome)
    assert found == (
        "server HERE: the proxy of your environment does not let this node through: see what it allows" + GOES_ON
    )


# -- causes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        "",
        "None",
        "x" * 10_000,
        "StatusCode.UNKNOWN \n\x1b[31m",
        "its key is that of \n",
        "its key is that of \x1b",
        "\ud800",
    ],
)
def test_whatever_is_said_there_is_one_line_of_ours(said):
    found = meaning(said)
    assert "\n" not in found.line
    assert found.line in [cause.line for cause in CAUSES]
