"""FedLC and masked cross-entropy by pencil and paper: three classes, a client with sixteen labels 0 and one label 1.

Calibrated by tau = 1 the logits are lowered by 16^(-1/4) = 1/2 and 1^(-1/4) = 1, and the third is left out. Masked, the
third logit is zero.
"""

import math

import pytest
import torch

from fedtide.core.base import Shard
from fedtide.learn.losses import FedLC, Masked

SHARD = Shard(torch.zeros(17, 1), torch.tensor([0] * 16 + [1]), torch.arange(17))
NARROW = Shard(torch.zeros(1, 1), torch.tensor([0]), torch.arange(1))


def loss_of(loss, logits: list[float], label: int, shard: Shard = SHARD):
    """Value and gradient in the logits."""
    z = torch.tensor([logits], dtype=torch.float64, requires_grad=True)
    value = loss.value(z, torch.tensor([label]), *loss.prepare(shard))
    return float(value.detach()), torch.autograd.grad(value, z)[0][0].tolist()


def test_calibrated_logits():
    """z = (1/2, 1, 7): both held logits become 0. Softmax (1/2, 1/2, 0), loss log 2."""
    value, gradient = loss_of(FedLC(), [0.5, 1.0, 7.0], 1)
    assert value == pytest.approx(math.log(2), abs=1e-15)
    assert gradient == pytest.approx([1 / 2, -1 / 2, 0.0], abs=1e-15)


def test_a_rare_class_needs_a_higher_logit():
    """z = 0, tau = 2 log 3: (-log 3, -2 log 3), softmax (3/4, 1/4, 0): the rare class loses log 4."""
    loss = FedLC(tau=2 * math.log(3))
    assert loss_of(loss, [0.0, 0.0, 0.0], 1) == (
        pytest.approx(math.log(4)), pytest.approx([3 / 4, -3 / 4, 0.0], abs=1e-15),
    )  # fmt: skip
    assert loss_of(loss, [0.0, 0.0, 0.0], 0)[0] == pytest.approx(math.log(4 / 3))


def test_without_calibration_absent_classes_are_left_out_and_nothing_else():
    """z = (log 2, 0, 5): softmax (2/3, 1/3, 0)."""
    value, gradient = loss_of(FedLC(tau=0.0), [math.log(2), 0.0, 5.0], 0)
    assert value == pytest.approx(math.log(3 / 2))
    assert gradient == pytest.approx([-1 / 3, 1 / 3, 0.0], abs=1e-15)


def test_masked_logits_are_zero_and_count_in_the_sum():
    """z = (log 2, 0, 5): e^z is (2, 1, e^0 = 1), softmax (1/2, 1/4, 1/4); the third gets no gradient."""
    value, gradient = loss_of(Masked(), [math.log(2), 0.0, 5.0], 0)
    assert value == pytest.approx(math.log(2))
    assert gradient == pytest.approx([-1 / 2, 1 / 4, 0.0], abs=1e-15)


def test_a_client_of_one_class_still_learns_from_the_masked_zeros():
    """z = (log 2, 9, 9) with class 0 alone: softmax (2/4, 1/4, 1/4). Calibrated, nothing is left to learn."""
    value, gradient = loss_of(Masked(), [math.log(2), 9.0, 9.0], 0, NARROW)
    assert (value, gradient) == (pytest.approx(math.log(2)), pytest.approx([-1 / 2, 0.0, 0.0], abs=1e-15))
    assert loss_of(FedLC(), [math.log(2), 9.0, 9.0], 0, NARROW) == (0.0, [0.0, 0.0, 0.0])


@pytest.mark.parametrize("loss", [FedLC(tau=3.0), Masked()])
def test_smoothed_labels_and_gradients_by_hand_are_those_of_autograd(loss):
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(1, 4, 3, generator=draw, dtype=torch.float64, requires_grad=True)
    y, shared = torch.tensor([[0, 1, 0, 1]]), loss.stacked([loss.prepare(SHARD)[0]])
    for eps in (None, 0.3):
        smooth = None if eps is None else torch.full((1, 4), eps, dtype=torch.float64)
        losses, gradient = loss.graded(z.detach(), y, shared, smooth)
        each = loss.each(z[0], y[0], shared[0], eps or 0.0)
        torch.testing.assert_close(losses[0], each.detach(), rtol=1e-12, atol=1e-12)
        (expected,) = torch.autograd.grad(each.sum(), z)
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)
