"""Clusters of clients: agreement with groups against another library, numbers by hand, and maps."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fedtide.draw import figures
from fedtide.report.clusters import agreement, ari, churn, contingency, draw_evenly, evenness, membership, nmi, purity
from fedtide.report.run_records import RunRecord
from helpers.records import run_of_lines

labels = st.integers(2, 30).flatmap(
    lambda n: st.tuples(*[arrays.arrays(np.int64, n, elements=st.integers(0, 4)) for _ in range(2)])
)


@given(labels)
def test_ari_and_nmi_are_those_of_another_library(pair):
    metrics = pytest.importorskip("sklearn.metrics")
    table = contingency(*pair)
    assert ari(table) == pytest.approx(metrics.adjusted_rand_score(*pair), abs=1e-12)
    assert nmi(table) == pytest.approx(metrics.normalized_mutual_info_score(*pair), abs=1e-9)


@given(labels, st.permutations(range(5)))
def test_names_of_clusters_do_not_matter(pair, order):
    groups, clusters = pair
    renamed = np.array(order)[clusters]
    for measure in (ari, nmi, purity):
        assert measure(contingency(groups, renamed)) == pytest.approx(measure(contingency(groups, clusters)), abs=1e-12)


@given(labels)
def test_a_labeling_agrees_with_itself(pair):
    table = contingency(pair[0], pair[0])
    assert (ari(table), purity(table)) == (1.0, 1.0)
    assert nmi(table) == pytest.approx(1.0)


@pytest.mark.parametrize("groups", [[3, 3, 3, 3], [0, 1, 2, 3]], ids=["one cluster", "all alone"])
def test_labellings_that_say_nothing_agree_by_definition(groups):
    assert ari(contingency(np.array(groups), np.array(groups[::-1]))) == 1.0


def test_purity_of_one_cluster_is_the_share_of_the_largest_group():
    assert purity(np.array([[6], [2]])) == 0.75


@pytest.mark.parametrize(("sizes", "expected"), [([5], 0.0), ([4, 4, 4], 1.0), ([2, 2, 0], math.log(2) / math.log(3))])
def test_evenness_is_a_share_of_its_largest(sizes, expected):
    assert evenness(np.array(sizes)) == pytest.approx(expected)


def test_churn_counts_those_who_were_there_before():
    assert math.isnan(churn(np.array([np.nan]), np.array([0])))
    assert churn(np.array([0, 1, np.nan]), np.array([1, 1, 0])) == 0.5


def test_churn_does_not_count_clusters_that_got_another_number():
    """Client 5 moves from the second cluster to the first, and all numbers change."""
    before, after = np.array([0, 0, 0, 1, 1, 1, 2, 2]), np.array([2, 2, 2, 0, 0, 2, 1, 1])
    assert churn(before, after) == 1 / 8
    assert churn(before, 9 - before) == 0


def test_a_cluster_that_splits_is_still_one_of_its_halves():
    """Of six the larger part of four is what was there; two have a new cluster. Two that merge lose the smaller one."""
    whole, halves = np.full(6, 4), np.array([3, 3, 0, 0, 0, 0])
    assert churn(whole, halves) == churn(halves, whole) == 2 / 6


# -- membership --------------------------------------------------------------------------------------------------------

CSV = """round,view,client,group,rows,accuracy,loss,slot,name
1,train_clients,0,night,4,1,0,0,
1,train_clients,1,day,4,1,0,2,
1,train_clients,2,day,4,1,0,0,
1,train_clients,3,day,4,1,0,0,
1,held_out_clients,9,day,4,1,0,1,
3,train_clients,0,night,4,1,0,2,
3,train_clients,1,day,4,1,0,2,
3,train_clients,2,day,0,,,,
3,train_clients,3,day,4,1,0,0,
"""


def by_hand(folder: Path) -> RunRecord:
    (folder / "clients.csv").write_text(CSV)
    return run_of_lines(folder, {}, {}, {}, {})


def test_membership_is_what_clients_csv_says(tmp_path):
    """Two evaluations; night's only client comes last, and client 2 has no rows at the second."""
    members = membership(by_hand(tmp_path), "train_clients", ["day", "night"])
    assert members.after.tolist() == [2, 4]
    drawn = members.select(200)
    assert drawn.clients.tolist() == [1, 2, 3, 0]
    np.testing.assert_array_equal(drawn.groups, [[0, 0], [0, np.nan], [0, 0], [1, 1]])
    np.testing.assert_array_equal(drawn.slots, [[2, 2], [0, np.nan], [0, 0], [0, 2]])
    rates = agreement(by_hand(tmp_path), "train_clients", ["day", "night"], 0)
    assert rates["churn"] == pytest.approx(1 / 3)  # of 0, 1 and 3, who were judged twice


