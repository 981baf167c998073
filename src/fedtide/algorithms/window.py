"""Window: one global model, trained on the samples of the last time steps.

A baseline of Jothimurugesan, Hsieh, Wang, Joshi, Gibbons: *Federated Learning under Distributed Concept Drift*, AISTATS
2023, section 5. With default options it is FedAvg on the samples of the last two steps.

When to use it: data drift for good, and one model serves all. A short window forgets what is no longer true.

Choices:
    - paper: a step has `rounds_per_step` rounds, and a client trains on the samples of the last `window` steps.
    - ours: a client keeps the samples of earlier steps itself, because a stream does not give them back. The samples of
      a step are those that it last trained on in that step. One that it holds again counts once.
    - ours: recorded samples and simulated seconds are those of the samples that a client holds, without the kept ones.
"""

from dataclasses import dataclass, replace

from fedtide.algorithms.entry import Entry
from fedtide.cohorts import Cohort, Everyone, OneModel, build_method
from fedtide.core.base import Algorithm, Answer, Memory, Moment, Shard, Weights
from fedtide.core.rng import Rng
from fedtide.fields.types import Count
from fedtide.learn import SGD, LocalTrainer, Server, Steps, Stepwise, Task, Training, Weighting
from fedtide.learn.kept_rows import keep_rows, merge_shards


@dataclass(frozen=True)
class Kept:
    """Samples that a client keeps, with their step."""

    step: int
    rows: Shard


def window(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    window: Count = 2,
    rounds_per_step: Count = 10,
    server: Server = SGD(),
    cohort: Cohort = Everyone(),
    weighting: Weighting = "samples",
) -> Algorithm[OneModel]:
    """Federated averaging on the samples of the last steps.

    Sends the weights down and the update up; clients keep the samples of recent steps.

    Args:
        window: number of steps whose samples count, including the current one.
        rounds_per_step: rounds of a time step.
    """
    training = Training(task, local, weighting)

    @Stepwise
    def train(payload: Weights, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        step = moment.round // rounds_per_step
        past = [old for old in memory["kept"] if step - window < old.step < step] if memory else []
        rows = merge_shards([shard, *(old.rows for old in reversed(past))])
        answer = yield from training.start(payload, None, rows, moment, rng)
        if answer is None or not len(shard):
            return answer
        return replace(answer, memory={"kept": (*past, Kept(step, keep_rows(shard)))})

    return build_method("window", task, local, server, cohort, train, remembers=True)


ENTRY = Entry("window", window, "weights down, update up", "global", keeps="the rows of recent steps", helps=("drift",))
