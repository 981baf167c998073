"""From Python: the errors of a file, arguments as in a file, and results that are printed in a line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fedtide as ft
from fedtide.core.errors import FedtideError

TASK = ft.Task(lambda: nn.Linear(3, 2))
X, Y = torch.randn(100, 3), torch.arange(100) % 2


def people(**more: Any) -> Any:
    return ft.population(X, Y, ft.data.IID(clients=5), **more)


def simulated(build: Callable[[], nn.Module] = lambda: nn.Linear(3, 2), **options: Any) -> Any:
    algorithm = ft.algorithms.fedavg(ft.Task(build), **{"cohort": 3, **options})
    return ft.simulate(algorithm, people(), rounds=2, eval_every=1)


A = ft.algorithms

WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: ft.LocalTrainer(rate=0.1), r"LocalTrainer\.rate: unknown key; allowed: lr, .*; did you mean 'lr'\?"),
    (lambda: ft.LocalTrainer(lr="x"), r"LocalTrainer\.lr: found 'x', allowed: a number"),
    (lambda: ft.LocalTrainer(0), r"LocalTrainer\.lr: found 0, allowed: greater than 0\.0"),
    (lambda: ft.LocalTrainer(momentum=0.5, optimizer="adam"), r"LocalTrainer: momentum belongs to optimizer = 'sgd'"),
    (lambda: ft.shift.Periodic(perod=3), r"Periodic\.perod: unknown key; .*; did you mean 'period'\?"),
    (lambda: ft.Shift(who=3), r"Shift\.who: found 3, allowed: "),
    (lambda: ft.config.Forgetting(rounds=()), r"Forgetting\.rounds: found \[\], allowed: one value or more"),
    (lambda: A.fedavg(TASK, lr=0.1), r"fedavg\.lr: unknown key; .*; did you mean 'local\.lr' or 'server\.lr'\?"),
    (lambda: A.ifca(TASK, K=3), r"ifca\.K: unknown key; .*; did you mean 'clusters'\?"),
    (lambda: A.fedavg(TASK, local=0.1), r"fedavg\.local: found 0\.1, allowed: a table"),
    (lambda: A.fedavg(TASK, server="adm"), r"fedavg\.server: found 'adm', .*; did you mean 'adam'\?"),
    (lambda: A.fedavg(TASK, server=ft.cohorts.Arrivals()), r"fedavg\.server: found 'arrivals', allowed: sgd, "),
    (lambda: A.fedavg(TASK, cohort=ft.cohorts.Arrivals), r"fedavg\.cohort: "),
    (lambda: A.fedavg(TASK, cohort=0), r"fedavg\.cohort\.clients_per_round: found 0, allowed: 1 or more"),
    (lambda: A.fedprox(TASK, mu=-1), r"fedprox\.mu: found -1, allowed: 0\.0 or more"),
    (lambda: A.fedavg(nn.Linear(3, 2)), r"fedavg\.task: found Linear.*, allowed: a Task, such as "),
    (lambda: A.fedavg(), r"fedavg: missing a required argument: 'task'"),
    (lambda: simulated(cohort=30), r"fedavg\.cohort\.clients_per_round: found 30, allowed: at most 5, the registered"),
    (lambda: simulated(lambda: nn.Linear(4, 2)), r"model: it does not fit rows of shape \(3,\): mat1 and mat2"),
    (lambda: simulated(lambda: nn.Linear(3, 1)), r"model: it returns shape \(2, 1\) for 2 rows, .* with 2 classes"),
    (lambda: simulated(lambda: nn.LSTM(3, 2)), r"model: it does not fit rows of shape \(3,\): "),
    (lambda: ft.population(X, Y, 3), r"population\.partition: found 3, allowed: "),
    (lambda: people(shift="periodic"), r"population\.shift: found 'periodic', allowed: a table"),
    (lambda: people(split=0.2), r"population\.split: found 0\.2, allowed: a table"),
    (lambda: ft.simulate(A.fedavg, people(), rounds=1), r"simulate\.algorithm: found <function .*, allowed: an Alg"),
    (lambda: ft.simulate(A.fedavg(TASK), X, rounds=1), r"simulate\.population: found tensor.*, allowed: a Population"),
    (lambda: ft.simulate(A.fedavg(TASK, cohort=2), people(), rounds=0), r"simulate\.rounds: found 0, allowed: 1"),
    (lambda: ft.simulate(A.fedavg(TASK, cohort=2), people(), rounds=1, stop_at=3), r"simulate\.stop_at\.acc"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "line"), WRONG)
def test_a_mistake_is_one_line(wrong, line):
    with pytest.raises(FedtideError, match=f"^{line}") as error:
        wrong()
    assert "\n" not in str(error.value)
    assert "pydantic" not in str(error.value)


def test_arguments_may_be_written_as_in_a_file():
    local = ft.LocalTrainer(lr=0.5)
    long = A.fedavgm(TASK, local, server=ft.server.SGD(momentum=0.9, lr=0.5), cohort=ft.cohorts.Arrivals(3))
    short = A.fedavgm(TASK, {"lr": 0.5}, server={"lr": 0.5}, cohort=3)
    turns = ft.Shift(who=ft.shift.Periodic(period=4))
    domain = ["day"] * 50 + ["night"] * 50
    one = people(domain=domain, groups=ft.data.ByDomain(), shift=turns)
    other = people(domain=domain, groups={"by": "domain"}, shift={"who": {"kind": "periodic", "period": 4}})
    results = [ft.simulate(algorithm, clients, rounds=3) for algorithm, clients in ((long, one), (short, other))]
    assert repr(results[0].lines) == repr(results[1].lines)
    assert results[0].state.weights.params["weight"].equal(results[1].state.weights.params["weight"])


def test_objects_of_ones_own_are_left_as_they_are():
    class Mine(ft.cohorts.Uniform):
        pass

    class Duck(ft.cohorts.Picking):
        def pick(self, memo, fleet, rng, serve, among=None, m=None):
            return fleet.reachable[:2]

    for cohort in (Mine(2), Duck()):
        result = simulated(cohort=cohort)
        assert len(result.lines) == 2


def test_results_and_populations_are_a_line():
    result = simulated()
    assert repr(result) == f"Result(rounds=2, accuracy={result.accuracy[-1]:.4g})"
    assert repr(people()) == "Population(5 clients, 100 rows of shape (3,), 2 classes)"
    aside = people(held_out_clients=ft.data.HeldOutClients(clients=2))
    assert repr(aside) == "Population(5 clients, 2 held out, 100 rows of shape (3,), 2 classes)"


def test_run_says_what_it_does_and_finds_unless_it_is_to_be_quiet(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    study = {
        "rounds": 2,
        "data": {"source": "gaussians", "partition": {"kind": "iid", "clients": 4}},
        "model": "linear",
        "method": [{"name": "A", "algorithm": "fedavg", "cohort": 2}],
    }
    done = ft.run(study, out="first", workers=1)
    out = capsys.readouterr().out
    assert out.startswith("run folder: first\n1 run\nA · seed 0: round 2/2, accuracy")
    assert out.splitlines()[-1].split()[0] == "A"
    accuracy = done.summaries[0].methods[0].measures["accuracy"].mean
    assert repr(done) == f"Finished('first', A {accuracy:.4g})"
    ft.run(study, out="second", workers=1, quiet=True)
    assert capsys.readouterr().out == ""
