"""Windows of a run that is watched: a table, a page that is written anew, and a command for each alarm."""

import json
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedtide.core.atomic import check_free, write_text
from fedtide.core.errors import UNREADABLE, FedtideError, printable, refused, unknown
from fedtide.core.record import ALARMS, STOPPED, read_rounds
from fedtide.draw import figures
from fedtide.draw.html import MARK, render, to_pictures
from fedtide.draw.prose import counted
from fedtide.draw.tables import Table
from fedtide.report.terminal import print_table, say
from fedtide.runs.folder import Planned, load, plan
from fedtide.transforms import Watch
from fedtide.transforms.windows import FAR, KINDS

PAGE, TOLD = "watch.html", "watch.json"
"""Files that are written beside the runs: the page, and how many alarms of each run were told to a command."""
LOOK = 1.0
"""Seconds between two looks at the record."""
LAST = 20
"""Windows that are printed, the last ones."""
SHOWN = 500
"""Windows and alarms in the tables of the page, the last ones; the picture has all."""
PATIENCE = 60.0
"""Seconds that a command for an alarm may take."""
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
class Watched:
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
        try:
            return [
                {"round": int(line["round"]), **_checked(line["facts"]["watch"])}
                for line in read_rounds(self.run.folder)
                if "watch" in line.get("facts", {})
            ]
        except UNREADABLE as error:
            raise FedtideError(f"{self.run.folder / 'rounds.jsonl'}: damaged ({printable(error)})") from None

    @property
    def alarms(self) -> list[dict[str, Any]]:
        """Lines of its file of alarms.

        Raises:
            FedtideError: the file is damaged.
        """
        lines = read_rounds(self.run.folder, ALARMS)
        try:
            return [{**line, "round": int(line["round"]), "text": str(line["text"])} for line in lines]
        except UNREADABLE as error:
            raise FedtideError(f"{self.run.folder / ALARMS}: damaged ({printable(error)})") from None

    def since(self, lines: Sequence[dict[str, Any]]) -> str:
        """Say which rounds came after the last window, because a model that trains for an alarm is not watched."""
        last, played = lines[-1]["round"] + 1 if lines else 0, len(read_rounds(self.run.folder))
        return f" {counted(played - last, 'round')} of training came after it." if lines and played > last else ""

    @property
    def is_over(self) -> bool:
        """Tell whether no round comes any more."""
        lines = read_rounds(self.run.folder)
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


