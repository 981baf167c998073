"""The `[fleet]` table: what runs clients' work, as kinds of one choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field

from fedtide.fields.shapes import bare, fields_of, tags
from fedtide.fields.types import Count, Flag, Fraction, by_kind, ingredient, on_default

SHARED = (
    "processes among which several runs are divided, or with `workers` and `ray` the clients of one; None means the "
    "machine's cores, or the CPUs of the Ray cluster."
)
LAYOUT = "keep convolutions in the memory format channels_last, which is faster on many processors."
Device = Literal["cpu", "cuda", "auto"]
WHERE = (
    'where models compute: "cuda", "auto" for a GPU where there is one; weights and sums are on the CPU all the same. '
    "Another device gives other last bits."
)
Threads = Annotated[
    int,
    Field(strict=True, ge=1, le=1024, description="of torch for a client's work; more than one changes the last bits."),
]


@ingredient
class Processes:
    """Processes of any kind of fleet; several runs are played side by side anyway."""

    workers: Annotated[Count | None, Field(description=SHARED)] = None
    channels_last: Annotated[Flag, Field(description=LAYOUT)] = True
    device: Annotated[Device, Field(description=WHERE)] = "cpu"


@ingredient
class Local(Processes):
    """One process for the clients of a run."""

    threads: Threads = 1
    kind: Literal["local"] = "local"


@ingredient
class Workers(Processes):
    """Worker processes for the clients of a run, which give the bits of one process."""

    threads: Threads = 1
    kind: Literal["workers"] = "workers"


@ingredient
class Ray(Processes):
    """Actors of a Ray cluster, which give the bits of one process.

    Args:
        address: of the cluster's head node, HOST:PORT, or "auto" for one on this machine; None starts one here that
            ends with the command.
        gpus: share of a GPU that each actor has to itself, with `device`, or for algorithms of your own that
            compute on it.
    """

    threads: Threads = 1
    address: Annotated[str, Field(min_length=1)] | None = None
    gpus: Fraction = 0.0
    kind: Literal["ray"] = "ray"


@ingredient
class Stacked(Processes):
    """Several clients at once: trained together, and judging models together; gives other last bits."""

    threads: Threads = 1
    kind: Literal["stacked"] = "stacked"


@ingredient
class Auto(Processes):
    """The fastest of "local", "workers" and "local" with threads, measured before round 0 and written down."""

    kind: Literal["auto"] = "auto"
    threads: ClassVar[int] = 1


def _with_kind(value: Any) -> Any:
    """Read a table without `kind` as one of "local"."""
    return on_default(Local(), by_kind(value))


Kind = Annotated[Local | Workers | Ray | Stacked | Auto, Field(discriminator="kind")]
FleetSettings = Annotated[Kind, BeforeValidator(_with_kind)]


def replace_kind(table: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """Return a file's table with another kind, without the keys that are of other kinds alone.

    >>> replace_kind({"kind": "ray", "address": "auto", "threads": 2}, "local")
    {'kind': 'local', 'threads': 2}
    """
    kinds = {tag: set(fields_of(member)) for member in get_args(bare(Kind)) for tag in tags(member)}
    foreign = set().union(*kinds.values()) - kinds[kind] if kind in kinds else set()
    return {key: value for key, value in table.items() if key not in foreign} | {"kind": kind}
