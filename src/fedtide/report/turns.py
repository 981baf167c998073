"""Groups that take turns: accuracy on distributions that are currently absent, forgetting and recovery.

The terms are those of continual learning, carried over to distributions that come, go and may return:

- Lopez-Paz, Ranzato: *Gradient Episodic Memory for Continual Learning*, NeurIPS 2017, section 2. The matrix `R[i, j]`
  is the accuracy on task j after task i. Backward transfer is `BWT = 1/(T-1) sum_{i<T} R[T, i] - R[i, i]`. Forward
  transfer is `FWT = 1/(T-1) sum_{i>1} R[i-1, i] - b_i`, where `b_i` is the accuracy of an untrained model.
- Chaudhry, Dokania, Ajanthan, Torr: *Riemannian Walk for Incremental Learning*, ECCV 2018, section 3: forgetting
  `f[k, j] = max_{l<k} R[l, j] - R[k, j]` of each past task j < k, and its mean.

Here the rows of R are evaluations and its columns distributions, such as groups of clients. A *turn* is a stretch of
rounds in which one distribution has the largest expected share. Under a smooth shift others take part, too. A
distribution is *past* while another one has its turn and its own last turn is over. The level of a turn is the
accuracy at the last evaluation in it. These are the formulas above if every distribution comes once and is judged after
each turn.

The numbers are NaN for a distribution without a past turn, and recovery is NaN for one that came only once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from matplotlib.figure import Figure

from fedtide.draw import figures
from fedtide.draw.tables import Table
from fedtide.evaluate.metrics import mean_of_known
from fedtide.report.formats import Number, percent, points, rounds_count, signed_points
from fedtide.report.run_records import ExperimentRecord, MethodRecord, RunRecord
from fedtide.report.summary import Summary
from fedtide.report.topic import Topic, plan_picture, plan_table, table_of

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
    out: list[Turn] = []
    for number, share in enumerate(shares):
        if out and share[out[-1].which] >= share.max():
            out[-1] = Turn(out[-1].which, out[-1].first, number + 1)
        else:
            out.append(Turn(int(share.argmax()), number, number + 1))
    return out


@dataclass(frozen=True)
class Transfer:
    """Accuracy matrix of a run and the turns of its distributions.

    Args:
        after: (evaluations,) rounds done at each evaluation, ascending.
        accuracy: R (evaluations, distributions); NaN if a distribution was not evaluated.
        turns: turns of the run, in order.

    Example: day, night, day, night, each for two rounds, evaluated after every turn.

    >>> four = turns(np.array([[1, 0]] * 2 + [[0, 1]] * 2 + [[1, 0]] * 2 + [[0, 1]] * 2))
    >>> run = Transfer([2, 4, 6, 8], np.array([[0.8, 0.3], [0.5, 0.7], [0.9, 0.4], [0.6, 0.8]]), four)
    >>> [round(v, 3) for v in run.fallen.T.ravel().tolist()]
    [nan, -0.3, nan, -0.3, nan, nan, -0.3, nan]
    >>> round(run.backward(), 3), run.forward(0.5).round(3).tolist(), run.recoveries()
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
        """Triples (evaluation, distribution, last turn of the distribution) for past distributions."""
        out = []
        for i, at in enumerate(self._turn_of):
            for which in range(self.accuracy.shape[1]):
                last = self._last_turn(which, at)
                if last is not None and self.turns[at].which != which:
                    out.append((i, which, last))
        return out

    @cached_property
    def fallen(self) -> np.ndarray:
        """Accuracy minus the level of the distribution's last turn (evaluations, distributions), if it is past.

        Negative if it was forgotten, as with backward transfer: `R[t, d] - R[end of d's last turn, d]`.
        """
        out = np.full(self.accuracy.shape, np.nan)
        for i, which, last in self._past:
            out[i, which] = self.accuracy[i, which] - self._level[last]
        return out

    @cached_property
    def forgotten(self) -> np.ndarray:
        """Chaudhry's f (evaluations, distributions) of past ones: highest earlier accuracy minus the current one."""
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

    def recoveries(self, tolerance: float = TOLERANCE, window: int | None = None) -> list[float]:
        """Return for each return of a distribution the rounds until it is within `tolerance` of its last turn's level.

        They are counted from the round in which it became the majority to the first evaluation at the level. They are 0
        if it had not fallen, and infinity if the turn was too short. A turn is left out if it has no evaluation, the
        last turn had no level, or the end of the run cut it off.

        Args:
            tolerance: as a share.
            window: number of last rounds in which a turn must end to count; None counts all.
        """
        out = []
        for k, turn in enumerate(self.turns):
            last = self._last_turn(turn.which, k)
            if last is None or (window is not None and turn.end <= self.turns[-1].end - window):
                continue
            rounds = self._rounds_to(self._level[last] - tolerance, turn, self.turns[last].end)
            if rounds is not None and (np.isfinite(rounds) or k < len(self.turns) - 1):
                out.append(rounds)
        return out

    def _rounds_to(self, level: float, turn: Turn, since: int) -> float | None:
        """Count the rounds of a turn until its distribution, absent since `since`, is at `level`; None if unknown."""
        values = self.accuracy[:, turn.which]
        absent = [values[i] for i, n in enumerate(self.after) if since < n <= turn.first]
        inside = [(n, values[i]) for i, n in enumerate(self.after) if turn.has(n) and not np.isnan(values[i])]
        if np.isnan(level) or not inside:
            return None
        if absent and absent[-1] >= level:
            return 0.0
        return next((float(n - turn.first) for n, value in inside if value >= level), np.inf)

    def _late(self, i: int, window: int | None) -> bool:
        return window is None or self.after[i] > self.after[-1] - window


