"""Local client forgetting by hand: who forgets what of whom, what is averaged, and what cannot be said."""

import json
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedtide as ft
from fedtide.algorithms.fedavg import fedavg
from fedtide.cohorts import Everyone
from fedtide.config import from_dict
from fedtide.config.schema import Forgetting
from fedtide.core.base import Algorithm, Answer, Moment, Prediction, Weighted, Weights, mean, shared_weights
from fedtide.core.errors import FedtideError
from fedtide.core.loop import begin, play
from fedtide.core.memory import MemoryStore
from fedtide.core.record import plain
from fedtide.data.population import Population
from fedtide.data.ragged import Ragged
from fedtide.data.rows import Rows
from fedtide.evaluate.probe import Probe, averages, owners_of, without_common_class
from fedtide.fleets.engines import Host, LocalEngine
from fedtide.fleets.simulated import SimulatedFleet
from fedtide.learn.local import LocalTrainer
from fedtide.learn.losses import CrossEntropy
from fedtide.learn.task import Task
from fedtide.runs.simulate import simulate
from helpers.fednova import fednova
from helpers.handmade import By, people

NAN = math.nan


def zeros() -> nn.Module:
    """Two classes from one feature, all weights zero: class 0 for everything, as the first of equals."""
    made = nn.Linear(1, 2)
    nn.init.zeros_(made.weight)
    nn.init.zeros_(made.bias)
    return made


def population(labels: list[list[int]], val: list[int] | None = None, classes: int = 2) -> Population:
    """Client i has training rows with these labels, and so many validation rows of its first; all features are 1."""
    val = [1] * len(labels) if val is None else val
    y, train, held = [], [], []
    for own, n in zip(labels, val, strict=True):
        train.append(list(range(len(y), len(y) + len(own))))
        y += own
        held.append(list(range(len(y), len(y) + n)))
        y += own[:1] * n
    parts = {"train": Ragged.of(train), "val": Ragged.of(held), "test": Ragged.empty(len(labels))}
    rows = Rows("by hand", torch.ones(len(y), 1), torch.tensor(y), classes)
    return Population(rows, parts, torch.zeros(len(labels), dtype=torch.int64), ("all",), len(labels))


def probed(who: Population, algorithm: Algorithm, *, rounds: int = 1, **settings: Any) -> dict[str, Any]:
    """What is said of the last of some rounds."""
    memory = MemoryStore(None)
    fleet = SimulatedFleet(who, LocalEngine(Host(algorithm, who, 0, memory)), replayable=range(rounds))
    start = begin(algorithm, fleet, seed=0, rounds=rounds)
    *_, last = play(algorithm, fleet, start, seed=0, rounds=rounds)
    return plain(Probe(fleet, **settings).line(last))


FEDAVG = fedavg(Task(zeros), LocalTrainer(lr=1.0, batch_size=0), cohort=Everyone())


@dataclass(frozen=True)
class _One:
    weights: Weights


@dataclass(frozen=True)
class _Two:
    weights: tuple[Weights, ...]


# -- golden ------------------------------------------------------------------------------------------------------------


def test_two_clients_without_a_common_class_by_hand():
    """Features 1, weights 0. A step of size 1 on rows of class c adds (onehot(c) - 1/2) to weight and bias: logits +-1.

    So A (class 0) answers 0 and B (class 1) answers 1, always. The received model answers 0: right for A, wrong for B.
    B forgets all that A needs, F = 1; A forgets nothing of B, which the received model did not know. Losses: log 2 of
    the received model, log(1 + exp(-2)) on own rows, log(1 + exp(2)) on the other's.
    """
    line = probed(population([[0, 0], [1]], val=[2, 1]), FEDAVG)
    right, wrong = math.log1p(math.exp(-2)), math.log1p(math.exp(2))
    assert {name: line[name] for name in ("round", "part", "models", "owners", "rows", "known")} == {
        "round": 0, "part": "val", "models": [0, 1], "owners": [0, 1], "rows": [2, 1], "known": True,
    }  # fmt: skip
    assert line["accuracy"] == {"received": [1.0, 0.0], "local": [[1.0, 0.0], [0.0, 1.0]]}
    assert line["forgetting"] == {
        "mean": 0.5, "own": -0.5, "models": [0.0, 1.0], "owners": [1.0, 0.0], "apart": 0.5,
    }  # fmt: skip
    assert line["loss"]["received"] == pytest.approx([math.log(2)] * 2, abs=1e-6)
    assert np.array(line["loss"]["local"]) == pytest.approx(np.array([[right, wrong], [wrong, right]]), abs=1e-6)
    increase = wrong - math.log(2)
    assert line["loss_increase"]["models"] == pytest.approx([increase] * 2, abs=1e-6)
    assert line["loss_increase"]["owners"] == pytest.approx([increase] * 2, abs=1e-6)
    assert line["loss_increase"]["mean"] == pytest.approx(increase, abs=1e-6)
    assert line["loss_increase"]["own"] == pytest.approx(right - math.log(2), abs=1e-6)