def test_of_many_clients_some_are_drawn(tmp_path):
    members = membership(by_hand(tmp_path), "train_clients", ["day", "night"])
    assert members.select(2).clients.tolist() == [1, 0]


def test_clients_are_drawn_evenly_over_groups():
    groups = dict.fromkeys(range(900), 0) | dict.fromkeys(range(900, 999), 1) | {999: 2}
    drawn = draw_evenly(groups, 200)
    counts = np.bincount([groups[client] for client in drawn])
    assert counts.tolist() == [180, 19, 1]
    assert drawn == sorted(set(drawn))
    assert (drawn[0], drawn[179], drawn[180], drawn[-1]) == (0, 899, 900, 999)
    assert draw_evenly({7: 1, 3: 1, 5: 0}, 200) == [5, 3, 7]


OWN = """round,view,client,group,rows,accuracy,loss,slot,name
1,train_clients,0,day,4,1,0,-1,
1,train_clients,1,day,4,1,0,-1,
1,train_clients,2,night,4,1,0,3,
1,train_clients,3,night,4,1,0,3,
"""


def run_in(folder: Path, slots: str = "", **facts: object) -> RunRecord:
    """A run judged in its second round: day clients in these slots, or those of `OWN`."""
    rows = [f"1,train_clients,{client},day,4,1,0,{slot}," for client, slot in enumerate(slots)]
    (folder / "clients.csv").write_text("\n".join([OWN.splitlines()[0], *rows, ""]) if slots else OWN)
    return run_of_lines(folder, {}, {"facts": facts})


def test_own_experts_are_no_cluster_and_models_without_clients_are_empty_ones(tmp_path):
    """Two night clients at model 3 of 6, two day clients at experts of their own: one cluster of two clients."""
    run = run_in(tmp_path, members=[4, 0, 0, 0, 0, 0])
    rates = agreement(run, "train_clients", ["day", "night"], 0)
    assert (rates["evenness"], rates["fullest_cluster"], rates["purity"]) == (0, 1, 1)
    assert membership(run, "train_clients", ["day", "night"]).slots.tolist() == [[-1], [-1], [3], [3]]


@pytest.mark.parametrize(("slots", "used"), [("0101", 2), ("0505", 2), ("5555", 1), ("0123", 4)])
def test_evenness_does_not_depend_on_the_numbers_of_models(tmp_path, slots, used):
    """Of six models."""
    rates = agreement(run_in(tmp_path, slots, members=[4, 0, 0, 0, 0, 0]), "train_clients", ["day"], 0)
    assert rates["evenness"] == pytest.approx(math.log(used) / math.log(6))
    assert rates["fullest_cluster"] == 1 / used


# -- groups that drift -------------------------------------------------------------------------------------------------

DRIFTING = """round,view,client,group,rows,accuracy,loss,slot,name,truth
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
    (tmp_path / "clients.csv").write_text(DRIFTING)
    rates = agreement(run_of_lines(tmp_path), "train_clients", [], since=3)
    assert rates["ari"] == rates["ari_last"] == pytest.approx(-2 / 7)
    assert rates["ari_over_rounds"] == pytest.approx((1 - 2 / 7) / 2)
    assert rates["purity"] == 0.5
    assert rates["churn"] == 0


def test_clients_are_sorted_by_their_last_group_and_then_by_those_before(tmp_path):
    (tmp_path / "clients.csv").write_text(DRIFTING)
    members = membership(run_of_lines(tmp_path, {}, {}, {}, {}), "train_clients", []).select(200)
    assert members.clients.tolist() == [0, 3, 1, 2]
    np.testing.assert_array_equal(members.groups, [[0, 0], [1, 0], [0, 1], [1, 10]])
    np.testing.assert_array_equal(members.slots, [[0, 0], [1, 1], [0, 0], [1, 1]])


def test_a_color_has_one_meaning_in_a_report():
    groups = {figures.group_color(number).lower() for number in range(21)}
    meanings = [*map(str.lower, figures.COLORS)], groups, [figures.model_color(n).lower() for n in range(-1, 8)]
    states = [color.lower() for color in figures.STATE_COLORS]
    for one, other in itertools.combinations([*meanings, states], 2):
        assert not set(one) & set(other)
    assert [len(set(one)) for one in (*meanings, states)] == [8, 21, 9, 5]
