"""Linear models and the variance that they explain: of all clients, of each client, of groups, and by a guessed client.

Everything is made of sums over a client's rows (z'z, z't, t't). So a model of any set of clients, its error on any
other, and thousands of them, cost no pass over the rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array
from scipy.special import softmax

from fedtide.core.rng import Rng

RIDGE = 10.0
"""Penalty of pooled models, in rows."""
SHRUNK = (3.0, 30.0, 300.0, 3000.0)
"""Penalties that are tried for the model of a client, which is drawn to the pooled one."""
FIRM = 3.0
"""Rows by which a client's offset, or a mean, is shrunk."""
STARTS, TURNS = 3, 12
"""Starts of the search for groups, and its greatest number of turns."""
MOST_GROUPS = 4


@dataclass(frozen=True)
class Moments:
    """Sums over the rows of each member (client, hour or block).

    a: (members, d, d) of z'z, the last column of z being 1. b: (members, d, outputs) of z't. t: (members,) of t't.
    """

    a: np.ndarray
    b: np.ndarray
    t: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        """Number of rows of each member."""
        return self.a[:, -1, -1]

    def errors(self, weights: np.ndarray) -> np.ndarray:
        """Return the squared error of each model (models, d, outputs) on each member's rows: (members, models)."""
        models, d, outputs = weights.shape
        flat = weights.transpose(1, 0, 2).reshape(d, models * outputs)
        squares = ((self.a @ flat - 2 * np.tile(self.b, models)) * flat).sum(1)
        return self.t[:, None] + squares.reshape(-1, models, outputs).sum(2)

    def single_errors(self, weights: np.ndarray) -> np.ndarray:
        """Return the squared error of each member's model (members, d, outputs) on its own rows: (members,)."""
        return self.t + ((self.a @ weights - 2 * self.b) * weights).sum((1, 2))

    def squares(self, mean: np.ndarray) -> np.ndarray:
        """Return the squared distance of each member's targets from a mean (outputs,), or (members, outputs)."""
        return self.t - 2 * (self.b[:, -1] * mean).sum(1) + self.rows * (mean**2).sum(-1)


def moments(z: np.ndarray, t: np.ndarray, member: np.ndarray, members: int) -> Moments:
    """Sum up rows z (rows, d) and targets t (rows, outputs) by member.

    >>> sums = moments(np.array([[2.0, 1.0], [3.0, 1.0]]), np.array([[1.0], [1.0]]), np.array([0, 0]), 1)
    >>> sums.a.tolist(), sums.b.tolist(), sums.t.tolist()
    ([[[13.0, 5.0], [5.0, 2.0]]], [[[5.0], [2.0]]], [2.0])
    """
    order = np.argsort(member, kind="stable")
    ends = np.cumsum(np.bincount(member, minlength=members))
    z, t = z[order], t[order]
    a, b = np.empty((members, z.shape[1], z.shape[1])), np.empty((members, z.shape[1], t.shape[1]))
    squares = np.empty(members)
    for number, end in enumerate(ends):
        rows = slice(ends[number - 1] if number else 0, end)
        a[number], b[number], squares[number] = z[rows].T @ z[rows], z[rows].T @ t[rows], (t[rows] ** 2).sum()
    return Moments(a, b, squares)


def ridge(a: np.ndarray, b: np.ndarray, penalty: float = RIDGE, towards: np.ndarray | None = None) -> np.ndarray:
    """Return the weights (d, outputs) of a ridge regression, shrunk to zero or `towards` others; a and b may be stacks.

    >>> ridge(np.array([[4.0]]), np.array([[6.0]]), 2.0).tolist()
    [[1.0]]
    >>> ridge(np.array([[4.0]]), np.array([[6.0]]), 2.0, np.array([[3.0]])).tolist()
    [[2.0]]
    """
    right = b if towards is None else b + penalty * towards
    return np.linalg.solve(a + penalty * np.eye(a.shape[-1]), right)


@dataclass(frozen=True)
class Parts:
    """Rows in three parts: to fit models, to choose among them, and to judge them."""

    fit: np.ndarray
    choose: np.ndarray
    judge: np.ndarray


