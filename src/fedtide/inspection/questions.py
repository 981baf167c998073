"""What is measured for the eight questions, each beside the same of shuffled data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedtide.clusters.array_kmeans import distances, draw_seeds, kmeans_from
from fedtide.core.rng import Rng
from fedtide.inspection import shares
from fedtide.inspection.linear import Ahead, Explained, ahead, divided, explained, means_by
from fedtide.inspection.shares import Against, against, apart, counted, times
from fedtide.inspection.table import Table

DISTANCE = 0.08, 0.2
"""Total variation distances from which a difference of shares is mild, and strong."""
GAIN = 0.02, 0.08
"""Shares of the variance from which what a model gains is mild, and strong."""
HEAPS = 0.9
"""Share of the variance between two heaps of clients from which they are groups; 0.64 of a normal distribution."""

ROWS = 100_000
"""Rows that are looked at; of more, as many are drawn."""
BLOCKS = 20
"""Blocks of time, at most."""
DRAWS = 400
"""Draws of clients that do not fall into heaps, with which heaps are compared."""
MODELED, MEMBERS = 20_000, 100
"""Rows that models are fitted to, and the clients with most rows, whose rows these are."""
MODEL_SHUFFLES, FEW_SHUFFLES = 16, 3
"""Shuffles to which models are fitted, and where the models of the rows themselves show hardly anything."""
BINS, LABELS, CELLS = 10, 30, 12
"""Classes of a measured label, labels that are told apart (the others are one), and cells of features."""
MOSTLY = 0.5
"""Share of what knowing the client gains that features must not tell, for the meaning to differ."""
WIDTH, WAVES = 32, 32
"""Numbers that features are brought down to, and cosines of them for what is not straight."""
LEAST = 10
"""Rows from which a client is looked at by itself."""
CYCLES = {"day": (86400.0, 24, 8), "week": (604800.0, 7, 7), "year": (31556952.0, 12, 12)}
"""Lengths in seconds, and numbers of slots; the latter of few rows."""


# -- what is looked at -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """Rows as the questions see them.

    label: (rows,) class; of a measured label a class of equal size, the rarest of very many are one. targets: (rows,
    outputs) what models are fitted to. z: (rows, d) features, the last of which is 1; None without features. cell:
    (rows,) cell of features. client: (rows,) number. seconds: (rows,) local time.
    """

    label: np.ndarray
    label_names: tuple[str, ...]
    targets: np.ndarray
    z: np.ndarray | None
    cell: np.ndarray | None
    client: np.ndarray | None
    client_names: tuple[str, ...]
    seconds: np.ndarray | None
    rng: Rng

    @property
    def clients(self) -> int:
        """Number of clients."""
        return len(self.client_names)

    @property
    def owner(self) -> np.ndarray:
        """Number of each row's client (rows,); 0 for all where none is named."""
        return np.zeros(len(self.label), dtype=np.int64) if self.client is None else self.client

    @cached_property
    def members(self) -> np.ndarray:
        """Clients with rows enough to be looked at by themselves, the largest first."""
        if self.client is None:
            return np.array([], dtype=np.int64)
        rows = np.bincount(self.client, minlength=self.clients)
        return np.argsort(-rows, kind="stable")[: int(min((rows >= LEAST).sum(), MEMBERS))]

    def member_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Return rows of these clients, as many as models are fitted to, and the place of each row's client."""
        assert self.client is not None
        place = np.full(self.clients, -1)
        place[self.members] = np.arange(len(self.members))
        rows = drawn(np.flatnonzero(place[self.client] >= 0), MODELED, self.rng.at("members"))
        return rows, place[self.client[rows]]


def drawn(rows: np.ndarray, most: int, rng: Rng) -> np.ndarray:
    """Return at most so many of some rows, drawn at random, in their order."""
    return rows if len(rows) <= most else np.sort(rng.numpy().choice(rows, most, replace=False))


def sample(table: Table, seed: int = 0) -> Sample:
    """Prepare the rows of a table."""
    rng = Rng(seed)
    rows = drawn(np.arange(len(table.label)), ROWS, rng.at("rows"))
    label, names, targets = classes(table.label[rows])
    z = cell = client = None
    client_names: tuple[str, ...] = ()
    if table.features is not None:
        straight = narrowed(table.features[rows], rng.at("narrow"))
        z = np.concatenate([straight, waves(straight, rng.at("waves")), np.ones((len(rows), 1))], 1)
        looks = np.delete(table.features[rows], table.calendar, 1) if table.calendar else None
        if looks is None or looks.shape[1]:
            cell = cells(straight if looks is None else narrowed(looks, rng.at("narrow")), rng.at("cells"))
    if table.client is not None:
        found, client = np.unique(table.client[rows], return_inverse=True)
        client_names = tuple(map(str, found))
    seconds = None if table.time is None else table.time[rows]
    return Sample(label, names, targets, z, cell, client, client_names, seconds, rng)


