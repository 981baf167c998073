"""An audit: is the claimed epsilon refuted by guessing, from all that is released, whether a client took part?

Two runs that differ in one client alone are played many times, with the strongest client there is, and the best guess
that there is for Gaussian noise. Rates of right and wrong guesses bound epsilon from below (Clopper-Pearson).
"""

import math

import numpy as np
import pytest
import torch
from scipy.special import betaincinv

from fedtide.core.base import Slotted, Weighted
from fedtide.wire.accounting import Plan, coefficients
from fedtide.wire.clip import Clip
from fedtide.wire.ledger import Ledger
from fedtide.wire.noise import Release, deviations, groups_of, simulated_noise
from fedtide.wire.pipeline import Opening, Wire
from fedtide.wire.vector import form_of, opened

BOUNDS = {"delta": 0.5, "models": 2.0}
EPSILON, DELTA = 1.0, 1e-3
RUNS = 1000
OTHERS = 3


def total(value, slot, weight=1.0):
    models = Slotted({slot: Weighted(torch.full((2,), value), weight)}, 2)
    return {"delta": Weighted(torch.full((4,), value), weight), "models": models}


FORM = form_of(total(0.0, 0), OTHERS + 1)
CLIENTS = Wire(clip=Clip(BOUNDS))
CANARY = opened(CLIENTS.send(FORM, total(1e5, 1, weight=77.0)))
"""What the client sends that the guess is about: as much as it may, in a slot that no other chooses."""
ZEROS = opened(CLIENTS.send(FORM, {}))
REST = opened(torch.stack([CLIENTS.send(FORM, total(0.1 * client, 0)) for client in range(OTHERS)]).sum(0))


def rounds_of(plan):
    return range(0, plan.rounds, plan.distance)[: plan.times]


def played(plan, z, draw, member):
    """All sums (rounds, numbers) of a run in which the client answers in its rounds, or sends zeros."""
    server = Release(Clip(BOUNDS), Ledger(plan, z, DELTA), draw)
    seen = []
    for number in range(plan.rounds):
        clients = tuple(10 + OTHERS * number + client for client in range(OTHERS))
        there = number in rounds_of(plan)
        opening = Opening("train", (number, 0), None, (0, *clients) if there else clients, FORM)
        sent = REST + (CANARY if member else ZEROS) if there else REST
        seen.append(server.release(sent, opening))
    return torch.stack(seen).numpy()


def guess(plan):
    """Return the best function to guess by: C x . C y, in deviations of the noise."""
    scale = deviations(groups_of(FORM, BOUNDS), 1.0)
    c = sum(coefficient * np.eye(plan.rounds, k=-j) for j, coefficient in enumerate(coefficients(plan.bands)))
    per = torch.zeros(FORM.size, dtype=torch.float64)
    for name, table in FORM.tables(per).items():
        table[:, :-1] = 1 / scale[name]
        table[:, -1] = 1 / scale[f"{name}#"] if len(table) > 1 else 1e9  # what has no noise would tell everything
    x = np.zeros((plan.rounds, FORM.size))
    x[rounds_of(plan)] = (CANARY - ZEROS) * per
    return lambda seen: float(np.sum((c.T @ c @ x) * (seen * per.numpy())))


def none(stream, number, size):
    return torch.zeros(size, dtype=torch.float64)


def lower_bound(plan, z, noise=simulated_noise, runs=RUNS):
    """Return a lower bound on epsilon of confidence 95 %, by one threshold half way between the two."""
    score = guess(plan)
    half_way = sum(score(played(plan, 1.0, none, member)) for member in (False, True)) / 2
    right, wrong = (
        sum(score(played(plan, z, noise(2 * run + member), member)) > half_way for run in range(runs))
        for member in (True, False)
    )
    least = betaincinv(right, runs - right + 1, 0.025) if right else 0.0
    most = betaincinv(wrong + 1, runs - wrong, 0.975) if wrong < runs else 1.0
    return math.log((least - DELTA) / most) if least > DELTA else 0.0


@pytest.fixture(autouse=True)
def _every_slot_is_seen(monkeypatch):
    """However few are in a slot: more to guess by."""
    monkeypatch.setattr("fedtide.wire.noise.LEAST", -math.inf)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(Plan(1, 1), id="once", marks=pytest.mark.thorough),
        pytest.param(Plan(3, 2, 2), id="plain", marks=pytest.mark.thorough),
        pytest.param(Plan(3, 2, 2, 2), id="banded"),
    ],
)
def test_no_guess_refutes_epsilon(plan):
    found = lower_bound(plan, plan.noise(EPSILON, DELTA))
    assert 0.1 < found <= EPSILON  # the audit sees what there is


@pytest.mark.slow
def test_a_quarter_of_the_noise_is_found_out():
    plan = Plan(3, 2, 2, 2)
    assert lower_bound(plan, plan.noise(EPSILON, DELTA) / 4) > EPSILON


def test_without_noise_the_claim_is_refuted():
    assert lower_bound(Plan(1, 1), 1.0, lambda seed: none, runs=200) > 3 * EPSILON
