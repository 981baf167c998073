"""Forgetting over time: accuracy kept on distributions that are currently absent.

The terms are those of continual learning, carried over to distributions that come, go and may return:

- Lopez-Paz, Ranzato: *Gradient Episodic Memory for Continual Learning*, NeurIPS 2017, section 2: the matrix `R[i, j]`,
  accuracy on task j after task i, with backward transfer `BWT = 1/(T-1) sum_{i<T} R[T, i] - R[i, i]` and forward
  transfer `FWT = 1/(T-1) sum_{i>1} R[i-1, i] - b_i`, where `b_i` is the accuracy of an untrained model.
- Chaudhry, Dokania, Ajanthan, Torr: *Riemannian Walk for Incremental Learning*, ECCV 2018, section 3: forgetting
  `f[k, j] = max_{l<k} R[l, j] - R[k, j]` of each past task j < k, and its mean.

Here the rows of R are evaluations and its columns distributions, such as groups of clients. A *turn* is a stretch of
rounds in which one distribution has the largest expected share; under a smooth shift others take part in it too. A
distribution is *past* while another one has its turn and its own last turn is over. The level of a turn is the
accuracy at the last evaluation in it. Where every distribution comes once, one after the other, and is judged after
each turn, these are the formulas above.

The numbers are NaN for a distribution without a past turn, and recovery is NaN for one that came only once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedtide.evaluate.metrics import mean_of_known

TOLERANCE = 0.01
"""Maximum distance below its level, as a share, at which a distribution counts as recovered."""


@dataclass(frozen=True)
class Turn:
    """A stretch of rounds `first`, ..., `end` - 1, in which distribution `which` has the largest share.

    An evaluation after n rounds lies in it if `first < n <= end`.
    """

    which: int
    first: int
    end: int

    def has(self, after: int) -> bool:
        """Tell whether an evaluation after `after` rounds lies in the turn."""
        return self.first < after <= self.end


def turns(shares: np.ndarray) -> list[Turn]:
    """Return the turns of a run.

    At equal shares the distribution of the current turn keeps it; at the start the first one has it.

    Args:
        shares: (rounds, distributions) expected share of each distribution in each round.

    >>> turns(np.array([[1.0, 0.0], [0.5, 0.5], [0.2, 0.8], [0.5, 0.5], [0.9, 0.1]]))
    [Turn(which=0, first=0, end=2), Turn(which=1, first=2, end=4), Turn(which=0, first=4, end=5)]
    """
    found: list[Turn] = []
    for number, share in enumerate(shares):
        if found and share[found[-1].which] >= share.max():
            found[-1] = Turn(found[-1].which, found[-1].first, number + 1)
        else:
            found.append(Turn(int(share.argmax()), number, number + 1))
    return found


@dataclass(frozen=True)
class Recovery:
    """Rounds of its own turn that a returning distribution took to reach its old level again.

    rounds: 0 where it had not fallen, infinity where the whole turn was not enough. turn: the turn of its return.
    """

    turn: Turn
    rounds: float


@dataclass(frozen=True)
class Transfer:
    """Accuracy matrix of a run and the turns of its distributions.

    Args:
        after: (evaluations,) rounds done at each evaluation, ascending.
        accuracy: R (evaluations, distributions); NaN where a distribution was not evaluated.
        turns: turns of the run, in order.

    Example: day, night, day, night, each for two rounds, evaluated after every turn.

    >>> four = turns(np.array([[1, 0]] * 2 + [[0, 1]] * 2 + [[1, 0]] * 2 + [[0, 1]] * 2))
    >>> run = Transfer([2, 4, 6, 8], np.array([[0.8, 0.3], [0.5, 0.7], [0.9, 0.4], [0.6, 0.8]]), four)
    >>> [round(v, 3) for v in run.fallen.T.ravel().tolist()]
    [nan, -0.3, nan, -0.3, nan, nan, -0.3, nan]
    >>> round(run.backward(), 3), run.forward(0.5).round(3).tolist(), [r.rounds for r in run.recoveries()]
    (-0.3, [nan, -0.2], [2.0, 2.0])
    """

    after: Sequence[int] | np.ndarray
    accuracy: np.ndarray
    turns: Sequence[Turn]

    @cached_property
    def _turn_of(self) -> list[int]:
        """Position of each evaluation's turn; -1 for one before the first or after the last."""
        return [next((k for k, turn in enumerate(self.turns) if turn.has(n)), -1) for n in self.after]

    @cached_property
    def _level(self) -> list[float]:
        """Accuracy of each turn's distribution at the last evaluation in the turn; NaN without such an evaluation."""
        last = {at: i for i, at in enumerate(self._turn_of)}
        return [float(self.accuracy[last[k], turn.which]) if k in last else np.nan for k, turn in enumerate(self.turns)]

    def _last_turn(self, which: int, before: int) -> int | None:
        """Return the latest turn of a distribution among the first `before`."""
        return next((k for k in reversed(range(before)) if self.turns[k].which == which), None)

    @cached_property
    def _past(self) -> list[tuple[int, int, int]]:
        """Triples (evaluation, distribution, the distribution's last turn) where a distribution is past."""
        found = []
        for i, at in enumerate(self._turn_of):
            for which in range(self.accuracy.shape[1]):
                last = self._last_turn(which, at)
                if last is not None and self.turns[at].which != which:
                    found.append((i, which, last))
        return found

    @cached_property
    def fallen(self) -> np.ndarray:
        """Accuracy minus the level of the distribution's last turn (evaluations, distributions), where it is past.

        Negative where it was forgotten, as with backward transfer: `R[t, d] - R[end of d's last turn, d]`.
        """
        out = np.full(self.accuracy.shape, np.nan)
        for i, which, last in self._past:
            out[i, which] = self.accuracy[i, which] - self._level[last]
        return out

    @cached_property
    def forgotten(self) -> np.ndarray:
        """Chaudhry's f (evaluations, distributions), where past: highest earlier accuracy minus the current one."""
        out = np.full(self.accuracy.shape, np.nan)
        highest = np.fmax.accumulate(self.accuracy, axis=0)
        for i, which, _ in self._past:
            if i:
                out[i, which] = highest[i - 1, which] - self.accuracy[i, which]
        return out

    def backward(self, window: int | None = None) -> float:
        """Return the backward transfer: the mean of `fallen` at the last evaluation of each absence.

        An absence lasts from the end of a distribution's turn to the beginning of its next one, or to the end.

        Args:
            window: number of last rounds in which an absence's last evaluation counts; None counts all.
        """
        ends: dict[tuple[int, int], int] = {}
        for i, which, last in self._past:
            ends[which, last] = i
        return mean_of_known([self.fallen[i, which] for (which, _), i in ends.items() if self._late(i, window)])

    def forgetting(self, which: int | None = None, window: int | None = None) -> float:
        """Return the mean of `forgotten` over distributions and evaluations.

        Args:
            which: a single distribution; None means all.
            window: number of last rounds whose evaluations count; None counts all.
        """
        late = [i for i in range(len(self.after)) if self._late(i, window)]
        return mean_of_known((self.forgotten if which is None else self.forgotten[:, [which]])[late].ravel().tolist())

    def forward(self, chance: float) -> np.ndarray:
        """Return the forward transfer (distributions,): accuracy before a distribution's first turn minus `chance`.

        NaN for the distribution of the first turn, and for one without a turn or without an evaluation before it.

        Args:
            chance: accuracy of an untrained model.
        """
        out = np.full(self.accuracy.shape[1], np.nan)
        for which in range(len(out)):
            first = next((turn.first for turn in self.turns if turn.which == which), 0)
            before = [i for i, n in enumerate(self.after) if n <= first]
            if before:
                out[which] = self.accuracy[before[-1], which] - chance
        return out

    def recoveries(self, tolerance: float = TOLERANCE, window: int | None = None) -> list[Recovery]:
        """Return for each return of a distribution the rounds until it is within `tolerance` of its last turn's level.

        Counted from the round in which it became the majority to the first evaluation that is high enough; 0 where the
        last evaluation of its absence was. Left out as unknown: a turn in which it was not evaluated, one after a turn
        without a level, and one that the run's end cut off before it was high enough.

        Args:
            tolerance: as a share.
            window: number of last rounds in which a turn must end to count; None counts all.
        """
        out = []
        for k, turn in enumerate(self.turns):
            last = self._last_turn(turn.which, k)
            if last is None or (window is not None and turn.end <= self.turns[-1].end - window):
                continue
            took = self._took(turn, self.turns[last].end, self._level[last] - tolerance)
            if took is not None and (np.isfinite(took) or k < len(self.turns) - 1):
                out.append(Recovery(turn, took))
        return out

    def _took(self, turn: Turn, gone: int, needed: float) -> float | None:
        """Count the rounds of a turn until its distribution, gone since `gone`, reaches `needed`; None if unknown."""
        values = self.accuracy[:, turn.which]
        away = [values[i] for i, n in enumerate(self.after) if gone < n <= turn.first]
        inside = [(n, values[i]) for i, n in enumerate(self.after) if turn.has(n) and not np.isnan(values[i])]
        if np.isnan(needed) or not inside:
            return None
        if away and away[-1] >= needed:
            return 0.0
        return next((float(n - turn.first) for n, value in inside if value >= needed), np.inf)

    def _late(self, i: int, window: int | None) -> bool:
        return window is None or self.after[i] > self.after[-1] - window
