"""k-means and silhouettes in plain Python, as slow as they are short: what `parts.clusterer` has to agree with."""

import math
from operator import mul, sub

from fedtide.clusters.distance import Joint

Row = list[float]


def distance(a: Row, b: Row, kind: str | Joint) -> float:
    assert len(a) == len(b)
    if isinstance(kind, Joint):
        parts = zip(kind.columns, kind.kinds, kind.scales, strict=True)
        return sum(distance(a[columns], b[columns], one) / scale for columns, one, scale in parts)
    if kind == "l1":
        return sum(map(abs, map(sub, a, b)))
    if kind == "cosine":
        lengths = math.hypot(*a) * math.hypot(*b)
        return 1 - sum(map(mul, a, b)) / lengths if lengths else 1.0
    if kind == "js":
        mixed = [(p + q) / 2 for p, q in zip(a, b, strict=True)]
        return math.sqrt(max(0.0, shannon(mixed) - (shannon(a) + shannon(b)) / 2))
    square = sum((p - q) ** 2 for p, q in zip(a, b, strict=True))
    return math.sqrt(square) if kind == "l2" else square


def shannon(p: Row) -> float:
    """The entropy in nats."""
    return -sum(share * math.log(share) for share in p if share > 0)


def mean(rows: list[Row], old: Row, kind: str) -> Row:
    """The center of some rows; `old` where there is none."""
    if kind == "cosine":
        rows = [[p / (math.hypot(*row) or 1.0) for p in row] for row in rows]
    middle = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    if kind == "cosine":
        return [p / math.hypot(*middle) for p in middle] if math.hypot(*middle) > 1e-12 else old
    return middle


def assigned(x: list[Row], centers: list[Row], kind: str) -> list[int]:
    """The nearest center of each row; then empty clusters get the farthest row of those in clusters of two or more."""
    label = [min(range(len(centers)), key=lambda k, row=row: distance(row, centers[k], kind)) for row in x]
    for k in range(len(centers)):
        if k not in label:
            may = [i for i in range(len(x)) if label.count(label[i]) > 1]
            label[max(may, key=lambda i: distance(x[i], centers[label[i]], kind))] = k
    return label


def lloyd(x: list[Row], centers: list[Row], kind: str) -> tuple[list[int], float]:
    """Labels and cost."""
    label = assigned(x, centers, kind)
    for step in range(101):
        members = [[row for row, k in zip(x, label, strict=True) if k == each] for each in range(len(centers))]
        centers = [mean(rows, old, kind) if rows else old for rows, old in zip(members, centers, strict=True)]
        if step == 100 or (now := assigned(x, centers, kind)) == label:
            break
        label = now
    return label, sum(distance(row, centers[k], kind) for row, k in zip(x, label, strict=True))


def silhouette(x: list[Row], label: list[int], kind: str) -> list[float]:
    out = []
    for i, row in enumerate(x):
        away: dict[int, list[float]] = {}
        for j, other in enumerate(x):
            if i != j:
                away.setdefault(label[j], []).append(distance(row, other, kind))
        own = away.pop(label[i], None)
        if own is None or not away:
            out.append(0.0)
            continue
        a, b = sum(own) / len(own), min(sum(each) / len(each) for each in away.values())
        out.append((b - a) / max(a, b) if max(a, b) > 0 else 0.0)
    return out
