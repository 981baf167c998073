"""Streams, drift and swapped labels: chains of events, rows over time, records of runs, and mistakes."""

import csv
import itertools
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from fedtide.clusters.representation import Embedding
from fedtide.core.base import Moment, Scores
from fedtide.core.errors import FedtideError
from fedtide.core.trees import all_finite
from fedtide.data.partition import IID, ByDomain, HeldOutClients, Natural, Split
from fedtide.data.population import Population
from fedtide.data.population_builder import build
from fedtide.data.ragged import Ragged
from fedtide.data.rows import Rows
from fedtide.data.saved import save
from fedtide.data.shift import ChangePoints, ClusterDrift, Shift, Stream, What
from fedtide.data.shift.concept_drift import ClusterDriftPlan, Pools
from fedtide.data.shift.how import LabelSwaps, Permutation
from fedtide.data.shift.what import ENTRY, KEPT, MOST, ROWS, Chain, Recent, count_events
from fedtide.data.shift.who import Replay
from fedtide.evaluate.judge import Judge, views
from fedtide.evaluate.rounds import heterogeneity
from fedtide.runs.build import host_of, task_of
from fedtide.runs.preflight import preflight
from fedtide.runs.runner import Run
from fedtide.runs.simulate import simulate
from helpers.handmade import fleet
from helpers.toys import played, toy


