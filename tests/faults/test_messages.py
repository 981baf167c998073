"""Messages and answers of strangers, valid ones with a change: refused in one line or right, never another error."""

import json
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedtide.core import sums
from fedtide.core.base import Answer, Moment, Shard, Slotted, Weighted, Weights
from fedtide.core.codec import decode_message, from_bytes, parse, to_bytes
from fedtide.core.errors import FedtideError
from fedtide.core.loop import begin, play
from fedtide.core.trees import all_finite, leaves, same
from fedtide.evaluate.metrics import METRICS
from fedtide.fleets.ask import ABSTAINED, NOT_FINITE
from fedtide.fleets.scoring import concat_scores
from fedtide.fleets.totals import Block, join
from fedtide.remote.asks import ANSWERED, REFUSED
from fedtide.remote.messages import Response
from fedtide.remote.node_answers import Received, SentQuestion, read
from fedtide.remote.offline import near_fleet
from fedtide.wire.answer_schema import Schemas, made_up, misfit
from helpers.carriers import host, lying

from .conftest import limited

EACH = 250
"""Tries in one test."""

HEAVIEST = 50.0
FEW = Shard(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), torch.zeros(1))
MODEL = Weights({"0.weight": torch.ones(3, 4), "0.bias": torch.zeros(3)}, {"mean": torch.ones(3)})
ANSWERS: tuple[Answer, ...] = (
    Answer({"delta": Weighted(MODEL, 20.0), "loss": Weighted(0.5, 20)}),
    Answer({"delta": Slotted({1: Weighted(MODEL, 3.0)}, 3), "members": Weighted(torch.eye(3)[1].double(), 1.0)}),
    Answer({"reports": Weighted(1.0)}, {"pi": torch.ones(5), "count": torch.tensor(7)}),
    Answer(Weighted((torch.ones(2, dtype=torch.bfloat16), [1, 2.5]), 4)),
)
SCHEMAS = [
    Schemas({"ask": lambda *_, answer=answer: answer}, made_up(FEW, 2)).of(
        "ask", None, Moment(0, 1), tuple(answer.rows)
    )  # type: ignore[arg-type]
    for answer in ANSWERS
]
MESSAGES = [to_bytes({"total": answer.total, "rows": dict(answer.rows)}) for answer in ANSWERS]
WORDS = r"""[ ] { } " \ , : -1 0 1e30 NaN true null array class dict list slots weight F64 C64 F32 [0] [-1] arrays tree
fedtide.core.base:Weighted builtins:eval 999999999999999999999999 [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[ é
""".encode().split()
ODD = (
    None, True, 0, 1, -1, 2, 3, 4, 12, 51, 10**9, 2**63 - 1, 2**70, 0.5, 1e30, -1e30, "", "a", "nan", "inf", [], {},
    [0], [1, 1], [0, 4], "F32", "F64", "BOOL", "C64", {"float": "nan"}, {"float": "inf"}, {"dict": []}, {"list": []},
    {"tuple": [1]}, {"F32": [3]}, {"F32": [-1]}, {"U8": [2]}, {"class": "os:system", "fields": {}},
    {"class": "fedtide.core.base:Weighted", "fields": {"value": 1, "weight": 1}},
    {"class": "fedtide.core.base:Slotted", "fields": {"parts": {"dict": []}, "slots": 10**9}},
)  # fmt: skip
"""Values in place of others."""


def changed(data: bytes, draw: random.Random) -> bytes:
    """A message with one change, most often in the header, whose length mostly stays right."""
    length = int.from_bytes(data[:8], "little")
    kind = draw.random()
    if kind < 0.6:
        return replanned(data, draw)
    if kind < 0.65:
        odd = draw.choice([0, 1, length - 1, length + 1, len(data), 2**32, 2**63, 2**64 - 1])
        return min(max(odd, 0), 2**64 - 1).to_bytes(8, "little") + data[8:]
    if kind < 0.75:
        return garbled(data, draw)
    header = garbled(data[8 : 8 + length], draw)
    return (len(header) if kind < 0.95 else length).to_bytes(8, "little") + header + data[8 + length :]


