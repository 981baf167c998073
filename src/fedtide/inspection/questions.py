"""Numbers for the eight questions, each with the same number of shuffled data."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedtide.clusters.clusterer import distances, draw_seeds, kmeans_from
from fedtide.core.rng import Rng, draw_some
from fedtide.inspection import shares
from fedtide.inspection.linear import Ahead, Explained, explain, judge_ahead, means_by, split_rows
from fedtide.inspection.shares import Against, against, count_by, draw_shuffles, mean_distance
from fedtide.inspection.table import Table

DISTANCE = 0.08, 0.2
"""Total variation distances from which a difference of shares is mild, and strong."""
GAIN = 0.02, 0.08
"""Shares of the variance from which the gain of a model is mild, and strong."""
HEAPS = 0.9
"""Share of the variance between two heaps of clients from which they are groups; 0.64 of a normal distribution."""

ROWS = 100_000
"""Rows that are looked at; of more, as many are drawn."""
BLOCKS = 20
"""Blocks of time, at most."""
WHOLE = 4
"""Whole weeks, or days, from which blocks of time are whole ones."""
DRAWS = 400
"""Draws of clients that do not fall into heaps, with which heaps are compared."""
MODELED, MEMBERS = 20_000, 100
"""Rows that models are fitted to, and the clients with most rows, which hold these rows."""
MODEL_SHUFFLES, FEW_SHUFFLES = 16, 3
"""Shuffles to which models are fitted; the latter if models of the rows themselves show hardly anything."""
BINS, LABELS, CELLS = 10, 30, 12
"""Classes of a measured label, labels that are told apart (the others are one), and cells of features."""
MOSTLY = 0.5
"""Share of the gain by knowing the client that features must not reveal, for labels of the same input to differ."""
WIDTH, WAVES = 32, 32
"""Numbers that features are brought down to, and cosines of them for curves."""
LEAST = 10
"""Rows from which a client is looked at by itself."""
CYCLES = {"day": (86400.0, 24, 8), "week": (604800.0, 7, 7), "year": (31556952.0, 12, 12)}
"""Lengths in seconds, and numbers of slots; the latter of few rows."""


# -- rows that are looked at -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """Rows that the questions look at.

    Args:
        label: (rows,) class; of a measured label a class of equal size, the rarest of very many are one.
        label_names: of the classes.
        targets: (rows, outputs) of models.
        z: (rows, d) features, the last of which is 1; None without features.
        cell: (rows,) cell of features.
        client: (rows,) number.
        client_names: of the numbers.
        seconds: (rows,) local time.
        rng: of all that is drawn.
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
        """Number of each row's client (rows,); 0 for all if none is named."""
        return np.zeros(len(self.label), dtype=np.int64) if self.client is None else self.client

    @cached_property
    def members(self) -> np.ndarray:
        """Clients with rows enough to be looked at by themselves, the largest first."""
        if self.client is None:
            return np.array([], dtype=np.int64)
        rows = np.bincount(self.client, minlength=self.clients)
        return np.argsort(-rows, kind="stable")[: int(min((rows >= LEAST).sum(), MEMBERS))]

    def member_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Return rows of these clients, at most `MODELED`, and the place of each row's client."""
        assert self.client is not None
        place = np.full(self.clients, -1)
        place[self.members] = np.arange(len(self.members))
        rows = draw_some(np.flatnonzero(place[self.client] >= 0), MODELED, self.rng.at("members"))
        return rows, place[self.client[rows]]


def sample(table: Table, seed: int = 0) -> Sample:
    """Prepare the rows of a table."""
    rng = Rng(seed)
    rows = draw_some(np.arange(len(table.label)), ROWS, rng.at("rows"))
    label, names, targets = classes(table.label[rows])
    z = cell = client = None
    client_names: tuple[str, ...] = ()
    if table.features is not None:
        straight = standardize(table.features[rows], rng.at("narrow"))
        z = np.concatenate([straight, waves(straight, rng.at("waves")), np.ones((len(rows), 1))], 1)
        looks = np.delete(table.features[rows], table.calendar, 1) if table.calendar else None
        if looks is None or looks.shape[1]:
            cell = cells(straight if looks is None else standardize(looks, rng.at("narrow")), rng.at("cells"))
    if table.client is not None:
        unique, client = np.unique(table.client[rows], return_inverse=True)
        client_names = tuple(map(str, unique))
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
    unique, label, rows = np.unique(values, return_inverse=True, return_counts=True)
    names = list(map(str, unique))
    if len(unique) > LABELS:
        common = np.sort(np.argsort(-rows, kind="stable")[: LABELS - 1])
        place = np.full(len(unique), LABELS - 1)
        place[common] = np.arange(LABELS - 1)
        label, names = place[label], [*(names[number] for number in common), "others"]
    hot = np.eye(len(names))[label]
    return label, tuple(names), hot - hot.mean(0)


