"""FedEM: every client's data are a mixture of K distributions; each sample trains K models, weighted by posteriors.

Marfoq, Neglia, Bellet, Kameni, Vidal: *Federated Multi-Task Learning under a Mixture of Distributions*, NeurIPS 2021,
Algorithm 1; with `component_layer = "head"` the models share a trunk, as compared in Zhu et al.: *Diurnal or
Nocturnal?*, ICLR 2022. With default options it follows Algorithm 1, except for the choices below.

| symbol | meaning |
| --- | --- |
| `pi_i` | client i's mixture of the K components (K,), kept on the client |
| `q_k(s)` | posterior of component k for sample s |

    q_k(s)  = softmax_k( log pi_ik - loss_k(s) )
    pi_ik   = mean_s q_k(s)
    minimize (1/B) sum_{s in batch} sum_k q_k(s) * loss_k(s)

When to use it: clients are mixtures rather than members of one group, and participate repeatedly.

Choices:
    - ours: the E-step runs once a round, in evaluation mode, on plain cross-entropy whatever the training loss. Its
      posteriors stay with their samples through every shuffle.
    - released code: the sum over a batch is divided by B, and not by the sum of posteriors.
    - ours: the mean is over participants. `normalize_by = "everyone"` also counts clients that were not asked, as the
      released code does, which damps every step.
    - ours: the K models are one network with a repeated layer, or repeated as a whole, so shared layers are run once.
    - paper: a client's own mixture weights the probabilities of the models at inference. Shares are at least 1e-12
      (ours).
    - ours: before evaluation a client adapts its mixture by `e_steps` on its own training samples; one without samples
      keeps the uniform mixture. The periodic-shift paper runs EM on labeled test data, which nobody has in practice.

The safe form has an anchor, as one more component for all clients (docs/never-worse.md).
"""

from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from fedtide.algorithms.entry import Entry, Safe
from fedtide.cohorts import Arrivals, Cohort, play_rounds
from fedtide.core.base import Algorithm, Answer, Facts, Fleet, Moment, Reply, Shard, Weighted, Weights, mean
from fedtide.core.rng import Rng
from fedtide.core.sums import replace_divisor
from fedtide.fields.types import ModelCount, StepCount
from fedtide.learn import SGD, LocalTrainer, Server, Steps, Stepwise, Task, Weighting, client_weight
from fedtide.mixtures.em import Components
from fedtide.models.branched import WHOLE
from fedtide.transforms import Anchored


@dataclass(frozen=True)
class State:
    """The network, the server optimizer's memo, and the total weight of all clients if `normalize_by` needs it."""

    weights: Weights
    server: Any
    everyone: float = 0.0
    cohort: Any = None


def fedem(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    components: ModelCount = 3,
    component_layer: str = WHOLE,
    e_steps: StepCount = 5,
    normalize_by: Literal["participants", "everyone"] = "participants",
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm[State]:
    """Federated EM.

    Sends the network down and its update up in a sum.

    Args:
        task: model and loss, which must be defined per label; components are weighted by plain cross-entropy.
        components: number of components, K.
        component_layer: the layer to repeat; "*" repeats the whole network, as in the paper.
        e_steps: E-steps of a client before evaluation.
        normalize_by: divisor of the sum of updates: weights of the participants that answered, or of all clients.

    Raises:
        FedtideError: the loss has only a mean.
    """
    em = Components("FedEM", task, local, components, component_layer, e_steps, weighting)

    def init(fleet: Fleet, rng: Rng) -> State:
        weights = em.init(rng)
        everyone = 0.0
        if normalize_by == "everyone" and (reply := fleet.ask("weigh", fleet.clients, {})).total is not None:
            # Whoever did not answer counts as having the mean of the others.
            everyone = reply.total["rows"].weight * len(fleet.clients) / len(reply.clients)
        return State(weights=weights, server=server.init(weights), everyone=everyone, cohort=cohort.init(fleet))

    def weigh(payload: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Answer:
        return Answer({"rows": Weighted(0.0, client_weight(shard, weighting))})

    @Stepwise
    def train(payload: Weights, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        if not len(shard):
            return None
        joints, q = yield from em.posteriors(payload, memory, shard)  # q_k(s), of which pi_ik is the mean
        return (yield from em.train(payload, joints, q, shard, moment, rng))

    def step(state: State, reply: Reply, moment: Moment, rng: Rng) -> tuple[State, Facts]:
        got = mean(reply.total)
        if normalize_by == "everyone":
            total = reply.total["delta"]
            got["delta"] = mean(replace_divisor(total, max(state.everyone, total.weight)))
        return em.step(state, server, got)

    def adapt(payload: Weights, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        return em.adapt(payload, memory, shard)

    works = {"train": train} | ({"weigh": weigh} if normalize_by == "everyone" else {})
    round, serve = play_rounds(cohort, step, attrgetter("weights"))
    return em.build(Algorithm("fedem", init, works, round, serve, em.predict, adapt), cohort)


ENTRY = Entry(
    "fedem", fedem, "K models down, the updates of all up", "mixture", keeps="its mixture",
    helps=("groups", "meaning", "holdings", "nothing"), safe=Safe(transforms=(Anchored(),)),
)  # fmt: skip
