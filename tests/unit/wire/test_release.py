"""Noise of a run and its ledger: the same after a kill, never twice, never beyond the plan."""

import math

import numpy as np
import pytest
import torch

from fedtide.core.base import Slotted, Weighted
from fedtide.core.errors import FedtideError
from fedtide.wire.accounting import Plan, Sampling, coefficients, epsilon_of
from fedtide.wire.clip import Clip
from fedtide.wire.ledger import Ledger, Line, eligible, read
from fedtide.wire.noise import Release, deviations, groups_of, noised, simulated_noise
from fedtide.wire.pipeline import Opening
from fedtide.wire.vector import BITS, form_of

BOUNDS = {"delta": 1.0, "models": 1.0}
TOTAL = {"delta": Weighted(torch.zeros(3), 1.0), "models": Slotted({0: Weighted(torch.zeros(2), 1.0)}, 2)}
FORM = form_of(TOTAL, 5)
PLAN = Plan(rounds=10, times=3, distance=3, bands=3)


def opening(number, clients=(0, 1), ask=0, question="train", slot=None, form=FORM):
    return Opening(question, (number, ask), slot, clients, form)


def line(number, clients=(0,), ask=0, question="train", sha256="a", slot=None):
    return Line(
        round=number, ask=ask, question=question, slot=slot, z=1.0, bounds=BOUNDS, clients=clients, epsilon=0.0,
        sha256=sha256,
    )  # fmt: skip


def releases(step, numbers, clients=lambda number: (number % 3, 5 + number % 3)):
    zeros = torch.full((FORM.size,), 1e6, dtype=torch.float64)
    return {number: step.release(zeros, opening(number, clients(number))) - zeros for number in numbers}


def test_noise_of_all_rounds_is_c_inverse_times_fresh_noise():
    made = releases(Release(Clip(BOUNDS), Ledger(PLAN, 2.0, 1e-5), simulated_noise(7)), range(8))
    fresh = [simulated_noise(7)("train/0/None", t, FORM.size).numpy() for t in range(8)]
    c = np.zeros((8, 8))
    for j, coefficient in enumerate(coefficients(3)):
        c += coefficient * np.eye(8, k=-j)
    noise = np.linalg.solve(c, np.array(fresh))
    scale = deviations(groups_of(FORM, BOUNDS), 2.0)
    for t in range(8):
        tables = FORM.tables(made[t])
        expected = FORM.tables(torch.from_numpy(noise[t]))
        torch.testing.assert_close(tables["delta"][0, :3], scale["delta"] * expected["delta"][0, :3], atol=1e-8, rtol=0)
        assert tables["delta"][0, 3] == 0.0
        weights = scale["models#"] * expected["models"][:, 2]
        torch.testing.assert_close(tables["models"][:, 2], weights, atol=1e-8, rtol=0)


@pytest.mark.parametrize("bands", [1, 3])
def test_a_run_that_goes_on_has_the_same_bits_and_writes_nothing_twice(tmp_path, bands):
    plan, path = Plan(10, 3, 3, bands), tmp_path / "ledger.jsonl"

    def step():
        return Release(Clip(BOUNDS), Ledger(plan, 2.0, 1e-5, path), simulated_noise(0))

    whole = releases(step(), range(9))
    text = path.read_text()
    again = releases(step(), range(5, 9))  # from a checkpoint before round 5
    assert all(torch.equal(again[number], whole[number]) for number in again)
    assert path.read_text() == text
    path.write_text("".join(text.splitlines(keepends=True)[:6]))
    rest = releases(step(), range(6, 9))
    assert all(torch.equal(rest[number], whole[number]) for number in rest)
    assert path.read_text() == text


