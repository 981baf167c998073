"""FedBN: FedAvg whose layers that normalize stay with their clients.

Li, Jiang, Zhang, Kamp, Dou: *FedBN: Federated Learning on Non-IID Features via Local Batch Normalization*, ICLR 2021,
Algorithm 1. With default options it follows Algorithm 1: parameters and running statistics of normalization stay.

When to use it: clients see the same things through other cameras or scanners, and the model has BatchNorm.

Choices:
    - ours: a client that never trained is evaluated with statistics of the beginning, which are of no data.
    - ours: layers that normalize in other ways (GroupNorm, LayerNorm, InstanceNorm) stay, too.
    - paper: equal weights. `weighting = "samples"` weights clients by their samples.
"""

from fedtide.algorithms.entry import Entry, preset
from fedtide.algorithms.fedper import fedper
from fedtide.learn.layers import NORM

fedbn = preset(
    "fedbn", fedper, "FedAvg; layers that normalize stay with their client.", __name__,
    home=(NORM,), weighting="uniform",
)  # fmt: skip

ENTRY = Entry(
    "fedbn", fedbn, "all other layers down, their update up", "personal", keeps="its layers that normalize",
    helps=("groups",),
)  # fmt: skip
