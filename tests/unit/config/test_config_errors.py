"""Mistakes in a configuration: one line with the key, what was found, what is allowed, and the nearest spelling."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtide.config import Experiment, Local, from_dict, points, read
from fedtide.core.errors import FedtideError
from helpers.examples import examples
from helpers.toys import TOY

FULL: dict[str, Any] = {
    **copy.deepcopy(TOY),
    "seeds": [0, 1],
    "title": "a study",
    "fleet": {"kind": "local", "threads": 1},
    "defaults": {"local": {"lr": 0.1, "lr_schedule": {"kind": "steps", "at": [0.5]}}},
    "scale": {"nano": {"rounds": 2}, "cpu": {"description": "for a computer"}},
    "sweep": {"rounds": [2, 3]},
    "method": [
        {
            "name": "A",
            "algorithm": "fedavg",
            "cohort": {"kind": "uniform", "clients_per_round": 3},
            "server": {"kind": "adam", "eps": 0.1},
        },
        {"name": "B", "algorithm": "fedavg", "weighting": "uniform", "shift": {"who": {"kind": "always"}}},
    ],
    "baseline": "A",
}


def made(path: str, value: Any) -> dict[str, Any]:
    """The full experiment with one value set, by a path of keys and places."""
    raw: Any = copy.deepcopy(FULL)
    *above, last = [int(step) if step.isdigit() else step for step in path.split("/")]
    node = raw
    for step in above:
        node = node[step]
    node[last] = value
    return raw


def said(raw: dict[str, Any], **named: Any) -> str:
    with pytest.raises(FedtideError) as error:
        points(from_dict(raw, where="study.toml", **named), "study.toml")
    assert "\n" not in str(error.value)
    return str(error.value)


# -- misspelt keys at every level --------------------------------------------------------------------------------------

MISSPELT = {
    "ruonds": ("ruonds: unknown key", "rounds"),
    "data/partitions": ("data.partitions: unknown key", "partition"),
    "data/source/row": ("data.source.row: unknown key", None),
    "data/partition/cleints": ("data.partition.cleints: unknown key", "clients"),
    "data/groups/labls": ("data.groups.labls: unknown key", None),
    "data/split/validd": ("data.split.validd: unknown key", "val"),
    "data/held_out_clients/client": ("data.held_out_clients.client: unknown key", "clients"),
    "shift/whom": ("shift.whom: unknown key", "who"),
    "shift/who/perod": ("shift.who.perod: unknown key", "period"),
    "model/hiden": ("model.hiden: unknown key", "hidden"),
    "fleet/thread": ("fleet.thread: unknown key", "threads"),
    "method/0/serve": ("method 'A'.serve: unknown key", "server"),
    "method/0/cohort/clients_per_rond": ("method 'A'.cohort.clients_per_rond: unknown key", "clients_per_round"),
    "method/0/server/epsilon": ("method 'A'.server.epsilon: unknown key", None),
    "method/1/weightin": ("method 'B'.weightin: unknown key", "weighting"),
    "method/1/shift/whoo": ("method 'B'.shift.whoo: unknown key", "who"),
    "method/1/shift/who/dropot": ("method 'B'.shift.who.dropot: unknown key", "dropout_rate"),
    "defaults/local/epoch": ("method 'A'.local.epoch: unknown key", "epochs"),
    "defaults/local/lr_schedule/factr": ("method 'A'.local.lr_schedule.factr: unknown key", "factor"),
}


@pytest.mark.parametrize("path", MISSPELT)
def test_a_misspelt_key_is_named_with_its_path_and_the_nearest_one_is_offered(path):
    key, meant = MISSPELT[path]
    line = said(made(path, 1))
    assert line.startswith(f"study.toml: {key}; allowed: ")
    if meant:
        assert f"; did you mean '{meant}'?" in line


def test_an_unknown_key_is_named_among_the_keys_of_its_own_table():
    assert said(made("data/partition/alpha", 0.3)) == (
        "study.toml: data.partition.alpha: unknown key with this kind; allowed: clients, samples, kind"
    )


# -- wrong kinds -------------------------------------------------------------------------------------------------------

KINDS = {
    "data/source": ("gausians", "gaussians"),
    "data/source/kind": ("gaussian", "gaussians"),
    "data/partition": ("dirichlet-clas", "dirichlet-class"),
    "data/groups/by": ("domains", "domain"),
    "shift/who/kind": ("periodical", "periodic"),
    "shift/who": ("alway", "always"),
    "shift/who/curve": ("linar", "linear"),
    "shift/clock": ("round", "rounds"),
    "model/kind": ("mpl", "mlp"),
    "precision": ("fp-32", "fp32"),
    "fleet/kind": ("worker", "workers"),
    "method/0/cohort/kind": ("unifrom", "uniform"),
    "method/0/server/kind": ("adm", "adam"),
    "method/0/algorithm": ("fedavgg", "fedavg"),
    "method/0/weighting": ("sample", "samples"),
    "method/0/loss": ("cross-entrpy", "cross-entropy"),
    "defaults/local/optimizer": ("adm", "adam"),
    "defaults/local/lr_schedule/kind": ("step", "steps"),
    "method/1/shift/who/kind": ("alwys", "always"),
    "baseline": ("B ", "B"),
}  # fmt: skip


@pytest.mark.parametrize("path", KINDS)
def test_a_word_that_is_no_choice_is_one_clear_line(path):
    word, meant = KINDS[path]
    line = said(made(path, word))
    assert f"found '{word.strip()}" in line
    assert ", allowed: " in line
    if path != "baseline":
        assert f"; did you mean '{meant}'?" in line
    assert path.split("/")[0] in line or path.startswith("defaults")


@pytest.mark.parametrize("path", ["data/source", "data/partition", "shift/who", "model"])
def test_a_choice_without_a_kind_says_which_there_are(path):
    line = said(made(path, {}))
    assert "allowed: a table with 'kind' = one of " in line
    assert "did you mean" not in line


@pytest.mark.parametrize(("path", "keys", "meant"), [
    ("shift/how", {"every": 2, "fraction": 0.5}, "kind = 'label-swaps'"),
    ("model", {"hidden": [3]}, "kind = 'mlp' or 'lstm'"),
])  # fmt: skip
def test_keys_without_a_kind_say_of_which_kinds_they_are(path, keys, meant):
    assert said(made(path, keys)).endswith(f"; did you mean {meant}?")


# -- wrong types and ranges --------------------------------------------------------------------------------------------

WRONG = [
    ("rounds", "many", "rounds: found 'many', allowed: a whole number"),
    ("rounds", 2.5, "rounds: found 2.5, allowed: a whole number"),
    ("rounds", 0, "rounds: found 0, allowed: 1 or more"),
    ("rounds", -3, "rounds: found -3, allowed: 1 or more"),
    ("rounds", True, "rounds: found True, allowed: a whole number"),
    ("rounds", "8", "rounds: found '8', allowed: a whole number"),
    ("rounds", [3], r"rounds: found \[3\], allowed: a whole number"),
    ("eval_every", 0, "eval_every: found 0, allowed: 1 or more"),
    ("checkpoint_every", 0, "checkpoint_every: found 0, allowed: 1 or more"),
    ("average_last", 0, "average_last: found 0, allowed: 1 or more"),
    ("seeds", 3, "seeds: found 3, allowed: a list"),
    ("seeds", [], r"seeds: found \[\]"),
    ("seeds", [0, 0], "seeds: found 0 twice, allowed: each once"),
    ("seeds", [0, -1], r"seeds\[1\]: found -1, allowed: 0 or more"),
    ("seeds", [0, "x"], r"seeds\[1\]: found 'x', allowed: a whole number"),
    ("title", 3, "title: found 3, allowed: a string"),
    ("data", 3, "data: found 3, allowed: a table"),
    ("shift", "periodic", "shift: found 'periodic', allowed: a table; did you mean shift = { who = \"periodic\" }?"),
    ("shift", "tidal", "shift: found 'tidal', allowed: a table$"),
    ("data", "mnist", "data: found 'mnist', allowed: a table; did you mean data = { source = \"idx:mnist\" }?"),
    ("data", "idx:mine", "data: found 'idx:mine', allowed: a table; did you mean data = { source = \"idx:mine\" }?"),
    ("data", "lda", "data: found 'lda', allowed: a table; did you mean data = { partition = \"dirichlet\" }?"),
    ("fleet", "rya", "fleet: found 'rya', allowed: local, workers, ray, stacked, auto; did you mean 'ray'?"),
    ("data/source/samples", 0, "data.source.samples: found 0, allowed: 1 or more"),
    ("data/source/noise", 0, "data.source.noise: found 0, allowed: greater than 0"),
    ("data/source/noise", float("inf"), "data.source.noise: found inf, allowed: a finite number"),
    ("data/partition/clients", 0, "data.partition.clients: found 0, allowed: 1 or more"),
    ("data/split/val", 1.0, "data.split.val: found 1.0, allowed: less than 1"),
    ("data/split/val", -0.1, "data.split.val: found -0.1, allowed: 0"),
    ("data/split/test", float("nan"), "data.split.test: found nan, allowed: "),
    ("data/held_out_clients/clients", -1, "data.held_out_clients.clients: found -1, allowed: 0 or more"),
    ("shift/who/period", 0, "shift.who.period: found 0, allowed: greater than 0"),
    ("shift/who/period", "day", "shift.who.period: found 'day', allowed: a number"),
    ("shift/who/phase", float("nan"), "shift.who.phase: found nan, allowed: a finite number"),
    ("shift/who/dropout_rate", 1.0, "shift.who.dropout_rate: found 1.0, allowed: less than 1"),
    ("model/hidden", 5, "model.hidden: found 5, allowed: a list"),
    ("model/hidden", [5, 0], r"model.hidden\[1\]: found 0, allowed: 1 or more"),
    ("fleet/threads", 0, "fleet.threads: found 0, allowed: 1 or more"),
    ("fleet/workers", 0, "fleet.workers: found 0, allowed: 1 or more"),
    ("fleet/channels_last", "maybe", "fleet.channels_last: found 'maybe', allowed: true or false"),
    ("method/0/cohort/clients_per_round", 0, "method 'A'.cohort.clients_per_round: found 0, allowed: 1 or more"),
    ("method/0/cohort", 0, "method 'A'.cohort.clients_per_round: found 0, allowed: 1 or more"),
    ("method/0/cohort", True, "method 'A'.cohort: found True"),
    ("method/0/server/eps", 0, "method 'A'.server.eps: found 0, allowed: greater than 0"),
    ("method/1/local", {"proximal": -1}, "method 'B'.local.proximal: found -1, allowed: 0"),
    ("method/0/name", 3, "method 3.name: found 3, allowed: a string"),
    ("method/0/name", "", "method ''.name: found ''"),
    ("method/0/options", 3, "method 'A'.options"),
    ("method/1/shift", 3, "method 'B'.shift: found 3, allowed: a table"),
    ("defaults/local/lr", 0, "method 'A'.local.lr: found 0, allowed: greater than 0"),
    ("defaults/local/lr", 1e308, "method 'A'.local.lr: found 1e\\+308, allowed: at most 3.4e\\+38, as weights hold"),
    ("defaults/local/lr", True, "method 'A'.local.lr: found True, allowed: a number"),
    ("defaults/local/lr", "0.1", "method 'A'.local.lr: found '0.1', allowed: a number"),
    ("defaults/local/epochs", 0, "method 'A'.local.epochs: found 0, allowed: 1 or more"),
    ("defaults/local", 3, "method 'A'.local: found 3, allowed: a table"),
    ("defaults/local/lr_schedule/at", [0.5, 2.0], r"method 'A'.local.lr_schedule.at\[1\]: found 2.0, allowed: 1"),
    ("method", [], "method: found"),
    ("method", 3, r"method: found 3, allowed: \[\[method\]\] tables"),
    ("method", {"algorithm": "fedavg"}, r"method: found a single table, allowed: \[\[method\]\] tables"),
    ("method", ["fedavg"], "method"),
    ("method/0", 3, "method"),
    ("defaults", 3, r"defaults: found 3, allowed: a \[defaults\] table"),
    ("scale", 3, "scale"),
    ("scale/cpu", 3, "scale.cpu"),
    ("sweep", 3, "sweep: found 3, allowed: a table"),
    ("sweep/rounds", 3, "sweep.rounds: found 3, allowed: a list"),
    ("sweep/rounds", [], r"sweep.rounds: found \[\], allowed: one value or more"),
    # Without an end, or so large that there is hardly one.
    ("rounds", 10**12, "rounds: found 1000000000000, allowed: 1000000 or less"),
    ("defaults/local/epochs", 10**12, "method 'A'.local.epochs: found 1000000000000, allowed: 1000000 or less"),
    ("defaults/local/local_steps", 10**12, "method 'A'.local.local_steps: found .*, allowed: 1000000 or less"),
    ("fleet/threads", 5000, "fleet.threads: found 5000, allowed: 1024 or less"),
    ("method/0", {"name": "A", "algorithm": "fedem", "components": 10**9}, "method 'A'.components: .*allowed: 1000 or"),
    ("method/0", {"name": "A", "algorithm": "fedtem", "branches": 10**9}, "method 'A'.branches: .*allowed: 1000 or"),
    ("method/0", {"name": "A", "algorithm": "ifca", "clusters": 10**9}, "method 'A'.clusters: .*allowed: 1000 or"),
    ("method/0", {"name": "A", "algorithm": "feddrift", "max_clusters": 10**9}, "method 'A'.max_clusters: .*: 1000 or"),
    ("shift/who/period", 1e-300, r"shift: found who.period 1e-300, allowed: 1 round or more \(clock = 'rounds'\)"),
    ("data/source/classes", 1, "data.source.classes: found 1, allowed: 2 or more"),
    ("sweep/rounds", list(range(1, 1200)), "sweep: number of points: found 1199, allowed: at most 1000"),
    ("fleet/address", "auto", "fleet.address: unknown key with this kind; allowed: workers, channels_last, device, th"),
    ("fleet", {"kind": "auto", "threads": 2}, "fleet.threads: unknown key with this kind; allowed: workers, chan"),
    ("fleet/gpus", 0.5, "fleet.gpus: unknown key with this kind; allowed: workers, channels_last, device, threads"),
    ("method/0/algorithm", {"a": 1}, "method 'A'.algorithm: found {'a': 1}, allowed: a registered name, or module:fun"),
    ("method/0/algorithm", "builtins:dict", "method 'A'.algorithm: found 'builtins:dict', but its keywords cannot be"),
    ("sweep/rounds", [2, 0], "sweep point 'rounds 0': rounds: found 0, allowed: 1 or more"),
]


@pytest.mark.parametrize(("path", "value", "line"), WRONG, ids=[f"{path}={value!r}" for path, value, _ in WRONG])
def test_a_value_that_cannot_be_is_one_clear_line(path, value, line):
    assert re.match(f"study.toml: {line}", said(made(path, value)))


def test_a_missing_key_is_named():
    raw = copy.deepcopy(FULL)
    del raw["method"][0]["algorithm"]
    assert said(raw).startswith("study.toml: method 'A': algorithm is missing; allowed: fedavg")
    raw = copy.deepcopy(FULL)
    del raw["method"]
    assert "method" in said(raw)
    assert said(made("data/source", "idx")) == "study.toml: data.source.path: missing"
    assert said(made("data/groups", {"by": "labels"})) == "study.toml: data.groups.labels: missing"


def test_another_fleet_drops_what_was_said_of_a_cluster():
    raw = made("fleet", {"kind": "ray", "address": "auto", "gpus": 0.5})
    assert from_dict(raw, sets=["fleet.kind=local"]).fleet == Local()
    assert from_dict(raw, sets=["fleet.kind=ray"]).fleet.address == "auto"


def test_many_different_values_are_soon_looked_through():
    assert len(from_dict(made("seeds", list(range(20_000)))).seeds) == 20_000
    assert "seeds: found 7 twice" in said(made("seeds", [*range(20_000), 7]))


def test_several_mistakes_are_counted_and_the_first_is_told():
    raw = made("rounds", 0)
    raw["seeds"] = []
    del raw["scale"]
    assert said(raw).startswith("study.toml: rounds: found 0, allowed: 1 or more (and ")


def test_one_mistake_is_one_mistake():
    for path, value in (("method/1/shift/who/kind", "alwys"), ("method/0/name", 3), ("shift/whom", 1)):
        assert "more)" not in said(made(path, value))


def test_a_long_value_is_shown_in_short():
    assert len(said(made("rounds", "x" * 5000))) < 200


# -- combinations ------------------------------------------------------------------------------------------------------


def test_settings_that_exclude_each_other_are_one_clear_line():
    method = {"name": "A", "algorithm": "fedavg", "local": {"optimizer": "adam", "momentum": 0.9}}
    line = "study.toml: method 'A'.local: momentum belongs to optimizer = 'sgd', not to 'adam'"
    assert said({"method": [method]}).startswith(line)


@pytest.mark.parametrize(("first", "second", "folder"), [
    ("A", "A", "a"), ("A", "a", "a"), ("FedAvg 1", "fedavg, 1", "fedavg-1"), ("!", "?", "method"),
])  # fmt: skip
def test_two_methods_need_folders_of_their_own(first, second, folder):
    raw = {"method": [{"name": name, "algorithm": "fedavg"} for name in (first, second)]}
    assert said(raw) == f"study.toml: method '{first}': two methods need different names (folder '{folder}')"


def test_two_methods_without_names_are_told_apart_by_their_algorithm():
    raw = {"method": [{"algorithm": "fedavg"}, {"algorithm": "fedprox"}]}
    assert [m.name for m in from_dict(raw).method] == ["fedavg", "fedprox"]
    assert "two methods need different names" in said({"method": [{"algorithm": "fedavg"}] * 2})


def test_a_baseline_is_one_of_the_methods():
    assert said(made("baseline", "C")) == "study.toml: baseline: found 'C', allowed: A, B"


@pytest.mark.parametrize("name", ["no_such_module:f", "math:no_such", "math:pi", ":f", "m:"])
def test_an_algorithm_that_is_not_there_is_one_clear_line(name):
    assert said({"method": [{"name": "A", "algorithm": name}]}).startswith("study.toml: method 'A'.algorithm: ")


# -- overrides ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("assignment", "line"), [
    ("ruonds=3", "ruonds: unknown key.*did you mean 'rounds'"),
    ("rounds=x", "rounds: found 'x', allowed: a whole number"),
    ("rounds.x=3", "rounds.x: 'rounds' holds a value, not a table"),
    ("data.partition.clients.x=3", "data.partition.clients.x: 'clients' holds a value, not a table"),
    ("method.D.local.lr=1", "method.D.local.lr: no method is called 'D'; allowed: A, B"),
    ("method.local.rate=1", "method 'A'.local.rate: unknown key.*did you mean 'lr'"),
    ("seeds=[1, 2", r"seeds: found '\[1, 2', allowed: a list"),
    ("seeds.0=5", "seeds"),
    ("model.hidden.0=5", "model.hidden"),
    ("data.source.kind.x=5", "data.source.kind.x"),
])  # fmt: skip
def test_an_override_that_cannot_be_is_one_clear_line(assignment, line):
    assert re.search(line, said(copy.deepcopy(FULL), sets=[assignment]))


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_read_is_one_clear_line(tmp_path):
    path = tmp_path / "study.toml"
    with pytest.raises(FedtideError, match=r"study.toml: no such file$"):
        read(path)
    with pytest.raises(FedtideError, match=f"{tmp_path}: is a folder"):
        read(tmp_path)
    for content in (b"rounds = 3 # \xff\xfe\n", b'rounds = 0\n[[method]]\nalgorithm = "fedavg"\n'):
        path.write_bytes(content)
        with pytest.raises(FedtideError, match=rf"^{path}: ") as error:
            read(path)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(("text", "where"), [
    ("rounds = 3\nseeds = [0,\n\n[data]\n", "line 4"),
    ("rounds = \n", "line 1"),
    ("rounds = 3\nrounds = 4\n", "line 2"),
    ("[data\n", "line 1"),
    ("rounds = 3\n[data]\n[data]\n", "line 3"),
    ('title = "no end\n', "line 1"),
])  # fmt: skip
def test_bad_toml_is_one_line_that_names_the_line(tmp_path, text, where):
    path = tmp_path / "study.toml"
    path.write_text(text)
    with pytest.raises(FedtideError, match=rf"study.toml: not valid TOML: .*{where}") as error:
        read(path)
    assert "\n" not in str(error.value)


# -- anything at all ---------------------------------------------------------------------------------------------------

WORDS = [True, 0, 3, -1, 2.5, float("nan"), float("inf"), 10**400, "", "x", "a:b", "iid"]
TABLES = [{}, {"kind": "x"}, {"kind": 3}, {"kind": []}, {"x": {"y": 1}}, {"kind": "always"}, {"name": {}}]
ODD = st.sampled_from([*WORDS, [], [1], ["x"], [[]], [{}], *TABLES])


def paths(node: Any, above: tuple = ()) -> list[tuple]:
    entries = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else []
    return [path for key, child in entries for path in [(*above, key), *paths(child, (*above, key))]]


@examples(200)
@given(st.data())
def test_any_value_in_the_place_of_any_other_is_accepted_or_one_clear_line(data):
    raw: Any = copy.deepcopy(FULL)
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(paths(raw)))
        node = raw
        for step in path[:-1]:
            node = node[step]
        node[path[-1]] = copy.deepcopy(data.draw(ODD))
    scale = data.draw(st.sampled_from([None, "nano"]))
    try:
        accepted = points(from_dict(raw, where="study.toml", scale=scale), "study.toml")
    except FedtideError as error:
        line = str(error)
    else:
        line = ""
        assert all(isinstance(point.experiment, Experiment) for point in accepted)
    assert "\n" not in line
    assert len(line) < 600


@examples(150)
@given(st.data())
def test_any_override_is_accepted_or_one_clear_line(data):
    path = data.draw(st.sampled_from(paths(FULL)))
    extra = data.draw(st.sampled_from([(), ("x",), (0,), ("kind",)]))
    value = data.draw(st.sampled_from(["3", "-1", "x", "[]", "{}", '{kind = "x"}', "", "true", "[[", "1e400"]))
    assignment = ".".join(str(step) for step in (*path, *extra)) + "=" + value
    try:
        points(from_dict(copy.deepcopy(FULL), where="study.toml", sets=[assignment]), "study.toml")
    except FedtideError as error:
        line = str(error)
    else:
        line = ""
    assert "\n" not in line
