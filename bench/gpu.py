"""Seconds per FedAvg round on a GPU: the fleets beside pfl, in one process.

python bench/gpu.py [--repeats 9] [--device cuda]

pfl has to be importable, with the torch that finds the GPU. All contenders hold the same rows on the GPU. "apart" is
the largest difference of a weight after one round in which each client has all its rows in one batch.
"""

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from clusters import player
from fedtide.core.base import Moment
from fedtide.core.loop import begin
from fedtide.core.memory import MemoryStore
from fedtide.fleets.engines import Host, LocalEngine
from fedtide.fleets.simulated import SimulatedFleet
from fedtide.fleets.stacked_engine import StackedEngine
from fedtide.runs.build import host_of
from machine import machine, told
from works import ENDLESS, RATE, WORKS, Work, experiment

LARGE = {
    "pfllib": Work("PFLlib's CNN, 20 x 600 rows, batch 50",
                   {"kind": "leaf-cnn", "padding": "valid", "dense": 512}, 20, 600, 50),
    "resnet18": Work("ResNet-18 with GroupNorm, 10 x 500 rows, batch 64", {"kind": "resnet18"}, 10, 500, 64),
}  # fmt: skip
WARM_UP = 3


class Net(nn.Module):
    """A model with what pfl asks for."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def loss(self, x: Tensor, y: Tensor, is_eval: bool = False) -> Tensor:
        """Mean cross-entropy."""
        self.train(not is_eval)
        return F.cross_entropy(self.layers(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        """Asked for in the first round, which is not timed."""
        return {"loss": Weighted(self.loss(x, y, is_eval=True).item() * len(y), len(y))}


class Clock(TrainingProcessCallback):
    """What notes the seconds of each round, and ends after some."""

    def __init__(self, rounds: int) -> None:
        self.rounds, self.seconds, self.last = rounds, list[float](), 0.0

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        """Before the first round."""
        self.last = clock()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int):
        """After each round."""
        before, self.last = self.last, clock()
        self.seconds.append(self.last - before)
        return len(self.seconds) >= self.rounds, Metrics()


def clock() -> float:
    """The time when the GPU has done all it was told to."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def host_for(work: Work, batch: int, device: str) -> Host:
    """The host of FedAvg on a work."""
    parsed, memory = experiment(work, batch=batch, settings={"fleet": {"device": device}}), MemoryStore(None)
    return replace(host_of(parsed, parsed.method[0], 0, memory), memory=memory)


def play_pfl(host: Host, work: Work, batch: int, rounds: int, device: str) -> tuple[list[float], dict[str, Tensor]]:
    """Play pfl's FedAvg from the same weights: seconds of each round, and the weights at the end."""
    task = host.algorithm.works["train"].task
    start = begin(host.algorithm, SimulatedFleet(host.population, LocalEngine(host)), seed=0, rounds=ENDLESS).state
    module = copy.deepcopy(task.scratch.load(start.weights, train=True))
    net = Net(module.to(device, memory_format=torch.contiguous_format))
    shards = host.population.shards(torch.arange(work.clients), Moment(0, 1))
    users = [Dataset([task.inputs(shard.x).contiguous(), shard.y.to(device)]) for shard in shards]
    data = FederatedDataset(users.__getitem__, get_user_sampler("minimize_reuse", list(range(work.clients))))
    params = NNAlgorithmParams(central_num_iterations=ENDLESS, evaluation_frequency=ENDLESS,
                               train_cohort_size=work.clients, val_cohort_size=0)  # fmt: skip
    local = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=RATE, local_batch_size=batch or work.rows)
    watch = Clock(rounds)
    FederatedAveraging().run(
        algorithm_params=params, backend=SimulatedBackend(training_data=data, val_data=None),
        model=PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0)),
        model_train_params=local, callbacks=[watch], send_metrics_to_platform=False,
    )  # fmt: skip
    return watch.seconds, {name: value.detach().cpu() for name, value in module.state_dict().items()}


def seconds_of(play: Callable[[], Any], repeats: int) -> float:
    """The median seconds of rounds."""
    times = []
    for _ in range(WARM_UP + repeats):
        before = clock()
        play()
        times.append(clock() - before)
    return median(times[WARM_UP:])


def main() -> None:
    """Check, time, and print a line for each work."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args()
    for work in {**WORKS, **LARGE}.values():
        host = host_for(work, 0, asked.device)
        _, theirs = play_pfl(host, work, 0, 1, asked.device)
        ours = player(host_for(work, 0, asked.device))().state.weights.params
        line: dict[str, Any] = {"apart": max(float((ours[name] - theirs[name]).abs().max()) for name in ours)}
        for name, engine in (("local", LocalEngine), ("stacked", StackedEngine))[
            : 1 if work is LARGE["resnet18"] else 2
        ]:
            line[name] = seconds_of(player(host_for(work, work.batch, asked.device), engine), asked.repeats)
        times, _ = play_pfl(host, work, work.batch, WARM_UP + asked.repeats, asked.device)
        told(work.title, {**line, "pfl": median(times[WARM_UP:]), **machine()}, None)


if __name__ == "__main__":
    main()
