"""Blends of domains: numbers by hand, pictures and tables of a small study."""

import math
from pathlib import Path

import numpy as np
import pytest

from fedtide.config import from_dict
from fedtide.report import components as blends
from fedtide.report.components import (
    components,
    correlation,
    extremes,
    gains,
    purities,
    shares_by_domain,
    split_counts,
    trivial_purities,
)
from fedtide.report.run_records import ExperimentRecord, RunRecord, read_experiment
from fedtide.report.study import summarize
from fedtide.report.summary import Summary
from fedtide.report.topics import find_number
from helpers.blended import BLEND, FLAT, SPLITTING
from helpers.records import change_lines, record_like, run_of_lines
from helpers.studies import A, finished
from helpers.toys import TOY


def pi(*shares: float, **facts: float) -> dict:
    return {"facts": {"pi": list(shares), **facts}}


def blending(run: RunRecord, window: int) -> dict[str, float]:
    return blends.measure(record_like(window=window), record_like(cycles=None), run)


# -- the split ---------------------------------------------------------------------------------------------------------


def test_purity_is_of_the_second_half_with_one_matching_for_all_rounds(tmp_path):
    """In all 1 and 17 rows of the first domain went to either component, 15 and 2 of the second: component 1 is day's.

    Round 0 alone would match the other way round.
    """
    run = run_of_lines(
        tmp_path, {"split": [[1, 0], [0, 1]]}, {}, {"split": [[0, 9], [8, 1]]}, {"split": [[0, 8], [7, 0]]}
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
    run = run_of_lines(tmp_path, {"split": [[4, 0], [0, 4]]}, {"split": [[4, 0, 0], [0, 3, 1]]})
    assert split_counts(run).shape == (2, 2, 3)
    assert components(run) == (0, 1)
    assert blending(run, 1)["split_purity"] == pytest.approx(7 / 8)
    single = run_of_lines(tmp_path, {"split": [[4], [2]]})
    assert components(single) == (0, 1)
    assert blending(single, 1) == {"split_purity": pytest.approx(4 / 6)}


def test_with_three_domains_and_two_components_one_domain_is_left_over(tmp_path):
    line = {"split": [[5, 0], [0, 3], [1, 1]], "domains": [0.5, 0.3, 0.2], **pi(0.6, 0.4)}
    run = run_of_lines(tmp_path, line, line)
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
    run = run_of_lines(
        tmp_path, *({"domains": [q, 1 - q], **pi(1 - p, p)} for q, p in zip(first, learned, strict=True))
    )
    assert components(run) == (1, 0)
    np.testing.assert_allclose(shares_by_domain(run)[:, 0], learned)
    got = blending(run, 2)
    assert got["share_error"] == pytest.approx(0.1)
    assert got["share_correlation"] == pytest.approx(np.corrcoef(first, learned)[0, 1])
    assert "split_purity" not in got


def test_shares_without_domains_to_compare_with_are_no_measure(tmp_path):
    assert components(run_of_lines(tmp_path, pi(0.4, 0.6))) == ()
    assert blending(run_of_lines(tmp_path, pi(0.4, 0.6)), 1) == {}
    assert blending(run_of_lines(tmp_path, {"facts": {"pi": 0.5}, "domains": [0.5, 0.5]}), 1) == {}
    assert blending(run_of_lines(tmp_path), 1) == {}


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
    got = blending(run_of_lines(tmp_path, *lines), 1).get("fullest_component")
    assert got == (None if fullest is None else pytest.approx(fullest))


# -- late means --------------------------------------------------------------------------------------------------------


def test_late_means_of_what_rounds_tell(tmp_path):
    def line(k: float) -> dict:
        losses = {"min": 0.0, "q25": 1.0, "q50": 1.5, "q75": 1.0 + k, "max": 9.0}
        return {"client_loss": losses, **pi(0.5, 0.5, entropy=k, log_likelihood=-k)}

    got = blending(run_of_lines(tmp_path, line(8.0), {}, line(2.0), line(4.0)), 3)
    assert got == {"posterior_entropy": 3.0, "log_likelihood": -3.0, "loss_spread": 3.0}
    unknown = dict.fromkeys(("min", "q25", "q50", "q75", "max"))
    assert blending(run_of_lines(tmp_path, {"client_loss": unknown}), 1) == {}


# -- cycles ------------------------------------------------------------------------------------------------------------


def judged(folder: Path, accuracies: list[float | None]) -> RunRecord:
    """A run that was judged after each round that has an accuracy."""
    lines = ({"scores": {"train_clients": {"accuracy": a}}} if a is not None else {} for a in accuracies)
    return run_of_lines(folder, *lines)


def test_peaks_and_troughs_of_each_cycle(tmp_path):
    """Nine rounds in two cycles: the first has rounds 0 to 4, the second 5 to 8."""
    run = judged(tmp_path, [0.1, 0.5, 0.3, 0.2, 0.4, 0.25, 0.9, 0.6, 0.7])
    assert extremes(run, "train_clients", 2).tolist() == [[0.1, 0.5], [0.25, 0.9]]
    assert gains(run, "train_clients", 2) == {}


def test_a_cycle_that_is_cut_off_is_left_out(tmp_path):
    run = judged(tmp_path, [0.1, 0.5, 0.3, 0.2, 0.9])
    assert extremes(run, "train_clients", 2.5).tolist() == [[0.1, 0.5], [0.2, 0.3]]


def test_a_cycle_in_which_the_run_stopped_is_left_out(tmp_path):
    judged(tmp_path, [0.1, 0.5, 0.3, 0.2, 0.9, 0.1])
    change_lines(tmp_path / "rounds.jsonl", lambda line: line.update(stopped={"accuracy": 0.1}))
    run = RunRecord(0, tmp_path, 8)
    assert extremes(run, "train_clients", 2)[0].tolist() == [0.1, 0.5]
    assert np.isnan(extremes(run, "train_clients", 2)[1]).all()


@pytest.mark.parametrize("cycles", [None, 0.5, 1, 1.9])
def test_without_two_cycles_nothing_is_gained(tmp_path, cycles):
    assert gains(judged(tmp_path, [0.1, 0.5]), "train_clients", cycles) == {}


def test_a_cycle_that_was_never_judged_is_unknown(tmp_path):
    run = judged(tmp_path, [None, None, 0.3, 0.2])
    assert np.isnan(extremes(run, "train_clients", 2)[0]).all()
    assert all(map(math.isnan, gains(run, "train_clients", 2).values()))
    assert np.isnan(extremes(run, "held_out_clients", 2)).all()


# -- a small study -----------------------------------------------------------------------------------------------------

STILL = {**A, "name": "still", "shift": {"what": "static"}}
THREE = {**SPLITTING, "name": "three", "components": 3}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    values = {**BLEND, "model": TOY["model"], "method": [A, SPLITTING, FLAT, THREE, STILL], "seeds": [0, 1]}
    return finished(tmp_path_factory.mktemp("blend") / "run", from_dict(values))


@pytest.fixture(scope="module")
def record(root) -> ExperimentRecord:
    return read_experiment(root)[0]


@pytest.fixture(scope="module")
def summary(record) -> Summary:
    return summarize(record)


def test_a_box_has_the_mean_quantiles_of_the_last_cycle(record):
    method = record.methods[0]
    assert blends.last_rounds(record, method) == 4
    assert blends.last_rounds(record, record.methods[-1]) == record.window
    lines = [line["client_loss"] for run in method.runs for line in run.lines[-6:]]
    box = blends.loss_box(method.runs, 6)
    assert box["q50"] == pytest.approx(np.mean([line["q50"] for line in lines]))
    assert box["max"] == pytest.approx(np.mean([line["max"] for line in lines]))


BLENDED = {
    "split_purity", "fullest_component", "share_error", "share_correlation", "posterior_entropy", "log_likelihood",
    "training_loss", "loss_spread", "peak_gain", "trough_gain", "accuracy_by_global",
}  # fmt: skip


def test_numbers_are_in_the_summary_and_have_formats(summary):
    measures = {method.name: method.measures for method in summary.methods}
    assert set(measures["splitting"]) >= BLENDED
    assert BLENDED & set(measures["A"]) == {"training_loss", "loss_spread", "peak_gain", "trough_gain"}
    assert BLENDED & set(measures["still"]) == {"training_loss", "loss_spread"}
    assert all(find_number(name) for of_method in measures.values() for name in of_method)
