"""Windows of sums: an estimate of accuracy without labels, and drift of inputs, predictions, labels and their meaning.

A window is what clients have counted in a round, as means over rows (`Layout`). All that follows is said of two of
them: the window t, and the reference, R windows that come first.

| symbol | meaning |
| --- | --- |
| `h_b`, `r_b` | share of a window's rows whose top confidence is in bin b, and share that is in b and right |
| `a_b` | calibration: `sum r_b / sum h_b` over the reference, the center of b if no row was there |
| estimate | `sum_b h_b a_b`, with the h of window t |
| its error | `sqrt(sum_b h_b^2 a_b (1 - a_b) / N_b + q max(sum_b h_b a_b (1 - a_b), 2 / n) / n)` |
| `n`, `N`, `N_b` | rows of the window, of the reference, of the reference in b |
| `x_j`, `v_j` | mean of a number j in a window, and its variance over rows of the reference |
| `f_j` | variance of x_j between windows of the reference, in units of `v_j / n`: at least 1, moderated over j |
| `t_j` | `(x_j - mean of the reference) / sqrt(f_j v_j (1 / n + 1 / N))` |
| `q` | the same factor of accuracies around their estimates |
| score | the normal deviate of the largest `|t_j|` among J: of the chance `1 - (1 - p)^J`, with Student's p |

The estimate is NannyML's "confidence-based performance estimation" with a histogram as calibration. Factors `f_j` are
moderated as variances of genes are (Smyth, *Statistical Applications in Genetics and Molecular Biology*, 2004). They
hold what windows differ by although nothing drifts: other clients are there, and rows of a client are alike.

Scores go to river's Page-Hinkley detector (Page, *Biometrika*, 1954). It rises by what a score is above the mean score
so far and `SLACK`, and tells of drift above a limit.

Choices:
    - ours: scores, not numbers, go to the detector. They are about standard normal without drift, whatever is watched.
    - ours: the limit is `LIMIT + log(streams) / (2 SLACK)`, so that false alarms of all streams together stay as rare.
    - ours: a share is as uncertain as if two rows of the window were expected in it, because rare ones are not normal.
      So is an accuracy of nearly 1.
    - ours: fourth powers are not counted, so the variance of a square has a bound in its place, m (1 - m). It is about
      four times too large for a normal column: a change of spread alone has half of the score that it should have.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtide.core.errors import uninstalled

BINS = 20
"""Bins of the top confidence, from 0 to 1."""
PRIOR = 10.0
"""Degrees of freedom that the mean factor over all numbers has in the factor of each."""
MOST = 8.0
"""Largest score."""
SLACK = 1.0
"""By how much the mean score has to rise, or it is no drift."""
LIMIT = 3.0
"""Sum of rises at which one stream tells of drift."""
FAR = 3.0
"""Score from which on a window is unlike the reference."""
RARE = 2.0
"""Rows that a share is as uncertain as, at least."""
FEW = 100
"""Rows of a window below which it tells little."""
NEW = 0.05
"""Share of rows in bins that the reference lacks, from which on the estimate is not sure."""
LOOSE = 4.0
"""Factor q from which on confidence does not tell the accuracy of the reference's own windows."""
MEMORY = 1000
"""Scores of a stream that are kept."""

KINDS = ("inputs", "predictions", "labels", "meaning")
"""What may drift, each a stream of scores."""


@dataclass(frozen=True)
class Layout:
    """The numbers of a window, each a mean over rows from 0 to 1, or of an input from -1 to 1.

    Args:
        classes: C.
        inputs: J.

    >>> Layout(classes=2, inputs=1).places["squares"]
    slice(45, 46, None)
    """

    classes: int
    inputs: int

    @property
    def places(self) -> dict[str, slice]:
        """Where each part of a window is."""
        sizes = {
            "confidence": BINS, "right": BINS, "predicted": self.classes, "labels": self.classes,
            "inputs": self.inputs, "squares": self.inputs,
        }  # fmt: skip
        ends = np.cumsum([0, *sizes.values()])
        return {name: slice(int(a), int(b)) for name, a, b in zip(sizes, ends, ends[1:], strict=False)}

    @property
    def size(self) -> int:
        """How many numbers a window has."""
        return 2 * (BINS + self.classes + self.inputs)


