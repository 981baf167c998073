"""Mistakes in a configuration: one line with the key, what was found, what is allowed, and the nearest spelling."""

import copy
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtide.config import Experiment, Local, from_dict, points, read
from fedtide.core.errors import FedtideError
from fedtide.fields.shapes import unknown_key
from fedtide.models.adapters import LoRA
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


CLAIM = {"text": "A is better", "method": "A", "versus": "B"}


def made(path: str, value: Any, full: dict[str, Any] = FULL) -> dict[str, Any]:
    """The full experiment with one value set, by a path of keys and places."""
    raw: Any = copy.deepcopy(full)
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


# -- texts that a terminal obeys ---------------------------------------------------------------------------------------


def texts(value: Any, at: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and the value of every text."""
    if isinstance(value, str):
        yield at.removeprefix("/"), value
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from texts(child, f"{at}/{key}")


@pytest.mark.parametrize(
    "character", ["\x1b", "\0", "\r", "\n", "\t", "\x9b", "\u061c", "\u202e", "\u2066", "\U000e0041"]
)
def test_a_control_character_is_named_in_every_text(character):
    shown = ascii(character)[1:-1].replace("\\", r"\\")
    full = {**FULL, "claim": [CLAIM], "scale": {}, "data": {**FULL["data"], "transforms": ["flip"]}}
    for path, text in texts(full):
        raw = made(path, text + character, full)
        key = path.replace("/", ".").split(".")[-1]
        if path.startswith(("description", "data/source")) and character in "\n\t":
            continue
        line = said(raw)
        assert re.search(rf"{key}\]?: found the control character '{shown}'", line), (path, line)
    assert "control character" in said({**FULL, "method": [{**FULL["method"][0], f"a{character}": 1}]})
    table = {"kind": "csv", "path": "x.csv", "features": ["Celsius\n(C)", "a\u200b"]}  # as in spreadsheets
    assert from_dict({**FULL, "data": {"source": table}, "scale": {}}).data.source.features == tuple(table["features"])
    own = {"kind": "python", "function": "json:loads", "options": {"text": "two\nlines"}}
    assert from_dict({**FULL, "model": own, "description": "two\nlines", "scale": {}}).description == "two\nlines"


# -- misspelt keys at every level --------------------------------------------------------------------------------------

MISSPELT = {
    "ruonds": ("ruonds: unknown key", "rounds"),
    "data/partition/cleints": ("data.partition.cleints: unknown key", "clients"),
    "shift/who/perod": ("shift.who.perod: unknown key", "period"),
    "method/0/serve": ("method 'A'.serve: unknown key", "server"),
    "method/0/server/epsilon": ("method 'A'.server.epsilon: unknown key", "epsilon' in [[method]] or [defaults]"),
    "method/1/shift/who/dropot": ("method 'B'.shift.who.dropot: unknown key", "dropout_rate"),
    "defaults/local/epoch": ("method 'A'.local.epoch: unknown key", "epochs"),
}


@pytest.mark.parametrize("path", MISSPELT)
def test_a_misspelt_key_is_named_with_its_path_and_the_nearest_one_is_offered(path):
    key, meant = MISSPELT[path]
    line = said(made(path, 1))
    assert line.startswith(f"study.toml: {key}; did you mean '{meant}")
    assert "? Allowed: " in line


def test_a_slip_of_a_letter_is_no_key_of_another_table():
    line = unknown_key("model.adapters", "last_layer", LoRA, lambda word: f"'representation.{word}'")
    assert line.startswith("unknown key; did you mean 'last_layers'? Allowed: rank")


# -- wrong kinds -------------------------------------------------------------------------------------------------------

KINDS = {
    "data/source": ("gausians", "gaussians"),
    "data/groups/by": ("domains", "domain"),
    "shift/who": ("alway", "always"),
    "shift/who/curve": ("linar", "linear"),
    "precision": ("fp-32", "fp32"),
    "fleet/kind": ("worker", "workers"),
    "method/0/server/kind": ("adm", "adam"),
    "method/0/algorithm": ("fedavgg", "fedavg"),
    "method/0/loss": ("cross-entrpy", "cross-entropy"),
    "defaults/local/lr_schedule/kind": ("step", "steps"),
    "baseline": ("B ", "B"),
}  # fmt: skip


@pytest.mark.parametrize("path", KINDS)
def test_a_word_that_is_no_choice_is_one_clear_line(path):
    word, meant = KINDS[path]
    line = said(made(path, word))
    assert f"found '{word.strip()}" in line
    assert f", did you mean '{meant}'? Allowed: " in line
    assert path.split("/")[0] in line or path.startswith("defaults")


@pytest.mark.parametrize("path", ["data/source", "data/partition", "shift/who", "model"])
def test_a_choice_without_a_kind_says_which_there_are(path):
    line = said(made(path, {}))
    assert "allowed: a table with 'kind' = one of " in line
    assert "did you mean" not in line


# -- wrong types and ranges --------------------------------------------------------------------------------------------

WRONG = [
    ("rounds", "many", "rounds: found 'many', allowed: a whole number"),
    ("rounds", 2.5, "rounds: found 2.5, allowed: a whole number"),
    ("rounds", -1, "rounds: found -1, allowed: 0 or more"),
    ("rounds", True, "rounds: found True, allowed: a whole number"),
    ("seeds", 3, "seeds: found 3, allowed: a list"),
    ("seeds", [0, 0], "seeds: found 0 twice, allowed: each once"),
    ("seeds", [0, -1], r"seeds\[1\]: found -1, allowed: 0 or more"),
    ("title", 3, "title: found 3, allowed: a string"),
    ("shift", "periodic", "shift: found 'periodic', did you mean shift = { who = \"periodic\" }. Allowed: a table"),
    ("data", "mnist", "data: found 'mnist', did you mean data = { source = \"idx:mnist\" }. Allowed: a table"),
    ("fleet", "rya", "fleet: found 'rya', did you mean 'ray'. Allowed: local, workers, ray, stacked, auto"),
    ("data/source/noise", float("inf"), "data.source.noise: found inf, allowed: a finite number"),
    ("data/split/val", 1.0, "data.split.val: found 1.0, allowed: less than 1"),
    ("shift/who/period", "day", "shift.who.period: found 'day', allowed: a number"),
    ("fleet/channels_last", "maybe", "fleet.channels_last: found 'maybe', allowed: true or false"),
    ("method/0/cohort", 0, "method 'A'.cohort.clients_per_round: found 0, allowed: 1 or more"),
    ("method/0/cohort", True, "method 'A'.cohort: found True"),
    ("method/0/name", 3, "method 3.name: found 3, allowed: a string"),
    ("defaults/local/lr", 1e308, "method 'A'.local.lr: found 1e\\+308, allowed: at most 3.4e\\+38, as weights hold"),
    ("defaults/local/lr_schedule/at", [0.5, 2.0], r"method 'A'.local.lr_schedule.at\[1\]: found 2.0, allowed: 1"),
    ("method", [], "method: found"),
    ("method", 3, r"method: found 3, allowed: \[\[method\]\] tables"),
    ("defaults", 3, r"defaults: found 3, allowed: a \[defaults\] table"),
    ("sweep/rounds", 3, "sweep.rounds: found 3, allowed: a list"),
    # Without an end, or so large that there is hardly one.
    ("rounds", 10**12, "rounds: found 1000000000000, allowed: 1000000 or less"),
    ("fleet/threads", 5000, "fleet.threads: found 5000, allowed: 1024 or less"),
    ("method/0", {"name": "A", "algorithm": "fedem", "components": 10**9}, "method 'A'.components: .*allowed: 1000 or"),
    ("shift/who/period", 1e-300, r"shift: found who.period 1e-300, allowed: 1 round or more \(clock = 'rounds'\)"),
    ("data/source/classes", 1, "data.source.classes: found 1, allowed: 2 or more"),
    ("sweep/rounds", list(range(1, 1200)), "sweep: number of points: found 1199, allowed: at most 1000"),
    (
        "fleet/address",
        "auto",
        "fleet.address: unknown key with this choice; allowed: workers, channels_last, device, th",
    ),
    ("method/0/algorithm", {"a": 1}, "method 'A'.algorithm: found {'a': 1}, allowed: a registered name, or module:fun"),
    ("method/0/algorithm", "builtins:dict", "method 'A'.algorithm: found 'builtins:dict', but its keywords cannot be"),
    ("claim", [{**CLAIM, "versus": "C"}], "claim 'A is better': versus: found 'C', allowed: 'A', 'B'"),
    ("claim", [{**CLAIM, "versus": []}], r"claim\[0\].versus: found \[\], allowed: one value or more"),
    ("claim", [CLAIM, CLAIM], "claim 'A is better': found two of that text, allowed: one"),
    ("default", {"cohort": 3}, r"default: unknown key; did you mean '\[defaults\]'"),
    ("sweep/rounds", [2, -1], "sweep point 'rounds -1': rounds: found -1, allowed: 0 or more"),
]


@pytest.mark.parametrize(("path", "value", "line"), WRONG, ids=[f"{path}={value!r}" for path, value, _ in WRONG])
def test_a_value_that_cannot_be_is_one_clear_line(path, value, line):
    assert re.match(f"study.toml: {line}", said(made(path, value)))


def test_a_swing_needs_a_period():
    full = {**FULL, "sweep": {}, "shift": {"who": "always"}, "claim": [{**CLAIM, "measure": "swing"}]}
    line = said({**full, "method": [{**method, "shift": {}} for method in full["method"]]})
    assert "measure: found 'swing', but nothing in [shift] has a period" in line


def test_a_misspelt_method_is_named_beside_an_algorithm_of_ones_own():
    own = {"name": "Own", "algorithm": "helpers.no_such:f"}
    line = said({**FULL, "method": [*FULL["method"], own]}, sets=["method.Ownn.lr=1"], imports=False)
    assert "no method is called 'Ownn'; did you mean 'Own'?" in line


def test_a_missing_key_is_named():
    raw = copy.deepcopy(FULL)
    del raw["method"][0]["algorithm"]
    assert said(raw) == "study.toml: method 'A': algorithm is missing; 'fedtide algorithms' lists them"
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


def test_a_long_value_is_shown_in_short():
    assert len(said(made("rounds", "x" * 5000))) < 200


# -- combinations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second", "folder"), [
    ("A", "A", "a"), ("A", "a", "a"), ("FedAvg 1", "fedavg, 1", "fedavg-1"), ("!", "?", "method"),
])  # fmt: skip
def test_two_methods_need_folders_of_their_own(first, second, folder):
    raw = {"method": [{"name": name, "algorithm": "fedavg"} for name in (first, second)]}
    assert said(raw) == f"study.toml: method '{first}': another one has its folder '{folder}', too; take another name"


@pytest.mark.parametrize("name", ["no_such_module:f", "math:no_such", "math:pi", ":f", "m:"])
def test_an_algorithm_that_is_not_there_is_one_clear_line(name):
    assert said({"method": [{"name": "A", "algorithm": name}]}).startswith("study.toml: method 'A'.algorithm: ")


# -- overrides ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("assignment", "line"), [
    ("ruonds=3", "ruonds: unknown key.*did you mean 'rounds'"),
    ("data.partition.clients.x=3", "data.partition.clients.x: 'clients' holds a value, not a table"),
    ("method.D.local.lr=1", "method.D.local.lr: no method is called 'D'; allowed: 'A', 'B'"),
    ("seeds=[1, 2", r"--set: found 'seeds=\[1, 2', but Unclosed array .*; allowed: a value of TOML"),
    ("title='x", "--set: found .title='x., but .*; allowed: a value of TOML"),
    ("seeds.99=5", "seeds"),
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
    os.mkfifo(tmp_path / "pipe.toml")
    for endless in (tmp_path / "pipe.toml", "/dev/zero"):
        with pytest.raises(FedtideError, match=f"{endless}: is a pipe or a device, allowed: a TOML file"):
            read(endless)
    for content in (b"rounds = 3 # \xff\xfe\n", b'rounds = -1\n[[method]]\nalgorithm = "fedavg"\n'):
        path.write_bytes(content)
        with pytest.raises(FedtideError, match=rf"^{path}: ") as error:
            read(path)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(("text", "where"), [
    ("rounds = 3\nseeds = [0,\n\n[data]\n", "line 4"),
    ("rounds = \n", "line 1"),
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
    assert len(line) < 700


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
