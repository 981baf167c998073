"""Five pictures of an inspection."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedtide.draw import figures
from fedtide.draw.holdings import draw_label_shares, draw_rows, map_shares
from fedtide.draw.html import Pictured
from fedtide.inspection import shares
from fedtide.inspection.answers import WHY, Answers, slot_name
from fedtide.inspection.questions import CELLS, CYCLES, Cycle, Sample, group_of_rows, local_slots
from fedtide.inspection.shares import count_by

SHOWN = 60
"""Clients in the picture of labels."""
CROWDS = 3
"""Groups whose hours are shown."""
WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def pictures(answers: Answers) -> list[Pictured]:
    """Return titles, captions and figures; None for a figure if columns are missing."""
    return [
        ("Rows of each client", "From the client with most rows to the one with fewest.", _row_counts(answers)),
        ("Labels of each client", f"The share of each label in a client's rows, of {SHOWN} clients at most.",
         _labels(answers)),
        ("When rows come", f"Rows by hour and weekday, of all clients and of {CROWDS} groups at most.",
         _hours(answers)),
        ("Why the mix changes",
         "How far the mix of a time lies from the common one: because other clients are there, and because the same "
         "clients hold other things. Dotted: the same with whole cycles turned at random.",
         _mix(answers)),
        ("What drifts",
         "Above, the mix of labels in periods with equally many rows. Below, the share of the next period's labels "
         "that models explain: trained on all past data, on the last three periods, and on all past data with half of "
         "the period itself.",
         _drift(answers)),
    ]  # fmt: skip


def _row_counts(answers: Answers) -> figures.Drawn | None:
    """Draw the number of rows of each client, from most to fewest."""
    rows = answers.rows
    return None if rows.client is None else draw_rows(np.bincount(rows.client, minlength=rows.clients))


def _labels(answers: Answers) -> figures.Drawn | None:
    """Draw the label shares of some clients."""
    rows = answers.rows
    if rows.clients < 2 or rows.client is None:
        return None
    spread = np.linspace(0, rows.clients - 1, min(SHOWN, rows.clients)).round().astype(int)
    counts = count_by(rows.client, rows.label, (rows.clients, len(rows.label_names)))
    return draw_label_shares(counts[spread], rows.clients, rows.label_names)


@figures.styled
def _hours(answers: Answers) -> figures.Drawn | None:
    """Draw rows by hour and weekday, of all and of each group; by weekday alone if times are dates."""
    rows, clients = answers.rows, answers.clients
    if rows.seconds is None or not {"day", "week"} & set(answers.cycles):
        return None
    hour, _ = local_slots(rows.seconds, CYCLES["day"][0], 24)
    weekday, _ = local_slots(rows.seconds, CYCLES["week"][0], 7)
    crowds = {"all clients": np.ones(len(hour), dtype=bool)}
    if clients is not None and clients.crowds:
        group = group_of_rows(rows, clients)
        crowds |= {f"group {number + 1}": group == number for number in range(min(int(group.max()) + 1, CROWDS))}
    figure = Figure(figsize=(9.6 if len(crowds) > 1 else 6.4, 2.6))
    panels = figure.subplots(1, len(crowds), sharey=True, squeeze=False)[0]
    for axes, (name, members) in zip(panels, crowds.items(), strict=True):
        axes.set_title(name, fontsize=10)
        if "day" not in answers.cycles:
            axes.bar(WEEKDAYS, np.bincount(weekday[members], minlength=7), color=figures.look(0).color)
            continue
        counts = count_by(weekday[members], hour[members], (7, 24))
        image = axes.imshow(counts, aspect="auto", cmap=figures.LEVEL, vmin=0, interpolation="nearest")
        axes.set_xticks([0, 6, 12, 18], ["0 h", "6", "12", "18"])
        axes.set_yticks(range(7), WEEKDAYS)
        axes.grid(False)
        figure.colorbar(image, ax=axes, pad=0.01, label="rows")
    return figures.svg(figure, "when rows come")


@figures.styled
def _mix(answers: Answers) -> figures.Drawn | None:
    """Draw the change of the mix over each cycle, in two bands: by other clients, and by the same ones."""
    if not answers.cycles:
        return None
    figure = Figure(figsize=(9.6 if len(answers.cycles) > 1 else 6.4, 3.2))
    panels = figure.subplots(1, len(answers.cycles), sharey=True, squeeze=False)[0]
    for axes, cycle in zip(panels, answers.cycles.values(), strict=True):
        _bands(axes, answers.rows, cycle)
    panels[0].set_ylabel("distance from the common mix, %")
    panels[0].set_ylim(bottom=0)
    figures.figure_legend(figure, panels)
    return figures.svg(figure, "why the mix changes")


def _bands(axes: Axes, rows: Sample, cycle: Cycle) -> None:
    """Draw one cycle: of features if these change by more than labels."""
    slots, changes, x = cycle.slots, cycle.changes, np.arange(cycle.slots)
    name, what, kinds, chance = "labels", rows.label, len(rows.label_names), (changes.others, changes.same)
    if rows.cell is not None and changes.look_others and changes.look_same and changes.look > changes.label:
        name, what, kinds, chance = "features", rows.cell, CELLS, (changes.look_others, changes.look_same)
    seen = 100 * shares.changes(cycle.slot, rows.owner, what, (slots, max(rows.clients, 1), kinds))
    seen[:, np.bincount(cycle.slot, minlength=slots) == 0] = np.nan
    for number, why in enumerate(WHY.values()):
        color = figures.look(number).color
        axes.plot(x, seen[number], color=color, lw=1.8, marker="os"[number], ms=4, label=why)
        axes.fill_between(x, 0, seen[number], color=color, alpha=0.15, lw=0)
        axes.axhline(100 * chance[number].chance, color=color, lw=1.1, ls=(0, (1, 1.5)))
    hours = [slot_name(cycle, slot).split(" ")[0] for slot in range(slots)]
    few = x if slots <= 8 else x[:: slots // 4]
    names = {"day": hours, "week": WEEKDAYS, "year": MONTHS}[cycle.name]
    axes.set_xticks(few, [names[slot] for slot in few])
    axes.set_xlabel({"day": "hour of the day", "week": "day of the week", "year": "time of the year"}[cycle.name])
    axes.set_title(f"{name} over the {cycle.name}", fontsize=10)


@figures.styled
def _drift(answers: Answers) -> figures.Drawn | None:
    """Draw the label mix of blocks of time, and below it the shares that models explain of the next block."""
    rows, drift = answers.rows, answers.drift
    if drift is None or rows.seconds is None:
        return None
    blocks, ahead = drift.blocks, drift.ahead
    figure, panels = figures.stack_panels([2.4] if ahead is None else [2.2, 2.4])
    mixes = shares.normalize(count_by(drift.block, rows.label, (blocks, len(rows.label_names))))
    image = map_shares(panels[0], mixes, rows.label_names)
    figure.colorbar(image, ax=panels[0], label="share of rows, %", pad=0.01)
    if ahead is not None:
        late = np.arange(blocks - len(ahead.blocks), blocks)
        models = "all past data", "last three periods", "with half of the period itself"
        curves = {number: [(late, explained)] for number, explained in enumerate(ahead.blocks.T)}
        figures.bands(panels[1], curves, models, "explained of the\nnext period, %")
        panels[1].set_ylim(max(100 * float(ahead.blocks.min()) - 3, -25), None)
        figures.legend_above(panels[1])
    line, step, at = drift.course
    marks = drift.steps or ((at,) if step > max(line, 0.5) else ())
    for axes in panels if answers["drift"].found else ():
        for mark in marks:
            axes.axvline(mark - 0.5, color="#555555", lw=1.2, ls=(0, (4, 3)))
    begins = [np.datetime64(int(rows.seconds[drift.block == number].min() // 60), "m") for number in range(blocks)]
    if len({begin.astype("datetime64[D]") for begin in begins}) == blocks:
        begins = [begin.astype("datetime64[D]") for begin in begins]
    few = range(0, blocks, -(-blocks // 5))
    panels[-1].set_xticks(few, [str(begins[number]) for number in few])
    panels[-1].set_xlabel("start of the period")
    return figures.svg(figure, "what drifts")
