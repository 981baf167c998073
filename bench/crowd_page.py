"""Sections of the page about crowds, clients that keep much, and precision."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Table = Callable[[Sequence[str], Sequence[Sequence[Any]]], list[str]]
Curves = dict[str, list[tuple[float, float]]]
NAMES = {"shared": "lists of shared pictures", "generated": "generated, no lists"}


def registered(lines: list[dict[str, Any]], picture: Path, about: str) -> list[str]:
    """Resident memory over registered clients; the picture is written beside the page."""
    curves = _curves(lines, "clients", lambda line: line["end_mb"])
    title = "Memory over registered clients"
    write_curves(picture, curves, "registered clients", "resident memory, MB", title, flat=True)
    last = [line for line in lines if line["clients"] == max(line["clients"] for line in lines)]
    ends = "; ".join(
        f"{NAMES[line['source']]} {line['end_mb']:,.0f} MB, {line['peak_mb']:,.0f} MB at most while they were dealt, "
        f"{line['first_round']:.1f} s from process start to the end of the first round"
        for line in last
    )
    one = last[0]
    what = (
        f"Model `{one['model']}`, {one['rows']} rows a client, up to 100 clients in a round, each point a process of "
        f"its own. What does not grow is torch, this package and the pictures. At {one['clients']:,}: {ends}. {about}"
    )
    return _section("Memory as registered clients grow", "Resident memory over registered clients", picture, what)


def cohorts(lines: list[dict[str, Any]], picture: Path, about: str) -> list[str]:
    """Rounds per second over clients in a round; the picture is written beside the page."""
    curves = _curves(lines, "cohort", lambda line: 1 / line["worked"])
    title = "Rounds per second over clients in a round"
    write_curves(picture, curves, "clients in a round", "rounds per second of one core", title)
    one = lines[0]
    slopes = name_slopes(curves)
    each = "; ".join(
        f"{NAMES[line['source']]} {1e6 * line['worked'] / line['cohort']:,.0f} microseconds"
        for line in lines
        if line["cohort"] == 1000
    )
    what = (
        f"{one['clients']:,} registered clients, model `{one['model']}`, one local epoch on {one['rows']} rows less "
        f"those for testing, one thread, without evaluation, least processor times. At 1,000 in a round a client "
        f"takes: {each}. {slopes} {about}"
    )
    return _section("Speed as clients in a round grow", "Rounds per second over clients in a round", picture, what)


def models(lines: list[dict[str, Any]], picture: Path, about: str) -> list[str]:
    """Rounds per second over models; the picture is written beside the page."""
    curves = _curves(lines, "models", lambda line: 1 / line["worked"])
    write_curves(picture, curves, "models", "rounds per second of one core", "Rounds per second over models")
    one = lines[0]
    what = (
        f"IFCA, {one['cohort']:,} of {one['clients']:,} clients in a round, model `{one['model']}`, {one['rows']} rows "
        f"a client: each judges all models and trains one. One thread, without evaluation, least processor times. "
        f"{name_slopes(curves)} {about}"
    )
    return _section("Speed as models grow", "Rounds per second over models", picture, what)


def _curves(lines: list[dict[str, Any]], x: str, y: Callable[[dict[str, Any]], float]) -> Curves:
    kinds = dict.fromkeys(line["source"] for line in lines)
    return {NAMES[kind]: [(line[x], y(line)) for line in lines if line["source"] == kind] for kind in kinds}


def _section(title: str, alternative: str, picture: Path, what: str) -> list[str]:
    return [f"### {title}", "", f"![{alternative}]({picture.parent.name}/{picture.name})", "", what, ""]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of the last two points, both axes logarithmic: -1 if twice as much takes twice as long.

    >>> slope([(1, 9.0), (10, 8.0), (100, 0.8)])
    -1.0
    """
    (x, y), (further, lower) = points[-2:]
    return round(math.log(lower / y) / math.log(further / x), 2)


def name_slopes(curves: Curves) -> str:
    """Return a sentence about the slopes of curves, over their whole length and at their ends."""
    each = "; ".join(
        f"{name} {slope([points[0], points[-1]])}, {slope(points)} at the end" for name, points in curves.items()
    )
    return f"Slopes of rounds per second, both axes logarithmic: {each}; -1 is twice the time for twice as many."


def memory(line: dict[str, Any], table: Table, about: str) -> list[str]:
    """Clients that keep much."""
    cells = [
        ("kept on disk", f"{line['kept_gb']:.1f} GB"),
        ("most at a moment", f"{line['disk_gb']:.1f} GB"),
        ("largest resident memory", f"{line['peak_mb']:,} MB"),
    ]
    killed = ", killed in the last and resumed" if line["killed"] else ""
    what = (
        f"SCAFFOLD with `{line['model']}`, 1.2 M parameters, {line['rows']} pictures a client; all clients take part "
        f"in each of {line['rounds']} rounds{killed}, and all are judged. Before it began it said: "
        f"*{line['said']}*. {about}"
    )
    return [f"### {line['clients']:,} clients that keep a variate each", "", *table(("", ""), cells), what, ""]


def precision(line: dict[str, Any], table: Table, about: str) -> list[str]:
    """bfloat16 against float32."""
    rows = [
        (seed, f"{100 * before:.2f}", f"{100 * after:.2f}", f"{100 * (after - before):+.2f}")
        for seed, (before, after) in enumerate(zip(line["fp32"], line["bf16"], strict=True))
    ]
    means = line["mean"]
    rows.append(
        (
            "mean",
            f"{100 * means['fp32']:.2f}",
            f"{100 * means['bf16']:.2f}",
            f"{100 * line['difference']:+.2f} ± {100 * line['error']:.2f}",
        )
    )
    what = (
        f"Accuracy in percent of FedAvg with `{line['model']}` on the characters that ship with the package, 60 "
        f"clients, 10 in a round, {line['rounds']} rounds, mean of the last five evaluations. ± is a standard error "
        f"over seeds, whose own standard deviation is {100 * line['spread']:.2f} points. Made by "
        f"`python bench/precision.py`. {about}"
    )
    return ["### bfloat16 against float32", "", what, "", *table(("seed", "fp32", "bf16", "difference"), rows)]


def write_curves(picture: Path, curves: Curves, x: str, y: str, title: str, *, flat: bool = False) -> None:
    """Write curves as SVG, x logarithmic, and y unless `flat`."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import StrMethodFormatter

    from fedtide.draw.figures import STYLE, look, svg

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.0, 3.6))
        axes = figure.subplots()
        for number, (name, points) in enumerate(curves.items()):
            axes.plot(
                *zip(*points, strict=True),
                color=look(number).color,
                linestyle=look(number).dashes,
                marker="os"[number % 2],
                label=name,
            )
        axes.set(xscale="log", yscale="linear" if flat else "log", xlabel=x, ylabel=y)
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        if flat:
            axes.set_ylim(bottom=0)
        else:
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            heights = [height for points in curves.values() for _, height in points]
            if max(heights) < 10 * min(heights):  # else its numbers would be in each other's way
                axes.yaxis.set_minor_formatter(StrMethodFormatter("{x:g}"))
        figure.legend(loc="outside upper right", ncols=2)
        drawn = svg(figure, title)
    picture.parent.mkdir(parents=True, exist_ok=True)
    if "xmlns:xlink" not in drawn:
        drawn = drawn.replace("<svg", '<svg xmlns:xlink="http://www.w3.org/1999/xlink"', 1)
    picture.write_text(drawn, encoding="utf-8")