def classes(values: np.ndarray) -> tuple[np.ndarray, tuple[str, ...], np.ndarray]:
    """Return each row's class, the names of the classes, and targets: centered one-hot labels, or the measure itself.

    >>> label, names, targets = classes(np.array(["b", "a", "b", "b"]))
    >>> label.tolist(), names, targets[:, 0].tolist()
    ([1, 0, 1, 1], ('a', 'b'), [-0.25, 0.75, -0.25, -0.25])
    """
    if values.dtype.kind == "f":
        cuts = np.unique(np.quantile(values, np.arange(1, BINS) / BINS))
        cuts = cuts[cuts > values.min()]  # below the least there is nothing
        label = np.searchsorted(cuts, values, side="right")
        ends = [f"below {cuts[0]:.4g}", *(f"from {cut:.4g}" for cut in cuts)]
        return label, tuple(ends), ((values - values.mean()) / max(values.std(), 1e-12))[:, None]
    found, label, rows = np.unique(values, return_inverse=True, return_counts=True)
    names = list(map(str, found))
    if len(found) > LABELS:
        common = np.sort(np.argsort(-rows, kind="stable")[: LABELS - 1])
        place = np.full(len(found), LABELS - 1)
        place[common] = np.arange(LABELS - 1)
        label, names = place[label], [*(names[number] for number in common), "others"]
    hot = np.eye(len(names))[label]
    return label, tuple(names), hot - hot.mean(0)


def narrowed(features: np.ndarray, rng: Rng) -> np.ndarray:
    """Return standardized features, of very many their main directions."""
    x = features.reshape(len(features), -1).astype(np.float64)
    x = np.clip((x - x.mean(0)) / np.maximum(x.std(0), 1e-9), -5, 5)
    if x.shape[1] > WIDTH:
        few = x[drawn(np.arange(len(x)), 4000, rng)]
        x = x @ np.linalg.svd(few - few.mean(0), full_matrices=False)[2][:WIDTH].T
        x = (x - x.mean(0)) / np.maximum(x.std(0), 1e-9)
    return x


def waves(x: np.ndarray, rng: Rng) -> np.ndarray:
    """Return random cosines of features (Rahimi and Recht 2007), for what is not straight."""
    draw = rng.numpy()
    directions = draw.normal(size=(x.shape[1], WAVES)) / np.sqrt(x.shape[1])
    return np.sqrt(2) * np.cos(x @ directions + draw.uniform(0, 2 * np.pi, WAVES))


def cells(x: np.ndarray, rng: Rng) -> np.ndarray:
    """Return each row's cell, by k-means of some rows: so that what is said of mixes of labels can be said of looks."""
    some = x[drawn(np.arange(len(x)), 3000, rng.at("some"))]
    centers, _ = kmeans_from(some, draw_seeds(some, CELLS, rng.at("seeds")), iterations=12)
    return distances(x, centers).argmin(1)


# -- clients -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Clients:
    """How clients differ: the statistics of the first four questions; None where a column is missing.

    heaps: how far the clients fall into two heaps, by their labels and by their looks, and the upper heap of each.
    """

    labels: Against
    alpha: float
    looks: Against | None
    told: Against | None
    models: Explained | None
    gain: Against | None
    known: Against | None
    meaning: Against | None
    heaps: dict[str, tuple[float, np.ndarray]]
    members: np.ndarray

    @property
    def groups(self) -> tuple[str, np.ndarray]:
        """What groups of clients differ in ("models", "features", "labels", or "" for none), and each member's."""
        if self.models is not None and self.gain is not None and self.gain.gain >= GAIN[0]:
            return "models", self.models.group
        for name in ("features", "labels"):
            if name in self.heaps and self.heaps[name][0] >= HEAPS:
                return name, self.heaps[name][1].astype(np.int64)
        return "", np.zeros(len(self.members), dtype=np.int64)

    @property
    def crowds(self) -> bool:
        """True for two groups or more of two clients or more: others are clients that differ."""
        return bool(self.groups[0]) and int((np.bincount(self.groups[1]) > 1).sum()) > 1

    @property
    def means_otherwise(self) -> float:
        """What the label of the same features is for one client and not for another, in shares of the variance."""
        return 0.0 if self.meaning is None or self.known is None else not_in_features(self.meaning, self.known)


