"""Previews of an experiment: rows, labels, participation and change over the rounds, as lines and as pictures."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from matplotlib.ticker import MaxNLocator

from fedtide.core.atomic import check_free, write_text
from fedtide.core.base import Moment
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.data.population import Population
from fedtide.data.sources.text import END
from fedtide.draw import figures
from fedtide.draw.holdings import draw_label_shares, draw_rows, map_shares
from fedtide.draw.html import MARK, Picture, Pictured, anchor, render, to_pictures
from fedtide.draw.prose import listed
from fedtide.inspection.questions import CYCLES, local_slots
from fedtide.inspection.shares import normalize, variation

ROUNDS = 240
"""Rounds that are looked at."""
CLIENTS = 300
"""Clients whose labels are looked at."""
CLASSES = 200
"""Classes up to which labels are told apart."""


@dataclass(frozen=True)
class Preview:
    """A population, and the rounds of an experiment.

    Args:
        population: made with the first seed.
        rounds: of a run.
        cohort: number of clients that arrive in a round.
        seconds: length of a round on the clock.
        methods: the methods that meet this population, if others meet another; () for all.
    """

    population: Population
    rounds: int
    cohort: int
    seconds: float = 1.0
    methods: Sequence[str] = ()

    @property
    def title(self) -> str:
        """The methods that meet this population; "" for all methods."""
        return listed(self.methods)

    @cached_property
    def moments(self) -> list[Moment]:
        """The rounds that are looked at: all of a few, the first of many with a short period, else some of all."""
        period = self.population.shift.period
        if self.rounds <= ROUNDS or (period is not None and period <= ROUNDS / 4):
            numbers = np.arange(min(self.rounds, ROUNDS))
        else:
            numbers = np.linspace(0, self.rounds - 1, ROUNDS).round().astype(int)
        return [Moment(int(number), self.rounds, int(number) * self.seconds) for number in numbers]

    @property
    def numbers(self) -> np.ndarray:
        """Rounds done at each of these rounds."""
        return np.array([moment.round + 1 for moment in self.moments])

    @property
    def looked_at(self) -> str:
        """The rounds that are looked at, in words."""
        count = len(self.moments)
        return f"all {count} rounds" if count == self.rounds else f"{count} of {self.rounds} rounds"

    @cached_property
    def rows(self) -> np.ndarray:
        """Rows that each registered client trains on at some time (clients,)."""
        return self.population.counts(self.population.clients, "train").numpy()

    @property
    def labeled(self) -> bool:
        """True if rows have labels that can be told apart."""
        return self.population.rows.steps is None and self.population.rows.classes <= CLASSES

    @cached_property
    def labels(self) -> np.ndarray:
        """Rows of each class (clients, classes) that clients train on at the start; of many clients some."""
        registered = self.population.registered
        clients = torch.linspace(0, registered - 1, min(CLIENTS, registered)).round().long()
        shares = self.population.label_shares(clients, self.moments[0])
        counts = self.population.counts(clients, "train", self.moments[0])
        return (shares * counts[:, None]).round().numpy()

    @cached_property
    def arrivals(self) -> list[tuple[Moment, torch.Tensor]]:
        """The rounds, with the clients that arrive in each."""
        return [(moment, self.population.arrivals(self.cohort, moment)) for moment in self.moments]

    @cached_property
    def expected(self) -> np.ndarray:
        """Expected share of each group among the clients that arrive (rounds, groups)."""
        return np.array([self.population.expected(moment) for moment in self.moments])

    @cached_property
    def arrived(self) -> np.ndarray:
        """Share of each group among the clients that arrive (rounds, groups)."""
        groups = [self.population.group[clients] for _, clients in self.arrivals]
        return normalize(np.array([group.bincount(minlength=len(self.population.group_names)) for group in groups]))

    @cached_property
    def reachable(self) -> np.ndarray:
        """Number of clients that can be reached in each round."""
        return np.array([len(self.population.reachable(moment)) for moment in self.moments])

    @cached_property
    def mix(self) -> np.ndarray:
        """Share of each class among the rows of arriving clients (rounds, classes); 0 if there are no rows."""
        counts = []
        for moment, clients in self.arrivals:
            rows = self.population.counts(clients, "train", moment).double()
            counts.append((self.population.label_shares(clients, moment) * rows[:, None]).sum(0).numpy())
        return normalize(np.array(counts))

    @cached_property
    def domains(self) -> np.ndarray | None:
        """Share of each domain among the rows of arriving clients (rounds, domains); None if there is one."""
        domain, names = self.population.rows.domain, self.population.rows.domain_names
        if domain is None or len(names) < 2:
            return None
        pooled = [self.population.pooled(clients, moment, "train")[0].long() for moment, clients in self.arrivals]
        return normalize(np.array([domain[rows].long().bincount(minlength=len(names)) for rows in pooled]))

    @cached_property
    def changed(self) -> np.ndarray | None:
        """Number of clients with other rows, or labels, than at the round before; None without drift."""
        if not self.population.shift.drifts:
            return None
        pairs = zip(self.moments[1:], self.moments, strict=False)
        return np.array([0, *(len(self.population.changed(now, before)) for now, before in pairs)])

    @cached_property
    def words(self) -> np.ndarray | None:
        """Numbers of sentences, words, and words outside the vocabulary by the hour (3, 24); None without texts.

        Hours are those of UTC, and words are those that a row has room for. Texts without times have no hours.
        """
        rows, unknown = self.population.rows, {*self.population.rows.unscored} - {END}
        if rows.steps is None or rows.time is None or not unknown:
            return None
        words = (rows.y != END) if rows.padding is None else (rows.y != END) & (rows.y != rows.padding)
        outside = torch.isin(rows.y, torch.tensor(sorted(unknown))).sum(1)
        hour, _ = local_slots(rows.time.numpy(), CYCLES["day"][0], 24)
        columns = torch.ones(len(rows.y)), words.sum(1), outside
        return np.stack([np.bincount(hour, counts.numpy(), minlength=24) for counts in columns])

    @property
    def classes(self) -> Sequence[str]:
        """Names of the classes; none if classes are numbers."""
        return getattr(self.population.rows, "label_names", ())

    @property
    def label_distance(self) -> tuple[float, float]:
        """Mean total variation between a client's label mix and that of all, and the same of rows dealt at random."""
        counts = self.labels[self.labels.sum(1) > 0]
        pooled = counts.sum(0) / counts.sum()
        dealt = [Rng(0).at("dealt", k).numpy().multinomial(int(n), pooled) for k, n in enumerate(counts.sum(1))]
        real, chance = (float(variation(normalize(rows), pooled).mean()) for rows in (counts, np.array(dealt)))
        return real, chance

    def lines(self) -> list[str]:
        """Describe the population in a few lines."""
        population, shift, rows = self.population, self.population.shift, self.rows
        groups, held_out = population.group_names, len(population.group) - population.registered
        clients = f"{population.registered:,} clients" + (f" and {held_out:,} held out" if held_out else "")
        sizes = f"{rows.min():,} to {rows.max():,} a client, {np.median(rows):,.0f} for the median one"
        lines = [
            f"{clients}; {len(population.rows):,} rows of shape {tuple(population.rows.shape)}, "
            f"{population.rows.labeled}",
            *population.rows.said[1:],
            f"rows to train on: {sizes if rows.min() < rows.max() else f'{rows.min():,} a client'}",
        ]
        if self.labeled and self.labels.any():
            real, chance = self.label_distance
            most = int(np.median((self.labels > 0).sum(1)))
            lines.append(
                f"labels{' at the first round' * shift.drifts}: the median client has {most} of "
                f"{population.rows.classes} classes; a client's mix is "
                f"{real:.2f} from that of all (total variation), {chance:.2f} if rows were dealt at random"
            )
        if len(groups) > 1:
            counts = population.group[: population.registered].bincount(minlength=len(groups)).tolist()
            lines.append(f"groups: {listed([f'{name} {count}' for name, count in zip(groups, counts, strict=True)])}")
        words = shift.who.words(groups, shift.clock), shift.words(groups, population.rows.domain_names, self.rounds)
        lines += [line.strip() for line in words if line.strip()]
        lines.append(f"below: {self.looked_at}, {self.cohort} clients in each")
        if len(groups) > 1:
            share = 100 * self.arrived[:, 0]
            lines.append(f"of those who arrive {share.min():.0f} to {share.max():.0f} % are {groups[0]}")
        if self.reachable.min() < population.registered:
            lines.append(f"{self.reachable.min():,} to {self.reachable.max():,} clients can be reached")
        if self.labeled:
            mixes = self.mix[self.mix.any(1)]
            far = variation(mixes, mixes.mean(0)).max() if len(mixes) else 0.0
            lines.append(f"the mix of labels that arrives is up to {far:.2f} from its mean (total variation)")
        if self.changed is not None:
            count = int((self.changed > 0).sum())
            lines.append(f"clients change in {count} of these rounds, {self.changed.max():,} at most")
        return lines


