"""Laws of runs in which features below the adapters are computed once for each row."""

from functools import partial
from pathlib import Path

import pytest

from fedtide.core.trees import same
from fedtide.laws import every
from fedtide.laws.case import Case, Played, near, played
from fedtide.models import transformer
from fedtide.models.lower import FeatureCache
from helpers.language import divided, save

pytest.importorskip("peft")
pytest.importorskip("transformers")

METHODS = {"fedavg": {}, "ifca": {}, "fedtem": {"branch_layer": "*"}}
LAWS = (every.plays, every.stops, every.stacks)


@pytest.fixture(scope="module", params=["bert", "llama"])
def folder(request, tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp(request.param), request.param, layers=3)


@pytest.fixture(scope="module")
def cases(folder, request: pytest.FixtureRequest) -> dict[str, Case]:
    pool = partial(request.getfixturevalue, "pool")
    return {name: Case(partial(divided, folder, name, options), pool) for name, options in METHODS.items()}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("rule", LAWS, ids=lambda rule: rule.__name__)
def test_a_law_holds_for_features_that_are_kept(rule, name, cases):
    rule(cases[name])


@pytest.mark.xdist_group("pool")
@pytest.mark.parametrize("folder", ["bert"], indirect=True)
def test_workers_that_keep_other_rows_give_the_bits_of_one_process(cases):
    every.workers(cases["fedtem"])


@pytest.mark.parametrize("name", METHODS)
def test_runs_that_keep_all_features_or_few_or_none_are_equal(name, cases, monkeypatch):
    state, keep = cases[name].reference.state, FeatureCache.keep
    for most in (0, 1000):
        transformer._load_base.cache_clear()
        monkeypatch.setattr(FeatureCache, "keep", lambda self, key, row, _, most=most: keep(self, key, row, most))
        run = played(cases[name].experiment)
        kept = lower_of(run).cache.features
        assert bool(kept) == bool(most)
        assert sum(row.nbytes for row in kept.values()) <= most
        assert same(run.state, state)


@pytest.mark.parametrize("name", METHODS)
def test_a_run_is_that_of_the_whole_base_to_rounding(name, cases, monkeypatch):
    monkeypatch.setattr(transformer, "split", lambda base: None)
    run = played(cases[name].experiment)
    assert lower_of(run) is None
    near(run.state, cases[name].reference.state, "the whole base ends otherwise", rtol=1e-4, atol=1e-5)


def lower_of(run: Played):
    module = run.host.algorithm.options["task"].scratch.module
    return next(part.lower for part in module.modules() if isinstance(part, transformer.Tokens))