def watched(root: Path, method: str | None = None, seed: int | None = None) -> list[Watched]:
    """Return the runs of a run folder, or of a site, that are watched.

    Args:
        root: the folder.
        method: name of one of its methods; None means all.
        seed: one of its seeds; None means all.

    Raises:
        FedtideError: none is watched, or there is no such method or seed.
    """
    folder = root / "run" if (root / "site.toml").is_file() else root
    if folder != root and not folder.exists():
        raise FedtideError(f"{root}: no round is played yet; start the server: fedtide serve {root}")
    runs = plan(load(folder, imports=False), folder)
    for key, value, of in (("--method", method, "method"), ("--seed", seed, "seed")):
        values = [str(run.seed if of == "seed" else run.method.name) for run in runs]
        if value is not None and str(value) not in values:
            raise unknown(key, str(value), list(dict.fromkeys(values)))
    chosen = [
        Watched(run, rule)
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


def write_page(root: Path, runs: Sequence[Watched]) -> Path:
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
    over = all(one.is_over for one in runs)
    values = {"title": f"Watch: {experiment.title or root.name}", "about": "", "environments": (), "parts": parts}
    write_text(out, render("watch.html", is_over=over, **values))
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


# -- telling -----------------------------------------------------------------------------------------------------------


def tell_command(runs: Sequence[Watched], command: str) -> Iterator[str]:
    """Run a command for each alarm that it was not told, with the alarm as JSON on its standard input; yield failures.

    An alarm is told if the command ends with status 0. A process that is killed in between tells the last alarm again.

    Raises:
        FedtideError: the file of what was told is damaged.
    """
    words = command_of(command)
    for one in runs:
        last, rounds = _read_told(one.run.folder), [alarm["round"] for alarm in one.alarms]
        for number, alarm in enumerate(one.alarms):
            place = alarm["round"], rounds[:number].count(alarm["round"])
            if place <= last:
                continue
            line, fault = {"run": str(one.run.folder), **alarm}, ""
            try:
                done = subprocess.run(words, input=json.dumps(line) + "\n", text=True, capture_output=True,
                                      timeout=PATIENCE, check=False)  # fmt: skip
                if done.returncode:
                    why = done.stderr.strip().splitlines()[-1:] or [""]
                    fault = f"ended with status {done.returncode} {why[0]}".rstrip()
            except subprocess.TimeoutExpired:
                fault = f"was ended after {PATIENCE:.0f} s"
            except OSError as error:
                fault = f"cannot be run ({error.strerror})"
            if fault:
                yield f"--on-alarm: {words[0]} {fault}; it is told again with the next window"
                break
            write_text(one.run.folder / TOLD, json.dumps(place) + "\n")


def command_of(command: str) -> list[str]:
    """Return the words of a command, which no shell reads.

    Raises:
        FedtideError: it has no words, or a quotation mark without its second one.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise FedtideError(f"--on-alarm: found {command!r}, allowed: a command with arguments ({error})") from None
    if not words:
        raise FedtideError("--on-alarm: found '', allowed: a command with arguments")
    if shutil.which(words[0]) is None:
        raise refused("--on-alarm", words[0], "a program that can be run")
    return words


def _read_told(folder: Path) -> tuple[int, int]:
    """Return the round of the last alarm of a run that a command was told, and its place among those of the round."""
    path = folder / TOLD
    if not path.is_file():
        return -1, 0
    try:
        number, place = json.loads(path.read_text(encoding="utf-8"))
        return int(number), int(place)
    except (*UNREADABLE, TypeError) as error:
        raise FedtideError(f"{path}: damaged ({printable(error)}); remove it to tell all alarms again") from None


def follow(root: Path, runs: Sequence[Watched], screen: Any, *, command: str | None, again: bool) -> Path:
    """Print windows and alarms, run a command for each alarm, and write the page; return its path.

    Args:
        root: the folder.
        runs: those that are watched.
        screen: prints.
        command: for each alarm; None for none.
        again: whether to go on until all runs are over; then a line is printed for each window.

    Raises:
        FedtideError: a record is damaged, or the page cannot be written.
    """
    if command is not None:
        command_of(command)
    printed = {one.run.folder: 0 for one in runs}
    alarmed, page = dict(printed), root / PAGE
    if not again:
        for one in runs:
            print_table(table_of(one.lines[-LAST:]), screen, one.run.title)
            say(unseen(one.rule), screen)
    while True:
        over = all(one.is_over for one in runs)
        is_new = False
        for one in runs:
            lines, alarms = one.lines, one.alarms
            if again and (fresh := lines[printed[one.run.folder] :]):
                for number in range(len(fresh)):
                    say(f"{one.run.title}: {headline(fresh[: number + 1], alarms)}", screen)
            for alarm in alarms[alarmed[one.run.folder] :]:
                say(f"alarm: {one.run.title}: window {alarm['round'] + 1}: {alarm['text']}", screen)
            is_new |= len(lines) > printed[one.run.folder] or len(alarms) > alarmed[one.run.folder]
            printed[one.run.folder], alarmed[one.run.folder] = len(lines), len(alarms)
        if is_new or not page.is_file() or over:
            write_page(root, runs)
            for line in tell_command(runs, command) if command is not None else ():
                say(line, screen)
        if over or not again or screen.quiet:
            return page
        time.sleep(LOOK)