def test_it_is_the_received_model_of_the_round_that_is_compared():
    """After a round of both clients (2 rows of class 0, 1 of class 1) the mean bias favors 0 by 2/3: right for A."""
    line = probed(population([[0, 0], [1]]), FEDAVG, rounds=2)
    assert (line["round"], line["accuracy"]["received"]) == (1, [1.0, 0.0])
    assert line["loss"]["received"] == pytest.approx([math.log1p(math.exp(-2 / 3)), math.log1p(math.exp(2 / 3))])


def test_owners_may_be_others_than_the_participants():
    """Client 2 holds both classes and is judged though nobody asks it."""
    who = population([[0], [1], [1, 0]], val=[1, 1, 2])
    first_two = fedavg(Task(zeros), LocalTrainer(lr=1.0, batch_size=0), cohort=By(lambda rng, fleet: fleet.clients[:2]))
    line = probed(who, first_two, owners=torch.tensor([1, 2]))
    assert (line["models"], line["owners"], line["rows"]) == ([0, 1], [1, 2], [1, 2])
    assert line["accuracy"] == {"received": [0.0, 0.0], "local": [[0.0, 0.0], [1.0, 1.0]]}
    # The own cell is (1, 1): F = -1. The others are 0, 0 and -1. Nothing in common have (0, 1) and, as the validation
    # rows of client 2 are of class 1, (0, 2).
    assert line["forgetting"] == {
        "mean": pytest.approx(-1 / 3), "own": -1.0, "models": [0.0, -1.0], "owners": [0.0, -0.5], "apart": 0.0,
    }  # fmt: skip


def test_of_sequences_steps_are_counted_and_classes_are_not_compared():
    """Two steps a row, one of them padding: A's label is 0, B's 1, and the golden case above comes out again."""
    who = population([[0, 0], [1]], val=[2, 1])
    padded = torch.stack([who.rows.y, torch.full_like(who.rows.y, 2)], 1)
    rows = Rows("steps", torch.ones(len(padded), 2, 1), padded, classes=3, padding=2)
    task = Task(lambda: nn.Sequential(zeros(), _Wider()), loss=CrossEntropy())
    line = probed(replace(who, rows=rows), fedavg(task, LocalTrainer(lr=1.0, batch_size=0), cohort=Everyone()))
    assert line["rows"] == [2, 1]
    assert line["accuracy"] == {"received": [1.0, 0.0], "local": [[1.0, 0.0], [0.0, 1.0]]}
    assert line["forgetting"] == {"mean": 0.5, "own": -0.5, "models": [0.0, 1.0], "owners": [1.0, 0.0]}


class _Wider(nn.Module):
    """One class more, which nothing belongs to."""

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return torch.cat([z, torch.full_like(z[..., :1], -100.0)], -1)


# -- what cannot be averaged -------------------------------------------------------------------------------------------


def test_of_several_labels_the_first_of_each_row_is_its_class_and_of_numbers_there_is_none(tmp_path):
    """Client 0 has the rows whose first label is 1, the others share the rest: a class in common have 1 and 2 alone."""
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    client = torch.where(x[:, 0] > 0, 0, 1 + torch.arange(60) % 2)
    study = {
        "rounds": 2,
        "forgetting": {"rounds": [1], "part": "test"},
        "data": {"source": {"x": x, "y": (x > 0).float(), "client": client}, "target": "labels"},
        "model": "linear",
        "method": [{"algorithm": "fedavg", "cohort": 3, "local": {"lr": 3.0}}],
    }
    ft.run(study, tmp_path / "run", quiet=True)
    line = json.loads((tmp_path / "run" / "fedavg" / "0" / "forgetting.jsonl").read_text())
    fallen = np.array(line["accuracy"]["received"]) - np.array(line["accuracy"]["local"])
    assert line["forgetting"]["mean"] == pytest.approx(fallen[~np.eye(3, dtype=bool)].mean())
    assert line["forgetting"]["apart"] == pytest.approx(np.mean([*fallen[0, 1:], *fallen[1:, 0]])) != 0
    with pytest.raises(FedtideError, match=r"forgetting: found a table, but data.target is 'number'; allowed: none"):
        from_dict({**study, "data": {"target": "number"}})