def standardize(features: np.ndarray, rng: Rng) -> np.ndarray:
    """Return standardized features, of very many their main directions."""
    x = features.reshape(len(features), -1).astype(np.float64)
    x = np.clip((x - x.mean(0)) / np.maximum(x.std(0), 1e-9), -5, 5)
    if x.shape[1] > WIDTH:
        few = x[draw_some(np.arange(len(x)), 4000, rng)]
        x = x @ np.linalg.svd(few - few.mean(0), full_matrices=False)[2][:WIDTH].T
        x = (x - x.mean(0)) / np.maximum(x.std(0), 1e-9)
    return x


def waves(x: np.ndarray, rng: Rng) -> np.ndarray:
    """Return random cosines of features (Rahimi and Recht 2007), for curves."""
    draw = rng.numpy()
    directions = draw.normal(size=(x.shape[1], WAVES)) / np.sqrt(x.shape[1])
    return np.sqrt(2) * np.cos(x @ directions + draw.uniform(0, 2 * np.pi, WAVES))


def cells(x: np.ndarray, rng: Rng) -> np.ndarray:
    """Return each row's cell, by k-means of some rows: cells are to looks what labels are to meaning."""
    few = x[draw_some(np.arange(len(x)), 3000, rng.at("some"))]
    centers, _ = kmeans_from(few, draw_seeds(few, CELLS, rng.at("seeds")), iterations=12)
    return distances(x, centers).argmin(1)


# -- clients -----------------------------------------------------------------------------------------------------------


def count_gain(gain: Against, share: float) -> float:
    """Return the gain of a model that explains a share of the variance; 0 if it is no better than the mean."""
    return gain.gain if share > 0 else 0.0


@dataclass(frozen=True)
class Compared:
    """Models of members, and their numbers with those of members shuffled among rows of the same label.

    `recognized` is None if nobody could try, as between real clients.
    """

    models: Explained
    gain: Against
    by_client: Against
    meaning: Against
    recognized: Against | None

    @property
    def beyond_features(self) -> float:
        """Gain by the member beyond its features, in shares of the variance; 0 if features reveal most of the gain.

        The guess from features is a plain one, and misses some of what features reveal.
        """
        gain = count_gain(self.meaning, max(self.models.grouped, self.models.single))
        return gain if gain >= MOSTLY * self.by_client.gain else 0.0

    @property
    def between_groups(self) -> float:
        """Gain of models of groups, in shares of the variance."""
        return count_gain(self.gain, self.models.grouped)


@dataclass(frozen=True)
class Clients:
    """Differences of clients: the numbers of the first four questions; None if a column is missing.

    heaps: how far the clients fall into two heaps, by their labels and by their looks, and the upper heap of each.
    """

    labels: Against
    alpha: float
    looks: Against | None
    compared: Compared | None
    heaps: dict[str, tuple[float, np.ndarray]]
    members: np.ndarray

    @property
    def groups(self) -> tuple[str, np.ndarray]:
        """The things in which groups differ ("models", "features", "labels", or "" for none), and each member's."""
        if self.compared is not None and self.compared.between_groups >= GAIN[0]:
            return "models", self.compared.models.group
        for name in ("features", "labels"):
            if name in self.heaps and self.heaps[name][0] >= HEAPS:
                return name, self.heaps[name][1].astype(np.int64)
        return "", np.zeros(len(self.members), dtype=np.int64)

    @property
    def crowds(self) -> bool:
        """True for two groups or more of two clients or more: others are clients that differ."""
        return bool(self.groups[0]) and int((np.bincount(self.groups[1]) > 1).sum()) > 1


