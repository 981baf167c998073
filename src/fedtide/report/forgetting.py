"""Forgetting: over time, of distributions that are currently absent, and within a round, by a client's training.

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

Local forgetting is the accuracy on the rows of other clients that a client's training costs (`fedtide.evaluate.probe`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from fedtide.draw import figures
from fedtide.draw.tables import Table
from fedtide.evaluate.metrics import mean_of_known
from fedtide.report.formats import Number, percent, points, rounds_count, signed_points
from fedtide.report.run_records import ExperimentRecord, MethodRecord, RunRecord, at
from fedtide.report.summary import Summary
from fedtide.report.topic import plan_picture, plan_table, table_of

TOLERANCE = 0.01
"""Maximum distance below its level, as a share, at which a distribution counts as recovered."""

TRANSFER = (
    Number("backward_transfer", signed_points, "backward transfer"),
    Number("forgetting", points, "forgetting", by_group=True),
    Number("forward_transfer", signed_points, "forward transfer"),
    Number("recovered", percent, "turns that recover"),
    Number("recovery_rounds", rounds_count, "rounds to recover"),
)

LOCAL = (
    Number("local_forgetting", points, "on rows of other clients", single=True),
    Number("local_forgetting_apart", points, "on rows of clients without a common class", single=True),
    Number("local_forgetting_own", points, "on own rows", single=True),
    Number("local_loss_increase", title="increase of the loss, other clients", single=True),
)

NUMBERS = (*TRANSFER, *LOCAL)

# -- turns -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """A stretch of rounds `first`, ..., `end` - 1, in which distribution `which` has the largest share.

    An evaluation after n rounds lies in it if `first < n <= end`.
    """

    which: int
    first: int
    end: int


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
    def _turn_of(self) -> np.ndarray:
        """Position of each evaluation's turn."""
        return np.searchsorted([turn.end for turn in self.turns], self.after)

    @cached_property
    def _level(self) -> list[float]:
        """Accuracy of each turn's distribution at the last evaluation in the turn; NaN without such an evaluation."""
        last = {k: i for i, k in enumerate(self._turn_of)}
        return [float(self.accuracy[last[k], turn.which]) if k in last else np.nan for k, turn in enumerate(self.turns)]

    @cached_property
    def _last(self) -> np.ndarray:
        """Latest turn of each distribution before each turn (turns, distributions); -1 without one."""
        last = np.full((len(self.turns), self.accuracy.shape[1]), -1)
        for k, turn in enumerate(self.turns[:-1]):
            last[k + 1] = last[k]
            last[k + 1, turn.which] = k
        return last

    @cached_property
    def _past(self) -> list[tuple[int, int, int]]:
        """Triples (evaluation, distribution, last turn of the distribution) for past distributions."""
        last = self._last[self._turn_of]
        cells = [(int(i), int(which), int(last[i, which])) for i, which in np.argwhere(last >= 0)]
        return [cell for cell in cells if self.turns[self._turn_of[cell[0]]].which != cell[1]]

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

    def backward(self, window: float = math.inf) -> float:
        """Return the backward transfer: the mean of `fallen` at the last evaluation of each absence.

        An absence lasts from the end of a distribution's turn to the beginning of its next one, or to the end.

        Args:
            window: number of last rounds in which an absence's last evaluation counts; all by default.
        """
        ends = {(which, last): i for i, which, last in self._past}
        late = self._late(window)
        return mean_of_known([self.fallen[i, which] for (which, _), i in ends.items() if late[i]])

    def forgetting(self, which: int | None = None, window: float = math.inf) -> float:
        """Return the mean of `forgotten` over distributions and evaluations.

        Args:
            which: a single distribution; None means all.
            window: number of last rounds whose evaluations count; all by default.
        """
        late = self.forgotten[self._late(window)]
        return mean_of_known((late if which is None else late[:, which]).ravel())

    def forward(self, chance: float) -> np.ndarray:
        """Return the forward transfer (distributions,): accuracy before a distribution's first turn minus `chance`.

        NaN for the distribution of the first turn, and for one without a turn or without an evaluation before it.

        Args:
            chance: accuracy of an untrained model.
        """
        out = np.full(self.accuracy.shape[1], np.nan)
        for which in range(len(out)):
            first = next((turn.first for turn in self.turns if turn.which == which), 0)
            before = np.flatnonzero(np.asarray(self.after) <= first)
            if len(before):
                out[which] = self.accuracy[before[-1], which] - chance
        return out

    def recoveries(self, window: float = math.inf) -> list[float]:
        """Return for each return of a distribution the rounds until it is within `TOLERANCE` of its last turn's level.

        They are counted from the round in which it became the majority to the first evaluation at the level. They are 0
        if it had not fallen, and infinity if the turn was too short. A turn is left out if it has no evaluation, the
        last turn had no level, or the end of the run cut it off.

        Args:
            window: number of last rounds in which a turn must end to count; all by default.
        """
        out = []
        for k, turn in enumerate(self.turns):
            last = self._last[k, turn.which]
            if last < 0 or turn.end <= self.turns[-1].end - window:
                continue
            level, values = self._level[last] - TOLERANCE, self.accuracy[:, turn.which].tolist()
            absent = [v for n, v in zip(self.after, values, strict=True) if self.turns[last].end < n <= turn.first]
            inside = [(n, v) for n, v in zip(self.after, values, strict=True) if turn.first < n <= turn.end]
            reached = [float(n - turn.first) for n, value in inside if value >= level]
            if math.isnan(level) or all(math.isnan(value) for _, value in inside):
                continue
            if absent and absent[-1] >= level:
                out.append(0.0)
            elif reached or k < len(self.turns) - 1:
                out.append(min(reached, default=math.inf))
        return out

    def _late(self, window: float) -> np.ndarray:
        """Tell for each evaluation if it is in the last `window` rounds."""
        after = np.asarray(self.after)
        return after > after[-1:] - window


