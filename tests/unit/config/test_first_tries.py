"""What people write first, from memory or from other libraries: each is led to the key or word that is meant."""

from typing import Any

import pytest

from fedtide.config import from_dict, read
from fedtide.config.keys import places, sections
from fedtide.config.overrides import seed_list
from fedtide.core.errors import FedtideError
from fedtide.fields.vocabulary import names_by_synonym


def study(**more: Any) -> dict[str, Any]:
    return {"rounds": 2, "data": {"source": "gaussians"}, "method": [{"algorithm": "fedavg"}], **more}


def said(raw: dict[str, Any], *sets: str) -> str:
    with pytest.raises(FedtideError) as error:
        from_dict(raw, where="study.toml", sets=sets)
    assert "\n" not in str(error.value)
    return str(error.value)


AT_THE_TOP = {
    "lr": "'local.lr' in [[method]] or [defaults]",
    "local_epochs": "'local.epochs' in [[method]] or [defaults]",
    "batch_size": "'local.batch_size' in [[method]] or [defaults]",
    "momentum": "'local.momentum' in [[method]] or [defaults]",
    "num_clients": "'data.partition.clients'",
    "dataset": "'data.source'",
    "num_rounds": "'rounds'",
    "Rounds": "'rounds'",
    "seed": "'seeds'",
    "fraction_fit": "'cohort' in [[method]] or [defaults]",
    "clients_per_round": "'cohort.clients_per_round' in [[method]] or [defaults]",
    "num_workers": "'fleet.workers'",
    "local": "'local' in [[method]] or [defaults]",
    "cohort": "'cohort' in [[method]] or [defaults]",
}

IN_A_METHOD = {
    "lr": "'local.lr' or 'server.lr'",
    "momentum": "'local.momentum' or 'server.momentum'",
    "batch_size": "'local.batch_size'",
    "fraction_fit": "'cohort'",
    "clients_per_round": "'cohort'",
    "num_clients": "'data.partition.clients'",
}


@pytest.mark.parametrize(
    ("place", "key"), [("top", key) for key in AT_THE_TOP] + [("method", key) for key in IN_A_METHOD]
)
def test_a_key_is_led_to_its_table(place, key):
    top = place == "top"
    line = said(study(**{key: 1}) if top else study(method=[{"algorithm": "fedavg", key: 1}]))
    above, first, meant = ("", "title", AT_THE_TOP) if top else ("method 'fedavg'.", "local", IN_A_METHOD)
    assert line.startswith(f"study.toml: {above}{key}: unknown key; did you mean {meant[key]}? Allowed: {first}, ")


WORDS = [
    ({"method": [{"algorithm": "IFCA"}]}, "ifca"),
    ({"method": [{"algorithm": "q_fedavg"}]}, "q-fedavg"),
    ({"data": {"source": "mnist"}}, "idx:mnist"),
    ({"data": {"source": "gaussians", "partition": "IID"}}, "iid"),
    ({"data": {"source": "gaussians", "partition": "shards"}}, "label-shards"),
    ({"model": "resnet"}, "resnet18"),
]


@pytest.mark.parametrize(("more", "meant"), WORDS)
def test_a_name_in_another_case_or_of_another_library_is_understood(more, meant):
    assert f"did you mean '{meant}'? Allowed: " in said(study(**more))


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
    assert said(study(), "method.FedProx.mu=1") == "method.FedProx.mu: no method is called 'FedProx'; allowed: 'fedavg'"
    assert "; did you mean 'fedavg'? Allowed: " in said(study(), "method.FEDAVG.local.lr=1")
    assert "method 'fedavg'.locl: unknown key" in said(study(), "method.locl.lr=1")
    made = from_dict(study(), sets=["method.fedavg.local.lr=0.7"])
    assert made.method[0].settings()["local"].lr == 0.7


def test_seeds_are_asked_for_as_a_list_or_as_first_and_last():
    assert said(study(seeds=0)) == "study.toml: seeds: found 0, allowed: a list of values, such as [0, 1, 2]"
    assert seed_list("0-4") == "[0,1,2,3,4]"
    assert seed_list("3,5-6") == "[3,5,6]"
    for text in ("4-0", "0-99999999999"):
        with pytest.raises(
            FedtideError, match=r"--seeds: found .*, allowed: FIRST-LAST, LAST not below FIRST, at most 1000"
        ):
            seed_list(text)
    for text in ("0,a", "", "-1", "0,,1", "[0,1.5]"):
        with pytest.raises(FedtideError) as error:
            seed_list(text)
        assert str(error.value) == f"--seeds: found {text!r}, allowed: whole numbers of 0 or more, such as 0,1,2 or 0-4"


# -- the keys ----------------------------------------------------------------------------------------------------------


def test_every_key_has_a_meaning():
    for path in sorted({place for word in names_by_synonym() for place in places(word)}):
        for key in (key for section in sections(path) for key in section.keys):
            assert key.allowed, (path, key)
            assert key.default, (path, key)


@pytest.mark.parametrize(
    ("path", "meant"),
    [("data.patition", "partition"), ("lr", "method.local.lr"), ("sedes", "seeds"), ("zzz.qqq", None)],
)
def test_a_key_that_is_not_there(path, meant):
    with pytest.raises(FedtideError) as error:
        sections(path)
    hint = f"did you mean '{meant}'? Allowed" if meant else "allowed"
    assert str(error.value).startswith(f"keys: found '{path}', {hint}: ")


@pytest.mark.parametrize(("more", "expected"), [
    ({"data": "mnist"}, 'did you mean data = { source = "idx:mnist" }? Allowed: a table'),
    ({"defaults": {"cohort": 0.1}}, "cohort: found 0.1, allowed: a whole number of clients, or a table"),
])  # fmt: skip
def test_a_value_in_the_wrong_table_is_led_to_the_right_one(more, expected):
    line = said(study(**more))
    for part in expected.split("..."):
        assert part in line


def test_groups_may_be_a_word():
    made = from_dict(study(data={"source": "gaussians", "groups": "domain"}), sets=["data.partition=iid"])
    assert made == from_dict(study(data={"source": "gaussians", "groups": {"by": "domain"}, "partition": "iid"}))