@dataclass(frozen=True)
class Group:
    """Knowledge of the clients of one model, or of all.

    Args:
        reference: (phases, R, size + 1) float64: windows with the number of their rows behind; no rows, not there yet.
        recent: (windows, size + 1) last windows, if the model is trained in between; else none.
        scores: by kind, scores since its last alarm.
    """

    reference: Tensor
    recent: Tensor
    scores: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def begin(layout: Layout, phases: int, windows: int) -> "Group":
        """Return a group of which nothing is known."""
        empty = torch.zeros(phases, windows, layout.size + 1, dtype=torch.float64)
        return Group(empty, empty[0, :0])

    def learns(self, phase: int) -> bool:
        """Tell whether windows of a phase are not there yet. In an hour when nobody is there they never are."""
        return bool((self.reference[phase, :, -1] == 0).any())


def centers() -> Tensor:
    """Return the centers of the bins of confidence.

    >>> centers()[:2].tolist()
    [0.025, 0.075]
    """
    return (torch.arange(BINS, dtype=torch.float64) + 0.5) / BINS


# -- accuracy without labels -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calibration:
    """How often rows of each bin of confidence were right.

    Args:
        rows: N_b.
        right: a_b.
        factor: q.
        degrees: of freedom of q.
    """

    rows: Tensor
    right: Tensor
    factor: float = 1.0
    degrees: float = math.inf

    def estimate(self, confidence: Tensor, rows: float) -> tuple[float, float]:
        """Return the estimate of accuracy for a window with these shares of rows by bin, and its standard error.

        >>> half = Calibration(torch.full((2,), 50.0), torch.tensor([0.5, 0.9]))
        >>> [round(number, 4) for number in half.estimate(torch.tensor([0.25, 0.75]), 100.0)]
        [0.8, 0.0512]
        """
        spread = self.right * (1 - self.right)
        calibrating = (confidence.square() * spread / self.rows.clamp(min=1)).sum()
        chance = self.factor * (confidence * spread).sum().clamp(min=RARE / rows) / rows
        return float(confidence @ self.right), math.sqrt(float(calibrating + chance))

    def unseen(self, confidence: Tensor) -> float:
        """Return the share of rows in bins without a row of the reference."""
        return float(confidence[self.rows == 0].sum())


def calibrate(windows: Tensor, layout: Layout) -> Calibration | None:
    """Return the calibration by windows (windows, size + 1) with labels; None if no row has a label.

    Its factor is how far accuracies of these windows are from their estimates, in units of chance, at least 1.
    """
    rows, means = windows[:, -1], windows[:, :-1]
    places = layout.places
    rows = rows * (means[:, places["labels"]].sum(1) > 0.5)
    h, r = means[:, places["confidence"]], means[:, places["right"]]
    counted, right = rows @ h, rows @ r
    if float(counted.sum()) == 0:
        return None
    share = torch.where(counted > 0, right / counted.clamp(min=1e-12), centers())
    off = (r.sum(1) - h @ share).square() * rows
    chance = torch.maximum((h * (share * (1 - share))).sum(1), RARE / rows.clamp(min=1))
    several = int((rows > 0).sum())
    factor = float((off / chance).sum()) / max(several - 1, 1)
    return Calibration(counted, share, max(factor, 1.0), PRIOR + several - 1)


# -- how far a window is from the reference ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Far:
    """How far a window is from the reference: its score, and the number that is furthest, with its sign."""

    score: float
    place: int = 0
    sign: int = 0


def score_of(t: Tensor, degrees: float) -> Far:
    """Return the score of Student's statistics (J,): of the largest, given that there are J.

    >>> score_of(torch.tensor([0.1, -5.0]), 1e9).place, round(score_of(torch.tensor([1.959964]), 1e9).score, 3)
    (1, 1.645)
    """
    from scipy.special import ndtri, stdtr  # here, as every process that plays runs would wait for it

    place = int(t.abs().argmax())
    p = 2 * float(stdtr(degrees, -abs(float(t[place]))))
    chance = -math.expm1(len(t) * math.log1p(-min(p, 1 - 1e-12)))
    score = -float(ndtri(min(max(chance, 1e-300), 1 - 1e-12)))
    return Far(min(max(score, -FAR), MOST), place, int(torch.sign(t[place])))