def test_a_single_participant_has_nothing_to_compare():
    line = probed(population([[1]]), FEDAVG)
    assert line["known"] is False
    assert line["forgetting"] == {"mean": 0.0, "own": -1.0, "models": [0.0], "owners": [0.0], "apart": None}


def test_an_owner_without_rows_is_an_empty_column_and_counts_for_nothing():
    whole, missing = (probed(population([[0], [1], [0]], val=[1, 1, n]), FEDAVG) for n in (1, 0))
    assert missing["rows"] == [1, 1, 0]
    for kind in ("accuracy", "loss"):
        assert [row[2] for row in (missing[kind]["received"], *missing[kind]["local"])] == [None] * 4
        assert [row[:2] for row in missing[kind]["local"]] == [row[:2] for row in whole[kind]["local"]]
    # F of models 0, 1 and 2 (which is as 0) on owners 0 and 1: [., 0], [1, .], [0, 0].
    assert missing["forgetting"]["models"] == [0.0, 1.0, 0.0]
    assert missing["forgetting"]["owners"] == [0.5, 0.0, None]
    assert missing["forgetting"]["mean"] == 0.25
    # And with it there is also [0], [1], [.] on owner 2.
    assert whole["forgetting"]["models"] == [0.0, 1.0, 0.0]
    assert whole["forgetting"]["mean"] == pytest.approx(2 / 6)


def test_nobody_answered():
    nobody = replace(FEDAVG, works={"train": lambda payload, memory, shard, moment, rng: None})
    line = probed(population([[0], [1]]), nobody)
    assert (line["models"], line["owners"], line["known"]) == ([], [], False)
    assert line["forgetting"] == {"mean": 0.0, "own": None, "models": [], "owners": [], "apart": None}
    line = probed(population([[0], [1]]), nobody, owners=torch.tensor([0, 1]))
    assert line["accuracy"] == {"received": [1.0, 0.0], "local": []}
    assert line["forgetting"]["owners"] == [0.0, 0.0]


def test_a_model_that_diverged_has_no_mean():
    matrix = np.array([[math.inf, math.inf, 0.5], [-math.inf, -math.inf, math.inf]])
    own = np.eye(2, 3, dtype=bool)
    got = averages(matrix, own, np.array([True] * 3))
    assert math.isnan(got.mean)
    assert math.isnan(got.own)
    assert math.isnan(without_common_class(matrix, own, np.array([[1, 0], [1, 0]]), np.array([[0, 1]] * 3)))
    assert got.models.tolist() == pytest.approx([math.inf, NAN], nan_ok=True)
    assert got.known


def test_pairs_without_a_common_class_leave_out_own_cells_and_owners_without_rows():
    matrix = np.arange(6.0).reshape(2, 3)
    own = np.array([[True, False, False], [False, False, False]])
    trained, judged = np.array([[1, 0, 0], [0, 1, 0]]), np.array([[0, 0, 1], [0, 4, 0], [0, 0, 0]])
    # (0, 0) has no common class and is own; (0, 1) has none; (1, 0) has none; (1, 1) has; column 2 has no rows.
    assert without_common_class(matrix, own, trained, judged) == (1.0 + 3.0) / 2
    assert math.isnan(without_common_class(matrix, own, np.ones((2, 3)), judged))


# -- algorithms that are different -------------------------------------------------------------------------------------


def bare(**changes: Any) -> Algorithm:
    """One that only asks; its state is a `Kept`."""

    def round(state, fleet, rng):
        fleet.ask("train", fleet.clients, None)
        return state, {}

    given = {"train": lambda payload, memory, shard, moment, rng: Answer({"n": Weighted(1.0)})}
    task = Task(zeros)
    made = Algorithm("bare", lambda fleet, rng: _Kept(task.init(rng)), given, round, shared_weights, task.predict)
    return replace(made, **changes)


