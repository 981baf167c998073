"""Runs under drift: what is measured, drawn and said, on records made by hand and on small runs."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from fedtide.core.errors import FedtideError
from fedtide.report import cluster_maps, drift_pictures, narrative, tables
from fedtide.report.clusters import clustering, membership
from fedtide.report.drift import cluster_counts, following, marks, reclusterings
from fedtide.report.page import write_report
from fedtide.report.reading import ExperimentRecord, RunRecord, read_experiment
from fedtide.report.summary import summarize
from helpers.mixtures import shown, texts
from helpers.pages import Page
from helpers.studies import A, finished, study

ABOUT = {"seconds": 1.0, "down": 0, "up": 0, "refused": 0, "participants": {}}


def record_of(folder: Path, facts: list[dict], accuracy: dict[int, float], **more: dict[int, object]) -> RunRecord:
    """A run whose rounds have these facts; accuracy, and whatever else lines have, by round."""
    lines = []
    for number, told in enumerate(facts):
        line = {"round": number, **ABOUT, "facts": told}
        if number in accuracy:
            line["scores"] = {"train_clients": {"accuracy": accuracy[number]}}
        line |= {key: values[number] for key, values in more.items() if number in values}
        lines.append(json.dumps(line) + "\n")
    (folder / "rounds.jsonl").write_text("".join(lines))
    return RunRecord(0, folder, False, len(facts))


# -- measures by hand --------------------------------------------------------------------------------------------------


def test_the_measures_of_a_run_by_hand(tmp_path):
    """Eight rounds; mass events at 3 and 6, steady drift at 5, clusters made anew in rounds 0, 4 and 5."""
    told = [
        {"moved": moved, "reclustered": anew, "clusters": k, "members": [4] * 9, "spread": s, "silhouette": s / 2}
        for moved, anew, k, s in zip(
            [0, 1, 0, 5, 0, 2, 0, 0], [1, 0, 0, 0, 1, 1, 0, 0], [2, 2, 2, 2, 3, 3, 3, 3], [0.5, 0.7] * 4, strict=True
        )
    ]
    apart = {1: (0.4, 1.2), 3: (0.8, 1.2), 5: (None, 1.4), 7: (0.6, 1.0)}
    made = record_of(
        tmp_path, told, {1: 0.8, 3: 0.5, 5: 0.795, 7: 0.7},
        drifted=dict.fromkeys(range(8), 1),
        events={3: ["drift", "mass"], 5: ["drift"], 6: ["mass"]},
        heterogeneity={number: {"within": within, "all": every} for number, (within, every) in apart.items()},
        embedding={1: {"within": 4.0, "all": 8.0}, 7: {"within": 6.0, "all": 7.0}},
    )  # fmt: skip
    assert marks(made) == [3, 6]
    assert reclusterings(made) == [0, 4, 5]
    assert following(made, "train_clients") == pytest.approx({
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


def test_a_method_that_never_makes_clusters_anew_notices_nothing(tmp_path):
    made = record_of(tmp_path, [{"reclustered": 0, "moved": 0}] * 4, {1: 0.5, 3: 0.5}, events={2: ["swap"]})
    found = following(made, "train_clients")
    assert (found["events_detected"], found["false_alarms"], found["reclusterings"]) == (0, 0, 0)
    assert math.isnan(found["detection_delay"])


def test_a_method_that_never_tells_of_clusters_has_none_of_their_measures(tmp_path):
    made = record_of(tmp_path, [{"loss": 1.0}] * 4, {1: 0.5, 3: 0.4}, drifted={2: 8}, events={2: ["change"]})
    assert reclusterings(made) is None
    assert following(made, "train_clients") == pytest.approx(
        {"event_fall": 0.1, "event_recovery": 2, "events_recovered": 0, "events_known": 1}
    )


def test_without_drift_there_is_nothing(tmp_path):
    assert following(record_of(tmp_path, [{"members": [1, 2]}] * 4, {1: 0.5, 3: 0.5}), "train_clients") == {}


def test_without_known_events_nothing_is_said_of_any(tmp_path):
    """Arrivals, expiries and small drift go on all the time; what there is at round 0 was never otherwise."""
    events = {0: ["mass"], 1: ["arrival", "expiry"], 2: ["drift"]}
    found = following(record_of(tmp_path, [{"reclustered": 1}] * 4, {1: 0.5, 3: 0.2}, events=events), "train_clients")
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
    found = following(made, "train_clients")
    assert (found["events_detected"], found["detection_delay"], found["false_alarms"]) == (0.5, 0, 0)
    assert found["reclusterings"] == 3


# -- groups that drift -------------------------------------------------------------------------------------------------

CSV = """round,view,client,group,rows,accuracy,loss,slot,name,truth
1,train_clients,0,all,4,1,0,0,,0
1,train_clients,1,all,4,1,0,0,,0
1,train_clients,2,all,4,1,0,1,,1
1,train_clients,3,all,4,1,0,1,,1
3,train_clients,0,all,4,1,0,0,,0
3,train_clients,1,all,4,1,0,0,,1
3,train_clients,2,all,4,1,0,1,,10
3,train_clients,3,all,4,1,0,1,,0
"""


def test_clusters_are_compared_with_the_groups_of_that_moment(tmp_path):
    """At first they are the groups. Later groups 0, 1, 10 and 0 lie across them: of one pair of clients in a group none
    is in a cluster, two are expected by 1 * 2 / 6, so the index is (0 - 1/3) / (3/2 - 1/3) = -2/7."""
    (tmp_path / "clients.csv").write_text(CSV)
    made = RunRecord(0, tmp_path, False, 4)
    (tmp_path / "rounds.jsonl").write_text("")
    found = clustering(made, "train_clients", [], since=3)
    assert found["ari"] == found["ari_last"] == pytest.approx(-2 / 7)
    assert found["ari_over_rounds"] == pytest.approx((1 - 2 / 7) / 2)
    assert found["purity"] == 0.5
    assert found["churn"] == 0


def test_clients_are_sorted_by_their_last_group_and_then_by_those_before(tmp_path):
    (tmp_path / "clients.csv").write_text(CSV)
    made = membership(RunRecord(0, tmp_path, False, 4), "train_clients", [], 200)
    assert made.clients.tolist() == [0, 3, 1, 2]
    assert made.group.tolist() == [0, 0, 1, 10]
    np.testing.assert_array_equal(made.truth, [[0, 0], [1, 0], [0, 1], [1, 10]])
    np.testing.assert_array_equal(made.table, [[0, 0], [1, 1], [0, 0], [1, 1]])
    assert {k: v.tolist() for k, v in made.shares.items()} == {0: [0.5, 0.5], 1: [0.5, 0.25], 10: [0, 0.25]}


def test_a_truth_that_is_no_number_is_damage(tmp_path):
    (tmp_path / "clients.csv").write_text(CSV.replace(",,10\n", ",,x\n"))
    with pytest.raises(FedtideError, match=r"clients.csv: a line is damaged"):
        membership(RunRecord(0, tmp_path, False, 4), "train_clients", [], 200)


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


def test_the_pictures_of_drift(root, record):
    assert {"drift over rounds", "clusters of clients over time"} <= shown(root)
    found = texts(drift_pictures.following_over_rounds(record))
    assert {"all clients, one cluster", "Fielding", "clusters", "rounds done"} <= set(found)
    names = ["Fielding", "Static", "FlexCFL"]
    maps = texts(cluster_maps.clusters_over_time(record, names))
    assert maps.index("true groups") < maps.index("Fielding")
    assert {"group 0", "group 3", "12 clients"} <= set(maps)
    assert drift_pictures.events_of(record) == [5]


def test_the_page_says_what_was_simulated(root, record):
    page = Page(write_report([root]).read_text(encoding="utf-8"))
    assert all(title in page.text["h2"] for title in ("Known events", "Following drift"))
    assert "dashed lines are events at which many change at once" in page.text["p"]
    assert (
        "Clients belong to 2 groups and hold rows of the labels of their group. Every 2 rounds 20 % of the clients "
        "change group. At round 5 half of them are dealt to 2 new groups, whose labels cut across the old ones. The "
        "known event is a mass event, after 5 rounds. The model is judged on rows that the clients kept back, of what "
        "they hold at that moment."
    ) in narrative.setting(record)
    assert tables.measured(summarize(record), tables.EVENTS).header[1] == "fall"


@pytest.mark.parametrize(("key", "wrong"), [
    ("heterogeneity", 0.5), ("heterogeneity", {"within": 0.5}), ("heterogeneity", {"within": "x", "all": 1.0}),
    ("embedding", {"within": 0.5}),
    ("events", "mass"), ("events", [1]), ("drifted", 0.5),
])  # fmt: skip
def test_damage_is_named(root, tmp_path, key, wrong):
    copied = tmp_path / "run"
    shutil.copytree(root, copied)
    path = copied / "fielding" / "0" / "rounds.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1][key] = wrong
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(FedtideError, match=rf"fielding/0/rounds.jsonl: line 2: damaged: '{key}' is of another kind"):
        write_report([copied])


def test_a_folder_of_an_older_version_has_a_page(root, tmp_path):
    """Without unlikeness and without the groups of the moment."""
    copied = tmp_path / "run"
    shutil.copytree(root, copied)
    for path in copied.rglob("rounds.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            line.pop("heterogeneity", None)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for path in copied.rglob("clients.csv"):
        path.write_text("".join(line.rsplit(",", 1)[0] + "\n" for line in path.read_text().splitlines()))
    assert {"drift over rounds", "clusters of clients over time"} <= shown(copied)
    (again,) = read_experiment(copied)
    assert "heterogeneity" not in summarize(again).method("Fielding").measures


def test_colors_of_groups_differ_for_three_rounds_of_the_palette():
    found = [cluster_maps.group_color(number) for number in range(21)]
    assert len(set(found)) == 21
    assert cluster_maps.group_color(21) == found[0]
