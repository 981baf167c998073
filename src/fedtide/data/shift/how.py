"""Meaning of rows: a transform of (x, y) that depends on the client, its group and the moment."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, ClassVar, Literal, Protocol

import numpy as np
import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from fedtide.core.errors import refused
from fedtide.core.rng import Rng
from fedtide.data.shift.changes import Drawn, Tested, Trace, When, check_test
from fedtide.data.shift.what import Chain, PopulationView, Python, count_events, read_own
from fedtide.draw.prose import listed, share_of
from fedtide.fields.types import ClassCount, Fraction, Positive, Whole, ingredient
from fedtide.fields.user_code import call


class Reading(Protocol):
    """Settings of the meaning of rows, which make a transform once for a population."""

    drifts: ClassVar[bool] = False
    """Tell whether labels change at events, so that the clients that drifted are known."""

    def check(self, groups: int, shape: tuple[int, ...], classes: int | None = None) -> None:
        """Raise if the settings do not fit the groups or the rows; `classes` is None for sequences."""
        return

    def plan(self, view: PopulationView) -> "RowTransform":
        """Build the transform of a population's rows: `apply` with the group of each row's client, at all times."""
        return ByGroup(self, view)

    def apply(self, x: Tensor, y: Tensor, group: Tensor, time: float) -> tuple[Tensor, Tensor]:
        """Return the rows with their meaning at `time`; `group` (rows,) is that of each row's client."""
        return x, y

    def words(self, groups: Sequence[str], unit: str) -> str:
        """Describe the settings in sentences for a report, each followed by a space."""
        return ""


class RowTransform(Protocol):
    """Meaning of the rows of every client over time."""

    view: PopulationView

    @abstractmethod
    def apply(self, x: Tensor, y: Tensor, client: Tensor, time: float) -> tuple[Tensor, Tensor]:
        """Return the rows with their meaning at `time`; `client` (rows,) holds them."""

    @property
    def judged(self) -> "RowTransform":
        """Transform of the rows on which clients are judged."""
        return self

    @property
    def pictures(self) -> bool:
        """Tell whether pictures change at events, and not labels alone."""
        return False

    def group(self, time: float) -> Tensor | None:
        """Return the true concept of each client (clients,); None if the groups are those of the population."""
        return None

    def changed(self, time: float, before: float) -> Tensor:
        """Return the registered clients for which the meaning of some label differs from that at `before`, sorted."""
        return self.view.everyone[:0]

    def events(self, time: float, before: float) -> tuple[str, ...]:
        """Return the fixed names of the events since `before`."""
        return ()


ALIKE = "labels of the first group stay, and there is no other"


@dataclass(frozen=True)
class ByGroup(RowTransform):
    """A transform by the client's group."""

    how: Reading
    view: PopulationView

    def apply(self, x: Tensor, y: Tensor, client: Tensor, time: float) -> tuple[Tensor, Tensor]:
        """Return the rows with their meaning."""
        return self.how.apply(x, y, self.view.group[client], time)


def check_exchangeable(kind: str, classes: int | None) -> int:
    """Return the number of labels; raise for sequences, and for fewer than two labels."""
    if classes is None or classes < 2:
        but = f"it exchanges labels, and {'rows are sequences' if classes is None else 'there is one label'}"
        raise refused("shift.how.kind", kind, "'identity'", but)
    return classes


@ingredient
class Identity(Reading):
    """Rows as the source gives them."""

    kind: Literal["identity"] = "identity"