def rows(n: int = 240) -> Rows:
    i = torch.arange(n)
    domain = (i // 4 % 2, ("day", "night"))
    return Rows(
        "toy", i.float()[:, None], i % 4, 4, *domain, client=i % 5, client_names=("ann", "bob", "cid", "dan", "eve")
    )


def people(what=None, how=None, source: Rows | None = None, partition=IID(clients=4), **settings) -> Population:
    kinds = {**({"what": what} if what else {}), **({"how": how} if how else {}), **settings.pop("shift", {})}
    return build(source or rows(), partition, shift=Shift(**kinds), **settings)


def handmade(stream: Stream, each: list[list[int]]) -> Population:
    """Clients that hold so many training rows in each interval, and one test row in each."""
    train, test, times, start = [], [], [], 0
    for counts in each:
        mine = [j for j, count in enumerate(counts) for _ in range(count)]
        train.append(list(range(start, start + len(mine))))
        test.append(list(range(start + len(mine), start + len(mine) + len(counts))))
        times += mine + list(range(len(counts)))
        start = len(times)
    of = Rows(
        "hand", torch.arange(float(start))[:, None], torch.arange(start) % 2, 2, time=torch.tensor(times).double()
    )
    parts = {"train": Ragged.of(train), "val": Ragged.empty(len(each)), "test": Ragged.of(test)}
    return Population(of, parts, torch.zeros(len(each), dtype=torch.int64), ("all",), len(each), Shift(what=stream))


HAND = {"by": "time", "intervals": 3, "gap": 4, "retention": 4}
GAP = [[2, 1, 1], [1, 0, 2]]
"""Client 1 has nothing in the second of three intervals, which is there from round 4 to round 7."""


# -- who holds nothing ------------------------------------------------------------------------------------------------


def test_a_stream_that_leaves_a_client_empty_is_one_line():
    population = handmade(Stream(**HAND), GAP)
    with pytest.raises(FedtideError, match=r"client 1 holds no training rows at 4, .* allowed: 'wait'"):
        population.check(12)
    population.check(4)
    with pytest.raises(FedtideError, match="client 1 holds no training rows at 5"):
        population.shard(1, Moment(5, 12))
    assert len(population.shard(0, Moment(5, 12))) == 1


def test_what_cannot_be_known_on_the_clock_of_seconds_is_said_when_it_happens():
    population = handmade(Stream(**HAND), GAP)
    population = replace(population, shift=replace(population.shift, clock="seconds"))
    population.check(12)
    with pytest.raises(FedtideError, match=r"client 1 holds no training rows at 4\.5"):
        population.shard(1, Moment(0, 12, 4.5))


def test_a_client_may_wait():
    population = handmade(Stream(**HAND, empty="wait"), GAP)
    population.check(12)
    there = {r: population.reachable(Moment(r, 12)).tolist() for r in (0, 3, 4, 7, 8, 11)}
    assert there == {0: [0, 1], 3: [0, 1], 4: [0], 7: [0], 8: [0, 1], 11: [0, 1]}
    for r, clients in there.items():
        assert population.arrivals(2, Moment(r, 12)).tolist() == clients
        assert population.judged(population.clients, "test", Moment(r, 12)).tolist() == clients
    # It has a test row then, and is not judged on it.
    assert len(population.held(1, Moment(5, 12), "test")) == 1
    assert not len(population.shard(1, Moment(5, 12)))


def test_a_stream_that_is_over_before_the_run_is_one_line():
    for empty in ("error", "wait"):
        population = handmade(Stream(**HAND, empty=empty), [[2, 1, 1], [1, 1, 1]])
        population.check(12)
        with pytest.raises(FedtideError, match="no client holds a training row at round 12, of 13"):
            population.check(13)
    with pytest.raises(FedtideError, match="no client holds a training row at round 12"):
        simulate(toy_algorithm(), population, rounds=20)


def toy_algorithm():
    from fedtide import Task
    from fedtide.algorithms import fedavg

    return fedavg(Task(lambda: torch.nn.Linear(1, 2)))


def test_arrivals_of_another_run_leave_out_who_holds_nothing(tmp_path):
    population = handmade(Stream(**HAND, empty="wait"), GAP)
    path = tmp_path / "0.safetensors"
    save(population, path, rounds=12, cohort=2)
    replayed = replace(population, shift=replace(population.shift, who=Replay(str(path))), seed=5)
    everyone = replace(replayed, shift=Shift(who=Replay(str(path))))
    for r in range(12):
        moment = Moment(r, 12)
        assert replayed.arrivals(2, moment).tolist() == population.arrivals(2, moment).tolist()
        assert everyone.arrivals(2, moment).tolist() == population.arrivals(2, moment).tolist()
        assert replayed.reachable(moment).tolist() == population.reachable(moment).tolist()
        assert everyone.reachable(moment).tolist() == population.reachable(moment).tolist()
    other = handmade(Stream(**HAND | {"gap": 100, "retention": 300}), [[1, 1, 1]])
    shorter = tmp_path / "1.safetensors"
    save(other, shorter, rounds=12, cohort=2)
    with pytest.raises(FedtideError, match="1 arrivals a round among 1 clients; 2 among 2 are asked for"):
        replace(population, shift=Shift(who=Replay(str(shorter)))).arrivals(2, Moment(0, 12))


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [
    {"kind": "stream", "gap": 0}, {"kind": "stream", "gap": 101}, {"kind": "stream", "by": "size"},
    {"kind": "stream", "shared": 3}, {"kind": "stream", "by": {"kind": "time", "spans": "days"}},
    {"kind": "cluster-drift", "groups": 1}, {"kind": "cluster-drift", "labels": [[0, 1], [1, 2], [3], [4]]},
    {"kind": "cluster-drift", "groups": 2, "labels": [[0, 1]]},
    {"kind": "cluster-drift", "groups": 2, "labels": [[0, 1], []]},
    {"kind": "cluster-drift", "migrate_fraction": 0.6, "resample_fraction": 0.5},
    {"kind": "cluster-drift", "events": [0]}, {"kind": "cluster-drift", "events": [5, 5]},
    {"kind": "change-points", "when": {"kind": "drawn", "fraction": -0.1}},
], ids=str)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(value):
    with pytest.raises(ValidationError):
        TypeAdapter(What).validate_python(value)


def sequences() -> Rows:
    y = torch.arange(120).reshape(40, 3) % 5
    return Rows("words", y, y, 5)


