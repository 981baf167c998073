"""Reading experiments: what is written, merged, overridden, swept, and written back."""

import contextlib
import copy
import inspect
import tomllib
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

import fedtide as ft
from fedtide.algorithms import REGISTRY
from fedtide.cohorts import Arrivals, Everyone, Uniform
from fedtide.config import (
    Experiment,
    Method,
    axes,
    brief,
    from_dict,
    options_model,
    points,
    read,
    resolved,
    slug,
    to_toml,
)
from fedtide.config.keys import options as options_of
from fedtide.config.keys import table_fields, tables_in
from fedtide.core.errors import FedtideError
from fedtide.data.partition import Dirichlet
from fedtide.data.shift.who import Always, Periodic
from fedtide.data.sources import IDX, Gaussians
from fedtide.data.sources import Python as PythonSource
from fedtide.fields.shapes import bare
from fedtide.learn.local import LocalTrainer
from fedtide.learn.schedules import Exponential
from fedtide.learn.server import SGD, Adagrad, Adam, KerasAdam, Yogi
from fedtide.mixtures.priors import Linear
from fedtide.models import MLP
from helpers.toys import TOY

RECIPES = sorted(Path(str(files("fedtide").joinpath("recipes"))).glob("*.toml"))


def experiment(
    *methods: dict[str, Any], sets: tuple[str, ...] = (), scale: str | None = None, **changes: Any
) -> Experiment:
    written = list(methods) or [{"name": "A", "algorithm": "fedavg"}]
    return from_dict({**copy.deepcopy(TOY), "method": written, **changes}, where="f.toml", sets=sets, scale=scale)


def options(settings: Experiment, name: str = "A") -> dict[str, Any]:
    return next(m for m in settings.method if m.name == name).settings()


def read_back(settings: Experiment) -> Experiment:
    return from_dict(tomllib.loads(to_toml(settings)))


# -- a file ------------------------------------------------------------------------------------------------------------


def test_missing_keys_have_their_defaults_and_an_experiment_is_frozen():
    settings = from_dict({"method": [{"algorithm": "fedavg"}]})
    assert settings == Experiment(method=settings.method)
    defaults = {"local": LocalTrainer(), "server": SGD(), "cohort": Arrivals(), "weighting": "samples"}
    assert options(settings, "fedavg") == defaults
    assert settings.shift.who == Always()
    with pytest.raises(ValueError, match="frozen"):
        settings.rounds = 3


# -- the signature is the configuration --------------------------------------------------------------------------------


def test_every_keyword_of_an_algorithm_is_a_key_with_its_default():
    for name, entry in REGISTRY.items():
        signature, model = inspect.signature(entry.make).parameters, options_model(name)
        assert list(model.model_fields) == [p for p in signature if p != "task"]
        assert dict(model()) == {p: signature[p].default for p in model.model_fields}


def test_a_table_without_a_kind_changes_the_default_and_one_with_a_kind_replaces_it():
    settings = experiment(
        {"name": "A", "algorithm": "fedavgm", "server": {"lr": 0.5}},
        {"name": "B", "algorithm": "fedavgm", "server": {"kind": "sgd", "lr": 0.5}},
        {"name": "C", "algorithm": "vanilla", "server": {"lr": 0.5}},
        {"name": "D", "algorithm": "fielding", "cohort": {"clients_per_round": 3}},
        {"name": "E", "algorithm": "fedtem", "prior": {"phase": 3.0}},
    )
    assert [options(settings, name)["server"] for name in "ABC"] == [SGD(0.5, 0.9), SGD(0.5), KerasAdam(0.5, eps=1e-4)]
    assert options(settings, "D")["cohort"] == Uniform(3)
    assert options(settings, "E")["prior"] == Linear(period=4.0, phase=3.0)
    assert from_dict(resolved(settings)) == settings