@ingredient
class Rotation(Reading):
    """Images of group k are rotated by `angles[k]` degrees, counter-clockwise.

    Args:
        angles: one angle per group, multiples of 90.

    >>> x = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    >>> Rotation(angles=(180,)).apply(x, torch.tensor([0]), torch.tensor([0]), 0.0)[0].tolist()
    [[[[4.0, 3.0], [2.0, 1.0]]]]
    """

    angles: tuple[Literal[0, 90, 180, 270], ...] = (0, 180)
    kind: Literal["rotation"] = "rotation"

    def words(self, groups: Sequence[str], unit: str) -> str:
        """Describe the groups with rotated images, and their angles."""
        names = groups or [f"group {k}" for k in range(len(self.angles))]
        turned = [f"of {n} clients by {a} degrees" for n, a in zip(names, self.angles, strict=False) if a]
        return f"Pictures are turned: those {listed(turned)}. " if turned else ""

    def check(self, groups: int, shape: tuple[int, ...], classes: int | None = None) -> None:
        """Raise if the transform does not fit the data; `classes` is None for sequences."""
        if len(self.angles) != groups:
            raise refused("shift.how.angles", self.angles, f"one per group, {groups}")
        turned = any(angle in (90, 270) for angle in self.angles)
        if len(shape) != 3 or (turned and shape[1] != shape[2]):
            raise refused("shift.how.kind", self.kind, "(square) images", f"rows have shape {shape}")

    def apply(self, x: Tensor, y: Tensor, group: Tensor, time: float) -> tuple[Tensor, Tensor]:
        """Return the rows with their meaning at `time`; `group` (rows,) is that of each row's client."""
        x = x.clone()
        for k, angle in enumerate(self.angles):
            if angle:
                mine = group == k
                x[mine] = torch.rot90(x[mine], angle // 90, (-2, -1))
        return x, y


@ingredient
class Permutation(Reading):
    """Labels of group k are permuted: label c of a row becomes `permutations[k][c]`.

    Args:
        permutations: one per group, each with every label once. If empty, the labels of the first group stay, and the
            labels of other groups are permuted at random.
    """

    permutations: tuple[tuple[Whole, ...], ...] = ()
    kind: Literal["permutation"] = "permutation"

    def words(self, groups: Sequence[str], unit: str) -> str:
        """Describe the groups between which labels differ."""
        if len(groups) < 2:
            return "Labels are exchanged, for all clients alike. "
        first, others = groups[0], listed(groups[1:])
        return f"Labels are exchanged: what is one class to {first} clients is another to {others} clients. "

    def check(self, groups: int, shape: tuple[int, ...], classes: int | None = None) -> None:
        """Raise if the transform does not fit the data; `classes` is None for sequences."""
        classes = check_exchangeable(self.kind, classes)
        if not self.permutations:
            if groups < 2:
                raise refused("shift.how.kind", self.kind, "two groups of clients or more (data.groups)", ALIKE)
            return
        if len(self.permutations) != groups:
            raise refused("shift.how.permutations", self.permutations, f"one per group, {groups}")
        for k, permutation in enumerate(self.permutations):
            if sorted(permutation) != list(range(classes)):
                allowed = f"each label from 0 to {classes - 1} once"
                raise refused(f"shift.how.permutations: group {k}", list(permutation), allowed)

    def plan(self, view: PopulationView) -> RowTransform:
        """Build the transform of a population's rows."""
        classes, groups = view.rows.classes, int(view.group.max()) + 1
        drawn = [view.rng.at("permutation", k).numpy().permutation(classes) for k in range(1, groups)]
        table = self.permutations or [np.arange(classes), *drawn]
        return ByGroup(_Table(torch.tensor(np.array(table))), view)


@dataclass(frozen=True)
class _Table(Reading):
    """Permutations of the labels for each group (groups, classes)."""

    table: Tensor

    def apply(self, x: Tensor, y: Tensor, group: Tensor, time: float) -> tuple[Tensor, Tensor]:
        return x, self.table[group, y]


@ingredient
class LabelSwaps(Reading):
    """Concept drift by label swaps in all rows of a share of the clients at every event, test rows included.

    The first event is at `every`, and the others follow at that distance, in rounds or seconds by `shift.clock`. Until
    then labels are those of the source, as in the paper. Every chosen client picks two labels of its training rows
    and exchanges them in its rows. Swaps add up: each applies to the labels at that time. Held-out clients drift too.

    With `concepts`, which the paper does not have, clients share a number of concepts. The first concept has the labels
    of the source. In each other concept all labels are swapped in pairs; of an odd number one stays. A chosen client
    moves to another concept and stays there until it is chosen again.

    Args:
        every: time between two events.
        fraction: share of the clients that each event chooses.
        concepts: number of concepts; none lets clients swap labels on their own.
        begin: concepts before the first event: that of the "source" for every client, or "dealt" evenly at random.
    """

    every: Positive = 30
    fraction: Fraction = 0.5
    concepts: Annotated[int, Field(strict=True, ge=2, le=1000)] | None = None
    begin: Literal["source", "dealt"] = "source"
    kind: Literal["label-swaps"] = "label-swaps"
    drifts: ClassVar[bool] = True

    def words(self, groups: Sequence[str], unit: str) -> str:
        """Describe the time between label changes, and the share of clients with a change."""
        when = f"every {self.every:g} {unit} {share_of(self.fraction)} of the clients"
        if self.concepts is None:
            return f"Labels change their meaning: {when} each swap two labels, in all of their rows. "
        dealt = ", to which clients are dealt evenly at the start" if self.begin == "dealt" else ""
        return f"There are {self.concepts} ways to read the labels{dealt}, and {when} go to another one. "

    def __post_init__(self) -> None:
        if self.concepts is None and self.begin == "dealt":
            raise ValueError("found begin 'dealt' without concepts; allowed: 'source', or a number of concepts")

    def check(self, groups: int, shape: tuple[int, ...], classes: int | None = None) -> None:
        """Raise if the transform does not fit the data; `classes` is None for sequences."""
        classes = check_exchangeable(self.kind, classes)
        pairs = classes // 2
        most = 1 + math.factorial(classes) // (2**pairs * math.factorial(pairs))
        if self.concepts is not None and self.concepts > most:
            raise refused("shift.how.concepts", self.concepts, f"at most {most}, because there are {classes} labels")

    def plan(self, view: PopulationView) -> RowTransform:
        """Build the transform of a population's rows."""
        return Private(self, view) if self.concepts is None else Shared(self, view, self.concepts)

    def number(self, time: float) -> int:
        """Return the number of events up to a time."""
        return count_events(time, self.every, "shift.how.every")

    def chosen(self, view: PopulationView, event: int) -> Iterator[tuple[Rng, np.ndarray]]:
        """Yield the clients that an event chooses, training and held-out clients separately, each with a key."""
        for key, _, clients in view.shuffled(view.rng.at("swaps", event)):
            yield key.at("labels"), clients[: round(self.fraction * len(clients))]


@dataclass(frozen=True)
class Swapped(RowTransform):
    """Labels after a number of events."""

    swaps: LabelSwaps
    view: PopulationView

    @cached_property
    def states(self) -> Chain[Tensor]:
        """State of the labels after a number of events: a row for each client."""
        return Chain(self.begin, self.follow)

    @abstractmethod
    def begin(self) -> Tensor:
        """Return the state before the first event."""

    @abstractmethod
    def follow(self, state: Tensor, event: int) -> Tensor:
        """Return the state after an event, given the one before it."""

    def state(self, time: float) -> Tensor:
        """Return the state at a time."""
        return self.states[self.swaps.number(time)]

    def events(self, time: float, before: float) -> tuple[str, ...]:
        """Return ("swap",) if there was an event since `before`, otherwise ()."""
        return ("swap",) if self.swaps.number(time) != self.swaps.number(before) else ()

    def changed(self, time: float, before: float) -> Tensor:
        """Return the registered clients whose state differs from that at `before`."""
        then, now = (self.state(at)[: self.view.registered] for at in sorted((time, before)))
        return (now != then).reshape(len(now), -1).any(1).nonzero()[:, 0]


@dataclass(frozen=True)
class Private(Swapped):
    """A permutation of the labels for each client, to which every event adds swaps.

    The state is the present label for each client and source label (clients, classes).
    """

    @cached_property
    def present(self) -> np.ndarray:
        """Mask (clients, classes) of the labels of each client's training rows."""
        rows, train = self.view.rows, self.view.parts["train"]
        mask = np.zeros((len(train), rows.classes), dtype=bool)
        mask[train.owner.numpy(), rows.y[train.rows.long()].numpy()] = True
        return mask

    def begin(self) -> Tensor:
        """Return the labels of the source."""
        classes = self.view.rows.classes
        return torch.arange(classes, dtype=torch.int32).expand(len(self.view.group), classes)

    def follow(self, state: Tensor, event: int) -> Tensor:
        """Return the labels after the swaps of an event; clients with fewer than two labels have no swap."""
        table = state.clone()
        for key, clients in self.swaps.chosen(self.view, event):
            draw = key.numpy()
            for client in clients.tolist():
                labels = np.flatnonzero(self.present[client])
                if len(labels) < 2:
                    continue
                # The two labels are those of the source: their present labels are exchanged.
                a, b = draw.choice(labels, 2, replace=False).tolist()
                table[client, [a, b]] = table[client, [b, a]]
        return table

    def apply(self, x: Tensor, y: Tensor, client: Tensor, time: float) -> tuple[Tensor, Tensor]:
        """Return the rows with their meaning at `time`."""
        return x, self.state(time)[client, y].to(y.dtype)


@dataclass(frozen=True)
class Shared(Swapped):
    """Membership of each client in one of a few permutations of the labels: the state is its concept (clients,)."""

    concepts: int

    @cached_property
    def tables(self) -> Tensor:
        """Label of each source label in each concept (concepts, classes); the first concept is the identity."""
        classes, draw = self.view.rows.classes, self.view.rng.at("concepts").numpy()
        tables = [np.arange(classes)]
        while len(tables) < self.concepts:
            order = draw.permutation(classes)
            pairs = order[: classes // 2 * 2].reshape(-1, 2)
            table = np.arange(classes)
            table[pairs[:, 0]], table[pairs[:, 1]] = pairs[:, 1], pairs[:, 0]
            if not any((table == other).all() for other in tables):
                tables.append(table)
        return torch.from_numpy(np.stack(tables))

    def begin(self) -> Tensor:
        """Return the concept of each client before the first event."""
        return self.view.deal(self.view.rng.at("dealt"), self.concepts if self.swaps.begin == "dealt" else 1)

    def follow(self, state: Tensor, event: int) -> Tensor:
        """Return the concept of each client after an event, given the concepts before it."""
        concept = state.clone()
        for key, clients in self.swaps.chosen(self.view, event):
            step = torch.from_numpy(key.numpy().integers(1, self.concepts, len(clients)))
            concept[clients] = (concept[clients] + step) % self.concepts
        return concept

    def apply(self, x: Tensor, y: Tensor, client: Tensor, time: float) -> tuple[Tensor, Tensor]:
        """Return the rows with their meaning at `time`."""
        return x, self.tables[self.state(time)[client], y]

    def group(self, time: float) -> Tensor | None:
        """Return the concept of each client."""
        return self.state(time)


Angle = Literal[0, 90, 180, 270]
Channel = Literal["all", "red", "green", "blue"]
CHANNELS = ("red", "green", "blue", "all")


@ingredient
class Concept:
    """A way to read rows: pictures are turned and colored by their labels in the source, and labels change.

    Args:
        labels: for each label of the source the label that its rows have, each once. If empty, labels stay.
        swaps: pairs of labels that are exchanged then, one pair after the other.
        angles: angle by which pictures are turned, counter-clockwise: one for all, or one for each label of the source.
        colors: channel that pictures keep, with "all" for all three: one for all, or one for each label of the source.
    """

    labels: tuple[Whole, ...] = ()
    swaps: tuple[tuple[Whole, Whole], ...] = ()
    angles: Annotated[tuple[Angle, ...], Field(min_length=1)] = (0,)
    colors: Annotated[tuple[Channel, ...], Field(min_length=1)] = ("all",)

    @property
    def reads(self) -> bool:
        """Tell whether the concept depends on labels, or changes them."""
        return bool(self.labels or self.swaps or len(self.angles) > 1 or len(self.colors) > 1)

    def check(self, key: str, classes: int) -> None:
        """Raise if the concept does not fit the number of labels; `key` is its place in a configuration."""
        if self.labels and sorted(self.labels) != list(range(classes)):
            raise refused(f"{key}.labels", list(self.labels), f"each label from 0 to {classes - 1} once")
        for pair in self.swaps:
            if max(pair) >= classes:
                raise refused(f"{key}.swaps", list(pair), f"labels from 0 to {classes - 1}")
        for name, values in (("angles", self.angles), ("colors", self.colors)):
            if len(values) not in (1, classes):
                raise refused(f"{key}.{name}", list(values), f"one for all, or one for each of {classes} labels")

    def table(self, classes: int) -> Tensor:
        """Return the new label, the quarter turns and the channel (3 for all) of each label of the source (3, classes).

        >>> Concept(swaps=((1, 2),), angles=(90,)).table(3).tolist()
        [[0, 2, 1], [1, 1, 1], [3, 3, 3]]
        """
        labels = np.array(self.labels or range(classes))
        for a, b in self.swaps:
            labels = np.where(labels == a, b, np.where(labels == b, a, labels))
        turns = [angle // 90 for angle in self.angles] * (classes if len(self.angles) == 1 else 1)
        channels = [CHANNELS.index(color) for color in self.colors] * (classes if len(self.colors) == 1 else 1)
        return torch.from_numpy(np.stack([labels, turns, channels]).astype(np.int64))


@ingredient
class DrawnConcepts:
    """Concepts that are drawn once and are all different.

    Args:
        number: number of concepts.
        exchanged: size of one random set of labels, shared by all concepts. Each concept permutes the labels of this
            set.
        turned: number of labels, drawn for each concept, whose pictures are turned by drawn angles: 0, 90, 180 or 270.
        colored: number of labels, drawn for each concept, whose pictures keep one drawn channel.
    """

    number: ClassCount = 4
    exchanged: Whole = 0
    turned: Whole = 0
    colored: Whole = 0

    def check(self, classes: int) -> None:
        """Raise if there are too few labels, or fewer different concepts than are asked for."""
        for name in ("exchanged", "turned", "colored"):
            if (labels := getattr(self, name)) > classes:
                raise refused(f"shift.how.drawn.{name}", labels, f"at most {classes}, the number of labels")
        most = math.factorial(self.exchanged) * (4**self.turned) * (3**self.colored)
        if self.number > most:
            allowed = f"at most {most}, or more labels that are exchanged, turned or colored"
            raise refused("shift.how.drawn.number", self.number, allowed)

    def tables(self, classes: int, rng: Rng) -> Tensor:
        """Return the table of each concept, as `Concept.table` (concepts, 3, classes)."""
        draw, tables = rng.at("concepts").numpy(), list[np.ndarray]()
        pool = draw.choice(classes, self.exchanged, replace=False)
        while len(tables) < self.number:
            table = np.stack([np.arange(classes), np.zeros(classes, dtype=np.int64), np.full(classes, 3)])
            table[0, pool] = draw.permutation(pool)
            table[1, draw.choice(classes, self.turned, replace=False)] = draw.integers(0, 4, self.turned)
            table[2, draw.choice(classes, self.colored, replace=False)] = draw.integers(0, 3, self.colored)
            if not any((table == other).all() for other in tables):
                tables.append(table)
        return torch.from_numpy(np.stack(tables))


@ingredient
class ConceptDrift(Reading):
    """Each client has one concept, which maps labels, angles and colors. It changes at change points.

    List `concepts`, or give `drawn`. Rows for training, validation and testing change alike, if `test` does not say
    otherwise.

    Args:
        concepts: the concepts; an empty table, {}, leaves rows as they are in the source.
        drawn: concepts that are drawn; None if `concepts` lists them.
        when: the change points: "drawn", "planned", a "cycle", or a "file".
        test: concept of the rows on which a client is judged: that of the moment ("now"), its "first" one, or one that
            it never trains on ("unseen", if change points are drawn).
    """

    concepts: tuple[Concept, ...] = ()
    drawn: DrawnConcepts | None = None
    when: When = Drawn()
    test: Tested = "now"
    kind: Literal["concept-drift"] = "concept-drift"
    drifts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if len(self.concepts) < 2 if self.drawn is None else self.concepts:
            raise ValueError(f"found {len(self.concepts)} concepts; allowed: two or more, or a table drawn")
        if len(set(self.concepts)) < len(self.concepts):
            raise ValueError("found a concept twice; allowed: concepts that differ")

    @property
    def count(self) -> int:
        """Number of concepts."""
        return len(self.concepts) if self.drawn is None else self.drawn.number

    @property
    def pictures(self) -> tuple[bool, bool]:
        """Tell whether some pictures are turned, and whether some are colored."""
        if self.drawn is not None:
            return self.drawn.turned > 0, self.drawn.colored > 0
        turned = any(any(concept.angles) for concept in self.concepts)
        return turned, any(color != "all" for concept in self.concepts for color in concept.colors)

    def check(self, groups: int, shape: tuple[int, ...], classes: int | None = None) -> None:
        """Raise if the concepts do not fit the rows; `classes` is None for sequences."""
        turned, colored = self.pictures
        if self.drawn is not None or any(concept.reads for concept in self.concepts):
            labels = check_exchangeable(self.kind, classes)
            for number, concept in enumerate(self.concepts):
                concept.check(f"shift.how.concepts[{number}]", labels)
            if self.drawn is not None:
                self.drawn.check(labels)
        quarters = any(angle in (90, 270) for concept in self.concepts for angle in concept.angles)
        square = quarters or (self.drawn is not None and turned)
        if turned and (len(shape) != 3 or (square and shape[1] != shape[2])):
            raise refused("shift.how.concepts.angles", "angles", "none, or (square) images", f"rows have shape {shape}")
        if colored and (len(shape) != 3 or shape[0] != 3):
            allowed = "none, or images with three channels (data.source.channels = 3)"
            raise refused("shift.how.concepts.colors", "colors", allowed, f"rows have shape {shape}")
        self.when.check(self.count, "shift.how.when")
        check_test(self.test, self.when, self.count, "shift.how.test")

    def words(self, groups: Sequence[str], unit: str) -> str:
        """Describe the concepts and their changes."""
        what = ["labels"] if self.exchanges else []
        what += [name for name, changes in zip(("angles", "colors"), self.pictures, strict=True) if changes]
        return (
            f"There are {self.count} ways to read rows, which differ in {listed(what)}, and {self.when.words(unit)}. "
        )

    @property
    def exchanges(self) -> bool:
        """Tell whether some concept changes labels."""
        if self.drawn is not None:
            return self.drawn.exchanged > 0
        return any(concept.labels or concept.swaps for concept in self.concepts)

    def plan(self, view: PopulationView) -> RowTransform:
        """Build the transform of a population's rows."""
        return ByConcept(self, view)


@dataclass(frozen=True)
class ByConcept(RowTransform):
    """A transform by the concept of each client; `for_judging` is that of the rows on which clients are judged."""

    how: ConceptDrift
    view: PopulationView
    for_judging: bool = False

    @cached_property
    def trace(self) -> Trace:
        """Concept of each client over time."""
        names = tuple(map(str, range(self.how.count)))
        return Trace(self.how.when, self.view, names, "shift.how.when", "readings", self.how.test)

    @cached_property
    def tables(self) -> Tensor:
        """New label, quarter turns and channel of each label of the source in each concept (concepts, 3, classes)."""
        classes = self.view.rows.classes
        if self.how.drawn is not None:
            return self.how.drawn.tables(classes, self.view.rng)
        return torch.stack([concept.table(classes) for concept in self.how.concepts])

    @cached_property
    def judged(self) -> RowTransform:
        """Transform of the rows on which clients are judged."""
        return self if self.how.test == "now" else replace(self, for_judging=True)

    @property
    def pictures(self) -> bool:
        """Tell whether pictures change at events."""
        return any(self.how.pictures)

    def apply(self, x: Tensor, y: Tensor, client: Tensor, time: float) -> tuple[Tensor, Tensor]:
        """Return the rows with their meaning at `time`."""
        concept = self.trace.concept(time, judged=self.for_judging)[client]
        turned, colored = self.how.pictures
        x = x.clone() if turned or colored else x
        if turned:
            turns = self.tables[concept, 1, y]
            for quarters in (1, 2, 3):
                x[turns == quarters] = torch.rot90(x[turns == quarters], quarters, (-2, -1))
        if colored:
            channels = self.tables[concept, 2, y]
            for channel in range(x.shape[1]):
                x[(channels != channel) & (channels < 3), channel] = 0
        return x, self.tables[concept, 0, y] if self.how.exchanges else y

    def group(self, time: float) -> Tensor | None:
        """Return the concept of each client."""
        return self.trace.concept(time)

    def changed(self, time: float, before: float) -> Tensor:
        """Return the registered clients whose concept differs from that at `before`."""
        return self.trace.changed(time, before)

    def events(self, time: float, before: float) -> tuple[str, ...]:
        """Return ("change",) if the concept of any client changed since `before`, otherwise ()."""
        return self.trace.events(time, before)


@dataclass(frozen=True)
class ReadBy(Reading):
    """A `how` by a function from rows, their clients' groups and the time to the meaning of the rows.

    Args:
        read: (x, y, (rows,) the group of each row's client, the time) -> x and y with their meaning at that time.
    """

    read: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]

    def apply(self, x: Tensor, y: Tensor, group: Tensor, time: float) -> tuple[Tensor, Tensor]:
        """Return the rows with their meaning at `time`."""
        key = "shift.how.function"
        result = call(self.read, key, x, y, group, time)
        pair = result if isinstance(result, tuple) else ()
        if [getattr(tensor, "shape", None) for tensor in pair] != [x.shape, y.shape]:
            raise refused(key, result, f"a pair (x, y) of tensors of shapes {tuple(x.shape)} and {tuple(y.shape)}")
        return result


How = Annotated[
    Identity | Rotation | Permutation | LabelSwaps | ConceptDrift | Python,
    Field(discriminator="kind"),
    BeforeValidator(read_own),
]