class _Kept:
    """A state with weights of any kind."""

    def __init__(self, weights: Any) -> None:
        self.weights = weights


def test_what_no_model_can_be_made_of_is_skipped_with_its_reason():
    who = population([[0], [1]])
    no_update = probed(who, bare())
    assert no_update["skipped"] == (
        "an answer to 'train' has no update; write Answer(..., update=fitted.delta): received + update must be the "
        "model that the client trained"
    )
    other = {"train": lambda *given: Answer({"n": Weighted(1.0)}, update=Weights({"mine": torch.ones(1)}))}
    assert probed(who, bare(works=other))["skipped"] == "its update has other parameters than the model"
    for weights in (None, (), {"a": 1}, (1, 2)):
        odd = probed(who, bare(init=lambda fleet, rng, weights=weights: _Kept(weights)))
        assert odd == {"round": 0, "skipped": "its state holds no weights, one model or a tuple of them"}
    asked = {"report": lambda payload, memory, shard, moment, rng: Answer({"n": Weighted(1.0)})}

    def report(state, fleet, rng):
        fleet.ask("report", fleet.clients, None)
        return state, {}

    assert probed(who, bare(works=asked, round=report)) == {
        "round": 0,
        "skipped": "no client was asked the question 'train'",
    }


def several(question: str = "train", slot: bool = False, update: Any = lambda step: step) -> Algorithm:
    """Two models, the second of which client 1 trains: it answers class 1 then. Everyone is served by the second."""
    task = Task(zeros)

    def step(weights: Weights) -> Weights:
        return Weights({"weight": torch.zeros(2, 1), "bias": torch.tensor([0.0, 1.0])})

    def train(payload, memory, shard, moment, rng):
        if int(shard.y[0]) == 0:
            return None
        return Answer({"n": Weighted(1.0)}, update=update(step(payload)))

    def round(state, fleet, rng):
        given = {"slot": torch.ones(len(fleet.clients), dtype=torch.int64), "slots": 2} if slot else {}
        fleet.ask(question, fleet.clients, list(state.weights), **given)
        return state, {}

    def predict(payload, memories, x, owner):
        return Prediction(torch.log_softmax(task.logits(payload[1], x), -1))

    def init(fleet, rng):
        return _Two((task.init(rng),) * 2)

    return Algorithm("several", init, {question: train}, round, lambda s, c: (list(s.weights), None), predict)


@pytest.mark.parametrize(
    "algorithm",
    [
        several(slot=True),
        several(update=lambda step: {1: step}),
        several(update=lambda step: {0: Weights({}), 1: step}),
    ],
    ids=["asked in a slot", "by its number", "one for each model"],
)
def test_an_update_goes_into_the_models_that_it_was_made_for(algorithm):
    line = probed(population([[0], [1]]), algorithm)
    assert line["models"] == [1]
    assert line["owners"] == [1]
    assert line["accuracy"] == {"received": [0.0], "local": [[1.0]]}


def test_an_update_for_the_other_model_changes_nothing_for_whom_that_does_not_serve():
    line = probed(population([[0], [1]]), several(update=lambda step: {0: step}))
    assert line["accuracy"] == {"received": [0.0], "local": [[0.0]]}


def test_an_update_that_does_not_say_which_model_it_is_for_is_skipped():
    line = probed(population([[0], [1]]), several())
    assert line["skipped"] == "its update does not say which of 2 models it belongs to"


def test_of_two_questions_in_a_round_the_first_is_put_again():
    """The second finds other weights in its payload, and another memory: neither may be what is judged."""
    task, seen = Task(zeros), []

    def train(payload, memory, shard, moment, rng):
        seen.append((payload["turn"], None if memory is None else memory["turn"], rng.path[-1]))
        sign = 1.0 if payload["turn"] == 1 else -1.0
        delta = Weights({"weight": torch.zeros(2, 1), "bias": torch.tensor([0.0, sign])})
        return Answer({"delta": Weighted(delta)}, memory={"turn": payload["turn"]}, update=delta)

    def round(state, fleet, rng):
        for turn in (1, 2):
            reply = fleet.ask("train", fleet.clients[:turn], {"weights": state.weights, "turn": turn})
        return state, {"n": float(mean(reply.total)["delta"].params["bias"][1])}

    algorithm = Algorithm(
        "twice", lambda fleet, rng: _One(task.init(rng)), {"train": train}, round, shared_weights, task.predict
    )
    line = probed(population([[1], [1]]), algorithm, rounds=2)
    assert line["models"] == [0, 1]
    assert line["accuracy"]["local"] == [
        [1.0, 1.0],
        [0.0, 0.0],
    ]  # client 0 by its first answer, client 1 by its only one
    assert seen[-2:] == [(1, 2, "train"), (2, 2, "train#1")]


