"""What cannot be masked is refused before anything starts."""

import pytest

from fedtide.algorithms import REGISTRY
from fedtide.core.errors import FedtideError
from fedtide.fleets.engines import Host
from fedtide.laws.case import toy
from fedtide.runs.build import host_of
from fedtide.runs.preflight import preflight
from helpers.variants import variants_of

SECURE = {"secure": True}


def host(name: str, **changes: object) -> Host:
    options = dict(variants_of(name).get("", {}))
    study = toy(name, options, wire=SECURE, **changes)
    return host_of(study, study.method[0], 0)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cfl", "of each client its update"),
        ("flexcfl", "of each client its update"),
        ("auxo", "of each client a sketch of its update"),
        ("fesem", "of each client its update"),
        ("fedbuff", "the age of the model"),
        ("fedasync", "the age of the model"),
    ],
)
def test_methods_whose_server_sees_an_update(name, words):
    with pytest.raises(FedtideError, match=f"^wire.secure: found True, but method 'toy': .*{words}"):
        host(name)


def test_all_others_of_the_registry_pass():
    refused = {"auxo", "cfl", "fedasync", "fedbuff", "fedccfa", "fedpac", "feroma", "fesem", "flexcfl"}
    for name in REGISTRY.keys() - refused - {"fedgmm", "pfedem", "scsgd"}:  # the last ones need options
        assert host(name).wire.secure


def test_a_cohort_that_no_sum_could_be_opened_of():
    with pytest.raises(
        FedtideError, match=r"^wire.fewest: found 5, but no sum would ever be opened; allowed: at most 4"
    ):
        preflight(toy("fedavg", wire={"fewest": 5}))


@pytest.mark.parametrize(
    ("fewest", "words"), [(1, "one client is that client"), (2, "two tells each of them the other")]
)
def test_secure_sums_of_one_or_two(fewest, words):
    allowed = "allowed: `fewest` of 3 or more, or `secure = false`"
    with pytest.raises(
        FedtideError, match=rf"wire: found `fewest = {fewest}` and `secure = true`, .* {words}; {allowed}$"
    ):
        toy("fedavg", wire={"fewest": fewest})
    assert toy("fedavg", wire={"secure": False, "fewest": fewest}).wire.fewest == fewest


def test_clients_that_are_trained_together():
    with pytest.raises(FedtideError, match=r"stacked.*rounded one by one, as \[wire\] wants"):
        preflight(toy("fedavg", wire=SECURE, fleet={"kind": "stacked"}))