def replanned(data: bytes, draw: random.Random) -> bytes:
    """A message whose header has another value or key and is JSON still; or other numbers."""
    length = int.from_bytes(data[:8], "little")
    numbers = bytearray(data[8 + length :])
    try:
        header = json.loads(data[8 : 8 + length])
        part = draw.choice(["arrays", *["tree"] * 4])
        header[part]
    except (ValueError, LookupError, TypeError):  # changed before
        return garbled(data, draw)
    where = draw.randrange(8)
    if where == 0 and numbers:
        numbers[draw.randrange(len(numbers))] = draw.choice([0, 1, 63, 127, 128, 191, 255])
    elif where < 7:
        header[part] = altered(header[part], draw)
    else:
        header = altered(header, draw)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + numbers


def altered(value: Any, draw: random.Random) -> Any:
    """A value with one of the values in it replaced, removed, repeated or renamed."""
    inside = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if not inside or draw.random() < 0.1:
        return draw.choice(ODD)
    key = draw.choice(inside)
    kind = draw.randrange(12)
    if kind == 0:
        del value[key]
    elif kind == 1 and isinstance(value, list):
        value.insert(key, value[key])
    elif kind == 1:
        value[draw.choice(["a", "more", "dict", "weight", ""])] = value[key]
    elif kind == 2 and isinstance(value, list):
        draw.shuffle(value)
    else:
        value[key] = altered(value[key], draw)
    return value


def garbled(text: bytes, draw: random.Random) -> bytes:
    """Bytes with one change."""
    made = bytearray(text)
    at = draw.randrange(len(made) or 1)
    end = min(at + draw.choice([1, 1, 2, 4, 8, 40]), len(made))
    kind = draw.randrange(7)
    if kind == 0 and at < len(made):
        made[at] ^= 1 << draw.randrange(8)
    elif kind == 1:
        made[at:end] = draw.randbytes(end - at)
    elif kind == 2:
        made[at:end] = b""
    elif kind == 3:
        made[at:at] = draw.choice(WORDS)
    elif kind == 4:
        made[at:end] = draw.choice(WORDS)
    elif kind == 5:
        source = draw.randrange(len(made) or 1)
        made[at:at] = made[source : source + draw.randrange(1, 60)]
    else:
        del made[at:]
    return bytes(made)


def test_a_changed_message_is_refused_or_right(seed, tried: Counter[str]):
    draw = random.Random(seed)
    for _ in range(EACH):
        place = draw.randrange(len(MESSAGES))
        data = MESSAGES[place]
        for _ in range(draw.choice([1, 1, 1, 2, 3])):
            data = changed(data, draw)
        tried["messages"] += 1
        with limited():
            tried[f"messages: {fate(data, place)}"] += 1


test_a_changed_message_is_refused_or_right.each = EACH  # type: ignore[attr-defined]


def one_line(error: str, fate: str) -> str:
    assert "\n" not in error
    assert len(error) < 1000
    return fate


def fate(data: bytes, place: int) -> str:
    """What comes of a message; what is taken is what the codec reads, and can be summed."""
    try:
        tree = decode_message(data)
    except FedtideError as error:
        return one_line(str(error), "refused as bytes")
    assert same(tree, from_bytes(data))
    why = misfit(SCHEMAS[place], tree, HEAVIEST)
    if why is not None:
        return one_line(why, "refused as an answer")
    honest = sums.add(None, ANSWERS[place].total)
    total = sums.finish(sums.add(honest, tree["total"]))
    assert all(bool(leaf.isfinite().all()) for leaf in leaves(total) if isinstance(leaf, torch.Tensor))
    for name, row in ANSWERS[place].rows.items():
        torch.stack([row, tree["rows"][name]])
    return "the same" if data == MESSAGES[place] else "other numbers, which nobody can tell"


HEADER: dict[str, Any] = {
    "round": 3, "question": "train", "version": [2, 0], "clients": [1, 4], "counted": {"1": [1, 0], "4": None},
    "moment": {"round": 3, "rounds": 10, "seconds": 3.5},
}  # fmt: skip


def test_changed_json_is_refused_or_json(seed, tried: Counter[str]):
    draw = random.Random(seed)
    text = json.dumps(HEADER).encode()
    for _ in range(EACH):
        data = garbled(text, draw)
        tried["JSON headers"] += 1
        try:
            assert parse(data, 1000, "header") == json.loads(data)
        except FedtideError as error:
            tried[one_line(str(error), "JSON headers: refused")] += 1


