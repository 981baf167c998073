"""FedProx: FedAvg with a proximal pull of every client towards the model it received.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: *Federated Optimization in Heterogeneous Networks*, MLSys 2020,
Algorithm 2. Client i minimizes `L_i(v) + (mu/2) * ||v - w||^2`, so every local gradient gains `mu * (v - w)`. With
default options it follows the released code, with mu = 0.1.

When to use it: clients differ, do many local steps, and drift apart. Keep `lr * mu` well below 2, where the pull
itself diverges.

Choices:
    - ours: the shift sends a round's clients, weighted by samples, as in the released code. The paper's is `cohort =
      "by-size"` with `weighting = "uniform"`, here without repetition.
    - released code: only trainable parameters are pulled.
    - ours: `local.proximal` is mu, 0.1 by default. With 0 it is FedAvg bit for bit.
    - ours: stragglers belong to the clients and not to the method. `devices.partial_work = 0.9` lets nine of ten do 1
      to epochs - 1 epochs, as in the released code; their work counts in full. `shift.who.dropout_rate = 0.9` shows
      what FedAvg loses that drops them.
"""

from fedtide.algorithms.entry import Entry, preset
from fedtide.algorithms.fedavg import fedavg
from fedtide.learn.local import LocalTrainer

fedprox = preset(
    "fedprox", fedavg, "FedAvg with a pull of clients back to the model they received.", __name__,
    local=LocalTrainer(proximal=0.1),
)  # fmt: skip

ENTRY = Entry("fedprox", fedprox, "weights down, update up", "global", helps=("labels",))
