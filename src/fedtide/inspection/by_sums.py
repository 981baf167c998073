"""The eight questions between clients whose rows nobody sees: by sums over clients alone. Our own.

Nine rounds ask one question each, of all clients that can be reached. Each question needs the sums before it:

| question | sums |
| --- | --- |
| first | features and their squares; rows by label, and by week |
| second | products of features by label; rows by day (or hour) and label |
| tables | labels and cells of features by slot and by period, also shuffled; how far labels are from the mean |
| far | how far cells and hours are from the mean; clients by bin along the main direction of labels, and of features |
| places | clients by bin between groups |
| cells | products of features, and features by label, of the clients of each of two to four cells |
| own | errors of one model, of models of groups of cells, and of models of groups that features tell |
| periods | the same products by period, of what models of groups leave over; groups by slot and by period |
| next | errors of models of periods, and of models of the past |

A distance of a client from all others needs only the shares of all, which the client is sent. So the client adds the
distance itself, and that of rows that it draws from these shares: the same data shuffled. Kitagawa's decomposition
needs two tables, of rows and of rows as if each client had its mix of all times. One key turns cycles at all clients.

Groups are looked for along one direction. For each label it is the one in which mean features of its rows differ most
between clients. Labels at the same clients agree on their signs. The histogram of clients along it is cut into two to
four cells of `fewest` clients or more. Only sums of whole cells are opened, so no arithmetic with them tells of fewer.

A model of a group is compared with one model on rows to which neither was fitted, row by row. Labels that differ make
models of groups better, too. How much follows from products of features by label, so no rows need to be shuffled.

Choices:
    - ours: cells of features come of rows that the server draws from normal distributions, one for each label.
    - ours: only groups show that the same input has other labels. A guess of the client needs models of single clients.
    - ours: whether a row tells its client is not looked at, for the same reason.
    - ours: whether the same input changes its label with the hour is not looked at; whether with the periods is.
    - ours: clients count alike when they are cut into two heaps, because their rows are not known.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtide.clusters.clusterer import draw_seeds, kmeans_from
from fedtide.core.base import (
    Algorithm,
    Answer,
    Facts,
    Fleet,
    Memory,
    Moment,
    Prediction,
    Shard,
    Slotted,
    Sum,
    Traits,
    Weighted,
)
from fedtide.core.rng import Rng
from fedtide.fields.types import Count
from fedtide.inspection import questions, row_sums, shares
from fedtide.inspection.answers import LEVELS, Answers, Finding, Question, answers_from
from fedtide.inspection.linear import (
    FIRM,
    RIDGE,
    Ahead,
    Explained,
    Moments,
    ahead_of,
    choose_groups,
    discriminant,
    models_ahead,
    ridge,
)
from fedtide.inspection.questions import (
    CELLS,
    CYCLES,
    DISTANCE,
    DRAWS,
    LABELS,
    LEAST,
    Changes,
    Clients,
    Compared,
    Cycle,
    Drift,
    Sample,
    distinct_slots,
    join_units,
)
from fedtide.inspection.row_sums import FIRST_WEEK, Terms, unpack
from fedtide.inspection.shares import Against
from fedtide.inspection.table import Table
from fedtide.learn.task import Task, classes_of

STAGES = "first", "second", "tables", "far", "places", "cells", "own", "periods", "next"
"""The questions, one a round."""
MOST_CELLS = 4
"""Cells of clients along the direction of gradients, at most."""
DRAWN = 3_000
"""Rows that the server draws to find cells of features."""

Opened = Mapping[str, Mapping[str, np.ndarray]]
"""Opened sums: by question, then by name; "who" is the number of clients in a sum."""


@dataclass(frozen=True)
class State:
    """The sums that are opened so far, by question.

    stage: number of questions that were asked. sums: by question and name (float64). classes, fewest, seed: as of
    `inspection`.
    """

    classes: int
    fewest: int
    seed: int
    stage: int = 0
    sums: Mapping[str, Terms] = field(default_factory=dict)


def inspection(task: Task, fewest: Count = 3, seed: Count = 1) -> Algorithm[State]:
    """Inspect the rows of clients by sums alone, one question a round; no model is trained.

    Args:
        task: whose number of classes counts; nothing is trained.
        fewest: number of clients below which no sum is opened, and none is asked for.
        seed: of what all clients have to draw alike.
    """
    classes = classes_of(task)

    def init(fleet: Fleet, rng: Rng) -> State:
        return State(classes, fewest, seed)

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        if state.stage >= len(STAGES):
            return state, {}
        name, sums = STAGES[state.stage], dict(state.sums)
        asked = reading_of(state).ask(name)
        if asked is not None:
            reply = fleet.ask(name, fleet.reachable, asked)
            if opened := opened_sums(reply.total, fewest):
                sums[name] = opened
        after = replace(state, stage=state.stage + 1, sums=sums)
        # What cannot be asked about next cannot have been answered: the round must fail before it is kept.
        reading_of(after).check()
        facts: dict[str, Any] = {"question": state.stage}
        if after.stage == len(STAGES):
            facts |= {one.question: LEVELS.index(one.level) for one in answers(after)}
        return after, facts

    def predict(payload: Any, memories: Any, x: Tensor, owner: Tensor) -> Prediction:
        return Prediction(torch.full((len(x), classes), -float(np.log(classes))))

    works = {
        "first": _summed(row_sums.first_terms),
        "second": _summed(row_sums.second_terms),
        "tables": _summed(row_sums.table_terms),
        "far": _summed(row_sums.far_terms),
        "places": _summed(row_sums.place_terms),
        "cells": _in_cell,
        "own": _summed(row_sums.judge_terms),
        "periods": _summed(row_sums.period_terms),
        "next": _summed(row_sums.judge_terms),
    }
    why = "its sums have no bounds, so noise cannot hide a client in them, as in those of 'bounded-inspection'"
    traits = Traits(models="none", fewest=fewest, unprivate=why)
    return Algorithm("inspection", init, works, round, lambda state, clients: ({}, None), predict, traits=traits)


def _summed(terms: Any) -> Any:
    def work(payload: Any, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        return Answer({"sums": Weighted(terms(shard, payload, rng))}) if len(shard) else None

    return work


def _in_cell(payload: Any, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
    if not len(shard) or (placed := row_sums.cell_terms(shard, payload, rng)) is None:
        return None
    return Answer({"cells": Slotted({placed[0]: Weighted(placed[1])}, MOST_CELLS)})


def opened_sums(total: Any, fewest: int) -> Terms:
    """Return the sums of an answer by name, of cells one below the other; empty if they are of too few clients."""
    if total is None:
        return {}
    if "sums" in total:
        one: Sum = total["sums"]
        return {} if one.weight < fewest else {**one.value, "who": torch.tensor(one.weight, dtype=torch.float64)}
    cells = [cell if cell is not None and cell.weight >= fewest else None for cell in total["cells"]]
    whole = next((cell for cell in cells if cell is not None), None)
    if whole is None:
        return {}
    stacked = {
        name: torch.stack([torch.zeros_like(like) if cell is None else cell.value[name] for cell in cells])
        for name, like in whole.value.items()
    }
    counts = [0.0 if cell is None else cell.weight for cell in cells]
    return {**stacked, "who": torch.tensor(counts, dtype=torch.float64)}


def reading_of(state: State) -> "Reading":
    """Return the reading of the opened sums."""
    arrays = {question: {name: one.numpy() for name, one in terms.items()} for question, terms in state.sums.items()}
    return Reading(arrays, state.classes, state.fewest, state.seed)


def answers(state: State, name: str = "clients") -> Answers:
    """Return the answers to the eight questions, from opened sums.

    Args:
        state: the sums.
        name: of the clients together, for people.
    """
    reading = reading_of(state)
    who = int(reading.sums["first"]["who"]) if "first" in reading.sums else 0
    line = f"{name}: sums of {who} clients; no sum of fewer than {state.fewest} was opened"
    whole = answers_from(
        Table(name, np.zeros(0, np.int64), said=(line,)), reading.sample, reading.clients, reading.cycles, reading.drift
    )
    if reading.clients is None or reading.clients.compared is not None:
        return whole
    least, level = max(state.fewest, 2), LEVELS[1]
    why = "rows with the same label look alike at all clients"
    if reading.members < 2 * least:
        level = "not asked"
        why = f"sums of groups are of {least} clients or more, and fewer than {2 * least} clients have ten rows"
    changed: dict[Question, Finding] = {"meaning": Finding("meaning", level, why)}
    if not reading.clients.groups[0]:
        changed["groups"] = Finding("groups", level, why)
    return replace(whole, answers={**whole.answers, **changed})


# -- what sums say -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """Sums of members of which models are fitted: cells of clients, or periods.

    Args:
        fit: sums that models are fitted to; choose, judge: of the other rows.
        by_label: (members, labels, d) sums of z of the rows of `fit`.
        squares: (labels, d, d) mean z'z of each label, of all clients.
        products: (labels, d, outputs) mean z't of each label.
    """

    fit: Moments
    choose: Moments
    judge: Moments
    by_label: np.ndarray
    squares: np.ndarray
    products: np.ndarray

    def models(self, rng: Rng) -> tuple[dict[str, Any], np.ndarray]:
        """Return all models as clients are sent them, and each member's group.

        Those of chance are of members that differ by their labels alone.
        """
        one = ridge(self.fit.a.sum(0), self.fit.b.sum(0))
        counts = () if len(self.fit.t) > 1 else (1,)
        count, group, weights = choose_groups(self.fit, self.choose, one, rng, counts)
        kinds = np.zeros((count, *self.by_label.shape[1:]))
        np.add.at(kinds, group, self.by_label)
        rows = kinds[..., -1]  # (groups, labels)
        means = self.squares[:, :-1, -1]  # mean features (labels, d - 1) of each label
        chance_a, chance_b = (np.tensordot(rows, mean, 1) for mean in (self.squares, self.products))
        chance_one = ridge(chance_a.sum(0), chance_b.sum(0))
        models = {
            "one": one,
            "weights": weights,
            **_rule(kinds[..., :-1], rows, self.fit.a.sum(0)[:-1, :-1], ""),
            "chance_one": chance_one,
            "chance_weights": ridge(chance_a, chance_b, RIDGE, chance_one),
            **_rule(rows[..., None] * means, rows, chance_a.sum(0)[:-1, :-1], "chance_"),
        }
        stacked = {
            name: [torch.from_numpy(one) for one in value] if name.endswith("weights") else torch.from_numpy(value)
            for name, value in models.items()
        }
        return stacked, group

    def compared(self, terms: Mapping[str, np.ndarray], group: np.ndarray, members: np.ndarray) -> Compared:
        """Return the comparison that errors on judging rows tell.

        Args:
            terms: sums of `compare_terms`.
            group: group of each member of sums.
            members: group of each client or period, for people.
        """
        one, mine, guess, off_one, off_guess, squares, rows = terms["errors"]
        mean = self.fit.b[:, -1].sum(0) / max(self.fit.rows.sum(), 1)
        whole = max(squares - 2 * mean @ terms["targets"] + rows * (mean**2).sum(), 1e-12)
        by_label, owned = terms["chance"], terms["own"]
        per_row = by_label / np.maximum(owned.sum(0), 1)[:, None]
        by_chance = float((owned.T * per_row[:, 2:]).sum())
        chance_one, chance_guess = by_label[:, :2].sum(0)

        def against(others: float, off: float, chance: float) -> Against:
            spread = np.sqrt(max(off - (others - mine) ** 2 / max(rows, 1), 0.0))
            return Against(float((others - mine) / whole), float((chance - by_chance) / whole), float(spread / whole))

        gain, meaning = against(one, off_one, chance_one), against(guess, off_guess, chance_guess)
        shared = {"one": one, "single": mine, "grouped": mine, "guessed_single": guess, "guessed": guess}
        explained: dict[str, Any] = {name: float(1 - error / whole) for name, error in shared.items()}
        count = int(group.max()) + 1
        models = Explained(**explained, recognized=np.nan, count=count, group=members, weights=np.zeros(0))
        return Compared(models, gain, gain, meaning, None)


def _rule(sums: np.ndarray, rows: np.ndarray, squares: np.ndarray, prefix: str) -> dict[str, np.ndarray]:
    """Return the linear rule by which features tell a group: of sums (groups, labels, d), rows (groups, labels)."""
    flat, counts = sums.reshape(-1, sums.shape[-1]), rows.reshape(-1)
    whole = max(counts.sum(), 1)
    pooled = flat.sum(0) / whole
    shrunk = (counts / (counts + FIRM))[:, None]
    mean = pooled + (flat / np.maximum(counts, 1)[:, None] - pooled) * shrunk
    cross = flat.T @ mean
    inside = (squares - cross - cross.T + (mean * counts[:, None]).T @ mean) / whole
    rule, constant = discriminant(mean, inside, counts)
    return {f"{prefix}rule": rule, f"{prefix}constant": constant}


@dataclass(frozen=True)
class Reading:
    """Readings of opened sums: the next question, and the numbers of all answers.

    Args:
        sums: opened so far.
        classes: number of classes of the study.
        fewest: number of clients below which no sum counts.
        seed: of what clients draw alike.
    """

    sums: Opened
    classes: int
    fewest: int
    seed: int

    def ask(self, question: str) -> dict[str, Any] | None:
        """Return the payload of a question; None if there is nothing to ask, or too few answered."""
        if question == "first":
            return {"seed": self.seed, "classes": self.classes}
        if "first" not in self.sums or (question != "second" and "second" not in self.sums):
            return None
        if question == "second":
            return self._frame
        if question == "tables":
            return self._frame | self._tables
        if "tables" not in self.sums:
            return None
        if question == "far":
            return self._frame | self._tables | self._far
        if "far" not in self.sums:
            return None
        base = self._frame | self._tables | self._far
        base |= {"ways": base["ways"] | {"models": torch.from_numpy(self._model_way)}}
        if question == "places":
            return base
        if question == "cells":
            return base | self._model_cells if self._cuts else None
        if question == "own":
            return (
                base | self._model_cells | {"compared": {"clients": self._cell_models[0]}} if self._has_cells else None
            )
        if not self._timed:
            return None
        base |= self._crowd
        if question == "periods":
            return base
        return base | self._next if "periods" in self.sums else None

    # -- rows, labels and times ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise ValueError if labels are counted as rows cannot be, because every further question counts on them."""
        labels = self.sums["first"]["labels"] if "first" in self.sums else np.ones(1)
        if not (labels >= 0).all() or not 0 < labels.sum() < np.inf:
            raise ValueError(
                f"found counts of labels from {labels.min():g} to {labels.max():g}, allowed: counts of rows"
            )

    @cached_property
    def _place(self) -> np.ndarray:
        """Number of each class among the labels that are told apart; of very many the rare ones are one."""
        rows = self.sums["first"]["labels"]
        if self.classes <= LABELS:
            return np.arange(self.classes)
        place = np.full(self.classes, LABELS - 1)
        place[np.sort(np.argsort(-rows, kind="stable")[: LABELS - 1])] = np.arange(LABELS - 1)
        return place

    @cached_property
    def _labels(self) -> int:
        return int(self._place.max()) + 1

    @cached_property
    def _shares(self) -> np.ndarray:
        counts = np.bincount(self._place, self.sums["first"]["labels"], self._labels)
        return counts / counts.sum()

    @cached_property
    def _span(self) -> tuple[float, float, int]:
        """The time at which units of time begin, their length in seconds, and their number."""
        present = np.flatnonzero(self.sums["first"]["weeks"])
        if not len(present):
            return 0.0, 1.0, 0
        weeks, begin = int(np.ptp(present)) + 1, float(present[0] + FIRST_WEEK) * CYCLES["week"][0]
        return (begin, 3600.0, 168 * weeks) if weeks <= 2 else (begin, CYCLES["day"][0], 7 * weeks)

    @cached_property
    def _frame(self) -> dict[str, Any]:
        first = self.sums["first"]
        rows = first["labels"].sum()
        mean = first["x"] / rows
        std = np.sqrt(np.maximum(first["squares"] / rows - mean**2, 0.0))
        begin, unit, units = self._span
        return {
            "seed": self.seed, "mean": torch.from_numpy(mean), "std": torch.from_numpy(std),
            "place": torch.from_numpy(self._place), "shares": torch.from_numpy(self._shares),
            "begin": begin, "unit": unit, "units": units,
        }  # fmt: skip

    @cached_property
    def _units(self) -> np.ndarray:
        """Numbers of the units of time that have rows."""
        return np.flatnonzero(self.sums["second"]["units"].sum(1)) if self._span[2] else np.zeros(0, np.int64)

    @cached_property
    def _seconds(self) -> np.ndarray:
        """Beginning of each unit with rows."""
        return self._span[0] + self._units * self._span[1]

    @cached_property
    def _timed(self) -> bool:
        return len(self._units) > 1

    @cached_property
    def _block(self) -> np.ndarray:
        """Block of each unit with rows: of about equally many rows, of whole weeks or days if there are some."""
        unit = questions.whole_cycles(self._seconds)
        if unit is None:
            unit = np.arange(len(self._units))
        _, unit = np.unique(unit, return_inverse=True)
        rows = np.bincount(unit, self.sums["second"]["units"][self._units].sum(1))
        return join_units(rows)[unit]

    @cached_property
    def _slots(self) -> dict[str, int]:
        """Number of slots of each cycle that rows span twice or more."""
        if not self._timed:
            return {}
        numbers, rows = dict[str, int](), self.sums["first"]["labels"].sum()
        span = float(np.ptp(self._seconds)) + self._span[1]
        hours = np.flatnonzero(self.sums["second"]["hours"])
        for name, (length, many, few) in CYCLES.items():
            slots = many if rows >= 200 * many else few
            if name == "day":
                slots = distinct_slots(hours * slots // 24, slots)
                slot = hours * slots // 24
            else:
                slot = questions.local_slots(self._seconds, length, slots)[0]
            if span >= 2 * length and len(np.unique(slot)) >= 3:
                numbers[name] = slots
        return numbers

    # -- features and the common model ---------------------------------------------------------------------------------

    @cached_property
    def _squares(self) -> np.ndarray:
        """Mean z'z of each label (labels, d, d)."""
        whole = unpack(self.sums["second"]["by_label"])
        return whole / np.maximum(whole[:, -1, -1], 1)[:, None, None]

    @cached_property
    def _hot(self) -> np.ndarray:
        """Centered one-hot labels (labels, labels)."""
        return np.eye(self._labels) - self._shares

    def _moments(self, squares: np.ndarray, by_label: np.ndarray) -> Moments:
        """Return sums of members whose targets are labels: of packed z'z, and z by label (members, labels, d)."""
        products = np.einsum("mld,lo->mdo", by_label, self._hot)
        return Moments(unpack(squares), products, by_label[..., -1] @ (self._hot**2).sum(1))

    @cached_property
    def _one(self) -> np.ndarray:
        second = self.sums["second"]
        fit = self._moments(second["fit"][None], second["fit_by_label"][None])
        return ridge(fit.a[0], fit.b[0])

    @cached_property
    def _centers(self) -> np.ndarray:
        """Centers of the cells of features, by k-means of rows drawn from a normal distribution of each label."""
        width = len(self.sums["first"]["x"])
        draw, rng = Rng(self.seed).at("drawn").numpy(), Rng(self.seed).at("cells")
        rows = []
        for squares, count in zip(self._squares, draw.multinomial(DRAWN, self._shares), strict=True):
            mean = squares[:width, -1]
            spread = squares[:width, :width] - np.outer(mean, mean)
            values, vectors = np.linalg.eigh(spread)
            rows.append(mean + draw.normal(size=(count, width)) * np.sqrt(np.maximum(values, 0)) @ vectors.T)
        few = np.concatenate(rows)
        return kmeans_from(few, draw_seeds(few, CELLS, rng), iterations=12)[0]

    @cached_property
    def _tables(self) -> dict[str, Any]:
        asked: dict[str, Any] = {
            "label_means": torch.from_numpy(self._squares[:, -1]),
            "one": torch.from_numpy(self._one),
            "centers": torch.from_numpy(self._centers),
            "slots": self._slots,
        }
        if self._timed:
            block = np.zeros(self._span[2], np.int64)
            block[self._units] = self._block
            laws = np.zeros((self._labels, int(self._block.max()) + 1))
            np.add.at(laws.T, self._block, self.sums["second"]["units"][self._units])
            asked |= {"block": torch.from_numpy(block), "block_laws": torch.from_numpy(laws)}
        return asked

    # -- clients -------------------------------------------------------------------------------------------------------

    @cached_property
    def _labels_apart(self) -> Against:
        tables = self.sums["tables"]
        far = tables["far_labels"] / tables["looks"].sum()
        return Against.of(far[0], far[1:])

    @cached_property
    def _looks_apart(self) -> Against:
        far = self.sums["far"]["far_cells"] / self.sums["tables"]["looks"].sum()
        return Against.of(far[0], far[1:])

    @cached_property
    def _alpha(self) -> float:
        """Alpha of the Dirichlet partition whose clients' labels differ as much (`shares.dirichlet_alpha`)."""
        ratio, heavy, several = self.sums["tables"]["alpha"]
        labels = int((self._shares > 0).sum())
        if several < 3 or labels < 2:
            return float("nan")
        r = ratio / heavy
        return float(max(1 - r, 0.0) / r / labels) if r > 0 else float("inf")

    def _way(self, name: str) -> np.ndarray:
        """Return place and spread of clients along the direction in which they differ most, and the direction."""
        terms = self.sums["tables"][f"{name}_way"]
        size = int((np.sqrt(8 * len(terms) + 1) - 3) / 2)
        mean = terms[1 : size + 1] / max(terms[0], 1e-12)
        spread = unpack(terms[size + 1 :]) / max(terms[0], 1e-12) - np.outer(mean, mean)
        values, vectors = np.linalg.eigh(spread)
        direction = vectors[:, -1]
        return np.concatenate([[mean @ direction, np.sqrt(max(values[-1], 0.0))], direction])

    @cached_property
    def _far(self) -> dict[str, Any]:
        looks = self.sums["tables"]["looks"]
        laws = (looks + 1e-9) / (looks + 1e-9).sum(1, keepdims=True)
        counts = {f"{name}_shares": self.sums["tables"][f"{name}_labels"][0, 0].sum(1) for name in self._slots}
        return {
            "cell_laws": torch.from_numpy(laws),
            "cell_shares": torch.from_numpy(looks.sum(0) / looks.sum()),
            "ways": {name: torch.from_numpy(self._way(name)) for name in ("labels", "features")},
            "label_ways": torch.from_numpy(self._label_ways),
            **{name: torch.from_numpy(count / count.sum()) for name, count in counts.items()},
        }

    @cached_property
    def _label_ways(self) -> np.ndarray:
        """Direction (labels, d - 1) in which looks of rows of each label differ most between clients, by its spread."""
        inside = np.einsum("l,lij->ij", self._shares, self._squares[:, :-1, :-1])
        means = self._squares[:, :-1, -1]
        inside -= np.einsum("l,li,lj->ij", self._shares, means, means)
        values, vectors = np.linalg.eigh(inside)
        white = vectors / np.sqrt(np.maximum(values, 0.01 * max(values.mean(), 1e-9)))
        ways = []
        for terms in self.sums["tables"]["looks_of_labels"]:
            size = len(means[0])
            spread = white.T @ unpack(terms[1 + size :]) @ white / max(terms[0], 1e-12)
            most, directions = np.linalg.eigh(spread)
            ways.append(white @ directions[:, -1] / np.sqrt(max(most[-1], 1e-12)))
        return np.stack(ways)

    @cached_property
    def _model_way(self) -> np.ndarray:
        """Direction between groups: of each label the direction of its looks, with the sign that labels share."""
        pairs = unpack(self.sums["far"]["label_pairs"])
        np.fill_diagonal(pairs, 0.0)  # a label alone tells no sign
        sign = np.where(np.linalg.eigh(pairs)[1][:, -1] < 0, -1.0, 1.0)
        return np.concatenate([[0.0, 1.0], (sign[:, None] * self._label_ways).reshape(-1)])

    @cached_property
    def members(self) -> int:
        """Number of clients with rows enough to be looked at by themselves."""
        return int(self.sums["tables"]["members"][0])

    @cached_property
    def _cuts(self) -> list[int]:
        """Bins at which the direction of gradients is cut into cells of enough clients."""
        return cut_bins(self.sums["places"]["places"], max(self.fewest, 2), MOST_CELLS) if "places" in self.sums else []

    @cached_property
    def _model_cells(self) -> dict[str, Any]:
        cuts = torch.tensor(self._cuts, dtype=torch.int64)
        groups = torch.arange(len(self._cuts) + 1)
        if self._has_cells:
            groups = torch.from_numpy(self._cell_models[1])
        return {"cuts": cuts, "cells_way": "models", "cells_cuts": cuts, "cells_groups": groups}

    @property
    def _has_cells(self) -> bool:
        return "cells" in self.sums and int((self.sums["cells"]["who"] > 0).sum()) > 1

    @cached_property
    def _cell_problem(self) -> Problem:
        cells, many = self.sums["cells"], len(self._cuts) + 1
        squares, by_label = cells["squares"][:many], cells["by_label"][:many]
        fit, choose, judge = (self._moments(squares[:, part], by_label[:, part]) for part in range(3))
        products = np.einsum("ld,lo->ldo", self._squares[:, -1], self._hot)
        return Problem(fit, choose, judge, by_label[:, 0], self._squares, products)

    @cached_property
    def _cell_models(self) -> tuple[dict[str, Any], np.ndarray]:
        return self._cell_problem.models(Rng(self.seed).at("clients"))

    def _heaps(self, name: str, draws: np.ndarray) -> tuple[float, np.ndarray, int]:
        """Return how far clients fall into two heaps, the upper heap, and the bin at which they are cut.

        0 if one of the draws (draws, clients) without heaps falls apart as well, or a heap has too few clients.
        """
        counts = self.sums["far"][f"{name}_places"]
        cuts = cut_bins(counts, max(self.fewest, 2), 2)
        if not cuts:
            return 0.0, np.zeros(self.members, dtype=bool), 0
        share = share_between(counts, cuts[0])
        worst = max(shares.two_heaps(draw, np.ones(len(draw)))[0] for draw in draws)
        upper = np.repeat([False, True], [round(counts[: cuts[0]].sum()), round(counts[cuts[0] :].sum())])
        return (share if share > worst else 0.0), upper, cuts[0]

    @cached_property
    def _all_heaps(self) -> dict[str, tuple[float, np.ndarray, int]]:
        heaps: dict[str, tuple[float, np.ndarray, int]] = {}
        if self.members < LEAST:
            return heaps
        rng = Rng(self.seed).at("heaps")
        if self._labels_apart.distance >= DISTANCE[0] and np.isfinite(self._alpha) and self._alpha > 0:
            heaps["labels"] = self._heaps("labels", self._dealt(rng))
        if self._looks_apart.distance >= DISTANCE[0]:
            heaps["features"] = self._heaps("features", rng.numpy().normal(size=(DRAWS, self.members)))
        return heaps

    def _dealt(self, rng: Rng) -> np.ndarray:
        """Return places (draws, clients) along the main direction of clients that a Dirichlet partition deals out."""
        members, rows = self.sums["tables"]["members"]
        draw, seen = rng.at("dealt").numpy(), self._shares > 0
        alpha = np.maximum(self._alpha * seen.sum() * self._shares[seen], 1e-3)
        mixes = draw.dirichlet(alpha, (DRAWS, self.members))
        dealt = draw.multinomial(int(rows / members), mixes) / int(rows / members)
        centered = dealt - dealt.mean(1, keepdims=True)
        _, vectors = np.linalg.eigh(np.einsum("mcl,mck->mlk", centered, centered))
        return np.einsum("mcl,ml->mc", centered, vectors[:, :, -1])

    @cached_property
    def clients(self) -> Clients | None:
        """The numbers of the first four questions; None if too few clients answered."""
        if "far" not in self.sums:
            return None
        compared = None
        if "own" in self.sums:
            group = self._cell_models[1]
            members = np.repeat(group, self.sums["cells"]["who"][: len(group)].astype(np.int64))
            terms = {name.removeprefix("clients_"): value for name, value in self.sums["own"].items()}
            compared = self._cell_problem.compared(terms, group, members)
        heaps = {name: heap[:2] for name, heap in self._all_heaps.items()}
        members = np.arange(self.members)
        return Clients(self._labels_apart, self._alpha, self._looks_apart, compared, heaps, members)

    @cached_property
    def sample(self) -> Sample:
        """A stand-in of the rows, for words: it has the number of clients, and the times of units of time."""
        who = int(self.sums["first"]["who"]) if "first" in self.sums else 0
        none, rng = np.zeros(0, np.int64), Rng(self.seed)
        seconds = None if "second" not in self.sums or not len(self._units) else self._seconds
        names = tuple(f"client {number}" for number in range(who))
        return Sample(none, (), np.zeros((0, 1)), np.zeros((0, 1)), None, none, names, seconds, rng)

    # -- times ---------------------------------------------------------------------------------------------------------

    @cached_property
    def _groups(self) -> tuple[str, list[int], np.ndarray]:
        """Name of the things that groups differ in ("" for none), bins that cut clients, and each part's group."""
        what = "" if self.clients is None else self.clients.groups[0]
        if what == "models":
            return what, self._cuts, self._cell_models[1]
        if what:
            return what, [self._all_heaps[what][2]], np.arange(2)
        return "", [], np.zeros(1, np.int64)

    @cached_property
    def _crowd(self) -> dict[str, Any]:
        what, cuts, groups = self._groups
        weights = self._cell_models[0]["weights"] if what == "models" else None
        return {
            "crowd_way": what, "crowd_cuts": torch.tensor(cuts, dtype=torch.int64),
            "crowd_groups": torch.from_numpy(groups), "groups": int(groups.max()) + 1, "weights": weights,
        }  # fmt: skip

    def _changes(self, name: str, alike: np.ndarray | None = None, meaning: float = 0.0) -> Changes:
        tables = self.sums["tables"]
        others, same = split_change(tables[f"{name}_labels"])
        look_others, look_same = split_change(tables[f"{name}_cells"])
        crowd = None
        if self._groups[0] and "periods" in self.sums:
            far = [shares.total_variation(one) for one in self.sums["periods"][f"{name}_crowd"]]
            crowd = Against.of(far[0], far[1:])
        return Changes(others, same, look_others, look_same, crowd, meaning, alike)

    @cached_property
    def cycles(self) -> dict[str, Cycle]:
        """The changes over days, weeks and years."""
        cycles: dict[str, Cycle] = {}
        if "far" not in self.sums:
            return cycles
        for name, slots in self._slots.items():
            counts = self.sums["tables"][f"{name}_labels"][:, 0].sum(2)
            uneven = shares.variation(shares.normalize(counts), np.array(1 / slots))
            far = self.sums["far"][f"{name}_habits"] / counts[0].sum()
            slot = np.repeat(np.arange(slots), np.round(counts[0]).astype(np.int64))
            activity, habits = Against.of(uneven[0], uneven[1:]), Against.of(far[0], far[1:])
            cycles[name] = Cycle(name, slot, slots, activity, habits, self._changes(name))
        return cycles

    @cached_property
    def _block_problem(self) -> Problem:
        periods, blocks = self.sums["periods"], int(self._block.max()) + 1
        squares, products, left = (periods[name] for name in ("squares", "products", "left"))
        ranges = [slice(part * blocks, (part + 1) * blocks) for part in range(3)]
        fit, choose, judge = (Moments(unpack(squares[part]), products[part], left[part]) for part in ranges)
        rows = np.maximum(unpack(self.sums["second"]["by_label"])[:, -1, -1], 1)
        means = periods["left_by_label"] / rows[:, None, None]
        return Problem(fit, choose, judge, periods["fit_by_label"], self._squares, means)

    @cached_property
    def _block_models(self) -> tuple[dict[str, Any], np.ndarray]:
        return self._block_problem.models(Rng(self.seed).at("blocks"))

    @cached_property
    def _half_moments(self) -> tuple[Moments, Moments]:
        periods = self.sums["periods"]
        fitted, judged = zip(*(np.split(periods[name], 2) for name in ("half_squares", "half_by_label")), strict=True)
        return self._moments(*fitted), self._moments(*judged)

    @cached_property
    def _next(self) -> dict[str, Any]:
        models, alike = self._block_models
        ahead = [torch.from_numpy(model) for model in models_ahead(*self._half_moments)[1]]
        return {
            "compared": {"blocks": models}, "alike": torch.from_numpy(alike), "ahead": ahead,
            "cells_way": "", "cells_cuts": torch.zeros(0, dtype=torch.int64), "cells_groups": torch.zeros(1),
        }  # fmt: skip

    def _judged_ahead(self) -> tuple[Ahead, dict[str, Against]]:
        """Return how models of the past predict, and their gains with the spread of judging rows."""
        seen, (rows, *off) = ahead_of(*self._half_moments), self.sums["next"]["ahead"]
        spread = [np.sqrt(max(off[2 + at] - off[at] ** 2 / max(rows, 1), 0.0)) / seen.whole for at in range(2)]
        return seen, {
            "recent": Against(seen.recency, 0.0, float(spread[0])),
            "itself": Against(seen.cost, 0.0, float(spread[1])),
        }

    @cached_property
    def drift(self) -> Drift | None:
        """Differences between periods; None without times."""
        if "tables" not in self.sums or not self._timed:
            return None
        tables = self.sums["tables"]
        far = [shares.total_variation(one) for one in tables["block_labels"][:, 0]]
        labels = Against.of(far[0], far[1:])
        far = [shares.total_variation(one) for one in tables["block_looks"]]
        looks = Against.of(far[0], far[1:])
        alike, meaning = None, 0.0
        ahead: tuple[Ahead | None, Mapping[str, Against]] = None, {}
        if "next" in self.sums:
            alike = self._block_models[1]
            terms = {name.removeprefix("blocks_"): value for name, value in self.sums["next"].items()}
            compared = self._block_problem.compared(terms, alike, alike)
            meaning = self._left_share * compared.beyond_features
            ahead = self._judged_ahead()
        mixes = shares.normalize(tables["block_labels"][0, 0]), shares.normalize(tables["block_looks"][0])
        kinds = list(zip((labels, looks), mixes, strict=True))
        return Drift.of(self._block, kinds, self._changes("block", alike, meaning), ahead)

    @property
    def _left_share(self) -> float:
        """Share of the variance of targets that models of groups leave over."""
        rows = self.sums["first"]["labels"].sum()
        whole = rows * float(self._shares @ (self._hot**2).sum(1))
        return float(self.sums["periods"]["left"].sum() / max(whole, 1e-12))


def split_change(tables: np.ndarray) -> tuple[Against, Against]:
    """Return the changes of a mix by other clients, and by the same ones, from tables (1 + shuffles, 2, slots, kinds).

    The numbers are those of `shares.change`.
    """
    pairs = []
    for counts, composed in tables:
        pairs.append(shares.changes_of(counts, shares.normalize(composed)) @ (counts.sum(1) / counts.sum()))
    others, same = np.array(pairs).T
    return Against.of(others[0], others[1:]), Against.of(same[0], same[1:])


def cut_bins(counts: np.ndarray, least: int, most: int) -> list[int]:
    """Cut a histogram of clients into at most so many parts (2 or 4), each time into the two best heaps.

    A part has `least` clients or more.

    >>> cut_bins(np.array([3.0, 0.0, 0.0, 3.0, 1.0]), 3, 2)
    [1]
    >>> cut_bins(np.array([3.0, 0.0, 2.0]), 3, 4)
    []
    """
    bins = np.arange(len(counts))
    able = [cut for cut in bins[1:] if counts[:cut].sum() >= least and counts[cut:].sum() >= least]
    if not able:
        return []
    cut = int(max(able, key=lambda cut: share_between(counts, cut)))
    if most <= 2:
        return [cut]
    lower, upper = cut_bins(counts[:cut], least, most // 2), cut_bins(counts[cut:], least, most // 2)
    return [*lower, cut, *(cut + one for one in upper)]


def share_between(counts: np.ndarray, cut: int) -> float:
    """Return the share of the variance of places between the clients below a bin and the others.

    >>> share_between(np.array([3.0, 0.0, 0.0, 3.0]), 2)
    1.0
    """
    x = np.arange(len(counts)) - (counts @ np.arange(len(counts))) / counts.sum()
    whole, below = counts @ x**2, counts[:cut] @ x[:cut]
    mass = counts[:cut].sum()
    if whole <= 0:
        return 0.0
    return float((below**2 / mass + below**2 / (counts.sum() - mass)) / whole)
