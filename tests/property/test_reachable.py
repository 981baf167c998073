"""The law of one draw: who arrives can be reached, under every shift, trace, replayed run and generated crowd."""

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtide.core.base import Moment
from fedtide.data.partition import IID, ByLabels, HeldOutClients, Natural, Split
from fedtide.data.population import Population
from fedtide.data.population_builder import build
from fedtide.data.rows import Rows
from fedtide.data.saved import save
from fedtide.data.shift import ChangePoints, ClusterDrift, DomainMixture, Shift, Static, Stream
from fedtide.data.shift.how import LabelSwaps, Permutation
from fedtide.data.shift.who import Always, Availability, BlockCyclic, Periodic, Replay
from fedtide.data.sources import Generated
from helpers.examples import examples

law = examples(40)
seeds = st.integers(0, 2**32)
rounds = st.integers(0, 23)
whos = st.one_of(
    st.builds(Always),
    st.builds(Periodic, st.sampled_from(["linear", "cosine"]), st.integers(1, 16).map(float)),
    st.builds(BlockCyclic, st.integers(1, 16).map(float)),
)
whats = st.sampled_from(
    [
        Static(),
        DomainMixture(samples=4),
        Stream(gap=4, retention=4, intervals=6, empty="wait"),
        Stream(by="order", gap=3, retention=6, intervals=8, empty="wait"),
        ClusterDrift(groups=2, labels=2, every=4, samples=5, val_samples=1, test_samples=2, events=(6.0,)),
        ChangePoints(when={"kind": "drawn", "every": 5}),
    ]
)
hows = st.sampled_from([Permutation(), LabelSwaps(every=4)])


def toy(n: int = 600, classes: int = 6) -> Rows:
    i = torch.arange(n)
    return Rows("toy", i.float()[:, None], i % classes, classes, domain=i // classes % 2, domain_names=("day", "night"))


def people(shift: Shift, seed: int = 0) -> Population:
    """Clients in two groups, each with rows of both domains, among them some with few labels."""
    groups = ByLabels(labels=((0, 1, 2), (3, 4, 5)))
    return build(toy(), IID(12), groups, Split(val=0.1, test=0.2), HeldOutClients(2), shift, seed)


def one_order(population: Population, moment: Moment) -> None:
    """Arrivals are reachable, until more arrive than are reachable; then all reachable clients have arrived."""
    reachable = set(population.reachable(moment).tolist())
    before: list[int] = []
    for m in range(population.registered + 1):
        arrived = population.arrivals_in_order(m, moment).tolist()
        assert arrived[: len(before)] == before
        assert set(arrived[: len(reachable)]) <= reachable
        before = arrived
    assert reachable <= set(before)


@law
@given(whos, whats, hows, rounds, seeds)
def test_arrivals_are_reachable_under_every_shift(who, what, how, r, seed):
    one_order(people(Shift(who, what, how), seed), Moment(r, 24))


@law
@given(whos, whats, rounds, seeds)
def test_arrivals_of_another_run_are_reachable(tmp_path_factory, who, what, r, seed):
    population, path = people(Shift(who, what), seed), tmp_path_factory.mktemp("runs") / "0.safetensors"
    save(population, path, rounds=24, cohort=12)
    for other in (population.shift, Shift()):
        replayed = replace(population, shift=replace(other, who=Replay(str(path))), seed=seed + 1)
        one_order(replayed, Moment(r, 24))
    replayed = replace(population, shift=replace(population.shift, who=Replay(str(path))))
    assert replayed.reachable(Moment(r, 24)).tolist() == population.reachable(Moment(r, 24)).tolist()


@law
@given(st.sampled_from(["client", "drawn"]), whats, rounds, seeds)
def test_arrivals_are_reachable_under_a_trace(tmp_path_factory, match, what, r, seed):
    path = tmp_path_factory.mktemp("traces") / "awake.csv"
    path.write_text("client,start,end\n" + "".join(f"{c},{c % 5},{c % 5 + 4 + c % 3}\n" for c in range(12)))
    one_order(people(Shift(Availability(str(path), match=match, period=12), what), seed), Moment(r, 24))


@law
@given(rounds, seeds)
def test_arrivals_are_reachable_in_a_generated_crowd(r, seed):
    population = build(Generated(clients=30, samples=4, dims=2).load(None, 0), Natural(), seed=seed)
    one_order(population, Moment(r, 24))
