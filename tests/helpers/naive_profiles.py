"""Profiles of a client's rows in plain numpy, for the toy's network: what `clusters.profile` has to agree with."""

import numpy as np
import torch

from fedtide.core.rng import Rng


def points():
    return Rng(1).at("profile").numpy().uniform(0.0, 2.0, (200, 5))


def basis(wide):
    """Principal components by the covariance; a component's first entry of half its largest size is positive."""
    cloud = points()
    values, vectors = np.linalg.eigh(np.cov(cloud.T))
    rows = vectors[:, np.argsort(-values)[:wide]].T
    signs = [np.sign(row[np.argmax(np.abs(row) >= np.abs(row).max() / 2)]) for row in rows]
    return cloud.mean(0), (rows * np.array(signs)[:, None]).T


def naive_profile(frozen, x, y, key, halves):
    """220 numbers for ten classes in the paper; of three classes 3 * 2 * 4."""
    with torch.no_grad():
        features = frozen[:2](x.double()).numpy()
    center, components = basis(3)
    z, y = (features - center) @ components, y.numpy()
    drawn = [key.at("half", k).numpy().permutation(len(y))[: max(len(y) // 2, 1)] for k in range(halves)]
    rows = np.concatenate(drawn) if halves else np.arange(len(y))
    z, y = z[rows], y[rows]
    parts = [z if c is None else z[y == c] for c in (None, 0, 1, 2)]
    means = [part.mean(0) if len(part) > 1 or c == 0 else np.full(3, -1.0) for c, part in enumerate(parts)]
    spreads = [part.std(0) if len(part) > 1 or c == 0 else np.full(3, -1.0) for c, part in enumerate(parts)]
    return np.concatenate([means[0], spreads[0], *means[1:], *spreads[1:]])


def scaled_by_group(profiles, scales=None):
    """Profiles by client, each group of three numbers scaled by the minimum and range of all, or by those given."""
    if scales is None:
        groups = np.stack([*profiles.values()]).reshape(len(profiles), 8, 3)
        low, spread = groups.min((0, 2)), np.ptp(groups, (0, 2))
        scales = low, np.where(spread > 1e-12, spread, 1.0)
    low, spread = (part[:, None] for part in scales)
    return {i: ((p.reshape(8, 3) - low) / spread).ravel() for i, p in profiles.items()}, scales