def test_two_sums_never_have_the_same_noise():
    draw = simulated_noise(0)
    step = Release(Clip(BOUNDS), Ledger(Plan(9, 9, releases=9), 1.0, 1e-5), draw)
    seen = []
    for number in (0, 1):
        asks = [(0, "train", None, (0,)), (1, "train", None, (1,)), (2, "other", None, (0,))]
        for ask, question, slot, clients in [*asks, (3, "slots", 0, (0,)), (3, "slots", 1, (1,))]:
            zeros = torch.zeros(FORM.size, dtype=torch.float64)
            seen.append(step.release(zeros, opening(number, clients, ask, question, slot))[0].item())
    assert len(set(seen)) == len(seen) == 10


def test_the_noise_that_finds_readable_slots_is_that_of_the_release():
    drawn, form = [], form_of(TOTAL, 5, counted=True)

    def draw(*given):
        drawn.append(given)
        return simulated_noise(0)(*given)

    step = Release(Clip(BOUNDS), Ledger(Plan(9, 9), 1.0, 1e-5), draw)
    step.find_readable(torch.ones(2), opening(0, form=form))
    step.release(torch.zeros(form.end, dtype=torch.float64), opening(0, form=form))
    assert drawn == [("train/0/None", 0, form.end)]


def test_noise_is_on_the_grid_of_sums():
    """A multiple of sqrt(2) is on no grid."""
    whole = torch.full((FORM.size,), 100.0, dtype=torch.float64)
    released = noised(whole, FORM, BOUNDS, 1.0, torch.full_like(whole, math.sqrt(2)))
    assert (released != whole).sum() == FORM.size - 1
    assert (released * 2.0**BITS % 1 == 0).all()


def test_a_round_before_the_first_and_another_form_are_refused():
    step = Release(Clip(BOUNDS), Ledger(PLAN, 1.0, 1e-5), simulated_noise(0))
    with pytest.raises(FedtideError, match=r"'train' is asked before round 0"):
        step.release(torch.zeros(FORM.size, dtype=torch.float64), opening(-1))
    releases(step, range(2))
    other = form_of({"delta": Weighted(torch.zeros(4), 1.0)}, 5)
    with pytest.raises(FedtideError, match=r'changed their form in round 2.*allowed: "plain"'):
        step.release(torch.zeros(other.size, dtype=torch.float64), opening(2, (9,), form=other))


