"""Training on need, by hand and against a naive implementation.

By hand the logits of a row are (w, 0), so it is of class 0 if w >= 0. The loss is (w - t)^2 / 2, with t = 1 for class 0
and t = -1 for class 1. Client 0 has one row of class 0, client 1 three rows of class 1. So FedAvg with a step of 1/2
halves the distance of w to (1 - 3) / 4 = -1/2 in each round. w begins at 1.

Before rounds 0, 1, 2, ... w is 1, 1/4, -1/8, -5/16, -13/32: right are 1, 1, 3, 3, 3 rows of 4, and 3 from then on. Sums
fade by 4/5, so the means are

    1/4,  1.8/7.2 = 1/4,  4.44/9.76 = 0.455,  6.552/11.808 = 0.555,  8.2416/13.4464 = 0.613,  0.650,  0.675.

With rise = 0.2 and patience = 2 the level is 1/4 in round 0; round 1 is the first without a rise; in round 2 the level
is 0.455; rounds 3 and 4 are without a rise. So rounds 0 to 3 train, and w stays -13/32 from round 4 on.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

import fedtide as ft
from fedtide.cohorts import Everyone
from fedtide.core.base import Moment, Shard
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import same
from fedtide.learn import LocalTrainer
from fedtide.transforms import apply
from fedtide.transforms.on_need import Need, OnNeed, decide
from fedtide.transforms.transform import predict_own
from helpers import quadratics
from helpers.pulled import ONE, TASK, number
from helpers.stages import holding
from helpers.toys import network_of, played, toy, trained_plainly

RULE = OnNeed(fall=0.05, rise=0.2, patience=2)
W = [1, 1 / 4, -1 / 8, -5 / 16, -13 / 32]


def method(rule=RULE):
    return apply(ft.algorithms.fedavg(TASK, LocalTrainer(lr=0.5, batch_size=0), cohort=Everyone()), rule)


def rounds(algorithm, state, numbers, labels, who=None):
    """State, facts, questions and bytes of each round, while clients hold these labels."""
    fleet = quadratics.fleet_of(algorithm, labels, who)
    for turn in numbers:
        fleet.begin(Moment(turn, 99, 0.0))
        state, facts = algorithm.round(state, fleet, Rng(0).at(turn, "server"))
        asks = {query.ask.question: (query.cost.down, query.cost.up) for query in fleet.queries}
        yield state, facts, asks


def test_a_phase_ends_when_accuracy_no_longer_rises_and_begins_when_it_changes():
    """Round 5 pauses, too. In round 6 the mean is 0.675 > 0.455 + 0.2: it trains, and begins anew at 3 of 4.

    So w comes half of the way to -1/2, -29/64. Then all rows are of class 0, and w is never right. In round 7 the sums
    are 2.4 right of 7.2, 1/3 < 0.75 - 0.05. It begins anew at 0 of 4, and w comes half of the way to 1, 35/128. Round 8
    gets all right: 4 of 4 + 3.2, a rise.
    """
    algorithm = method()
    fleet = quadratics.fleet_of(algorithm, [[0], [1, 1, 1]])
    before = algorithm.init(fleet, Rng(0))
    run = list(rounds(algorithm, before, range(7), [[0], [1, 1, 1]]))
    assert [number(state) for state, *_ in run] == [*W[1:], W[4], W[4], -29 / 64]
    assert [state.own.trains for state, *_ in run] == [True] * 4 + [False, False, True]
    assert [facts["judged"] for _, facts, _ in run] == [0.25, 0.25, 0.75, 0.75, 0.75, 0.75, 0.75]
    levels = [0.25, 0.25, *[4.44 / 9.76] * 4, 0.75]
    assert [state.own.level for state, *_ in run] == pytest.approx(levels, abs=1e-12)
    # A pause sends 8 bytes of weights to each of two clients, and they send a share and its weight.
    assert [list(asks) for *_, asks in run] == [["need", "train"]] * 4 + [["need"]] * 2 + [["need", "train"]]
    assert run[5][2]["need"] == (16, 32)
    assert same(run[5][0].inner, run[3][0].inner)
    again = list(rounds(algorithm, run[6][0], (7, 8), [[0], [0, 0, 0]]))
    assert [state.own.trains for state, *_ in again] == [True, True]
    assert [facts["judged"] for _, facts, _ in again] == [0.0, 1.0]
    assert number(again[0][0]) == 35 / 128
    assert [state.own.level for state, *_ in again] == pytest.approx([0.0, 4 / 7.2], abs=1e-12)


def test_a_threshold_trains_whenever_accuracy_is_below_it():
    """Right are 1, 1, 3 rows of 4: rounds 0 and 1 train at a threshold of 0.75, and w stays -1/8."""
    algorithm = method(OnNeed(threshold=0.75))
    begin = algorithm.init(quadratics.fleet_of(algorithm, [[0], [1, 1, 1]]), Rng(0))
    run = list(rounds(algorithm, begin, range(4), [[0], [1, 1, 1]]))
    assert [number(state) for state, *_ in run] == [1 / 4, -1 / 8, -1 / 8, -1 / 8]
    ((state, _, asks),) = rounds(algorithm, run[-1][0], (4,), [[0], [0, 0, 0]])
    assert (number(state), list(asks)) == ((1 - 1 / 8) / 2, ["need", "train"])


def test_a_rise_in_a_pause_is_a_change_if_it_is_large_at_once_or_bit_by_bit():
    """0.6 -> 0.63 -> 0.64 is small, and 0.66 is more than 0.05 above 0.6; then 0.6 is a fall, and 0.6 again is none."""
    rule = OnNeed(patience=1)
    need = Need(trains=False, level=0.6)
    steps = (0.63, False, 0.6), (0.64, False, 0.6), (0.66, True, 0.66), (0.6, True, 0.6), (0.6, None, None)
    for share, trains, level in steps:
        need = decide(rule, replace(need, right=0.0, rows=0.0), share * 100, 100.0)
        assert trains is None or need.trains is trains
        assert level is None or need.level == level
    assert not need.trains


def test_without_an_answer_nothing_changes():
    """No participant holds a row: nobody judges, and a phase or a pause goes on."""
    algorithm = method()
    begin = algorithm.init(quadratics.fleet_of(algorithm, [[0], [1]]), Rng(0))
    for need in (Need(), Need(trains=False, level=0.5)):
        state, nobody = replace(begin, own=need), holding([(ONE[:0], torch.zeros(0, dtype=torch.int64))] * 2, classes=2)
        ((after, facts, asks),) = rounds(algorithm, state, (0,), None, nobody)
        assert (after.own, same(after.inner.weights, begin.inner.weights), facts) == (need, True, {})
        assert list(asks) == ["need", "train"][: 1 + need.trains]


# -- against a naive implementation ------------------------------------------------------------------------------------

ROUNDS = 24
DATA = {"partition": {"kind": "dirichlet-class", "clients": 8, "alpha": 1.0, "min_samples": 5}}
LOCAL = {"lr": 0.1, "batch_size": 4, "epochs": 2}


def naive(population, model: nn.Module, fall: float, rise: float, patience: int):
    """The weights of FedAvg on need, and which rounds train: a list of judgments, read anew in each round."""
    history, trained, level, last, training = [], [], None, 0, True
    for r in range(ROUNDS):
        moment = Moment(r, ROUNDS, float(r))
        shards = {client: population.shard(client, moment) for client in population.arrivals(4, moment).tolist()}
        judged = [shard.val if shard.val is not None and len(shard.val) else shard for shard in shards.values()]
        right = sum(int((model(rows.x.double()).argmax(1) == rows.y).sum()) for rows in judged)
        history.append((right, sum(len(rows) for rows in judged)))
        faded = [[0.8**age * part for part in pair] for age, pair in enumerate(reversed(history))]
        mean = sum(a for a, _ in faded) / sum(b for _, b in faded)
        if level is None or mean < level - fall or (not training and mean > level + max(fall, rise)):
            history = history[-1:]
            training, level, last = True, history[0][0] / history[0][1], r
        elif training and mean > level + rise:
            level, last = mean, r
        elif r - last >= patience:
            training = False
        trained.append(training)
        if not training:
            continue
        before, total = model.state_dict(), sum(len(shard) for shard in shards.values())
        mean_of = {name: torch.zeros_like(value) for name, value in before.items()}
        for client, shard in shards.items():
            after = trained_plainly(model, shard, Rng(0).at(r, client, "train")).state_dict()
            for name in mean_of:
                mean_of[name] += after[name] * len(shard) / total
        model.load_state_dict(mean_of)
    return model.state_dict(), trained


def test_a_naive_implementation_agrees_to_1e_9():
    rule = {"kind": "on-need", "fall": 0.05, "rise": 0.05, "patience": 1}
    run = played(toy("fedavg", {"local": LOCAL, "transforms": [rule]}, rounds=ROUNDS, precision="fp64", data=DATA))
    model = network_of(run.steps[0].received.weights)
    expected, trained = naive(run.host.population, model, 0.05, 0.05, 1)
    # It pauses, and it wakes up more than once.
    assert sum(one and not other for one, other in pairwise(trained)) > 1 < sum(not one for one in trained)
    assert [step.state.own.trains for step in run.steps] == trained
    for name, value in run.state.weights.params.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9)


# -- laws --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedavg", "ifca", "scaffold", "ditto"])
def test_with_endless_patience_it_is_the_method_to_the_bit_and_below_its_threshold_never_trains(name):
    plain = played(toy(name, {"local": LOCAL})).state
    rules = {"patience": 99}, {"threshold": 0.0}
    always, never = (played(toy(name, {"local": LOCAL, "transforms": [{"kind": "on-need", **rule}]})) for rule in rules)
    assert same(always.state.inner, plain)
    assert same(never.state.inner, never.steps[0].received.inner)


def test_in_a_pause_clusters_follow_drift():
    """Who reports a drift reports it once, so a round without training must keep what it heard."""
    concepts = {"kind": "label-banks", "banks": [[0, 1], [2, 3]]}
    when = {"kind": "planned", "at": [4], "to": [[1, 0]], "groups": [[0], [1]], "modulo": 4}
    world = {
        "data": {"source": {"kind": "gaussians", "samples": 400, "dims": 4, "classes": 4}, "groups": {"by": "none"}},
        "shift": {"who": {"kind": "always"}, "what": {"kind": "change-points", "concepts": concepts, "when": when}},
        "rounds": 8,
    }
    rule = {"kind": "on-need", "threshold": 0.0}
    plain, never = (played(toy("fielding", {"transforms": rules}, **world)) for rules in ([], [rule]))
    members = [[step.facts["members"].tolist() for step in run.steps] for run in (plain, never)]
    assert members[0] == members[1]
    assert members[0][0] != members[0][-1]
    assert not never.state.own.trains


@pytest.mark.parametrize("name", ["fedavg", "ifca", "fedem", "fielding", "numbers"])
def test_a_judgment_is_the_evaluation_of_the_participants_on_validation_rows(name):
    changes = {"data": {"target": "number"}, "shift": {"how": {"kind": "identity"}}} if name == "numbers" else {}
    method = "fedavg" if name == "numbers" else name
    run = played(toy(method, {"transforms": ["on-need"]}, **changes), rounds=4)
    step, algorithm = run.steps[-1], run.host.algorithm
    clients = next(query.ask.clients for query in run.fleet.queries if query.ask.question == "need")
    payload, slot = algorithm.serve(step.received, clients)
    scores = run.fleet.score(payload, clients, slot=slot, part="val")
    assert int(scores.rows.sum()) > 0
    assert step.facts["judged"] == pytest.approx(scores.accuracy, abs=1e-6)


def test_asynchronous_methods_are_refused():
    for pausing in ("on-need", {"kind": "watch", "train": "alarm"}):
        with pytest.raises(FedtideError, match=r"is not allowed with 'fedbuff', because .*clients in flight"):
            played(toy("fedbuff", {"transforms": [pausing]}), rounds=1)


def test_no_client_is_adapted_on_the_rows_of_a_dated_study_on_which_it_judges():
    seen = []

    def adapt(payload, memory, shard, moment, rng):
        seen.append(shard.val)

    run = played(toy("fedavg"), rounds=1)
    algorithm = replace(run.host.algorithm, adapt=adapt)
    shard = Shard(torch.zeros(4, 4), torch.zeros(4, dtype=torch.int64), torch.arange(4))
    held = replace(shard, fetch_val=lambda: shard.pick(torch.arange(2)), apart=True)
    rows, _ = predict_own(algorithm, run.state.weights, None, held, Moment(0, 1), Rng(0))
    assert len(rows) == 2
    assert seen == [None]
