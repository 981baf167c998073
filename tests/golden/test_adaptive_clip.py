"""Bounds that adapt, by hand: Andrew, Thakkar, McMahan, Ramaswamy 2021, Algorithm 1, with eta = ln 2.

Four clients send lengths 0.5, 0.9, 1.9 and 3.9. In round 0 the bound is 1: two of four are within, a share of 1/2. For
the quantile 3/4 the next bound is 1 * 2^-(1/2 - 3/4) = 2^(1/4), which two of four are within again: 2^(1/2), 2^(3/4),
2. Now three are within, the share is the quantile, and the bound stays.
"""

import math

import pytest
import torch

from fedtide.core.base import Weighted
from fedtide.wire.accounting import Plan
from fedtide.wire.clip import Adaptive, Clip, adapted
from fedtide.wire.ledger import LEDGER, Ledger, Line
from fedtide.wire.noise import Release, deviations, groups_of
from fedtide.wire.pipeline import Opening, Wire
from fedtide.wire.vector import as_vector, form_of, opened

LENGTHS = (0.5, 0.9, 1.9, 3.9)
BOUNDS, HOW = {"delta": 1.0, "loss": 9.0}, {"delta": Adaptive(0.75, math.log(2))}
CLIENTS = Wire(clip=Clip(BOUNDS, HOW))


def total(length):
    return {"delta": Weighted(torch.tensor([0.6, 0.8]) * length, 5.0), "loss": Weighted(length, 5.0)}


FORM = form_of(total(0.0), 4)


def server(draw=lambda stream, number, size: torch.zeros(size, dtype=torch.float64), path=None, z=1.0):
    return Release(Clip(BOUNDS, HOW), Ledger(Plan(9, 9), z, 1e-5, path), draw)


def played(step, number):
    """One round; the form of its sum, and what is released of it."""
    form = step.add_bounds(FORM, number)
    sent = torch.stack([CLIENTS.send(form, total(length)) for length in LENGTHS]).sum(0)
    return form, form.tables(step.release(opened(sent), Opening("train", (number, 0), None, (0, 1, 2, 3), form)))


def test_by_hand():
    step, found = server(), []
    for number in range(7):
        form, tables = played(step, number)
        bound = form.leaves[0].bound
        found.append(bound)
        within = sum(length <= bound for length in LENGTHS)
        assert float(tables["delta?"][0, 0]) == within / 2 - (4 - within) / 2
        short = sum(min(length, bound) for length in LENGTHS)
        torch.testing.assert_close(
            tables["delta"][0], torch.tensor([0.6 * short, 0.8 * short, 4.0]).double(), rtol=1e-6, atol=0
        )
    assert found == pytest.approx([1, 2**0.25, 2**0.5, 2**0.75, 2, 2, 2], rel=1e-9)
    assert [line.within["delta"] for line in step.ledger.lines] == [0.5, 0.5, 0.5, 0.5, 0.75, 0.75, 0.75]
    assert [line.bounds for line in step.ledger.lines] == [{"delta": bound, "loss": 9.0} for bound in found]


def test_what_says_who_was_within_has_its_part_of_the_noise():
    """With all numbers divided by their deviations one client moves all of a release by no more than 1 / z."""
    step = server(lambda stream, number, size: torch.ones(size, dtype=torch.float64), z=2.0)
    form, tables = played(step, 0)
    _, quiet = played(server(), 0)
    bounds = {"delta": 1.0, "loss": 9.0, "delta?": 1.0}
    scale = deviations(groups_of(form, bounds), 2.0)
    assert set(scale) == set(bounds)
    for name, table in tables.items():
        moved = table[:, :-1] - quiet[name][:, :-1]
        torch.testing.assert_close(moved, torch.full_like(moved, scale[name]), rtol=1e-6, atol=1e-8)
    assert math.hypot(*(bounds[name] / scale[name] for name in scale)) == pytest.approx(1 / 2.0)


def test_one_client_in_place_of_zeros_moves_a_release_by_one_over_z():
    """Zeros are within every bound; who is beyond says the opposite."""
    form = server().add_bounds(FORM, 0)
    bounds = Clip(BOUNDS, HOW).bounds_of(form)
    scale = deviations(groups_of(form, bounds), 2.0)
    moved = Clip(BOUNDS, HOW).apply(as_vector(form, total(90.0)), form) - Clip(BOUNDS, HOW).apply(
        torch.zeros(form.size), form
    )
    lengths = [float(table[:, :-1].norm()) / scale[name] for name, table in form.tables(moved).items()]
    assert math.hypot(*lengths) == pytest.approx(1 / 2.0)


def test_a_bound_changes_by_no_more_than_its_rate_whatever_the_noise():
    """So two rounds after 1 it is at most 2^(2 * 3/4), which clients can know, and at least 2^(-2 * 1/4)."""
    assert [adapted(1.0, share, 0.75, math.log(2)) for share in (-3.0, 0.0, 1.0, 9.0)] == pytest.approx(
        [2**0.75, 2**0.75, 2**-0.25, 2**-0.25]
    )
    assert CLIENTS.clip.largest_bound("delta", 2) == pytest.approx(2**1.5)
    assert CLIENTS.clip.largest_bound("loss", 2) == 9.0


def test_an_owners_bound_cuts_more_and_hides_nothing_of_who_was_within():
    form = server().add_bounds(FORM, 0)
    for length, cut, within in ((0.9, 0.5, 0.5), (3.9, 0.5, -0.5), (0.2, 0.2, 0.5)):
        tables = form.tables(Clip(BOUNDS, HOW, {"delta": 0.5}).apply(as_vector(form, total(length)), form))
        assert float(tables["delta"][0, :2].norm()) == pytest.approx(cut)
        assert float(tables["delta?"][0, 0]) == within


def test_a_server_that_goes_on_has_the_same_bounds(tmp_path):
    whole = server()
    for number in range(4):
        played(whole, number)
    for number in (0, 1, 2, 2, 3):  # round 2 is played again, after a kill
        form, _ = played(server(path=tmp_path / LEDGER), number)
    assert form.leaves[0].bound == whole.ledger.lines[-1].bounds["delta"]
    assert server(path=tmp_path / LEDGER).ledger.lines == whole.ledger.lines


def bound_after(*slots, bound=1.0):
    """The bound of round 1, after slots of round 0 with their clients and the share of these within the bound."""
    step = server()
    for slot, (clients, share) in enumerate(slots):
        about = {"ask": 0, "question": "train", "slot": slot, "z": 1.0, "clients": clients, "sha256": "a"}
        step.ledger.add(Line(round=0, bounds={"delta": bound}, within={"delta": share}, **about))
    return step.add_bounds(FORM, 1).leaves[0].bound


def test_shares_of_slots_weigh_as_their_clients():
    """Three clients of four are within, which is the quantile, so the bound stays."""
    assert bound_after(((0, 1, 2), 1.0), ((3,), 0.0)) == 1.0


def test_bounds_stay_where_fixed_point_has_room():
    """1e-6 would become 1e-6 * 2^-(1/4); four clients have room for half of 2^29 / 4 = 2^27 each."""
    assert bound_after(((0, 1, 2, 3), 1.0), bound=1e-6) == 1e-6
    wide = Release(Clip(BOUNDS | {"delta": 1e9}, HOW), Ledger(Plan(9, 9), 1.0, 1e-5), lambda *_: torch.zeros(0))
    assert wide.add_bounds(FORM, 0).leaves[0].bound == 2.0**26
