"""What servers are shown is one list: algorithms declare names of it, and the registry says the same."""

import pytest

from fedtide.algorithms import REGISTRY
from fedtide.fields.vocabulary import SHOWN
from fedtide.runs.build import host_of
from fedtide.wire.pipeline import why_not
from helpers.toys import VARIANTS, toy


def algorithm_of(name: str):
    experiment = toy(name)
    return host_of(experiment, experiment.method[0], 0).algorithm


@pytest.mark.parametrize("name", REGISTRY)
def test_the_registry_says_what_an_algorithm_shows(name):
    assert algorithm_of(name).traits.reveals == REGISTRY[name].reveals


def test_every_value_that_is_shown_is_in_the_list():
    shown = {one for name in [*REGISTRY, *VARIANTS] for one in algorithm_of(name).traits.reveals}
    # No variant asks for losses, as power of choice does.
    assert shown | {"loss"} == set(SHOWN)


def test_updates_that_are_shown_cannot_be_masked():
    refused = {name.split()[0] for name in [*REGISTRY, *VARIANTS] if why_not(algorithm_of(name))}
    assert refused == {
        "cfl", "flexcfl", "auxo", "fedasync", "fedbuff", "fedccfa", "fedpac", "feroma", "fesem", "fielding",
    }  # fmt: skip
    assert [why_not(algorithm_of(name)) for name in ("fielding drifts", "fielding-by-sums", "fielding gradient")] == [
        "", "", "its server sees of each client that drifts a gradient",
    ]  # fmt: skip
    assert why_not(algorithm_of("cfl")) == "its server sees of each client its update"
