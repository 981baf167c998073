"""Reading experiments: what is written, merged, overridden, swept, and written back."""

from __future__ import annotations

import contextlib
import copy
import inspect
import tomllib
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

import fedtide as ft
from fedtide.algorithms import REGISTRY
from fedtide.cohorts import Arrivals, Everyone, Uniform
from fedtide.config import (
    Experiment,
    Point,
    axes,
    brief,
    from_dict,
    matching,
    options_model,
    points,
    read,
    resolved,
    slug,
    to_toml,
)
from fedtide.core.errors import FedtideError
from fedtide.data.partition import Dirichlet
from fedtide.data.shift.who import Always, Periodic
from fedtide.data.sources import IDX, Gaussians
from fedtide.data.sources import Python as PythonSource
from fedtide.fields.types import HIDDEN
from fedtide.learn.local import LocalTrainer
from fedtide.learn.schedules import Exponential
from fedtide.learn.server import SGD, Adagrad, Adam, KerasAdam, Yogi
from fedtide.mixtures.priors import Linear
from fedtide.models import MLP
from helpers.examples import examples
from helpers.toys import TOY

law = examples(100)


def experiment(
    *methods: dict[str, Any], sets: tuple[str, ...] = (), scale: str | None = None, **changes: Any
) -> Experiment:
    given_methods = list(methods) or [{"name": "A", "algorithm": "fedavg"}]
    return from_dict({**copy.deepcopy(TOY), "method": given_methods, **changes}, where="f.toml", sets=sets, scale=scale)


def options(made: Experiment, name: str = "A") -> dict[str, Any]:
    return next(m for m in made.method if m.name == name).settings()


# -- a file ------------------------------------------------------------------------------------------------------------


def test_the_experiment_of_the_design_page_is_read(tmp_path):
    path = tmp_path / "study.toml"
    path.write_text("""
rounds = 256
seeds = [0, 1, 2]
eval_every = 8

[data]
source = "day-night-characters"
[data.partition]
kind = "dirichlet"
clients = 100
alpha = 0.3

[data.groups]
by = "domain"

[shift.who]
kind = "periodic"
curve = "linear"
period = 32
exponent = 1.0

[model]
kind = "cnn"

[sweep]
"method.local.lr" = [0.03, 0.1]

[[method]]
name = "FedAvg"
algorithm = "fedavg"

[[method]]
name = "FedProx"
algorithm = "fedprox"
local.proximal = 0.5
""")
    made = read(path)
    assert (made.rounds, made.seeds, made.eval_every) == (256, (0, 1, 2), 8)
    assert made.data.partition == Dirichlet(clients=100, alpha=0.3)
    assert made.shift.who == Periodic(period=32)
    assert made.model.kind == "cnn"
    assert options(made, "FedProx")["local"].proximal == 0.5
    assert [point.name for point in points(made)] == ["lr 0.03", "lr 0.1"]


def test_whatever_is_not_said_has_its_default():
    made = from_dict({"method": [{"algorithm": "fedavg"}]})
    assert made == Experiment(method=made.method)
    assert made.method[0].name == "fedavg"
    assert options(made, "fedavg") == {
        "local": LocalTrainer(),
        "server": SGD(),
        "cohort": Arrivals(),
        "weighting": "samples",
    }
    assert made.shift.who == Always()


def test_an_experiment_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        experiment().rounds = 3


def test_reading_leaves_what_was_given_as_it_was():
    raw = {
        **copy.deepcopy(TOY),
        "method": [{"algorithm": "fedavg", "shift": {"who": "always"}}],
        "defaults": {"cohort": 3},
    }
    raw["scale"] = {"nano": {"rounds": 2, "data": {"source": {"kind": "gaussians"}}}}
    before = copy.deepcopy(raw)
    from_dict(raw, sets=["method.local.lr=0.5", "rounds=3"], scale="nano")
    assert raw == before


# -- the signature is the configuration --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REGISTRY)
def test_every_keyword_of_an_algorithm_is_a_key_with_its_default(name):
    signature = inspect.signature(REGISTRY[name].make).parameters
    model = options_model(name)
    assert list(model.model_fields) == [p for p in signature if p != "task"]
    assert dict(model()) == {p: signature[p].default for p in model.model_fields}


def test_a_table_without_a_kind_changes_the_default_and_one_with_a_kind_replaces_it():
    made = experiment(
        {"name": "A", "algorithm": "fedavgm", "server": {"lr": 0.5}},
        {"name": "B", "algorithm": "fedavgm", "server": {"kind": "sgd", "lr": 0.5}},
        {"name": "C", "algorithm": "vanilla", "server": {"lr": 0.5}},
        {"name": "D", "algorithm": "fielding", "cohort": {"clients_per_round": 3}},
        {"name": "E", "algorithm": "fedtem", "prior": {"phase": 3.0}},
    )
    assert options(made, "A")["server"] == SGD(0.5, 0.9)
    assert options(made, "B")["server"] == SGD(0.5)
    assert options(made, "C")["server"] == KerasAdam(0.5, eps=1e-4)
    assert options(made, "D")["cohort"] == Uniform(3)
    assert options(made, "E")["prior"] == Linear(period=4.0, phase=3.0)
    assert from_dict(resolved(made)) == made


