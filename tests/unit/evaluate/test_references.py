"""References on the rows that methods are judged on, recomputed by hand; and that they travel to records and tables."""

import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

import fedtide as ft
from fedtide.core.base import Moment
from fedtide.core.errors import FedtideError
from fedtide.data.partition import IID, Natural, Split
from fedtide.data.population import Population
from fedtide.data.population_builder import build
from fedtide.data.rows import Rows, with_target
from fedtide.data.shift import Calendar
from fedtide.data.targets import Counts, Labels, Number, Quantiles
from fedtide.evaluate.references import MISSING, References, fit_trees, predict, usual_answer
from fedtide.report.accuracy import brief_table
from fedtide.report.study import measures, read_study
from helpers.studies import A, finished, lines_of, study

DAY = 86_400.0
NOW = Moment(3, 10, 3.0)


def table(target: Any = None, rows: int = 240, calendar: bool = False) -> Population:
    """Three clients with a row every six hours, each at its own pace; values follow a feature, and drift."""
    draw = np.random.default_rng(0)
    client, time = draw.integers(0, 3, rows), np.sort(draw.choice(rows * 4, rows, replace=False)) * DAY / 4
    x = draw.normal(size=(rows, 2)).astype(np.float32)
    value = 5 + 2 * x[:, 0] + client + time / time.max() + draw.normal(size=rows)
    columns: dict[str, Any] = {
        "client": torch.from_numpy(client), "client_names": ("ann", "bob", "cid"), "time": torch.from_numpy(time),
    }  # fmt: skip
    made = Rows("table", torch.from_numpy(x), torch.from_numpy((value > 6).astype(np.int64)), 2, **columns)
    if isinstance(target, Labels):
        made = with_target(Rows("table", made.x, made.y, 2, value=torch.stack([made.y, 1 - made.y], 1).float(),
                                **columns), target)  # fmt: skip
    elif target is not None:
        whole = torch.from_numpy(value).round().clamp(min=0) if isinstance(target, Counts) else torch.from_numpy(value)
        made = with_target(Rows("table", made.x, made.y * 0, 1, value=whole.float(), **columns), target)
    what = {"what": Calendar("14d", hold="14d")} if calendar else {}
    return build(made, Natural(), split=Split(val=0.0), shift=ft.Shift(**what))