def test_a_line_is_on_the_disk_before_its_sum_is_released(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(PLAN, 1.0, 1e-5, path)
    releases(Release(Clip(BOUNDS), ledger, simulated_noise(0)), range(2))
    assert [each.round for each in read(path)] == [0, 1]
    assert read(path) == ledger.lines
    (tmp_path / "folder").mkdir()
    broken = Release(Clip(BOUNDS), Ledger(PLAN, 1.0, 1e-5), simulated_noise(0))
    broken.ledger.path = tmp_path / "folder"
    with pytest.raises(OSError, match="folder"):
        releases(broken, [0])


def test_what_a_kill_left_of_a_line_was_never_released(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(PLAN, 1.0, 1e-5, path)
    ledger.add(line(0))
    whole = path.read_text()
    path.write_text(whole + whole[:20])
    assert [each.round for each in Ledger(PLAN, 1.0, 1e-5, path).lines] == [0]
    Ledger(PLAN, 1.0, 1e-5, path).add(line(0))
    Ledger(PLAN, 1.0, 1e-5, path).add(line(5))
    assert path.read_text().startswith(whole)
    assert [each.round for each in Ledger(PLAN, 1.0, 1e-5, path).lines] == [0, 5]
    path.write_text('{"round": 0}\n')
    with pytest.raises(FedtideError, match=r"ledger.jsonl: line 1"):
        Ledger(PLAN, 1.0, 1e-5, path)
    path.write_text("nothing\n")
    with pytest.raises(FedtideError, match=r"ledger.jsonl: line 1 is damaged"):
        Ledger(PLAN, 1.0, 1e-5, path)


def test_cap_and_distance():
    ledger, everyone = Ledger(PLAN, 1.0, 1e-5), torch.arange(3)
    ledger.add(line(0, (0, 1)))
    assert eligible(ledger, everyone, 2).tolist() == [False, False, True]
    assert eligible(ledger, everyone, 3).tolist() == [True, True, True]
    assert eligible(ledger, everyone, 0).tolist() == [True, True, True]  # a round that is played once more
    ledger.add(line(3, (0,)))
    ledger.add(line(6, (0,)))
    assert eligible(ledger, everyone, 9).tolist() == [False, True, True]  # client 0 was in three rounds
    for late in (line(9, (0,)), line(8, (1, 0)), line(7, (2, 0)), line(2, (0,)), line(5, (0,))):
        with pytest.raises(FedtideError, match="has client 0, who may not be in it; allowed: what the budget has"):
            ledger.add(late)
    with pytest.raises(FedtideError, match="was released before with another sum"):
        ledger.add(line(6, (0,), sha256="b"))
    with pytest.raises(FedtideError, match="asks a client twice"):
        ledger.add(line(6, (0,), ask=1))
    ledger.add(line(6, (0,), ask=1, question="other"))
    with pytest.raises(FedtideError, match="has client 2"):
        ledger.add(line(10, (2,)))


def test_epsilon_so_far():
    ledger = Ledger(PLAN, 4.0, 1e-5)
    assert ledger.epsilon() == 0.0
    norm = 1 + 0.25 + 0.375**2
    for number, clients, times in ((0, (0, 1), 1), (1, (2,), 1), (3, (0,), 2), (4, (1,), 2)):
        ledger.add(line(number, clients))
        assert (
            ledger.epsilon() == ledger.lines[-1].epsilon == pytest.approx(epsilon_of(math.sqrt(times * norm) / 4, 1e-5))
        )
    ledger.add(line(9, (0,)))  # its column has one entry, not three
    assert ledger.epsilon() <= PLAN.epsilon(4.0, 1e-5)
    assert PLAN.epsilon(4.0, 1e-5) == pytest.approx(epsilon_of(math.sqrt(2 * norm + norm) / 4, 1e-5), rel=0.2)


SCORES = "score test client"


def drawing(releases=1, sampling=Sampling(1, 8, poisson=True), scores=Plan(6, 3), lines=()):
    return Ledger(Plan(6, 6, releases=releases, sampling=sampling), 4.0, 1e-5, None, lines, Ledger(scores, 40.0, 1e-5))


def test_scores_beside_four_sums_of_a_draw_spend_more_than_the_sums():
    pytest.importorskip("dp_accounting")
    ledger = drawing(releases=4)
    assert ledger.whole >= ledger.plan.epsilon(4.0, 1e-5)


def test_draws_of_a_round_have_the_noise_of_all_its_sums_and_the_scores_until_then():
    """Four sums at z = 4 are one at 4 / sqrt(4) = 2; one evaluation at z = 40 moves a client by 1/40."""
    draws = drawing(releases=4, lines=[line(1, question=SCORES), line(3, question=SCORES)]).draws(1)
    assert draws["sampled"]["z"] == 2.0
    assert draws["scored"] == epsilon_of(1 / 40, 1e-5)


def test_a_client_is_in_one_sum_of_scores_of_a_round_if_one_is_planned():
    ledger = Ledger(PLAN, 1.0, 1e-5, score_ledger=Ledger(Plan(6, 3, releases=1), 40.0, 1e-5))
    ledger.add(line(1, (3,), question=SCORES))
    with pytest.raises(FedtideError, match="asks a client more questions than planned"):
        ledger.add(line(1, (3,), ask=1, question="score val client"))


def test_more_clients_than_are_drawn_are_one_draw_only_if_each_tosses_a_coin():
    said = [drawing(sampling=Sampling(2, 8, coins)).objection(line(0, (0, 1, 2))) for coins in (False, True)]
    assert said == ["is not one draw from all clients", None]
