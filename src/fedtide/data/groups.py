"""Groups of rows and clients, the division of a client's rows into parts, and held-out clients."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BeforeValidator, Field

from fedtide.core.errors import refused
from fedtide.data.rows import GeneratedRows, Rows
from fedtide.fields.types import Count, OpenFraction, Whole, ingredient


@ingredient
class OneGroup:
    """A single group with all clients."""

    by: Literal["none"] = "none"

    def of(self, rows: Rows) -> tuple[np.ndarray, tuple[str, ...]]:
        """Return the group of each row and the names of the groups."""
        return np.zeros(len(rows), dtype=np.int64), ("all",)


@ingredient
class ByDomain:
    """A group per domain of the source, such as day and night."""

    by: Literal["domain"] = "domain"

    def of(self, rows: Rows) -> tuple[np.ndarray, tuple[str, ...]]:
        """Return the group of each row and the names of the groups."""
        if rows.domain is None or len(rows.domain_names) < 2:
            raise refused("data.groups.by", "domain", "none, labels", f"{rows.name} has one domain")
        return rows.domain.numpy(), rows.domain_names


@ingredient
class ByLabels:
    """A group per set of labels.

    Args:
        labels: the labels of each group; rows with other labels are left out.
        names: names of the groups; by default group 0, group 1, ...
    """

    labels: Annotated[tuple[tuple[Whole, ...], ...], Field(min_length=1)]
    names: tuple[str, ...] = ()
    by: Literal["labels"] = "labels"

    def of(self, rows: Rows) -> tuple[np.ndarray, tuple[str, ...]]:
        """Return the group of each row and the names of the groups."""
        table = np.full(rows.classes, -1)
        for k, labels in enumerate(self.labels):
            for label in labels:
                if label >= rows.classes or table[label] >= 0:
                    raise refused("data.groups.labels", label, f"each from 0 to {rows.classes - 1} at most once")
                table[label] = k
        names = self.names or tuple(f"group {k}" for k in range(len(self.labels)))
        if len(names) != len(self.labels):
            raise refused("data.groups.names", list(names), f"{len(self.labels)}, one for each group")
        return table[rows.y.numpy()], names


def by_what(value: Any) -> Any:
    """Read `"domain"` as `{by = "domain"}`."""
    return {"by": value} if isinstance(value, str) else value


Groups = Annotated[OneGroup | ByDomain | ByLabels, Field(discriminator="by"), BeforeValidator(by_what)]


@ingredient
class Split:
    """Division of a client's own rows into train, validation and test.

    Args:
        val: share of the training rows kept for validation; at least one row if there are ten.
        test: share of all rows kept for testing; None means 0.2, or 0 if the source has a test set of its own.
        by: "random" or "time". With "time" the latest rows of all clients are for testing and the latest before these
            for validation. So no row for training is later than a row for validation or testing. Shares then differ
            between clients and may be 0. Held-out clients are judged on the latest rows, too.
    """

    val: OpenFraction = 0.1
    test: OpenFraction | None = None
    by: Literal["random", "time"] = "random"

    def in_time(self, rows: Rows | GeneratedRows) -> tuple[float, float]:
        """Return from when on rows are for validation, and for testing.

        >>> import torch
        >>> rows = Rows("log", torch.zeros(10, 1), torch.arange(10) % 2, 2, time=torch.arange(10).double())
        >>> Split(val=0.25, test=0.2, by="time").in_time(rows)
        (6.0, 8.0)
        """
        but = f"rows of {rows.name} have no time"
        if rows.time is None:
            raise refused("data.split.by", "time", "'random', or a source with a column of time", but)
        if rows.held_out is not None and bool(rows.held_out.any()):
            raise refused("data.split.by", "time", "'random'", f"{rows.name} has a test set of its own")
        time, borders = rows.time.sort().values, [math.inf]
        for name, share in (("test", 0.2 if self.test is None else self.test), ("val", self.val)):
            left = int(torch.searchsorted(time, borders[-1]))
            if share:
                borders.append(float(time[min(left - max(round(share * left), 1), left - 1)]))
                if borders[-1] == time[0]:
                    raise refused(f"data.split.{name}", share, "less, or split by 'random'", "no row is earlier")
            else:
                borders.append(borders[-1])
        return borders[2], borders[1]


@ingredient
class HeldOutClients:
    """Clients that never take part in training, dealt from the source's own test set if it has one.

    With a skewed partition and `samples`, the labels of all held-out clients are skewed, too. Accuracy then swings with
    the classes in their rows. Without `samples` all rows are dealt, so that all labels are as even as in the source.

    Args:
        clients: number over all groups; 0 deals the source's test set to the registered clients instead.
        samples: number of rows of each; None divides all rows.
        labeled: share of these rows on which a held-out client may adapt before its evaluation on the others.
            Algorithms use it if clients choose, weigh or personalize models. `data.split.val` of this share is for
            validation.
    """

    clients: Whole = 0
    samples: Count | None = None
    labeled: OpenFraction = 0.0