def test_a_preset_is_what_it_is_made_of_by_another_name_and_other_defaults():
    task = ft.Task(lambda: ft.models.Linear().build((3,), 2))
    for name, server in (("fedavgm", SGD(momentum=0.9)), ("fedadagrad", Adagrad()), ("fedyogi", Yogi())):
        make = REGISTRY[name].make
        assert dict(options_model(name)()) == {**dict(options_model("fedavg")()), "server": server}
        assert (make(task).name, make(task, LocalTrainer(), SGD()).name) == (name, name)
        with pytest.raises(TypeError, match="unexpected keyword argument 'lr'"):
            make(task, lr=0.1)


def test_a_key_of_a_table_below_is_found():
    with pytest.raises(FedtideError, match=r"unknown key; allowed: .*; did you mean 'local.lr' or 'server.lr'\?"):
        experiment({"name": "A", "algorithm": "fedyogi", "lr": 0.1})


OWN = """
from __future__ import annotations
from dataclasses import dataclass
from typing import Literal

from fedtide.algorithms.fedavg import fedavg
from fedtide.core.base import Algorithm
from fedtide.learn.local import LocalTrainer
from fedtide.learn.server import SGD, Server
from fedtide.cohorts import Arrivals, Cohort


def mine(task, *, needed: int, local: LocalTrainer = LocalTrainer(), beta: float = 0.5, style: Literal["a", "b"] = "a",
         names: tuple[str, ...] = (), server: Server = SGD(), cohort: Cohort = Arrivals(), maybe: float | None = None,
         untyped=3) -> Algorithm:
    return fedavg(task, local, server, cohort)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_algorithms.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield "own_algorithms:mine"
    options_model.cache_clear()


def test_an_algorithm_of_the_users_own_is_configured_by_its_signature(own):
    made = experiment(
        {"name": "A", "algorithm": own, "needed": 3, "names": ["x"], "cohort": 2, "server": "adam", "untyped": "z"}
    )
    assert options(made) == {
        "needed": 3, "local": LocalTrainer(), "beta": 0.5, "style": "a", "names": ("x",), "server": Adam(),
        "cohort": Arrivals(2), "maybe": None, "untyped": "z",
    }  # fmt: skip
    assert read_back(made) == made


@pytest.mark.parametrize(("given_options", "said"), [
    ({}, "method 'A'.needed: missing"),
    ({"needed": 3, "bta": 1}, "method 'A'.bta: unknown key; allowed: needed, local, beta.*did you mean 'beta'"),
    ({"needed": "x"}, "method 'A'.needed: found 'x', allowed: a whole number"),
    ({"needed": 3, "style": "c"}, "method 'A'.style: found 'c', allowed: a, b"),
    ({"needed": 3, "local": {"rate": 1}}, "method 'A'.local.rate: unknown key.*did you mean 'lr'"),
    ({"needed": 3, "task": 1}, "method 'A'.task: unknown key"),
])  # fmt: skip
def test_errors_name_the_keys_of_the_users_own_algorithm(own, given_options, said):
    with pytest.raises(FedtideError, match=rf"^f.toml: {said}"):
        experiment({"name": "A", "algorithm": own, **given_options})


# -- short spellings ---------------------------------------------------------------------------------------------------


def test_choices_may_be_spelled_as_words():
    made = experiment(
        {
            "name": "A",
            "algorithm": "fedavg",
            "server": "yogi",
            "cohort": "everyone",
            "loss": "cross-entropy",
            "local": {"lr_schedule": "exponential"},
        },
        data={"source": "idx:mnist", "partition": "dirichlet"},
        shift={"who": "always", "what": "static", "how": "identity"},
        model="mlp",
    )
    assert made.data.source == IDX("mnist")
    assert made.data.partition == Dirichlet()
    assert made.model == MLP()
    assert options(made)["server"] == Yogi()
    assert options(made)["cohort"] == Everyone()
    assert options(made)["local"].lr_schedule == Exponential()
    python = experiment(data={**TOY["data"], "source": "python:mine:load"})
    assert python.data.source == PythonSource("mine:load")


PARTS = {
    "data.source.samples=50": ({"data": {"source": "gaussians"}}, lambda e: e.data.source == Gaussians(samples=50)),
    "data.partition.alpha=0.1": (
        {"data": {"source": "gaussians", "partition": "dirichlet"}}, lambda e: e.data.partition.alpha == 0.1,
    ),
    "shift.who.period=8": (
        {"data": {**TOY["data"]}, "shift": {"who": "periodic"}}, lambda e: e.shift.who == Periodic(period=8),
    ),
    "shift.what.cycles=3": ({"shift": {"what": "domain-mixture"}}, lambda e: e.shift.what.cycles == 3),
    "model.hidden=[7]": ({"model": "mlp"}, lambda e: e.model == MLP((7,))),
}  # fmt: skip


@pytest.mark.parametrize("key", PARTS)
def test_a_word_can_be_overridden_by_its_parts(key):
    changes, expected = PARTS[key]
    assert expected(experiment(sets=(key,), **changes))


@pytest.mark.parametrize(("key", "spelled", "expected"), [
    ("method.server.eps=0.5", {"server": "adam"}, lambda o: o["server"] == Adam(eps=0.5)),
    ("method.cohort.clients_per_round=3", {"cohort": "uniform"}, lambda o: o["cohort"].clients_per_round == 3),
    ("method.cohort.clients_per_round=3", {"cohort": 5}, lambda o: o["cohort"] == Arrivals(3)),
    ("method.local.lr_schedule.factor=0.5", {"local": {"lr_schedule": "exponential"}},
     lambda o: o["local"].lr_schedule == Exponential(0.5)),
])  # fmt: skip
def test_a_word_of_a_method_can_be_overridden_by_its_parts(key, spelled, expected):
    assert expected(options(experiment({"name": "A", "algorithm": "fedavg", **spelled}, sets=(key,))))


# -- defaults ----------------------------------------------------------------------------------------------------------


def test_defaults_go_to_every_method_that_takes_them_and_its_own_word_wins():
    made = experiment(
        {"name": "A", "algorithm": "fedavg"},
        {"name": "B", "algorithm": "fedprox", "local": {"lr": 0.9}},
        {"name": "C", "algorithm": "fedprox", "local": {"proximal": 7.0}, "cohort": 2},
        defaults={"weighting": "uniform", "cohort": 5, "local": {"lr": 0.2, "batch_size": 3}},
    )
    assert options(made, "A")["local"] == LocalTrainer(lr=0.2, batch_size=3)
    assert options(made, "B")["local"] == LocalTrainer(lr=0.9, batch_size=3, proximal=0.1)
    assert options(made, "C")["local"] == LocalTrainer(lr=0.2, batch_size=3, proximal=7.0)
    assert [options(made, name)["weighting"] for name in "ABC"] == ["uniform"] * 3
    assert [options(made, name)["cohort"].clients_per_round for name in "ABC"] == [5, 5, 2]


def test_a_method_that_chooses_another_kind_replaces_the_default_whole():
    made = experiment(
        {"name": "A", "algorithm": "fedavg", "server": {"kind": "sgd", "lr": 0.5}},
        {"name": "B", "algorithm": "fedavg", "server": {"kind": "adam", "beta1": 0.5}},
        {"name": "C", "algorithm": "fedavg"},
        defaults={"server": {"kind": "adam", "eps": 0.1}},
    )
    assert options(made, "A")["server"] == SGD(0.5)
    assert options(made, "B")["server"] == Adam(eps=0.1, beta1=0.5)
    assert options(made, "C")["server"] == Adam(eps=0.1)


def test_a_default_that_nobody_takes_is_a_mistake():
    with pytest.raises(
        FedtideError,
        match=r"^f.toml: defaults.mu: no method takes it; allowed: cohort, decide_per, init_from, local, loss",
    ):
        experiment({"algorithm": "fedavg"}, defaults={"mu": 0.1})
    with pytest.raises(FedtideError, match=r"defaults.lcoal: no method takes it.*did you mean 'local'\?$"):
        experiment({"algorithm": "fedavg"}, defaults={"lcoal": {}})
    with pytest.raises(FedtideError, match=r"defaults.cohort: no method takes it; allowed: [^?]*$"):
        experiment({"algorithm": "local"}, defaults={"cohort": 4})


# -- methods with a shift of their own ---------------------------------------------------------------------------------


def test_a_method_may_meet_another_shift():
    made = experiment(
        {"name": "A", "algorithm": "fedavg"},
        {"name": "B", "algorithm": "fedavg", "shift": {"who": "always"}},
        {"name": "C", "algorithm": "fedavg", "shift": {"who": {"period": 8}, "clock": "seconds"}},
        shift={"who": {"kind": "periodic", "period": 4, "exponent": 2.0}},
    )
    a, b, c = (made.shift_of(method) for method in made.method)
    assert a == made.shift
    assert (b.who, b.clock) == (Always(), "rounds")
    assert (c.who, c.clock) == (Periodic(period=8, exponent=2.0), "seconds")


# -- overrides ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("assignment", "value"), [
    ("rounds=3", 3), ("rounds = 3", 3), (" rounds =3 ", 3), ("title=a b c", "a b c"), ('title="3"', "3"),
    ("title=it's = so", "it's = so"), ("seeds=[4, 5]", (4, 5)), ("title=", ""), ("eval_clients=7", 7),
])  # fmt: skip
def test_an_override_is_toml_or_else_a_word(assignment, value):
    assert getattr(experiment(sets=(assignment,)), assignment.partition("=")[0].strip()) == value


def test_later_overrides_win():
    assert experiment(sets=("rounds=3", "rounds=4")).rounds == 4


@pytest.mark.parametrize("assignment", ["rounds", "", "=3", " = 3"])
def test_an_override_without_a_key_or_a_value_is_one_clear_line(assignment):
    with pytest.raises(FedtideError, match=rf"^--set: found '{assignment}', allowed: key=value"):
        experiment(sets=(assignment,))


def test_an_override_that_is_wrong_is_named_as_such(tmp_path):
    path = tmp_path / "study.toml"
    path.write_text(to_toml(experiment()))
    with pytest.raises(FedtideError, match=r"study\.toml with rouns=3: rouns: unknown key"):
        read(path, sets=("rouns=3",))
    path.write_text(path.read_text().replace("rounds = ", "ronds = "))
    with pytest.raises(FedtideError, match=r"study\.toml: ronds: unknown key"):
        read(path, sets=("rouns=3",))


PROXIMAL = (0.0, 0.1, 0.0)
THREE = [
    {"name": "A", "algorithm": "fedavg"},
    {"name": "B b", "algorithm": "fedprox"},
    {"name": "C", "algorithm": "fedsgd"},
]


@pytest.mark.parametrize(("assignment", "rates"), [
    ("method.local.lr=0.7", [0.7, 0.7, 0.7]),
    ("method.A.local.lr=0.7", [0.7, 0.1, 0.1]),
    ("method.B b.local.lr=0.7", [0.1, 0.7, 0.1]),
    ("method.2.local.lr=0.7", [0.1, 0.1, 0.7]),
])  # fmt: skip
def test_an_override_reaches_all_methods_or_one_by_name_or_place(assignment, rates):
    made = experiment(*THREE, sets=(assignment,))
    assert [method.settings()["local"].lr for method in made.method] == rates


DOTTED = ({"name": "b", "algorithm": "fedavg"}, {"name": "b.2", "algorithm": "fedavg"})


def rates_of(made: Experiment) -> list[float]:
    return [options(made, method["name"])["local"].lr for method in DOTTED]


@pytest.mark.parametrize("key", ["method.b.2.local.lr", "method.1.local.lr"])
def test_a_name_with_a_dot_is_found_by_every_key(key):
    default = rates_of(experiment(*DOTTED))
    found = [default[0], 0.7]
    assert rates_of(experiment(*DOTTED, sets=(f"{key}=0.7",))) == found
    scaled = {**copy.deepcopy(TOY), "method": list(DOTTED), "scale": {"nano": tomllib.loads(f"{key} = 0.7")}}
    assert rates_of(from_dict(scaled, scale="nano")) == found
    swept = points(experiment(*DOTTED, sweep={key: [0.7, 0.9]}))
    assert [rates_of(point.experiment) for point in swept] == [found, [default[0], 0.9]]


def test_a_quoted_name_with_a_dot_is_found_in_a_scale():
    scale = {"nano": tomllib.loads('method."b.2".local.lr = 0.7')}
    made = from_dict({**copy.deepcopy(TOY), "method": list(DOTTED), "scale": scale}, scale="nano")
    assert rates_of(made)[1] == 0.7


def test_of_names_that_begin_alike_the_longest_is_meant():
    made = experiment(*DOTTED, sets=("method.b.local.lr=0.3", "method.b.2.local.lr=0.7"))
    assert rates_of(made) == [0.3, 0.7]
    with pytest.raises(
        FedtideError, match=r"method.b.2: that is a whole table; name one of its keys, 'method.b.2.<key>'"
    ):
        experiment(*DOTTED, sets=("method.b.2=0.7",))


def test_an_override_of_methods_wins_over_the_defaults():
    made = experiment(*THREE, sets=("method.local.lr=0.7",), defaults={"local": {"lr": 0.2, "batch_size": 3}})
    assert [m.settings()["local"] for m in made.method] == [
        LocalTrainer(lr=0.7, batch_size=3, proximal=mu) for mu in PROXIMAL
    ]
    made = experiment(*THREE, sets=("defaults.local.lr=0.7",), defaults={"local": {"lr": 0.2, "batch_size": 3}})
    assert [m.settings()["local"] for m in made.method] == [
        LocalTrainer(lr=0.7, batch_size=3, proximal=mu) for mu in PROXIMAL
    ]


def test_an_override_may_replace_a_whole_table():
    assert experiment(sets=('data.source={kind="gaussians", samples=9}',)).data.source == Gaussians(samples=9)
    assert experiment(sets=("data.source=idx:mnist",)).data.source == IDX("mnist")
    assert experiment(sets=("shift.who=always",)).shift.who == Always()


# -- scales ------------------------------------------------------------------------------------------------------------

SCALES = {
    "nano": {"rounds": 2, "data": {"partition": {"clients": 4}, "source": {"kind": "gaussians", "samples": 40}}},
    "cpu": {"rounds": 50},
    "paper": {},
}


def test_a_scale_replaces_what_it_names_and_leaves_the_rest():
    raw = {**copy.deepcopy(TOY), "rounds": 999, "method": [{"algorithm": "fedavg"}], "scale": SCALES}
    nano = from_dict(raw, scale="nano")
    assert (nano.rounds, nano.data.partition.clients, nano.data.held_out_clients.clients) == (2, 4, 2)
    assert nano.data.source == Gaussians(samples=40)  # a table with a kind replaces the old one whole
    assert from_dict(raw, scale="paper").rounds == 999


def test_the_scale_for_a_computer_is_the_default_where_there_is_one():
    raw = {**copy.deepcopy(TOY), "rounds": 999, "method": [{"algorithm": "fedavg"}], "scale": SCALES}
    assert from_dict(raw).rounds == 50
    assert from_dict(raw, scale="paper").rounds == 999
    assert from_dict({**raw, "scale": {"nano": {"rounds": 2}}}).rounds == 999


def test_overrides_come_after_the_scale():
    raw = {**copy.deepcopy(TOY), "method": [{"algorithm": "fedavg"}], "scale": SCALES}
    assert from_dict(raw, scale="nano", sets=["rounds=7"]).rounds == 7


@pytest.mark.parametrize(("scales", "asked", "said"), [
    (None, "nano", "scale: found 'nano', allowed: none: it has no .scale. tables"),
    ({"nano": {}, "cpu": {}}, "paper", "scale: found 'paper', allowed: nano, cpu"),
    ({"nan": {}}, None, "scale.nan: allowed: nano, cpu, paper; did you mean 'nano'"),
    ({"nano": {"rouns": 2}}, "nano", "rouns: unknown key.*did you mean 'rounds'"),
])  # fmt: skip
def test_a_scale_that_is_not_there_is_one_clear_line(scales, asked, said):
    raw = {**copy.deepcopy(TOY), "method": [{"algorithm": "fedavg"}]} | ({"scale": scales} if scales else {})
    with pytest.raises(FedtideError, match=rf"^f.toml: {said}"):
        from_dict(raw, where="f.toml", scale=asked)


# -- sweeps ------------------------------------------------------------------------------------------------------------


def test_without_a_sweep_there_is_one_point_without_a_name():
    made = experiment()
    assert points(made) == [Point("", "", made)]


def test_a_sweep_is_a_grid_and_a_point_is_named_after_its_values():
    made = experiment(sweep={"method.local.lr": [0.1, 0.5], "data.partition.clients": [4, 8], "shift.who": ["always"]})
    named = points(made)
    assert [point.name for point in named] == [
        "lr 0.1, clients 4, who always", "lr 0.1, clients 8, who always",
        "lr 0.5, clients 4, who always", "lr 0.5, clients 8, who always",
    ]  # fmt: skip
    for point, (rate, clients) in zip(
        [p.experiment for p in named], [(0.1, 4), (0.1, 8), (0.5, 4), (0.5, 8)], strict=True
    ):
        assert (options(point)["local"].lr, point.data.partition.clients) == (rate, clients)
        assert point.sweep == {}
        assert point.shift.who == Always()
        assert (point.rounds, point.seeds) == (made.rounds, made.seeds)


def test_keys_that_change_together_are_one_axis_named_after_the_first():
    made = experiment(sweep={"data.partition.clients, rounds": [[4, 3], [8, 6]], "method.local.lr": [0.1, 0.5]})
    swept = points(made)
    assert [point.name for point in swept] == [f"clients {n}, lr {lr}" for n in (4, 8) for lr in (0.1, 0.5)]
    assert [point.experiment.rounds for point in swept] == [3, 3, 6, 6]
    assert [point.experiment.data.partition.clients for point in swept] == [4, 4, 8, 8]
    assert axes(made) == {"data.partition.clients": (4, 8), "method.local.lr": (0.1, 0.5)}


def test_swept_titles_name_the_points_by_themselves():
    """Points that differ in whole tables, such as worlds, have no value of their own to be called by."""
    who = [{}, {"who": "always"}]
    made = experiment(sweep={"title, shift": [["as it was", who[0]], ["all there", who[1]]], "rounds": [1, 2]})
    assert [point.name for point in points(made)] == [
        f"{title}, rounds {n}" for title in ("as it was", "all there") for n in (1, 2)
    ]
    assert matching("all there", [point.name for point in points(made)]) == [f"all there, rounds {n}" for n in (1, 2)]


@pytest.mark.parametrize("choice", [3, [3], [3, 4, 5]])
def test_keys_that_change_together_have_a_value_each(choice):
    with pytest.raises(FedtideError, match=r"sweep\.'data\.partition\.clients, rounds': found .*a list of 2 values"):
        points(experiment(sweep={"data.partition.clients, rounds": [[4, 3], choice]}))


def test_a_sweep_may_reach_one_method():
    made = experiment(*THREE, sweep={"method.A.local.lr": [0.5, 0.6]})
    rates = [[m.settings()["local"].lr for m in point.method] for point in (p.experiment for p in points(made))]
    assert rates == [[0.5, 0.1, 0.1], [0.6, 0.1, 0.1]]


@pytest.mark.parametrize(
    ("sweep", "said"),
    [
        ({"rounds": []}, r"f.toml: sweep.rounds: found \[\], allowed: one value or more"),
        (
            {"rounds": [1, 2], "seeds, rounds": [[[0], 1]]},
            "f.toml: sweep: found 'rounds twice', allowed: each once",
        ),
        ({"rouns": [1]}, r"f.toml: sweep point 'rouns 1': rouns: unknown key.*did you mean 'rounds'"),
        (
            {"method.local.lr": [0.1, -1]},
            r"f.toml: sweep point 'lr -1': method 'A'.local.lr: found -1, allowed: greater",
        ),
    ],
)
def test_a_sweep_that_cannot_be_is_one_clear_line(sweep, said):
    with pytest.raises(FedtideError, match=f"^{said}"):
        points(experiment(sweep=sweep), "f.toml")


@pytest.mark.parametrize("sweep", [
    {"method.local.lr": [0.1, 0.01]},
    {"shift.who.phase": [-8, 8]},
    {"data.split.test": [0.1, 0.15], "data.split.val": [0.1, 0.15]},
    {"model.hidden": [[5], [5, 5]]},
    {"data.partition": [{"kind": "iid", "clients": 8}, {"kind": "dirichlet", "clients": 8}]},
    {"title": ["a/b", "a b"]},
])  # fmt: skip
def test_every_point_of_a_sweep_has_a_folder_of_its_own(sweep):
    folders = [point.folder for point in points(experiment(sweep=sweep))]
    assert len(set(folders)) == len(folders) > 1


# -- names of folders --------------------------------------------------------------------------------------------------


@law
def seen(size: int) -> st.SearchStrategy[str]:
    """Text that people are shown."""
    return st.text(st.characters(exclude_categories=("Cs",)), max_size=size).map(lambda text: HIDDEN.sub("", text))


@given(st.text(max_size=12))
def test_a_folder_name_has_no_characters_that_mean_something_else(name):
    made = slug(name)
    assert made == slug(made)
    assert not set(made) & set('/\\:*?"<>| \0\n')
    assert made not in ("", ".", "..")


@pytest.mark.parametrize("name", ["..", ".", "config.toml", "Summary.json", "report.html", "environment.json"])
def test_no_method_gets_the_place_of_something_else_in_the_run_folder(name):
    """Refused, or put elsewhere."""
    with contextlib.suppress(FedtideError):
        made = experiment({"name": name, "algorithm": "fedavg"})
        assert slug(made.method[0].name) not in (
            "..",
            ".",
            "config.toml",
            "summary.json",
            "report.html",
            "environment.json",
        )


# -- written back ------------------------------------------------------------------------------------------------------


def read_back(made: Experiment) -> Experiment:
    return from_dict(tomllib.loads(to_toml(made)))


def test_every_default_is_written_out():
    text = tomllib.loads(to_toml(experiment()))
    assert text["method"][0]["local"]["lr"] == 0.1
    assert text["method"][0]["cohort"] == {"clients_per_round": 10, "over_selection": 1.0, "kind": "arrivals"}
    assert text["shift"]["who"]["exponent"] == 1.0
    assert text["data"]["split"] == {"val": 0.2, "test": 0.25, "by": "random"}
    assert text["fleet"]["threads"] == 1

    def unwritten(value: Any, table: Any, key: str) -> list[str]:
        if isinstance(value, Experiment) or is_dataclass(value):
            names = type(value).model_fields if isinstance(value, Experiment) else [f.name for f in fields(value)]
            return [
                missing
                for name in names
                if getattr(value, name) is not None
                for missing in (
                    [f"{key}.{name}"] if name not in table else unwritten(getattr(value, name), table[name], name)
                )
            ]
        return []

    assert unwritten(experiment(), text, "") == []


small = st.integers(1, 50)
share = st.floats(0, 0.5)
positive = st.floats(1e-6, 1e6)


def choice(kind: str, **given_keys: st.SearchStrategy) -> st.SearchStrategy:
    return st.fixed_dictionaries({"kind": st.just(kind)}, optional=given_keys)


schedules = st.one_of(
    choice("constant"), choice("exponential", factor=positive), choice("cosine", floor=share),
    choice("steps", at=st.lists(share, max_size=3), factor=positive), st.sampled_from(["constant", "steps", "cosine"]),
)  # fmt: skip
usual = {
    "lr": positive, "batch_size": st.integers(0, 9), "weight_decay": share, "max_grad_norm": positive,
    "lr_schedule": schedules, "momentum": share,
}  # fmt: skip
locals_ = st.one_of(*(st.fixed_dictionaries({}, optional={work: small, **usual}) for work in ("epochs", "local_steps")))
servers = st.one_of(
    choice("sgd", lr=positive, momentum=share), choice("adagrad", eps=positive),
    choice("yogi", initial_accumulator=share),
    choice("adam", beta2=share), choice("keras-adam", beta2=share), st.sampled_from(["sgd", "adam"]),
)  # fmt: skip
cohorts = st.one_of(
    small, choice("uniform", clients_per_round=small), choice("arrivals", clients_per_round=small), st.just("everyone")
)
whos = st.one_of(
    choice("always", dropout_rate=share),
    st.just("always"),
    choice("replay").map(lambda d: d | {"path": "shift/0.safetensors"}),
    choice(
        "periodic",
        period=positive,
        exponent=positive,
        phase=st.floats(-9, 9),
        curve=st.sampled_from(["linear", "cosine"]),
    ),
    choice("block-cyclic", period=positive, phase=st.floats(-9, 9)),
)
shifts = st.fixed_dictionaries({}, optional={
    "who": whos, "clock": st.sampled_from(["rounds", "seconds"]),
    "what": st.one_of(
        choice("domain-mixture", cycles=positive, samples=small, jitter=st.integers(0, 9)), st.just("static")
    ),
    "how": st.one_of(choice("rotation", angles=st.just([0, 90])), st.just("identity")),
})  # fmt: skip
sources = st.one_of(
    st.sampled_from(
        ["day-night-characters", "gaussians", "idx:mnist", "csv:a.csv", "npz:x.npz", "cifar:c", "python:m:f"]
    ),
    choice("gaussians", samples=small, noise=positive),
    choice("idx", transpose=st.booleans(), first_label=st.integers(0, 3)).map(lambda d: d | {"path": "p"}),
    choice("csv", client=st.text(max_size=3), features=st.lists(st.text(max_size=3), max_size=2)).map(
        lambda d: d | {"path": "p"}
    ),
    choice(
        "python", options=st.dictionaries(st.text(max_size=3), small | st.text(max_size=3) | st.booleans(), max_size=2)
    ).map(lambda d: d | {"function": "m:f"}),
    choice("npz", names=st.just({"x": "arr_0"})).map(lambda d: d | {"path": "p"}),
    choice("manifest", size=small, channels=st.just(1), cache=st.text(max_size=3)).map(lambda d: d | {"path": "p"}),
    choice("domains").map(lambda d: d | {"names": ["a", "b"], "sources": ["gaussians", {"kind": "idx", "path": "q"}]}),
)
partitions = st.one_of(
    st.sampled_from(["iid", "dirichlet", "natural", "rotation", "saved:x.safetensors"]),
    choice("dirichlet-class", alpha=positive, min_samples=st.integers(0, 9)),
    choice("dirichlet", samples=small),
    choice("label-shards", per_client=small),
    choice("majority", p=share, pairs=st.just("product")),
    choice("resample", samples=small),
    choice("rotation", angles=st.just([0, 180, 270])),
    choice("iid", clients=small, samples=small),
)
datas = st.fixed_dictionaries(
    {},
    optional={
        "source": sources,
        "partition": partitions,
        "seed": small,
        "directory": st.text(max_size=4),
        "split": st.fixed_dictionaries({}, optional={"val": share, "test": share}),
        "held_out_clients": st.fixed_dictionaries({}, optional={"clients": small, "samples": small}),
        "groups": st.sampled_from(
            [{"by": "none"}, {"by": "domain"}, {"by": "labels", "labels": [[0, 1], [2]], "names": ["x", "y"]}]
        ),
    },
)
models = st.one_of(
    st.sampled_from(["linear", "cnn", "small-cnn", "lenet5", "resnet8"]),
    choice("mlp", hidden=st.lists(small, max_size=3)),
    choice("cnn", channels=st.just([3, 4]), dropout=st.tuples(share, share).map(list)),
    choice("resnet18", form=st.just("cifar"), norm=st.just("mixed")),
    choice("mobilenet-v2", form=st.just("imagenet"), norm=st.just("group"), dropout=share),
    choice("shufflenet-v2", form=st.just("imagenet"), norm=st.just("group")),
    choice("vit", size=st.just("b/16"), patch=small, depth=small, mlp=small, dropout=share),
    choice("lstm", embedding=small, hidden=small),
    choice("python", options=st.just({"wide": 3})).map(lambda d: d | {"function": "m:f"}),
)  # fmt: skip
methods = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {"algorithm": st.just("fedavg")}, optional={"server": servers, "weighting": st.just("uniform")}
        ),
        st.fixed_dictionaries(
            {"algorithm": st.sampled_from(["fedprox", "q-fedavg", "fedsgd"])}, optional={"shift": shifts}
        ),
        st.fixed_dictionaries(
            {"algorithm": st.just("fedadam")},
            optional={"server": st.fixed_dictionaries({}, optional={"beta2": share})},
        ),
    ).flatmap(lambda m: st.fixed_dictionaries({}, optional={"local": locals_, "cohort": cohorts}).map(lambda o: m | o)),
    min_size=1,
    max_size=3,
).map(lambda listed: [m | {"name": f"method {i}"} for i, m in enumerate(listed)])
experiments = st.fixed_dictionaries(
    {"method": methods},
    optional={
        "rounds": small,
        "seeds": st.lists(st.integers(0, 99), min_size=1, max_size=3, unique=True),
        "title": seen(5),
        "description": seen(5),
        "eval_every": small,
        "eval_clients": small,
        "checkpoint_every": small,
        "average_last": small,
        "baseline": st.just("method 0"),
        "precision": st.sampled_from(["fp32", "fp64"]),
        "data": datas,
        "shift": shifts,
        "model": models,
        "sweep": st.just({"method.local.lr": [0.1, 0.2], "rounds": [3]}),
        "fleet": st.fixed_dictionaries(
            {}, optional={"kind": st.just("workers"), "workers": small, "channels_last": st.just(True)}
        ),
    },
)


@examples(100)
@given(experiments)
def test_an_experiment_is_read_back_as_it_was_written(raw):
    made = from_dict(raw)
    assert read_back(made) == made
    assert to_toml(read_back(made)) == to_toml(made)
    assert from_dict(resolved(made)) == made


def test_text_survives_the_file(tmp_path):
    made = experiment(title='"quotes" \\ and\nlines ✓', description="Zürich\t")
    path = tmp_path / "config.toml"
    path.write_text(to_toml(made), encoding="utf-8")
    assert read(path) == made
    assert tomli_w.dumps(resolved(made)) == to_toml(made)


def test_an_infinite_threshold_stays_infinite():
    trigger = {"kind": "fraction", "tau": float("inf")}
    made = experiment(method=[{"name": "moves", "algorithm": "fielding", "trigger": trigger}])
    assert read_back(made).method[0].settings()["trigger"].tau == float("inf")


# -- what is taken from the shift -------------------------------------------------------------------------------------


def timed(*methods, **changes):
    """What the methods of each point take from the shift: prior's period, period, shots."""
    told = [[m.options for m in point.experiment.method] for point in points(experiment(*methods, **changes))]
    return [[(o.get("prior", {}).get("period"), o.get("period"), o.get("shots")) for o in options] for options in told]