def clients_of(rows: Sample) -> Clients:
    """Compute the numbers of clients; there are two of them or more."""
    client, label, rng, members = rows.client, rows.label, rows.rng.at("clients"), rows.members
    assert client is not None
    size = rows.clients, len(rows.label_names)
    counts = count_by(client, label, size)
    shuffled = draw_shuffles(shares.anywhere(label), rng.at("labels"))
    labels = against(lambda labels: mean_distance(client, labels, size), label, shuffled)
    heaps = {}
    if labels.distance >= DISTANCE[0] and len(members) >= LEAST:
        heaps["labels"] = heaps_of_labels(counts[members], rng.at("heaps"))
    looks = compared = None
    if rows.cell is not None and rows.z is not None:
        cells_size = rows.clients, CELLS
        shuffled = draw_shuffles(shares.within(rows.cell, label), rng.at("looks"))
        looks = against(lambda cell: mean_distance(client, cell, cells_size), rows.cell, shuffled)
        if len(members) >= 2:
            picked, member = rows.member_rows()
            z, t = rows.z[picked], rows.targets[picked]
            compared = compare(z, t, label[picked], member, len(members), rng.at("models"))
            if looks.distance >= DISTANCE[0] and len(members) >= LEAST:
                means, sizes = mean_looks(z, label[picked], member, len(members))
                normal = rng.at("heaps").numpy().normal(size=(DRAWS, len(means), 1))
                heaps["features"] = heaps_of(means, sizes, normal)
    return Clients(labels, shares.dirichlet_alpha(counts), looks, compared, heaps, members)


def compare(z: np.ndarray, t: np.ndarray, label: np.ndarray, member: np.ndarray, members: int, rng: Rng) -> Compared:
    """Fit models to members, and to members shuffled among rows of the same label.

    Labels that differ make models of members better, too: shuffled among rows of the same label they still differ, and
    nothing else does.
    """
    parts = split_rows(len(z), rng.at("parts"))
    seen = explain(z, t, label, member, members, parts, rng.at("groups"))
    counts = sorted({1, seen.count})
    worth = max(seen.gain, seen.meaning, seen.recognized - 1 / members) >= GAIN[0]  # else shuffles change no answer
    draws = draw_shuffles(shares.within(member, label), rng.at("shuffles"), MODEL_SHUFFLES if worth else FEW_SHUFFLES)
    shuffled = [explain(z, t, label, other, members, parts, rng.at("groups"), counts) for other in draws]
    names = ("gain", "by_client", "meaning", "recognized")
    return Compared(
        seen, *(Against.of(getattr(seen, name), [getattr(one, name) for one in shuffled]) for name in names)
    )


