"""How a peer and `rounds.py` talk: a file says what to play, lines on the standard input say when.

A peer is started as `python with_NAME.py JOB.npz THREADS`. It reads lines and answers each with a line of JSON:

    round          plays one round, answers {"seconds": 0.1}
    weights PATH   writes its weights there (.npz), answers {}

and ends when the input ends. Nothing of Fedtide is imported here or in the peers.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

Weights = dict[str, np.ndarray]
"""By Fedtide's names and in torch's layouts: dense (out, in), convolutions (out, in, height, width)."""


@dataclass(frozen=True)
class Job:
    """What is played: every client trains for one epoch in every round, and the clients' weights are averaged.

    Args:
        model: the kind of the model, as in Fedtide's configuration.
        batch: rows in a mini-batch.
        rate: learning rate of SGD.
        x: for each client its pictures (rows, 1, 28, 28), float32 in [0, 1].
        y: for each client its labels (rows,), int64.
        weights: where training begins.
        threads: how many cores may be used.
    """

    model: str
    batch: int
    rate: float
    x: list[np.ndarray]
    y: list[np.ndarray]
    weights: Weights
    threads: int


@cache
def job(path: str, threads: int) -> Job:
    """The job in a file; each process reads it once."""
    with np.load(path) as file:
        return Job(
            str(file["model"]), int(file["batch_size"]), float(file["lr"]),
            list(file["x"][:, :, None].astype(np.float32) / 255), list(file["y"]),
            {name.removeprefix("weights/"): file[name] for name in file.files if name.startswith("weights/")},
            threads,
        )  # fmt: skip


def asked() -> Job:
    """The job that the command line names."""
    return job(sys.argv[1], int(sys.argv[2]))


class Turns:
    """A peer's side of the talk. Whatever else the peer's libraries print goes to the standard error."""

    def __init__(self) -> None:
        self.out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.began: float | None = None

    def next(self, weights: Callable[[], Weights]) -> bool:
        """Answer for the round that just ended, if one did, and wait; True where another is wanted, False at the end.

        Args:
            weights: the global weights as they are now.
        """
        if self.began is not None:
            self.answer(seconds=time.perf_counter() - self.began)
        for line in sys.stdin:
            what, _, path = line.strip().partition(" ")
            if what == "round":
                self.began = time.perf_counter()
                return True
            np.savez(path, **weights())
            self.answer()
        return False

    def answer(self, **values: float) -> None:
        """One line of JSON."""
        print(json.dumps(values), file=self.out, flush=True)
