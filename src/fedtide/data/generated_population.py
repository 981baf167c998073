"""The population of a generated source, in which rows belong to clients by arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fedtide.core.base import PARTS
from fedtide.core.errors import refused
from fedtide.data.generated import GeneratedRows
from fedtide.data.groups import Groups, HeldOutClients, Split
from fedtide.data.population import Population
from fedtide.data.ragged import Spans, part_sizes
from fedtide.data.shift import Shift
from fedtide.data.transforms import Prepare

MOST = 100_000_000
"""Maximum number of registered clients: each takes some dozens of bytes while participants are drawn."""


def generated_population(
    rows: GeneratedRows, split: Split, shift: Shift, seed: int, transforms: tuple[Prepare, ...] = ()
) -> Population:
    """Build the population of a generated source without lists of rows.

    The first rows of a client are for testing, the next for validation, the others for training, with the shares of
    `split` as for rows that are dealt.
    """
    n_test, n_val = map(int, part_sizes(np.array(rows.each), split.val, 0.2 if split.test is None else split.test))
    first = {"test": 0, "val": n_test, "train": n_test + n_val}
    count = {"test": n_test, "val": n_val, "train": rows.each - n_test - n_val}
    parts = {part: Spans(rows.clients, rows.each, first[part], count[part]) for part in PARTS}
    group = torch.zeros(1, dtype=torch.int64).expand(rows.clients)  # one stored number for all clients
    return Population(rows, parts, group, ("all",), rows.clients, shift, seed, transforms=transforms)


def check_generated(
    rows: GeneratedRows, partition: Any, groups: Groups, held_out: HeldOutClients, shift: Shift, public_samples: int
) -> None:
    """Raise for settings that need all rows at once or deal them to clients."""
    wrong = [
        ("data.partition.kind", partition.kind, "natural"),
        ("data.partition.clients", getattr(partition, "clients", None), None),
        ("data.groups.by", groups.by, "none"),
        ("data.held_out_clients.clients", held_out.clients, 0),
        ("data.public_samples", public_samples, 0),
        ("shift.what.kind", shift.what.kind, "static"),
        ("shift.how.kind", shift.how.kind, "identity"),
    ]
    but = f"rows of '{rows.name}' are made client by client when they are asked for"
    for key, found, allowed in wrong:
        if found != allowed:
            raise refused(key, found, "none" if allowed is None else repr(allowed), but)
    if rows.clients > MOST:
        raise refused("data.source.clients", rows.clients, f"at most {MOST}")
    if partition.min_samples > rows.each:
        raise refused("data.partition.min_samples", partition.min_samples, f"at most {rows.each}")
