"""Flower's simulation as its quickstart for torch uses it: `FedAvg`, a `ClientApp` with `train`, one core a client."""

import os

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import contextlib
import sys
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from in_torch import built
from turns import Turns, asked, job

ENDLESS = 1_000_000


class Over(Exception):
    """The driver wants no more rounds."""


class Waiting(FedAvg):
    """FedAvg that waits, before every round, until the driver wants it."""

    turns: Turns

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """The clients to ask."""
        if not self.turns.next(lambda: {name: array.numpy() for name, array in arrays.items()}):
            raise Over
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple:
        """The mean; Flower goes on without clients that failed, and such a round must not be timed."""
        replies = list(replies)
        if len(replies) != self.min_train_nodes:
            raise RuntimeError(f"{len(replies)} clients answered, expected {self.min_train_nodes}")
        for reply in replies:
            if reply.has_error():
                raise RuntimeError(f"a client failed: {reply.error.reason}")
        return super().aggregate_train(server_round, replies)


def clients(path: str, threads: int) -> ClientApp:
    """The client's side; the arguments travel to Ray's processes, which do not have our command line."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        work = job(path, threads)
        torch.set_num_threads(1)
        me = int(context.node_config["partition-id"])
        model = built(work.model, work.weights)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=work.rate)
        rows = torch.utils.data.TensorDataset(torch.from_numpy(work.x[me]), torch.from_numpy(work.y[me]))
        for x, y in torch.utils.data.DataLoader(rows, batch_size=work.batch, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(rows)})}
        return Message(content=RecordDict(content), reply_to=message)

    return app


def main() -> None:
    """Play."""
    work = asked()
    app = ServerApp()
    turns = Turns()

    @app.main()
    def serve(grid: Grid, context: Context) -> None:
        # The first round asks a share of the nodes that are registered by then, or so many as this at the least.
        strategy = Waiting(fraction_evaluate=0.0, min_train_nodes=len(work.x), min_available_nodes=len(work.x))
        strategy.turns = turns
        initial = ArrayRecord({name: torch.from_numpy(value) for name, value in work.weights.items()})
        with contextlib.suppress(Over):
            strategy.start(grid=grid, initial_arrays=initial, num_rounds=ENDLESS)

    run_simulation(
        server_app=app,
        client_app=clients(sys.argv[1], work.threads),
        num_supernodes=len(work.x),
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"address": "local", "num_cpus": work.threads, "logging_level": "ERROR"},
        },
    )


if __name__ == "__main__":
    main()