def test_a_sweep_over_the_shift_takes_what_is_not_said_from_each_of_its_points():
    methods = [
        {"name": "A", "algorithm": "fedtem"},
        {"name": "B", "algorithm": "fedtkm", "prior": {"kind": "cosine", "period": 5}},
        {"name": "C", "algorithm": "scsgd"},
        {"name": "D", "algorithm": "t-shot"},
        {"name": "E", "algorithm": "fedtem", "shift": {"who": {"kind": "periodic", "period": 7}}},
    ]
    one = [(4, None, None), (5, None, None), (4, None, None), (None, None, 4), (7, None, None)]
    assert timed(*methods) == [one]
    six = [(6, None, None), (5, None, None), (6, None, None), (None, None, 6), (7, None, None)]
    assert timed(*methods, sweep={"shift.who.period": [4, 6]}) == [one, six]
    whole = {"shift.who": [{"kind": "periodic", "period": 4}, {"kind": "periodic", "period": 6}]}
    assert timed(*methods, sweep=whole) == [one, six]


def test_a_prior_may_be_swept_by_name():
    method = {"name": "A", "algorithm": "fedtem"}
    found = timed(method, sweep={"method.prior": ["linear", "cosine", "uniform"]})
    assert [options[0][0] for options in found] == [4, 4, None]


