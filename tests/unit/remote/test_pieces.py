"""Messages in pieces: what is sent arrives, and what is no message is said to be none, at a bounded cost."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as some

from fedtide.remote.grpc import stream_protocol as pieces
from fedtide.remote.grpc.stream_protocol import HEAD, PIECE, Broken, Head, Message, next_message
from helpers.examples import examples

END = object()
WORDS = some.text(max_size=20)


def reading(sent):
    """Read pieces from a list, and how many were read."""
    left = list(sent)

    async def read():
        return left.pop(0) if left else END

    return read, left


def received(sent, keep=lambda head: True):
    """All messages in some pieces."""
    read, _ = reading(sent)

    async def all_of_them():
        found = []
        while (message := await next_message(read, END, keep)) is not None:
            found.append(message)
        return found

    return asyncio.run(all_of_them())


def head(**said):
    return json.dumps({"kind": "answer", "id": "1", "header": 0, "payload": 0} | said).encode()


@given(
    some.lists(
        some.builds(
            Message,
            kind=WORDS,
            id=WORDS,
            extra=some.dictionaries(some.sampled_from(("error", "seconds")), some.integers(0, 9) | WORDS, max_size=2),
            header=some.binary(max_size=50),
            payload=some.binary(max_size=50),
        ),
        max_size=4,
    ),
    some.integers(1, 30),
)
@examples(40)
def test_what_is_sent_in_pieces_of_any_size_arrives(messages, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE", size)
        sent = [piece for message in messages for piece in message.pieces()]
        assert received(sent) == messages


@pytest.mark.parametrize(
    "piece",
    [
        b"", b"\xff\xfe", b"null", b"[]", b"3", b'"answer"', b"{", b"{}", b'{"kind": "answer"}', b"[" * HEAD,
        b'{"a":' * 800, b" " * (HEAD + 1), head(x="x" * HEAD), b"9" * HEAD, b"NaN",
        head(kind=None), head(kind=1), head(id=1), head(id=["1"]), head(id="x" * 501),
        head(header=-1), head(payload=-1), head(payload=True), head(header=False), head(payload=1.0),
        head(payload="1"), head(payload=None), head(payload=2**40 + 1), head(payload=10**2000), head(header=[1]),
        b'{"kind": "answer", "id": "1", "header": 0, "payload": Infinity}',
        b'{"kind": "answer", "id": "1", "header": 0, "payload": NaN}',
        b'{"kind": "answer", "id": "1", "header": 0, "payload": 1e400}',
        head()[:-1] + b', "error": ' + b"[" * 900 + b"]" * 900 + b"}",
        head()[:-1] + b', "error": ' + b'{"a":' * 40 + b"0" + b"}" * 41,
    ],
    ids=range(35),
)  # fmt: skip
def test_a_head_that_is_none_is_broken(piece):
    with pytest.raises(Broken, match="the head of a message"):
        Head.of(piece)


@given(some.binary(max_size=300))
@examples(100)
def test_bytes_of_anyone_are_a_head_or_broken(content):
    try:
        found = Head.of(content)
    except Broken:
        return
    assert isinstance(found, Head)


@pytest.mark.parametrize("wrong", [[b"12"], [b"123", b"4", b"5"], [b"1234"], [b""], [b"123", b"4567"], [b"123", b""]])
def test_pieces_of_another_size_are_broken(wrong, monkeypatch):
    """None is smaller than it has to be: a message of very many small ones would cost more than it brings."""
    monkeypatch.setattr(pieces, "PIECE", 3)
    with pytest.raises(Broken, match="a piece has another size"):
        received([head(payload=5), *wrong])


@pytest.mark.parametrize("sent", [[], [b"1234"]])
def test_a_message_that_ends_in_the_middle_is_broken(sent, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 4)
    with pytest.raises(Broken, match="a message broke off"):
        received([head(header=4, payload=4), *sent])


def test_what_is_not_wanted_is_read_and_thrown_away(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 3)
    messages = [Message("answer", str(k), {}, b"abcd", b"x" * k) for k in range(7)]
    sent = [piece for message in messages for piece in message.pieces()]
    assert received(sent, lambda each: each.id in ("2", "5")) == [messages[2], messages[5]]


def test_who_may_not_send_so_much_is_not_read_to_the_end():
    class TooMuch(Exception):
        pass

    def keep(told):
        raise TooMuch if told.payload > 10 else AssertionError

    read, left = reading([head(payload=2**40), b"x" * PIECE, b"y"])
    with pytest.raises(TooMuch):
        asyncio.run(next_message(read, END, keep))
    assert len(left) == 2