# -- numbers of a run --------------------------------------------------------------------------------------------------

NUMBERS = (
    Number("backward_transfer", signed_points, "backward transfer"),
    Number("forgetting", points, "forgetting", by_group=True),
    Number("forward_transfer", signed_points, "forward transfer"),
    Number("recovered", percent, "turns that recover"),
    Number("recovery_rounds", rounds_count, "rounds to recover"),
)


def transfer_of(run: RunRecord, view: str, groups: Sequence[str]) -> Transfer | None:
    """Return the accuracy of each group at each evaluation, with the turns of groups; None for one group."""
    expected = [line.get("expected") for line in run.lines]
    if len(groups) < 2 or not all(expected):
        return None
    after, rows = [], []
    for line in run.judged:
        scores = line["scores"].get(view, {}).get("groups", {})
        after.append(line["round"] + 1)
        rows.append([scores.get(group, np.nan) for group in groups])
    matrix = np.array(rows, dtype=np.float64).reshape(len(after), len(groups))
    return Transfer(after, matrix, turns(np.array(expected, dtype=np.float64)))


def measure(record: ExperimentRecord, method: MethodRecord, run: RunRecord) -> dict[str, float]:
    """Return the forgetting of groups that were absent, over the last rounds."""
    transfer, window = transfer_of(run, record.view, record.groups) if method.shifted else None, record.window
    if transfer is None:
        return {}
    back = transfer.recoveries(window=window)
    out = {
        "backward_transfer": transfer.backward(window),
        "forgetting": transfer.forgetting(window=window),
        **{f"forgetting_{group}": transfer.forgetting(k, window) for k, group in enumerate(record.groups)},
        "recovered": mean_of_known(math.isfinite(rounds) for rounds in back),
        "recovery_rounds": mean_of_known(rounds for rounds in back if math.isfinite(rounds)),
    }
    if run.labels is not None:
        out["forward_transfer"] = mean_of_known(transfer.forward(1 / run.labels["classes"]).tolist())
    return out


@plan_table("Forgetting over time")
def transfer_table(record: ExperimentRecord, summary: Summary) -> Table | None:
    """Build the table of forgetting of absent groups, a row per method; None without absences.

    Over {span}. Backward transfer is the change of an absent group since its last turn. Forgetting is its fall from its
    highest {score}. Forward transfer is its {score} before its first turn, minus chance.
    """
    backward, forgetting, *others = NUMBERS
    groups = [Number(f"forgetting_{group}", points, f"forgetting, {group} clients") for group in summary.groups]
    return table_of(summary, [backward, forgetting, *groups, *others])


@plan_picture("groups", "Groups over all rounds", "three groups of clients, or no whole period to fold")
def groups_over_rounds(record: ExperimentRecord) -> figures.Drawn | None:
    """Draw the accuracy of each group from the first round to the last, and whose turn it was.

    {Score} of each group of clients as a mean over seeds; white lines are its turns.
    """
    shifted = [method for method in record.methods if method.shifted and method.runs]
    folded = record.period is not None and record.period <= record.experiment.rounds
    if len(record.groups) < 2 or not shifted or (folded and len(record.groups) == 2):
        return None
    maps = [(method, *_mean_matrix(record, method)) for method in shifted]
    maps = [row for row in maps if np.isfinite(row[2]).any()]  # a method that diverged has no accuracies
    if not maps:
        return None
    low, high = min(np.nanmin(m) for *_, m in maps), max(np.nanmax(m) for *_, m in maps)
    figure = Figure(figsize=(9.6, (0.7 + 0.32 * len(record.groups)) * len(maps) + 0.5))
    panels = figure.subplots(len(maps), 1, sharex=True, squeeze=False).flatten()
    for axes, (method, after, matrix) in zip(panels, maps, strict=True):
        edges = np.concatenate([[0], after])
        rows, span = np.arange(len(record.groups) + 1), {"vmin": 100 * low, "vmax": 100 * high}
        image = axes.pcolormesh(edges, rows, 100 * matrix.T, cmap=figures.LEVEL, rasterized=True, **span)
        transfer = transfer_of(method.runs[0], record.view, record.groups)
        for turn in transfer.turns if transfer is not None else ():
            axes.plot([turn.first, turn.end], [turn.which + 0.1] * 2, color="white", lw=2, solid_capstyle="butt")
        axes.set_yticks(np.arange(len(record.groups)) + 0.5, [figures.label(group) for group in record.groups])
        axes.invert_yaxis()
        axes.set_title(figures.label(method.name), fontsize=10, loc="left")
        axes.grid(False)
    panels[-1].set_xlabel("rounds done")
    figure.colorbar(image, ax=panels, label="accuracy, %", pad=0.01)
    return figures.svg(figure, "accuracy of groups over rounds")


def _mean_matrix(record: ExperimentRecord, method: MethodRecord) -> tuple[np.ndarray, np.ndarray]:
    """Return evaluation rounds and accuracy (evaluations, groups), as a mean over seeds."""
    transfers = [transfer_of(run, record.view, record.groups) for run in method.runs]
    judged = [transfer for transfer in transfers if transfer is not None]
    mean = figures.stack_runs([transfer.accuracy for transfer in judged]).mean(axis=0)
    return np.array(judged[0].after)[: len(mean)], mean


TOPIC = Topic(NUMBERS, measure, (groups_over_rounds,), (transfer_table,))
