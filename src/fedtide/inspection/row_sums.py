"""The terms of one client for the sums of an inspection: pure functions of its rows and of what it was asked.

A client shuffles for itself. Where rows of others would be needed, it draws from the shares of all clients. Phases by
which cycles are turned come from a key that all clients have, so a day is turned alike everywhere.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.special import softmax
from torch import Tensor

from fedtide.clusters.clusterer import distances
from fedtide.core.base import Shard
from fedtide.core.rng import Rng, draw_some
from fedtide.inspection.linear import means_by
from fedtide.inspection.questions import CYCLES, LEAST, WIDTH, local_slots, waves
from fedtide.inspection.shares import SHUFFLES, count_by, variation

ROWS = 2_000
"""Rows of a client that are looked at; of more, as many are drawn."""
FIRST_WEEK, WEEKS = -3_653, 10_958
"""The first week that is told from others, counted from 1970, and their number: from 1900 to 2110."""
BINS, FINE = 64, 8
"""Bins of places of clients along a direction, and how many of them are a standard deviation."""

Asked = Mapping[str, Any]
"""What a client is asked, by name: numbers, and tensors in float64 or int64."""
Terms = dict[str, Tensor]
"""Terms of a client, by name (float64)."""


@dataclass(frozen=True)
class ClientRows:
    """Rows of one client, as the questions see them.

    Args:
        z: (rows, d) features, cosines of them, and 1.
        label: (rows,) class.
        unit: (rows,) number of the unit of time.
        seconds: (rows,) local time, 0 without any.
        part: (rows,) 0 for rows that models are fitted to, 1 for those that choose among models, 2 for judges.
        labels: number of classes.
    """

    z: np.ndarray
    label: np.ndarray
    unit: np.ndarray
    seconds: np.ndarray
    part: np.ndarray
    labels: int

    @property
    def counts(self) -> np.ndarray:
        """Rows of each label (labels,)."""
        return np.bincount(self.label, minlength=self.labels).astype(np.float64)


def drawn_rows(rows: int, seed: int) -> np.ndarray:
    """Return the places of the rows that are looked at, the same in every question."""
    return draw_some(np.arange(rows), ROWS, Rng(seed).at("rows", rows))


def plain_features(shard: Shard, picked: np.ndarray, seed: int) -> np.ndarray:
    """Return features as they are (rows, width), of very many random sums of them."""
    x = shard.x[torch.from_numpy(picked)].reshape(len(picked), -1).cpu().double().numpy()
    if x.shape[1] <= WIDTH:
        return x
    return x @ Rng(seed).at("narrow").numpy().normal(size=(x.shape[1], WIDTH)) / np.sqrt(x.shape[1])


def rows_of(shard: Shard, asked: Asked) -> ClientRows:
    """Return a client's rows as all questions but the first see them."""
    seed = int(asked["seed"])
    picked = drawn_rows(len(shard), seed)
    x = plain_features(shard, picked, seed)
    straight = np.clip((x - asked["mean"].numpy()) / np.maximum(asked["std"].numpy(), 1e-9), -5, 5)
    z = np.concatenate([straight, waves(straight, Rng(seed).at("waves")), np.ones((len(x), 1))], 1)
    label = asked["place"].numpy()[shard.labels.numpy()[picked].astype(np.int64)]
    seconds = np.zeros(len(x)) if shard.time is None else shard.time.double().numpy()[picked]
    unit = np.floor((seconds - asked["begin"]) / asked["unit"]).astype(np.int64).clip(0, max(asked["units"] - 1, 0))
    order = Rng(seed).at("parts", len(x)).numpy().permutation(len(x))
    part = np.full(len(x), 2)
    part[order[: len(x) // 2]] = 0
    part[order[len(x) // 2 : len(x) // 2 + len(x) // 5]] = 1
    return ClientRows(z, label, unit, seconds, part, int(asked["place"].max()) + 1)


def as_terms(terms: Mapping[str, Any]) -> Terms:
    """Return terms as tensors in float64."""
    return {name: torch.as_tensor(np.asarray(value, dtype=np.float64)) for name, value in terms.items()}


def pack(a: np.ndarray) -> np.ndarray:
    """Return the upper triangle of symmetric matrices (..., d, d).

    >>> pack(np.array([[1, 2], [2, 3]])).tolist(), unpack(np.array([1, 2, 3])).tolist()
    ([1, 2, 3], [[1, 2], [2, 3]])
    """
    rows, columns = np.triu_indices(a.shape[-1])
    return a[..., rows, columns]


def unpack(packed: np.ndarray) -> np.ndarray:
    """Return symmetric matrices (..., d, d) of their upper triangles."""
    size = int((np.sqrt(8 * packed.shape[-1] + 1) - 1) / 2)
    rows, columns = np.triu_indices(size)
    a = np.zeros((*packed.shape[:-1], size, size), packed.dtype)
    a[..., rows, columns] = a[..., columns, rows] = packed
    return a


def squares_by(z: np.ndarray, member: np.ndarray, members: int) -> np.ndarray:
    """Return the packed sums of z'z of each member's rows (members, d (d + 1) / 2)."""
    return np.stack([pack(z[member == number].T @ z[member == number]) for number in range(members)])


def sums_by(values: np.ndarray, member: np.ndarray, members: int) -> np.ndarray:
    """Return the sums of each member's rows (members, d)."""
    return means_by(values, member, members) * np.bincount(member, minlength=members)[:, None]


def sums_by_label(rows: ClientRows, member: np.ndarray, members: int, where: np.ndarray) -> np.ndarray:
    """Return the sums of z (members, labels, d) of some rows by member and label; the last column counts rows."""
    z, kind = rows.z[where], member[where] * rows.labels + rows.label[where]
    return sums_by(z, kind, members * rows.labels).reshape(members, rows.labels, -1)


# -- the questions, in their order -------------------------------------------------------------------------------------


def first_terms(shard: Shard, asked: Asked, rng: Rng) -> Terms:
    """Sum up features and their squares, count labels and weeks."""
    picked = drawn_rows(len(shard), int(asked["seed"]))
    x = plain_features(shard, picked, int(asked["seed"]))
    weeks = np.zeros(WEEKS, np.int64)
    if shard.time is not None:
        week = np.floor(shard.time.double().numpy()[picked] / CYCLES["week"][0]).astype(np.int64) - FIRST_WEEK
        weeks = np.bincount(week.clip(0, WEEKS - 1), minlength=WEEKS)
    labels = np.bincount(shard.labels.numpy()[picked].astype(np.int64), minlength=int(asked["classes"]))
    return as_terms({"x": x.sum(0), "squares": (x**2).sum(0), "labels": labels, "weeks": weeks})


def second_terms(shard: Shard, asked: Asked, rng: Rng) -> Terms:
    """Sum up features by label, those that models are fitted to, and count units of time and hours."""
    rows = rows_of(shard, asked)
    fit = rows.part == 0
    hours = local_slots(rows.seconds, *CYCLES["day"][:2])[0]
    return as_terms({
        "by_label": squares_by(rows.z, rows.label, rows.labels),
        "fit": pack(rows.z[fit].T @ rows.z[fit]),
        "fit_by_label": sums_by_label(rows, np.zeros_like(rows.label), 1, fit)[0],
        "units": count_by(rows.unit, rows.label, (max(asked["units"], 1), rows.labels)),
        "hours": np.bincount(hours, minlength=24),
    })  # fmt: skip


def table_terms(shard: Shard, asked: Asked, rng: Rng) -> Terms:
    """Count labels and cells by slot and by block, also turned and shuffled; say how far labels are from the mean."""
    rows = rows_of(shard, asked)
    cell, counts, cells = cells_of(rows, asked), rows.counts, len(asked["centers"])
    terms: dict[str, Any] = {"looks": count_by(rows.label, cell, (rows.labels, cells))}
    for name, slot, turned, slots in turned_cycles(rows, asked):
        several = [slot, *turned]
        terms[f"{name}_labels"] = [slot_tables(one, slots, rows.label, rows.labels) for one in several]
        terms[f"{name}_cells"] = [slot_tables(one, slots, cell, cells) for one in several]
    if "block" in asked:
        block, shuffled, within = blocks_of(rows, asked, rng)
        blocks = int(asked["block"].max()) + 1
        terms["block_labels"] = [slot_tables(one, blocks, rows.label, rows.labels) for one in (block, *shuffled)]
        terms["block_cells"] = [slot_tables(one, blocks, cell, cells) for one in (block, *shuffled)]
        terms["block_looks"] = [count_by(one, cell, (blocks, cells)) for one in (block, *within)]
    pooled, many = asked["shares"].numpy(), len(rows.label)
    draws = rng.at("labels").numpy().multinomial(many, pooled, SHUFFLES)
    terms["far_labels"] = [many * shares_apart(one, pooled) for one in (counts, *draws)]
    mix, weight = counts / max(many, 1), many / (1 + 0.05 * many)
    ratio = (((mix - pooled) ** 2).sum() / (1 - (pooled**2).sum()) - 1 / many) / (1 - 1 / many) if many >= 5 else 0.0
    heavy = many / (1 + 0.2 * many) if many >= 5 else 0.0
    terms["alpha"] = [heavy * ratio, heavy, float(many >= 5)]
    member = float(many >= LEAST)
    terms["members"] = [member, member * many]
    terms["labels_way"] = spread_terms(mix, member * weight)
    look = (rows.z - asked["label_means"].numpy()[rows.label]).mean(0)[:-1]
    terms["features_way"] = spread_terms(look, member * weight)
    terms["looks_of_labels"] = [
        spread_terms(off, member * count) for off, count in zip(looks_by_label(rows, asked), counts, strict=True)
    ]
    return as_terms(terms)


def far_terms(shard: Shard, asked: Asked, rng: Rng) -> Terms:
    """Say how far cells and hours are from those of all, also shuffled; count clients along each direction."""
    rows = rows_of(shard, asked)
    cells, many, counts = len(asked["centers"]), len(rows.label), rows.counts.astype(np.int64)
    pooled = asked["cell_shares"].numpy()
    draw = rng.at("cells").numpy()
    laws = asked["cell_laws"].numpy()
    drawn = np.sum([draw.multinomial(count, law, SHUFFLES) for count, law in zip(counts, laws, strict=True)], 0)
    seen = np.bincount(cells_of(rows, asked), minlength=cells)
    terms: dict[str, Any] = {"far_cells": [many * shares_apart(one, pooled) for one in (seen, *drawn)]}
    for name, slot, _, slots in turned_cycles(rows, asked, count=0):
        law = asked[f"{name}_shares"].numpy()
        cycle = local_slots(rows.seconds, CYCLES[name][0], slots)[1]
        moved = [slot, *(along_law(slot, cycle, law, rng.at(name, number)) for number in range(SHUFFLES))]
        terms[f"{name}_habits"] = [many * shares_apart(np.bincount(one, minlength=slots), law) for one in moved]
    for name in asked["ways"]:
        terms[f"{name}_places"] = np.eye(BINS)[bin_of(rows, asked, name)] * (many >= LEAST)
    places = np.sqrt(rows.counts) * (looks_by_label(rows, asked) * asked["label_ways"].numpy()).sum(1)
    terms["label_pairs"] = pack(np.outer(places, places)) * (many >= LEAST)
    return as_terms(terms)


def place_terms(shard: Shard, asked: Asked, rng: Rng) -> Terms:
    """Count clients by their place between groups."""
    rows = rows_of(shard, asked)
    return as_terms({"places": np.eye(BINS)[bin_of(rows, asked, "models")] * (len(rows.label) >= LEAST)})


def cell_terms(shard: Shard, asked: Asked, rng: Rng) -> tuple[int, Terms] | None:
    """Return the client's cell between groups, and its sums for models; None if it has too few rows."""
    rows = rows_of(shard, asked)
    if len(rows.label) < LEAST:
        return None
    cell = int(np.searchsorted(asked["cuts"].numpy(), bin_of(rows, asked, "models"), side="right"))
    return cell, as_terms({
        "squares": squares_by(rows.z, rows.part, 3),
        "by_label": sums_by_label(rows, rows.part, 3, np.full(len(rows.part), True)),
    })  # fmt: skip


def period_terms(shard: Shard, asked: Asked, rng: Rng) -> Terms:
    """Count groups by slot and by block, and sum up what models of groups leave over, by block."""
    rows = rows_of(shard, asked)
    group, groups = group_of(rows, asked), int(asked["groups"])
    owner = np.full(len(rows.label), max(group, 0))
    present = float(group >= 0)
    terms: dict[str, Any] = {}
    for name, slot, turned, slots in turned_cycles(rows, asked):
        terms[f"{name}_crowd"] = [present * count_by(one, owner, (slots, groups)) for one in (slot, *turned)]
    block, shuffled, _ = blocks_of(rows, asked, rng)
    blocks = int(asked["block"].max()) + 1
    terms["block_crowd"] = [present * count_by(one, owner, (blocks, groups)) for one in (block, *shuffled)]
    left, half = left_over(rows, asked, group), halves(rows, asked)
    place = rows.part * blocks + block
    terms |= {
        "squares": squares_by(rows.z, place, 3 * blocks),
        "products": products_by(rows.z, left, place, 3 * blocks),
        "left": sums_by((left**2).sum(1)[:, None], place, 3 * blocks)[:, 0],
        "fit_by_label": sums_by_label(rows, block, blocks, rows.part == 0),
        "left_by_label": products_by(rows.z, left, rows.label, rows.labels),
        "half_squares": squares_by(rows.z, half * blocks + block, 2 * blocks),
        "half_by_label": sums_by_label(rows, half * blocks + block, 2 * blocks, np.full(len(block), True)),
    }
    return as_terms(terms)


def judge_terms(shard: Shard, asked: Asked, rng: Rng) -> Terms:
    """Sum up errors of models on rows to which they were not fitted."""
    rows = rows_of(shard, asked)
    judged = rows.part == 2
    z, label, targets = rows.z[judged], rows.label[judged], hot_targets(rows, asked)
    group, terms = group_of(rows, asked, "cells"), dict[str, Any]()
    if "clients" in asked["compared"]:
        groups = np.full(int(judged.sum()), max(group, 0))
        weight = float(group >= 0)
        for name, value in compare_terms(
            z, targets[judged], label, groups, asked["compared"]["clients"], rows.labels
        ).items():
            terms[f"clients_{name}"] = weight * value
    if "blocks" in asked["compared"]:
        block = asked["block"].numpy()[rows.unit]
        left = left_over(rows, asked, group_of(rows, asked))[judged]
        groups = asked["alike"].numpy()[block[judged]]
        for name, value in compare_terms(z, left, label, groups, asked["compared"]["blocks"], rows.labels).items():
            terms[f"blocks_{name}"] = value
    if "ahead" in asked:
        block = asked["block"].numpy()[rows.unit]
        first = int(asked["block"].max()) + 1 - len(asked["ahead"][0])
        use = (halves(rows, asked) == 1) & (block >= first)
        models = [model.numpy()[block[use] - first] for model in asked["ahead"]]
        errors = [((np.einsum("rd,rdk->rk", rows.z[use], model) - targets[use]) ** 2).sum(1) for model in models]
        off = [errors[0] - other for other in errors[1:]]
        terms["ahead"] = [float(use.sum()), *(one.sum() for one in off), *((one**2).sum() for one in off)]
    return as_terms(terms)


# -- parts of them -----------------------------------------------------------------------------------------------------


def shares_apart(counts: np.ndarray, pooled: np.ndarray) -> float:
    """Return the total variation distance of a client's shares to those of all.

    >>> shares_apart(np.array([2.0, 0.0]), np.array([0.5, 0.5]))
    0.5
    """
    return float(variation(counts / max(counts.sum(), 1), pooled))


def spread_terms(vector: np.ndarray, weight: float) -> np.ndarray:
    """Return weight, weight * vector and the packed weight * vector vector', of which means and covariance follow."""
    return weight * np.concatenate([[1.0], vector, pack(np.outer(vector, vector))])


def cells_of(rows: ClientRows, asked: Asked) -> np.ndarray:
    """Return each row's cell of features."""
    centers = asked["centers"].numpy()
    return distances(rows.z[:, : centers.shape[1]], centers).argmin(1)


def slot_tables(slot: np.ndarray, slots: int, what: np.ndarray, kinds: int) -> np.ndarray:
    """Return two tables (2, slots, kinds): rows, and rows as if each slot had the client's mix of all times.

    Sums of both over clients are all that Kitagawa's decomposition needs (`shares.changes`).

    >>> slot_tables(np.array([0, 1, 1]), 2, np.array([0, 0, 1]), 2)[1].tolist()
    [[0.6666666666666666, 0.3333333333333333], [1.3333333333333333, 0.6666666666666666]]
    """
    counts = count_by(slot, what, (slots, kinds))
    return np.stack([counts, counts.sum(1)[:, None] * (counts.sum(0) / max(counts.sum(), 1))])


def turned_cycles(
    rows: ClientRows, asked: Asked, count: int = SHUFFLES
) -> list[tuple[str, np.ndarray, list[np.ndarray], int]]:
    """Return for each cycle its name, the slot of each row, slots of turned cycles, and their number."""
    cycles = []
    for name, (length, _, _) in CYCLES.items():
        if (slots := int(asked["slots"].get(name, 0))) > 0:
            slot, cycle = local_slots(rows.seconds, length, slots)
            first = int(local_slots(np.array([asked["begin"]]), length, slots)[1][0])
            number = (cycle - first).clip(0)
            many = int(asked["units"] * asked["unit"] / length) + 2
            keys = [Rng(int(asked["seed"])).at("turned", name, at).numpy() for at in range(count)]
            turned = [(slot + key.integers(0, slots, many)[number.clip(0, many - 1)]) % slots for key in keys]
            cycles.append((name, slot, turned, slots))
    return cycles


def along_law(slot: np.ndarray, cycle: np.ndarray, law: np.ndarray, rng: Rng) -> np.ndarray:
    """Turn each cycle by a phase of its own along the hours of all clients: clumps stay, and so does the common law.

    >>> along_law(np.array([1, 1]), np.array([0, 0]), np.array([0.0, 1.0, 0.0]), Rng(0)).tolist()
    [1, 1]
    """
    draw, ends = rng.numpy(), np.cumsum(law)
    place = ends[slot] - law[slot] * draw.random(len(slot))
    number = np.unique(cycle, return_inverse=True)[1]
    phase = draw.random(int(number.max(initial=0)) + 1)[number]
    last = int(np.flatnonzero(law).max(initial=0))  # rounding must not lead beyond it
    return np.searchsorted(ends, (place + phase) % 1 * ends[-1]).clip(0, last)


def blocks_of(rows: ClientRows, asked: Asked, rng: Rng) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    """Return the block of each row, and shuffled ones: drawn as of all rows, and as of all rows with the same label."""
    laws = asked["block_laws"].numpy()  # (labels, blocks), counts
    ends = np.cumsum(laws / np.maximum(laws.sum(1, keepdims=True), 1), 1)
    whole = np.cumsum(laws.sum(0) / laws.sum())
    most = laws.shape[1] - 1

    def draw(at: int, name: str, law: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        return law(rng.at(name, at).numpy().random(len(rows.label))).clip(0, most)

    anywhere = [draw(at, "blocks", lambda luck: np.searchsorted(whole, luck)) for at in range(SHUFFLES)]
    within = [draw(at, "within", lambda luck: (luck[:, None] > ends[rows.label]).sum(1)) for at in range(SHUFFLES)]
    return asked["block"].numpy()[rows.unit], anywhere, within


def looks_by_label(rows: ClientRows, asked: Asked) -> np.ndarray:
    """Return the mean features (labels, d - 1) of the client's rows of each label, less those of all clients."""
    off = (rows.z - asked["label_means"].numpy()[rows.label])[:, :-1]
    return means_by(off, rows.label, rows.labels)


def bin_of(rows: ClientRows, asked: Asked, name: str) -> int:
    """Return the client's bin along the main direction of labels, features or models."""
    way = asked["ways"][name].numpy()
    if name == "labels":
        vector = rows.counts / max(len(rows.label), 1)
    elif name == "features":
        vector = (rows.z - asked["label_means"].numpy()[rows.label]).mean(0)[:-1]
    else:
        vector = (looks_by_label(rows, asked) * rows.counts[:, None]).reshape(-1) / max(len(rows.label), 1)
    place = (vector @ way[2:] - way[0]) / max(way[1], 1e-12)
    return int(np.clip(np.floor(place * FINE) + BINS // 2, 0, BINS - 1))


def group_of(rows: ClientRows, asked: Asked, prefix: str = "crowd") -> int:
    """Return the client's group; -1 if it has too few rows, or there are no groups."""
    if len(rows.label) < LEAST or not asked[f"{prefix}_way"]:
        return -1
    cell = np.searchsorted(asked[f"{prefix}_cuts"].numpy(), bin_of(rows, asked, asked[f"{prefix}_way"]), side="right")
    return int(asked[f"{prefix}_groups"].numpy()[cell])


def hot_targets(rows: ClientRows, asked: Asked) -> np.ndarray:
    """Return centered one-hot labels (rows, labels)."""
    return np.eye(rows.labels)[rows.label] - asked["shares"].numpy()


def left_over(rows: ClientRows, asked: Asked, group: int) -> np.ndarray:
    """Return the targets less predictions of the model of the client's group; the targets without such models."""
    targets = hot_targets(rows, asked)
    return targets if asked["weights"] is None or group < 0 else targets - rows.z @ asked["weights"][group].numpy()


def halves(rows: ClientRows, asked: Asked) -> np.ndarray:
    """Return the half (0 or 1) of each row in which it is for predictions of the next block."""
    return (Rng(int(asked["seed"])).at("halves", len(rows.label)).numpy().random(len(rows.label)) >= 0.5).astype(
        np.int64
    )


def products_by(z: np.ndarray, t: np.ndarray, member: np.ndarray, members: int) -> np.ndarray:
    """Return the sums of z't of each member's rows (members, d, outputs)."""
    return np.stack([z[member == number].T @ t[member == number] for number in range(members)])


def compare_terms(
    z: np.ndarray, t: np.ndarray, label: np.ndarray, group: np.ndarray, models: Asked, labels: int
) -> dict[str, np.ndarray]:
    """Return the sums of errors of one model, of the own group's model, and of the model of a guessed group.

    Args:
        z: (rows, d) features.
        t: (rows, outputs) targets.
        label: (rows,) classes.
        group: (rows,) group.
        models: those of the data, and those of data in which groups differ by their labels alone ("chance_...").
        labels: number of classes.
    """
    one = ((z @ models["one"].numpy() - t) ** 2).sum(1)
    errors = np.stack([((z @ weights.numpy() - t) ** 2).sum(1) for weights in models["weights"]], 1)
    mine, guess = errors[np.arange(len(z)), group], mixed_errors(z, t, models, "")
    chance = np.stack([((z @ weights.numpy() - t) ** 2).sum(1) for weights in models["chance_weights"]], 1)
    chance_one = ((z @ models["chance_one"].numpy() - t) ** 2).sum(1)
    by_label = np.concatenate([chance_one[:, None], mixed_errors(z, t, models, "chance_")[:, None], chance], 1)
    summed = (one, mine, guess, (one - mine) ** 2, (guess - mine) ** 2, t**2)
    return {
        "errors": np.array([*(part.sum() for part in summed), len(t)]),
        "targets": t.sum(0),
        "chance": sums_by(by_label, label, labels),
        "own": count_by(group, label, (errors.shape[1], labels)),
    }


def mixed_errors(z: np.ndarray, t: np.ndarray, models: Asked, prefix: str) -> np.ndarray:
    """Return the error of each row by models mixed by the probability of their groups, told from features."""
    weights = torch.stack(list(models[f"{prefix}weights"])).numpy()
    score = z[:, :-1] @ models[f"{prefix}rule"].numpy() + models[f"{prefix}constant"].numpy()
    likely = softmax(score, 1).reshape(len(z), len(weights), -1).sum(2)
    return ((np.einsum("rk,rd,kdo->ro", likely, z, weights, optimize=True) - t) ** 2).sum(1)