def not_in_features(meaning: Against, known: Against) -> float:
    """Return what knowing the member gains beyond its features; 0 where features tell most of it.

    The guess from features is a plain one, and misses some of what features tell.

    >>> not_in_features(Against(0.3, 0, 0.01), Against(0.3, 0, 0.01))
    0.3
    >>> not_in_features(Against(0.1, 0, 0.01), Against(0.3, 0, 0.01))
    0.0
    """
    return meaning.gain if meaning.gain >= MOSTLY * known.gain else 0.0


def clients_of(rows: Sample) -> Clients:
    """Compute the statistics of clients; there are two of them or more."""
    client, label, rng = rows.client, rows.label, rows.rng.at("clients")
    assert client is not None
    size = rows.clients, len(rows.label_names)
    held = counted(client, label, size)
    shuffles = times(shares.anywhere(label), rng.at("labels"))
    labels = against(apart(client, label, size), (apart(client, other, size) for other in shuffles))
    heaps = {}
    members = rows.members
    if labels.distance >= DISTANCE[0] and len(members) >= LEAST:
        heaps["labels"] = heaps_of(held[members], rng.at("heaps"))
    looks = told = models = gain = known = meaning = None
    if rows.cell is not None and rows.z is not None:
        size = rows.clients, CELLS
        shuffles = times(shares.within(rows.cell, label), rng.at("looks"))
        looks = against(apart(client, rows.cell, size), (apart(client, other, size) for other in shuffles))
        if len(members) >= 2:
            picked, member = rows.member_rows()
            models, gain, known, meaning, told = compared(
                rows.z[picked], rows.targets[picked], label[picked], member, len(members), rng.at("models")
            )
            if looks.distance >= DISTANCE[0] and len(members) >= LEAST:
                means, sizes = mean_looks(rows.z[picked], label[picked], member, len(members))
                heaps["features"] = heaps_of_means(means, sizes, rng.at("heaps"))
    alpha = shares.dirichlet_alpha(held)
    return Clients(labels, alpha, looks, told, models, gain, known, meaning, heaps, members)


def compared(
    z: np.ndarray, t: np.ndarray, label: np.ndarray, member: np.ndarray, members: int, rng: Rng
) -> tuple[Explained, Against, Against, Against, Against]:
    """Fit models to members, and to members shuffled among rows of the same label.

    Labels that differ make models of members better, too: shuffled among rows of the same label they still differ, and
    nothing else does.

    Returns:
        What models explain; what groups gain, what knowing the member gains, what it gains over guessing it from
        features, and how often it is guessed, each against the shuffles.
    """
    parts = divided(len(z), rng.at("parts"))
    seen = explained(z, t, label, member, members, parts, rng.at("groups"))
    counts = sorted({1, seen.count})
    told = seen.told - 1 / members
    worth = max(seen.gain, seen.meaning, told) >= GAIN[0]  # else no shuffle makes anything of it
    shuffled = [
        explained(z, t, label, other, members, parts, rng.at("groups"), counts)
        for other in times(shares.within(member, label), rng.at("shuffles"), MODEL_SHUFFLES if worth else FEW_SHUFFLES)
    ]
    gain, known, meaning, tells = (
        against(getattr(seen, name), [getattr(each, name) for each in shuffled])
        for name in ("gain", "known", "meaning", "told")
    )
    return seen, gain, known, meaning, tells