# -- numbers of a run --------------------------------------------------------------------------------------------------


def transfer_of(run: RunRecord, view: str, groups: Sequence[str]) -> Transfer | None:
    """Return the accuracy of each group at each evaluation, with the turns of groups; None for one group."""
    expected = [line.get("expected") for line in run.lines]
    if len(groups) < 2 or not all(expected):
        return None
    after = [line["round"] + 1 for line in run.judged]
    rows = [[at(view, "groups", group)(line["scores"]) for group in groups] for line in run.judged]
    matrix = np.array(rows, dtype=np.float64).reshape(len(after), len(groups))
    return Transfer(after, matrix, turns(np.array(expected, dtype=np.float64)))


def measure(record: ExperimentRecord, method: MethodRecord, run: RunRecord) -> dict[str, float]:
    """Return the forgetting of groups that were absent, over the last rounds, and local forgetting."""
    transfer, window = transfer_of(run, record.view, record.groups) if method.shift.who.changes else None, record.window
    if transfer is None:
        return measure_local(run)
    back = transfer.recoveries(window=window)
    out = {
        "backward_transfer": transfer.backward(window),
        "forgetting": transfer.forgetting(window=window),
        **{f"forgetting_{group}": transfer.forgetting(k, window) for k, group in enumerate(record.groups)},
        "recovered": mean_of_known(math.isfinite(rounds) for rounds in back),
        "recovery_rounds": mean_of_known(rounds for rounds in back if math.isfinite(rounds)),
    }
    if run.labels is not None:
        kind = record.experiment.data.target.kind
        if kind != "labels":  # of several labels at once no share is that of chance
            chance = 1 / run.labels["classes"] if kind == "classes" else 0.0  # an untrained model has no skill
            out["forward_transfer"] = mean_of_known(transfer.forward(chance))
    return out | measure_local(run)


def measure_local(run: RunRecord) -> dict[str, float]:
    """Return the local forgetting of a run, averaged over the measured rounds; empty without such rounds.

    A round with nothing to compare, such as a single participant on its own rows, is left out.
    """
    lines = [line for line in run.forgetting if "skipped" not in line]
    if not lines:
        return {}
    comparable = [line for line in lines if line["known"]]
    return {
        "local_forgetting": mean_of_known(line["forgetting"]["mean"] for line in comparable),
        "local_forgetting_own": mean_of_known(line["forgetting"]["own"] for line in lines),
        "local_forgetting_apart": mean_of_known(line["forgetting"].get("apart") for line in comparable),
        "local_loss_increase": mean_of_known(line["loss_increase"]["mean"] for line in comparable),
    }


# -- tables ------------------------------------------------------------------------------------------------------------


@plan_table("Forgetting over time")
def transfer_table(record: ExperimentRecord, summary: Summary) -> Table | None:
    """Build the table of forgetting of absent groups, a row per method; None without absences.

    Changes of {score}, {averaged}. Backward transfer is the change of an absent group since its last turn. Forgetting
    is its fall from its highest {score}. Forward transfer is its {score} before its first turn, minus chance.
    """
    backward, forgetting, *others = TRANSFER
    groups = [Number(f"forgetting_{group}", points, f"forgetting, {group} clients") for group in summary.groups]
    return table_of(summary, [backward, forgetting, *groups, *others])


