"""Nomination: in which order methods are entered in a tournament, by what an inspection found."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fedtide.config import Experiment, Method
from fedtide.core.base import Moment
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.data.rows import Rows
from fedtide.inspection.findings import Findings, inspect_table
from fedtide.inspection.questions import CYCLES
from fedtide.inspection.study import reasons
from fedtide.inspection.table import Table
from fedtide.runs.build import cohort_size, population_of

ROWS = 20_000
"""Rows of a study's world that are looked at."""
A_CLIENT = 20
"""Rows of a client that are seen in a round."""

ALONE = "local"
"""Whose clients train from scratch whenever their rows change: it may take longer than all other methods together."""
PLAIN = "one model for all: what the others have to beat"


def _loss(method: Method) -> str:
    return str(getattr(method.loss, "kind", ""))


def nominated(found: Findings | None, methods: Sequence[Method]) -> list[tuple[Method, str]]:
    """Return methods in the order in which they are entered, with the reasons.

    Plain FedAvg is the first, each client alone the last. Of several methods with one algorithm and loss the first
    comes before the others: what a shift is about are algorithms. Then those come first for which findings speak, the
    strongest first, else as they are given.

    Args:
        found: what an inspection found; None where nothing could be asked.
        methods: the candidates.
    """
    plain = next((m for m in methods if (m.algorithm, _loss(m)) == ("fedavg", "cross-entropy")), None)
    seen: dict[tuple[str, str], int] = {}
    order = []
    for number, method in enumerate(methods):
        kind = method.algorithm, _loss(method)
        again = seen[kind] = seen.get(kind, -1) + 1
        said = reasons(found, *kind) if found is not None else {}
        why = PLAIN if method is plain else "; ".join(said)
        place = (method is not plain) + (method.algorithm == ALONE)
        order.append(((place, again, -max(said.values(), default=0), number), method, why))
    return [(method, why) for _, method, why in sorted(order, key=lambda each: each[0])]


def found_in_world(experiment: Experiment, seed: int) -> Findings | None:
    """Inspect the rows that clients of a study bring over its rounds; None where they are no single labels.

    A period of the shift counts as a day. A row is looked at once, in one of the rounds in which its client takes part.
    """
    method, rounds = experiment.method[0], experiment.rounds
    people = population_of(experiment, experiment.shift, seed)
    if people.rows.steps is not None or not isinstance(people.rows, Rows):
        return None
    cohort, draw = cohort_size(method, people.registered), Rng(seed).at("inspected").numpy()
    day = CYCLES["day"][0] * rounds / max(rounds - 1, 1) / (experiment.period or rounds)
    seen: set[int] = set()
    picked, owner, times, left = [], [], [], ROWS
    for number in draw.permutation(rounds).tolist():
        moment = Moment(number, rounds, float(number))
        for client in people.arrivals(cohort, moment).tolist():
            held = [row for row in people.held(client, moment, "train").tolist() if row not in seen]
            some = draw.permutation(held)[: min(A_CLIENT, left)].astype(np.int64)
            seen.update(some.tolist())
            left -= len(some)
            picked.append(people.fetch(torch.from_numpy(some), client, moment) if len(some) else None)
            owner += [client] * len(some)
            times += [number * day] * len(some)
    pairs = [pair for pair in picked if pair is not None]
    if not pairs:
        return None
    x, y = (torch.cat([pair[part] for pair in pairs]) for part in (0, 1))
    names = np.array([f"client {client}" for client in owner])
    table = Table("the study", y.numpy(), x.reshape(len(x), -1).float().numpy(), names, np.array(times), simulated=True)
    try:
        return inspect_table(table, seed)
    except FedtideError:  # all labels are the same
        return None
