"""Six pictures of an inspection."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from fedtide.draw.figures import GROUP_COLORS, LEVEL, SHARE, STYLE, Drawn, label, legend_above, look, svg
from fedtide.draw.holdings import NAMED, draw_rows
from fedtide.inspection import shares
from fedtide.inspection.answers import WHY, Answers, slot_name
from fedtide.inspection.questions import CELLS, CYCLES, Cycle, Sample, group_of_rows, local_slots, mean_looks
from fedtide.inspection.shares import count_by

FEW = 12
"""Clients whose names have room."""
SHOWN = 60
"""Clients in the picture of labels."""
MARKS = "os^D"
CROWDS = 3
"""Groups whose hours are shown."""
WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def pictures(answers: Answers) -> list[tuple[str, str, Drawn | None]]:
    """Return titles, captions and figures; None for a figure if columns are missing."""
    clients = answers.rows.clients
    drawn = f"{SHOWN} of {clients:,} clients, spread over the order. " if clients > SHOWN else ""
    what, group = answers.clients.groups if answers.clients is not None else ("", np.zeros(0))
    groups = f"the first {CROWDS} groups" if what and len(np.unique(group)) > CROWDS else "each group"
    with matplotlib.rc_context(STYLE):
        return [
            (
                "Rows of each client",
                "From the client with most rows to the one with fewest.",
                _row_counts(answers),
            ),
            (
                "Labels of each client",
                "The share of each label in a client's rows, and beside it the same with labels shuffled: any pattern "
                f"there is chance. {drawn}Clients stand in the order of their groups, then of their commonest label.",
                _label_maps(answers),
            ),
            (
                "Map of the clients",
                "Mean features of each client's rows, less those of their labels, along the two directions in which "
                "they differ most; in hollow rings the same with clients shuffled among rows of a label. "
                "The larger a mark, the more rows.",
                _client_map(answers),
            ),
            ("When rows come", f"Rows by hour and weekday, of all clients and of {groups}.", _hours(answers)),
            (
                "Why the mix changes",
                "How far the mix of a time lies from the common one: because other clients are there, and because the "
                "same clients hold other things. Dotted: the same with whole cycles turned at random.",
                _mix(answers),
            ),
            (
                "What drifts",
                "Above, the mix of labels in stretches of time with equally many rows. Below, the share of the next "
                "stretch that is explained by a model of all rows before it, of the last three stretches, and of all "
                "before with half of the stretch itself.",
                _drift(answers),
            ),
        ]


def _row_counts(answers: Answers) -> Drawn | None:
    """Draw the number of rows of each client, from most to fewest."""
    if answers.rows.client is None:
        return None
    return draw_rows(np.bincount(answers.rows.client, minlength=answers.rows.clients))


def _map_shares(axes: Axes, mixes: np.ndarray, names: Sequence[str], named: int, **options: Any) -> Any:
    """Draw shares of labels (columns, labels) as a heat map, a column for each row of them; return the image."""
    image = axes.imshow(
        100 * mixes.T, aspect="auto", cmap=SHARE, vmin=0, interpolation="nearest", origin="lower", **options
    )
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if len(names) <= named:
        axes.set_yticks(range(len(names)), [label(name) for name in names])
    axes.grid(False)
    return image


def _label_maps(answers: Answers) -> Drawn | None:
    """Draw the label shares of clients, in the order of groups, beside those with labels shuffled."""
    rows, clients = answers.rows, answers.clients
    if clients is None or rows.client is None:
        return None
    size = rows.clients, len(rows.label_names)
    shuffled = rows.rng.at("shown").numpy().permutation(rows.label)
    mixes = [shares.normalize(count_by(rows.client, labels, size)) for labels in (rows.label, shuffled)]
    group = np.zeros(rows.clients, dtype=np.int64)
    group[clients.members] = clients.groups[1]
    figure = Figure(figsize=(9.6, float(np.clip(1.6 + 0.2 * size[1], 2.6, 5.0))))
    panels = figure.subplots(1, 2, sharey=True)
    top = max(float(mixes[0].max()), 0.01)
    image: Any = None
    for axes, mix, title in zip(panels, mixes, ("these data", "labels shuffled"), strict=True):
        order = np.lexsort((-mix.max(1), mix.argmax(1), group))
        if len(order) > SHOWN:
            order = order[np.linspace(0, len(order) - 1, SHOWN).round().astype(int)]
        image = _map_shares(axes, mix[order], rows.label_names, NAMED, vmax=100 * top)
        for border in np.flatnonzero(np.diff(group[order])) + 0.5:
            axes.axvline(border, color="#1d2733", lw=1.2)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("clients")
        axes.set_xticks([])
        if len(order) <= FEW:
            names = [label(rows.client_names[client]) for client in order]
            axes.set_xticks(range(len(order)), names, rotation=30, ha="right")
    panels[0].set_ylabel("label")
    figure.colorbar(image, ax=panels, label="share of a client's rows, %", pad=0.01)
    return svg(figure, "labels of each client")


def _client_map(answers: Answers) -> Drawn | None:
    """Draw clients along the two main directions of their mean features, and clients of shuffled rows."""
    rows, clients = answers.rows, answers.clients
    if clients is None or rows.z is None or len(clients.members) < 3:
        return None
    picked, member = rows.member_rows()
    z, label_of = rows.z[picked, :-1], rows.label[picked]
    means, sizes = mean_looks(z, label_of, member, len(clients.members))
    turned = shares.within(member, label_of)(rows.rng.at("map").numpy())
    other, _ = mean_looks(z, label_of, turned, len(clients.members))
    center = np.average(means, axis=0, weights=sizes)
    directions = np.linalg.svd((means - center) * np.sqrt(sizes)[:, None], full_matrices=False)[2][:2]
    if len(directions) < 2:
        return None
    places, chance = (means - center) @ directions.T, (other - center) @ directions.T
    group = clients.groups[1]
    figure = Figure(figsize=(6.4, 4.4))
    axes = figure.subplots()
    area = 14 + 90 * sizes / sizes.max()
    rings: dict[str, Any] = {"facecolors": "none", "edgecolors": "#777777", "lw": 0.9, "label": "clients shuffled"}
    axes.scatter(chance[:, 0], chance[:, 1], s=area, zorder=1, **rings)
    for number in np.unique(group):
        member_of = group == number
        count = int(member_of.sum())
        name = f"group {number + 1} ({count} client{'s' * (count > 1)})" if clients.crowds else "clients"
        marks: dict[str, Any] = {"color": GROUP_COLORS[number % 5], "marker": MARKS[number % 4], "label": name}
        axes.scatter(places[member_of, 0], places[member_of, 1], s=area[member_of], alpha=0.8, lw=0, **marks)
    axes.margins(x=0.12)
    axes.set_xlabel("first direction")
    axes.set_ylabel("second direction")
    legend_above(axes, room=5.4)
    if len(places) <= FEW:
        figure.draw_without_rendering()  # names are placed in the layout
        _write_names(axes, places, [label(rows.client_names[number]) for number in clients.members])
    return svg(figure, "map of the clients")


def _write_names(axes: Axes, places: np.ndarray, names: list[str]) -> None:
    """Write names beside marks, so that a name covers no earlier name if there is such a place."""
    inside = axes.get_window_extent()
    taken: list[Bbox] = []
    for place, name in zip(places, names, strict=True):
        text = axes.annotate(name, place, xytext=(6, 6), textcoords="offset points", fontsize=8)
        spots = [(dx, dy) for dy in (6, -12, 17, -23, 28, -34) for dx in (6, -6)]
        for spot in (*spots, spots[0]):  # the first one if none is free
            text.set(position=spot, ha="left" if spot[0] > 0 else "right")
            box = text.get_window_extent()
            free = inside.containsx(box.x0) and inside.containsx(box.x1) and inside.containsy(box.y0)
            if free and inside.containsy(box.y1) and not box.count_overlaps(taken):
                break
        taken.append(box)


def _hours(answers: Answers) -> Drawn | None:
    """Draw rows by hour and weekday, of all and of each group; by weekday alone if times are dates."""
    rows, clients = answers.rows, answers.clients
    if rows.seconds is None or not {"day", "week"} & set(answers.cycles):
        return None
    hour, _ = local_slots(rows.seconds, CYCLES["day"][0], 24)
    weekday, _ = local_slots(rows.seconds, CYCLES["week"][0], 7)
    crowds = [("all clients", np.ones(len(hour), dtype=bool))]
    if clients is not None and clients.crowds:
        group = group_of_rows(rows, clients)
        crowds += [(f"group {number + 1}", group == number) for number in range(int(group.max()) + 1)]
    crowds = crowds[: 1 + CROWDS]
    figure = Figure(figsize=(9.6 if len(crowds) > 1 else 6.4, 2.6 if "day" in answers.cycles else 2.2))
    panels = figure.subplots(1, len(crowds), sharey=True, squeeze=False)[0]
    for axes, (name, members) in zip(panels, crowds, strict=True):
        axes.set_title(name, fontsize=10)
        if "day" not in answers.cycles:
            axes.bar(range(7), np.bincount(weekday[members], minlength=7), color=look(0).color)
            axes.set_xticks(range(7), WEEKDAYS)
            axes.set_ylabel("rows")
            continue
        counts = count_by(weekday[members], hour[members], (7, 24))
        image = axes.imshow(counts, aspect="auto", cmap=LEVEL, vmin=0, interpolation="nearest")
        axes.set_xticks([0, 6, 12, 18], ["0 h", "6", "12", "18"])
        axes.set_yticks(range(7), WEEKDAYS)
        axes.grid(False)
        bar = figure.colorbar(image, ax=axes, pad=0.01)
        bar.ax.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        if axes is panels[-1]:
            bar.set_label("rows")
    return svg(figure, "when rows come")


def _mix(answers: Answers) -> Drawn | None:
    """Draw the change of the mix over each cycle, in two bands: by other clients, and by the same ones."""
    if not answers.cycles:
        return None
    figure = Figure(figsize=(9.6 if len(answers.cycles) > 1 else 6.4, 3.2))
    panels = figure.subplots(1, len(answers.cycles), sharey=True, squeeze=False)[0]
    for axes, cycle in zip(panels, answers.cycles.values(), strict=True):
        _bands(axes, answers.rows, cycle)
    panels[0].set_ylabel("distance from the common mix, %")
    panels[0].set_ylim(bottom=0)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper left", ncols=len(names), fontsize=9)
    return svg(figure, "why the mix changes")


def _bands(axes: Axes, rows: Sample, cycle: Cycle) -> None:
    """Draw one cycle: of features if these change by more than labels."""
    slots, changes, x = cycle.slots, cycle.changes, np.arange(cycle.slots)
    name, what, kinds, chance = "labels", rows.label, len(rows.label_names), (changes.others, changes.same)
    if rows.cell is not None and changes.look_others and changes.look_same and changes.look > changes.label:
        name, what, kinds, chance = "features", rows.cell, CELLS, (changes.look_others, changes.look_same)
    seen = 100 * shares.changes(cycle.slot, rows.owner, what, (slots, max(rows.clients, 1), kinds))[1:]
    seen[:, np.bincount(cycle.slot, minlength=slots) == 0] = np.nan
    for number, why in enumerate(WHY.values()):
        color = look(number).color
        axes.plot(x, seen[number], color=color, lw=1.8, marker="os"[number], ms=4, label=why)
        axes.fill_between(x, 0, seen[number], color=color, alpha=0.15, lw=0)
        axes.axhline(100 * chance[number].chance, color=color, lw=1.1, ls=(0, (1, 1.5)))
    few = x if slots <= 8 else x[:: slots // 4]
    names = {"day": [slot_name(cycle, slot).split(" ")[0] for slot in range(slots)], "week": WEEKDAYS, "year": MONTHS}[
        cycle.name
    ]
    axes.set_xticks(few, [names[slot] for slot in few])
    axes.set_xlabel({"day": "hour of the day", "week": "day of the week", "year": "time of the year"}[cycle.name])
    axes.set_title(f"{name} over the {cycle.name}", fontsize=10)


def _drift(answers: Answers) -> Drawn | None:
    """Draw the label mix of blocks of time, and below it the shares that models explain of the next block."""
    rows, drift = answers.rows, answers.drift
    if drift is None or rows.seconds is None:
        return None
    blocks, ahead = drift.blocks, drift.ahead
    mixes = shares.normalize(count_by(drift.block, rows.label, (blocks, len(rows.label_names))))
    figure = Figure(figsize=(9.6, 3.0 if ahead is None else 5.2))
    panels = figure.subplots(1 if ahead is None else 2, 1, sharex=True, squeeze=False)[:, 0]
    extent = (-0.5, blocks - 0.5, -0.5, mixes.shape[1] - 0.5)
    image = _map_shares(panels[0], mixes, rows.label_names, NAMED // 2, extent=extent)
    figure.colorbar(image, ax=panels[0], label="share of rows, %", pad=0.01)
    panels[0].set_ylabel("label")
    if ahead is not None:
        _explained_ahead(panels[1], 100 * ahead.blocks, blocks)
    line, step, at = drift.course
    marks = drift.steps or ((at,) if step > max(line, 0.5) else ())
    for axes in panels if answers["drift"].found else ():
        for mark in marks:
            axes.axvline(mark - 0.5, color="#555555", lw=1.2, ls=(0, (4, 3)))
    begins = [float(rows.seconds[drift.block == number].min()) for number in range(blocks)]
    few = range(0, blocks, max(blocks // 5, 1))
    panels[-1].set_xticks(few, [_date(begins[number], begins) for number in few])
    panels[-1].set_xlabel("begin of the stretch")
    return svg(figure, "what drifts")


def _explained_ahead(axes: Axes, explained: np.ndarray, blocks: int) -> None:
    """Draw the share of the last blocks that models explain (blocks, 3), in percent."""
    late = range(blocks - len(explained), blocks)
    for number, name in enumerate(("all the past", "last three stretches", "with half of the stretch itself")):
        style: dict[str, Any] = {"color": look(number).color, "ls": look(number).dashes, "marker": "os^"[number]}
        axes.plot(late, explained[:, number], ms=4, lw=1.8, label=name, **style)
    axes.set_ylabel("explained of the\nnext stretch, %")
    low = min(float(explained.min()), 0)
    axes.set_ylim(max(low - 3, -25), None)
    if low < -25:
        below = f"\u25be down to {low:.0f} %"
        axes.text(0.995, 0.02, below, transform=axes.transAxes, ha="right", fontsize=8, color="#555555")
    legend_above(axes)


def _date(seconds: float, begins: list[float]) -> str:
    if max(abs(begin) for begin in begins) > 2e10:
        return f"{seconds:.4g}"
    wide = begins[-1] - begins[0] > 20 * 86400
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d" if wide else "%m-%d %H:%M")