@plan_table("Forgetting within a round", single=True)
def forgetting_table(record: ExperimentRecord, summary: Summary) -> Table | None:
    """Build the table of local forgetting, a row per method; None without probes.

    {Score} that a client's training costs, as means over the measured rounds; below zero it gains.
    """
    return table_of(summary, LOCAL)


# -- groups over rounds ------------------------------------------------------------------------------------------------


@plan_picture("groups", "Groups over all rounds", "three groups of clients, or no whole period to fold")
def groups_over_rounds(record: ExperimentRecord) -> figures.Drawn | None:
    """Draw the accuracy of each group from the first round to the last, and whose turn it was.

    {Score} of each group of clients as a mean over seeds; white lines are its turns.
    """
    shifted = [method for method in record.methods if method.shift.who.changes and method.runs]
    folded = record.experiment.period is not None and record.experiment.period <= record.experiment.rounds
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
    figure.colorbar(image, ax=panels, label=f"{record.experiment.score}, %", pad=0.01)
    return figures.svg(figure, f"{record.experiment.score} of groups over rounds")


def _mean_matrix(record: ExperimentRecord, method: MethodRecord) -> tuple[np.ndarray, np.ndarray]:
    """Return evaluation rounds and accuracy (evaluations, groups), as a mean over seeds."""
    transfers = [transfer_of(run, record.view, record.groups) for run in method.runs]
    judged = [transfer for transfer in transfers if transfer is not None]
    mean = figures.mean_of_runs([transfer.accuracy for transfer in judged])
    return np.array(judged[0].after)[: len(mean)], mean


# -- maps of local forgetting ------------------------------------------------------------------------------------------

ROUNDS, WIDE = 5, 4
"""Maximum number of probed rounds drawn, and of methods side by side."""

Line = dict[str, Any]
"""A line of `forgetting.jsonl`."""


@dataclass(frozen=True)
class Map:
    """A kind of map of a line of `forgetting.jsonl`.

    parts: the matrix (models, owners), and strips beside it, by model and by owner. below: name of the strip below.
    """

    title: str
    unit: str
    colors: str
    below: str
    parts: Callable[[Line], tuple[np.ndarray, np.ndarray, np.ndarray]]


@plan_picture("forgetting", "Local client forgetting", "[forgetting]", single=True)
def local_forgetting(record: ExperimentRecord) -> figures.Drawn | None:
    """Draw the cost of each participant's training on the rows of others, in each probed round.

    {Score} of the received model minus that of each client's own model, in the first seed. Red is forgotten, blue is
    gained; a dot marks a client's own rows.
    """
    probes = _probes(record)
    maps = [forgotten(line)[0] for lines in probes.values() for line in lines.values()]
    largest = max((np.nanmax(np.abs(m)) for m in maps if np.isfinite(m).any()), default=0.0) or 1.0
    title, unit = "local client forgetting", "accuracy lost by local training, points"
    return _draw_maps(probes, Map(title, unit, figures.CHANGE, "mean", forgotten), Normalize(-largest, largest))


@plan_picture("local_models", "After local training", "[forgetting]", single=True)
def after_local_training(record: ExperimentRecord) -> figures.Drawn | None:
    """Draw the accuracy of each participant's own model on the rows of all clients, in each probed round.

    {Score} of each participant's own model on the rows of every client, in the first seed; below, the received model.
    """
    title, unit = "accuracy after local training", "accuracy after local training, %"
    return _draw_maps(_probes(record), Map(title, unit, figures.LEVEL, "received", levels), Normalize(0, 100))


def _probes(record: ExperimentRecord) -> dict[str, dict[int, Line]]:
    """Return the measurements in the first seed of each method, by round."""
    probes = {
        method.name: {line["round"]: line for line in method.runs[0].forgetting if line.get("models")}
        for _, method in record.numbered
    }
    return {name: lines for name, lines in probes.items() if lines}


def _percent(line: Line, name: str, key: str) -> np.ndarray:
    return 100 * np.array(line[name][key], dtype=np.float64)


def forgotten(line: Line) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return F (models, owners) in percentage points, NaN for owners without rows, and its means without own rows."""
    matrix = _percent(line, "accuracy", "received") - _percent(line, "accuracy", "local")
    return matrix, _percent(line, "forgetting", "models"), _percent(line, "forgetting", "owners")


def levels(line: Line) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the accuracy of each model for each owner, its mean by model, and that of the received model by owner."""
    local = _percent(line, "accuracy", "local")
    means = np.nansum(local, axis=1) / np.maximum(np.isfinite(local).sum(axis=1), 1)
    return local, means, _percent(line, "accuracy", "received")


