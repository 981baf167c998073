"""pfl-research as its tutorial uses it: `FederatedAveraging`, `SimulatedBackend`, `PyTorchModel`; no evaluation.

With two threads or more the better of its two ways is up to the driver: `torchrun` starts several of these, and pfl
then divides each cohort among them. The first one talks to the driver and tells the others when a round begins.
"""

import os

import torch
import torch.nn.functional as F
from in_torch import built, weights_of
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
from turns import Turns, asked

ENDLESS = 1_000_000
RANK, PROCESSES = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Net(torch.nn.Module):
    """A model with what pfl asks for. Parts of a module, not the module itself, keep their names."""

    def __init__(self, layers: torch.nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def loss(self, x: torch.Tensor, y: torch.Tensor, is_eval: bool = False) -> torch.Tensor:
        """Mean cross-entropy."""
        self.train(not is_eval)
        return F.cross_entropy(self.layers(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Weighted]:
        """Asked for by pfl, and never called."""
        return {"loss": Weighted(self.loss(x, y, is_eval=True).item() * len(y), len(y))}


class Waiting(TrainingProcessCallback):
    """Before every round, wait until the driver wants it."""

    def __init__(self, net: Net) -> None:
        self.net = net
        self.turns = Turns() if RANK == 0 else None

    def wanted(self) -> bool:
        """Whether another round is wanted; the first process asks and tells the others."""
        wanted = self.turns.next(lambda: weights_of(self.net.layers)) if self.turns else True
        if PROCESSES > 1:
            told = torch.tensor([float(wanted)])
            torch.distributed.broadcast(told, 0)
            wanted = bool(told)
        return wanted

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        """Before the first round."""
        if not self.wanted():
            raise SystemExit
        return Metrics()

    def after_central_iteration(self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int):
        """After each round, which is before the next."""
        return not self.wanted(), Metrics()


def main() -> None:
    """Play."""
    work = asked()
    torch.set_num_threads(work.threads)
    net = Net(built(work.model, work.weights))
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    users = [Dataset([torch.from_numpy(x), torch.from_numpy(y)]) for x, y in zip(work.x, work.y, strict=True)]
    data = FederatedDataset(users.__getitem__, get_user_sampler("minimize_reuse", list(range(len(users)))))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=ENDLESS + 1, evaluation_frequency=ENDLESS, train_cohort_size=len(users),
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=data, val_data=None),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=work.rate, local_batch_size=work.batch
        ),
        callbacks=[Waiting(net)],
        send_metrics_to_platform=False,
    )  # fmt: skip


if __name__ == "__main__":
    main()