@pytest.mark.parametrize("labels", [[[0, 0], [1, 1]], [[0, 1], [1, 1]]])
def test_fednova_whose_sums_hold_normalized_updates_forgets_what_fedavg_forgets_at_equal_steps(labels):
    """What is measured is what clients train: what their sums hold is another thing (Wang et al. 2020, Eq. 7)."""
    local, task = LocalTrainer(lr=0.5, local_steps=5, batch_size=0), Task(zeros)
    nova, plainly = (probed(population(labels), make(task, local, cohort=Everyone())) for make in (fednova, fedavg))
    assert nova == plainly
    assert nova["forgetting"]["mean"] != 0 or labels[0] != labels[1]


# -- the fleet keeps what may be asked again ---------------------------------------------------------------------------


def kept(replayable) -> tuple[SimulatedFleet, Any]:
    work = {"q": lambda payload, memory, shard, moment, rng: Answer({"n": Weighted(1.0)})}
    algorithm = Algorithm("kept", None, work, None, lambda state, clients: (state, None), None)
    memory = MemoryStore(None)
    who = people(3)
    fleet = SimulatedFleet(who, LocalEngine(Host(algorithm, who, 0, memory)), replayable=replayable)
    return fleet, {"w": torch.ones(2)}


def test_the_fleet_holds_on_to_what_was_sent_in_these_rounds_only_and_makes_no_copy():
    fleet, payload = kept([1])
    for number in (0, 1, 2):
        fleet.begin(Moment(number, 3, 0.0))
        fleet.ask("q", torch.arange(3), payload)
        assert (fleet.queries[0].payload is payload) == (number == 1)
        assert fleet.queries[0].payload is None or number == 1


def test_a_round_that_was_not_kept_cannot_be_asked_again():
    fleet, payload = kept([1])
    fleet.begin(Moment(0, 3, 0.0))
    with pytest.raises(FedtideError, match=r"round 0 is not kept; allowed: \[1\]"):
        fleet.replay("q", payload, torch.arange(3), part="val")


# -- who is judged -----------------------------------------------------------------------------------------------------


def test_owners_are_the_participants_or_so_many_of_those_who_have_rows_drawn_once():
    who = population([[0]] * 30, val=[1, 0] * 15)
    assert owners_of(who, "val", None, 0) is None
    assert owners_of(who, "val", 15, 0).tolist() == list(range(0, 30, 2))
    assert owners_of(who, "val", 99, 0).tolist() == list(range(0, 30, 2))
    some = owners_of(who, "val", 6, 0).tolist()
    assert len(some) == 6
    assert some == sorted(set(some))
    assert all(client % 2 == 0 for client in some)
    assert owners_of(who, "val", 6, 0).tolist() == some
    assert owners_of(who, "val", 6, 1).tolist() != some


def test_a_part_that_nobody_has_is_one_line_that_says_which_they_have():
    who = population([[0], [1]], val=[0, 1])
    with pytest.raises(FedtideError, match=r"forgetting.part: found 'test', but no .* such rows; allowed: 'val' "):
        owners_of(who, "test", None, 0)
    nothing = population([[0], [1]], val=[0, 0])
    with pytest.raises(FedtideError, match="allowed: none, as there are only training rows"):
        owners_of(nothing, "val", None, 0)


# -- from Python -------------------------------------------------------------------------------------------------------


def test_a_simulation_tells_what_was_forgotten():
    who = population([[0, 0], [1]], val=[2, 1])
    result = simulate(FEDAVG, who, rounds=3, forgetting=Forgetting(rounds=(2, 0), eval_clients=1))
    assert [line["round"] for line in result.forgetting] == [0, 2]
    assert [len(line["owners"]) for line in result.forgetting] == [1, 1]
    plainly = simulate(FEDAVG, who, rounds=3)
    assert plainly.forgetting == []
    assert plainly.lines == result.lines
