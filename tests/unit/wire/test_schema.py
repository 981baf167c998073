"""Answers of strangers: what honest clients send fits, and what section by section does not is named in one line."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fedtide.core.base import Answer, Moment, Shard, Slotted, Weighted, Weights
from fedtide.core.codec import to_bytes
from fedtide.core.trees import same
from fedtide.runs.build import host_of
from fedtide.wire.answer_schema import Schema, Schemas, made_up, misfit
from helpers.toys import played, toy

NOW = Moment(0, 10)
HEAVIEST = 100.0


def few(**columns: Any) -> Shard:
    return Shard(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64), torch.arange(2), **columns)


def learned(total: Any, rows: Any = None) -> Schema:
    def work(*_: Any) -> Answer:
        return Answer(total, rows or {})

    return Schemas({"ask": work}, made_up(few(), 3)).of("ask", None, NOW, tuple(rows or {}))


def sent(total: Any, rows: Any = None) -> dict[str, Any]:
    return {"total": total, "rows": rows or {}}


# 'shifted' of FlexCFL answers only where another question has left memory behind, and labels have changed since.
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "ifca safe", "fielding pooled", "pfedem", "flexcfl drifts"])
def test_what_honest_clients_send_fits(name):
    experiment = toy(name)
    host = host_of(experiment, experiment.method[0], 0)
    schemas, seen = Schemas(host.algorithm.works, made_up(*host.population.few())), set()

    def compared(question: str, work: Any) -> Any:
        def run(payload: Any, memory: Any, shard: Shard, moment: Moment, rng: Any) -> Answer | None:
            answer = work(payload, memory, shard, moment, rng)
            if answer is None:
                return None
            schema = schemas.of(question, payload, moment, tuple(answer.rows))
            answer = work(payload, memory, shard, moment, rng)  # an update may lie in storage that was written over
            whole = sent(answer.total, dict(answer.rows))
            assert misfit(schema, whole, HEAVIEST) is None
            assert len(to_bytes({"1234567": whole})) <= schema.bytes
            seen.add(question)
            return answer

        return run

    works = {question: compared(question, work) for question, work in host.algorithm.works.items()}
    watched = played(experiment, host=replace(host, algorithm=replace(host.algorithm, works=works)))
    assert same(watched.state, played(experiment).state), "learning changes what is played"
    assert "train" in seen


WEIGHTS = Weights({"w": torch.zeros(3, 2)}, {"mean": torch.zeros(2)})
PLAIN = {"delta": Weighted(WEIGHTS, 5.0), "loss": Weighted(0.5, 5)}


def delta(weights: Any, weight: Any = 5.0) -> dict[str, Any]:
    return {"delta": Weighted(weights, weight)}


@pytest.mark.parametrize(
    ("total", "line"),
    [
        (delta(Weights({"w": torch.zeros(1, 1)}, {"mean": torch.zeros(2)})),
         "total.delta.params.w: found float32 (1, 1), allowed: float32 (3, 2)"),
        (delta(Weights({"w": torch.zeros(3, 2, dtype=torch.complex64)}, {"mean": torch.zeros(2)})),
         "total.delta.params.w: found complex64 (3, 2), allowed: float32 (3, 2)"),
        (delta(Weights({"w": torch.zeros(3, 2).double()}, {"mean": torch.zeros(2)})),
         "total.delta.params.w: found float64 (3, 2), allowed: float32 (3, 2)"),
        (delta(Weights({"w": torch.full((3, 2), torch.nan)}, {"mean": torch.zeros(2)})),
         "total.delta.params.w: found a number that is not finite, allowed: finite numbers"),
        (delta(Weights({"w": torch.zeros(3, 2)})), "total.delta.buffers.mean: found nothing, allowed: float32 (2,)"),
        (delta(Weights({"w": 1.0}, {"mean": torch.zeros(2)})),
         "total.delta.params.w: found 1.0, allowed: float32 (3, 2)"),
        (delta({"params": {}, "buffers": {}}), "total.delta: found dict, allowed: Weights"),
        (delta(WEIGHTS, 1e30), "total.delta: found weight 1e+30, allowed: 0 to 100"),
        (delta(WEIGHTS, -1.0), "total.delta: found weight -1, allowed: 0 to 100"),
        (delta(WEIGHTS, float("nan")), "total.delta: found weight nan, allowed: 0 to 100"),
        (delta(WEIGHTS, True), "total.delta: found weight True, allowed: 0 to 100"),
        (delta(WEIGHTS, "5"), "total.delta: found weight '5', allowed: 0 to 100"),
        (delta(WEIGHTS, torch.tensor(5.0)), "total.delta: found weight float32 (), allowed: 0 to 100"),
        (delta(WEIGHTS, 10**400), "total.delta: found weight 1000"),
        ({"loss": Weighted(True, 5)}, "total.loss: found True, allowed: a finite number"),
        ({"loss": Weighted(float("inf"), 5)}, "total.loss: found inf, allowed: a finite number"),
        ({"loss": Weighted(torch.zeros(()), 5)}, "total.loss: found float32 (), allowed: a finite number"),
        ({"loss": 0.5}, "total.loss: found 0.5, allowed: Weighted"),
        ({"loss": None}, "total.loss: found None, allowed: Weighted"),
        ({"delta": Slotted({0: Weighted(WEIGHTS)}, 1)}, "total.delta: found Slotted, allowed: Weighted"),
        ({"more": Weighted(0.0)}, "total.more: found a key, allowed: none but delta, loss"),
        ([], "total: found list, allowed: dict"),
        (None, "total: found None, allowed: dict"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(total, line):
    found = misfit(learned(PLAIN), sent(total), HEAVIEST)
    assert found is not None
    assert found.startswith(line)
    assert "\n" not in found
    assert len(found) < 400


SLOTS = {"delta": Slotted({1: Weighted(torch.zeros(2), 3.0)}, 3)}


@pytest.mark.parametrize(
    ("slotted", "line"),
    [
        (Slotted({0: Weighted(torch.zeros(2))}, 10**9), "total.delta: found 1000000000 slots, allowed: 3"),
        (Slotted({3: Weighted(torch.zeros(2))}, 3), "total.delta: found slot 3, allowed: 0 to 2"),
        (Slotted({-1: Weighted(torch.zeros(2))}, 3), "total.delta: found slot -1, allowed: 0 to 2"),
        (Slotted({"0": Weighted(torch.zeros(2))}, 3), "total.delta: found slot '0', allowed: 0 to 2"),
        (Slotted({True: Weighted(torch.zeros(2))}, 3), "total.delta: found slot True, allowed: 0 to 2"),
        (Slotted({2: Weighted(torch.zeros(1))}, 3), "total.delta.2: found float32 (1,), allowed: float32 (2,)"),
        (Slotted([], 3), "total.delta: found list, allowed: parts by slot"),
        (Slotted({}, True), "total.delta: found True slots, allowed: 3"),
        (Weighted(torch.zeros(2)), "total.delta: found Weighted, allowed: Slotted"),
    ],
)
def test_slots_that_do_not_fit_are_named(slotted, line):
    assert misfit(learned(SLOTS), sent({"delta": slotted}), HEAVIEST) == line


@pytest.mark.parametrize(
    ("total", "line"),
    [
        ({}, "total.delta: found nothing, allowed: Weighted"),
        ({"delta": Weighted(WEIGHTS)}, "total.loss: found nothing, allowed: Weighted"),
        ({"delta": Weighted(Weights({"w": torch.full((3, 2), 3e38)}, {"mean": torch.zeros(2)})), "loss": Weighted(0.0)},
         "total.delta.params.w: found a number beyond 9007199254740992, allowed: smaller ones"),
        ({**PLAIN, "loss": Weighted(-1e16)}, "total.loss: found -1e+16, allowed: at most 9007199254740992"),
    ],
)  # fmt: skip
def test_what_an_algorithm_cannot_do_without_or_add_is_refused(total, line):
    assert misfit(learned(PLAIN), sent(total), HEAVIEST) == line


def test_what_some_clients_leave_out_may_be_left_out():
    def work(payload: Any, memory: Any, shard: Shard, *_: Any) -> Answer:
        total = {"loss": Weighted(0.5)}
        if shard.val is not None:
            total["val"] = Weighted(0.5)
        if memory is not None:
            total["past"] = Weighted(torch.ones(2))
        return Answer(total, memory={"seen": torch.ones(1)})

    schema = Schemas({"ask": work}, made_up(few(), 3)).of("ask", None, NOW)
    assert schema.optional == {"total.val", "total.past"}
    assert misfit(schema, sent({"loss": Weighted(0.5)}), HEAVIEST) is None
    assert misfit(schema, sent({"past": Weighted(torch.ones(2))}), HEAVIEST) == (
        "total.loss: found nothing, allowed: Weighted"
    )


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (sent({}), "rows.pi: found nothing, allowed: float32 (2,)"),
        (sent({}, {"pi": torch.zeros(3)}), "rows.pi: found float32 (3,), allowed: float32 (2,)"),
        (sent({}, {"pi": torch.zeros(2), "x": torch.zeros(2)}), "rows.x: found a key, allowed: none but pi"),
        ({"total": {}}, "rows: found nothing, allowed: dict"),
        ({"total": {}, "rows": {}, "notes": 1}, "notes: found a key, allowed: none but total, rows"),
        (None, "the answer: found None, allowed: dict"),
        (torch.zeros(1), "the answer: found float32 (1,), allowed: dict"),
    ],
)
def test_rows_are_all_that_were_asked_for(answer, line):
    assert misfit(learned({}, {"pi": torch.zeros(2)}), answer, HEAVIEST) == line


@pytest.mark.parametrize(
    ("name", "honest", "lie", "line"),
    [
        ("n", 100.0, -7.0, "found -7, allowed: 0 or more"),
        ("rows", 0.0, 101.0, "found 101, allowed: 0 to 100"),
        ("weight", 1.0, 2.0**53, "found 9.0072e+15, allowed: 0 to 100"),
        ("counts", 5.0, -1e-9, "found -1e-09, allowed: 0 or more"),
        ("var", 1e9, -1.0, "found -1, allowed: 0 or more"),
        ("spreads", 0.0, -1.0, "found -1, allowed: 0 or more"),
    ],
)
def test_shown_weights_and_squares_are_held_to_what_they_can_be(name, honest, lie, line):
    for shape in ((), (2, 3)):
        schema = learned({}, {name: torch.zeros(shape)})
        row = torch.full(shape, honest)
        assert misfit(schema, sent({}, {name: row}), HEAVIEST) is None
        row.view(-1)[-1] = lie
        assert misfit(schema, sent({}, {name: row}), HEAVIEST) == f"rows.{name}: {line}"


def test_a_client_may_train_on_more_samples_than_it_has_rows():
    schema = learned({}, {"count": torch.zeros(2)})
    assert misfit(schema, sent({}, {"count": torch.tensor([100.0, 500.0])}), HEAVIEST) is None
    assert misfit(schema, sent({}, {"count": torch.tensor([101.0, 5.0])}), HEAVIEST) is not None
    assert misfit(schema, sent({}, {"count": torch.tensor([5.0, -5.0])}), HEAVIEST) is not None


def test_a_schema_is_learned_once_for_payloads_that_look_alike():
    asked = []

    def work(payload: Any, *_: Any) -> Answer:
        asked.append(payload)
        return Answer({"w": Weighted(payload["w"])})

    schemas = Schemas({"ask": work}, made_up(few(), 3))
    for value in range(3):
        schemas.of("ask", {"w": torch.full((2,), value), "lr": 0.1 * value}, NOW)
    once = len(asked)
    schemas.of("ask", {"w": torch.zeros(3), "lr": 0.1}, NOW)
    assert len(asked) == 2 * once
