"""Kinds of your own: shifts, partitions, cohorts and losses that a configuration names as `python:module:function`."""

import pytest
import torch

from fedtide.config import from_dict, resolved
from fedtide.core.base import Moment
from fedtide.core.errors import FedtideError
from fedtide.core.record import read_lines
from fedtide.data.shift import Python, Shift
from fedtide.runs.build import cohort_size, host_of, population_of, task_of
from fedtide.runs.preflight import preflight
from fedtide.runs.runner import Run
from helpers.toys import toy

MINE = """
import torch
from fedtide.cohorts import PickedBy
from fedtide.data.partition import DealtBy
from fedtide.data.shift import AwakeBy, HeldBy, ReadBy

def weekdays(days=7):
    return HeldBy(lambda rows, part, moment, rng: rows[moment.round % days :: days] if part == "train" else rows)

def weekends(days=2):
    return AwakeBy(lambda clients, time: clients % days == int(time) % days)

def negative():
    return ReadBy(lambda x, y, group, time: (-x if time % 2 else x, y))

def in_turn(clients):
    return DealtBy(lambda y, classes, clients, rng: torch.arange(len(y)) % clients, clients, by_labels=False)

def outside(clients):
    return DealtBy(lambda y, classes, clients, rng: torch.arange(len(y)), clients)

def squared(power=2):
    return lambda outputs, y: torch.nn.functional.cross_entropy(outputs, y) ** power

def of_a_batch(outputs, y):
    return torch.nn.functional.cross_entropy(outputs, y) ** 2

def lowest_first(clients=3):
    return PickedBy(lambda there, m, moment, rng: there[:m], clients)

def strangers():
    return PickedBy(lambda there, m, moment, rng: [999], 3)

def flipped():
    return ReadBy(lambda x, y, group, time: x)

def shorter():
    return ReadBy(lambda x, y, group, time: (x, y[:1]))

def listed():
    return AwakeBy(lambda clients, time: [1, 2, 3])

def others():
    return HeldBy(lambda rows, part, moment, rng: rows + 100000)

def broken():
    return HeldBy(lambda rows, part, moment, rng: rows[0][0])

def few():
    return AwakeBy(lambda clients: clients > 1)

def words():
    return PickedBy(lambda there, m, moment, rng: ["a"], 3)

def spread(scores):
    return scores.correct / scores.rows

def nothing():
    return 4

number = 4
"""


pytestmark = pytest.mark.usefixtures("mine")


def people(**shift):
    experiment = toy("fedavg", {"cohort": 3}, rounds=3)
    return population_of(experiment, Shift(**shift), 0)


def at(r: int) -> Moment:
    return Moment(r, 12, float(r))


def test_what_a_client_holds_may_follow_from_ones_own_function():
    plain, own = people(), people(what=Python("mine:weekdays", {"days": 3}))
    for r in range(4):
        for client in plain.clients.tolist():
            everything = plain.held(client, at(r), "train")
            assert own.held(client, at(r), "train").tolist() == everything[r % 3 :: 3].tolist()
            assert own.held(client, at(r), "test").tolist() == plain.held(client, at(r), "test").tolist()
    assert own.counts(own.clients, "train", at(1)).tolist() == [
        len(own.held(client, at(1), "train")) for client in own.clients.tolist()
    ]
    assert own.changed(at(1)).tolist() == own.clients.tolist()
    assert not len(own.changed(at(3), at(0)))
    assert own.events(at(1)) == ("change",)


def test_who_is_there_may_follow_from_ones_own_function():
    own = people(who=Python("mine:weekends"))
    for r in range(4):
        there = own.clients[own.clients % 2 == r % 2]
        assert own.reachable(at(r)).tolist() == there.tolist()
        assert set(own.arrivals(3, at(r)).tolist()) <= set(there.tolist())


def test_what_rows_mean_may_follow_from_ones_own_function():
    plain, own = people(), people(how=Python("mine:negative"))
    for r, sign in ((0, 1), (1, -1)):
        assert torch.equal(own.shard(0, at(r)).x, sign * plain.shard(0, at(r)).x)


def named(**more):
    base = resolved(toy("fedavg", {"cohort": 3}, rounds=3))
    for key, value in more.items():
        table = base
        *path, last = key.split("__")
        for part in path:
            table = table[part]
        table[last] = value
    return from_dict(base)


def test_a_file_names_them_and_is_read_back():
    experiment = named(
        shift__what={"kind": "python", "function": "mine:weekdays", "options": {"days": 2}},
        shift__who="python:mine:weekends",
        data__partition={"kind": "python", "function": "mine:in_turn", "options": {"clients": 6}},
        data__groups={"by": "none"},
    )
    preflight(experiment)
    assert from_dict(resolved(experiment)) == experiment
    population = population_of(experiment, experiment.shift, 0)
    assert population.registered == 6
    assert experiment.shift.drifts
    assert experiment.shift.rhythm(10) == {}


