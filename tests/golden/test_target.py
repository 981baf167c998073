"""Numbers, quantiles, counts and several labels: losses, scores and mixtures, by hand.

Numbers: known values 2, 4, 6, 8 have mean 5 and standard deviation sqrt(5) (squares of -3, -1, 1, 3 sum to 20).
"""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from fedtide.core.base import Prediction, Scores
from fedtide.core.errors import FedtideError
from fedtide.data.targets import Counts, Labels, Number, Quantiles, assign_bins, edges_of
from fedtide.fleets.scoring import Tally, concat_scores
from fedtide.learn.target import CLASSES, Target

FOUR = torch.tensor([2.0, 4.0, 6.0, 8.0])
ALL = torch.arange(4)
ROOT5 = math.sqrt(5)


def fitted(setting: Number | Quantiles | Counts | Labels, values: Tensor) -> Target:
    rows = torch.arange(len(values))
    return setting.fitted(values, rows, rows, "toy: row {}".format)[0]


def scored(target: Target, told: Tensor, y: Tensor, owner: Tensor) -> Scores:
    tally = Tally(int(owner.max()) + 1, target=target)
    tally.add(owner, Prediction(told), y)
    return concat_scores([tally.scores(owner.unique())])


def test_a_number_is_standardized_and_told_in_its_own_units():
    target = fitted(Number(), FOUR)
    assert (target.center, target.constant, target.width) == (5.0, (5.0,), 1)
    assert target.scale == pytest.approx(ROOT5)
    told = target.read_outputs(torch.tensor([[0.0], [1.0]]))
    torch.testing.assert_close(told, torch.tensor([[5.0], [5 + ROOT5]]))
    # (2 - 5)^2 / 5 and (8 - 5 - sqrt 5)^2 / 5.
    losses = target.losses(told, torch.tensor([2.0, 8.0]))
    torch.testing.assert_close(losses, torch.tensor([9 / 5, (3 - ROOT5) ** 2 / 5]))
    value = target.loss.value(torch.zeros(4, 1), FOUR, None, ())
    assert float(value) == pytest.approx(1.0)  # who says the mean errs by one variance


def test_huber_is_squared_up_to_one_standard_deviation():
    target = fitted(Number(loss="huber"), FOUR)
    # z = -3 / sqrt 5 = -1.342 is beyond 1: |z| - 1/2; z = -1 / sqrt 5 is not: z^2 / 2 = 1/10.
    losses = target.losses(torch.full((2, 1), 5.0), torch.tensor([2.0, 4.0]))
    torch.testing.assert_close(losses, torch.tensor([3 / ROOT5 - 0.5, 0.1]))
    assert target.constant == (5.0,)  # the median of 2, 4, 6, 8


def test_a_spread_that_the_model_says_gives_a_normal_likelihood():
    target = fitted(Number(loss="gaussian"), FOUR)
    told = target.read_outputs(torch.tensor([[0.5, 0.25]]))
    mean, spread = 5 + 0.5 * ROOT5, ROOT5 * math.exp(0.25)
    torch.testing.assert_close(told, torch.tensor([[mean, math.log(spread)]]))
    # Of standardized values, so that scipy's density of the data is larger by log(scale).
    expected = -stats.norm.logpdf(7.0, mean, spread) - math.log(ROOT5)
    assert float(target.losses(told, torch.tensor([7.0]))) == pytest.approx(expected, rel=1e-5)
    # Half of N(0, 1) and half of N(4, 1): mean 2, variance 1 + 4.
    both = torch.tensor([[[0.0, 0.0]], [[4.0, 0.0]]])
    torch.testing.assert_close(target.mix(both), torch.tensor([[2.0, math.log(5) / 2]]))
    uneven = torch.tensor([0.75, 0.25]).log().reshape(2, 1, 1)  # mean 1, variance 1 + 3/4 + 9/4
    torch.testing.assert_close(target.mix(both, uneven), torch.tensor([[1.0, math.log(4) / 2]]))


def test_the_pinball_loss_of_quantiles():
    target = fitted(Quantiles(at=(0.25, 0.75)), FOUR)
    assert target.constant == (3.5, 6.5)  # of 2, 4, 6, 8 by linear interpolation
    # y = 8 lies above both: 0.25 * 4 and 0.75 * 2; y = 3 below both: 0.75 * 1 and 0.25 * 3.
    said = torch.tensor([[4.0, 6.0], [4.0, 6.0]])
    y = torch.tensor([8.0, 3.0])
    torch.testing.assert_close(target.errors(said, y), torch.tensor([(1.0 + 1.5) / 2, (0.75 + 0.75) / 2]))
    torch.testing.assert_close(target.losses(said, y), target.errors(said, y) / ROOT5)
    crossed = target.read_outputs(torch.tensor([[1.0, 0.0]]))
    torch.testing.assert_close(crossed, torch.tensor([[5.0, 5 + ROOT5]]))
    # Half of the rows lie below 4, all below 9: nine tenths lie between -1 and 9 if that is so.
    sums = target.sums(torch.tensor([[4.0, 9.0]]).expand(4, -1), FOUR)
    assert sums["below"].sum(0).tolist() == [2.0, 4.0]


