"""Watch: in each round clients count how sure and how right the model is, and the server tells by sums if data drift.

Before a round, clients count their rows of now with the model that the method serves: top confidences in bins, how many
of each bin were right, predicted classes, labels, and inputs. Each client counts `rows` rows at most, drawn at random.
The counts are one sum. Numbers and alarms that the server reads in it are those of `fedtide.transforms.windows`.

The first windows are the reference. From then on a window has an estimate of its accuracy, which needs no labels, and
scores of its drift: of inputs, of predictions, of labels, and of their meaning. If the method serves models by slots,
such as clusters, each of these is watched, too.

When to use it: a model is in use, or is trained for months, and nobody can look at rows. With labels of later windows
a change of their meaning is told, too; without them nothing can tell of it.

Choices:
    - ours: validation rows are counted, of a client without any its training rows, as in `on-need`. A real client may
      name a file of the rows that it has now.
    - ours: inputs are `tanh(x / 2)` of each column and its square, of more than `COLUMNS` columns along `DIRECTIONS`
      random directions. So columns have to be scaled. Tokens are not compared.
    - ours: a slot is another group if most of its clients were in another one when their references began. Then its
      reference begins anew. If there are more or fewer slots all references of slots do.
    - ours: with `period` a window is compared with those of its phase, so that a rhythm is no drift.
    - ours: if the model is trained between windows, predictions are not compared, because they change by training.
      Confidence is calibrated by the last windows, and not by the first ones.
    - ours: after training by an alarm the reference begins anew, because data and model are others.
    - ours: `on-need` decides by labels, `train = "alarm"` without them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedtide.core.base import (
    Algorithm,
    Answer,
    Extended,
    Facts,
    Holdings,
    Memory,
    Moment,
    Payload,
    Shard,
    Sum,
    Weighted,
    Work,
)
from fedtide.core.rng import Rng
from fedtide.fields.types import Count, ingredient
from fedtide.learn.target import CLASSES
from fedtide.learn.task import classes_of
from fedtide.transforms.transform import Transform, cost_as_loss, each_slot, predict_own, with_own
from fedtide.transforms.windows import BINS, KINDS, LIMIT, Group, Layout, detector, in_words, look

WATCH = "watch"
"""Name of the question by which clients count."""
COLUMNS = 64
"""Columns of inputs that are compared one by one, at most."""
DIRECTIONS = 16
"""Random directions along which more columns are compared."""
ROOM = 1e-6
"""By how much counts may be off by rounding."""


@dataclass(frozen=True)
class Known:
    """Knowledge from windows so far.

    Args:
        groups: of all clients, then of each slot; empty before the first window.
        homes: by client, its slot when the reference of this slot began; -1 if it is not known.
        left: rounds of training that are left, with `train = "alarm"`.
        counted: the last round whose window had rows; -1 before the first. Clients count files of rows once.
    """

    groups: tuple[Group, ...] = field(default_factory=tuple)
    homes: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    left: int = 0
    counted: int = -1


@ingredient
class Watch(Transform):
    """Clients count confidences, predictions and labels in each round; drift and a fall of accuracy are told by sums.

    Args:
        train: "always" trains in each round, "never" only watches, which `init_from` has use for. "alarm" trains for
            some `rounds` at first and after each alarm.
        labels: windows whose labels are counted: "always", or "first" for those of the reference alone, or "never".
        windows: number of windows that are the reference, of each phase.
        period: windows after which they are like those before, such as 24 of an hour each.
        rows: number of rows that a client counts in a window, at most.
        rounds: how many rounds "alarm" trains.

    >>> import fedtide as ft
    >>> task = ft.Task(lambda: ft.models.Linear().build((3,), 2))
    >>> ft.transforms.apply(ft.algorithms.fedavg(task), ft.transforms.Watch(train="never")).transforms[0].label
    'watched, trains never'
    """

    train: Literal["always", "never", "alarm"] = "always"
    labels: Literal["always", "first", "never"] = "always"
    windows: Count = 10
    period: Count = 1
    rows: Count = 100
    rounds: Count = 10
    kind: Literal["watch"] = "watch"
    place: ClassVar[int] = 8

    @property
    def label(self) -> str:
        """Words beside the name of a method with this transform."""
        return "watched" if self.train == "always" else f"watched, trains {self.words}"

    @property
    def words(self) -> str:
        """When it trains, in words."""
        return "on alarm" if self.train == "alarm" else self.train

    def why_not(self, algorithm: Algorithm) -> str:
        """Return the reason why it has no meaning for an algorithm."""
        task = algorithm.options.get("task", algorithm.task)
        if task is None or task.target != CLASSES:
            return "it predicts no classes, so it has no confidence"
        if self.train == "alarm" and (why := algorithm.traits.refuses.get("on-need", "")):
            return f'train = "alarm" pauses: {why}'
        if self.train == "always" and self.labels == "first":
            return 'training changes its confidence, so labels = "first" soon tells nothing; allowed: "always", "never"'
        return ""

    def change(self, algorithm: Algorithm) -> Algorithm:
        """Let clients count each window before a round."""

        def check(clients: Holdings) -> None:
            if algorithm.check is not None:
                algorithm.check(clients)
            detector(LIMIT)

        def round(state: Extended, fleet: Any, rng: Rng) -> tuple[Extended, Facts]:
            watched, shown = state.own, dict[str, Any]()
            if fleet.moment.round >= 0 and not watched.left:
                watched, shown = self.look(algorithm, state, fleet)
            trains = self.train == "always" or bool(watched.left) or fleet.moment.round < 0
            if self.train == "alarm" and fleet.moment.round >= 0:
                watched = replace(watched, left=max(watched.left - 1, 0))
            inner, facts = algorithm.round(state.inner, fleet, rng) if trains else (state.inner, {})
            return Extended(inner, watched), {**facts, **shown}

        unprivate = algorithm.traits.unprivate or "noise would tell of drift"
        cost = cost_as_loss(algorithm.traits.compute_cost, WATCH)
        traits = replace(algorithm.traits, compute_cost=cost, unprivate=unprivate)
        works = {**algorithm.works, WATCH: count_question(algorithm, self.rows)}
        first = Known(left=self.rounds if self.train == "alarm" else 0)
        extended = with_own(algorithm, lambda inner, fleet, rng: Extended(inner, first), round)
        return replace(extended, works=works, check=check, traits=traits)

    def look(self, algorithm: Algorithm, state: Extended, fleet: Any) -> tuple[Known, dict[str, Any]]:
        """Ask for the counts of a window; return what is known then, and facts of the window."""
        watched: Known = state.own
        clients, phase = fleet.reachable, fleet.moment.round % self.period
        learns = not watched.groups or watched.groups[0].learns(phase)
        asks_labels = self.labels == "always" or (self.labels == "first" and learns)
        payload, slot = algorithm.serve(state.inner, clients)
        about = {"labels": asks_labels, "counted": watched.counted}
        sent = each_slot(payload, {"slot": slot}, lambda part: {"served": part, **about})
        reply = fleet.ask(WATCH, clients, sent, slot=slot)
        totals = [None] if reply.total is None else reply.total if slot is not None else [reply.total]
        sums = [None if total is None else total["window"] for total in totals]
        windows = [None if one is None or one.weight <= 0 else as_window(one) for one in sums]
        whole = join_windows(windows)
        if whole is None:
            return watched, {"watch": {"rows": 0}}
        task = algorithm.options["task"]
        layout = layout_of(whole, task)
        why = next(filter(None, (odd(window, layout) for window in windows if window is not None)), "")
        if why or whole[-1] > self.rows * len(reply.clients) + ROOM:
            return watched, {"watch": {"rows": 0, "refused": why or "more rows than clients may count"}}
        every = [whole, *(windows if slot is not None else ())]
        new = Group.begin(layout, self.period, self.windows)
        groups, homes = watched.groups or (new,), watched.homes
        if len(groups) != len(every):  # the first window, or another number of clusters
            groups, homes = (groups[0], *[new] * (len(every) - 1)), homes[:0]
        if slot is not None:
            homes, others = find_others(homes, clients, slot)
            groups = (groups[0], *(new if k in others else group for k, group in enumerate(groups[1:])))
        lines: list[Any] = []
        after = list(groups)
        for number, window in enumerate(every):
            if window is None:
                lines.append(None)
                continue
            after[number], line = look(
                groups[number], window, phase, layout, streams=len(KINDS) * len(every), trains=self.train == "always"
            )
            lines.append(line)
        alarms = [alarm for number, line in enumerate(lines) if line for alarm in alarms_in(line, number - 1, layout)]
        following = Known(tuple(after), homes, counted=fleet.moment.round)
        if alarms and self.train == "alarm":
            following = Known(left=self.rounds, counted=fleet.moment.round)
        shown = {"watch": {**lines[0], "clients": len(reply.clients), "groups": lines[1:], "alarms": alarms}}
        return following, shown if lines[0]["estimate"] is None else {"estimated": lines[0]["estimate"], **shown}


def is_watched(algorithm: Algorithm) -> bool:
    """Tell whether a method has this transform."""
    return any(isinstance(transform, Watch) for transform in algorithm.transforms)


def count_question(algorithm: Algorithm, most: int) -> Work:
    """Build the question: means over a client's rows, at most so many, of all that a window counts."""

    def count(payload: Payload, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        judged = predict_own(algorithm, payload["served"], memory, shard, moment, rng)
        if judged is None:
            return None
        rows, outputs = judged
        counts = torch.ones(rows.y.shape, dtype=torch.bool) if rows.mask is None else rows.mask
        logp, labels = outputs[counts], rows.y[counts]
        order = torch.from_numpy(rng.at("rows").numpy().permutation(len(labels)))[:most]
        shown = rows.x if rows.mask is not None else rows.x[order.to(rows.x.device)]
        window = count_rows(logp[order], labels[order] if payload["labels"] else None, shown[:most])
        return Answer({"window": Weighted(window, float(len(order)))})

    return count


def count_rows(logp: Tensor, y: Tensor | None, x: Tensor) -> Tensor:
    """Return the window (size,) of some rows, as means over them.

    Args:
        logp: (rows, classes) log-probabilities.
        y: (rows,) labels; None if they are not counted.
        x: (rows, ...) inputs.

    >>> window = count_rows(torch.tensor([[0.93, 0.07], [0.36, 0.64]]).log(), torch.tensor([0, 0]), torch.zeros(2, 1))
    >>> window.nonzero().flatten().tolist()  # confidences of bins 12 and 18, right in 18, predicted 0 and 1, label 0
    [12, 18, 38, 40, 41, 42]
    """
    rows, classes = logp.shape
    top, predicted = logp.double().nan_to_num(float("-inf")).max(-1)
    place = (top.exp() * BINS).floor().clamp(0, BINS - 1).long()
    hit = torch.zeros(rows, dtype=torch.float64)
    labels = torch.zeros(classes, dtype=torch.float64)
    if y is not None:
        hit = ((predicted == y) & ~logp.isnan().any(-1)).double()
        labels = torch.bincount(y, minlength=classes).double()
    confidence = torch.bincount(place, minlength=BINS).double()
    right = torch.bincount(place, hit, minlength=BINS)
    z = input_numbers(x)
    counted = torch.cat([confidence, right, torch.bincount(predicted, minlength=classes).double(), labels])
    return torch.cat([counted / rows, z.mean(0), z.square().mean(0)])


def input_numbers(x: Tensor) -> Tensor:
    """Return the numbers of inputs (rows, J) from -1 to 1: columns, or random directions; none of tokens.

    >>> input_numbers(torch.zeros(2, 3)).shape, input_numbers(torch.zeros(2, 8, 9)).shape
    (torch.Size([2, 3]), torch.Size([2, 16]))
    """
    if not x.is_floating_point():
        return torch.zeros(len(x), 0, dtype=torch.float64)
    flat = x.flatten(1).cpu().double() if x.dim() > 1 else x[:, None].cpu().double()
    if flat.shape[1] > COLUMNS:
        flat = flat @ directions(flat.shape[1])
    return torch.tanh(flat / 2).nan_to_num(0.0)


@lru_cache(maxsize=4)
def directions(columns: int) -> Tensor:
    """Return random directions (columns, DIRECTIONS), the same for all clients."""
    drawn = torch.from_numpy(Rng(0).at("watch").numpy().standard_normal((columns, DIRECTIONS)))
    return drawn / columns**0.5


def find_others(homes: Tensor, clients: Tensor, slot: Tensor) -> tuple[Tensor, set[int]]:
    """Return the slots of which most clients are others than at first, and the first slots of clients from now on.

    Args:
        homes: (clients so far,) by client its first slot, -1 if it is not known.
        clients: ids (n,) of clients.
        slot: (n,) their slots now.

    >>> find_others(torch.tensor([0, 0, 1, 1, 1]), torch.arange(5), torch.tensor([0, 1, 1, 0, 0]))
    (tensor([0, 1, 1, 0, 0]), {0})
    """
    missing = int(clients.max()) + 1 - len(homes) if len(clients) else 0
    homes = torch.cat([homes, torch.full((max(missing, 0),), -1)])
    first, others = homes[clients], set()
    for k in slot.unique().tolist():
        before = first[(slot == k) & (first >= 0)]
        # Of too few, as of the one who is awake at night, nothing is said.
        if 2 * int((before == k).sum()) < len(before) and 2 * len(before) >= int((homes == k).sum()):
            others.add(k)
    new = torch.tensor(sorted(others), dtype=torch.int64)
    homes = homes.masked_fill(torch.isin(homes, new), -1)
    first = torch.where(torch.isin(slot, new) | (homes[clients] < 0), slot, first)
    return homes.index_copy(0, clients, first), others


def as_window(total: Sum) -> Tensor:
    """Return a window (size + 1,) of a sum: means over rows, and how many rows."""
    return torch.cat([total.value.double() / total.weight, torch.tensor([total.weight], dtype=torch.float64)])


def join_windows(windows: list[Tensor | None]) -> Tensor | None:
    """Return the window of the rows of several; None without any.

    >>> join_windows([torch.tensor([1.0, 3.0]), None, torch.tensor([0.0, 1.0])]).tolist()
    [0.75, 4.0]
    """
    filled = [window for window in windows if window is not None]
    if not filled:
        return None
    rows = torch.stack([window[-1] for window in filled])
    return torch.cat([rows @ torch.stack([window[:-1] for window in filled]) / rows.sum(), rows.sum()[None]])


def alarms_in(line: Mapping[str, Any], group: int, layout: Layout) -> list[dict[str, Any]]:
    """Return the alarms of a group's window: group (-1 is all clients), kind, score, and words."""
    alarms = []
    for kind in line["alarms"]:
        far = line["far"][kind]
        text = ("" if group < 0 else f"group {group}: ") + in_words(kind, far["place"], far["sign"], layout)
        alarms.append({"group": group, "kind": kind, "score": far["score"], "estimate": line["estimate"], "text": text})
    return alarms


def layout_of(window: Tensor, task: Any) -> Layout:
    """Return the layout of a window (size + 1,) of a task."""
    classes = classes_of(task)
    return Layout(classes, (len(window) - 1) // 2 - BINS - classes)


def odd(window: Tensor, layout: Layout) -> str:
    """Return why no rows can have been counted so; "" if they can.

    >>> odd(torch.tensor([0.5, *[0.0] * 19, *[0.0] * 20, 1.0, 0.0, 0.0, 0.0, 9.0]), Layout(2, 0))
    'shares of confidence do not add up'
    """
    parts = {name: window[:-1][place] for name, place in layout.places.items()}
    for name, part in parts.items():
        low = -1.0 if name == "inputs" else 0.0
        if bool(((part < low - ROOM) | (part > 1 + ROOM)).any()):
            return f"shares of {name} are below {low:g} or above 1"
    for name in ("confidence", "predicted", "labels"):
        whole = float(parts[name].sum())
        if abs(whole - 1) > ROOM and not (name == "labels" and abs(whole) <= ROOM):
            return f"shares of {name} do not add up"
    if bool((parts["right"] > parts["confidence"] + ROOM).any()):
        return "more rows are right than there are"
    if bool((parts["inputs"].square() > parts["squares"] + ROOM).any()):
        return "inputs have a negative variance"
    return ""
