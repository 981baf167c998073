"""Pluralistic semi-cyclic SGD: one model learns around the clock, and each block keeps it as it was at the block's end.

Eichner, Koren, McMahan, Srebro, Talwar: *Semi-Cyclic Stochastic Gradient Descent*, ICML 2019, by the released code.

| symbol | meaning |
| --- | --- |
| `w` | the one model, which all blocks train in turn |
| `w_k` | the model that predicts for block k |
| `k(t)` | the block of round t |

    w <- w + mean_i Delta_i,    w_k(t) <- w

When to use it: populations take turns abruptly, block by block, the clock is known, and blocks have much in common.
SCSGD trains a model, or a branch, for each block apart.

Choices:
    - released code: a block is predicted by the one model at the end of its turn (mode "sc", result "pl"). The theory
      is said to take the mean of a block's models, as MM-PSGD with local steps (Ding et al., arXiv 2002.07454). We
      could read neither listing, so there is no such option.
    - ours: clients train locally as in FedAvg. The released code has SGD without local steps.
    - ours: the paper's hedging between this chain and separate ones is not here.
    - ours: a block keeps an older model if nobody answers in its last rounds.
    - ours: a block that had no turn yet is predicted by the first model.
    - ours: at inference the more certain model predicts, as in SCSGD of *Diurnal or Nocturnal?*, because the block of a
      client is unknown. The released code knows it.
"""

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from fedtide.algorithms.entry import Entry
from fedtide.cohorts import Arrivals, Cohort, play_rounds, with_cohort
from fedtide.core.base import Algorithm, Facts, Fleet, Moment, Reply, Weights, mean
from fedtide.core.rng import Rng
from fedtide.learn import SGD, LocalTrainer, Server, Task, Training, Weighting, step_server
from fedtide.learn.task import join_models, with_branches
from fedtide.mixtures.branches import CERTAIN, ChoosePer, predict_by_certainty
from fedtide.mixtures.priors import Block, Rhythm
from fedtide.models.branched import WHOLE, BranchCount, unbranched


@dataclass(frozen=True)
class State:
    """The one model, the models of the blocks side by side, and the memos of the server optimizer and of the cohort."""

    weights: Weights
    blocks: Weights
    server: Any
    cohort: Any = None


def semi_cyclic(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    prior: Rhythm = Block(),
    branches: BranchCount = 2,
    choose_per: ChoosePer = "row",
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm[State]:
    """Federated averaging that keeps a model for each block of the day.

    Args:
        prior: the assumed share of each block, over time; the likeliest block keeps the model; ties: the first.
        branches: number of blocks, K.
    """
    prior.check(branches)

    def init(fleet: Fleet, rng: Rng) -> State:
        weights = task.init(rng)
        return State(weights, join_models([weights] * branches, WHOLE), server.init(weights), cohort.init(fleet))

    def step(state: State, reply: Reply, moment: Moment, rng: Rng) -> tuple[State, Facts]:
        state, facts = step_server(state, server, mean(reply.total))
        models = unbranched(state.blocks)
        models[int(prior.shares(moment, branches).argmax())] = state.weights
        return replace(state, blocks=join_models(models, WHOLE)), facts

    round, serve = play_rounds(cohort, step, attrgetter("blocks"), attrgetter("weights"))
    predict = predict_by_certainty(with_branches(task, WHOLE, branches), choose_per)
    works = {"train": Training(task, local, weighting)}
    algorithm = Algorithm("semi-cyclic", init, works, round, serve, predict)
    refuses = {"anchored": "clients receive the model that they train, and not those that predict"}
    return with_cohort(algorithm, cohort, task, local, models="branches", refuses=refuses)


ENTRY = Entry(
    "semi-cyclic", semi_cyclic, "weights down, update up", "branches", helps=("hours",),
    exempt={"numbers": f"it cannot predict numbers, because {CERTAIN}"},
)  # fmt: skip
