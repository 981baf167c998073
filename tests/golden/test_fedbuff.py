"""FedBuff: derived by hand on two quadratics, and against a naive event loop in float64."""

import copy
import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from fedtide.algorithms.fedbuff import fedbuff
from fedtide.cohorts import Everyone
from fedtide.core.base import Moment
from fedtide.core.loop import begin, play
from fedtide.core.rng import Rng
from fedtide.learn.local import LocalTrainer
from helpers.clocks import COMPUTE, clocked, one_unit
from helpers.quadratics import TASK, at, fleet_of, value
from helpers.toys import network_of, played, toy, trained_plainly

ROUNDS = 20
DATA = {"partition": {"kind": "dirichlet-class", "clients": 8, "alpha": 1.0, "min_samples": 5}}


def by_hand(monkeypatch, targets=None, compute=(1.0, 2.5), work=one_unit, **options):
    """Client 0 needs 1 second and client 1 needs 2.5; both are at work all the time, and each answer makes a step."""
    solver = LocalTrainer(lr=0.5, batch_size=0)
    algorithm = fedbuff(TASK, solver, cohort=Everyone(), **{"buffer": 1, **options})
    fleet = clocked(compute, work)(fleet_of(algorithm, targets))
    monkeypatch.setattr(type(TASK), "init", lambda task, rng: at(1.0))
    for step in play(algorithm, fleet, begin(algorithm, fleet, seed=0, rounds=9), seed=0, rounds=9):
        yield step, sum(cost.down for cost in fleet.spent_on.values())


def test_by_hand(monkeypatch):
    """From w = 1 with one step of 0.5: client 0 moves by -0.5 w, client 1 by 0.5 (4 - w).

    Both begin at 0 from w = 1. Client 0 answers at 1: w = 1 - 0.5 = 0.5. It begins again from 0.5 and answers at 2:
    w = 0.25. Again, to answer at 3; but client 1 answers at 2.5, with 1.5 from w = 1, two steps late:
    w = 0.25 + 1.5 / sqrt(3). It begins from there, to answer at 5. Client 0 answers at 3 what it made of 0.25, one step
    late: w = 0.25 + 1.5 / sqrt(3) - 0.125 / sqrt(2).
    """
    steps = [step for step, _ in by_hand(monkeypatch)]
    third = 0.25 + 1.5 / math.sqrt(3)
    found = [value(step.state) for step in steps[:4]]
    assert found == pytest.approx([0.5, 0.25, third, third - 0.125 / math.sqrt(2)], abs=1e-12)
    assert [step.seconds for step in steps[:4]] == [1.0, 2.0, 2.5, 3.0]
    assert [int(step.facts["stalest"]) for step in steps[:4]] == [0, 0, 2, 1]
    assert [step.state.flight.clients.tolist() for step in steps[:4]] == [[1], [1], [0], [1]]
    # Models: of step 0 as long as client 1 has it; then that of step 2, from which client 0 began; then of step 3.
    assert [step.state.numbers.tolist() for step in steps[:4]] == [[0], [0], [2], [3]]


def test_without_damping_a_late_update_counts_in_full(monkeypatch):
    """As above: 0.25 + 1.5."""
    _, _, (step, _), *_ = by_hand(monkeypatch, damping=0.0)
    assert value(step.state) == pytest.approx(1.75, abs=1e-12)


def test_a_buffer_of_two_waits_for_both(monkeypatch):
    """Both from w = 1: (-0.5 + 1.5) / 2 = 0.5, at 2.5 seconds; by rows (-0.5 + 3 * 1.5) / 4 = 1."""
    step, _ = next(by_hand(monkeypatch, buffer=2))
    assert (value(step.state), step.seconds) == (1.5, 2.5)
    assert value(next(by_hand(monkeypatch, buffer=2, weighting="samples"))[0].state) == 2.0


def test_who_does_not_answer_for_long_is_given_up_and_its_model_too(monkeypatch):
    """With a staleness of at most one round client 1 never answers: it begins anew in each, and client 0 is faster.

    It needs 1.5 seconds, and would answer in its second round.
    """
    *_, (step, _) = by_hand(monkeypatch, compute=(1.0, 1.5), max_staleness=1)
    assert (value(step.state), step.seconds) == (0.5**9, 9.0)


def test_an_answer_that_comes_with_others_waits_for_the_next_step(monkeypatch):
    """Both need a second: one answer makes the first step, and the other one the second, a step late and at once."""
    steps = [step for step, _ in by_hand(monkeypatch, compute=(1.0, 1.0))][:6]
    assert [step.seconds for step in steps] == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    assert {len(step.state.flight.clients) for step in steps} == {1}
    assert [int(step.facts["stalest"]) for step in steps[:2]] == [0, 1]


@pytest.mark.parametrize("devices", [None, {"kind": "log-normal", "compute": 0.01, "overhead": 1.0}])
@pytest.mark.parametrize("name", ["fedbuff", "fedasync"])
def test_nobody_is_lost_whoever_answers_at_the_same_time(name, devices):
    """Six are at work; those who do not count go on, so the same number is at work after each step."""
    options = {"cohort": 6, **({"buffer": 2} if name == "fedbuff" else {})}
    experiment = toy(name, options, rounds=12, devices=devices, data=DATA, shift={"who": {"kind": "always"}})
    steps = played(experiment).steps
    left = 4 if name == "fedbuff" else 5
    assert [step.facts["at_work"] for step in steps] == [left] * 12
    assert max(int(step.facts["stalest"]) for step in steps) > 1