# -- the page ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Shown:
    """Previews of an experiment, one for each shift that its methods meet: printed they are lines.

    Args:
        name: of the experiment.
        previews: of its populations.
    """

    name: str
    previews: Sequence[Preview]

    def __repr__(self) -> str:
        titled = ([*([f"{preview.title}:"] if preview.title else []), *preview.lines()] for preview in self.previews)
        return "\n".join(line for lines in titled for line in lines)

    def _repr_html_(self) -> str:
        return render("shown.html", sections=self._sections())

    def _sections(self) -> list[tuple[str, str, list[str], list[Picture]]]:
        """Return the title, the anchor, the lines and the pictures of each preview."""
        return [
            (preview.title, anchor(preview.title), preview.lines(), to_pictures(pictures(preview), preview.title))
            for preview in self.previews
        ]

    def write(self, page: str | Path) -> Path:
        """Write a page with pictures, which opens offline, and return its path.

        Raises:
            FedtideError: it is not called .html, or a file is there that is no page of ours.
        """
        page = Path(page)
        check_page(page)
        write_text(page, render("preview.html", title=self.name, about="", sections=self._sections(), environments=[]))
        return page


def check_page(page: Path) -> None:
    """Raise if a page is not called .html, or would take the place of a file that is no page of ours."""
    if page.suffix != ".html":
        raise FedtideError(f"{page}: not the name of a page; allowed: one that ends in .html")
    check_free(page, MARK)


