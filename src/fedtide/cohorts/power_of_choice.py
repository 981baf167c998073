"""Power-of-choice: among candidates drawn by size, the clients with the largest losses.

Cho, Wang, Joshi: *Towards Understanding Biased Client Selection in Federated Learning*, AISTATS 2022, section 4
(`pi_pow-d`; `pi_cpow-d` and `pi_rpow-d` are not here).

| symbol | meaning |
| --- | --- |
| `p_k` | client k's share of all samples |
| `d` | number of candidates, from m to all |
| `m` | number of participants |
| `F_k(w)` | mean loss of the current model on client k's samples |

    candidates   d clients, without replacement, in proportion to p_k
    losses       F_k(w) of each candidate, under the current model
    picked       the m candidates with the largest F_k(w); ties are broken at random

When to use it: rounds are few and clients differ. With d = m it is a draw by size; with larger d it converges sooner
and ends farther from the optimum of the mean loss.

Choices:
    - paper: the mean over participants is uniform: `weighting = "uniform"` of the method.
    - ours: `F_k` is plain cross-entropy on all training samples, of the model that the client would be evaluated with.
    - ours: a candidate that does not answer is not picked. Before there is a model, m are drawn by size.
    - ours: clients are asked for their number of samples before round 0. Others count as having the mean.
    - ours: the losses cost a question each round, in bytes and in seconds of passes over a client's samples.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from fedtide.cohorts.protocol import Known, Serve, Sized, ask_sizes, descending, draw_clients, log_sizes
from fedtide.core.base import Fleet
from fedtide.core.rng import Rng
from fedtide.fields.types import Count, ingredient


@ingredient
class PowerOfChoice(Sized):
    """The clients with the largest losses among `d` candidates drawn in proportion to their samples.

    Args:
        d: number of candidates asked for their loss, in each cluster of Fielding; at least the number of clients
            picked. None means twice that number.
    """

    d: Count | None = None
    kind: Literal["power-of-choice"] = "power-of-choice"
    asks: ClassVar[tuple[str, ...]] = ("count", "loss")

    def init(self, fleet: Fleet) -> Known:
        """Ask the clients that are reachable before round 0 for their number of samples."""
        return ask_sizes(fleet)

    def select(self, memo: Known, fleet: Fleet, rng: Rng, serve: Serve, among: Tensor, m: int) -> Tensor:
        """Return the `m` candidates with the largest reported losses, sorted."""
        if not m:
            return among[:0]  # of a cluster without a place no client is asked
        d = m if serve is None else max(2 * m if self.d is None else self.d, m)
        candidates = draw_clients(among, log_sizes(memo, among), d, rng.at("candidates"))
        if serve is None or len(candidates) <= m:
            return candidates
        payload, slot = serve(candidates)
        reply = fleet.ask("loss", candidates, payload, slot=slot, reveal=("loss",))
        if not len(reply.clients):
            return reply.clients
        order = descending(reply.rows["loss"].flatten(), rng.at("ties"))
        return reply.clients[order[:m]].sort().values