def numbers_of(windows: Tensor, layout: Layout, kind: str) -> Tensor:
    """Return the numbers of windows (..., J) whose drift is of a kind; of predictions the last is confidence."""
    places = layout.places
    if kind == "inputs":
        return torch.cat([windows[..., places["inputs"]], windows[..., places["squares"]]], -1)
    if kind == "labels":
        return windows[..., places["labels"]]
    h = windows[..., places["confidence"]]
    return torch.cat([windows[..., places["predicted"]], (h @ centers())[..., None]], -1)


def variances(reference: Tensor, layout: Layout, kind: str, rows: float) -> Tensor:
    """Return the variances v_j over rows (J,) by the mean window (size,) of a reference.

    Args:
        reference: the mean window.
        layout: of it.
        kind: what may drift.
        rows: of the window that is looked at.
    """
    x = numbers_of(reference, layout, kind)
    if kind == "inputs":
        mean, square = x.chunk(2)
        v = torch.cat([square - mean.square(), square * (1 - square)])
        return v.clamp(min=1 / max(rows, 1))
    v = (x * (1 - x)).clamp(min=RARE / max(rows, 1))
    if kind == "predictions":  # the last one is the mean confidence
        h = reference[layout.places["confidence"]]
        v[-1] = (h @ centers().square() - (h @ centers()).square()).clamp(min=1 / max(rows, 1))
    return v


def factors(reference: Tensor, layout: Layout, kind: str) -> tuple[Tensor, float]:
    """Return the factors f_j (J,) by which windows of the reference differ more than by chance, and their degrees.

    Args:
        reference: (phases, R, size + 1).
        layout: of its windows.
        kind: what may drift.
    """
    squares, degrees = [], 0
    for windows in reference:
        windows = windows[windows[:, -1] > 0]
        if len(windows) < 2:
            continue
        rows = windows[:, -1]
        mean = rows @ windows[:, :-1] / rows.sum()
        v = variances(mean, layout, kind, float(rows.mean()))
        off = numbers_of(windows[:, :-1], layout, kind) - numbers_of(mean, layout, kind)
        squares.append((off.square() * rows[:, None]).sum(0) / v)
        degrees += len(windows) - 1
    if not squares:
        return torch.ones(numbers_of(reference[0, 0], layout, kind).shape, dtype=torch.float64), PRIOR
    total = torch.stack(squares).sum(0)
    moderated = (PRIOR * (total / degrees).mean() + total) / (PRIOR + degrees)
    return moderated.clamp(min=1.0), PRIOR + degrees


def compare(window: Tensor, group: Group, phase: int, layout: Layout, kind: str) -> Far:
    """Return how far a window (size + 1,) is from those of its phase in the reference."""
    reference = group.reference[phase]
    rows, n = reference[:, -1], float(window[-1])
    mean = rows @ reference[:, :-1] / rows.sum()
    factor, degrees = factors(group.reference, layout, kind)
    v = variances(mean, layout, kind, n)
    off = numbers_of(window[:-1], layout, kind) - numbers_of(mean, layout, kind)
    return score_of(off / (factor * v * (1 / n + 1 / float(rows.sum()))).sqrt(), degrees)


# -- alarms ------------------------------------------------------------------------------------------------------------


def detector(limit: float) -> Any:
    """Return river's Page-Hinkley detector of rises.

    Raises:
        FedtideError: river is not installed.
    """
    try:
        from river.drift import PageHinkley
    except ImportError:
        raise uninstalled('transforms: "watch" needs river', "watch") from None
    # Its sums fade by default, so that a quiet stream would drift up to the limit after ten thousand windows.
    return PageHinkley(min_instances=1, delta=SLACK, threshold=limit, alpha=1.0, mode="up")


def tells_drift(scores: Sequence[float], streams: int = 1) -> bool:
    """Tell whether the last of a stream of scores tells of drift; none before it did.

    Args:
        scores: since the last drift, or since the reference.
        streams: how many streams are watched together.

    >>> tells_drift([0.0] * 9 + [1.0, 0.5]), tells_drift([0.0] * 9 + [8.0])
    (False, True)
    """
    page_hinkley = detector(LIMIT + math.log(streams) / (2 * SLACK))
    for score in scores:
        page_hinkley.update(score)
    return bool(page_hinkley.drift_detected)