test_changed_json_is_refused_or_json.each = EACH  # type: ignore[attr-defined]


# -- answers of nodes -----------------------------------------------------------------------------------------------

METHODS = ("fedavg", "ifca safe", "fielding", "aem ensemble", "fedtem")
LARGE = 1e6
COUNTED = (ANSWERED, ABSTAINED, NOT_FINITE)


@pytest.fixture(scope="module", params=METHODS)
def heard(request, tmp_path_factory) -> list[tuple[SentQuestion, Response]]:
    """What nodes answer in two rounds and an evaluation, with the questions."""
    made = host(request.param)
    found: list[tuple[SentQuestion, Response]] = []
    fleet: Any = None

    def noted(header: Any, response: Response) -> Response:
        found.append((fleet._mail._sent[response.id], response))
        return response

    fleet = near_fleet(made, 4, tmp_path_factory.mktemp("nodes"), lying(noted))
    start = begin(made.algorithm, fleet, seed=0, rounds=2)
    step = list(play(made.algorithm, fleet, start, seed=0, rounds=2))[-1]
    payload, slot = made.algorithm.serve(step.state, fleet.clients)
    fleet.score(payload, fleet.clients, slot=slot)
    assert {sent.post for sent, _ in found} == {"ask", "score"}
    return found


def test_a_changed_answer_is_refused_or_right(heard, seed, tried: Counter[str]):
    draw = random.Random(seed)
    for _ in range(EACH // 5):
        sent, response = draw.choice(heard)
        other = mutated(response, draw)
        tried["answers of nodes"] += 1
        with limited():
            came = read(sent, other, LARGE)
            assert list(came) == sent.ask.clients.tolist()
            counted(sent, came, read(sent, response, LARGE))
        for each in came.values():
            assert each.word in COUNTED or each.word.startswith(REFUSED)
            assert "\n" not in each.word
            tried[f"answers of nodes: {each.word.partition(':')[0]}"] += 1


test_a_changed_answer_is_refused_or_right.each = EACH  # type: ignore[attr-defined]


def mutated(response: Response, draw: random.Random) -> Response:
    kind = draw.random()
    if kind < 0.3:
        header = altered(json.loads(json.dumps(response.header)), draw)
        return replace(response, header=header)
    payload = response.payload
    for _ in range(draw.choice([1, 1, 2])):
        payload = changed(payload, draw) if len(payload) > 8 else draw.randbytes(draw.randrange(40))
    return replace(response, payload=payload)


def counted(sent: SentQuestion, came: dict[int, Received], honest: dict[int, Received]) -> None:
    """Add up, or judge, what was taken, together with what honest clients say."""
    if sent.post == "score":
        told = [each.content for heard in (honest, came) for each in heard.values() if each.word == ANSWERED]
        scores = concat_scores(told)
        assert scores.clients.dtype == next(iter(told)).clients.dtype
        for metric in METRICS:
            metric.of(scores)
        return
    blocks = []
    for heard in (honest, came):
        block = Block(sent.ask)
        for client, each in heard.items():
            if each.word == ANSWERED:
                block.count(client, Answer(each.content["total"], each.content["rows"]))
        blocks.append(block.result())
    assert all_finite(join(blocks, len(blocks)).total)


def test_a_run_with_a_lying_node_goes_on(seed, tmp_path, tried: Counter[str]):
    draw = random.Random(seed)
    name = METHODS[seed % len(METHODS)]
    made = host(name)
    fleet = near_fleet(made, 4, tmp_path, lying(lambda header, r: mutated(r, draw), "node-1"))
    tried["runs with a lying node"] += 1
    with limited():
        start = begin(made.algorithm, fleet, seed=0, rounds=3)
        steps = list(play(made.algorithm, fleet, start, seed=0, rounds=3))
        assert all_finite(steps[-1].state)
        fleet.begin(Moment(2, 3))
        payload, slot = made.algorithm.serve(steps[-1].state, fleet.clients)
        for part in ("test", "val"):
            scores = fleet.score(payload, fleet.clients, slot=slot, part=part)
            assert scores.clients.tolist() == fleet.clients.tolist()


test_a_run_with_a_lying_node_goes_on.each = 10  # type: ignore[attr-defined]
