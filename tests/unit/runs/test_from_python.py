"""From Python: the errors of a file, arguments as in a file, and results that are printed in a line."""

import pickle
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fedtide as ft
from fedtide.config import from_dict, resolved
from fedtide.config.reading import named
from fedtide.core.errors import FedtideError
from fedtide.data.shift import AwakeBy
from fedtide.fields.user_code import imported
from fedtide.runs.build import as_json
from helpers import notebook as cells

TASK = ft.Task(lambda: nn.Linear(3, 2))
X, Y = torch.randn(100, 3), torch.arange(100) % 2


def people(**more: Any) -> Any:
    return ft.population(X, Y, ft.data.IID(clients=5), **more)


def simulated(build: Callable[[], nn.Module] = lambda: nn.Linear(3, 2), **options: Any) -> Any:
    algorithm = ft.algorithms.fedavg(ft.Task(build), **{"cohort": 3, **options})
    return ft.simulate(algorithm, people(), rounds=2, eval_every=1)


A = ft.algorithms

WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: ft.run(5), "experiment: found 'int', allowed: a file, recipe:NAME, nested dicts or an Experiment"),
    (lambda: ft.run({"rounds": 1, ("a", 1): 2}), r"experiment: a key: found \('a', 1\), allowed: a text"),
    (lambda: ft.run({"method": [{"algorithm": "fedavg"}]}, workers="two"), "--workers: found 'two', allowed: 1 or"),
    (lambda: ft.LocalTrainer(rate=0.1), r"LocalTrainer\.rate: unknown key; did you mean 'lr'\? Allowed: lr, "),
    (lambda: A.fedavg(TASK, lr=0.1), r"fedavg\.lr: unknown key; did you mean 'local\.lr' or 'server\.lr'\?"),
    (lambda: A.fedavg(TASK, local=0.1), r"fedavg\.local: found 0\.1, allowed: a table"),
    (lambda: A.fedavg(TASK, server=ft.cohorts.Arrivals()), r"fedavg\.server: found 'arrivals', allowed: sgd, "),
    (lambda: A.fedavg(TASK, cohort=ft.cohorts.Arrivals), r"fedavg\.cohort: "),
    (lambda: A.fedavg(nn.Linear(3, 2)), r"fedavg\.task: found Linear.*, allowed: a Task, such as "),
    (lambda: A.fedavg(), r"fedavg: missing a required argument: 'task'"),
    (lambda: simulated(cohort=30), r"fedavg\.cohort\.clients_per_round: found 30, allowed: at most 5, the registered"),
    (lambda: simulated(lambda: nn.Linear(4, 2)), r"model: it does not fit rows of shape \(3,\): mat1 and mat2"),
    (lambda: simulated(lambda: nn.Linear(3, 1)), r"model: it returns shape \(2, 1\) for 2 rows, .* with 2 classes"),
    (
        lambda: simulated(lambda: nn.Sequential(nn.Linear(3, 8), nn.Unflatten(1, (2, 4)))),
        r"model: it returns shape \(2, 2, 4\) for 2 rows, allowed: logits \(rows, classes\) with 2 classes",
    ),
    (lambda: ft.population(X, Y, 3), r"population\.partition: found 3, allowed: "),
    (lambda: people(shift="periodic"), r"population\.shift: found 'periodic', .*llowed: a table"),
    (lambda: people(shift=ft.shift.Periodic()),
     r"population\.shift: found Periodic.*, allowed: a table"),
    (lambda: ft.simulate(A.fedavg, people(), rounds=1), r"simulate\.algorithm: found <function .*, allowed: an Alg"),
    (lambda: ft.simulate(A.fedavg(TASK), X, rounds=1), r"simulate\.population: found tensor.*, allowed: a Population"),
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


