"""Curves over a period: the shares of groups that take turns, for the shift that makes them and the priors that guess.

Zhu, Xu, Chen, Konečný, Hard, Goldstein: *Diurnal or Nocturnal? Federated Learning of Multi-Branch Networks from
Periodically Shifting Distributions*, ICLR 2022, Eq. 3; more than two groups are our own extension.
"""

from __future__ import annotations

import math

import numpy as np


def periodic_shares(curve: str, time: float, period: float, exponent: float, groups: int) -> np.ndarray:
    """q_k(t) for K groups, on the simplex; for K = 2 the formulas of the paper (Eq. 3).

    K > 2: hat_k = max(0, 1 - K d_k / T) with d_k the circular distance to the peak of group k; linear q_k = hat_k,
    cosine q_k = (1 - cos(pi hat_k))/2; an exponent p acts on the first group and rescales the others.

    >>> periodic_shares("linear", 4, 12, 1.0, 3).tolist()
    [0.0, 1.0, 0.0]
    """
    s = math.fmod(time, period)
    s += period if s < 0 else 0.0
    if curve == "block":
        turn: np.ndarray = np.eye(groups)[min(int(s * groups / period), groups - 1)]
        return turn
    peaks = np.arange(groups) * period / groups
    distance = np.abs(s - peaks)
    hat = np.maximum(0.0, 1 - groups * np.minimum(distance, period - distance) / period)
    q = hat if curve == "linear" else (1 - np.cos(np.pi * hat)) / 2
    first = q[0] ** exponent
    rest = q[1:] * ((1 - first) / (1 - q[0])) if q[0] < 1 else q[1:]
    return np.concatenate([[first], rest])