def pictures(preview: Preview) -> list[Pictured]:
    """Return titles, captions and figures; None for a figure with nothing to show."""
    population, span = preview.population, f"{preview.looked_at[:1].upper()}{preview.looked_at[1:]}"
    return [
        ("Rows of each client", "Rows to train on, from the client with most to the one with fewest.",
         draw_rows(preview.rows) if preview.rows.min() < preview.rows.max() else None),
        ("Who holds which labels",
         "A column is a client: the darker a cell, the more of its training rows belong to that class, at the "
         "first round.",
         draw_label_shares(preview.labels, population.registered, preview.classes) if preview.labeled else None),
        ("Who is there",
         f"{span}: the share of each group that is expected among those who arrive (areas), and that of the first "
         "group among those who do (line); the number of clients that can be reached, if not all can.",
         _presence(preview)),
        ("How the mix moves",
         f"{span}: the share of each class among the rows of those who arrive. Below, if clients drift, the number "
         "of clients with other rows, or rows with other labels, than at the round before.",
         _mix(preview)),
        ("Which domains",
         f"{span}: the share of each domain among the rows of those who arrive.",
         _domains(preview)),
        ("Words by the hour",
         "Of all rows, by the hour (UTC): the share of words outside the vocabulary, the mean number of words of a "
         "sentence as far as a row has room, and the share of the sentences.",
         _words(preview)),
    ]  # fmt: skip