@pytest.mark.parametrize("made", [
    lambda task: A.fedavg(task, cohort=2),
    lambda task: A.ifca(task, cohort=2),
    lambda task: A.fedem(task, cohort=2, component_layer="*"),
    A.local,
    A.centralized,
])  # fmt: skip
def test_the_model_of_a_simulation_predicts_as_the_method_does(made):
    clients = people(split=ft.data.Split(val=0.2))
    result = ft.simulate(made(TASK), clients, rounds=1, eval_every=1)
    said = result.trained.predict(X).told
    torch.testing.assert_close(result.model(X).log_softmax(-1), said.float(), atol=1e-5, rtol=0)
    own = result.trained.model(client=1)(X).log_softmax(-1)
    torch.testing.assert_close(own, result.trained.predict(X, client=1).told.float(), atol=1e-5, rtol=0)
    assert pickle.loads(pickle.dumps(result)).accuracy == result.accuracy


STUDY = {
    "rounds": 3,
    "data": {"source": {"kind": "gaussians", "samples": 60}, "partition": {"kind": "iid", "clients": 4}},
    "model": "linear",
    "method": [{"algorithm": "fedavg", "cohort": 2}],
}


def test_seeds_are_a_list_and_sets_a_table(tmp_path):
    title = "a = 1 \N{WATER WAVE}"  # JSON writes such a sign as two, which TOML does not know
    sets = {"rounds": 2, "data.partition": {"kind": "dirichlet", "clients": 3, "alpha": 9.5}, "title": title}
    done = ft.run(STUDY, tmp_path / "run", seeds=[4], sets=sets, workers=1, quiet=True)
    (record,) = done.study.records
    experiment = record.experiment
    assert (experiment.rounds, experiment.seeds, experiment.title) == (2, (4,), title)
    assert experiment.data.partition == ft.data.Dirichlet(clients=3, alpha=9.5)
    again = ft.resume(done.folder, seeds=[4, 5], workers=1, quiet=True)
    assert again.summaries[0].methods[0].seeds == [4, 5]
    assert ft.write_report(done.folder, out=tmp_path / "page.html").exists()
    assert [verdict.wrong for verdict in ft.verify(done.folder)] == [None, None]


def test_more_seeds_that_cannot_be_played_leave_the_folder_as_it_was(tmp_path):
    rows = tmp_path / "rows.npz"
    np.savez(rows, x=X, y=Y)
    study = STUDY | {"data": STUDY["data"] | {"source": {"kind": "npz", "path": str(rows)}}}
    done = ft.run(study, tmp_path / "run", seeds=[4], workers=1, quiet=True)
    before = (done.folder / "config.toml").read_text()
    np.savez(rows, x=2 * X, y=Y)
    with pytest.raises(FedtideError, match=r"have changed .* allowed: the data as they were, or a new run"):
        ft.resume(done.folder, seeds=[4, 5], quiet=True)
    rows.unlink()
    with pytest.raises(FedtideError, match="no such file"):
        ft.resume(done.folder, seeds=[4, 5], quiet=True)
    assert (done.folder / "config.toml").read_text() == before


def test_a_report_is_of_one_folder_or_more():
    with pytest.raises(FedtideError, match=r"^report: name at least one run folder$"):
        ft.write_report()


@pytest.mark.parametrize(("asked", "said"), [
    ({"seeds": 3}, r"seeds: found 3, allowed: a list of whole numbers, such as \[0, 1, 2\]"),
    ({"sets": {"method.local": ft.LocalTrainer()}}, "sets: found .*LocalTrainer.*allowed: values that a file can hold"),
])  # fmt: skip
def test_arguments_that_people_guess(asked, said, tmp_path):
    with pytest.raises(FedtideError, match=f"^{said}"):
        ft.run(STUDY, tmp_path / "run", **asked)


def mine(task: ft.Task, local: ft.LocalTrainer = ft.LocalTrainer(), cohort: ft.cohorts.Cohort = ft.cohorts.Arrivals()):
    return ft.algorithms.fedavg(task, local, cohort=cohort)


mine.__module__ = "__main__"  # as of a notebook