def test_a_table_of_local_training_changes_the_default_of_the_method():
    settings = experiment(
        {"name": "A", "algorithm": "fedpac", "local": {"lr": 0.5}},
        {"name": "B", "algorithm": "fedpac", "local": {"local_steps": 3, "momentum": 0.0}},
        {"name": "C", "algorithm": "fedasync", "local": {"epochs": 2}},
        {"name": "D", "algorithm": "flash", "local": LocalTrainer(0.5)},
        {"name": "E", "algorithm": "fedavg", "local": {"lr": 0.5}},
    )
    usual = {"batch_size": 50, "weight_decay": 5e-4}
    assert [options(settings, name)["local"] for name in "ABCDE"] == [
        LocalTrainer(0.5, 5, momentum=0.5, **usual), LocalTrainer(0.01, local_steps=3, **usual),
        LocalTrainer(epochs=2, proximal=0.005), LocalTrainer(0.5, 1), LocalTrainer(0.5),
    ]  # fmt: skip
    assert from_dict(resolved(settings)) == settings
    task = ft.Task(lambda: ft.models.Linear().build((3,), 2))
    assert ft.algorithms.flash(task, local={"lr": 0.5}).options["local"] == LocalTrainer(0.5, 5)


def test_a_preset_is_another_algorithm_with_other_defaults():
    task = ft.Task(lambda: ft.models.Linear().build((3,), 2))
    for name, server in (("fedavgm", SGD(momentum=0.9)), ("fedadagrad", Adagrad()), ("fedyogi", Yogi())):
        make = REGISTRY[name].make
        assert dict(options_model(name)()) == {**dict(options_model("fedavg")()), "server": server}
        assert (make(task).name, make(task, LocalTrainer(), SGD()).name) == (name, name)
        with pytest.raises(TypeError, match="unexpected keyword argument 'lr'"):
            make(task, lr=0.1)