@figures.styled
def _presence(preview: Preview) -> figures.Drawn | None:
    """Draw who arrives and how many can be reached; None if it is always all of one group."""
    names, rounds = preview.population.group_names, preview.numbers
    limited = bool(preview.reachable.min() < preview.population.registered)
    grouped = len(names) > 1
    if not (limited or grouped):
        return None
    figure, panels = figures.stack_panels([1.7] * (limited + grouped))
    if grouped:
        areas = [(figures.label(name), figures.group_color(number), 0.4) for number, name in enumerate(names)]
        figures.draw_areas(panels[0], rounds, preview.expected, areas)
        arrived = figures.label(f"{names[0]}, arrived")
        panels[0].plot(rounds, 100 * preview.arrived[:, 0], color="#444444", lw=0.9, label=arrived)
        panels[0].set_ylabel("of those who\narrive, %")
        figures.small_legend(panels[0], 5)
    if limited:
        panels[-1].plot(rounds, preview.reachable, color="#0072B2", lw=1.4)
        panels[-1].set_ylim(bottom=0)
        panels[-1].set_ylabel("clients that can\nbe reached")
        panels[-1].yaxis.set_major_locator(MaxNLocator(4, integer=True))
    figures.over_rounds(panels[-1], int(rounds[0]), max(int(rounds[-1]), 2))
    return figures.svg(figure, "who is there")


@figures.styled
def _mix(preview: Preview) -> figures.Drawn | None:
    """Draw the label mix of those who arrive, and how many clients changed; None of sequences and many classes."""
    if not preview.labeled:
        return None
    rounds, changed = preview.numbers, preview.changed
    high = min(max(1.2 + 0.17 * preview.mix.shape[1], 2.0), 4.5)
    figure, panels = figures.stack_panels([high] if changed is None else [high, 1.1])
    image = map_shares(panels[0], preview.mix, preview.classes, float(rounds[0]), float(rounds[-1]))
    figure.colorbar(image, ax=panels, label="share of the rows that arrive, %", pad=0.01)
    if changed is not None:
        panels[1].vlines(rounds - 1, 0, changed, color="#444444", lw=1.2)  # before the round, as in a report
        panels[1].set_ylim(bottom=0)
        panels[1].set_ylabel("clients that\nchanged")
        panels[1].yaxis.set_major_locator(MaxNLocator(3, integer=True))
    panels[-1].set_xlabel("rounds done")
    return figures.svg(figure, "how the mix moves")


@figures.styled
def _domains(preview: Preview) -> figures.Drawn | None:
    """Draw the shares of domains among the rows of those who arrive; None if there is one domain."""
    names, rounds = list(preview.population.rows.domain_names), preview.numbers
    if preview.domains is None or names == list(preview.population.group_names):  # as who is there says
        return None
    figure, (axes,) = figures.stack_panels([2.0])
    areas = [(figures.label(name), figures.group_color(number), 0.4) for number, name in enumerate(names)]
    figures.draw_areas(axes, rounds, preview.domains, areas)
    axes.set_ylabel("of the rows, %")
    figures.small_legend(axes, 5)
    figures.over_rounds(axes, int(rounds[0]), max(int(rounds[-1]), 2))
    return figures.svg(figure, "which domains")


@figures.styled
def _words(preview: Preview) -> figures.Drawn | None:
    """Draw words outside the vocabulary, lengths of sentences, and their number, by the hour; None without texts."""
    if preview.words is None:
        return None
    sentences, words, outside = preview.words
    figure, (above, middle, below) = figures.stack_panels([1.7, 1.7, 0.9])
    hours = np.arange(24)
    for axes, share, name in (
        (above, 100 * outside / np.where(words > 0, words, np.nan), "words outside the\nvocabulary, %"),
        (middle, words / np.where(sentences > 0, sentences, np.nan), "words of a\nsentence"),
    ):
        axes.plot(hours, share, color=figures.look(0).color, lw=1.8, marker="o", ms=4)
        axes.set_ylim(0, 1.15 * np.nanmax(share))  # else the noise of hours with few sentences looks like a rhythm
        axes.set_ylabel(name)
    below.bar(hours, 100 * sentences / sentences.sum(), width=0.8, color="#444444", alpha=0.35)
    below.set_ylabel("sentences, %")
    below.set_xlim(-0.5, 23.5)
    below.set_xticks(range(0, 24, 6))
    below.set_xlabel("hour of the day, UTC")
    return figures.svg(figure, "words by the hour")