def test_a_count_has_the_likelihood_and_the_deviance_of_poisson():
    y = torch.tensor([0.0, 1.0, 2.0, 5.0])
    target = fitted(Counts(), y)
    assert (target.center, target.constant) == (2.0, (2.0,))
    told = target.read_outputs(torch.zeros(4, 1))
    torch.testing.assert_close(told.exp(), torch.full((4, 1), 2.0))
    expected = -stats.poisson.logpmf(y.numpy(), 2.0)
    np.testing.assert_allclose(target.losses(told, y).numpy(), expected, rtol=1e-5)
    # 2 (y log(y / 2) - y + 2): 4, 2 (1 - log 2), 0, 2 (5 log 2.5 - 3).
    deviance = [4.0, 2 * (1 - math.log(2)), 0.0, 2 * (5 * math.log(2.5) - 3)]
    np.testing.assert_allclose(target.errors(told.double(), y.double()).numpy(), deviance, rtol=1e-6, atol=1e-6)
    # Means are mixed: half of 2 and half of 6 is 4.
    torch.testing.assert_close(target.mix(torch.tensor([2.0, 6.0]).log().reshape(2, 1, 1)).exp(), torch.tensor([[4.0]]))
    # Whoever has seen none says 1/2.
    torch.testing.assert_close(target.as_answers(torch.tensor([0.0, 2.0])).exp(), torch.tensor([0.5, 2.0]))


def test_several_labels_have_a_likelihood_each():
    y = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    target, bins = Labels().fitted(y, ALL, ALL, "toy: row {}".format)
    assert bins.tolist() == [0, 2, 3, 0]  # the first label of each row, 3 for none
    logits = torch.log(torch.tensor([[3.0, 1.0, 1 / 3]]))  # p = 3/4, 1/2, 1/4
    loss = -(math.log(0.75) + math.log(0.5) + math.log(0.75))
    assert float(target.losses(logits, y[:1])) == pytest.approx(loss)
    assert float(target.each(logits, y[:1])) == pytest.approx(loss / 3)
    # The commonest: label 0 in half of the rows, the others in a quarter: (1/2 + 3/4 + 3/4) / 3.
    assert target.score_constant(y, y).mean().item() == pytest.approx(2 / 3)
    # By the first two rows label 1 is never there, the others as often as not, so not: right in 3/4, 1/2 and 3/4.
    assert target.score_constant(y, y[:2]).mean().item() == pytest.approx(2 / 3)
    assert target.score_constant(y, y[[0, 3]]).mean().item() == pytest.approx((1 / 2 + 3 / 4 + 3 / 4) / 3)
    assert target.score_constant(y[2:3], y[3:]).mean().item() == pytest.approx(
        1 / 3
    )  # both of the first two, where there are none
    classes = torch.tensor([0, 1, 1, 1, 2])
    assert CLASSES.score_constant(classes, classes).mean() == 3 / 5
    assert CLASSES.score_constant(classes, classes[[0, 0, 4]]).mean() == 1 / 5
    # p = 0.75 and 0.25 half each is 0.5: odds of 1.
    both = torch.log(torch.tensor([[[3.0]], [[1 / 3]]]))
    torch.testing.assert_close(target.mix(both), torch.zeros(1, 1))
    told = torch.tensor([[1.0, 1.0, -1.0], [-1.0, 1.0, 1.0], [-1.0, -1.0, -1.0], [-1.0, 1.0, -1.0]])
    scores = scored(target, told, y, torch.tensor([0, 0, 1, 1]))
    assert scores.correct.tolist() == pytest.approx([2 / 3 + 2 / 3, 1 + 2 / 3])
    assert scores.sums["hits"].tolist() == [[1, 0, 1], [0, 1, 0]]
    assert scores.sums["false_alarms"].tolist() == [[0, 2, 0], [0, 0, 0]]
    assert scores.sums["misses"].tolist() == [[0, 0, 0], [1, 0, 0]]
    assert scores.sums["exact"].tolist() == [0.0, 1.0]