def split_rows(rows: int, rng: Rng) -> Parts:
    """Divide rows at random: half to fit, a fifth to choose, the others to judge.

    >>> parts = split_rows(10, Rng(0))
    >>> len(parts.fit), len(parts.choose), len(parts.judge)
    (5, 2, 3)
    """
    order = rng.numpy().permutation(rows)
    return Parts(*np.split(order, [rows // 2, rows // 2 + rows // 5]))


@dataclass(frozen=True)
class Explained:
    """Share of the variance of held-out targets that models explain (R squared, of one-hot labels together).

    Args:
        one: by a model for all.
        single: by a model of each client, drawn to the model for all with a constant of the client.
        grouped: by a model for each of `count` groups; a client has the one that fits it best.
        guessed_single: by models of clients, if a row's client is guessed from its features alone.
        guessed: by models of groups, if a row's group is guessed from its features alone.
        recognized: share of the rows whose client a linear rule guesses from features.
        count: number of groups.
        group: (members,) group of each client.
        weights: (count, d, outputs) models of the groups.
    """

    one: float
    single: float
    grouped: float
    guessed_single: float
    guessed: float
    recognized: float
    count: int
    group: np.ndarray
    weights: np.ndarray

    @property
    def gain(self) -> float:
        """Gain of models of groups over one model."""
        return self.grouped - self.one

    @property
    def by_client(self) -> float:
        """Gain by knowing the client, with models of groups or of clients."""
        return max(self.grouped, self.single) - self.one

    @property
    def meaning(self) -> float:
        """Gain by knowing the client over guessing it from features: the same features then have other labels."""
        return max(self.grouped, self.single) - max(self.guessed, self.guessed_single)


def explain(
    z: np.ndarray,
    t: np.ndarray,
    label: np.ndarray,
    member: np.ndarray,
    members: int,
    parts: Parts,
    rng: Rng,
    counts: Sequence[int] = (),
) -> Explained:
    """Fit and judge all models.

    Args:
        z: (rows, d) features, the last of which is 1.
        t: (rows, outputs) targets.
        label: (rows,) classes.
        member: (rows,) number of the client.
        members: number of clients.
        parts: of the rows.
        rng: of the starts of groups.
        counts: numbers of groups to choose from; by default up to four.
    """
    fit, choose, judge = (moments(z[p], t[p], member[p], members) for p in (parts.fit, parts.choose, parts.judge))
    mean = fit.b[:, -1].sum(0) / fit.rows.sum()
    whole = float(judge.squares(mean).sum())
    one = ridge(fit.a.sum(0), fit.b.sum(0))
    offset = np.repeat(one[None], members, 0)
    offset[:, -1] += (fit.b - fit.a @ one)[:, -1] / (fit.rows[:, None] + FIRM)
    tried = [ridge(fit.a, fit.b, penalty, offset) for penalty in SHRUNK]
    single = min([offset, *tried], key=lambda weights: choose.single_errors(weights).sum())

    count, group, weights = choose_groups(fit, choose, one, rng, counts)

    def share(error: float) -> float:
        return 1 - error / whole if whole > 0 else 0.0

    x, y = z[parts.judge], t[parts.judge]
    fitted, owner = z[parts.fit, :-1], member[parts.fit]
    client_odds = posteriors(fitted, owner, members, x[:, :-1])
    # The guess is better if each label of a group has its own mean.
    kinds = int(label.max()) + 1
    fine = posteriors(fitted, group[owner] * kinds + label[parts.fit], count * kinds, x[:, :-1])
    group_odds = fine.reshape(len(x), count, kinds).sum(2)
    return Explained(
        one=share(judge.errors(one[None]).sum()),
        single=share(judge.single_errors(single).sum()),
        grouped=share(_grouped_errors(judge, group, weights).sum()),
        guessed_single=share(_mixed_error(x, y, single, client_odds)),
        guessed=share(_mixed_error(x, y, weights, group_odds)),
        recognized=float((client_odds.argmax(1) == member[parts.judge]).mean()),
        count=count,
        group=group,
        weights=weights,
    )


def choose_groups(
    fit: Moments, choose: Moments, one: np.ndarray, rng: Rng, counts: Sequence[int] = ()
) -> tuple[int, np.ndarray, np.ndarray]:
    """Return the number of groups that is best on unseen rows, each member's group, and the models of groups.

    Args:
        fit: sums that models are fitted to.
        choose: sums of the unseen rows.
        one: model for all.
        rng: of the starts of groups.
        counts: numbers of groups to choose from; by default up to four.
    """
    members = len(fit.t)
    searched = {k: find_groups(fit, k, one, rng.at(k)) for k in (counts or range(1, min(MOST_GROUPS, members) + 1))}
    errors = {k: _grouped_errors(choose, *groups).sum() for k, groups in searched.items()}
    # Another group has to reduce the error on unseen rows.
    best = min(error for k, error in errors.items() if k > 1 or members == 1)
    slack = 0.1 * max(errors[1] - best, 0.0)
    count = next(k for k, error in errors.items() if (k > 1 or members == 1) and error <= best + slack)
    return count, *searched[count]


def _grouped_errors(sums: Moments, group: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return each member's error with the model of its group."""
    return sums.errors(weights)[np.arange(len(group)), group]


def find_groups(fit: Moments, k: int, one: np.ndarray, rng: Rng) -> tuple[np.ndarray, np.ndarray]:
    """Find k models and each client's group: a client has the model that fits its rows best, as in k-means.

    Returns:
        (members,) group of each client, and (k, d, outputs) models.
    """
    draw, best, result = rng.numpy(), np.inf, (np.zeros(len(fit.t), dtype=np.int64), one[None])
    if k == 1:
        return result
    for start in range(STARTS):
        group = _by_gradient(fit, one, k) if start == 0 else _by_picks(fit, one, k, draw)
        for _ in range(TURNS):
            belongs = np.eye(k)[group].T
            weights = ridge(np.tensordot(belongs, fit.a, 1), np.tensordot(belongs, fit.b, 1), RIDGE, one)
            errors = fit.errors(weights)
            if (errors.argmin(1) == group).all():
                break
            group = errors.argmin(1)
        if (error := errors.min(1).sum()) < best:
            best, result = error, (errors.argmin(1), weights)
    return result


def _by_gradient(fit: Moments, one: np.ndarray, k: int) -> np.ndarray:
    """Divide clients by the main direction in which their gradients at the common model differ."""
    gradients = ((fit.b - fit.a @ one) / np.maximum(fit.rows, 1)[:, None, None]).reshape(len(fit.t), -1)
    main = np.linalg.svd((gradients - gradients.mean(0)) * np.sqrt(fit.rows)[:, None], full_matrices=False)[2][0]
    places = np.argsort(np.argsort(gradients @ main, kind="stable"), kind="stable")
    return places * k // len(places)


def _by_picks(fit: Moments, one: np.ndarray, k: int, draw: np.random.Generator) -> np.ndarray:
    """Divide clients by the models of k of them that are drawn by their rows."""
    able = np.flatnonzero(fit.rows > 0)
    picks = draw.choice(able, min(k, len(able)), replace=False, p=fit.rows[able] / fit.rows[able].sum())
    return fit.errors(ridge(fit.a[picks], fit.b[picks], 3 * RIDGE, one)).argmin(1)


def posteriors(fitted: np.ndarray, kind: np.ndarray, kinds: int, x: np.ndarray) -> np.ndarray:
    """Return the probability (others, kinds) of each kind for rows x, by a linear discriminant of labeled rows.

    Args:
        fitted: (rows, d) features.
        kind: (rows,) number of the kind.
        kinds: how many.
        x: (others, d) features.

    >>> fitted = np.array([[0.0], [0.1], [5.0], [5.1]])
    >>> posteriors(fitted, np.array([0, 0, 1, 1]), 2, np.array([[0.0], [5.0]])).round().tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    rows = np.bincount(kind, minlength=kinds)
    pooled = fitted.mean(0)
    mean = pooled + means_by(fitted - pooled, kind, kinds) * (rows / (rows + FIRM))[:, None]
    rest = fitted - mean[kind]
    turned, constant = discriminant(mean, rest.T @ rest / max(len(fitted), 1), rows)
    return softmax(x @ turned + constant, axis=1)


def discriminant(mean: np.ndarray, inside: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the linear rule (d, kinds) and (kinds,) that scores features by kinds.

    Args:
        mean: (kinds, d) of each kind.
        inside: (d, d) covariance of features about the means of their kinds.
        rows: (kinds,) number of rows of each kind.
    """
    inside = inside + 0.01 * max(np.trace(inside) / len(inside), 1e-9) * np.eye(len(inside))
    turned = np.linalg.solve(inside, mean.T)
    return turned, np.log(np.maximum(rows, 1e-9)) - 0.5 * (mean * turned.T).sum(1)


def means_by(values: np.ndarray, member: np.ndarray, members: int) -> np.ndarray:
    """Return the mean (members, d) of each member's rows; 0 without any.

    >>> means_by(np.array([[1.0], [3.0], [5.0]]), np.array([0, 0, 1]), 2).tolist()
    [[2.0], [5.0]]
    """
    belongs = csr_array((np.ones(len(member)), (member, np.arange(len(member)))), (members, len(member)))
    return (belongs @ values) / np.maximum(np.bincount(member, minlength=members), 1)[:, None]


def _mixed_error(x: np.ndarray, y: np.ndarray, weights: np.ndarray, likely: np.ndarray) -> float:
    """Return the squared error of models (models, d, outputs) mixed by their probability in each row."""
    predictions = np.zeros_like(y)
    for model, weight in zip(weights, likely.T, strict=True):
        predictions += weight[:, None] * (x @ model)
    return float(((predictions - y) ** 2).sum())


# -- test then train ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ahead:
    """Share of the variance explained in the next block of time, by the rows that a model was fitted to.

    Args:
        past: all blocks before.
        recent: the last three.
        itself: half of the next block itself, in place of as many rows of all blocks before; a bound of the gain.
        blocks: (blocks, 3) of each block.
        whole: the sum of squares that they have to explain.
    """

    past: float
    recent: float
    itself: float
    blocks: np.ndarray
    whole: float

    @property
    def recency(self) -> float:
        """Gain of a model of the last blocks over one of all the past."""
        return self.recent - self.past

    @property
    def cost(self) -> float:
        """Loss of a model of the past by the change."""
        return self.itself - self.past


def judge_ahead(z: np.ndarray, t: np.ndarray, block: np.ndarray, blocks: int, rng: Rng, last: int = 3) -> Ahead:
    """Judge models of the past on half of the next block, from a third of the blocks on.

    Args:
        z: (rows, d) features, the last of which is 1.
        t: (rows, outputs) targets.
        block: (rows,) number of the period.
        blocks: how many.
        rng: of the halves.
        last: number of blocks that are recent.
    """
    half = rng.numpy().random(len(block)) < 0.5
    fitted, judged = (moments(z[h], t[h], block[h], blocks) for h in (half, ~half))
    return ahead_of(fitted, judged, last)


def ahead_of(fitted: Moments, judged: Moments, last: int = 3) -> Ahead:
    """Judge models of the past by sums over the two halves of each block's rows, as of `models_ahead`."""
    now, models = models_ahead(fitted, judged, last)
    past = np.cumsum(fitted.b + judged.b, 0)[now - 1], np.cumsum(fitted.rows + judged.rows)[now - 1]
    then = Moments(judged.a[now], judged.b[now], judged.t[now])
    whole = then.squares(past[0][:, -1] / np.maximum(past[1], 1)[:, None])
    error = np.stack([then.single_errors(model) for model in models], 1)
    in_all = max(float(whole.sum()), 1e-12)
    seen, recent, itself = 1 - error.sum(0) / in_all
    return Ahead(float(seen), float(recent), float(itself), 1 - error / np.maximum(whole, 1e-12)[:, None], in_all)


def models_ahead(fitted: Moments, judged: Moments, last: int = 3) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """Return the blocks that are predicted, and the models of each: of the past, of the last blocks, and with itself.

    Args:
        fitted: sums of the half of each block's rows to which models of the block itself are fitted.
        judged: sums of the other half, which belongs to the past of later blocks.
        last: number of blocks that are recent.
    """
    a, b = fitted.a + judged.a, fitted.b + judged.b
    now = np.arange(max(len(a) // 3, 1), len(a))
    past_a, past_b = (np.cumsum(sums, 0)[now - 1] for sums in (a, b))
    late_a, late_b = (np.stack([sums[max(at - last, 0) : at].sum(0) for at in now]) for sums in (a, b))
    rows = np.maximum(past_a[:, -1, -1], 1)
    rest = 1 - np.minimum(fitted.rows[now] / rows, 0.5)[:, None, None]
    return now, (
        ridge(past_a, past_b),
        ridge(late_a, late_b),
        ridge(rest * past_a + fitted.a[now], rest * past_b + fitted.b[now]),
    )
