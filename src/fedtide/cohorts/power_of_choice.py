"""Power-of-choice: of some candidates, drawn by size, those on whose rows the model is worst.

Cho, Wang, Joshi: *Towards Understanding Biased Client Selection in Federated Learning*, AISTATS 2022, section 4
(`pi_pow-d`).

| symbol | meaning |
| --- | --- |
| `p_k` | client k's share of all rows |
| `d` | how many candidates are drawn, from m to all |
| `m` | how many take part |
| `F_k(w)` | mean loss of the current model on client k's rows |

    candidates   d clients, without replacement, in proportion to p_k
    losses       F_k(w) of each candidate, under the model as it is now
    picked       the m candidates with the largest F_k(w); ties are broken at random

When to use it: rounds are few and clients differ; it converges sooner. With d = m it is a draw by size, and the larger
d is, the sooner it converges and the farther it ends from the optimum of the mean loss.

Choices:
    `F_k` is plain cross-entropy on all training rows, whatever loss trains, of what the client would be judged with:
    the global model, its cluster's, or what it makes of several models for itself. A candidate that does not answer
    (it dropped out, or has no rows) is not picked, so fewer than m may be; where there is no model yet, m are drawn by
    size. How many rows clients have is asked once, before round 0; one that could not be asked counts as having the
    mean of the others. The losses cost a question each round, in bytes and on the clock.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from fedtide.cohorts.draw import Known, by_size, chosen, descending, sizes
from fedtide.cohorts.protocol import Patience, Served, asked
from fedtide.core.config_types import AtLeastOne, Count, ingredient
from fedtide.core.rng import Rng
from fedtide.core.types import Fleet, Moment, Reply


@ingredient
class PowerOfChoice:
    """Of `d` candidates, drawn in proportion to their rows, the clients with the largest losses.

    Args:
        clients_per_round: how many count; the paper's m.
        d: how many candidates are asked for their loss, in each cluster of a method that has several; never fewer than
            are picked. None means twice as many.
        over_selection: ask so many times more to train, and count the first `clients_per_round` that answer; `simulate`
            has `first` for that.
        deadline: count only those who answer within so many seconds of the simulated clock, inf for all;
            `simulate` has its own.
    """

    clients_per_round: Count = 10
    d: Count | None = None
    over_selection: AtLeastOne = 1.0
    deadline: Patience | None = None
    kind: Literal["power-of-choice"] = "power-of-choice"
    asks: ClassVar[tuple[str, ...]] = ("count", "loss")
    reveals: ClassVar[tuple[str, ...]] = ()

    def init(self, fleet: Fleet) -> Known:
        """How many rows those clients have that are reachable before round 0."""
        return sizes(fleet)

    def pick(
        self,
        memo: Known,
        fleet: Fleet,
        rng: Rng,
        served: Served | None,
        among: Tensor | None = None,
        m: int | None = None,
    ) -> Tensor:
        """`m` of the candidates that say their loss, sorted."""
        among, m = fleet.reachable if among is None else among, asked(self) if m is None else m
        d = m if served is None else max(2 * m if self.d is None else self.d, m)
        candidates = chosen(among, by_size(memo, among), d, rng.at("candidates"))
        if served is None or len(candidates) <= m:
            return candidates
        payload, slot = served(candidates)
        reply = fleet.ask("loss", candidates, payload, slot=slot, reveal=("loss",))
        if not len(reply.clients):
            return reply.clients
        order = descending(reply.rows["loss"].flatten(), rng.at("ties"))
        return reply.clients[order[:m]].sort().values

    def learn(self, memo: Known, reply: Reply, moment: Moment) -> Known:
        """Return the memo as it is: losses are asked anew in every round."""
        return memo
