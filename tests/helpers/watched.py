"""Worlds whose drift is known, as windows of counts: clients hold other inputs, and half of them come in a window.

Labels are drawn from the softmax of a linear score. The model knows the score, and is too sure by `SURE`. So raw
confidences are wrong, calibrated ones are right, and the accuracy that a window would have without chance is known.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedtide.transforms.watch import count_rows

CLIENTS, ROWS, COLUMNS, CLASSES = 20, 100, 6, 3
SURE = 1.6
MORE = np.array([3.0, 1.0, 1.0])
APART = 0.4
"""How far apart means of clients are."""


@dataclass(frozen=True)
class World:
    """A world: what changes, over how many windows, and the kinds of alarms that tell of it.

    Args:
        what: changes: "inputs", "labels", "meaning"; "" for nothing.
        over: windows over which it changes; 0 at once.
        rhythm: whether inputs follow a day of `period` windows.
        period: as the transform is told.
        labels: windows whose labels are counted.
        trains: whether the model is trained between windows.
        told: kinds that may tell of it; none if nothing can.
        everyone: whether all clients are in each window.
    """

    what: str = ""
    over: int = 0
    rhythm: bool = False
    period: int = 1
    labels: str = "always"
    trains: bool = False
    told: tuple[str, ...] = ()
    everyone: bool = False


SEEN = ("inputs", "predictions")
WORLDS = {
    "nothing": World(),
    "nothing, the model is trained": World(trains=True),
    "day and night": World(rhythm=True, period=4),
    "inputs, at once": World("inputs", told=(*SEEN, "labels", "meaning")),
    "inputs, over 20 windows": World("inputs", over=20, told=(*SEEN, "labels", "meaning")),
    "inputs, in day and night": World("inputs", rhythm=True, period=4, told=(*SEEN, "labels", "meaning")),
    "inputs, without labels": World("inputs", labels="first", told=SEEN),
    "inputs, the model is trained": World("inputs", trains=True, told=("inputs", "labels", "meaning")),
    "labels, at once": World("labels", told=(*SEEN, "labels", "meaning")),
    "labels, without labels": World("labels", labels="first", told=SEEN),
    "labels, without labels, all clients": World("labels", labels="first", told=SEEN, everyone=True),
    "meaning, with labels": World("meaning", told=("labels", "meaning")),
    "meaning, without labels": World("meaning", labels="first"),
}


def windows(world: World, seed: int, begin: int, last: int, learns: int) -> Iterator[tuple[Tensor, float]]:
    """Yield each window, and its accuracy without chance in rows' labels.

    Args:
        world: which.
        seed: of all.
        begin: first window that is changed.
        last: number of windows.
        learns: windows of the reference.
    """
    rng = np.random.default_rng([seed, 51])
    weights = 1.5 * rng.normal(size=(COLUMNS, CLASSES))
    homes = APART * rng.normal(size=(CLIENTS, COLUMNS))
    for t in range(last):
        size = 0.0 if t < begin or not world.what else min((t - begin + 1) / world.over, 1.0) if world.over else 1.0
        here = rng.permutation(CLIENTS)[: CLIENTS if world.everyone else CLIENTS // 2]
        learned = min(0.6 + 0.4 * t / learns, 1.0) if world.trains else 1.0
        found, exact = [], []
        drawn = 4 * ROWS if world.what == "labels" and size else ROWS
        for client in here:
            x = homes[client] + rng.normal(size=(drawn, COLUMNS))
            if world.rhythm:
                x[:, 1] += np.cos(np.pi / 2 * (t % 4))
            if world.what == "inputs":
                x[:, 0] += 0.8 * size
            score = x @ weights
            if world.what == "meaning" and size and client % 2:
                score = score[:, [1, 0, 2]]
            p = softmax(score)
            y = (p.cumsum(1) > rng.random((len(p), 1))).argmax(1)
            if drawn > ROWS:  # rows of class 0 come three times as often
                p = p * MORE / (p * MORE).sum(1, keepdims=True)
                kept = np.argsort(-np.log(rng.random(drawn)) / MORE[y])[:ROWS]
                x, y, p = x[kept], y[kept], p[kept]
            logp = np.log(softmax(SURE * learned * (x @ weights)))
            labels = torch.from_numpy(y) if world.labels == "always" or t < learns else None
            found.append(count_rows(torch.from_numpy(logp), labels, torch.from_numpy(x)))
            exact.append(p[np.arange(ROWS), logp.argmax(1)].mean())
        rows = torch.tensor([float(ROWS * len(here))], dtype=torch.float64)
        yield torch.cat([torch.stack(found).mean(0), rows]), float(np.mean(exact))


def softmax(score: np.ndarray) -> np.ndarray:
    raised = np.exp(score - score.max(1, keepdims=True))
    return raised / raised.sum(1, keepdims=True)
