"""Temporal priors: what they expect, what they read, and what a person may write."""

import math
from typing import Annotated

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from fedtide.core.base import Moment
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.fields.types import Spelled
from fedtide.mixtures.priors import Block, Cosine, Linear, Prior, Soft, Uniform
from fedtide.runs.build import host_of
from helpers.toys import toy

spelled = TypeAdapter(Annotated[Prior, Spelled])


def at(round: int) -> Moment:
    return Moment(round, 100, seconds=17.0 * round)


def first(prior, rounds) -> list[float]:
    return [float(prior.shares(at(t), 2)[0]) for t in rounds]


# -- what they expect -------------------------------------------------------------------------------------------------


def test_a_period_by_hand():
    """T = 8: linear falls by 1/4 a round; cosine is (1 + cos(pi t/4))/2; block is 1 for four rounds."""
    half = math.sqrt(0.5) / 2
    assert first(Linear(8), range(9)) == [1, 0.75, 0.5, 0.25, 0, 0.25, 0.5, 0.75, 1]
    cosine = [1, 0.5 + half, 0.5, 0.5 - half, 0, 0.5 - half, 0.5, 0.5 + half, 1]
    assert first(Cosine(8), range(9)) == pytest.approx(cosine, abs=1e-15)
    assert first(Block(8), range(9)) == [1, 1, 1, 1, 0, 0, 0, 0, 1]
    assert first(Uniform(), range(3)) == [0.5] * 3


# -- soft -------------------------------------------------------------------------------------------------------------


def counted_share(first: float) -> dict[str, torch.Tensor]:
    """What a round tells: the counted shares of two groups."""
    return {"modes": torch.tensor([first, 1 - first], dtype=torch.float64)}


def played(prior: Soft, counted: list[float], begin: int = 0) -> list[float]:
    """The share of the first group, round by round."""
    q: list[float] = []
    for t, now in enumerate(counted, begin):
        q.append(prior.see(q[-1] if q else None, at(t), counted_share(now), Rng(0)))
        assert prior.shares(at(t), 2, q[-1]).tolist() == [q[-1], 1 - q[-1]]
    return q


def test_soft_by_hand():
    """T = 8. Falling: never up again (0.9 after 0.6 stays 0.6); the trough is 0; rising: never down again."""
    counted = [0.2, 0.6, 0.9, 0.5, 0.4, 0.1, 0.0, 0.7, 0.3, 0.8]
    assert played(Soft(8), counted) == [1, 0.6, 0.6, 0.5, 0, 0.1, 0.1, 0.7, 1, 0.8]


def test_soft_is_for_two_groups():
    assert Soft(8).shares(at(2), 1, 0.3).tolist() == [1.0]
    assert Soft(8).shares(at(2), 2, 0.3).tolist() == [0.3, 0.7]
    with pytest.raises(FedtideError, match="prior: found 'soft', allowed: at most 2 groups, not 3"):
        Soft(8).shares(at(2), 3, 0.3)
    with pytest.raises(FedtideError):
        Soft(8).check(3)


# -- what a person may write ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        "nonsense",
        {"kind": "uniform", "period": 8},
        {"kind": "linear", "period": 8, "exponent": 2},
        {"kind": "linear", "period": 8, "phase": float("nan")},
    ],
)
def test_mistakes_are_refused(wrong):
    with pytest.raises(ValidationError):
        spelled.validate_python(wrong)


@pytest.mark.parametrize("made", [Linear, Cosine, Block, Soft])
def test_mistakes_are_refused_from_python_too(made):
    with pytest.raises(FedtideError):
        made(0)


# -- a period that is not given ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("prior", [Linear(), Cosine(), Block(), Soft()])
def test_without_a_period_nothing_can_be_expected(prior):
    with pytest.raises(FedtideError, match=r"prior.period: missing; allowed: a number of rounds.*prior = .learned"):
        prior.check(2)
    with pytest.raises(FedtideError, match=r"prior.period: missing"):
        prior.elapsed(at(0))


# -- what all have in common ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prior", "line"),
    [
        ({"period": "1x"}, r"prior.period: found '1x', allowed: a number of rounds above 0, or a time such as '1d'"),
        ({"period": 8, "phase": "3h"}, r"prior.phase: found '3h', allowed: a round, because period is 8.0"),
        ({"period": "1d", "phase": 3.5}, r"prior.phase: found 3.5, allowed: a time such as '14h', because"),
    ],
)
def test_a_period_is_one_of_rounds_or_of_the_clock(prior, line):
    def made():
        experiment = toy("fedtem", {"prior": {"kind": "linear", **prior}})
        return host_of(experiment, experiment.method[0], 0)

    with pytest.raises(FedtideError, match=line):
        made()
