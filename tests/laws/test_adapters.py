"""Laws of methods whose models are adapters on a frozen base: they need no line of theirs for it."""

import copy
from functools import partial

import pytest
import torch

from fedtide.clusters.representation import Embedding
from fedtide.core.base import Moment
from fedtide.core.errors import FedtideError
from fedtide.laws import every
from fedtide.laws.case import Case, played
from fedtide.runs.preflight import preflight
from fedtide.transforms.transform import models_in
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
FOR_NEXT = {"ifca": {"init_noise": 0.01}, "fedtem": {"branch_layer": "*", "prior": {"kind": "learned", "sketch": 4}}}
"""Other options of these: models of adapters alone begin unequal, and a prior looks at the last adapter."""

LAWS = (every.plays, every.same_seed, every.stops, every.stacks, every.pure_works, every.whole_update)


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest) -> dict[str, Case]:
    pool = partial(request.getfixturevalue, "pool")
    cases = {name: Case(partial(adapted, name, options), pool) for name, options in METHODS.items()}
    return cases | {
        f"{name} next": Case(partial(predicting, name, FOR_NEXT.get(name, METHODS[name])), pool) for name in NEXT
    }


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
    models = models_in(cases[name].reference.state)
    assert models
    for model in models:
        assert not model.buffers
        assert all("lora_" in parameter or "head" in parameter for parameter in model.params)


@pytest.mark.parametrize(
    ("make", "home"), [(adapted, "trunk"), (adapted, "head"), (predicting, "base.model.layers.0.self_attn.q_proj")]
)
def test_adapters_stay_at_home(make, home):
    case = Case(partial(make, "fedper", {"home": [home]}), None)
    run, fleet = case.watched(rounds=2)
    is_home = {"trunk": "lora_", "head": "head."}.get(home, home)
    sent = models_in(fleet.totals)
    assert sent
    assert all(is_home not in name for model in sent for name in model.params)
    client = int(fleet.asks[0].reply.clients[0])
    kept = models_in(run.fleet.engine.memory.read(client, (9, 0)))
    assert kept
    assert all(is_home in name for model in kept for name in model.params)


def test_clients_are_clustered_by_features_of_the_base():
    """The network that is never trained is the base with adapters at zero."""
    options = {"representation": {"kind": "embedding"}}
    case = Case(partial(adapted, "fielding", options), None)
    every.plays(case)
    task, population = (getattr(case.reference.host, name) for name in ("algorithm", "population"))
    task = task.options["task"]
    shard = population.shard(0, Moment(0, 6, 0.0))
    base = task.scratch.module.base
    with torch.no_grad():
        hidden = copy.deepcopy(base)
        for name, param in hidden.named_parameters():
            param.zero_() if "lora_B" in name else param
        counted = shard.x != 0
        features = hidden(input_ids=shard.x, attention_mask=counted.long()).last_hidden_state
        mean = (features * counted[..., None]).sum(1) / counted.sum(1, keepdim=True)
    ours = Embedding().of(task)(None, shard)
    torch.testing.assert_close(ours.float(), mean.mean(0))


def test_equal_adapters_of_which_clients_choose_the_best_are_refused():
    """All would choose the first for ever; with a new head they begin unequal."""
    for name, options in (("ifca", {}), ("fedsoft", {}), ("min-loss", {"branch_layer": "*", "lam": 0.0})):
        with pytest.raises(FedtideError, match=r"model.adapters: 2 models of adapters alone change nothing at first"):
            preflight(predicting(name, options))
    played(adapted("ifca"), rounds=1)
