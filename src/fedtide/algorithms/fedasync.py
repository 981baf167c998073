"""FedAsync: asynchronous training; the server mixes each client's model into its own as soon as it arrives.

Xie, Koyejo, Gupta: *Asynchronous Federated Optimization*, OPT 2020 (arXiv 2019), Algorithm 1. With default options it
follows Algorithm 1 with polynomial staleness, answer by answer.

| symbol | meaning |
| --- | --- |
| `w_t` | the global weights after t server steps |
| `w_new` | a client's weights after local training from `w_tau` |
| `t - 1 - tau` | staleness: server steps between sending a model and its answer |
| `alpha`, `s` | mixing weight, and its factor by staleness |
| `rho` | strength of the pull of local training to `w_tau` |

    alpha_t = alpha * s(t - 1 - tau)
    w_t     = (1 - alpha_t) * w_{t-1} + alpha_t * w_new

When to use it: devices of very different speeds, where a round would wait for the slowest. Without a clock of devices
(`devices.kind`) all are equally fast, and answers are stale for nothing. A client counts as often as it answers, so
fast ones count more; FedBuff is calmer.

Choices:
    - ours: a round is an answer. Places of the cohort are filled after it, and clients that do not answer are given up,
      as in FedBuff.
    - paper: staleness is "constant" (1), "polynomial" (a = 0.5) or "hinge" (a = 10, b = 4); the polynomial is the
      default (ours).
    - paper: alpha is 0.6, and `rho` 0.005, which is `local.proximal`. A `LocalTrainer` of Python has the
      one that it names.
    - ours: alpha is constant; in experiments of the paper it is halved once.
    - ours: running statistics are mixed as parameters are.
    - ours: staleness is `t - 1 - tau`, which is 0 if no step lies between sending and answering. The paper's listing
      has `t - tau`, which also counts the step of the answer itself.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from fedtide.algorithms.entry import Entry
from fedtide.cohorts import Arrivals, Cohort, InFlight, build_asynchronous
from fedtide.core.base import Algorithm, Sum, Weights
from fedtide.core.trees import Tree
from fedtide.core.weights import add, mul, sub
from fedtide.fields.types import Count, Fraction, NonNegative, Spelled, ingredient
from fedtide.learn import SGD, LocalTrainer, Task


@ingredient
class Constant:
    """Staleness without effect."""

    kind: Literal["constant"] = "constant"

    def __call__(self, late: int) -> float:
        """Return the factor of an answer that is so many steps late."""
        return 1.0


@ingredient
class Polynomial:
    """Staleness with the factor `(1 + late) ** -a`.

    Args:
        a: the power.
    """

    a: NonNegative = 0.5
    kind: Literal["polynomial"] = "polynomial"

    def __call__(self, late: int) -> float:
        """Return the factor of an answer that is so many steps late."""
        return float((1 + late) ** -self.a)


@ingredient
class Hinge:
    """Staleness with the factor `1 / (a * (late - b) + 1)` of answers that are more than b steps late; else 1.

    Args:
        a: slope.
        b: steps without effect.

    >>> Hinge(a=1.0, b=4)(4), Hinge(a=1.0, b=4)(7)
    (1.0, 0.25)
    """

    a: NonNegative = 10.0
    b: NonNegative = 4.0
    kind: Literal["hinge"] = "hinge"

    def __call__(self, late: int) -> float:
        """Return the factor of an answer that is so many steps late."""
        return 1 / (self.a * max(late - self.b, 0.0) + 1)


Staleness = Annotated[Constant | Polynomial | Hinge, Field(discriminator="kind")]


def fedasync(
    task: Task,
    local: LocalTrainer = LocalTrainer(proximal=0.005),
    alpha: Fraction = 0.6,
    staleness: Annotated[Staleness, Spelled] = Polynomial(),
    max_staleness: Count = 50,
    cohort: Cohort = Arrivals(),
) -> Algorithm[InFlight]:
    """Asynchronous federated optimization.

    Sends the weights down to clients that begin, and the update up. The server sees each update by itself.

    Args:
        local: local training; `proximal` is the paper's rho.
        alpha: weight of a client's model in the mixture.
        staleness: factor on alpha by how many steps late the model is.
        max_staleness: rounds in which a client may answer; after that it is given up.
        cohort: selection of clients that begin; its size is the number of those in flight, so `over_selection` is not
            allowed.
    """

    def mix(total: Any, model: Weights, weights: Weights, late: int) -> Tree:
        delta: Sum = total["delta"]
        # w_new - w = (w_tau - w) + Delta, times alpha_t
        way = add(delta.value, mul(sub(model, weights), delta.weight))
        return {**total, "delta": Sum(mul(way, alpha * staleness(late)), delta.weight)}

    return build_asynchronous("fedasync", task, local, SGD(), cohort, "uniform", 1, max_staleness, mix)


ENTRY = Entry(
    "fedasync", fedasync, "weights down, update up; the server steps at each answer", "global",
    tells="each update by itself",
)  # fmt: skip