def test_a_run_folder_of_a_sweep_over_the_shift_reads_back_the_same():
    swept = experiment({"algorithm": "fedtem"}, sweep={"shift.who.period": [4, 6]})
    again = from_dict(tomllib.loads(to_toml(swept)))
    assert [p.experiment for p in points(again)] == [p.experiment for p in points(swept)]


@pytest.mark.parametrize(
    "given",
    [
        {"model": {"kind": "mlp", "hidden": [200]}, "method": [{"algorithm": "fedavg"}]},
        {
            "rounds": 4, "model": "linear", "shift": {"what": {"kind": "calendar", "window": "7d"}},
            "data": {"partition": {"kind": "dirichlet", "alpha": 0.25}, "target": {"kind": "quantiles", "at": [0.5]}},
            "method": [
                {"name": "A, lr 1", "algorithm": "fedtem", "local": {"lr": 0.5}, "prior": "learned"},
                {"name": "B", "algorithm": "ifca", "clusters": 3, "shift": {"what": {"hold": "7d"}}},
            ],
            "claim": [{"text": "B is better", "method": "B", "versus": "A, lr 1"}],
            "sweep": {"method.local.lr": [0.1, 0.2]},
        },
    ],
)  # fmt: skip
def test_a_brief_study_is_the_whole_one_without_what_is_by_default(given):
    whole = experiment(*given["method"], **{key: value for key, value in given.items() if key != "method"})
    text = brief(whole)
    assert from_dict(tomllib.loads(text)) == whole
    assert len(text.splitlines()) < 30
    assert brief(from_dict(tomllib.loads(text))) == text
