"""What people write first, from memory or from other libraries: each is led to the key or word that is meant."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from fedtide.config import from_dict, read
from fedtide.config.keys import Key, places, sections
from fedtide.config.overrides import seed_list
from fedtide.config.settings import AnyFleet
from fedtide.core.errors import FedtideError
from fedtide.fields.explain import tags_of
from fedtide.fields.vocabulary import names_by_synonym, nearest
from fedtide.runs.job import FleetKind


def study(**more: Any) -> dict[str, Any]:
    return {"rounds": 2, "data": {"source": "gaussians"}, "method": [{"algorithm": "fedavg"}], **more}


def said(raw: dict[str, Any], *sets: str) -> str:
    with pytest.raises(FedtideError) as error:
        from_dict(raw, where="study.toml", sets=sets)
    assert "\n" not in str(error.value)
    return str(error.value)


AT_THE_TOP = {
    "lr": "'local.lr' in [[method]] or [defaults]",
    "learning_rate": "'local.lr' in [[method]] or [defaults]",
    "local_epochs": "'local.epochs' in [[method]] or [defaults]",
    "batch_size": "'local.batch_size' in [[method]] or [defaults]",
    "momentum": "'local.momentum' in [[method]] or [defaults]",
    "num_clients": "'data.partition.clients'",
    "clients": "'data.partition.clients'",
    "alpha": "'data.partition.alpha'",
    "dataset": "'data.source'",
    "num_rounds": "'rounds'",
    "n_rounds": "'rounds'",
    "Rounds": "'rounds'",
    "seed": "'seeds'",
    "fraction": "'cohort' in [[method]] or [defaults]",
    "fraction_fit": "'cohort' in [[method]] or [defaults]",
    "clients_per_round": "'cohort.clients_per_round' in [[method]] or [defaults]",
    "num_workers": "'fleet.workers'",
}

IN_A_METHOD = {
    "lr": "'local.lr' or 'server.lr'",
    "learning_rate": "'local.lr' or 'server.lr'",
    "momentum": "'local.momentum' or 'server.momentum'",
    "local_epochs": "'local.epochs'",
    "batch_size": "'local.batch_size'",
    "fraction_fit": "'cohort'",
    "clients_per_round": "'cohort'",
    "num_clients": "'data.partition.clients'",
}


@pytest.mark.parametrize("key", AT_THE_TOP)
def test_a_key_at_the_top_is_led_to_its_table(key):
    line = said(study(**{key: 1}))
    assert line.startswith(f"study.toml: {key}: unknown key; allowed: title, ")
    assert line.endswith(f"; did you mean {AT_THE_TOP[key]}?")


@pytest.mark.parametrize("key", IN_A_METHOD)
def test_a_key_in_a_method_is_led_to_its_table(key):
    line = said(study(method=[{"algorithm": "fedavg", key: 1}]))
    assert line.startswith(f"study.toml: method 'fedavg'.{key}: unknown key; allowed: local, ")
    assert line.endswith(f"; did you mean {IN_A_METHOD[key]}?")


def test_a_key_of_defaults_is_led_to_its_table():
    line = said(study(defaults={"learning_rate": 0.1}))
    assert line.startswith("study.toml: defaults.learning_rate: no method takes it; allowed: cohort, ")
    assert line.endswith("; did you mean 'local.lr'?")


WORDS = [
    ({"method": [{"algorithm": "IFCA"}]}, "ifca"),
    ({"method": [{"algorithm": "FedAvg"}]}, "fedavg"),
    ({"method": [{"algorithm": "q_fedavg"}]}, "q-fedavg"),
    ({"data": {"source": "mnist"}}, "idx:mnist"),
    ({"data": {"source": "Fashion-MNIST"}}, "idx:fashion-mnist"),
    ({"data": {"source": "gaussians", "partition": "IID"}}, "iid"),
    ({"data": {"source": "gaussians", "partition": "shards"}}, "label-shards"),
    ({"model": "resnet"}, "resnet18"),
]


@pytest.mark.parametrize(("more", "meant"), WORDS)
def test_a_name_in_another_case_or_of_another_library_is_understood(more, meant):
    assert said(study(**more)).endswith(f"; did you mean '{meant}'?")


SLIPS = {
    "data.partition.alpa=1": "'alpha' with kind = 'dirichlet-class' or 'dirichlet' or 'pachinko'",
    "data.partition.clints=1": "'clients'",
    "shift.who.perod=3": "'period' with kind = 'periodic' or 'block-cyclic' or 'availability'",
    "data.alpa=1": "'data.partition.alpha'",
}


@pytest.mark.parametrize("assigned", SLIPS)
def test_a_misspelt_key_of_a_table_without_its_kind_is_led_to_the_key_and_its_kinds(assigned):
    line = said(study(), assigned)
    assert assigned.partition("=")[0].rpartition(".")[2] in line
    assert line.endswith(f"; did you mean {SLIPS[assigned]}?")


def test_a_misspelt_key_of_another_kind_is_said_to_be_one():
    data = {"source": "gaussians", "partition": {"kind": "iid", "clients": 4}}
    line = said(study(data=data), "data.partition.alpa=1")
    assert line == (
        "study.toml: data.partition.alpa: unknown key; allowed: clients, samples, kind; did you mean "
        "'data.partition.alpha', with another kind?"
    )


def test_a_method_that_is_not_there_is_not_taken_for_another():
    assert "did you mean" not in said(study(method=[{"algorithm": "fednova"}]))


def test_every_synonym_means_something_that_exists():
    known = {place.rpartition(".")[2] for word in names_by_synonym() for place in places(word)}
    meant = {word.partition(":")[0] for words in names_by_synonym().values() for word in words}
    choices = ("data.source", "data.partition", "shift.who", "model", "loss", "cohort")
    chosen = {tag for path in choices for tag in kinds(path)}
    assert meant <= known | chosen


def kinds(path: str) -> list[str]:
    return [section.title.split('"')[1] for section in sections(path)]


def test_a_single_method_table_is_told_how_it_is_written(tmp_path):
    assert said(study(method={"algorithm": "fedavg"})) == (
        "study.toml: method: found a single table, allowed: [[method]] tables, with two brackets each"
    )
    file = tmp_path / "two.toml"
    file.write_text('[method]\nalgorithm = "fedavg"\n[method]\nalgorithm = "fedprox"\n')
    with pytest.raises(FedtideError, match=r"not valid TOML: .*; methods are \[\[method\]\] tables"):
        read(file)


def test_a_method_that_no_table_has_is_named():
    assert said(study(), "method.FedProx.mu=1") == "method.FedProx.mu: no method is called 'FedProx'; allowed: fedavg"
    assert said(study(), "method.FEDAVG.local.lr=1").endswith("; did you mean 'fedavg'?")
    assert "method 'fedavg'.locl: unknown key" in said(study(), "method.locl.lr=1")
    made = from_dict(study(), sets=["method.fedavg.local.lr=0.7"])
    assert made.method[0].settings()["local"].lr == 0.7


def test_seeds_are_asked_for_as_a_list_or_as_first_and_last():
    assert said(study(seeds=0)) == "study.toml: seeds: found 0, allowed: a list of values, such as [0, 1, 2]"
    assert seed_list("0-4") == "[0,1,2,3,4]"
    assert seed_list("3,5-6") == "[3,5,6]"
    for text in ("4-0", "0-99999999999"):
        with pytest.raises(FedtideError, match=r"--seeds: found .*, allowed: the first seed, and at most 1000"):
            seed_list(text)
    for text in ("0,a", "", "-1", "0,,1", "[0,1.5]"):
        with pytest.raises(FedtideError) as error:
            seed_list(text)
        assert str(error.value) == f"--seeds: found {text!r}, allowed: whole numbers of 0 or more, such as 0,1,2 or 0-4"


@pytest.mark.parametrize("word", ["Lr", " lr", "LEARNING-RATE", "learning rate"])
def test_case_and_the_way_to_divide_a_word_do_not_matter(word):
    assert nearest(word, ["lr", "momentum"]).endswith("did you mean 'lr'?")


# -- the keys ----------------------------------------------------------------------------------------------------------


def test_keys_of_a_table_of_one_kind_and_of_one_key():
    assert [key.name for key in sections()[0].keys][:3] == ["title", "description", "rounds"]
    kinds = sections("data.partition")
    assert {section.title for section in kinds} >= {
        'data.partition = { kind = "iid" }',
        'data.partition = { kind = "dirichlet" }',
    }
    assert sections("data.partition.dirichlet") == [s for s in kinds if '"dirichlet"' in s.title]
    found = sections("data.partition.alpha")
    assert len(found) == 3
    assert all([key.name for key in section.keys] == ["alpha"] for section in found)
    assert sections("local") == sections("method.local") == sections("defaults.local")
    assert sections("seeds")[0].keys == [
        Key("seeds", "list of: whole number, 0 or more", "[0]", "every method is run with each.")
    ]


def test_every_key_has_a_meaning():
    for path in sorted({place for word in names_by_synonym() for place in places(word)}):
        for key in (key for section in sections(path) for key in section.keys):
            assert key.allowed, (path, key)
            assert key.default, (path, key)


@pytest.mark.parametrize(("path", "meant"), [("data.patition", "partition"), ("lr", "method.local.lr"), ("a.b", None)])
def test_a_key_that_is_not_there(path, meant):
    with pytest.raises(FedtideError) as error:
        sections(path)
    assert str(error.value).startswith(f"keys: found '{path}', allowed: ")
    assert str(error.value).endswith(f"; did you mean '{meant}'?") == (meant is not None)


@pytest.mark.parametrize(("more", "expected"), [
    ({"shift": {"what": "rotation"}}, "shift.what: found 'rotation', ...; did you mean how = 'rotation'?"),
    ({"shift": {"how": "stream"}}, "shift.how: found 'stream', ...; did you mean what = 'stream'?"),
    ({"shift": {"kind": "periodic"}}, 'shift.kind: unknown key; ...; did you mean shift = { who = "periodic" }?'),
    ({"data": {"source": "gaussians", "split": 0.2}},
     "data.split: found 0.2, allowed: a table; did you mean split = { val = 0.2 } or split = { test = 0.2 }?"),
    ({"data": {"source": "gaussians", "held_out_clients": 4}},
     "allowed: a table; did you mean held_out_clients = { clients = 4 }"),
    ({"defaults": {"cohort": 0.1}}, "cohort: found 0.1, allowed: a whole number of clients, or a table"),
])  # fmt: skip
def test_a_value_in_the_wrong_table_is_led_to_the_right_one(more, expected):
    line = said(study(**more))
    for part in expected.split("..."):
        assert part in line


def test_one_mistake_is_told_once():
    assert "more)" not in said(study(method=[{"algorithm": "fedavg", "loss": "focal"}]))


def test_groups_may_be_a_word():
    made = from_dict(study(data={"source": "gaussians", "groups": "domain"}), sets=["data.partition=iid"])
    assert made == from_dict(study(data={"source": "gaussians", "groups": {"by": "domain"}, "partition": "iid"}))


def test_the_command_line_knows_every_kind_of_fleet():
    assert get_args(FleetKind) == tuple(tags_of(AnyFleet))
