"""Answers of nodes, valid ones with a change: refused in words or added up and judged, and never another error."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from fedtide.core.base import Answer, Moment
from fedtide.core.loop import begin, play
from fedtide.core.trees import all_finite
from fedtide.evaluate.metrics import METRICS
from fedtide.fleets.scoring import concat_scores
from fedtide.fleets.totals import Block, join
from fedtide.remote.answers import Received, SentQuestion, read
from fedtide.remote.asks import ABSTAINED, ANSWERED, NOT_FINITE, REFUSED
from fedtide.remote.messages import Response
from fedtide.remote.offline import near_fleet
from helpers.carriers import host, lying

from .conftest import limited
from .test_messages import altered, changed

EACH = 250
"""Tries in one test."""

METHODS = ("fedavg", "ifca safe", "fielding", "aem ensemble", "fedtem")
HEAVIEST = 1e6
WORDS = (ANSWERED, ABSTAINED, NOT_FINITE)


@pytest.fixture(scope="module", params=METHODS)
def heard(request, tmp_path_factory) -> list[tuple[SentQuestion, Response, Any]]:
    """What nodes answer in two rounds and an evaluation, with the questions."""
    made = host(request.param)
    found: list[tuple[SentQuestion, Response, Any]] = []
    fleet: Any = None

    def noted(header: Any, response: Response) -> Response:
        found.append((fleet._mail._sent[response.id], response, None))
        return response

    fleet = near_fleet(made, 4, tmp_path_factory.mktemp("nodes"), lying(noted))
    start = begin(made.algorithm, fleet, seed=0, rounds=2)
    step = list(play(made.algorithm, fleet, start, seed=0, rounds=2))[-1]
    payload, slot = made.algorithm.serve(step.state, fleet.clients)
    fleet.score(payload, fleet.clients, slot=slot)
    assert {sent.post for sent, _, _ in found} == {"ask", "score"}
    return found


def test_a_changed_answer_is_refused_or_right(heard, seed, tried: Counter[str]):
    draw = random.Random(seed)
    for _ in range(EACH // 5):
        sent, response, _ = draw.choice(heard)
        other = mutated(response, draw)
        tried["answers of nodes"] += 1
        with limited():
            came = read(sent, other, HEAVIEST)
            assert list(came) == sent.ask.clients.tolist()
            counted(sent, came, read(sent, response, HEAVIEST))
        for each in came.values():
            assert each.word in WORDS or each.word.startswith(REFUSED)
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