OWN = """
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
    settings = experiment(
        {"name": "A", "algorithm": own, "needed": 3, "names": ["x"], "cohort": 2, "server": "adam", "untyped": "z"}
    )
    assert options(settings) == {
        "needed": 3, "local": LocalTrainer(), "beta": 0.5, "style": "a", "names": ("x",), "server": Adam(),
        "cohort": Arrivals(2), "maybe": None, "untyped": "z",
    }  # fmt: skip
    assert read_back(settings) == settings


@pytest.mark.parametrize(("written", "said"), [
    ({}, "method 'A'.needed: missing"),
    ({"needed": 3, "bta": 1}, "method 'A'.bta: unknown key; did you mean 'beta'.*Allowed: needed, local, beta"),
    ({"needed": 3, "task": 1}, "method 'A'.task: unknown key"),
])  # fmt: skip
def test_errors_name_the_keys_of_the_users_own_algorithm(own, written, said):
    with pytest.raises(FedtideError, match=rf"^f.toml: {said}"):
        experiment({"name": "A", "algorithm": own, **written})


# -- short spellings ---------------------------------------------------------------------------------------------------


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path):
    text = files("fedtide.config").joinpath("study.toml").read_text(encoding="utf-8")
    (tmp_path / "study.toml").write_text(text, encoding="utf-8-sig")
    assert read(tmp_path / "study.toml") == from_dict(tomllib.loads(text))


def test_choices_may_be_words():
    local = {"lr_schedule": "exponential"}
    settings = experiment(
        {"name": "A", "algorithm": "fedavg", "server": "yogi", "cohort": "everyone", "local": local},
        data={"source": "idx:mnist", "partition": "dirichlet"},
        shift={"who": "always", "what": "static", "how": "identity"},
        model="mlp",
    )
    assert (settings.data.source, settings.data.partition, settings.model) == (IDX("mnist"), Dirichlet(), MLP())
    assert (options(settings)["server"], options(settings)["cohort"]) == (Yogi(), Everyone())
    assert options(settings)["local"].lr_schedule == Exponential()
    python = experiment(data={**TOY["data"], "source": "python:mine:load"})
    assert python.data.source == PythonSource("mine:load")


PARTS = [
    ("data.source.samples=50", {"data": {"source": "gaussians"}}, lambda e: e.data.source == Gaussians(samples=50)),
    ("shift.who.period=8", {"shift": {"who": "periodic"}}, lambda e: e.shift.who == Periodic(period=8)),
    ("model.hidden=[7]", {"model": "mlp"}, lambda e: e.model == MLP((7,))),
    ("method.server.eps=0.5", {"server": "adam"}, lambda e: options(e)["server"] == Adam(eps=0.5)),
    ("method.cohort.clients_per_round=3", {"cohort": "uniform"}, lambda e: options(e)["cohort"] == Uniform(3)),
    ("method.cohort.clients_per_round=3", {"cohort": 5}, lambda e: options(e)["cohort"] == Arrivals(3)),
    ("method.local.lr_schedule.factor=0.5", {"local": {"lr_schedule": "exponential"}},
     lambda e: options(e)["local"].lr_schedule == Exponential(0.5)),
]  # fmt: skip


@pytest.mark.parametrize(("key", "written", "expected"), PARTS)
def test_a_word_can_be_overridden_by_its_parts(key, written, expected):
    method = {"name": "A", "algorithm": "fedavg"}
    changes = {} if key.startswith("method") else written
    assert expected(experiment({**method, **(written if not changes else {})}, sets=(key,), **changes))


# -- defaults and shifts of methods ------------------------------------------------------------------------------------


def test_defaults_go_to_every_method_that_takes_them_and_its_own_word_wins():
    settings = experiment(
        {"name": "A", "algorithm": "fedavg"},
        {"name": "B", "algorithm": "fedprox", "local": {"lr": 0.9}},
        {"name": "C", "algorithm": "fedprox", "local": {"proximal": 7.0}, "cohort": 2},
        defaults={"weighting": "uniform", "cohort": 5, "local": {"lr": 0.2, "batch_size": 3}},
    )
    assert options(settings, "A")["local"] == LocalTrainer(lr=0.2, batch_size=3)
    assert options(settings, "B")["local"] == LocalTrainer(lr=0.9, batch_size=3, proximal=0.1)
    assert options(settings, "C")["local"] == LocalTrainer(lr=0.2, batch_size=3, proximal=7.0)
    assert [options(settings, name)["weighting"] for name in "ABC"] == ["uniform"] * 3
    assert [options(settings, name)["cohort"].clients_per_round for name in "ABC"] == [5, 5, 2]


def test_a_method_that_chooses_another_kind_replaces_the_default_whole():
    settings = experiment(
        {"name": "A", "algorithm": "fedavg", "server": {"kind": "sgd", "lr": 0.5}},
        {"name": "B", "algorithm": "fedavg", "server": {"kind": "adam", "beta1": 0.5}},
        {"name": "C", "algorithm": "fedavg"},
        defaults={"server": {"kind": "adam", "eps": 0.1}},
    )
    servers = [options(settings, name)["server"] for name in "ABC"]
    assert servers == [SGD(0.5), Adam(eps=0.1, beta1=0.5), Adam(eps=0.1)]


@pytest.mark.parametrize(("algorithm", "defaults", "said"), [
    ("fedavg", {"mu": 0.1}, "mu: no method takes it; allowed: cohort, decide_per, init_from, local, loss"),
    ("fedavg", {"lcoal": {}}, r"lcoal: no method takes it.*did you mean 'local'\?"),
    ("local", {"cohort": 4}, "cohort: no method takes it; allowed: [^?]*$"),
])  # fmt: skip
def test_a_default_that_no_method_takes_is_a_mistake(algorithm, defaults, said):
    with pytest.raises(FedtideError, match=rf"^f.toml: defaults.{said}"):
        experiment({"algorithm": algorithm}, defaults=defaults)


def test_a_method_may_meet_another_shift():
    settings = experiment(
        {"name": "A", "algorithm": "fedavg"},
        {"name": "B", "algorithm": "fedavg", "shift": {"who": "always"}},
        {"name": "C", "algorithm": "fedavg", "shift": {"who": {"period": 8}, "clock": "seconds"}},
        shift={"who": {"kind": "periodic", "period": 4, "exponent": 2.0}},
    )
    a, b, c = (settings.shift_of(method) for method in settings.method)
    assert a == settings.shift
    assert (b.who, b.clock) == (Always(), "rounds")
    assert (c.who, c.clock) == (Periodic(period=8, exponent=2.0), "seconds")


# -- overrides ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("assignment", "value"), [
    ("rounds=3", 3), (" rounds =3 ", 3), ("title=a b c", "a b c"), ('title="3"', "3"), ("title=it's = so", "it's = so"),
    ("seeds=[4, 5]", (4, 5)), ("title=", ""),
])  # fmt: skip
def test_an_override_is_toml_or_else_a_word_and_the_last_one_wins(assignment, value):
    settings = experiment(sets=("rounds=9", "title=x", assignment))
    assert getattr(settings, assignment.partition("=")[0].strip()) == value


def test_an_override_that_is_wrong_is_named_as_such(tmp_path):
    path = tmp_path / "study.toml"
    path.write_text(to_toml(experiment()))
    with pytest.raises(FedtideError, match=r"study\.toml with rouns=3: rouns: unknown key"):
        read(path, sets=("rouns=3",))
    path.write_text(path.read_text().replace("rounds = ", "ronds = "))
    with pytest.raises(FedtideError, match=r"study\.toml: ronds: unknown key"):
        read(path)


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
    assert [method.settings()["local"].lr for method in experiment(*THREE, sets=(assignment,)).method] == rates


DOTTED = ({"name": "b", "algorithm": "fedavg"}, {"name": "b.2", "algorithm": "fedavg"})


def rates_of(settings: Experiment) -> list[float]:
    return [options(settings, method["name"])["local"].lr for method in DOTTED]


@pytest.mark.parametrize("key", ["method.b.2.local.lr", "method.1.local.lr", 'method."b.2".local.lr'])
def test_a_name_with_a_dot_is_found_by_every_key(key):
    scaled = {**copy.deepcopy(TOY), "method": list(DOTTED), "scale": {"nano": tomllib.loads(f"{key} = 0.7")}}
    assert rates_of(from_dict(scaled, scale="nano")) == [0.1, 0.7]
    if '"' not in key:
        assert rates_of(experiment(*DOTTED, sets=(f"{key}=0.7",))) == [0.1, 0.7]
        swept = points(experiment(*DOTTED, sweep={key: [0.7, 0.9]}))
        assert [rates_of(point.experiment) for point in swept] == [[0.1, 0.7], [0.1, 0.9]]


def test_of_names_that_begin_alike_the_longest_is_meant():
    assert rates_of(experiment(*DOTTED, sets=("method.b.local.lr=0.3", "method.b.2.local.lr=0.7"))) == [0.3, 0.7]
    said = r"method.b.2: that is a whole table; name one of its keys, 'method.b.2.<key>'"
    with pytest.raises(FedtideError, match=said):
        experiment(*DOTTED, sets=("method.b.2=0.7",))


@pytest.mark.parametrize("assignment", ["method.local.lr=0.7", "defaults.local.lr=0.7"])
def test_an_override_of_methods_wins_over_the_defaults(assignment):
    settings = experiment(*THREE, sets=(assignment,), defaults={"local": {"lr": 0.2, "batch_size": 3}})
    trainers = [LocalTrainer(lr=0.7, batch_size=3, proximal=mu) for mu in (0.0, 0.1, 0.0)]
    assert [method.settings()["local"] for method in settings.method] == trainers


# -- scales ------------------------------------------------------------------------------------------------------------

SCALES = {
    "nano": {"rounds": 2, "data": {"partition": {"clients": 4}, "source": {"kind": "gaussians", "samples": 40}}},
    "cpu": {"rounds": 50},
    "paper": {},
}
SCALED = {**copy.deepcopy(TOY), "rounds": 999, "method": [{"algorithm": "fedavg"}]}


def test_a_scale_replaces_its_keys_and_cpu_is_the_default():
    raw = {**SCALED, "scale": SCALES}
    nano = from_dict(raw, scale="nano")
    assert (nano.rounds, nano.data.partition.clients, nano.data.held_out_clients.clients) == (2, 4, 2)
    assert nano.data.source == Gaussians(samples=40)  # a table with a kind replaces the old one whole
    assert [from_dict(raw, scale=scale).rounds for scale in ("paper", None)] == [999, 50]
    assert from_dict({**raw, "scale": {"nano": {"rounds": 2}}}).rounds == 999
    assert from_dict(raw, scale="nano", sets=["rounds=7"]).rounds == 7


@pytest.mark.parametrize(("scales", "asked", "said"), [
    (None, "nano", "scale: found 'nano', allowed: none, because the file has no .scale. tables"),
    ({"nano": {}, "cpu": {}}, "paper", "scale: found 'paper', allowed: nano, cpu"),
    ({"nan": {}}, None, "scale.nan: did you mean 'nano'. Allowed: nano, cpu, paper"),
    ({"nano": {"rouns": 2}}, "nano", "rouns: unknown key.*did you mean 'rounds'"),
])  # fmt: skip
def test_a_scale_that_is_not_there_is_one_clear_line(scales, asked, said):
    with pytest.raises(FedtideError, match=rf"^f.toml: {said}"):
        from_dict({**SCALED, **({"scale": scales} if scales else {})}, where="f.toml", scale=asked)


# -- sweeps ------------------------------------------------------------------------------------------------------------


def test_a_sweep_is_a_grid_and_a_point_is_named_after_its_values():
    sweep = {"method.local.lr": [0.1, 0.5], "data.partition.clients": [4, 8], "shift.who": ["always"]}
    settings = experiment(sweep=sweep)
    grid = [(rate, clients) for rate in (0.1, 0.5) for clients in (4, 8)]
    swept = points(settings)
    assert [point.name for point in swept] == [f"lr {rate}, clients {clients}, who always" for rate, clients in grid]
    for point, (rate, clients) in zip([point.experiment for point in swept], grid, strict=True):
        assert (options(point)["local"].lr, point.data.partition.clients) == (rate, clients)
        assert (point.sweep, point.shift.who, point.rounds) == ({}, Always(), settings.rounds)


def test_keys_that_change_together_are_one_axis_named_after_the_first():
    settings = experiment(sweep={"data.partition.clients, rounds": [[4, 3], [8, 6]], "method.local.lr": [0.1, 0.5]})
    swept = points(settings)
    assert [point.name for point in swept] == [f"clients {n}, lr {lr}" for n in (4, 8) for lr in (0.1, 0.5)]
    assert [point.experiment.rounds for point in swept] == [3, 3, 6, 6]
    assert [point.experiment.data.partition.clients for point in swept] == [4, 4, 8, 8]
    assert axes(settings) == {"data.partition.clients": (4, 8), "method.local.lr": (0.1, 0.5)}


def test_a_sweep_may_reach_one_method():
    settings = experiment(*THREE, sweep={"method.A.local.lr": [0.5, 0.6]})
    rates = [[m.settings()["local"].lr for m in point.experiment.method] for point in points(settings)]
    assert rates == [[0.5, 0.1, 0.1], [0.6, 0.1, 0.1]]


@pytest.mark.parametrize(("sweep", "said"), [
    ({"rounds": []}, r"f.toml: sweep.rounds: found \[\], allowed: one value or more"),
    ({"rounds": [1, 2], "seeds, rounds": [[[0], 1]]}, "f.toml: sweep: found rounds twice, allowed: each once"),
    ({"rouns": [1]}, r"f.toml: sweep point 'rouns 1': rouns: unknown key.*did you mean 'rounds'"),
    ({"method.local.lr": [-1]}, r"f.toml: sweep point 'lr -1': method 'A'.local.lr: found -1, allowed: greater"),
    *(({"data.partition.clients, rounds": [[4, 3], choice]},
       r"f.toml: sweep.'data\.partition\.clients, rounds': found .*a list of 2 values") for choice in (3, [3])),
])  # fmt: skip
def test_a_sweep_that_cannot_be_is_one_clear_line(sweep, said):
    with pytest.raises(FedtideError, match=f"^{said}"):
        points(experiment(sweep=sweep), "f.toml")


@pytest.mark.parametrize("sweep", [
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


@given(st.text(max_size=12))
def test_a_folder_name_has_no_characters_that_mean_something_else(name):
    folder = slug(name)
    assert folder == slug(folder)
    assert not set(folder) & set('/\\:*?"<>| \0\n')
    assert folder not in ("", ".", "..")


@pytest.mark.parametrize("name", ["..", ".", "config.toml", "Summary.json", "report.html", "environment.json"])
def test_no_method_gets_the_place_of_something_else_in_the_run_folder(name):
    """Refused, or put elsewhere."""
    with contextlib.suppress(FedtideError):
        folder = slug(experiment({"name": name, "algorithm": "fedavg"}).method[0].name)
        assert folder not in ("..", ".", "config.toml", "summary.json", "report.html", "environment.json")


# -- written back ------------------------------------------------------------------------------------------------------


def test_every_default_is_written_out():
    text = tomllib.loads(to_toml(experiment()))
    assert text["method"][0]["local"]["lr"] == 0.1
    assert text["method"][0]["cohort"] == {"clients_per_round": 10, "over_selection": 1.0, "kind": "arrivals"}
    assert text["shift"]["who"]["exponent"] == 1.0
    assert text["data"]["split"] == {"val": 0.2, "test": 0.25, "by": "random", "merge": False}
    assert text["fleet"]["threads"] == 1


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_read_back_as_it_was_written_whole_and_in_short(recipe):
    for scale in tomllib.loads(recipe.read_text(encoding="utf-8"))["scale"]:
        settings = read(recipe, scale=scale)
        assert from_dict(tomllib.loads(brief(settings))) == settings
    settings = read(recipe, scale="nano")
    assert read_back(settings) == settings
    assert from_dict(resolved(settings)) == settings
    short = brief(settings)
    again = from_dict(tomllib.loads(short))
    assert resolved(again) == resolved(settings)
    assert brief(again) == short
    assert len(short) < len(to_toml(settings))


ODD_VALUES = [
    {"title": '"quotes" \\ and ✓', "description": "Zürich\t\nlines"},
    {"method": [{"name": "moves", "algorithm": "fielding", "trigger": {"kind": "fraction", "tau": float("inf")}}]},
    {"data": {"source": {"kind": "csv", "path": "a.csv", "features": ["", "é"]}, "directory": " "}},
    {"data": {"source": {"kind": "python", "function": "m:f", "options": {"a b": [1, "x", True]}}}},
    {"data": {"source": {"kind": "domains", "names": ["a", "b"], "sources": ["gaussians", "idx:q"]}}},
    {"model": {"kind": "python", "function": "m:f", "options": {"wide": 3}}},
    {"method": [{"algorithm": "fedprox", "local": {"proximal": 0.0}}, {"algorithm": "fedavg", "server": "yogi"}]},
    {"method": [{"algorithm": "fielding", "safe": True, "cohort": 4}, {"algorithm": "fedtem", "safe": True}]},
    {"method": [{"algorithm": "fedavg", "loss": "wsm", "safe": True}]},
    {
        "metrics": [{"function": "m:f", "name": "x"}, "auc"],
        "data": {"groups": {"by": "labels", "labels": [[0, 1], [2]]}},
    },
    {"method": [{"algorithm": "ifca", "transforms": ["pooled", {"kind": "mixture", "held": 0.2}]}]},
]


@pytest.mark.parametrize("changes", ODD_VALUES)
def test_odd_values_survive_the_file(tmp_path, changes):
    settings = experiment(**changes)
    path = tmp_path / "config.toml"
    path.write_text(to_toml(settings), encoding="utf-8")
    assert read(path) == settings
    assert tomli_w.dumps(resolved(settings)) == to_toml(settings)
    path.write_text(brief(settings), encoding="utf-8")
    assert read(path) == settings


# -- what is taken from the shift -------------------------------------------------------------------------------------


def timed(*methods, **changes):
    """What the methods of each point take from the shift: prior's period, period, shots."""
    told = [[m.options for m in point.experiment.method] for point in points(experiment(*methods, **changes))]
    return [[(o.get("prior", {}).get("period"), o.get("period"), o.get("shots")) for o in options] for options in told]


def test_a_sweep_over_the_shift_takes_missing_values_from_each_of_its_points():
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
    found = timed(methods[0], sweep={"method.prior": ["linear", "cosine", "uniform"]})
    assert [options[0][0] for options in found] == [4, 4, None]


def test_no_key_may_be_none_but_by_default():
    """TOML has no word for None, so a file without the key would have the default in its place."""

    def walk(table: Any, within: tuple[Any, ...]) -> Iterator[str]:
        fields = table_fields(table)
        if table is Method:
            fields |= {key: field for name in REGISTRY for key, field in options_of(name).items()}
        for key, (kind, default) in fields.items():
            if type(None) in get_args(bare(kind)) and default not in (None, ...):
                yield f"{table.__name__}.{key}"
            for inside in tables_in(kind):
                if inside not in (*within, table):
                    yield from walk(inside, (*within, table))

    assert list(walk(Experiment, ())) == []