REFUSED = [
    (lambda: people(Stream(by="time")), "'time', but rows of toy have no time; allowed: 'labels', 'order'"),
    (
        lambda: people(Stream(by="time"), source=replace(rows(), time=torch.ones(240).double())),
        "'time', but rows of toy have all the same time",
    ),
    (lambda: people(Stream(), source=sequences()), "shift.what.by: found 'labels', but rows of words are sequences"),
    (
        lambda: people(Stream(by="order", shared="half"), source=sequences()),
        "shift.what.shared: found 'half', but rows of words are sequences",
    ),
    (lambda: people(ClusterDrift(groups=2, labels=2), source=sequences()), "draws rows by their labels"),
    (
        lambda: people(ClusterDrift(groups=2, labels=3)),
        "labels: found 3, but there are rows of 4 labels in every part; allowed: at most 2 for each of 2 groups",
    ),
    (lambda: people(ClusterDrift(groups=2, labels=((0, 1), (2, 9)))), "found 9, but there are 4 classes; allowed: 0"),
    (
        lambda: people(
            ClusterDrift(groups=2, labels=((0, 1), (2, 3))),
            source=replace(rows(), held_out=(torch.arange(240) > 120) & (torch.arange(240) % 4 != 2)),
        ),
        "found 2, but clients have no test row of it; allowed: 0, 1, 3",
    ),
    (
        lambda: people(ChangePoints(), source=replace(rows(), domain=None, domain_names=("all",))),
        "found 'domains', but toy has a single domain",
    ),
    (lambda: people(ChangePoints(), groups=ByDomain()), "client 0 has no training rows of domain 'night'"),
    (lambda: people(ChangePoints(when="file:nowhere.csv")), "shift.what.when.path: no such file or folder: .*nowhere"),
    (lambda: people(how=LabelSwaps(), source=sequences()), "found 'label-swaps', but it exchanges labels, and rows"),
    (lambda: people(how=Permutation(), source=sequences()), "found 'permutation', but it exchanges labels, and rows"),
    (
        lambda: people(how=LabelSwaps(), source=replace(rows(), y=torch.zeros(240, dtype=torch.int64), classes=1)),
        "exchanges labels, and there is one label",
    ),
    (lambda: people(how=LabelSwaps(concepts=5)), "concepts: found 5, allowed: at most 4, because there are 4 labels"),
    (lambda: people(how=Permutation()), "labels of the first group stay, and there is no other; allowed: two groups"),
    (lambda: people(how=Permutation(permutations=((0, 1, 2, 3),) * 2)), "allowed: one per group, 1"),
    (
        lambda: people(how=Permutation(permutations=((0, 1, 2, 2),))),
        r"group 0: found \[0, 1, 2, 2\], allowed: each label from 0 to 3 once",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("make", "said"), REFUSED, ids=[said[:40] for _, said in REFUSED])
def test_what_does_not_fit_is_one_clear_line(make, said):
    with pytest.raises(FedtideError, match=said) as error:
        make()
    assert "\n" not in str(error.value)


def test_parts_that_share_rows_are_no_ground_for_grouped_drift():
    population = people(held_out_clients=HeldOutClients())
    mixed = {**population.parts, "test": population.parts["train"]}
    with pytest.raises(FedtideError, match="row 1 is for training of one client and for tests of another"):
        replace(population, parts=mixed, shift=Shift(what=ClusterDrift(groups=2, labels=2)))


def test_validation_rows_are_no_training_rows_of_another():
    """Rows 0 to 3 are trained on; of the validation rows 2 and 4, and 1 and 5, there remain 4 and 5."""
    parts = {"train": Ragged.of([[0, 1], [2, 3]]), "val": Ragged.of([[2, 4], [1, 5]])}
    view = replace(people(partition=IID(clients=2))._view, parts=parts)
    assert sorted(Pools(view, ClusterDrift()).domains["val", "seen"].rows.tolist()) == [4, 5]


def test_the_share_of_one_of_two_labels_has_the_variance_of_its_distribution():
    """Concentration 1 is 1/2 for each label: variance 1/2 * 1/2 / (1 + 1)."""
    plan = people(ClusterDrift(groups=2, labels=2, concentration=1.0)).plan
    state = plan.state(0.0)
    shares = [plan.shares(0, replace(state, since=np.full(4, number)))[1][0] for number in range(500)]
    assert np.var(shares) == pytest.approx(0.125, abs=0.02)


def test_clients_that_move_go_to_any_other_group():
    plan = people(ClusterDrift(groups=4, labels=1, every=1, migrate_fraction=1.0, resample_fraction=0.0)).plan
    groups = [plan.state(r).group.tolist() for r in range(51)]
    moves = {move for before, after in itertools.pairwise(groups) for move in zip(before, after, strict=True)}
    assert moves == {(a, b) for a in range(4) for b in range(4) if a != b}


# -- change-point files -----------------------------------------------------------------------------------------------


def changes(tmp_path: Path, *lines: str, header: str = "client,round,concept") -> ChangePoints:
    path = tmp_path / "changes.csv"
    path.write_text("\n".join([header, *lines]) + "\n")
    return ChangePoints(when=f"file:{path}")


def test_a_file_says_who_changes_when(tmp_path):
    population = people(changes(tmp_path, "2,10,night", "0,0,night", "2,30,day", "1,10,night"))
    told = {r: population.group_at(Moment(r, 40)).tolist() for r in (0, 9, 10, 29, 30)}
    assert told == {0: [1, 0, 0, 0], 9: [1, 0, 0, 0], 10: [1, 1, 1, 0], 29: [1, 1, 1, 0], 30: [1, 1, 0, 0]}
    assert population.changed(Moment(10, 40)).tolist() == [1, 2]
    assert population.events(Moment(10, 40)) == ("change",)
    assert population.plan.trace.table(20)[-2:] == [(1, 10.0, 1), (2, 10.0, 1)]


def test_clients_may_be_called_as_the_source_calls_them(tmp_path):
    made = changes(tmp_path, "bob,5,night", "eve,0,night")
    population = people(made, partition=Natural())
    assert population.group_at(Moment(5, 10)).tolist() == [0, 1, 0, 0, 1]
    population.plan.write(tmp_path / "again.csv", 10)
    again = people(ChangePoints(when=f"file:{tmp_path / 'again.csv'}"), partition=Natural())
    assert torch.equal(again.group_at(Moment(7, 10)), population.group_at(Moment(7, 10)))
    assert "bob,5,night" in (tmp_path / "again.csv").read_text().splitlines()


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["0,0,night", "7,10,day"], "row 3: client: found '7', allowed: 0 to 3"),
        (["x,0,night"], "row 2: client: found 'x', allowed: 0 to 3"),
        (["0,-3,night"], "row 2: round: found '-3', allowed: a number of 0 or more"),
        (["0,soon,night"], "row 2: round: found 'soon'"),
        (["0,inf,night"], "row 2: round: found 'inf'"),
        (["0,nan,night"], "row 2: round: found 'nan'"),
        (["0,1,nite"], "row 2: concept: found 'nite', did you mean 'night'? Allowed: day, night"),
        (["0,5,night", "1,5,night", "0,5.0,day"], "row 4: round: found '5.0', but it is there twice; allowed: once"),
        (["0,5"], "row 2: number of cells: found 2, allowed: 3, as in the header"),
        ([], "no rows below the header"),
    ],
)
def test_a_bad_row_is_one_line_with_file_and_row(tmp_path, lines, said):
    with pytest.raises(FedtideError) as error:
        people(changes(tmp_path, *lines))
    assert str(tmp_path / "changes.csv") in str(error.value)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_only_concepts_that_a_client_meets_need_rows(tmp_path):
    source = replace(rows(), domain=torch.where(torch.arange(240) % 5 == 3, 0, torch.arange(240) // 5 % 2))
    people(changes(tmp_path, "ann,5,night"), source=source, partition=Natural())
    with pytest.raises(FedtideError, match="client 3 has no training rows of domain 'night', to which it changes"):
        people(changes(tmp_path, "dan,5,night"), source=source, partition=Natural())


# -- concepts that are label distributions ----------------------------------------------------------------------------


def distributions(tmp_path: Path, *lines: str, header: str = "concept,0,1,2,3", **more) -> ChangePoints:
    (tmp_path / "shares.csv").write_text("\n".join([header, *lines]) + "\n")
    rows = {key: more.pop(key) for key in ("samples", "test_samples", "val_samples") if key in more}
    shares = {"samples": 12, "test_samples": 4, "val_samples": 2, **rows, "path": str(tmp_path / "shares.csv")}
    when = f"file:{more['path']}" if "path" in more else {"kind": "drawn", **more}
    return ChangePoints(when=when, concepts={"kind": "label-shares", **shares})


def labels_of(population: Population, client: int, moment: Moment, part: str = "train") -> list[int]:
    """How many rows of each label a client holds."""
    held = population.held(client, moment, part).long()
    return torch.bincount(population.rows.y[held], minlength=population.rows.classes).tolist()


def test_rows_are_drawn_by_the_distribution_of_the_concept(tmp_path):
    changes(tmp_path, "0,0,late", "1,10,late")
    what = distributions(tmp_path, "early,1,0,0,0", "late,0,0.25,0.75,0", path=str(tmp_path / "changes.csv"))
    population = people(what, split=Split(val=0.1, test=0.2), held_out_clients=HeldOutClients(2))
    assert labels_of(population, 1, Moment(9, 40)) == [12, 0, 0, 0]
    assert labels_of(population, 0, Moment(0, 40))[::3] == [0, 0]
    assert population.changed(Moment(10, 40)).tolist() == [1]
    assert population.group_at(Moment(10, 40)).tolist() == [1, 1, 0, 0, 0, 0]
    for part, count in (("train", 12), ("val", 2), ("test", 4)):
        assert population.counts(torch.arange(4), part, Moment(0, 40)).tolist() == [count] * 4
        assert all(len(population.held(c, Moment(0, 40), part)) == count for c in range(4))
    assert population.counts(torch.tensor([4]), "train").tolist() == [0]  # held-out ones have test rows alone
    assert len(population.held(4, Moment(0, 40), "test")) == 4


def test_a_concept_that_comes_back_brings_the_same_rows(tmp_path):
    changes(tmp_path, "0,10,b", "0,20,a")
    what = distributions(tmp_path, "a,0.5,0.5,0,0", "b,0,0,0.5,0.5", path=str(tmp_path / "changes.csv"))
    first, second, third = (people(what).held(0, Moment(r, 40), "train") for r in (0, 10, 20))
    assert torch.equal(first, third)
    assert not torch.isin(first, second).any()


def test_a_column_says_which_concepts_are_of_one_group(tmp_path):
    lines = ("a,cold,1,0,0,0", "b,warm,0,1,0,0", "c,cold,0,0,1,0")
    what = distributions(
        tmp_path, *lines, header="concept,group,0,1,2,3", path=changes(tmp_path, "0,5,c", "1,0,b").when.path
    )
    assert people(what).group_at(Moment(5, 9)).tolist() == [0, 1, 0, 0]
    assert people(what).changed(Moment(5, 9)).tolist() == [0]


def test_a_label_of_which_there_is_no_row_is_one_line(tmp_path):
    source = replace(rows(), y=torch.arange(240) % 3, classes=4)
    with pytest.raises(FedtideError, match=r"shares.csv: concept 'b': label: found 3, but clients have no train row"):
        people(distributions(tmp_path, "a,1,0,0,0", "b,0,0,0.5,0.5"), source=source)


@pytest.mark.parametrize("partition", [IID(clients=4), Natural()])
def test_a_grouped_drift_can_be_written_as_change_points(tmp_path, partition):
    """Everyone's distribution and true group at every time, though other rows of it are drawn."""
    drift = ClusterDrift(
        groups=2,
        labels=2,
        every=5,
        migrate_fraction=0.3,
        resample_fraction=0.3,
        events=(10,),
        samples=40,
        concentration=2.0,
    )
    drawn = people(drift, partition=partition, split=Split(test=0.2))
    assert isinstance(drawn.plan, ClusterDriftPlan)
    drawn.plan.write(str(tmp_path / "changes.csv"), 20, concepts=str(tmp_path / "shares.csv"))
    shares = {"kind": "label-shares", "path": str(tmp_path / "shares.csv"), "samples": 40, "test_samples": 40}
    what = ChangePoints(when=f"file:{tmp_path / 'changes.csv'}", concepts=shares)
    read = people(what, partition=partition, split=Split(test=0.2))
    for r in range(21):
        now = Moment(r, 40)
        both = list(zip(drawn.group_at(now).tolist(), read.group_at(now).tolist(), strict=True))
        # The same groups under other numbers.
        assert len(set(both)) == len({a for a, _ in both}) == len({b for _, b in both})
        for client in range(drawn.registered):
            labels, shares = drawn.plan.shares(client, drawn.plan.state(float(r)))
            wanted = np.zeros(4)
            wanted[list(labels)] = shares
            concept = int(read.plan.trace.concept(float(r))[client])
            np.testing.assert_allclose(read.plan.shares.table[concept], wanted, atol=1e-12)
        if r:
            redrawn = drawn.plan.state(r).since != drawn.plan.state(r - 1).since
            assert read.changed(now).tolist() == redrawn.nonzero()[0].tolist()


# -- in a run ---------------------------------------------------------------------------------------------------------

WAIT = {"kind": "stream", "by": "labels", "intervals": 3, "gap": 2, "retention": 2, "empty": "wait"}
SKEWED = {"partition": {"kind": "dirichlet", "clients": 8, "alpha": 0.3}, "groups": {"by": "none"},
          "source": {"kind": "gaussians", "samples": 160, "dims": 4, "classes": 3, "domains": 2}}  # fmt: skip
SHIFTS = {
    "stream": {"what": WAIT},
    "drift": {"what": {"kind": "cluster-drift", "groups": 3, "labels": 1, "every": 2, "samples": 8, "test_samples": 4}},
    "changes": {"what": {"kind": "change-points", "when": {"kind": "drawn", "every": 2}}},
    "swaps": {"how": {"kind": "label-swaps", "every": 2}},
    "concepts": {"how": {"kind": "label-swaps", "every": 2, "concepts": 2}},
    "cycle": {"how": {"kind": "concept-drift", "drawn": {"exchanged": 3}, "when": {"kind": "cycle", "every": 2}}},
}


def drifting(kind: str, algorithm: str = "fedavg", **changes):
    data = {**SKEWED, **({"partition": {"kind": "iid", "clients": 8}} if kind != "stream" else {})}
    shift = {"who": "always", **SHIFTS[kind]}
    return toy(algorithm, **{"data": data, "shift": shift, **changes})


@pytest.mark.parametrize("kind", SHIFTS)
def test_a_run_with_drift_resumes_with_the_same_bytes_and_says_who_drifted(kind, tmp_path):
    experiment = drifting(kind)
    preflight(experiment)
    for name in ("whole", "cut"):
        run = Run(experiment, experiment.method[0], 0, tmp_path / name / "A" / "0")
        if name == "cut":
            list(run.play(stop=lambda: True))
        list(run.play())
    for file in ("clients.csv", "rounds.jsonl"):
        whole, cut = ((tmp_path / name / "A" / "0" / file).read_bytes() for name in ("whole", "cut"))
        assert whole == cut
    lines = [json.loads(line) for line in whole.splitlines()]
    assert len(lines) == 6
    assert [bool(line["events"]) for line in lines] == [False, False, True, False, True, False]
    assert [line["drifted"] > 0 for line in lines] == [False, False, True, False, True, False]


@pytest.mark.parametrize("kind", SHIFTS)
def test_shares_of_labels_are_those_of_the_shards(kind):
    people = host_of(drifting(kind), drifting(kind).method[0], 0).population
    for r in range(5):
        moment = Moment(r, 6)
        clients = people.clients[1:].flip(0)
        shares = people.label_shares(clients, moment)
        for client, share in zip(clients.tolist(), shares, strict=True):
            y = people.shard(client, moment).y
            assert share.tolist() == pytest.approx([float((y == k).sum()) / max(len(y), 1) for k in range(3)])


def told(experiment, folder: Path) -> tuple[Population, list[dict], list[dict]]:
    """The population of a run, its lines, and the rows of training clients."""
    list(Run(experiment, experiment.method[0], 0, folder / "A" / "0").play())
    lines = [json.loads(line) for line in (folder / "A" / "0" / "rounds.jsonl").read_text().splitlines()]
    with open(folder / "A" / "0" / "clients.csv", newline="") as file:
        seen = [row for row in csv.DictReader(file) if row["view"] == "train_clients"]
    return host_of(experiment, experiment.method[0], 0).population, lines, seen


def spread(points: dict[str, torch.Tensor], cluster: dict[str, str], power: int) -> float:
    """The mean over clients of the mean distance to the others of their cluster, by all pairs."""
    means = []
    for client, point in points.items():
        near = [
            float((point - other).abs().pow(power).sum())
            for name, other in points.items()
            if name != client and cluster.get(name) == cluster.get(client)
        ]
        means.append(sum(near) / len(near) if near else 0.0)
    return sum(means) / len(means)


@pytest.mark.parametrize("algorithm", ["fedavg", "ifca"])
@pytest.mark.parametrize("kind", ["drift", "swaps", "stream"])
def test_how_unlike_clients_of_a_cluster_are_is_said_where_they_are_judged(tmp_path, kind, algorithm):
    """By labels, and by the mean features that a frozen network has of each client's rows."""
    experiment = drifting(kind, algorithm)
    if kind == "stream":
        experiment = experiment.model_copy(update={"embedding": Embedding(seed=3)})
    people, lines, seen = told(experiment, tmp_path)
    embed = Embedding(seed=3).of(task_of(experiment, experiment.method[0], people.rows))
    for line in lines:
        assert ("heterogeneity" in line) == ("scores" in line)
        assert ("embedding" in line) == ("scores" in line and kind == "stream")
        if "scores" not in line:
            continue
        moment = Moment(line["round"], 6)
        mine = {row["client"]: row["slot"] for row in seen if int(row["round"]) == line["round"]}
        shares = {client: people.label_shares(torch.tensor([int(client)]), moment)[0] for client in mine}
        for name, cluster in (("within", mine), ("all", {})):
            assert line["heterogeneity"][name] == pytest.approx(spread(shares, cluster, 1), abs=1e-6)
            if kind == "stream":
                x = {client: embed(None, people.shard(int(client), moment)) for client in mine}
                assert line["embedding"][name] == pytest.approx(spread(x, cluster, 2), rel=1e-4, abs=2e-6)


def test_clients_without_rows_are_not_compared():
    """In round 5 clients 0 and 2 hold a row each, of labels 0 and 1: L1 distance 2. Client 1 waits."""
    fleet_of = fleet({}, handmade(Stream(**HAND, empty="wait"), [*GAP, GAP[0]]))
    fleet_of.begin(Moment(5, 12, 5.0))
    scores = Scores(torch.arange(3), *torch.ones(3, 3, dtype=torch.float64))
    judge = Judge(fleet_of.engine.host.algorithm, fleet_of, [])
    assert heterogeneity(judge, scores, None) == {"heterogeneity": {"within": 2.0, "all": 2.0}}


@pytest.mark.parametrize(("kind", "grouped"), [("drift", True), ("concepts", True), ("swaps", False)])
def test_the_group_of_the_moment_is_kept_where_groups_drift(tmp_path, kind, grouped):
    people, _, seen = told(drifting(kind), tmp_path)
    assert ("truth" in seen[0]) is grouped
    for row in seen if grouped else ():
        assert int(row["truth"]) == people.group_at(Moment(int(row["round"]), 6))[int(row["client"])]


def test_who_waits_is_not_judged():
    run = played(drifting("stream"), rounds=3)
    population, moment = run.host.population, run.fleet.moment
    waiting = ~population.there(moment)
    assert 0 < int(waiting.sum()) < 8
    who = Judge(run.host.algorithm, run.fleet, views(population))
    shown = {view.name: scores for view, scores, _ in who.scores(run.state)}
    assert not set(shown["train_clients"].clients.tolist()) & set(waiting.nonzero().flatten().tolist())
    assert (shown["train_clients"].rows > 0).all()
    assert [query for query in run.fleet.queries if waiting[query.ask.clients].any()] == []


DRIFTING = ("ifca", "fedtem", "scaffold", "fielding", "flexcfl", "auxo", "feddrift", "aem stops", "pfedem", "oracle")


@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [
        pytest.param(kind, algorithm, marks=[pytest.mark.thorough] if (k + a) % 2 else [])
        for k, kind in enumerate(SHIFTS)
        for a, algorithm in enumerate(DRIFTING)
    ],
)
def test_algorithms_play_with_drift(kind, algorithm):
    run = played(drifting(kind, algorithm), rounds=4)
    judge = Judge(run.host.algorithm, run.fleet, views(run.host.population))
    judged = list(judge.scores(run.state))
    assert {"train_clients", "val"} <= {view.name for view, _, _ in judged}
    for _, scores, slot in judged:
        assert float(scores.rows.sum()) > 0
        assert torch.isfinite(scores.loss).all()
        assert slot is None or int(slot.min()) >= 0
    assert all_finite(run.state.weights)


@given(st.lists(st.integers(0, 60), max_size=40))
def test_a_state_does_not_depend_on_what_was_asked_before(numbers):
    chain = Chain(lambda: (), lambda state, number: (*state, number))
    assert [chain[number] for number in numbers] == [tuple(range(1, number + 1)) for number in numbers]
    assert len(chain._kept) <= KEPT


@given(st.lists(st.integers(0, 6), max_size=20))
def test_rows_of_a_key_are_drawn_again_if_they_are_forgotten(keys):
    """Of keys whose rows take half of the place the last two are kept."""
    recent, drawn = Recent(), []

    def draw(key: int) -> torch.Tensor:
        drawn.append(key)
        return torch.full((1,), key).expand(ROWS // 2 - ENTRY)

    kept: list[int] = []
    for key in keys:
        before = len(drawn)
        assert int(recent.get(key, partial(draw, key))[0]) == key
        assert (len(drawn) == before) == (key in kept)
        kept = [*(k for k in kept if k != key), key][-2:]


@pytest.mark.parametrize("number", [MOST + 1, float("inf"), float("nan")])
def test_too_many_events_are_one_line(number):
    with pytest.raises(FedtideError, match=r"shift.what.every: it makes .* events, allowed: at most 100000"):
        count_events(number, 1.0, "shift.what.every")
