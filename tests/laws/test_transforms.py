"""Laws of transforms, over every method and every transform that it can take.

A transform that cannot apply says why in a line. One with nothing to do is the method, bit for bit: with one cluster
there is nothing to pool or share; an anchor and what clients make for themselves leave the models of the method alone.
So do training on need, if it is always needed, robust or trusted sums of one bucket, and a
watch.
Two that both apply give the same in either order.
"""

from dataclasses import replace
from functools import lru_cache
from itertools import combinations

import pytest

from fedtide.algorithms import REGISTRY
from fedtide.core.base import Algorithm, Extended
from fedtide.core.errors import FedtideError
from fedtide.core.trees import same
from fedtide.laws import every
from fedtide.laws.case import Case
from fedtide.runs.build import host_of
from fedtide.transforms import Anchored, AtHome, OnNeed, Personalized, Pooled, Robust, Shared, Trusted, Watch, apply
from fedtide.transforms.transform import why_not
from helpers.toys import ALIKE, played, toy

FEW = {"lr": 0.05, "epochs": 2, "batch_size": 4}
TRANSFORMS = {
    "anchored": Anchored(),
    "at-home": AtHome(),
    "on-need": OnNeed(),
    "pooled": Pooled(),
    "robust": Robust(),
    "shared": Shared(),
    "trusted": Trusted(),
    "watch": Watch(),
    "personalized": Personalized({"kind": "fine-tuned", "solver": FEW}),
}
WRITTEN = {
    "anchored": "anchored",
    "at-home": "at-home",
    "on-need": {"kind": "on-need", "patience": 99},
    "pooled": "pooled",
    "robust": {"kind": "robust", "bucket": 99},
    "shared": {"kind": "shared", "layers": "trunk"},
    "trusted": {"kind": "trusted", "bucket": 99},
    "watch": "watch",
    "personalized": {"kind": "fine-tuned", "solver": FEW},
}
BUSY: dict[str, dict] = {
    "on-need": {"kind": "on-need", "rise": 0.05, "patience": 1},
    "robust": {"kind": "robust", "rule": "median", "bucket": 2},
    "trusted": {"kind": "trusted", "bucket": 2},
    "watch": {"kind": "watch", "windows": 1, "train": "alarm", "rounds": 1},
}
"""Forms of transforms that do more, for the laws."""

K_MEANS = {"clustering": {"kind": "k-means", "k_max": 1}}
ONE_CLUSTER = {
    "aem": {"clusters": 1},
    "auxo": {"max_clusters": 1, "min_participants": 1},
    "cfl": {"split_after": 99},
    "feddrift": {"max_clusters": 1, "rounds_per_step": 2, "delta": 0.0},
    "fielding": K_MEANS,
    "fielding-by-sums": K_MEANS,
    "flexcfl": {"clusters": 1, "pretrain": 3, "group_init": "same"},
    "flux-like": {"warmup": 99},
    "ifca": {"clusters": 1},
    "pfedem": {"components": 1},
}
"""Options with which a method has one model."""


@lru_cache
def algorithm(name: str) -> Algorithm:
    experiment = toy(name)
    made = host_of(experiment, experiment.method[0], 0).algorithm
    # The toy's mixture is a short one, and a personalization refuses what it would replace.
    return replace(made, options={key: value for key, value in made.options.items() if key != "mixture"})


def can_take(name: str, kind: str) -> bool:
    return not why_not(algorithm(name), TRANSFORMS[kind])


def inner(state):
    return inner(state.inner) if isinstance(state, Extended) else state


def options(name: str, one_model: bool) -> dict:
    return {"local": {"lr": 0.1, "batch_size": 4}, **(ONE_CLUSTER.get(name, {}) if one_model else {})}


@lru_cache(maxsize=2)
def plain_weights(name: str, one_model: bool) -> object:
    """What the method alone ends with; played once for all transforms."""
    return played(toy(name, options(name, one_model)), rounds=3).state.weights


PAIRS = [(name, kind) for name in REGISTRY for kind in TRANSFORMS]


@pytest.mark.parametrize(("name", "kind"), PAIRS, ids=map(" ".join, PAIRS))
def test_a_transform_is_refused_in_a_line_or_leaves_alone_what_it_has_nothing_to_do_with(name, kind, thorough):
    if not can_take(name, kind):
        with pytest.raises(FedtideError, match=f"'{kind}' is not allowed with '{name}', because ") as error:
            apply(algorithm(name), TRANSFORMS[kind])
        assert "\n" not in str(error.value)
        return
    if kind == "at-home":
        pytest.skip("it has always something to do: tests/golden/test_layers_at_home.py has its laws")
    if kind in ("pooled", "shared") and name not in ONE_CLUSTER:
        pytest.skip(f"{name} has no options with which it has one model")
    if name in ALIKE and not thorough:
        pytest.skip("much like others; only with --thorough")
    one_model = kind in ("pooled", "shared")
    changed = played(toy(name, {**options(name, one_model), "transforms": [WRITTEN[kind]]}), rounds=3).state
    assert same(inner(changed).weights, plain_weights(name, one_model))


ORDERS = [(name, *pair) for name in REGISTRY for pair in combinations(TRANSFORMS, 2)]


@pytest.mark.parametrize(("name", "one", "two"), ORDERS, ids=map(" ".join, ORDERS))
def test_two_transforms_give_the_same_in_either_order(name, one, two, thorough):
    if not (can_take(name, one) and can_take(name, two)):
        pytest.skip("one of them has no meaning for it")
    if "at-home" in (one, two) and not {"on-need", "personalized", "robust", "trusted", "watch"} & {one, two}:
        with pytest.raises(FedtideError, match="'at-home' is not allowed with '"):
            apply(algorithm(name), TRANSFORMS[one], TRANSFORMS[two])
        return
    first, second = (apply(apply(algorithm(name), TRANSFORMS[a]), TRANSFORMS[b]) for a, b in ((one, two), (two, one)))
    assert first.transforms == second.transforms
    if thorough or name == "ifca":
        runs = [
            played(toy(name, {"transforms": [WRITTEN[kind] for kind in order]}), rounds=3)
            for order in ((one, two), (two, one))
        ]
        assert same(runs[0].state, runs[1].state)


LAWS = (every.plays, every.whole_update, every.dropouts, every.stops, every.wire, every.sums_only)


@pytest.mark.parametrize(("name", "kind"), PAIRS, ids=map(" ".join, PAIRS))
def test_laws_hold_for_a_method_with_a_transform(name, kind, thorough):
    """All transforms of IFCA, FedEM and Fielding, and with `--thorough` of every method."""
    if not can_take(name, kind):
        pytest.skip("it has no meaning for it")
    if not (thorough or name in ("ifca", "fedem", "fielding")):
        pytest.skip("much like others; only with --thorough")
    written = BUSY.get(kind, WRITTEN[kind])
    case = Case(lambda given=None, **changes: toy(name, {**(given or {}), "transforms": [written]}, **changes), None)
    held, exempt = 0, [law.check for law in every.LAWS if law.name in REGISTRY[name].exempt]
    for law in LAWS:
        if law in exempt:
            continue
        try:
            law(case)
            held += 1
        except every.NotApplicable:
            continue
    assert held >= 4
