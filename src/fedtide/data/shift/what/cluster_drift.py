"""Clustered drift: steady small changes of label distributions, and mass events with many drifting clients.

It follows the drifts that *Fielding: Clustered Federated Learning with Data Drift* observes, with random draws: label
distributions that change, clients that change group, and mass events that break up the old groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from fedtide.data.shift.what.cluster_drift_plan import ClusterDriftPlan
from fedtide.data.shift.what.drawn import Amounts, check_apart
from fedtide.data.shift.what.plan import Holding, Plan, PopulationView
from fedtide.draw.prose import listed, share_of
from fedtide.fields.types import Count, Flag, Fraction, Positive, Whole, explained, ingredient

LABELS = explained("a whole number of 1 or more, or for each group a list of its labels")


@ingredient
class MassEvents:
    """Times at which many clients drift at once.

    Args:
        at: the times, in rounds or seconds.
        fraction: share of the clients that each event deals to new groups.
    """

    at: Annotated[tuple[Positive, ...], Field(min_length=1)]
    fraction: Fraction = 0.5

    def __post_init__(self) -> None:
        if len(set(self.at)) < len(self.at):
            raise ValueError("found an event twice; allowed: times that differ")


def _times(value: Any) -> Any:
    """Expand `[10, 20]` to `{at = [10, 20]}`, and an empty list to None."""
    return ({"at": value} if value else None) if isinstance(value, list | tuple) else value


@ingredient
class ClusterDrift(Amounts, Holding):
    """Rows drawn for each client by its own label distribution, which drifts.

    There are groups of labels. A client's distribution is drawn from a Dirichlet distribution over the labels of its
    group, each with the parameter concentration / (labels of the group). At each multiple of `every`, a share
    `migrate_fraction` of the clients changes to another group, and a share `resample_fraction` draws a new distribution
    within its group. Each of `events` deals a share of the clients to equally many new groups, whose labels are taken
    in turn from the previous groups, so that they cut across them; the old groups keep the other clients, and clients
    that migrate later may go to any group. If both coincide, the small drift comes first. A client that drifts draws
    new rows. Times are rounds, or seconds, by `shift.clock`. Held-out clients drift too.

    Rows of a label are drawn without replacement while there are enough of them, from all rows of the same part of all
    registered clients (for held-out clients, of all held-out clients): training rows of a client may be training rows
    of another, but never test rows of any client. The partition only decides the part of each row.

    Args:
        groups: number of groups at the start, and number of new groups with every event.
        labels: number of labels of each group, drawn once; or the labels of each group.
        concentration: sum of the parameters of the Dirichlet distribution; smaller values make clients differ more.
        every: time between two small drifts.
        migrate_fraction: share of the clients that change group in a small drift.
        resample_fraction: share of the clients whose distribution changes within the group.
        events: the mass events: their times, or a table with their times and fraction; none disables them.
        samples: number of training rows that a client holds.
        val_samples: number of validation rows, if there are any.
        test_samples: number of test rows, if there are any.
        own_samples_only: draw rows only from the client's own for each label that it has rows of.
        redraw_for: clients that draw new rows at an event: those that "drifted", or "all".
    """

    groups: Annotated[int, Field(strict=True, ge=2, le=1000)] = 4
    labels: Annotated[Count | tuple[tuple[Whole, ...], ...], LABELS] = 6
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
    exact: ClassVar[bool] = True

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

    def check(self, view: PopulationView) -> None:
        """Raise if there are too few labels, or if a training row is a test row of another client."""
        check_apart(view, "cluster-drift")
        ClusterDriftPlan(self, view).first_groups()

    def words(self, domains: Sequence[str], unit: str, until: float) -> str:
        """Describe the groups, the small drift and the mass events before `until`."""
        small = [f"{share_of(self.migrate_fraction)} of the clients change group"] if self.migrate_fraction else []
        small += [f"{share_of(self.resample_fraction)} draw other rows within theirs"] if self.resample_fraction else []
        text = f"Clients belong to {self.groups} groups and hold rows of the labels of their group. "
        text += f"Every {self.every:g} {unit} {listed(small)}. " if small else ""
        events = [f"{event:g}" for event in sorted(self.events.at) if event < until] if self.events else []
        if self.events is None or not events:
            return text
        at = unit if len(events) > 1 else unit.removesuffix("s")
        return text + (
            f"At {at} {listed(events)} {share_of(self.events.fraction)} of them are dealt to {self.groups} new groups, "
            "whose labels cut across the old ones. "
        )

    def plan(self, view: PopulationView) -> Plan:
        """Build the plan of the rows that each client holds over time."""
        return ClusterDriftPlan(self, view)
