"""Worlds in which groups take turns, as series of sketches, without any training."""

import numpy as np


def world(shares, seed: int, m=10, d: int = 16, apart: float = 5.0):
    """Sketches (n, d) of cohorts of m, of whom (n, K) shares are expected, and the shares that came (n, K).

    Args:
        m: participants, of all rounds or of each (n,).
        apart: distance of two groups, in deviations of a client: 5 to 7 between the sketches of digits and letters, or
            of digits under two meanings, and 3 where clients have labels of their own.
    """
    draw = np.random.default_rng(seed)
    shares = np.stack([shares, 1 - shares], 1) if np.ndim(shares) == 1 else shares
    m = np.broadcast_to(m, len(shares))[:, None]
    came = np.stack([draw.multinomial(many, q / q.sum()) for (many,), q in zip(m, shares, strict=True)]) / m
    centers = draw.normal(size=(shares.shape[1], d))
    centers *= apart / np.linalg.norm(centers[0] - centers[1])
    return came @ centers + draw.normal(size=(len(shares), d)) / np.sqrt(m), came


def linear(n: int, period: float, exponent: float = 1.0, peak: float = 0.0) -> np.ndarray:
    """The paper's linear wave, as shares of the first group."""
    return np.abs(2 * ((np.arange(n) - peak) % period) / period - 1) ** exponent
