"""Windows of a run that is watched: a table, and a page."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedtide.core.atomic import check_free, write_text
from fedtide.core.errors import FedtideError, in_shell, unknown
from fedtide.core.record import ALARMS, STOPPED, read_lines
from fedtide.draw import figures
from fedtide.draw.html import MARK, render, to_pictures
from fedtide.draw.prose import counted
from fedtide.draw.tables import Table
from fedtide.runs.folder import Planned, load, plan
from fedtide.transforms import Watch
from fedtide.transforms.windows import FAR, KINDS

PAGE = "watch.html"
"""File that is written beside the runs."""
SHOWN = 500
"""Windows and alarms in the tables of the page, the last ones; the picture has all."""
UNKNOWN = {
    "reference": "the window belongs to the reference",
    "no labels": "no row of the reference has a label, so there is no estimate",
    "new inputs": "inputs are unlike those of the reference, so confidence may mislead",
    "new confidences": "some confidences were not in the reference",
    "not as counted": "labels of the window itself tell another accuracy",
    "not calibrated": "confidence did not tell the accuracy of the reference's own windows",
    "few rows": "there are few rows",
}
"""Why a window's accuracy is not known, by the word of the record."""


@dataclass(frozen=True)
class WatchedRun:
    """A run that is watched.

    Args:
        run: which.
        rule: the transform.
    """

    run: Planned
    rule: Watch

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Lines of its record that are windows, each with its `round`.

        Raises:
            FedtideError: the record is damaged.
        """

        def read(line: Any) -> dict[str, Any]:
            is_window = "watch" in line.get("facts", {})
            return {"round": int(line["round"]), **_checked(line["facts"]["watch"])} if is_window else {}

        return [window for window in read_lines(self.run.folder, read=read) if window]

    @property
    def alarms(self) -> list[dict[str, Any]]:
        """Lines of its file of alarms.

        Raises:
            FedtideError: the file is damaged.
        """

        def read(line: Any) -> dict[str, Any]:
            return {**line, "round": int(line["round"]), "text": str(line["text"])}

        return read_lines(self.run.folder, ALARMS, read)

    def since(self, lines: Sequence[dict[str, Any]]) -> str:
        """Say which rounds came after the last window, because a model that trains for an alarm is not watched."""
        last, played = lines[-1]["round"] + 1 if lines else 0, len(read_lines(self.run.folder))
        return f" {counted(played - last, 'round')} of training came after it." if lines and played > last else ""

    @property
    def is_over(self) -> bool:
        """Tell whether no round comes any more."""
        lines = read_lines(self.run.folder)
        return bool(lines) and (len(lines) >= self.run.experiment.rounds or STOPPED in lines[-1])


def _checked(line: dict[str, Any]) -> dict[str, Any]:
    """Return a window of the record; raise a ValueError or the like if it is not what a watch writes."""
    if not line["rows"]:
        return {"rows": 0, "refused": str(line.get("refused", ""))}
    numbers = {name: None if line.get(name) is None else float(line[name])
               for name in ("accuracy", "estimate", "error")}  # fmt: skip
    scores = {kind: float(line["far"][kind]["score"]) for kind in KINDS if kind in line["far"]}
    return {"rows": int(line["rows"]), **numbers, "scores": scores,
            "unknown": [str(word) for word in line["unknown"]],
            "alarms": [f"{alarm['text']}" for alarm in line["alarms"]],
            "groups": [None if one is None else _checked({**one, "alarms": []})
                       for one in line.get("groups", ())]}  # fmt: skip


def watched(root: Path, method: str | None = None, seed: int | None = None) -> list[WatchedRun]:
    """Return the runs of a run folder, or of a site, that are watched.

    Args:
        method: name of one of its methods; None means all.
        seed: one of its seeds; None means all.

    Raises:
        FedtideError: none is watched, or there is no such method or seed.
    """
    folder = root / "run" if (root / "site.toml").is_file() else root
    if folder != root and not folder.exists():
        raise FedtideError(f"{root}: no round is played yet; start the server: fedtide serve {in_shell(root)}")
    runs = plan(load(folder, imports=False), folder)
    for key, value, of in (("--method", method, "method"), ("--seed", seed, "seed")):
        values = [str(run.seed if of == "seed" else run.method.name) for run in runs]
        if value is not None and str(value) not in values:
            raise unknown(key, str(value), list(dict.fromkeys(values)))
    chosen = [
        WatchedRun(run, rule)
        for run in runs
        for rule in run.method.transforms
        if isinstance(rule, Watch) and method in (None, run.method.name) and seed in (None, run.seed)
    ]
    if not chosen:
        raise FedtideError(f'{root}: no method is watched; add transforms = ["watch"] to one')
    return chosen


def table_of(lines: Sequence[dict[str, Any]]) -> Table:
    """Return the table of windows."""
    rows = []
    for line in lines:
        if not line["rows"]:
            rows.append([str(line["round"] + 1), "0", *["-"] * 6, line["refused"] or "no rows", ""])
            continue
        estimate = "-" if line["estimate"] is None else f"{100 * line['estimate']:.1f} ± {100 * line['error']:.1f} %"
        accuracy = "-" if line["accuracy"] is None else f"{100 * line['accuracy']:.1f} %"
        scores = ["-" if kind not in line["scores"] else f"{line['scores'][kind]:z.1f}" for kind in KINDS]
        unsure = ", ".join(line["unknown"])
        alarms = "; ".join(line["alarms"])
        rows.append([str(line["round"] + 1), str(line["rows"]), estimate, accuracy, *scores, unsure, alarms])
    return Table(["window", "rows", "estimate", "accuracy", *KINDS, "unsure because", "alarms"], rows)


def group_table(line: dict[str, Any]) -> Table | None:
    """Return the table of the groups of a window; None if there are none."""
    groups = [(number, one) for number, one in enumerate(line.get("groups", ())) if one is not None]
    if not groups:
        return None
    whole = table_of([{**one, "round": number - 1} for number, one in groups])
    return Table(["group", *whole.header[1:-1]], [row[:-1] for row in whole.rows])


@figures.styled
def draw(lines: Sequence[dict[str, Any]]) -> figures.Drawn | None:
    """Draw the estimated accuracy with its error and the counted one, and below them the scores; None without rows."""
    counted_lines = [line for line in lines if line["rows"]]
    if not any(line["scores"] for line in counted_lines):
        return None
    x = np.array([line["round"] + 1 for line in counted_lines])

    def column(name: str) -> np.ndarray:
        return np.array([np.nan if line[name] is None else 100 * line[name] for line in counted_lines])

    figure, (above, below) = figures.stack_panels([2.6, 2.4])
    estimate, error, accuracy = column("estimate"), column("error"), column("accuracy")
    if np.isfinite(estimate).any():
        look = figures.look(0)
        above.plot(x, estimate, color=look.color, ls=look.dashes, lw=1.8, label="estimate without labels")
        above.fill_between(x, estimate - 2 * error, estimate + 2 * error, color=look.color, alpha=0.2, lw=0,
                           label="two standard errors")  # fmt: skip
    if np.isfinite(accuracy).any():
        above.plot(x, accuracy, color=figures.look(1).color, ls="", marker="o", ms=3, label="counted by labels")
    above.set_ylabel("accuracy, %")
    for number, kind in enumerate(KINDS):
        scores = np.array([line["scores"].get(kind, np.nan) for line in counted_lines])
        if np.isfinite(scores).any():
            look = figures.look(number + 2)  # a color has one meaning
            # The first ones are the widest, so that others that have the same scores do not hide them.
            below.plot(x, scores, color=look.color, ls=look.dashes, lw=3.2 - 0.6 * number, label=kind)
    below.axhline(FAR, color=figures.OWN_COLOR, lw=0.9, ls=(0, (1, 2)), label="limit: unlike the reference")
    alarmed = [line for line in counted_lines if line["alarms"]]
    references = [line["round"] + 1 for line in counted_lines if "reference" in line["unknown"]]
    for axes in (above, below):
        figures.mark_events(axes, [line["round"] + 1 for line in alarmed])
        for place in references:
            axes.axvspan(place - 0.5, place + 0.5, color=figures.OWN_COLOR, alpha=0.08, lw=0,
                         label="reference" if place == references[0] else None)  # fmt: skip
    if alarmed:
        highest = [max(line["scores"].values(), default=0.0) for line in alarmed]
        places = [line["round"] + 1 for line in alarmed]
        below.plot(places, highest, color="#B00020", ls="", marker="^", ms=7, clip_on=False, label="alarm")
    below.set_ylabel("score of drift")
    for axes in (above, below):
        figures.over_rounds(axes, min(int(x[0]), int(x[-1]) - 1), int(x[-1]) + 1 + len(x) // 40)
    above.set_xlabel("")
    below.set_xlabel("window")
    figures.small_legend(above)
    figures.small_legend(below, most=6)
    return figures.svg(figure, "accuracy and drift of windows")


def write_page(root: Path, runs: Sequence[WatchedRun]) -> Path:
    """Write the page of all windows and alarms; return its path.

    Raises:
        FedtideError: another file is in its place, or a record is damaged.
    """
    out = root / PAGE
    check_free(out, MARK)
    parts = []
    for one in runs:
        lines = one.lines
        last: dict[str, Any] = lines[-1] if lines else {}
        parts.append({
            "title": one.run.title, "headline": headline(lines, one.alarms) + one.since(lines),
            "alarms": [f"window {alarm['round'] + 1}: {alarm['text']}" for alarm in one.alarms[-SHOWN:]],
            "pictures": to_pictures([("Accuracy and drift", CAPTION, draw(lines))], one.run.title),
            "groups": group_table(last), "windows": table_of(lines[::-1][:SHOWN]),
            "unknown": [f"{word}: {why}" for word, why in UNKNOWN.items() if any(
                word in line.get("unknown", ()) for line in lines[-SHOWN:])],
            "unseen": unseen(one.rule),
        })  # fmt: skip
    experiment = runs[0].run.experiment
    values = {"title": f"Watch: {experiment.title or root.resolve().name}", "is_over": all(one.is_over for one in runs)}
    write_text(out, render("watch.html", about="", environments=(), parts=parts, **values))
    return out


CAPTION = (
    "Above, the accuracy that confidences tell, and the accuracy counted where labels were. Below, how far each window "
    "is from the reference: without drift a score is about 0 ± 1, and lower if the same rows come each time. In words, "
    "± is one standard error."
)


def unseen(rule: Watch) -> str:
    """Name the changes that a watch cannot see in any window."""
    if rule.labels == "always":
        return "Labels of every window are counted, so a change of their meaning is told."
    return "Labels of later windows are not counted. If the same inputs mean other labels, nothing here can tell."


def headline(lines: Sequence[dict[str, Any]], alarms: Sequence[dict[str, Any]]) -> str:
    """Say in a sentence how the last window was.

    Args:
        lines: of the record, up to this window.
        alarms: of the run.
    """
    if not lines:
        return "No window is counted yet."
    last = lines[-1]
    many = counted(sum(alarm["round"] <= last["round"] for alarm in alarms), "alarm")
    if not last["rows"]:
        return f"Window {last['round'] + 1}: {last['refused'] or 'no rows'}; {many} so far."
    if "reference" in last["unknown"]:
        return f"Window {last['round'] + 1} belongs to the reference; {many} so far."
    if last["estimate"] is None:
        return f"Window {last['round'] + 1}: the accuracy is not known; {many} so far."
    unsure = "" if not last["unknown"] else f" (not sure: {', '.join(last['unknown'])})"
    accuracy = f"{100 * last['estimate']:.1f} ± {100 * last['error']:.1f} %"
    return f"Window {last['round'] + 1}: about {accuracy} of rows are right{unsure}; {many} so far."
