"""Measures of a blend of domains, by hand: what was split and learned, collapses, cycles."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from fedtide.report.blends import (
    blending,
    components,
    correlation,
    extremes,
    gains,
    purities,
    shares_by_domain,
    split_counts,
    trivial_purities,
)
from fedtide.report.reading import RunRecord

ABOUT = {"seconds": 1.0, "down": 0, "up": 0, "refused": 0, "participants": {}}


def told(folder: Path, *lines: dict) -> RunRecord:
    """A run with these lines, one a round."""
    written = [json.dumps({"round": number, **ABOUT, **line}) for number, line in enumerate(lines)]
    (folder / "rounds.jsonl").write_text("\n".join([*written, ""]))
    return RunRecord(0, folder, False, len(lines))


def pi(*shares: float, **facts: float) -> dict:
    return {"facts": {"pi": list(shares), **facts}}


# -- the split ---------------------------------------------------------------------------------------------------------


def test_purity_is_of_the_second_half_with_one_matching_for_all_rounds(tmp_path):
    """In all 1 and 17 rows of the first domain went to either component, 15 and 2 of the second: component 1 is day's.

    Round 0 alone would match the other way round.
    """
    run = told(
        tmp_path,
        {"split": [[1, 0], [0, 1]]},
        {},
        {"split": [[0, 9], [8, 1]]},
        {"split": [[0, 8], [7, 0]]},
    )
    assert components(run) == (1, 0)
    assert purities(run)[[0, 2, 3]].tolist() == pytest.approx([0.0, 17 / 18, 1.0])
    assert math.isnan(purities(run)[1])
    assert trivial_purities(run)[[0, 2, 3]].tolist() == pytest.approx([0.5, 0.5, 8 / 15])
    got = blending(run, 2)
    assert got["split_purity"] == pytest.approx(32 / 33)
    assert got["fullest_component"] == pytest.approx((10 / 18 + 8 / 15) / 2)
    assert set(got) == {"split_purity", "fullest_component"}


def test_a_table_that_grows_keeps_its_components(tmp_path):
    """A third component in the second round; a domain without a component of its own is nowhere at home."""
    run = told(tmp_path, {"split": [[4, 0], [0, 4]]}, {"split": [[4, 0, 0], [0, 3, 1]]})
    assert split_counts(run).shape == (2, 2, 3)
    assert components(run) == (0, 1)
    assert blending(run, 1)["split_purity"] == pytest.approx(7 / 8)
    single = told(tmp_path, {"split": [[4], [2]]})
    assert components(single) == (0, 1)
    assert blending(single, 1) == {"split_purity": pytest.approx(4 / 6)}


def test_with_three_domains_and_two_components_one_domain_is_left_over(tmp_path):
    line = {"split": [[5, 0], [0, 3], [1, 1]], "domains": [0.5, 0.3, 0.2], **pi(0.6, 0.4)}
    run = told(tmp_path, line, line)
    assert components(run) == (0, 1, 2)
    np.testing.assert_array_equal(shares_by_domain(run), [[0.6, 0.4, np.nan]] * 2)
    got = blending(run, 1)
    assert got["split_purity"] == pytest.approx(0.8)
    assert got["share_error"] == pytest.approx(0.1)
    assert math.isnan(got["share_correlation"])  # shares that stay as they are follow nothing


# -- shares ------------------------------------------------------------------------------------------------------------


def test_without_a_split_components_match_by_their_shares(tmp_path):
    """pi_1 follows the first domain; in the second half it is off by 0.1, 0.0 and 0.2."""
    first, learned = [1.0, 0.5, 0.0, 0.5, 1.0, 0.5], [0.9, 0.5, 0.2, 0.6, 1.0, 0.3]
    run = told(tmp_path, *({"domains": [q, 1 - q], **pi(1 - p, p)} for q, p in zip(first, learned, strict=True)))
    assert components(run) == (1, 0)
    np.testing.assert_allclose(shares_by_domain(run)[:, 0], learned)
    got = blending(run, 2)
    assert got["share_error"] == pytest.approx(0.1)
    assert got["share_correlation"] == pytest.approx(np.corrcoef(first, learned)[0, 1])
    assert "split_purity" not in got


def test_rounds_in_which_nobody_answered_are_left_out(tmp_path):
    run = told(
        tmp_path, {"domains": [1.0, 0.0], **pi(0.9, 0.1)}, {"facts": {}}, {"domains": [0.0, 1.0], **pi(0.2, 0.8)}
    )
    got = blending(run, 3)
    assert got["share_error"] == pytest.approx(0.2)
    assert got["share_correlation"] == pytest.approx(1.0)


def test_shares_without_domains_to_compare_with_are_no_measure(tmp_path):
    assert components(told(tmp_path, pi(0.4, 0.6))) == ()
    assert blending(told(tmp_path, pi(0.4, 0.6)), 1) == {}
    assert blending(told(tmp_path, {"facts": {"pi": 0.5}, "domains": [0.5, 0.5]}), 1) == {}
    assert blending(told(tmp_path), 1) == {}


@pytest.mark.parametrize(("left", "right", "found"), [
    ([0, 1, 2], [5, 3, 1], -1.0), ([0, 1, 2], [4, 4, 4], None), ([1, 1, 1], [0, 1, 2], None), ([], [], None),
    ([0, math.nan, 2, 3], [1, 9, 3, math.nan], 1.0),
])  # fmt: skip
def test_a_correlation_is_over_what_is_known_and_changes(left, right, found):
    got = correlation(np.array(left, dtype=np.float64), np.array(right, dtype=np.float64))
    assert math.isnan(got) if found is None else got == pytest.approx(found)


# -- collapse ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lines", "fullest"), [
    ([{"domains": [q, 1 - q], **pi(p, 1 - p)} for q, p in ((0.5, 0.0), (0.9, 0.98), (0.1, 0.96))], 0.97),
    ([{"split": [[2, 0], [2, 0]], **pi(0.5, 0.5)}] * 2, 1.0),  # where rows went counts, not what is said of them
    ([{"domains": [1.0, 0.0], **pi(1.0, 0.0)}] * 2, None),  # one domain alone may well have one component
    ([{"domains": [0.5, 0.5], **pi(1.0)}] * 2, None),  # of a single component nobody expects more
    ([{**pi(1.0, 0.0)}] * 2, None),
])  # fmt: skip
def test_the_fullest_component_is_the_same_one_all_the_time(tmp_path, lines, fullest):
    got = blending(told(tmp_path, *lines), 1).get("fullest_component")
    assert got == (None if fullest is None else pytest.approx(fullest))


def test_components_that_take_turns_are_no_collapse(tmp_path):
    run = told(tmp_path, *({"domains": [q, 1 - q], **pi(q, 1 - q)} for q in (1.0, 0.0, 1.0, 0.0)))
    assert blending(run, 1)["fullest_component"] == 0.5


# -- late means --------------------------------------------------------------------------------------------------------


def test_late_means_of_what_rounds_tell(tmp_path):
    def line(k: float) -> dict:
        losses = {"min": 0.0, "q25": 1.0, "q50": 1.5, "q75": 1.0 + k, "max": 9.0}
        return {"client_loss": losses, **pi(0.5, 0.5, entropy=k, log_likelihood=-k)}

    got = blending(told(tmp_path, line(8.0), {}, line(2.0), line(4.0)), 3)
    assert got == {"posterior_entropy": 3.0, "log_likelihood": -3.0, "loss_spread": 3.0}
    unknown = dict.fromkeys(("min", "q25", "q50", "q75", "max"))
    assert blending(told(tmp_path, {"client_loss": unknown}), 1) == {}


# -- cycles ------------------------------------------------------------------------------------------------------------


def judged(folder: Path, accuracies: list[float | None]) -> RunRecord:
    """A run that was judged after each round that has an accuracy."""
    return told(folder, *({"scores": {"train_clients": {"accuracy": a}}} if a is not None else {} for a in accuracies))


def test_peaks_and_troughs_of_each_cycle(tmp_path):
    """Nine rounds in two cycles: the first has rounds 0 to 4, the second 5 to 8."""
    run = judged(tmp_path, [0.1, 0.5, 0.3, 0.2, 0.4, 0.25, 0.9, 0.6, 0.7])
    assert extremes(run, "train_clients", 2).tolist() == [[0.1, 0.5], [0.25, 0.9]]
    assert gains(run, "train_clients", 2) == {}


def test_gains_are_those_after_the_second_cycle(tmp_path):
    run = judged(tmp_path, [0.1, 0.2, 0.5, 0.6, 0.7, 0.9])
    assert gains(run, "train_clients", 3) == {"peak_gain": pytest.approx(0.3), "trough_gain": pytest.approx(0.2)}


def test_a_cycle_that_is_cut_off_is_left_out(tmp_path):
    run = judged(tmp_path, [0.1, 0.5, 0.3, 0.2, 0.9])
    assert extremes(run, "train_clients", 2.5).tolist() == [[0.1, 0.5], [0.2, 0.3]]


@pytest.mark.parametrize("cycles", [None, 0.5, 1, 1.9])
def test_without_two_cycles_nothing_is_gained(tmp_path, cycles):
    assert gains(judged(tmp_path, [0.1, 0.5]), "train_clients", cycles) == {}


def test_a_cycle_that_was_never_judged_is_unknown(tmp_path):
    run = judged(tmp_path, [None, None, 0.3, 0.2])
    assert np.isnan(extremes(run, "train_clients", 2)[0]).all()
    assert all(map(math.isnan, gains(run, "train_clients", 2).values()))
    assert np.isnan(extremes(run, "held_out_clients", 2)).all()