def parts(people: Population) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Pairs of client and row: those that a model may know, and those that are judged."""
    judged = [(c, r) for c in range(3) for r in people.held(c, NOW, "test").tolist()]
    if not people.apart:
        return [(c, r) for c in range(3) for r in people.held(c, NOW, "train").tolist()], judged
    ends = people.plan.edge(NOW.round + 1)
    everything = [(int(people.rows.client[r]), r) for r in range(len(people.rows))]
    return [(c, r) for c, r in everything if float(people.rows.time[r]) < ends], judged


def last_by_hand(people: Population, labels: np.ndarray, usual: Any) -> list[Any]:
    known, judged = parts(people)
    out = []
    for client, row in judged:
        before = [r for c, r in known if c == client and people.rows.time[r] < people.rows.time[row]]
        out.append(labels[max(before, key=lambda r: float(people.rows.time[r]))] if before else usual)
    return out


def found(people: Population, *names: str) -> dict[str, float]:
    clients = people.judged(people.clients, "test", NOW)
    return References(people, names).scores(clients, NOW, "test")


@pytest.mark.parametrize("calendar", [False, True])
def test_references_of_classes_by_hand(calendar):
    people = table(calendar=calendar)
    known, judged = parts(people)
    assert len(judged) > 4
    x, y = people.rows.x.numpy(), people.rows.y.numpy()
    here, there = [row for _, row in known], [row for _, row in judged]
    usual = Counter(y[here].tolist()).most_common(1)[0][0]
    last = np.mean(np.array(last_by_hand(people, y, usual)) == y[there])
    model = HistGradientBoostingClassifier(early_stopping=False, random_state=0).fit(x[here], y[here])
    scores = found(people, "last_label", "tree")
    assert scores["last_label"] == pytest.approx(last)
    assert scores["tree"] == pytest.approx(np.mean(model.predict(x[there]) == y[there]))
    commonest = usual if calendar else Counter(y[there].tolist()).most_common(1)[0][0]  # else that of the judged rows
    assert people.commonest(people.clients, NOW, "test") == pytest.approx(np.mean(y[there] == commonest))


@pytest.mark.parametrize("calendar", [False, True])
def test_references_of_numbers_by_hand(calendar):
    people = table(Number(), calendar=calendar)
    known, judged = parts(people)
    x, value = people.rows.x.numpy(), people.rows.value.numpy().astype(np.float64)
    here, there = [row for _, row in known], [row for _, row in judged]
    mean = people.target.constant[0]

    def skill(answers: Any) -> float:
        return 1 - ((value[there] - answers) ** 2).sum() / ((value[there] - mean) ** 2).sum()

    model = HistGradientBoostingRegressor(early_stopping=False, random_state=0).fit(x[here], value[here])
    scores = found(people, "last_label", "tree")
    assert scores["last_label"] == pytest.approx(skill(last_by_hand(people, value, mean)))
    assert scores["tree"] == pytest.approx(skill(model.predict(x[there])), abs=1e-6)
    assert people.commonest(people.clients, NOW, "test") == skill(mean) == 0.0


@pytest.mark.parametrize("target", [Number(loss="huber"), Quantiles(at=(0.2, 0.8)), Counts(), Labels()])
def test_a_tree_has_the_loss_of_the_target(target):
    people = table(target)
    scores = found(people, "last_label", "tree")
    floor = people.commonest(people.clients, NOW, "test")
    assert floor < scores["tree"] < 1
    assert scores["last_label"] <= 1


@pytest.mark.parametrize("target", [Number(), Number(loss="huber"), Quantiles(at=(0.2, 0.8)), Counts()])
def test_the_usual_number_has_no_skill(target):
    people = table(target)
    value = people.rows.value
    usual = usual_answer(people.target, value).expand(len(value), -1)
    assert people.target.skill_of(usual, value) == pytest.approx(0, abs=1e-6)
    at = people.target.constant
    latest, nobody = torch.tensor([len(value) - 1]), torch.zeros(4).long()  # a row of another client, and later
    last = References(people, ("last_label",))._last(latest, nobody[:1] + 1, value[-1:], torch.arange(4), nobody)
    assert last.tolist() == [pytest.approx(list(at))] * 4


def test_a_tree_is_fitted_again_only_if_rows_change():
    people = table()
    references = References(people, ("tree",))
    first = references.scores(people.clients, NOW, "test")
    kept = references._trees(NOW)
    assert references.scores(people.clients, Moment(7, 10, 7.0), "test") == first
    assert references._trees(Moment(7, 10, 7.0)) is kept
    # Where rows arrive the tree of 100 rounds is fitted anew in every fifth.
    arriving = References(table(calendar=True), ("tree",))
    numbers = [id(arriving._trees(Moment(number, 100, 0.0))) for number in range(10)]
    assert len(set(numbers[:5])) == len(set(numbers[5:])) == 1


def test_where_rows_arrive_a_tree_is_of_the_latest(monkeypatch):
    """Of all rows that are known the last two are of class 1."""
    monkeypatch.setattr("fedtide.evaluate.references.MOST", 2)
    people = table(calendar=True)
    y = torch.zeros_like(people.rows.y)
    y[sorted(row for _, row in parts(people)[0])[-2:]] = 1
    people = replace(people, rows=replace(people.rows, y=y))
    assert predict(people.target, References(people, ("tree",))._trees(NOW), people.rows.x[:3]).tolist() == [1] * 3


def test_labels_that_are_all_the_same_need_no_tree():
    x = torch.randn(30, 2)
    people = table()
    trees = fit_trees(people.target, x, torch.ones(30, dtype=torch.int64))
    assert predict(people.target, trees, x[:4]).tolist() == [1] * 4


def test_there_is_no_last_label_without_times():
    people = ft.population(torch.randn(60, 2), torch.arange(60) % 2, client=torch.arange(60) % 3)
    assert set(found(people, "last_label", "tree")) == {"tree"}


def test_sequences_have_no_such_references():
    people = build(Rows("text", torch.zeros(20, 4), torch.zeros(20, 4, dtype=torch.int64), 2), IID(clients=2))
    with pytest.raises(FedtideError, match="references: found 'tree', allowed: none, as rows are sequences"):
        References(people, ("tree",))


PROX = {**A, "name": "prox", "algorithm": "fedprox"}


def test_one_method_records_references_and_the_first_table_has_them(tmp_path):
    root = finished(tmp_path / "run", study(A, PROX, rounds=2, eval_every=1, seeds=[0], references=["tree"]))
    entries = [lines_of(root / name / "0")[-1]["scores"]["train_clients"] for name in ("a", "prox")]
    assert ["tree" in entry.get("baselines", {}) for entry in entries] == [True, False]
    read = read_study(root)
    rows = {row[0]: row[1] for row in brief_table(read.summaries[0]).rows}
    assert [*rows][2:] == [
        "always answering the commonest class (no training)", "a boosted tree (pooled rows, no federation)",
    ]  # fmt: skip
    view = read.summaries[0].view
    late = [line["scores"][view]["baselines"]["tree"] for line in lines_of(root / "a" / "0")][-1:]
    assert rows["a boosted tree (pooled rows, no federation)"] == f"{100 * np.mean(late):.1f} %"
    assert {row["algorithm"] for row in measures(read)} == {"fedavg", "fedprox", "tree"}


def test_without_scikit_learn_the_row_says_so_and_the_rest_goes_on(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    root = finished(tmp_path / "run", study(A, PROX, rounds=1, seeds=[0], references=["tree"]))
    row = brief_table(read_study(root).summaries[0]).rows[-1]
    assert row[:2] == [f"a boosted tree ({MISSING['tree']})", "-"]
    assert "fedtide[trees]" in row[0]
