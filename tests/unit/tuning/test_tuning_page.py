"""The page of a tuning: what was found, where a range was too narrow, pictures of every trial."""

import pytest

from fedtide.core.errors import FedtideError
from fedtide.tuning import tune as records
from fedtide.tuning.pages import best_table, budget_table, tuning_headline, write_tuning
from fedtide.tuning.tune import Curve, Trial, digest_of_tuning, read_tuning
from helpers.studies import PROX, RATE, A, made, tuning

RANGES = {
    "method.local.lr": RATE,
    "method.prox.local.proximal": {"low": 0, "high": 1},
    "method.local.optimizer": {"choices": ["sgd", "adam"]},
    "method.local.epochs": {"low": 1, "high": 4, "whole": True},
}


def trial(method, number, rate, accuracy, state="finished", epochs=2):
    values = {"method.local.lr": rate, "method.local.optimizer": "sgd", "method.local.epochs": epochs}
    values |= {"method.prox.local.proximal": 0.5} if method == "prox" else {}
    curves = () if state == "failed" else (Curve(0, (2, 4), (0.1, accuracy)),)
    done = state == "finished"
    reason = "<no> & not finite" if state == "failed" else ""
    return Trial("", method, number, values, state, curves, (accuracy,) * done, accuracy if done else None, reason, "")


@pytest.fixture
def root(tmp_path):
    """Two methods: one at the edge of a range; with a trial that was pruned and one that failed."""
    experiment = tuning(A, PROX, title="Rates <b>", tune={"ranges": RANGES, "trials": 4, "pruning": True})
    root = made(experiment, tmp_path / "tune")
    config = digest_of_tuning(experiment)
    trials = [
        trial("A", 0, 0.2, 0.4), trial("A", 1, 0.99, 0.8), trial("A", 2, 0.3, 0.2, "pruned"),
        trial("A", 3, 0.3, 0.0, "failed"), *(trial("prox", i, 0.1 + 0.05 * i, 0.5 - 0.1 * i) for i in range(4)),
    ]  # fmt: skip
    records.write_trials(root, [Trial(**{**vars(each), "config": config}) for each in trials])
    return root


def test_the_table_says_what_was_found_and_which_range_to_widen(root):
    table = best_table(read_tuning(root)[1], "accuracy")
    assert table.header == ["method", "value", "found", "searched", "edge", "validation accuracy"]
    widen = "at the high edge of its range: widen it"
    assert table.rows[0] == ["A", "local.lr", "0.99", "0.01 to 1 (log)", widen, "80.0 %"]
    assert table.rows[1] == ["A", "local.optimizer", "sgd", "among sgd, adam", "", "80.0 %"]
    assert ["prox", "local.proximal", "0.5", "0 to 1", "", "50.0 %"] in table.rows


def test_the_headline_names_what_lies_at_an_edge(root):
    _, found = read_tuning(root)
    assert tuning_headline(found).startswith("1 value lies at an edge of its range")
    assert tuning_headline([found[0][1:]]) == "Every value that was found lies inside its range."


def test_the_budgets_are_told_as_they_were(root):
    rows = budget_table(read_tuning(root)[1]).rows
    assert rows == [["A", "4 of 4", "2", "1", "1", "<no> & not finite"], ["prox", "4 of 4", "4", "0", "0", ""]]


def test_a_tuning_that_is_not_finished_says_how_many_are_left(root):
    some = (root / records.TRIALS).read_text().splitlines(keepends=True)[:5]
    (root / records.TRIALS).write_text("".join(some))
    _, found = read_tuning(root)
    assert tuning_headline(found) == "So far: 3 trials are not played yet."
    write_tuning(root)
    (root / records.TRIALS).write_text("")
    with pytest.raises(FedtideError, match="no trial is finished yet; go on with: fedtide resume"):
        write_tuning(root)