def test_whoever_holds_nothing_takes_nobodys_place(monkeypatch):
    """Clients 0 and 1 have no rows and would answer at once: the first two that count are the other two."""
    step, _ = next(by_hand(monkeypatch, [[], [], [0], [4]], [1.0] * 4, lambda question, rows: rows, buffer=2))
    assert (value(step.state), step.seconds, len(step.state.flight.clients)) == (1.5, 1.0, 0)


def test_only_whoever_begins_is_sent_a_model(monkeypatch):
    """Eight bytes for each of two, then for client 0 alone."""
    steps = by_hand(monkeypatch)
    spent = [next(steps)[1] for _ in range(2)]
    assert spent[1] - spent[0] == spent[0] / 2


def test_who_drops_out_is_lost_once_and_its_place_is_filled_when_its_answer_is_due():
    """About half of those that begin never answer, as it is drawn when they begin; each is missed once."""
    shift = {"who": {"kind": "always", "dropout_rate": 0.5}}
    experiment = toy(
        "fedbuff", {"cohort": {"kind": "uniform", "clients_per_round": 6}, "buffer": 2}, rounds=60, shift=shift
    )
    counts, answers = [], {}

    def counted(fleet):
        ask = clocked(COMPUTE)(fleet).ask

        def heard(question, clients, *given, **named):
            fresh = clients[named["began"].isinf()]
            now = torch.full((len(fresh),), fleet.moment.seconds, dtype=torch.float64)
            drawn = fleet.population.answers(fresh, fleet.moment, 0, now)
            answers.update(zip(fresh.tolist(), drawn.tolist(), strict=True))
            reply = ask(question, clients, *given, **named)
            counts.append((len(fresh), len(reply.clients), len(reply.silent)))
            assert all(answers[client] for client in reply.clients.tolist())
            assert not any(answers[client] for client in reply.silent.tolist())
            return reply

        fleet.ask = heard
        return fleet

    run = played(experiment, fleet=counted)
    began, answered, lost = (sum(each) for each in zip(*counts, strict=True))
    assert began == answered + lost + len(run.state.flight.clients)
    assert 0.4 < lost / (answered + lost) < 0.6
    seconds = [step.seconds for step in run.steps]
    assert all(later > earlier for earlier, later in pairwise(seconds))


def test_oort_learns_how_long_a_client_takes_in_all_and_not_in_its_last_round():
    """Client i takes compute_i seconds, and most of it passes in rounds before that of its answer."""
    compute = [0.5, 3.25, 0.75, 1.75, 0.625, 0.25, 1.0, 2.125]
    options = {"cohort": {"kind": "oort", "clients_per_round": 8}, "buffer": 1}
    run = played(toy("fedbuff", options, rounds=40, shift={"who": "always"}), fleet=clocked(compute, one_unit))
    memo = run.state.cohort
    assert max(step.facts["stalest"] for step in run.steps) > 2
    assert (memo.last > 0).all()
    assert memo.seconds.tolist() == pytest.approx(compute, abs=1e-12)


def naive(population, model: nn.Module, compute, concurrency: int, buffer: int) -> tuple[nn.Module, float]:
    """One client after the other, as their answers come."""
    now, at_work = 0.0, {}
    for r in range(ROUNDS):
        moment = Moment(r, ROUNDS, now)
        fresh = [c for c in population.arrivals(concurrency, moment).tolist() if c not in at_work]
        order = Rng(0).at(r, "server").at("places").numpy().permutation(len(fresh))
        for client in [fresh[i] for i in order][: concurrency - len(at_work)]:
            rows = len(population.shard(client, moment).y)
            at_work[client] = (now + compute[client] * 2 * rows, r, copy.deepcopy(model))
        answers = sorted(at_work, key=lambda client: at_work[client][0])[:buffer]
        change = {name: torch.zeros_like(p) for name, p in model.state_dict().items()}
        for client in answers:
            arrived, began, sent = at_work.pop(client)
            now = max(now, arrived)
            shard = population.shard(client, moment)
            own = trained_plainly(sent, shard, Rng(0).at(r, client, "train"))
            for name, p in own.state_dict().items():
                change[name] += (p - sent.state_dict()[name]) / math.sqrt(1 + r - began) / len(answers)
        model.load_state_dict({name: p + change[name] for name, p in model.state_dict().items()})
    return model, now


def test_a_naive_event_loop_agrees_to_1e_9():
    options = {"local": {"lr": 0.1, "batch_size": 4, "epochs": 2}, "cohort": 5, "buffer": 2}
    experiment = toy("fedbuff", options, rounds=ROUNDS, precision="fp64", data=DATA)

    run = played(experiment, fleet=clocked(COMPUTE, lambda question, rows: 2 * rows))
    model = network_of(run.steps[0].received.weights)
    expected, now = naive(run.host.population, model, COMPUTE, 5, 2)
    assert run.steps[-1].seconds == pytest.approx(now)
    assert max(int(step.facts["stalest"]) for step in run.steps) > 3
    for name, found in run.state.weights.params.items():
        torch.testing.assert_close(found, expected.state_dict()[name], rtol=1e-9, atol=1e-9)
