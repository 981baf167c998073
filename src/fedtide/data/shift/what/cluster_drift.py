"""Grouped drift: a small steady drift of label distributions, and events at which many clients drift at once.

After the drifts that *Fielding: Clustered Federated Learning with Data Drift* describes, drawn instead of observed:
clients whose mix of labels moves, some that change group, and mass events after which the old groups mean little.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from fedtide.core.config_types import Count, Flag, Fraction, Positive, Whole, ingredient
from fedtide.core.errors import shown
from fedtide.core.prose import listed, share_of
from fedtide.data.shift.what.cluster_drift_plan import ClusterDriftPlan
from fedtide.data.shift.what.drawn import check_apart
from fedtide.data.shift.what.plan import Plan, PopulationView, Rhythm


def _groups_of_labels(value: Any) -> Any:
    """A number or lists of labels; said here, as pydantic would complain once for each."""
    number = _whole(value) and value >= 1
    lists = isinstance(value, list | tuple) and all(
        isinstance(labels, list | tuple) and all(_whole(label) and label >= 0 for label in labels) for labels in value
    )
    if not number and not lists:
        raise ValueError(
            f"found {shown(value)}, allowed: a whole number of 1 or more, or for each group a list of its labels"
        )
    return value


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@ingredient
class MassEvents:
    """Times at which many clients drift at once.

    Args:
        at: the times, in rounds or seconds.
        fraction: of the clients that each deals to new groups.
    """

    at: Annotated[tuple[Positive, ...], Field(min_length=1)]
    fraction: Fraction = 0.5

    def __post_init__(self) -> None:
        if len(set(self.at)) < len(self.at):
            raise ValueError("found an event twice; allowed: times that differ")


def _times(value: Any) -> Any:
    """`[10, 20]` for `{at = [10, 20]}`, and none for no times."""
    return ({"at": value} if value else None) if isinstance(value, list | tuple) else value


@ingredient
class ClusterDrift:
    """Every client draws its rows by a label distribution of its own, which drifts.

    There are groups of labels. A client's distribution is drawn from a Dirichlet distribution over the labels of its
    group, each with the parameter concentration / (labels of the group). Every `every` a fraction `migrate_fraction` of
    the clients changes to another group, and a fraction `resample_fraction` draws a new distribution within its group.
    At each of `events` a fraction of the clients is dealt to as many new groups, whose labels are taken in turn
    from the groups before, so that they cut across; the old groups keep the other clients, and clients that move later
    may go to any group. Where both fall together the small drift comes first. A client that drifts draws its rows anew.
    Times are rounds, or seconds, as `shift.clock` says. Held-out clients drift too.

    Rows of a label are drawn without replacement while there are enough of them, from all rows of the same part of all
    registered clients (of held-out ones for those): training rows of one may be training rows of another, and are never
    test rows of anyone. The partition says which rows are in which part, and no more.

    Args:
        groups: how many there are at the start, and how many come with every event.
        labels: how many labels each group has, drawn once; or the labels of each group.
        concentration: of the Dirichlet distribution, the sum of its parameters; the smaller, the more clients differ.
        every: time from one small drift to the next.
        migrate_fraction: share of the clients that change group in it.
        resample_fraction: share of the clients whose distribution changes within the group.
        events: the mass events: their times, or a table with their times and the fraction that they deal; none has
            none.
        samples: training rows that a client holds.
        val_samples: validation rows, where there are any.
        test_samples: test rows, where there are any.
        own_samples_only: of a label of which the client has rows of its own, draw from those alone.
        redraw_for: who draws rows anew at an event: who has "drifted", or "all" clients.
    """

    groups: Annotated[int, Field(strict=True, ge=2)] = 4
    labels: Annotated[Count | tuple[tuple[Whole, ...], ...], BeforeValidator(_groups_of_labels)] = 6
    concentration: Positive = 6.0
    every: Positive = 10
    migrate_fraction: Fraction = 0.05
    resample_fraction: Fraction = 0.15
    events: Annotated[MassEvents | None, BeforeValidator(_times)] = None
    samples: Count = 100
    val_samples: Whole = 10
    test_samples: Whole = 40
    own_samples_only: Flag = False
    redraw_for: Literal["drifted", "all"] = "drifted"
    kind: Literal["cluster-drift"] = "cluster-drift"
    drifts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.migrate_fraction + self.resample_fraction > 1:
            raise ValueError(
                f"found migrate_fraction {self.migrate_fraction:g} and resample_fraction {self.resample_fraction:g}; "
                "allowed: at most 1 together"
            )
        if isinstance(self.labels, int):
            return
        flat = [label for labels in self.labels for label in labels]
        if len(self.labels) != self.groups or not all(self.labels) or len(set(flat)) < len(flat):
            raise ValueError(
                f"found labels {self.labels}; allowed: one list for each of {self.groups} groups, disjoint"
            )

    def wanted(self, part: str) -> int:
        """How many rows of a part a client holds."""
        return {"train": self.samples, "val": self.val_samples, "test": self.test_samples}[part]

    def check(self, view: PopulationView) -> None:
        """Raise where there are not enough labels, or a training row is a test row of someone."""
        check_apart(view, "cluster-drift")
        ClusterDriftPlan(self, view).first_groups()

    def rhythm(self, rounds: int) -> Rhythm:
        """There is none."""
        return {}

    def words(self, domains: Sequence[str], unit: str, until: float) -> str:
        """The groups, the small drift and the mass events that are met."""
        small = [f"{share_of(self.migrate_fraction)} of the clients change group"] if self.migrate_fraction else []
        small += [f"{share_of(self.resample_fraction)} draw other rows within theirs"] if self.resample_fraction else []
        said = f"Clients belong to {self.groups} groups and hold rows of the labels of their group. "
        said += f"Every {self.every:g} {unit} {listed(small)}. " if small else ""
        events = [f"{event:g}" for event in sorted(self.events.at) if event < until] if self.events else []
        if self.events is None or not events:
            return said
        at = unit if len(events) > 1 else unit.removesuffix("s")
        return said + (
            f"At {at} {listed(events)} {share_of(self.events.fraction)} of them are dealt to {self.groups} new groups, "
            "whose labels cut across the old ones. "
        )

    def plan(self, view: PopulationView) -> Plan:
        """Who holds what when."""
        return ClusterDriftPlan(self, view)
