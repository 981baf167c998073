"""Rows of a node beside those of the study: numbers, categories and times that are far from what its ticket tells.

A warning is for the owner of the rows alone. The server learns how many nodes were warned, and nothing in a private
study.

Choices:
    - ours: a number is far beyond three standard deviations from the study's mean. By Chebyshev's inequality at most a
      ninth of the study's own values are, so half of them speak for another unit.
    - ours: a time is far beyond the study's own times, by their span and by a year at least.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedtide.core.errors import shown
from fedtide.data.sources.cells import describe_span, read_cells
from fedtide.data.sources.tabular import CSV
from fedtide.draw.prose import counted
from fedtide.site.tickets import RowsAbout

FAR = 3.0
"""Standard deviations from the study's mean beyond which a number is far."""
MOST = 0.5
"""Share of a column beyond which the server counts the node among those that were warned."""
YEAR = 366 * 86_400.0


@dataclass(frozen=True)
class Doubt:
    """A warning.

    Args:
        text: for the owner of the rows.
        is_common: whether it holds for more than half of a column.
    """

    text: str
    is_common: bool


def far_from_study(path: Path, about: RowsAbout) -> Iterator[Doubt]:
    """Yield what is far from the study in a file of rows that was read without an error.

    Numbers are compared with scales that the ticket has, texts with its categories, and times with its times.
    """
    source = about.source_at(path.absolute())
    if not isinstance(source, CSV) or (source.learned is None and not about.times):
        return
    if about.times and (time := source.load(None, 0).time) is not None:
        times = time.numpy()
        slack = max(about.times[1] - about.times[0], YEAR)
        share = float(np.mean((times < about.times[0] - slack) | (times > about.times[1] + slack)))
        if share > MOST:
            spans = f"{describe_span(times, '')}, and the study's are {describe_span(np.array(about.times), '')}"
            yield Doubt(f"{path}: time: {spans}: is a clock or a format another one?", True)
    learned = source.learned
    if learned is None:
        return
    cells = read_cells(path, [*learned.spreads, *learned.categories], source.spelling)
    for name, spread in learned.spreads.items():
        values = cells.numbers(name, gaps=True)
        values, center = values[~np.isnan(values)], learned.centers[name]
        if spread == 1.0 or not len(values):  # a column that never changes has this one
            continue
        if np.mean(far := np.abs(values - center) > FAR * spread) > MOST:
            many = (
                f"{int(far.sum())} of {counted(len(values), 'value')} are more than {FAR:g} deviations from the study's"
            )
            mean = f"mean (here {values.mean():.4g}, there {center:.4g} with deviation {spread:.4g})"
            yield Doubt(f"{path}: {name}: {many} {mean}: is it another unit?", True)
    for name, categories in learned.categories.items():
        column = cells.columns[name]
        texts = column.texts[~column.missing]
        strange = texts[~np.isin(texts.astype(str), categories)]
        if len(strange):
            many = f"{len(strange)} of {counted(len(texts), 'cell')} have categories that the study does not know"
            yield Doubt(f"{path}: {name}: {many}, such as {shown(strange[0])}", len(strange) > MOST * len(texts))
