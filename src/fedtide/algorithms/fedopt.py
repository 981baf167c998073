"""FedAvgM, FedAdagrad, FedAdam and FedYogi: FedAvg with another server optimizer (`fedtide.learn.server`).

With default options they follow Algorithm 2 of *Adaptive Federated Optimization*, and FedAvgM its own paper.
"""

from fedtide.algorithms.entry import Entry, Trait, preset
from fedtide.algorithms.fedavg import fedavg
from fedtide.learn.server import SGD, Adagrad, Adam, Yogi

HELPS: tuple[Trait, ...] = ("labels", "nothing")

ENTRIES = tuple(
    Entry(
        name, preset(name, fedavg, f"FedAvg with {what} on the server, as its paper prints it.", server=server),
        "weights down, update up", "server-optimizer", helps=HELPS,
    )
    for name, what, server in (
        ("fedavgm", "momentum", SGD(momentum=0.9)),
        ("fedadagrad", "Adagrad", Adagrad()),
        ("fedadam", "Adam", Adam()),
        ("fedyogi", "Yogi", Yogi()),
    )
)  # fmt: skip