@pytest.mark.parametrize("spelled", ["python:mine:squared", "mine:squared", "mine:of_a_batch"])
def test_a_loss_of_ones_own_trains(spelled):
    base = resolved(toy("fedavg", {"cohort": 3}, rounds=3))
    base["method"][0]["loss"] = spelled
    experiment = from_dict(base)
    population = population_of(experiment, experiment.shift, 0)
    loss = task_of(experiment, experiment.method[0], population.rows).loss
    logits, y = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([1])
    expected = torch.nn.functional.cross_entropy(logits, y) ** 2
    assert torch.equal(loss.value(logits, y, None, ()), expected)
    preflight(experiment)


@pytest.mark.parametrize(("more", "said"), [
    ({"shift__what": "python:absent:weekdays"}, "shift.what.function: cannot import 'absent:weekdays'"),
    ({"shift__what": "python:mine:absent"}, "shift.what.function: cannot import 'mine:absent'"),
    ({"shift__what": "python:mine:number"}, "shift.what.function: found 'mine:number', allowed: a function or class"),
    ({"shift__who": "python:mine:nothing"}, "shift.who.function: 'mine:nothing' returned int without 'check'"),
    ({"shift__how": "python:mine:nothing"}, "shift.how.function: 'mine:nothing' returned int without 'check'"),
    ({"shift__what": {"kind": "python", "function": "mine:weekdays", "options": {"day": 2}}},
     "shift.what.options: weekdays() got an unexpected keyword argument 'day'"),
    ({"data__partition": "python:mine:nothing"}, "data.partition.function: 'mine:nothing' returned int"),
    ({"data__partition": {"kind": "python", "function": "mine:outside", "options": {"clients": 6}}},
     "data.partition.function: found"),
])  # fmt: skip
def test_what_will_not_do_is_one_line(more, said):
    experiment = named(**more)
    with pytest.raises(FedtideError) as error:
        population_of(experiment, experiment.shift, 0)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("more", "said"), [
    ({"shift__how": "python:mine:flipped"},
     "shift.how.function: found tensor(... allowed: a pair (x, y) of tensors of shapes (2, "),
    ({"shift__how": "python:mine:shorter"}, "shift.how.function: found (... allowed: a pair (x, y) of tensors"),
    ({"shift__who": "python:mine:listed"},
     "shift.who.function: found [1, 2, 3], allowed: a mask: a tensor of 8 true or false, one for each client"),
    ({"shift__what": "python:mine:others"},
     "shift.what.function: found tensor(... allowed: a tensor with some of the client's own rows, such as ["),
    ({"shift__what": "python:mine:broken"}, "shift.what: <lambda>() failed with IndexError: invalid index"),
    ({"shift__who": "python:mine:few"}, "shift.who.function: <lambda>() too many positional arguments"),
    ({"shift__who": "python:mine:weekend"}, "has no attribute 'weekend'); did you mean 'mine:weekends'?"),
    ({"shift__who": "python:mine.py:weekends"}, "found 'mine.py:weekends', allowed: 'mine:weekends', as"),
    ({"method": [{"algorithm": "mine"}]}, "found 'mine', allowed: 'mine:FUNCTION', a function of mine.py"),
    ({"method": [{"algorithm": "mine.py"}]}, "found 'mine.py', allowed: 'mine:FUNCTION', a function of mine.py"),
    ({"metrics": ["mine:spread"]}, "metrics[0].function: found tensor(... allowed: a function that returns a number"),
    ({"method": [{"algorithm": "fedavg", "cohort": "python:mine:strangers"}]},
     "method 'fedavg': cohort.function: found [999], allowed: ids of the clients that it is given, each once"),
    ({"method": [{"algorithm": "fedavg", "cohort": "python:mine:words"}]}, "cohort.function: found ['a'], allowed: "),
])  # fmt: skip
def test_what_a_function_returns_is_tried_before_anything_is_written(more, said):
    with pytest.raises(FedtideError) as error:
        preflight(named(**more))
    for part in said.split("..."):
        assert part in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("algorithm", ["fedavg", "ifca", "fielding"])
def test_a_cohort_of_ones_own_selects(algorithm, tmp_path):
    experiment = toy(algorithm, rounds=3)
    base = resolved(experiment)
    base["method"][0]["cohort"] = "python:mine:lowest_first"
    experiment = from_dict(base)
    assert from_dict(resolved(experiment)) == experiment
    preflight(experiment)
    method = experiment.method[0]
    assert cohort_size(method, 8) == 3
    algorithm = host_of(experiment, method, 0).algorithm
    assert (algorithm.traits.first, algorithm.traits.deadline) == (None, None)
    list(Run(experiment, method, 0, tmp_path / "toy" / "0").play())
    assert [line["trained"][0] for line in read_lines(tmp_path / "toy" / "0")] == [3, 3, 3]


def test_reading_a_configuration_runs_no_code_of_the_user():
    assert "weekdays" in named(shift__what="python:absent:weekdays").shift.words([], [], 10)