def in_words(kind: str, place: int, sign: int, layout: Layout) -> str:
    """Return the words for drift of a kind: of the number that is furthest from the reference, and where it went.

    >>> in_words("inputs", 4, -1, Layout(classes=2, inputs=3)), in_words("predictions", 1, 1, Layout(2, 3))
    ('inputs: input 1 is closer to 0', 'predictions: class 1 is predicted more often')
    """
    how = "more" if sign > 0 else "less"
    if kind == "inputs":
        number, spread = place % layout.inputs, place >= layout.inputs
        went = ("further from" if sign > 0 else "closer to") + " 0" if spread else "higher" if sign > 0 else "lower"
        return f"inputs: input {number} is {went}"
    if kind == "predictions":
        is_class = place < layout.classes
        return f"predictions: class {place} is predicted {how} often" if is_class else f"predictions: {how} sure"
    if kind == "labels":
        return f"labels: rows of class {place} come {how} often"
    return f"meaning: rows are right {how} often than their confidence tells"


# -- a window ----------------------------------------------------------------------------------------------------------


def look(
    group: Group, window: Tensor, phase: int, layout: Layout, *, streams: int = 1, trains: bool = False
) -> tuple[Group, dict[str, Any]]:
    """Look at a window of a group: it joins the reference, or is compared with it.

    Args:
        group: what is known.
        window: (size + 1,) means over rows, and their number, which is not 0.
        phase: of the window in its period.
        layout: of the window.
        streams: how many streams are watched together.
        trains: whether the model is trained between windows, so that its predictions change by themselves.

    Returns:
        The knowledge of the group from now on, and a line of the record.
    """
    rows, confidence = float(window[-1]), window[layout.places["confidence"]]
    line: dict[str, Any] = {"rows": round(rows), "confidence": float(confidence @ centers())}
    is_labeled = float(window[layout.places["labels"]].sum()) > 0.5
    accuracy = float(window[layout.places["right"]].sum()) if is_labeled else None
    line["accuracy"] = accuracy
    recent = torch.cat([group.recent, window[None]])[-group.reference.shape[1] :] if trains else group.recent
    if group.learns(phase):
        reference = group.reference.clone()
        free = int((reference[phase, :, -1] > 0).sum())
        if free < reference.shape[1]:
            reference[phase, free] = window
        quiet = torch.zeros(reference.shape[1], dtype=torch.float64)
        joined = replace(group, reference=reference, recent=recent, scores=group.scores or dict.fromkeys(KINDS, quiet))
        return joined, line | {"estimate": None, "far": {}, "unknown": ["reference"], "alarms": []}
    has_labels = float(group.reference[..., layout.places["labels"]].sum()) > 0
    compared = {"inputs": layout.inputs, "predictions": not trains, "labels": is_labeled and has_labels}
    far = {kind: compare(window, group, phase, layout, kind) for kind, can in compared.items() if can}
    unknown = []
    calibration = calibrate(group.recent if trains else group.reference.flatten(0, 1), layout)
    if calibration is None:
        unknown.append("no labels")
        line["estimate"] = None
    else:
        estimate, error = calibration.estimate(confidence, rows)
        line |= {"estimate": estimate, "error": error}
        if accuracy is not None:
            t = torch.tensor([(accuracy - estimate) / max(error, 1e-9)], dtype=torch.float64)
            far["meaning"] = score_of(t, calibration.degrees)
            if far["meaning"].score > FAR:
                unknown.append("not as counted")
        before = group.scores["inputs"][-len(group.reference[phase]) :]
        # Whether it was calibrated, at least in part, before the drift.
        is_old = not trains or len(before) < len(group.reference[phase]) or bool((before <= FAR).any())
        if "inputs" in far and far["inputs"].score > FAR and is_old:
            unknown.append("new inputs")
        if calibration.unseen(confidence) > NEW:
            unknown.append("new confidences")
        if calibration.factor > LOOSE:
            unknown.append("not calibrated")
    if rows < FEW:
        unknown.append("few rows")
    alarms, scores = [], dict(group.scores)
    for kind, one in far.items():
        scores[kind] = torch.cat([scores[kind], torch.tensor([one.score], dtype=torch.float64)])[-MEMORY:]
        if tells_drift(scores[kind].tolist(), streams):
            alarms.append(kind)
            scores[kind] = scores[kind][:0]
    scored = {kind: {"score": one.score, "place": one.place, "sign": one.sign} for kind, one in far.items()}
    return replace(group, recent=recent, scores=scores), line | {"far": scored, "unknown": unknown, "alarms": alarms}
