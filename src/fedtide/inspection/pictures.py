"""Six pictures of what was found."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from fedtide.inspection import shares
from fedtide.inspection.findings import WHY, Findings, slot_name
from fedtide.inspection.questions import CELLS, CYCLES, Cycle, Sample, group_of_rows, local_slots, mean_looks
from fedtide.inspection.shares import counted
from fedtide.report.figures import GROUP_COLORS, STYLE, Drawn, label, legend_above, look, svg
from fedtide.report.heatmaps import LEVEL, NAMED, SHARE
from fedtide.report.sizes import draw_rows

FEW = 12
"""Clients whose names have room."""
SHOWN = 60
"""Clients in the picture of labels."""
MARKS = "os^D"
CROWDS = 3
"""Groups whose hours are shown."""
WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")


def pictures(found: Findings) -> list[tuple[str, str, Drawn | None]]:
    """Return titles, captions and figures; None where columns are missing."""
    with matplotlib.rc_context(STYLE):
        return [
            ("Rows of each client", "From the client with most rows to the one with fewest.", rows_per_client(found)),
            (
                "Labels of each client",
                "The share of each label in a client's rows, and beside it the same with labels shuffled: what the eye "
                f"takes for a pattern there is chance. {_some_clients(found)}",
                label_maps(found),
            ),
            (
                "Map of the clients",
                "Mean features of each client's rows, less those of their labels, along the two directions in which "
                "they differ most; in hollow rings the same with clients shuffled among rows of a label. "
                "The larger a mark, the more rows.",
                client_map(found),
            ),
            (
                "When rows come",
                f"Rows by hour and weekday, of all clients and of {_some_groups(found)}.",
                hours(found),
            ),
            (
                "Why the mix changes",
                "How far the mix of a time lies from the common one: as other clients are there, and as the same "
                "clients hold other things. Dotted: the same with whole cycles turned at random.",
                mix(found),
            ),
            (
                "What drifts",
                "Above, the mix of labels in stretches of time with equally many rows. Below, how much of the next "
                "stretch is explained by a model of all rows before it, of the last three stretches, and of all before "
                "with half of the stretch itself.",
                drift(found),
            ),
        ]


def _some_clients(found: Findings) -> str:
    clients = found.rows.clients
    some = f"{SHOWN} of {clients:,} clients, spread over the order. " if clients > SHOWN else ""
    return f"{some}Clients stand in the order of their groups, then of their commonest label."


def _some_groups(found: Findings) -> str:
    groups = found.clients.groups if found.clients is not None else ("", np.zeros(0))
    return f"the first {CROWDS} groups" if groups[0] and len(np.unique(groups[1])) > CROWDS else "each group"


def rows_per_client(found: Findings) -> Drawn | None:
    """Draw the number of rows of each client, from most to fewest."""
    if found.rows.client is None:
        return None
    return draw_rows(np.bincount(found.rows.client, minlength=found.rows.clients))


def label_maps(found: Findings) -> Drawn | None:
    """Draw the label shares of clients, in the order of groups, beside those with labels shuffled."""
    rows = found.rows
    if found.clients is None or rows.client is None:
        return None
    size = rows.clients, len(rows.label_names)
    real = counted(rows.client, rows.label, size)
    chance = counted(rows.client, rows.rng.at("shown").numpy().permutation(rows.label), size)
    group = np.zeros(rows.clients, dtype=np.int64)
    group[found.clients.members] = found.clients.groups[1]
    figure = Figure(figsize=(9.6, float(np.clip(1.6 + 0.2 * size[1], 2.6, 5.0))))
    panels = figure.subplots(1, 2, sharey=True)
    drawn = None
    mixes = [shares.shares(each) for each in (real, chance)]
    top = max(float(mixes[0].max()), 0.01)
    for axes, mix, title in zip(panels, mixes, ("these data", "labels shuffled"), strict=True):
        order = np.lexsort((-mix.max(1), mix.argmax(1), group))
        if len(order) > SHOWN:
            order = order[np.linspace(0, len(order) - 1, SHOWN).round().astype(int)]
        drawn = axes.imshow(
            100 * mix[order].T,
            aspect="auto",
            cmap=SHARE,
            vmin=0,
            vmax=100 * top,
            interpolation="nearest",
            origin="lower",
        )
        borders = np.flatnonzero(np.diff(group[order])) + 0.5
        for border in borders:
            axes.axvline(border, color="#1d2733", lw=1.2)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("clients")
        axes.set_xticks([])
        if len(order) <= FEW:
            axes.set_xticks(
                range(len(order)), [label(rows.client_names[each]) for each in order], rotation=30, ha="right"
            )
        axes.grid(False)
    panels[0].set_ylabel("label")
    if size[1] <= NAMED:
        panels[0].set_yticks(range(size[1]), [label(name) for name in rows.label_names])
    else:
        panels[0].yaxis.set_major_locator(MaxNLocator(integer=True))
    assert drawn is not None
    figure.colorbar(drawn, ax=panels, label="share of a client's rows, %", pad=0.01)
    return svg(figure, "labels of each client")


def client_map(found: Findings) -> Drawn | None:
    """Draw clients along the two main directions of their mean features, and clients of shuffled rows."""
    rows, clients = found.rows, found.clients
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
        own = group == number
        name = f"group {number + 1} ({own.sum()} client{'s' * bool(own.sum() > 1)})" if clients.crowds else "clients"
        color, marker = GROUP_COLORS[number % 5], MARKS[number % 4]
        axes.scatter(
            places[own, 0], places[own, 1], s=area[own], color=color, marker=marker, alpha=0.8, lw=0, label=name
        )
    axes.margins(x=0.12)
    axes.set_xlabel("first direction")
    axes.set_ylabel("second direction")
    legend_above(axes, room=5.4)
    if len(places) <= FEW:
        figure.draw_without_rendering()  # the layout is what names are placed in
        _name(axes, places, [label(rows.client_names[number]) for number in clients.members])
    return svg(figure, "map of the clients")


def _name(axes: Axes, places: np.ndarray, names: list[str]) -> None:
    """Write names beside marks, each where it covers none that is written already, if there is such a place."""
    inside = axes.get_window_extent()
    taken: list[Bbox] = []
    for place, name in zip(places, names, strict=True):
        text = axes.annotate(name, place, xytext=(6, 6), textcoords="offset points", fontsize=8)
        spots = [(dx, dy) for dy in (6, -12, 17, -23, 28, -34) for dx in (6, -6)]
        for spot in (*spots, spots[0]):  # the first one where none is free
            text.set(position=spot, ha="left" if spot[0] > 0 else "right")
            box = text.get_window_extent()
            free = inside.containsx(box.x0) and inside.containsx(box.x1) and inside.containsy(box.y0)
            if free and inside.containsy(box.y1) and not box.count_overlaps(taken):
                break
        taken.append(box)


def hours(found: Findings) -> Drawn | None:
    """Draw rows by hour and weekday, of all and of each group; by weekday alone where times are dates."""
    rows = found.rows
    if rows.seconds is None or not {"day", "week"} & set(found.cycles):
        return None
    hour, _ = local_slots(rows.seconds, CYCLES["day"][0], 24)
    weekday, _ = local_slots(rows.seconds, CYCLES["week"][0], 7)
    crowds = [("all clients", np.ones(len(hour), dtype=bool))]
    if found.clients is not None and found.clients.crowds:
        group = group_of_rows(rows, found.clients)
        crowds += [(f"group {number + 1}", group == number) for number in range(int(group.max()) + 1)]
    crowds = crowds[: 1 + CROWDS]
    figure = Figure(figsize=(9.6 if len(crowds) > 1 else 6.4, 2.6 if "day" in found.cycles else 2.2))
    panels = figure.subplots(1, len(crowds), sharey=True, squeeze=False)[0]
    for axes, (name, some) in zip(panels, crowds, strict=True):
        if "day" in found.cycles:
            held = counted(weekday[some], hour[some], (7, 24))
            drawn = axes.imshow(held, aspect="auto", cmap=LEVEL, vmin=0, interpolation="nearest")
            axes.set_xticks([0, 6, 12, 18], ["0 h", "6", "12", "18"])
            axes.set_yticks(range(7), WEEKDAYS)
            axes.grid(False)
            bar = figure.colorbar(drawn, ax=axes, pad=0.01)
            bar.ax.yaxis.set_major_locator(MaxNLocator(4, integer=True))
            if axes is panels[-1]:
                bar.set_label("rows")
        else:
            axes.bar(range(7), np.bincount(weekday[some], minlength=7), color=look(0).color)
            axes.set_xticks(range(7), WEEKDAYS)
            axes.set_ylabel("rows")
        axes.set_title(name, fontsize=10)
    return svg(figure, "when rows come")


def mix(found: Findings) -> Drawn | None:
    """Draw the change of the mix over each cycle, in two bands: by other clients, and by the same ones."""
    if not found.cycles:
        return None
    figure = Figure(figsize=(9.6 if len(found.cycles) > 1 else 6.4, 3.2))
    panels = figure.subplots(1, len(found.cycles), sharey=True, squeeze=False)[0]
    for axes, cycle in zip(panels, found.cycles.values(), strict=True):
        _bands(axes, found.rows, cycle)
    panels[0].set_ylabel("distance from the common mix, %")
    panels[0].set_ylim(bottom=0)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper left", ncols=len(names), fontsize=9)
    return svg(figure, "why the mix changes")


def _bands(axes: Axes, rows: Sample, cycle: Cycle) -> None:
    """Draw one cycle: of features where these change by more than labels."""
    slots, changes, x = cycle.slots, cycle.changes, np.arange(cycle.slots)
    name, what, kinds, chance = "labels", rows.label, len(rows.label_names), (changes.others, changes.same)
    if rows.cell is not None and changes.look_others and changes.look_same and changes.look > changes.label:
        name, what, kinds, chance = "features", rows.cell, CELLS, (changes.look_others, changes.look_same)
    size = slots, max(rows.clients, 1), kinds
    seen = 100 * shares.changes(cycle.slot, rows.owner, what, size)[1:]
    seen[:, np.bincount(cycle.slot, minlength=slots) == 0] = np.nan
    for number, why in enumerate(WHY.values()):
        shown = look(number)
        axes.plot(x, seen[number], color=shown.color, lw=1.8, marker="os"[number], ms=4, label=why)
        axes.fill_between(x, 0, seen[number], color=shown.color, alpha=0.15, lw=0)
        axes.axhline(100 * chance[number].chance, color=shown.color, lw=1.1, ls=(0, (1, 1.5)))
    few = x if slots <= 8 else x[:: slots // 4]
    names = {
        "week": WEEKDAYS,
        "year": ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"),
    }
    ticks = (
        [names[cycle.name][at] for at in few]
        if cycle.name in names
        else [slot_name(cycle, at).split(" ")[0] for at in few]
    )
    axes.set_xticks(few, ticks)
    axes.set_xlabel({"day": "hour of the day", "week": "day of the week", "year": "time of the year"}[cycle.name])
    axes.set_title(f"{name} over the {cycle.name}", fontsize=10)


def drift(found: Findings) -> Drawn | None:
    """Draw the label mix of blocks of time, and below it what models explain of the next block."""
    rows, measured = found.rows, found.drift
    if measured is None or rows.seconds is None:
        return None
    blocks = measured.blocks
    mixes = 100 * shares.shares(counted(measured.block, rows.label, (blocks, len(rows.label_names))))
    figure = Figure(figsize=(9.6, 3.0 if measured.ahead is None else 5.2))
    top, *below = figure.subplots(1 if measured.ahead is None else 2, 1, sharex=True, squeeze=False)[:, 0]
    x = np.arange(blocks)
    drawn = top.imshow(mixes.T, aspect="auto", cmap=SHARE, vmin=0, interpolation="nearest", origin="lower",
                       extent=(-0.5, blocks - 0.5, -0.5, mixes.shape[1] - 0.5))  # fmt: skip
    figure.colorbar(drawn, ax=top, label="share of rows, %", pad=0.01)
    top.set_ylabel("label")
    if mixes.shape[1] <= NAMED // 2:
        top.set_yticks(range(mixes.shape[1]), [label(name) for name in rows.label_names])
    else:
        top.yaxis.set_major_locator(MaxNLocator(integer=True))
    top.grid(False)
    for axes in below:
        assert measured.ahead is not None
        told = 100 * measured.ahead.blocks
        late = x[blocks - len(told) :]
        for number, name in enumerate(("all the past", "last three stretches", "with half of the stretch itself")):
            shown = look(number)
            axes.plot(
                late,
                told[:, number],
                color=shown.color,
                ls=shown.dashes,
                marker="os^"[number],
                ms=4,
                lw=1.8,
                label=name,
            )
        axes.set_ylabel("explained of the\nnext stretch, %")
        low = min(float(told.min()), 0)
        axes.set_ylim(max(low - 3, -25), None)
        if low < -25:
            axes.text(
                0.995,
                0.02,
                f"\u25be down to {low:.0f} %",
                transform=axes.transAxes,
                ha="right",
                fontsize=8,
                color="#555555",
            )
        legend_above(axes)
    line, step, at = measured.course
    marked = measured.steps or ((at,) if step > max(line, 0.5) else ())
    for axes in (top, *below) if found["drift"].found else ():
        for each in marked:
            axes.axvline(each - 0.5, color="#555555", lw=1.2, ls=(0, (4, 3)))
    begins = [float(rows.seconds[measured.block == number].min()) for number in range(blocks)]
    few = x[:: max(blocks // 5, 1)]
    (below or [top])[-1].set_xticks(few, [_date(begins[number], begins) for number in few])
    (below or [top])[-1].set_xlabel("begin of the stretch")
    return svg(figure, "what drifts")


def _date(seconds: float, begins: list[float]) -> str:
    if max(abs(begin) for begin in begins) > 2e10:
        return f"{seconds:.4g}"
    wide = begins[-1] - begins[0] > 20 * 86400
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d" if wide else "%m-%d %H:%M")
