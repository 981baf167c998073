"""Laws of methods whose models are adapters on a frozen base: they need no line of theirs for it."""

from __future__ import annotations

from functools import partial

import pytest

from fedtide.core.base import Weights
from fedtide.core.trees import children, is_node
from fedtide.laws import every
from fedtide.laws.case import Case
from helpers.language import GATED, adapted, predicting

pytest.importorskip("peft")
pytest.importorskip("transformers")

METHODS = {
    "fedavg": {}, "scaffold": {}, "ifca": {}, "fielding": {}, "fedtkm": {}, "aem": GATED,
    "fedtem": {"branch_layer": "*"},
}  # fmt: skip
"""One model, memory, clusters, branches of the head, a mixture, and branches that are adapters."""
NEXT = "fedavg", "fedtem", "ifca"
"""Those that are also tried on next tokens, with padding that does not count."""

LAWS = (every.plays, every.same_seed, every.stops, every.stacks, every.pure_works, every.whole_update)


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest) -> dict[str, Case]:
    pool = partial(request.getfixturevalue, "pool")
    cases = {name: Case(partial(adapted, name, options), pool) for name, options in METHODS.items()}
    return cases | {f"{name} next": Case(partial(predicting, name, METHODS[name]), pool) for name in NEXT}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("rule", LAWS, ids=lambda rule: rule.__name__)
def test_a_law_holds_for_adapters(rule, name, cases):
    rule(cases[name])


@pytest.mark.parametrize("name", NEXT)
@pytest.mark.parametrize("rule", [every.plays, every.stops, every.stacks], ids=lambda rule: rule.__name__)
def test_a_law_holds_for_adapters_of_next_tokens(rule, name, cases):
    rule(cases[f"{name} next"])


@pytest.mark.xdist_group("pool")
@pytest.mark.parametrize("name", ["fedavg", "fedtem", "aem", "fedavg next"])
def test_workers_give_the_bits_of_one_process(name, cases):
    every.workers(cases[name])


@pytest.mark.parametrize("rule", [every.masked, every.private, every.deployed], ids=lambda rule: rule.__name__)
def test_adapters_are_masked_noised_and_sent(rule, cases):
    rule(cases["fedavg"])


@pytest.mark.parametrize("name", [*METHODS, *(f"{name} next" for name in NEXT)])
def test_only_adapters_and_heads_are_weights(name, cases):
    models = list(_models_in(cases[name].reference.state))
    assert models
    for model in models:
        assert not model.buffers
        assert all("lora_" in parameter or "head" in parameter for parameter in model.params)


def _models_in(tree):
    if isinstance(tree, Weights):
        yield tree
    elif is_node(tree):
        for _, child in children(tree):
            yield from _models_in(child)