def mean_looks(z: np.ndarray, label: np.ndarray, member: np.ndarray, members: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean features (members, d) of each member's rows, less those of their labels, and its rows."""
    rest = z - means_by(z, label, int(label.max()) + 1)[label]
    return means_by(rest, member, members), np.bincount(member, minlength=members).astype(np.float64)


def heaps_of_means(means: np.ndarray, rows: np.ndarray, rng: Rng) -> tuple[float, np.ndarray]:
    """Return how well clients fall into two heaps along the main direction of their means, and the upper heap.

    0 where one of the draws of a normal distribution falls apart as well.
    """
    weight = rows / (1 + 0.05 * rows)
    share, upper = main_heaps(means, weight)
    draw = rng.numpy()
    normal = [shares.two_heaps(draw.normal(size=len(means)), weight)[0] for _ in range(DRAWS)]
    return (share if share > max(normal) else 0.0), upper


def heaps_of(held: np.ndarray, rng: Rng) -> tuple[float, np.ndarray]:
    """Return how well clients fall into two heaps by their counts of labels (clients, labels), and the upper heap.

    0 where one of the draws of a Dirichlet partition of the same spread falls apart as well.
    """
    rows, pooled = held.sum(1), held.sum(0) / held.sum()
    weight = rows / (1 + 0.05 * rows)
    share, upper = main_heaps(shares.shares(held), weight)
    seen, alpha, draw = pooled > 0, shares.dirichlet_alpha(held), rng.numpy()
    if not np.isfinite(alpha) or alpha <= 0:
        return 0.0, upper
    drawn_shares = draw.dirichlet(np.maximum(alpha * seen.sum() * pooled[seen], 1e-3), (DRAWS, len(held)))
    dealt = draw.multinomial(rows.astype(np.int64), drawn_shares)
    return (share if share > max(main_heaps(shares.shares(one), weight)[0] for one in dealt) else 0.0), upper


def main_heaps(means: np.ndarray, weight: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the share of the variance between the best two heaps along the main direction, and the upper heap."""
    centered = (means - np.average(means, axis=0, weights=weight)) * np.sqrt(weight)[:, None]
    return shares.two_heaps(means @ np.linalg.svd(centered, full_matrices=False)[2][0], weight)


# -- time --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Changes:
    """How what rows hold changes over slots of a cycle, or over blocks of time; None where a column is missing.

    others, same: how far the mix of labels changes by other clients, and by the same. look_others, look_same: the same
    of cells of features. crowd: how far the shares of groups of clients change. meaning: what a model of each of some
    groups of slots gains over guessing the slot from features, after the models of clients, in shares of the variance.
    alike: (slots,) those groups.
    """

    others: Against
    same: Against
    look_others: Against | None
    look_same: Against | None
    crowd: Against | None
    meaning: float
    alike: np.ndarray | None

    @property
    def label(self) -> float:
        """How far the mix of labels changes."""
        return max(self.others.distance, self.same.distance)

    @property
    def look(self) -> float:
        """How far the mix of cells of features changes."""
        return max((each.distance for each in (self.look_others, self.look_same) if each), default=0.0)


@dataclass(frozen=True)
class Cycle:
    """What a day, a week or a year does.

    activity: distance of the rows' slots from even ones. habits: of clients' slots from the pooled ones; None with
    fewer than two.
    """

    name: str
    slot: np.ndarray
    slots: int
    activity: Against
    habits: Against | None
    changes: Changes


def local_slots(seconds: np.ndarray, length: float, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the slot of each time in its cycle, and the number of the cycle; weeks begin on Mondays.

    >>> slot, cycle = local_slots(np.array([0.0, 3600.0 * 25]), 86400.0, 24)
    >>> slot.tolist(), cycle.tolist()
    ([0, 1], [0, 1])
    """
    since = seconds + (3 * 86400.0 if length == CYCLES["week"][0] else 0.0)  # 1970 began on a Thursday
    return np.floor(since / (length / slots)).astype(np.int64) % slots, np.floor(since / length).astype(np.int64)


def cycles_of(rows: Sample, clients: Clients | None) -> dict[str, Cycle]:
    """Compute what each cycle does of which the rows span two or more, and of which they tell the slot."""
    assert rows.seconds is not None
    found, span = {}, np.ptp(rows.seconds)
    for name, (length, many, few) in CYCLES.items():
        slots = many if len(rows.label) >= 200 * many else few
        if name == "day":
            slots = distinct_slots(local_slots(rows.seconds, length, slots)[0], slots)
        slot, cycle = local_slots(rows.seconds, length, slots)
        if span >= 2 * length and len(np.unique(slot)) >= 3:
            found[name] = cycle_of(rows, name, slot, cycle, slots, clients)
    return found


def distinct_slots(slot: np.ndarray, slots: int) -> int:
    """Return how many slots a day has where all rows lie a multiple of some slots apart.

    >>> distinct_slots(np.array([0, 3, 9, 21]), 24), distinct_slots(np.array([8, 9, 17]), 24)
    (8, 24)
    """
    return slots // int(np.gcd.reduce(np.diff(np.unique(slot)), initial=slots))


def cycle_of(
    rows: Sample, name: str, slot: np.ndarray, cycle: np.ndarray, slots: int, clients: Clients | None
) -> Cycle:
    """Compute what one cycle does."""
    rng, habits = rows.rng.at(name), None
    turns = list(times(shares.rotated(slot, cycle, slots), rng.at("turned")))
    activity = against(uneven(slot, slots), (uneven(turned, slots) for turned in turns))
    if rows.client is not None and rows.clients > 1:
        size = rows.clients, slots
        shuffles = times(shares.between_blocks(rows.client, cycle), rng.at("habits"))
        habits = against(apart(rows.client, slot, size), (apart(other, slot, size) for other in shuffles))
    return Cycle(name, slot, slots, activity, habits, changes_of(rows, slot, slots, clients, rng, turns, cyclic=True))


def uneven(slot: np.ndarray, slots: int) -> float:
    """Return the total variation distance of the rows' slots from equally many in each."""
    return float(0.5 * np.abs(np.bincount(slot, minlength=slots) / len(slot) - 1 / slots).sum())


def changes_of(
    rows: Sample,
    slot: np.ndarray,
    slots: int,
    clients: Clients | None,
    rng: Rng,
    shuffles: list[np.ndarray],
    *,
    cyclic: bool,
) -> Changes:
    """Compare the changes over slots with those over shuffled slots, which for a cycle are the cycles turned."""
    others, same = split(rows, slot, slots, rows.label, len(rows.label_names), shuffles)
    look_others = look_same = alike = None
    meaning = 0.0
    if rows.cell is not None and rows.z is not None:
        look_others, look_same = split(rows, slot, slots, rows.cell, CELLS, shuffles)
        meaning, alike = moved(rows, slot, slots, clients, rng.at("meaning"), shuffles if cyclic else ())
    crowd = crowd_of(rows, clients, slot, slots, shuffles)
    return Changes(others, same, look_others, look_same, crowd, meaning, alike)


def split(
    rows: Sample, slot: np.ndarray, slots: int, what: np.ndarray, kinds: int, shuffles: list[np.ndarray]
) -> tuple[Against, Against]:
    """Compare the change of a mix by other clients, and by the same ones, with that over shuffled slots."""
    size = slots, max(rows.clients, 1), kinds
    _, others, same = shares.change(slot, rows.owner, what, size)
    shuffled = [shares.change(other, rows.owner, what, size)[1:] for other in shuffles]
    return against(others, [each[0] for each in shuffled]), against(same, [each[1] for each in shuffled])


def moved(
    rows: Sample,
    slot: np.ndarray,
    slots: int,
    clients: Clients | None,
    rng: Rng,
    turns: Sequence[np.ndarray] = (),
) -> tuple[float, np.ndarray]:
    """Return how far the meaning of features differs between slots for the same clients, and the group of each slot.

    What models of slots gain over guessing the slot from features, on what the models of clients leave: so a change
    that comes with other clients counts for nothing. With `turns` the same of turned cycles has to be clearly less:
    else what drifts would seem to follow the week, where weekdays are not equally often there.
    """
    assert rows.z is not None
    picked = drawn(np.arange(len(slot)), MODELED, rng.at("rows"))
    z, t = rows.z[picked], rows.targets[picked]
    left = t - said_by_clients(rows, picked, clients)
    seen, gain, _, meaning, _ = compared(z, left, rows.label[picked], slot[picked], slots, rng)
    scale = float(((left - left.mean(0)) ** 2).sum() / max(((t - t.mean(0)) ** 2).sum(), 1e-12))
    effect = scale * not_in_features(meaning, gain)
    if turns and effect >= GAIN[0]:
        parts, counts = divided(len(z), rng.at("parts")), sorted({1, seen.count})
        turned = [
            explained(z, left, rows.label[picked], turn[picked], slots, parts, rng.at("groups"), counts).meaning
            for turn in turns[:MODEL_SHUFFLES]
        ]
        effect = min(effect, scale * against(seen.meaning, turned).gain)
    return effect, seen.group


def group_of_rows(rows: Sample, clients: Clients) -> np.ndarray:
    """Return the group of each row's client; -1 where it has too few rows to tell."""
    assert rows.client is not None
    group = np.full(rows.clients, -1)
    group[clients.members] = clients.groups[1]
    return group[rows.client]


def crowd_of(
    rows: Sample, clients: Clients | None, slot: np.ndarray, slots: int, shuffles: list[np.ndarray]
) -> Against | None:
    """Return how far the shares of groups of clients change over slots; None without groups."""
    if clients is None or not clients.groups[0]:
        return None
    group = group_of_rows(rows, clients)
    some, size = group >= 0, (slots, int(group.max()) + 1)
    return against(apart(slot[some], group[some], size), (apart(other[some], group[some], size) for other in shuffles))


def said_by_clients(rows: Sample, picked: np.ndarray, clients: Clients | None) -> np.ndarray:
    """Return what the models of clients' groups say of some rows; 0 where there is one group."""
    nothing = np.zeros((len(picked), rows.targets.shape[1]))
    if clients is None or clients.models is None or clients.groups[0] != "models":
        return nothing
    assert rows.z is not None
    own = group_of_rows(rows, clients)[picked]
    for number, weights in enumerate(clients.models.weights):
        nothing[own == number] = rows.z[picked][own == number] @ weights
    return nothing


@dataclass(frozen=True)
class Drift:
    """How blocks of time of equally many rows differ.

    labels, looks: distances. course: line, step and place, of what changes most. steps: the first blocks after several
    steps, where these explain it and a line does not. ahead: test then train. recency,
    cost: against shuffled blocks. None where a column is missing.
    """

    block: np.ndarray
    blocks: int
    labels: Against
    looks: Against | None
    changes: Changes
    course: tuple[float, float, int]
    steps: tuple[int, ...]
    ahead: Ahead | None
    recency: Against | None
    cost: Against | None


def blocks_of(seconds: np.ndarray, most: int = BLOCKS) -> np.ndarray:
    """Return the block of time of each row: of about equally many rows, and of whole weeks or days if many.

    Else what follows the hour would seem to drift.

    >>> blocks_of(np.array([0.0, 3.0, 1.0, 2.0]), 2).tolist()
    [0, 1, 0, 1]
    >>> blocks_of(86400.0 * np.array([0, 1, 2, 3, 4, 4.5]), 3).tolist()
    [0, 0, 1, 1, 2, 2]
    """
    unit = np.argsort(np.argsort(seconds, kind="stable"), kind="stable")
    for name, least in (("day", 4), ("week", most)):
        length, slots, _ = CYCLES[name]
        if np.ptp(seconds) >= least * length:
            unit = local_slots(seconds, length, slots)[1]
    _, unit, rows = np.unique(unit, return_inverse=True, return_counts=True)
    middle = np.cumsum(rows) - rows / 2
    return np.unique((middle * min(most, len(rows)) / rows.sum()).astype(np.int64), return_inverse=True)[1][unit]


def drift_of(rows: Sample, clients: Clients | None) -> Drift:
    """Compute how blocks of time differ."""
    assert rows.seconds is not None
    rng, block = rows.rng.at("drift"), blocks_of(rows.seconds)
    blocks = int(block.max()) + 1
    size = blocks, len(rows.label_names)
    shuffles = list(times(shares.anywhere(block), rng.at("blocks")))
    labels = against(apart(block, rows.label, size), (apart(other, rows.label, size) for other in shuffles))
    changes = changes_of(rows, block, blocks, clients, rng, shuffles, cyclic=False)
    looks = seen = recency = cost = None
    means = shares.shares(counted(block, rows.label, size))
    if rows.cell is not None and rows.z is not None:
        size = blocks, CELLS
        within = times(shares.within(block, rows.label), rng.at("looks"))
        looks = against(apart(block, rows.cell, size), (apart(other, rows.cell, size) for other in within))
        picked = drawn(np.arange(len(block)), MODELED, rng.at("ahead"))
        z, t = rows.z[picked], rows.targets[picked]
        seen = ahead(z, t, block[picked], blocks, rng.at("halves"))
        count = MODEL_SHUFFLES if max(seen.recency, seen.cost) >= GAIN[0] else FEW_SHUFFLES
        shuffled = [
            ahead(z, t, other, blocks, rng.at("halves"))
            for other in times(shares.anywhere(block[picked]), rng.at("shuffled"), count)
        ]
        recency = against(seen.recency, [each.recency for each in shuffled])
        cost = against(seen.cost, [each.cost for each in shuffled])
        if looks.distance > labels.distance:
            means = shares.shares(counted(block, rows.cell, size))
        mixed = max(labels.distance, looks.distance) >= DISTANCE[0]
        if changes.alike is not None and changes.meaning >= GAIN[0] and not mixed:
            means = np.eye(int(changes.alike.max()) + 1)[changes.alike]
    course, (at, explained) = shares.course(means), shares.steps(means)
    several = at if len(at) > 1 and explained > course[0] + shares.APART else ()
    return Drift(block, blocks, labels, looks, changes, course, several, seen, recency, cost)
