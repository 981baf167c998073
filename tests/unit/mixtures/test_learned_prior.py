"""The learned prior: what it keeps, reads, forecasts and says, and what it does where there is nothing to learn."""

import numpy as np
import pytest
import torch

from fedtide.core.base import Moment
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.data.shift.who import periodic_shares
from fedtide.mixtures.priors import Heard, Learned
from helpers.rhythms import linear, world


def at(round: int) -> Moment:
    return Moment(round, 1000)


def heard(prior: Learned, shares, seed: int = 0, rounds=None, **of):
    """The memo after every round of a world, and the shares that came (n, K)."""
    series, came = world(shares, seed, **of)
    memo, memos = prior.init(came.shape[1]), []
    for t in range(len(series)) if rounds is None else rounds:
        told = {"sketch": torch.from_numpy(series[t]), "modes": torch.from_numpy(came[t])}
        memo = prior.see(memo, at(t), told, Rng(seed).at(t))
        memos.append(memo)
    return memos, came


@pytest.fixture(scope="module")
def demo() -> tuple[list[Heard], np.ndarray]:
    """Four cycles of 32 rounds, and what came."""
    return heard(Learned(), linear(128, 32))


def error(one, other) -> float:
    """The root mean square; a cohort of 10 differs from what is expected by up to 0.16, and 0.13 over a linear wave."""
    return float(np.sqrt(((np.asarray(one) - np.asarray(other)) ** 2).mean()))


def test_shares_are_read_long_before_a_period_is_believed(demo):
    prior, (memos, came) = Learned(), demo
    read = [prior.shares(at(t), 2, memo) for t, memo in enumerate(memos)]
    begun = next(t for t, q in enumerate(read) if q is not None)
    believed = next(t for t, memo in enumerate(memos) if memo.found.periods)
    assert begun < 32 < 63 <= believed <= 71
    assert all(q is not None for q in read[begun:])
    assert error(torch.stack(read[64:]), came[64:]) < 0.1


def test_the_next_period_is_forecast(demo):
    """Better than what chance puts into a cohort of 10: it is the expected share that the curve follows."""
    prior, (memos, _) = Learned(), demo
    coming = torch.stack([prior.shares(at(t), 2, memos[-1]) for t in range(128, 160)])
    assert error(coming[:, 0], linear(160, 32)[128:]) < 0.08
    assert torch.allclose(coming.sum(1), torch.ones(32).double())


def test_facts_say_what_is_believed_and_each_look(demo):
    prior, (memos, _) = Learned(), demo
    looks = [t for t, memo in enumerate(memos) if "gain" in prior.facts(memo)]
    assert looks == [t for t in range(128) if (t + 1) % 8 == 0 and t >= 11]
    facts = prior.facts(memos[-1])
    assert facts["periods"].tolist() == pytest.approx([32], rel=0.03)
    assert facts["gain"] > 1.5 * facts["chance"] + 10
    assert facts["forecast"].shape == (2,)


def test_groups_that_were_counted_keep_their_numbers():
    """Who is which is taken from what components counted before: a mirrored count mirrors all that is read."""
    series, came = world(linear(64, 32), 0)
    ends = []
    for mirrored in (False, True):
        prior, memo = Learned(), Learned().init(2)
        for t, (sketch, share) in enumerate(zip(series, came, strict=True)):
            counted = torch.from_numpy(np.ascontiguousarray(share[::-1] if mirrored else share))
            memo = prior.see(memo, at(t), {"sketch": torch.from_numpy(sketch), "modes": counted}, Rng(t))
        ends.append(prior.shares(at(63), 2, memo))
    assert torch.equal(ends[0], ends[1].flip(0))
    assert abs(float(ends[0][0]) - came[-1, 0]) < 0.1


def test_what_is_counted_later_does_not_matter():
    """The thermometer does not hang on the heater: components that all choose one mode change nothing that is read."""
    series, came = world(linear(96, 32), 0)
    ends = []
    for stuck in (False, True):
        prior, memo = Learned(), Learned().init(2)
        for t in range(96):
            counted = came[t] if not stuck or t < 32 else np.array([1.0, 0.0])
            told = {"sketch": torch.from_numpy(series[t]), "modes": torch.from_numpy(counted)}
            memo = prior.see(memo, at(t), told, Rng(t))
        ends.append(memo)
    assert ends[0].found == ends[1].found
    assert torch.equal(ends[0].shares, ends[1].shares)


def test_three_groups():
    expected = np.stack([periodic_shares("linear", t, 48, 1.0, 3) for t in range(160)])
    prior = Learned()
    memos, came = heard(prior, expected, 1, apart=4.0)
    assert error(memos[-1].shares, came) < 0.1
    assert memos[-1].found.periods[0] == pytest.approx(48, rel=0.05)
    ahead = torch.stack([prior.shares(at(t), 3, memos[-1]) for t in range(160, 208)])
    assert error(ahead, [periodic_shares("linear", t, 48, 1.0, 3) for t in range(160, 208)]) < 0.1


def test_a_round_without_answers_is_left_out(demo):
    """The algorithm does not ask then; a forecast is by the clock and not by the number of rounds heard."""
    prior = Learned()
    memos, _ = heard(prior, linear(130, 32), rounds=[t for t in range(130) if t % 9])
    coming = [float(prior.shares(at(t), 2, memos[-1])[0]) for t in range(130, 162)]
    assert error(coming, linear(162, 32)[130:]) < 0.1


def test_a_large_cohort_counts_for_more():
    """Counts are kept as long as sketches; that the same rounds were of one size would be another reading."""
    came = np.random.default_rng(1000).choice([1, 19], 96)
    series, shares = world(linear(96, 32), 0, m=came)
    ends = []
    for told_of in (came, np.full(96, 5)):
        prior, memo = Learned(memory=90), Learned().init(2)
        for t in range(96):
            told = {"sketch": torch.from_numpy(series[t]), "modes": torch.from_numpy(shares[t])}
            memo = prior.see(memo, at(t), told, Rng(t), int(told_of[t]))
        ends.append(memo)
    assert ends[0].counts.tolist() == came[6:].tolist()
    assert error(ends[0].shares[came[6:] == 19], shares[6:][came[6:] == 19]) < 0.12
    assert not torch.equal(ends[0].shares, ends[1].shares)


def test_there_are_no_more_groups_than_numbers():
    Learned(sketch=3).check(3)
    with pytest.raises(FedtideError, match=r"prior.sketch: found 3, allowed: at least 4, the number of groups"):
        Learned(sketch=3).check(4)