def wrong_rows(scores):
    return float((scores.rows - scores.correct).sum())


class Net(nn.Linear):
    def __init__(self, shape, classes):
        super().__init__(shape[0], classes)


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """An experiment made of what a notebook has, played; and the same of names alone."""
    common = {"rounds": 2, "average_last": 1, "eval_every": 1, "defaults": {"local": {"lr": 0.1}}}
    of_a_file = {**common, "data": {"source": "python:helpers.notebook:rows"}, "model": "python:helpers.notebook:Net"}
    method = {"name": "mine", "algorithm": "fedavg", "cohort": 2, "loss": "python:helpers.notebook:doubled"}
    plain = {**of_a_file, "method": [method]}
    own = {"algorithm": mine, "loss": lambda outputs, y: 2 * cross_entropy(outputs, y), "cohort": 2}
    source = cells.rows()
    study = {**common, "data": {"source": source}, "model": Net, "metrics": [wrong_rows], "method": [own]}
    roots = (tmp_path_factory.mktemp("notebook") / name for name in ("own", "plain"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedtide.report.page.pictures_of", lambda record: [])
        done = [ft.run(each, root, workers=1, quiet=True) for each, root in zip((study, plain), roots, strict=True)]
    return *done, study


def test_functions_classes_and_rows_of_a_notebook_are_run(notebook):
    done, plain, _ = notebook
    (ours,), (theirs,) = (each.study.records[0].methods for each in (done, plain))
    assert ours.name == "mine"
    for view in ("train_clients", "val"):
        assert ours.runs[0].accuracy(view)[1].tolist() == theirs.runs[0].accuracy(view)[1].tolist()
    (measured,) = done.summaries[0].methods[0].measures["wrong_rows"].values
    assert measured > 0
    assert torch.equal(done.model(X[:3]), done.trained().model()(X[:3]))


def test_a_run_of_a_notebook_goes_on_in_its_session_alone(notebook, monkeypatch, capsys):
    done, _, _ = notebook
    assert ft.resume(done.folder).summaries[0].methods[0].seeds == [0]
    assert (
        "mine" in capsys.readouterr().out.splitlines()[1].split(" are of this Python session: one process plays all")[0]
    )
    session = next(name for name in sys.modules if name.startswith("session_"))
    monkeypatch.delitem(sys.modules, session)
    with pytest.raises(
        FedtideError, match="'mine' was code of a Python session that has ended; allowed: 'module:mine'"
    ):
        ft.resume(done.folder)
    assert ft.results(done.folder).summaries[0].methods[0].name == "mine"


@pytest.mark.parametrize(("changes", "arguments", "said"), [
    ({}, {"workers": 2}, "workers: found 2, but no other process can import .*mine of this Python session; allowed: 1"),
    ({"fleet": "workers"}, {}, "fleet.kind: found 'workers', but no other process .* allowed: local, or code"),
    ({"model": nn.Linear(3, 2)}, {}, "model: found 'Linear', allowed: a function that makes a fresh module"),
    ({"method": [{"algorithm": A.fedavg(TASK)}]}, {}, "experiment: method '0'.algorithm: found Algorithm"),
])  # fmt: skip
def test_what_a_notebook_cannot_have_is_one_line(notebook, tmp_path, changes, arguments, said):
    with pytest.raises(FedtideError, match=f"^{said}"):
        ft.run({**notebook[2], **changes}, tmp_path / "run", **arguments)
    assert not (tmp_path / "run").exists()


def test_code_in_an_ingredient_has_a_name_too():
    def away():
        return AwakeBy(lambda clients, time: clients % 2 == 0)

    experiment = from_dict({**STUDY, "shift": ft.Shift(who=ft.shift.Python(away))})
    (name,) = set(re.findall(r"session_\w+:away\w*", as_json(experiment)))
    assert imported(name, "") is away
    assert from_dict(resolved(experiment)).shift.who.find("shift.who") is away


def test_a_shift_takes_what_a_function_would_return():
    who = AwakeBy(lambda clients, time: clients % 2 == 0)
    shifts = [ft.Shift(who=who), ft.Shift(who=lambda: who), ft.Shift(who=ft.shift.Python(lambda: who))]
    people = [ft.population(X, Y, ft.data.IID(6), shift=one) for one in shifts]
    runs = [ft.simulate(A.fedavg(TASK, cohort=2), one, rounds=2) for one in people]
    assert [run.accuracy for run in runs] == [runs[0].accuracy] * 3


def test_code_of_a_module_goes_by_its_name():
    values = named({
        "model": ft.models.MLP(),
        "method": [{"algorithm": A.fedavg, "loss": nn.CrossEntropyLoss}, {"algorithm": "ifca", "cohort": 3}],
        "sweep": {"model": [nn.Linear, "mlp"]},
    })  # fmt: skip
    loss = {"kind": "python", "function": "torch.nn.modules.loss:CrossEntropyLoss"}
    linear = {"kind": "python", "function": "torch.nn.modules.linear:Linear"}
    assert values["model"] == ft.models.MLP()
    assert values["method"] == [
        {"name": "fedavg", "algorithm": "fedavg", "loss": loss}, {"algorithm": "ifca", "cohort": 3},
    ]  # fmt: skip
    assert values["sweep"] == {"model": [linear, "mlp"]}
    one, other = (named({"metrics": [lambda scores: 0.0]})["metrics"][0] for _ in range(2))
    assert one["function"] != other["function"]


def test_a_model_of_a_file_is_told_how_a_task_takes_it():
    with pytest.raises(
        FedtideError, match=r"Task.build: found 'MLP', allowed: lambda: MLP\(\).build\(shape, classes\)"
    ):
        ft.Task(ft.models.MLP())


@pytest.mark.parametrize(("name", "meant"), [
    ("FedAvg", "ft.algorithms.fedavg"), ("fedavg", "ft.algorithms.fedavg"), ("Dirichlet", "ft.data.Dirichlet"),
    ("Answer", "ft.base.Answer"), ("Client", "ft.population"), ("Strategy", "ft.algorithms"),
    ("report", "ft.write_report"),
])  # fmt: skip
def test_names_of_other_libraries_lead_to_ours(name, meant):
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'; did you mean {meant}\?"):
        ft.__getattr__(name)


def untyped(task, local=ft.LocalTrainer(), cohort=ft.cohorts.Arrivals(2)):
    return A.fedavg(task, local, cohort=cohort)


def test_an_algorithm_of_ones_own_needs_no_types(tmp_path):
    data = {"source": {"kind": "gaussians", "samples": 60}, "partition": {"kind": "iid", "clients": 3}}
    methods = [{"algorithm": untyped}, {"name": "three", "algorithm": untyped, "cohort": 3, "local": {"lr": 0.2}}]
    study = {"rounds": 1, "seeds": [0], "data": data, "model": "linear", "method": methods}
    made = from_dict(named(study)).method
    assert [method.settings()["cohort"].clients_per_round for method in made] == [2, 3]
    assert [method.settings()["local"].lr for method in made] == [ft.LocalTrainer().lr, 0.2]


def test_a_preview_reads_a_file_again(tmp_path):
    """A person in a notebook mends the file and asks once more."""
    source = {"kind": "csv", "path": str(tmp_path / "rows.csv"), "label": "label", "client": "client"}
    study = {
        "rounds": 2,
        "data": {"source": source},
        "model": "linear",
        "method": [{"algorithm": "fedavg", "cohort": 2}],
    }
    for clients in (3, 5):
        lines = [f"c{n % clients},{n % 7},{n % 2}" for n in range(120)]
        (tmp_path / "rows.csv").write_text("\n".join(["client,a,label", *lines]) + "\n")
        assert len(ft.show(study).previews[0].population.clients) == clients
