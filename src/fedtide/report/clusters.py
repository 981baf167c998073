"""How clients are clustered, as measures of one run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from fedtide.evaluate.clusters import ari, churn, crossed, nmi, purity
from fedtide.evaluate.metrics import mean_of_known
from fedtide.parts.cluster import evenness
from fedtide.report.reading import RunRecord


def clustering(run: RunRecord, view: str, groups: Sequence[str], since: int) -> dict[str, float]:
    """Agreement of clusters with known groups, their evenness and their churn, over the evaluations after `since`.

    Nothing where clients have no cluster. Of one group there is nothing to agree with.
    """
    found = run.clusters(view)
    if not found:
        return {}
    count = 1 + max(cluster for members in found.values() for _, cluster in members.values())
    late = [members for number, members in found.items() if number >= since]
    out = {
        "evenness": mean_of_known(evenness(_sizes(members, count)) for members in late),
        "churn": mean_of_known(
            churn(*({client: cluster for client, (_, cluster) in m.items()} for m in pair))
            for pair in pairwise(found.values())
        ),
    }
    if len(groups) > 1:
        tables = [_table(members, groups) for members in late]
        out |= {name: mean_of_known(map(of, tables)) for name, of in (("ari", ari), ("nmi", nmi), ("purity", purity))}
    return out


def _sizes(members: dict[int, tuple[str, int]], count: int) -> np.ndarray:
    return np.bincount([cluster for _, cluster in members.values()], minlength=count)


def _table(members: dict[int, tuple[str, int]], groups: Sequence[str]) -> np.ndarray:
    return crossed(
        np.array([groups.index(group) for group, _ in members.values()]),
        np.array([cluster for _, cluster in members.values()]),
    )