def test_skill_is_one_minus_the_error_over_that_of_the_constant_on_the_same_rows():
    """Values 2, 4, 6, 8 and told 3, 4, 6, 4: squares 1, 0, 0, 16; the constant 5 errs by 9, 1, 1, 9, in the mean by 5.

    Client 0 has the first two rows: skill 1 - (1/2) / 5 = 0.9; client 1 the others: 1 - 8 / 5 = -0.6. All: 1 - 17 / 20.
    """
    target = fitted(Number(), FOUR)
    told = torch.tensor([[3.0], [4.0], [6.0], [4.0]])
    scores = scored(target, told, FOUR, torch.tensor([0, 0, 1, 1]))
    assert (scores.correct / scores.rows).tolist() == pytest.approx([0.9, -0.6])
    assert scores.accuracy == pytest.approx(0.15)
    assert scores.sums["reference"].tolist() == [10.0, 10.0]
    assert scores.sums["absolute"].tolist() == [1.0, 4.0]
    assert scores.sums["square"].tolist() == [1.0, 16.0]
    mean = scored(target, torch.full((4, 1), 5.0), FOUR, torch.tensor([0, 0, 1, 1]))
    assert mean.accuracy == pytest.approx(0.0)


def test_no_skill_is_told_of_a_model_that_says_no_number():
    target = fitted(Number(), FOUR)
    told = torch.tensor([[3.0], [math.inf], [6.0], [4.0]])
    assert math.isnan(scored(target, told, FOUR, torch.tensor([0, 0, 1, 1])).accuracy)


@pytest.mark.parametrize("setting", [Number(), Number(loss="huber"), Number(loss="gaussian"), Quantiles(), Counts()])
def test_whoever_says_the_constant_has_no_skill(setting):
    y = torch.tensor([0.0, 1.0, 2.0, 5.0, 9.0])
    target = fitted(setting, y)
    constant = torch.tensor(target.constant).expand(5, -1)
    told = constant.log() if isinstance(setting, Counts) else constant
    told = torch.cat([told, torch.zeros(5, 1)], 1) if target.width > told.shape[1] else told
    assert scored(target, told, y, torch.zeros(5, dtype=torch.int64)).accuracy == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    "setting", [Number(), Number(loss="huber"), Number(loss="gaussian"), Quantiles(), Counts(), Labels()]
)
def test_gradients_are_those_of_the_losses_by_finite_differences(setting):
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(0, 2, (6, 3), generator=draw).double()
    y = y if isinstance(setting, Labels) else torch.tensor([0.0, 1.0, 1.0, 2.0, 5.0, 9.0]).double()
    target = fitted(setting, y)
    outputs = torch.randn(6, target.width, generator=draw, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda out: target.each(out, y), (outputs,))


def test_bins_hold_about_as_many_values_each_and_ties_make_fewer():
    values = torch.arange(100.0)
    assert torch.bincount(assign_bins(values, edges_of(values))).tolist() == [10] * 10
    many_zeros = torch.cat([torch.zeros(95), torch.arange(1.0, 6.0)])
    bins = assign_bins(many_zeros, edges_of(many_zeros))
    assert bins[:95].unique().tolist() == [0]
    assert bool((bins.diff() >= 0).all())


def test_known_rows_alone_standardize():
    values = torch.tensor([2.0, 4.0, 100.0])
    target, bins = Number().fitted(values, torch.tensor([0, 1]), torch.arange(3), "toy: row {}".format)
    assert (target.center, target.scale) == (3.0, 1.0)
    assert target.constant[0] == pytest.approx(106 / 3)  # a rival that knows what is to come
    assert int(bins[2]) == len(target.edges)


@pytest.mark.parametrize(
    ("setting", "values", "line"),
    [
        (Counts(), [1.0, 2.5], "toy: row 1: label: found 2.5, allowed: a whole number from 0"),
        (Counts(), [0.0, 0.0], "some count above 0"),
        (Labels(), [[0.0, 1.0], [0.0, 2.0]], "toy: row 1: label 1: found 2.0, allowed: 0 or 1"),
    ],
)
def test_values_of_another_kind_are_refused(setting, values, line):
    with pytest.raises(FedtideError, match=line):
        fitted(setting, torch.tensor(values))


def test_quantiles_rise():
    with pytest.raises(FedtideError, match="rising numbers between 0 and 1"):
        Quantiles(at=(0.5, 0.1))


def test_classes_are_read_as_ever():
    logits = torch.tensor([[0.0, 0.0], [2.0, 0.0]])
    assert torch.equal(CLASSES.read_outputs(logits), torch.log_softmax(logits, -1))
    assert CLASSES.predict_labels(CLASSES.read_outputs(logits)).tolist() == [0, 0]
    assert (CLASSES.width, CLASSES.bins, CLASSES.kind) == (0, 0, "classes")
