"""LG-FedAvg: one head for all by FedAvg, and a trunk for each client that never leaves it.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency: *Think Locally, Act Globally: Federated Learning with
Local and Global Representations*, 2020, Algorithm 1. With default options it follows Algorithm 1 without its auxiliary
losses. The local layers are all but the last one.

| symbol | meaning |
| --- | --- |
| `theta_l_m` | local model of client m: the trunk, which stays with it |
| `theta_g` | global model: the head, which the server averages |

When to use it: clients describe the same things in different ways, such as other devices or languages. It sends little.

Choices:
    - ours: all clients begin with the same trunk, drawn from a seed that the server sends. A client that never
      trained is evaluated with it. The paper's new clients are evaluated by an ensemble of all local models.
    - ours: there is no adversarial or auxiliary loss on the local representation.
    - ours: training begins with random weights. The released code first trains all layers by FedAvg: `init_from` names
      the run of such a model.
    - ours: `home` names other layers that stay. The released code keeps two layers global on CIFAR-10, three on MNIST.
    - ours: clients are weighted by their samples; the released code weights them equally (`weighting = "uniform"`).
"""

from fedtide.algorithms.entry import Entry, preset
from fedtide.algorithms.fedper import fedper
from fedtide.learn.layers import TRUNK

lg_fedavg = preset("lg-fedavg", fedper, "FedAvg of the head; the trunk stays with its client.", __name__, home=(TRUNK,))

ENTRY = Entry(
    "lg-fedavg", lg_fedavg, "the head down, its update up", "personal", keeps="its trunk", helps=("groups",),
)  # fmt: skip