def _draw_maps(probes: dict[str, dict[int, Line]], kind: Map, scale: Normalize) -> figures.Drawn | None:
    """Draw a map for each method and some of the rounds, in one color scale; None without a round."""
    rounds = sorted({number for lines in probes.values() for number in lines})
    if not rounds:
        return None
    if len(rounds) > ROUNDS:  # the first and the last, and others evenly between them
        rounds = [rounds[round(k * (len(rounds) - 1) / (ROUNDS - 1))] for k in range(ROUNDS)]
    tallest = max(len(line["models"]) for lines in probes.values() for line in lines.values())
    height = min(max(1.5 + 0.16 * tallest, 2.1), 3.6)
    figure, stacks = figures.stacked(len(probes), widest=WIDE, heights=[height] * len(rounds))
    for stack, (name, lines) in zip(stacks, probes.items(), strict=True):
        for axes, number in zip(stack, rounds, strict=True):
            line = lines.get(number, {})
            mean = "nothing to compare"
            if line.get("known"):
                mean = f"mean forgetting {100 * line['forgetting']['mean']:.1f} points"
            axes.set_title(f"{figures.label(name)}, round {number}\n{mean}", fontsize=9)
            axes.grid(False)
            axes.set(xticks=[], yticks=[])
            if line:
                _draw_map(axes, line, kind, scale)
            if figures.leftmost(axes):
                axes.set_ylabel("model of client")
        stack[-1].set_xlabel("rows of client")
    figure.colorbar(ScalarMappable(scale, kind.colors), ax=figure.axes, label=kind.unit, shrink=0.8)
    return figures.svg(figure, kind.title)


def _draw_map(axes: Axes, line: Line, kind: Map, scale: Normalize) -> None:
    """Draw the matrix, strips at the right and below, and a dot for each model on the rows of its client."""
    models, owners, (matrix, by_model, by_owner) = line["models"], line["owners"], kind.parts(line)
    down, across = matrix.shape
    gap, wide, high = 0.5, max(1.0, 0.07 * across), max(1.0, 0.07 * down)
    cmap = matplotlib.colormaps[kind.colors].with_extremes(bad=figures.OTHER_COLOR)
    left, bottom = across - 0.5, down - 0.5
    for values, extent in (
        (matrix, (-0.5, left, bottom, -0.5)),
        (by_model[:, None], (left + gap, left + gap + wide, bottom, -0.5)),
        (by_owner[None, :], (-0.5, left, bottom + gap + high, bottom + gap)),
    ):
        axes.imshow(values, extent=extent, cmap=cmap, norm=scale, interpolation="nearest", aspect="auto")
    axes.set_xlim(-0.5, left + gap + wide)
    axes.set_ylim(bottom + gap + high, -0.5)
    dots = [(owners.index(model), row) for row, model in enumerate(models) if model in owners]
    size = float(np.clip(40 / max(across, 1), 0.6, 4))
    axes.plot([x for x, _ in dots], [y for _, y in dots], "o", color="black", ms=size, mew=0)
    _label_ticks(axes.xaxis, owners, left + gap + wide / 2, "mean")
    _label_ticks(axes.yaxis, models, bottom + gap + high / 2, kind.below)
    axes.tick_params(axis="x", rotation=90)
    axes.tick_params(labelsize=7, length=0)
    axes.spines[["left", "bottom"]].set_visible(False)


def _label_ticks(axis: Any, clients: list[int], strip_at: float, strip: str) -> None:
    """Label each client by its number if there is room, and the strip by its name."""
    numbers = clients if len(clients) <= 25 else []
    axis.set_ticks([*range(len(numbers)), strip_at], [*map(str, numbers), strip])


@plan_picture("forgetting_over_rounds", "Local forgetting over rounds", "several rounds of [forgetting]", single=True)
def forgetting_over_rounds(record: ExperimentRecord) -> figures.Drawn | None:
    """Draw the mean of local forgetting over the probed rounds.

    Mean local forgetting over all models and the rows of other clients.{band}
    """
    curves = record.curves(_curve)
    if not any(len(of_runs[0][0]) > 1 for of_runs in curves.values()):
        return None
    figure, (axes,) = figures.stack_panels([2.6])
    figures.bands(axes, curves, record.names, "mean local\nforgetting, points", every=1)
    axes.axhline(0, color="#777777", lw=0.8)
    figures.over_rounds(axes, 0, record.experiment.rounds)
    figures.legend_above(axes)
    return figures.svg(figure, "local forgetting over rounds")


def _curve(run: RunRecord) -> figures.Curve:
    lines = [line for line in run.forgetting if line.get("known")]
    return np.array([line["round"] for line in lines]), np.array([line["forgetting"]["mean"] for line in lines])
