"""The eight questions between clients, by sums alone: the same words as on the pooled table, and the same bits."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedtide.core.base import Shard
from fedtide.core.loop import begin, play
from fedtide.core.trees import same
from fedtide.inspection import linear, row_sums, shares
from fedtide.inspection.answers import QUESTIONS
from fedtide.inspection.by_sums import STAGES, opened_sums, reading_of, split_change
from fedtide.inspection.findings import inspect_table
from fedtide.inspection.row_sums import along_law, pack, slot_tables, sums_by, unpack
from fedtide.inspection.table import Table
from fedtide.remote.offline import near_fleet
from fedtide.wire.pipeline import Wire
from helpers.planted import WORLDS, expected, planted, positive
from helpers.planted_clients import answered, host, last_state, simulated


def check(name: str, seed: int) -> None:
    table = planted(name, seed)
    must, may = expected(name)
    found = answered(table)
    assert must <= positive(found) <= may, f"{name}, seed {seed}: {sorted(positive(found))}\n{found}"


@pytest.mark.parametrize(("seed", "name"), [(0, "nothing"), (1, "meaning + who"), (2, "labels 0.3 + sudden")])
def test_planted_shifts_are_found_between_clients_and_nothing_else(seed, name):
    check(name, seed)


@pytest.mark.thorough
@pytest.mark.parametrize("name", WORLDS)
def test_all_planted_worlds_between_clients(name):
    for seed in range(5):
        check(name, seed)


# -- sums are those of the pooled table --------------------------------------------------------------------------------


def test_distances_and_changes_are_those_of_the_pooled_table():
    table = planted("labels 1 + who", 3)
    found, pooled = answered(table), inspect_table(table)
    assert found.clients.labels.seen == pytest.approx(pooled.clients.labels.seen, rel=1e-9)
    assert found.clients.alpha == pytest.approx(pooled.clients.alpha, rel=1e-9)
    for name in ("others", "same"):
        one, other = (getattr(each.cycles["day"].changes, name) for each in (found, pooled))
        assert one.seen == pytest.approx(other.seen, rel=1e-9)
        assert one.chance == pytest.approx(other.chance, rel=0.1)
        one, other = (getattr(each.drift.changes, name) for each in (found, pooled))
        assert one.seen == pytest.approx(other.seen, rel=1e-9)
    assert (found.drift.block.max(), found.drift.course[2]) == (pooled.drift.block.max(), pooled.drift.course[2])
    assert found.cycles["day"].habits.seen == pytest.approx(pooled.cycles["day"].habits.seen, rel=1e-9)


def test_sums_of_two_tables_tell_the_change_by_others_and_by_the_same():
    draw = np.random.default_rng(0)
    slot, client, what = draw.integers(0, 4, 300), draw.integers(0, 5, 300), draw.integers(0, 3, 300)
    tables = sum(slot_tables(slot[client == one], 4, what[client == one], 3) for one in range(5))
    others, same_clients = split_change(np.stack([tables] * 2))
    assert [others.seen, same_clients.seen] == pytest.approx(shares.change(slot, client, what, (4, 5, 3)))


def test_models_of_the_past_by_sums_are_those_of_rows():
    draw = np.random.default_rng(1)
    z = np.concatenate([draw.normal(size=(400, 2)), np.ones((400, 1))], 1)
    t, block, half = draw.normal(size=(400, 2)), draw.integers(0, 6, 400), draw.random(400) < 0.5
    fitted, judged = (linear.moments(z[h], t[h], block[h], 6) for h in (half, ~half))
    by_rows = linear.judge_ahead(z, t, block, 6, HalvesOf(half))
    assert linear.ahead_of(fitted, judged).past == by_rows.past


class HalvesOf:
    """A key that draws these halves."""

    def __init__(self, half):
        self._half = half

    def numpy(self):
        return self

    def random(self, rows):
        return np.where(self._half, 0.0, 1.0)


def test_packed_matrices_and_sums_of_members():
    a = np.arange(9.0).reshape(3, 3)
    whole = a + a.T
    assert (unpack(pack(whole)) == whole).all()
    assert sums_by(np.array([[1.0], [2.0], [4.0]]), np.array([1, 0, 1]), 3)[:, 0].tolist() == [2.0, 5.0, 0.0]


def test_turned_days_keep_the_common_hours_and_clumps():
    law = np.array([0.0, 0.5, 0.5, 0.0])
    slot, day = np.repeat(np.random.default_rng(0).choice([1, 2], 500), 4), np.repeat(np.arange(500), 4)
    turned = np.concatenate([along_law(slot, day, law, row_sums.Rng(0).at(at)) for at in range(20)])
    assert set(turned) == {1, 2}
    assert (turned == 1).mean() == pytest.approx(0.5, abs=0.05)


# -- who sees what -----------------------------------------------------------------------------------------------------


def of_clients(table: Table, clients: int) -> Table:
    """The rows of the first clients alone."""
    few = np.isin(table.client, [f"client {number}" for number in range(clients)])
    return replace(table, **{name: getattr(table, name)[few] for name in ("label", "features", "client", "time")})


def test_five_clients_make_no_groups_of_three():
    found = answered(of_clients(planted("meaning", 0), 5))
    assert (found["groups"].level, found["meaning"].level) == ("not asked", "not asked")
    assert found["meaning"].said == ("sums of groups are of 3 clients or more, and fewer than 6 clients have ten rows")


def test_masked_sums_of_nodes_have_the_bits_of_the_simulation(tmp_path):
    table = of_clients(planted("meaning + who", 0), 8)
    one = host(table, Wire(secure=True, fewest=3))
    fleet = near_fleet(host(table, Wire(secure=True, fewest=3)), 8, tmp_path)  # of more at a node more are needed
    start = begin(one.algorithm, fleet, seed=0, rounds=len(STAGES))
    *_, step = play(one.algorithm, fleet, start, seed=0, rounds=len(STAGES))
    assert same(step.state, last_state(one, simulated(one)))
    assert set(step.state.sums) == set(STAGES)


def test_sums_of_fewer_clients_are_not_opened():
    table = planted("meaning", 0, rows=480)
    found = answered(of_clients(table, 2))
    assert {one.level for one in found} == {"not asked"}
    assert "0 clients" in str(found)
    state = last_state(host(table), simulated(host(table)))
    assert (state.sums["cells"]["who"][state.sums["cells"]["who"] > 0] >= 3).all()
    assert opened_sums({"cells": [None] * 4}, 3) == {}


def test_rows_without_times_are_asked_about_clients_alone():
    table = replace(planted("meaning", 0, rows=1200), time=None)
    found = answered(table)
    assert found["meaning"].found
    assert {found[name].level for name in ("presence", "mix", "drift", "matter")} == {"not asked"}


def test_the_last_round_records_the_levels():
    one = host(planted("nothing", 0, rows=480))
    fleet = simulated(one)
    start = begin(one.algorithm, fleet, seed=0, rounds=len(STAGES) + 1)
    *_, last, idle = play(one.algorithm, fleet, start, seed=0, rounds=len(STAGES) + 1)
    assert {name: last.facts[name] for name in QUESTIONS} == dict.fromkeys(QUESTIONS, 1)
    assert (dict(idle.facts), same(idle.state, last.state)) == ({}, True)


def test_one_row_moves_a_distance_by_one_row_at_most():
    reading = reading_of(last_state(one := host(planted("nothing", 0)), simulated(one)))
    assert reading.sums["first"]["labels"].sum() == 2400
    none = torch.zeros(1, dtype=torch.int64)
    shard = Shard(torch.zeros(1, 4), none, torch.zeros(1), torch.zeros(1, dtype=torch.float64))
    terms = row_sums.table_terms(shard, reading.ask("tables"), row_sums.Rng(0))
    assert float(terms["far_labels"].max()) <= 1.0


def test_empty_windows_and_a_clock_that_is_a_day_off_change_no_word():
    table = planted("nothing", 1)
    time = np.where(table.client == "client 3", table.time + 86_400, table.time)
    keep = (time < 4 * 86_400) | (time >= 6 * 86_400)  # two days without a row
    moved = Table(table.name, table.label[keep], table.features[keep], table.client[keep], time[keep])
    assert positive(answered(moved)) == set()
