"""Methods with a learned prior: what clients add, what the server keeps, and that all the rest is as without one."""

from dataclasses import replace

import pytest
import torch

from fedtide.laws.case import Case
from helpers.briefly import carried_on
from helpers.language import predicting
from helpers.toys import played, toy

METHODS = ("fedtem", "fedtkm")
TURNS = {"kind": "block-cyclic", "period": 8}


def experiment(method: str, prior, **changes):
    return toy(method, {"prior": prior}, **{"rounds": 26, "shift": {"who": TURNS}, **changes})


def next_tokens(method: str, prior, **changes):
    for library in ("transformers", "peft"):
        pytest.importorskip(library)
    return predicting(method, {"prior": prior, "branch_layer": "*"}, rounds=26, shift={"who": TURNS}, **changes)


@pytest.mark.parametrize("make", [experiment, next_tokens])
def test_shares_are_read_in_blocks(make):
    """Groups in turns of four rounds, each alone: first looked after 16 rounds, and all rounds are read then."""
    learned = played(make("fedtkm", "learned"))
    prior = learned.state.prior
    assert prior.found.moves
    assert prior.found.periods == pytest.approx((8.0,))
    assert [t for t, step in enumerate(learned.steps) if "prior" in step.facts] == list(range(15, 26))
    day = torch.tensor([t % 8 < 4 for t in range(26)])
    first = prior.shares[:, 0] if prior.shares[0, 0] > 0.5 else prior.shares[:, 1]  # components have no names
    assert first.tolist() == pytest.approx(day.double().tolist(), abs=1e-6)


@pytest.mark.parametrize("method", ["fedtem"])
def test_until_something_moves_it_is_as_with_no_prior(method):
    """The first look is after 16 rounds; before it not a bit is another but what is kept."""
    ours, theirs = (played(experiment(method, prior), rounds=15) for prior in ("learned", "em-only"))
    assert all("prior" not in step.facts for step in ours.steps)
    bare = replace(ours.state, prior=None)
    assert all(
        torch.equal(one, other)
        for one, other in zip(bare.weights.params.values(), theirs.state.weights.params.values(), strict=True)
    )


@pytest.mark.parametrize("method", ["fedtkm"])
def test_it_goes_on_from_a_checkpoint_in_the_middle_of_what_it_has_learned(method):
    """Saved after 9 of 18 rounds: it reads, and looks, as the run that never stopped."""
    prior = {"kind": "learned", "look_every": 4, "memory": 14}
    carried_on(Case(lambda: experiment(method, prior, rounds=18), lambda: pytest.fail("no processes")))


@pytest.mark.parametrize("method", METHODS)
def test_no_training_moves_a_sketch(method):
    """Three rounds with everyone there: the mean sketch is the same in each, whatever the weights became."""
    made = toy(method, {"prior": "learned", "cohort": "everyone"}, shift={"who": "always"})
    run = played(made, rounds=3)
    sketches, counts = run.state.prior.sketches, run.state.prior.counts
    assert counts[0] > 1
    assert counts.eq(counts[0]).all()
    assert torch.equal(sketches, sketches[:1].expand(3, -1))
