"""Runs under drift: events on curves, numbers and pictures, on records made by hand and on a small study."""

import math
from pathlib import Path

import pytest

from fedtide.report.clusters import Fall, cluster_counts, falls, intervals, marks, measure_drift, notice, reclusterings
from fedtide.report.run_records import ExperimentRecord, RunRecord, read_experiment
from fedtide.report.study import summarize
from helpers.records import record_like, run_of_lines
from helpers.studies import A, finished, study

# -- events on a curve -------------------------------------------------------------------------------------------------

AFTER = [2, 4, 6, 8, 10, 12]


def test_an_interval_lasts_until_the_next_event_or_the_end():
    assert [*intervals([8, 3, 3], 12)] == [(3, 8), (8, 12)]
    # What begins at round 0 was never otherwise, and what comes after the end never happens.
    assert [*intervals([0, 12, 20], 12)] == []


def test_falls_by_hand():
    """Event 4: what was judged after four rounds is from before it. It falls by 0.3, and is back at 8, four later.

    Event 9: 0.795 before it, 0.7 at the lowest, and never back in the three rounds that are left.
    """
    values = [0.7, 0.8, 0.5, 0.795, 0.7, 0.75]
    first, second = falls(AFTER, values, [4, 9], 12)
    assert first == Fall(0.8, 0.5, 4, True)
    assert second == Fall(0.795, 0.7, 3, False)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.5, 0.5, 0.6, 0.7, 0.8, 0.9], Fall(0.5, 0.6, 0, True)),  # only rises
        ([0.5, 0.5, 0.495, 0.6, 0.6, 0.6], Fall(0.5, 0.495, 0, True)),  # within a point all the time
        ([0.5, 0.5, 0.5, 0.4, 0.3, 0.5], Fall(0.5, 0.3, 7, True)),  # falls slowly: back from the lowest on
        ([0.5, 0.5, 0.3, 0.5, 0.3, 0.4], Fall(0.5, 0.3, 3, True)),  # of two lowest the first
    ],
)
def test_the_shapes_of_a_fall(values, expected):
    assert falls(AFTER, values, [5], 12) == [expected]


def test_an_event_that_was_not_judged_on_both_sides_is_left_out():
    assert falls([4, 8], [0.5, 0.4], [2], 8) == []  # nothing before
    assert [fall.rounds for fall in falls([4, 8], [0.5, 0.4], [5, 6], 8)] == [2]  # nothing between 5 and 6
    assert falls([], [], [5], 8) == []


def test_delays_and_false_alarms_by_hand():
    """Reactions at 1 (before any event), 10 (at once), 14 (a second one), 33 (three late); nobody noticed event 20."""
    assert notice([1, 10, 14, 33], [10, 20, 30], 40) == ([0, math.inf, 3], 2)
    assert notice([], [10], 40) == ([math.inf], 0)
    assert notice([3], [], 40) == ([], 1)


# -- numbers by hand ---------------------------------------------------------------------------------------------------


def record_of(folder: Path, facts: list[dict], accuracy: dict[int, float], **more: dict[int, object]) -> RunRecord:
    """A run whose rounds have these facts; accuracy, and whatever else lines have, by round."""
    scores = {number: {"train_clients": {"accuracy": value}} for number, value in accuracy.items()}
    return run_of_lines(folder, *(
        {"facts": of_round} | {key: values[at] for key, values in {**more, "scores": scores}.items() if at in values}
        for at, of_round in enumerate(facts)
    ))  # fmt: skip


def following(run: RunRecord) -> dict[str, float]:
    return measure_drift(run, record_like())


def test_the_measures_of_a_run_by_hand(tmp_path):
    """Eight rounds; mass events at 3 and 6, steady drift at 5, clusters made anew in rounds 0, 4 and 5."""
    facts = [
        {"moved": moved, "reclustered": anew, "clusters": k, "members": [4] * 9, "spread": s, "silhouette": s / 2}
        for moved, anew, k, s in zip(
            [0, 1, 0, 5, 0, 2, 0, 0], [1, 0, 0, 0, 1, 1, 0, 0], [2, 2, 2, 2, 3, 3, 3, 3], [0.5, 0.7] * 4, strict=True
        )
    ]
    apart = {1: (0.4, 1.2), 3: (0.8, 1.2), 5: (None, 1.4), 7: (0.6, 1.0)}
    made = record_of(
        tmp_path, facts, {1: 0.8, 3: 0.5, 5: 0.795, 7: 0.7},
        drifted=dict.fromkeys(range(8), 1),
        events={3: ["drift", "mass"], 5: ["drift"], 6: ["mass"]},
        heterogeneity={number: {"within": within, "all": every} for number, (within, every) in apart.items()},
        embedding={1: {"within": 4.0, "all": 8.0}, 7: {"within": 6.0, "all": 7.0}},
    )  # fmt: skip
    assert marks(made) == [3, 6]
    assert reclusterings(made) == [0, 4, 5]
    assert following(made) == pytest.approx({
        "heterogeneity": (0.4 + 0.8 + 0.6) / 3,
        "heterogeneity_all": 1.2,
        "embedding_heterogeneity": 5.0,
        "embedding_heterogeneity_all": 7.5,
        "spread": 0.6,
        "silhouette": 0.3,
        "moves": 8,
        "clusters": 2.5,
        "clusters_last": 3,
        "reclusterings": 3,
        # From 0.8 to 0.5, back after six rounds, three after the event; from 0.795 to 0.7, two rounds, not back.
        "event_fall": (0.3 + 0.095) / 2,
        "event_recovery": (3 + 2) / 2,
        "events_recovered": 0.5,
        "events_known": 2,
        # Event 3 is noticed in round 4, event 6 is not; rounds 0 and 5 are false alarms.
        "detection_delay": 1,
        "events_detected": 0.5,
        "false_alarms": 2,
    })  # fmt: skip