def mean_looks(z: np.ndarray, label: np.ndarray, member: np.ndarray, members: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean features (members, d) of each member's rows, less those of their labels, and its rows."""
    rest = z - means_by(z, label, int(label.max()) + 1)[label]
    return means_by(rest, member, members), np.bincount(member, minlength=members).astype(np.float64)


def heaps_of(means: np.ndarray, rows: np.ndarray, draws: Iterable[np.ndarray]) -> tuple[float, np.ndarray]:
    """Return how well clients fall into two heaps along the main direction of their means, and the upper heap.

    0 if one of the draws of clients without heaps falls apart as well.
    """
    weight = rows / (1 + 0.05 * rows)
    share, upper = _main_heaps(means, weight)
    return (share if share > max(_main_heaps(draw, weight)[0] for draw in draws) else 0.0), upper


def heaps_of_labels(counts: np.ndarray, rng: Rng) -> tuple[float, np.ndarray]:
    """Return the heaps of clients by their counts of labels (clients, labels), against Dirichlet partitions."""
    rows, pooled = counts.sum(1), counts.sum(0) / counts.sum()
    seen, alpha, draw = pooled > 0, shares.dirichlet_alpha(counts), rng.numpy()
    if not np.isfinite(alpha) or alpha <= 0:
        return 0.0, np.zeros(len(counts), dtype=bool)
    mixes = draw.dirichlet(np.maximum(alpha * seen.sum() * pooled[seen], 1e-3), (DRAWS, len(counts)))
    dealt = draw.multinomial(rows.astype(np.int64), mixes)
    return heaps_of(shares.normalize(counts), rows, map(shares.normalize, dealt))


def _main_heaps(means: np.ndarray, weight: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the share of the variance between the best two heaps along the main direction, and the upper heap."""
    centered = (means - np.average(means, axis=0, weights=weight)) * np.sqrt(weight)[:, None]
    return shares.two_heaps(means @ np.linalg.svd(centered, full_matrices=False)[2][0], weight)


def group_of_rows(rows: Sample, clients: Clients) -> np.ndarray:
    """Return the group of each row's client; -1 if the client has too few rows."""
    assert rows.client is not None
    group = np.full(rows.clients, -1)
    group[clients.members] = clients.groups[1]
    return group[rows.client]


# -- time --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Changes:
    """Changes over slots of a cycle, or over blocks of time; None if a column is missing.

    Args:
        others: how far the mix of labels changes by other clients.
        same: how far it changes by the same clients.
        look_others: as `others`, of cells of features.
        look_same: as `same`, of cells of features.
        crowd: how far the shares of groups of clients change.
        meaning: gain of models of groups of slots over guessing the slot from features, in shares of the variance.
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
        return max((effect.distance for effect in (self.look_others, self.look_same) if effect), default=0.0)


@dataclass(frozen=True)
class Cycle:
    """Changes over a day, a week or a year.

    activity: distance of the rows' slots from even ones. habits: of clients' slots from the pooled ones; None with
    fewer than two clients.
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
    """Compute the changes over each cycle that rows span twice or more, with slots by their times."""
    assert rows.seconds is not None
    cycles, span = {}, np.ptp(rows.seconds)
    for name, (length, many, few) in CYCLES.items():
        slots = many if len(rows.label) >= 200 * many else few
        if name == "day":
            slots = distinct_slots(local_slots(rows.seconds, length, slots)[0], slots)
        slot, number = local_slots(rows.seconds, length, slots)
        if span >= 2 * length and len(np.unique(slot)) >= 3:
            cycles[name] = cycle_of(rows, name, slot, number, slots, clients)
    return cycles


def distinct_slots(slot: np.ndarray, slots: int) -> int:
    """Return the number of slots of a day if all rows lie a multiple of some slots apart.

    >>> distinct_slots(np.array([0, 3, 9, 21]), 24), distinct_slots(np.array([8, 9, 17]), 24)
    (8, 24)
    """
    return slots // int(np.gcd.reduce(np.diff(np.unique(slot)), initial=slots))


def cycle_of(
    rows: Sample, name: str, slot: np.ndarray, number: np.ndarray, slots: int, clients: Clients | None
) -> Cycle:
    """Compute the changes over one cycle."""
    rng, habits = rows.rng.at(name), None
    turns = list(draw_shuffles(shares.rotated(slot, number, slots), rng.at("turned")))
    even = np.full(slots, 1 / slots)
    activity = against(
        lambda at: float(shares.variation(np.bincount(at, minlength=slots) / len(at), even)), slot, turns
    )
    if rows.client is not None and rows.clients > 1:
        size = rows.clients, slots
        shuffled = draw_shuffles(shares.between_blocks(rows.client, number), rng.at("habits"))
        habits = against(lambda client: mean_distance(client, slot, size), rows.client, shuffled)
    return Cycle(name, slot, slots, activity, habits, changes_of(rows, slot, slots, clients, rng, turns, cyclic=True))


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

    def split(what: np.ndarray, kinds: int) -> tuple[Against, Against]:
        """Compare the change of a mix by other clients, and by the same ones."""
        size = slots, max(rows.clients, 1), kinds
        others, same = shares.change(slot, rows.owner, what, size)
        shuffled = [shares.change(other, rows.owner, what, size) for other in shuffles]
        return Against.of(others, [pair[0] for pair in shuffled]), Against.of(same, [pair[1] for pair in shuffled])

    others, same = split(rows.label, len(rows.label_names))
    look_others = look_same = crowd = alike = None
    meaning = 0.0
    if rows.cell is not None and rows.z is not None:
        look_others, look_same = split(rows.cell, CELLS)
        meaning, alike = changed_meaning(rows, slot, slots, clients, rng.at("meaning"), shuffles if cyclic else ())
    if clients is not None and clients.groups[0]:
        group = group_of_rows(rows, clients)
        grouped, size = group >= 0, (slots, int(group.max()) + 1)
        crowd = against(lambda slot: mean_distance(slot[grouped], group[grouped], size), slot, shuffles)
    return Changes(others, same, look_others, look_same, crowd, meaning, alike)


def changed_meaning(
    rows: Sample, slot: np.ndarray, slots: int, clients: Clients | None, rng: Rng, turns: Sequence[np.ndarray] = ()
) -> tuple[float, np.ndarray]:
    """Return how far the labels of the same input differ between slots for the same clients, and each slot's group.

    It is the gain of models of slots over guessing the slot from features, on the residuals of clients' models. So a
    change that comes with other clients counts for nothing. With `turns` the gain of turned cycles has to be clearly
    less. Drift would else seem to follow the week, because some weekdays have more rows.
    """
    assert rows.z is not None
    picked = draw_some(np.arange(len(slot)), MODELED, rng.at("rows"))
    z, t, label = rows.z[picked], rows.targets[picked], rows.label[picked]
    left = t - predictions_of_groups(rows, picked, clients)
    compared = compare(z, left, label, slot[picked], slots, rng)
    scale = float(((left - left.mean(0)) ** 2).sum() / max(((t - t.mean(0)) ** 2).sum(), 1e-12))
    effect = scale * compared.beyond_features
    if turns and effect >= GAIN[0]:
        parts, counts = split_rows(len(z), rng.at("parts")), sorted({1, compared.models.count})
        turned = [
            explain(z, left, label, turn[picked], slots, parts, rng.at("groups"), counts).meaning
            for turn in turns[:MODEL_SHUFFLES]
        ]
        effect = min(effect, scale * Against.of(compared.models.meaning, turned).gain)
    return effect, compared.models.group


def predictions_of_groups(rows: Sample, picked: np.ndarray, clients: Clients | None) -> np.ndarray:
    """Return the predictions of some rows by the models of their clients' groups; 0 if there is one group."""
    predictions = np.zeros((len(picked), rows.targets.shape[1]))
    if clients is None or clients.compared is None or clients.groups[0] != "models":
        return predictions
    assert rows.z is not None
    group = group_of_rows(rows, clients)[picked]
    for number, weights in enumerate(clients.compared.models.weights):
        predictions[group == number] = rows.z[picked][group == number] @ weights
    return predictions


@dataclass(frozen=True)
class Drift:
    """Differences between blocks of time with equally many rows.

    Args:
        block: (rows,) number of the block.
        blocks: their number.
        labels: distance of labels.
        changes: over the blocks.
        course: line, step and place, of the largest change.
        steps: the first blocks after several steps, if these explain the change and a line does not.
        ahead: test then train; None without features.
        gains: by what rows are better than all of the past, "recent" or "itself", against shuffled blocks.
    """

    block: np.ndarray
    blocks: int
    labels: Against
    changes: Changes
    course: tuple[float, float, int]
    steps: tuple[int, ...]
    ahead: Ahead | None
    gains: Mapping[str, Against]

    @classmethod
    def of(
        cls,
        block: np.ndarray,
        kinds: Sequence[tuple[Against, np.ndarray]],
        changes: Changes,
        ahead: tuple[Ahead | None, Mapping[str, Against]],
    ) -> "Drift":
        """Tell the course of what changes most: features, or labels, or the meaning of features if neither does.

        Args:
            block: (rows,) number of the block.
            kinds: distance and shares (blocks, kinds) of labels, and of features if there are some.
            changes: over the blocks.
            ahead: test then train, and its gains.
        """
        largest, means = max(kinds, key=lambda kind: kind[0].distance)
        if changes.alike is not None and changes.meaning >= GAIN[0] and largest.distance < DISTANCE[0]:
            means = np.eye(int(changes.alike.max()) + 1)[changes.alike]
        course, (at, share) = shares.course(means), shares.steps(means)
        several = at if len(at) > 1 and share > course[0] + shares.APART else ()
        return cls(block, int(block.max()) + 1, kinds[0][0], changes, course, several, *ahead)


def blocks_of(seconds: np.ndarray, most: int = BLOCKS) -> np.ndarray:
    """Return the block of time of each row: of about equally many rows, and of whole weeks or days if there are some.

    >>> blocks_of(np.array([0.0, 3.0, 1.0, 2.0]), 2).tolist()
    [0, 1, 0, 1]
    >>> blocks_of(86400.0 * np.array([0, 1, 2, 3, 4, 5]), 3).tolist()
    [0, 0, 1, 1, 2, 2]
    """
    unit = whole_cycles(seconds)
    if unit is None:
        unit = np.argsort(np.argsort(seconds, kind="stable"), kind="stable")
    _, unit, rows = np.unique(unit, return_inverse=True, return_counts=True)
    return join_units(rows, most)[unit]


def whole_cycles(seconds: np.ndarray) -> np.ndarray | None:
    """Return the whole week of each time since the first day, its day if weeks are few, or None if days are few, too.

    A change over the week or the day would else seem to be drift. Times after the last whole one belong to it.

    >>> whole_cycles(86400.0 * np.array([1, 7.5, 8, 27, 31])).tolist()
    [0, 0, 1, 3, 3]
    """
    day = CYCLES["day"][0]
    since = seconds - seconds.min() // day * day
    for name in ("week", "day"):
        length, slots, _ = CYCLES[name]
        whole = int((since.max() + length / slots) // length)  # dates alone tell the beginning of the last day
        if whole >= WHOLE:
            return np.minimum((since // length).astype(np.int64), whole - 1)
    return None


def join_units(rows: np.ndarray, most: int = BLOCKS) -> np.ndarray:
    """Return the block of each unit of time (units,), of about equally many rows; every unit has some rows.

    >>> join_units(np.array([1, 1, 1, 3]), 2).tolist()
    [0, 0, 0, 1]
    """
    middle = np.cumsum(rows) - rows / 2
    return np.unique((middle * min(most, len(rows)) / rows.sum()).astype(np.int64), return_inverse=True)[1]


def drift_of(rows: Sample, clients: Clients | None) -> Drift:
    """Compute the differences between blocks of time."""
    assert rows.seconds is not None
    rng, block = rows.rng.at("drift"), blocks_of(rows.seconds)
    blocks = int(block.max()) + 1
    size = blocks, len(rows.label_names)
    shuffles = list(draw_shuffles(shares.anywhere(block), rng.at("blocks")))
    labels = against(lambda block: mean_distance(block, rows.label, size), block, shuffles)
    changes = changes_of(rows, block, blocks, clients, rng, shuffles, cyclic=False)
    ahead: tuple[Ahead | None, Mapping[str, Against]] = None, {}
    kinds = [(labels, shares.normalize(count_by(block, rows.label, size)))]
    if rows.cell is not None and rows.z is not None:
        cell, cells_size = rows.cell, (blocks, CELLS)
        within = draw_shuffles(shares.within(block, rows.label), rng.at("looks"))
        looks = against(lambda block: mean_distance(block, cell, cells_size), block, within)
        kinds.append((looks, shares.normalize(count_by(block, cell, cells_size))))
        ahead = _ahead_of(rows, rows.z, block, blocks, rng)
    return Drift.of(block, kinds, changes, ahead)


def _ahead_of(
    rows: Sample, z: np.ndarray, block: np.ndarray, blocks: int, rng: Rng
) -> tuple[Ahead, dict[str, Against]]:
    """Judge models of the past, and compare their recency and cost with those of shuffled blocks."""
    picked = draw_some(np.arange(len(block)), MODELED, rng.at("ahead"))
    z, t = z[picked], rows.targets[picked]
    seen = judge_ahead(z, t, block[picked], blocks, rng.at("halves"))
    count = MODEL_SHUFFLES if max(seen.recency, seen.cost) >= GAIN[0] else FEW_SHUFFLES
    shuffles = draw_shuffles(shares.anywhere(block[picked]), rng.at("shuffled"), count)
    shuffled = [judge_ahead(z, t, other, blocks, rng.at("halves")) for other in shuffles]
    recent = Against.of(seen.recency, [other.recency for other in shuffled])
    return seen, {"recent": recent, "itself": Against.of(seen.cost, [other.cost for other in shuffled])}
