"""The population of a generated source, in which rows belong to clients by arithmetic."""

from __future__ import annotations

from typing import Any

import torch

from fedtide.core.errors import FedtideError
from fedtide.data.generated import GeneratedRows
from fedtide.data.groups import Groups, HeldOutClients, OneGroup, Split
from fedtide.data.partition import Natural
from fedtide.data.population import Population
from fedtide.data.ragged import Spans
from fedtide.data.shift import Shift
from fedtide.data.transforms import Prepare

MOST = 100_000_000
"""Maximum number of registered clients: each takes some dozens of bytes while participants are drawn."""


def generated_population(
    rows: GeneratedRows,
    partition: Any,
    groups: Groups = OneGroup(),
    split: Split = Split(),
    held_out_clients: HeldOutClients = HeldOutClients(),
    shift: Shift = Shift(),
    seed: int = 0,
    *,
    transforms: tuple[Prepare, ...] = (),
    public_samples: int = 0,
) -> Population:
    """Build the population of a generated source without lists of rows.

    The first rows of a client are for testing, the next for validation, the others for training, with the shares of
    `split` as for rows that are dealt.

    Raises:
        FedtideError: a setting needs all rows at once, or deals them.
    """
    if rows.clients > MOST:
        raise FedtideError(f"data.source.clients: found {rows.clients}, allowed: at most {MOST}")
    _check(rows, partition, groups, held_out_clients, shift, public_samples)
    fraction = 0.2 if split.test is None else split.test
    n_test = min(max(round(rows.each * fraction), 1), rows.each - 1) if fraction else 0
    left = rows.each - n_test
    n_val = min(max(round(left * split.val), int(left >= 10)), left - 1) if split.val else 0
    first = {"test": 0, "val": n_test, "train": n_test + n_val}
    count = {"test": n_test, "val": n_val, "train": left - n_val}
    parts = {part: Spans(rows.clients, rows.each, first[part], count[part]) for part in ("train", "val", "test")}
    group = torch.zeros(1, dtype=torch.int64).expand(rows.clients)  # one stored number for all clients
    return Population(rows, parts, group, ("all",), rows.clients, shift, seed, transforms=transforms)


def _check(
    rows: GeneratedRows,
    partition: Any,
    groups: Groups,
    held_out_clients: HeldOutClients,
    shift: Shift,
    public_samples: int,
) -> None:
    """Raise for settings that need all rows at once or deal them to clients."""
    natural = Natural()
    wrong = [
        ("data.partition.kind", partition.kind, natural.kind),
        ("data.partition.clients", getattr(partition, "clients", None), natural.clients),
        ("data.groups.by", groups.by, "none"),
        ("data.held_out_clients.clients", held_out_clients.clients, 0),
        ("data.public_samples", public_samples, 0),
        ("shift.what.kind", shift.what.kind, "static"),
        ("shift.how.kind", shift.how.kind, "identity"),
    ]
    for key, found, allowed in wrong:
        if found != allowed:
            said = "none" if allowed is None else repr(allowed)
            raise FedtideError(
                f"{key}: found {found!r}, but rows of '{rows.name}' are made client by client when they are asked for; "
                f"allowed: {said}"
            )
    if getattr(partition, "min_samples", 1) > rows.each:
        raise FedtideError(f"data.partition.min_samples: found {partition.min_samples}, allowed: at most {rows.each}")