def test_a_method_that_never_tells_of_clusters_has_none_of_their_measures(tmp_path):
    made = record_of(tmp_path, [{"loss": 1.0}] * 4, {1: 0.5, 3: 0.4}, drifted={2: 8}, events={2: ["change"]})
    assert reclusterings(made) is None
    assert following(made) == pytest.approx(
        {"event_fall": 0.1, "event_recovery": 2, "events_recovered": 0, "events_known": 1}
    )


def test_without_known_events_nothing_is_said_of_any(tmp_path):
    """Arrivals, expiries and small drift go on all the time; what there is at round 0 was never otherwise."""
    events = {0: ["mass"], 1: ["arrival", "expiry"], 2: ["drift"]}
    found = following(record_of(tmp_path, [{"reclustered": 1}] * 4, {1: 0.5, 3: 0.2}, events=events))
    assert found == {"reclusterings": 4}


@pytest.mark.parametrize(("facts", "counts"), [
    ([{"clusters": 3, "members": [1, 1]}, {}], {0: 3}),
    ([{"models": 1, "members": [5, 0, 0]}, {"models": 2}], {0: 1, 1: 2}),
    ([{}, {"models": 4}], {1: 4}),
    ([{"members": [5, 0, 0]}] * 2, {0: 3, 1: 3}),
    ([{"loss": 1.0}] * 2, {}),
])  # fmt: skip
def test_how_many_clusters_there_are(tmp_path, facts, counts):
    at, count = cluster_counts(record_of(tmp_path, facts, {}))
    assert dict(zip(at.tolist(), count.tolist(), strict=True)) == counts


def test_models_that_come_or_merge_are_clusters_made_anew(tmp_path):
    told = [{"models": 1}, {"left": 1, "new": 1, "merged": 0}, {"new": 0, "merged": 1}, {"new": 0, "merged": 0}]
    made = record_of(tmp_path, told, {})
    assert reclusterings(made) == [1, 2]
    assert reclusterings(made, merges=False) == [1]


def test_merges_answer_to_no_event_and_are_no_false_alarms(tmp_path):
    """As with FedDrift: models come at the event in round 2 and merge a step later; a merge in round 5 answers none."""
    told = [{"models": 1, "new": int(at == 2), "merged": int(at in (3, 5))} for at in range(6)]
    made = record_of(tmp_path, told, {1: 0.5, 5: 0.5}, events={2: ["mass"], 4: ["mass"]}, drifted={2: 4, 4: 4})
    found = following(made)
    assert (found["events_detected"], found["detection_delay"], found["false_alarms"]) == (0.5, 0, 0)
    assert found["reclusterings"] == 3


# -- a small study -----------------------------------------------------------------------------------------------------

METHODS = (
    A,
    {**A, "name": "Fielding", "algorithm": "fielding"},
    {
        **A,
        "name": "Static",
        "algorithm": "fielding",
        "reporters": "once",
        "trigger": {"kind": "fraction", "tau": math.inf},
    },
    {**A, "name": "FlexCFL", "algorithm": "flexcfl", "clusters": 2},
)
SMALL = {
    "rounds": 8,
    "seeds": [0, 1],
    "shift": {
        "who": "always",
        "what": {
            "kind": "cluster-drift", "groups": 2, "labels": 2, "every": 2, "migrate_fraction": 0.2,
            "resample_fraction": 0.0, "events": [5], "samples": 6, "val_samples": 2, "test_samples": 4,
        },
    },
    "data": {
        "source": {"kind": "gaussians", "samples": 240, "dims": 4, "classes": 4, "domains": 1},
        "partition": {"kind": "iid", "clients": 12},
        "groups": {"by": "none"},
        "held_out_clients": {"clients": 0},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return finished(tmp_path_factory.mktemp("drift") / "run", study(*METHODS, **SMALL))


@pytest.fixture(scope="module")
def record(root) -> ExperimentRecord:
    (made,) = read_experiment(root)
    return made


def test_what_a_run_of_each_kind_has(record):
    made = summarize(record)
    plain, fielding, static, flexcfl = made.methods
    apart = {"heterogeneity", "heterogeneity_all"}
    assert all(apart <= m.measures.keys() for m in made.methods)
    assert plain.measures["heterogeneity"].values == plain.measures["heterogeneity_all"].values
    assert fielding.measures["heterogeneity"].mean < fielding.measures["heterogeneity_all"].mean
    assert {"moves", "reclusterings", "false_alarms", "ari_last"} <= fielding.measures.keys()
    assert static.measures["moves"].mean == static.measures["reclusterings"].mean == 0
    assert {"moves", "clusters"} <= flexcfl.measures.keys()
    assert "reclusterings" not in flexcfl.measures
    assert not {"moves", "clusters", "ari"} & plain.measures.keys()
    # Clients of Fielding say their shares of labels, so its own measure is nearly that of the moment.
    own, true = (fielding.measures[name].mean for name in ("spread", "heterogeneity"))
    assert own == pytest.approx(true, abs=0.15)
