"""FedJAX as its tutorial uses it: `federated_averaging` over client data sets, the model in Haiku.

`FEDJAX_BACKEND` chooses how it goes through the clients of a round: "jit" is one after the other, each operation on as
many threads as XLA likes; "pmap" is several at once, one on each of as many devices as there are threads.
"""

import os
import sys

BACKEND = os.environ.get("FEDJAX_BACKEND", "jit")
if BACKEND == "pmap":  # read when JAX is imported
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={sys.argv[2]}"

import fedjax  # noqa: E402
import haiku as hk  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from turns import Turns, Weights, asked  # noqa: E402


def linear() -> list:
    """The models' layers; pictures are (rows, 28, 28, 1), the layout that XLA likes best on a CPU."""
    return [hk.Flatten(), hk.Linear(10, name="head")]


def mlp() -> list:
    """784-200-10."""
    return [hk.Flatten(), hk.Linear(200, name="dense1"), jax.nn.relu, hk.Linear(10, name="head")]


def lenet5() -> list:
    """LeNet-5."""
    return [
        hk.Conv2D(6, 5, padding="SAME", name="conv1"), jax.nn.relu, hk.MaxPool(2, 2, "VALID"),
        hk.Conv2D(16, 5, padding="VALID", name="conv2"), jax.nn.relu, hk.MaxPool(2, 2, "VALID"), hk.Flatten(),
        hk.Linear(120, name="dense1"), jax.nn.relu, hk.Linear(84, name="dense2"), jax.nn.relu,
        hk.Linear(10, name="head"),
    ]  # fmt: skip


def cnn() -> list:
    """The CNN of 1.2 M parameters."""
    return [
        hk.Conv2D(32, 3, padding="VALID", name="conv1"), jax.nn.relu,
        hk.Conv2D(64, 3, padding="VALID", name="conv2"), jax.nn.relu, hk.MaxPool(2, 2, "VALID"), hk.Flatten(),
        hk.Linear(128, name="dense"), jax.nn.relu, hk.Linear(10, name="head"),
    ]  # fmt: skip


def small_cnn() -> list:
    """The network of the demonstration."""
    return [
        hk.Conv2D(8, 3, 2, padding="VALID", name="conv1"), jax.nn.relu,
        hk.Conv2D(16, 3, padding="VALID", name="conv2"), jax.nn.relu, hk.MaxPool(2, 2, "VALID"), hk.Flatten(),
        hk.Linear(64, name="dense"), jax.nn.relu, hk.Linear(10, name="head"),
    ]  # fmt: skip


LAYERS = {"linear": linear, "mlp": mlp, "lenet5": lenet5, "cnn": cnn, "small-cnn": small_cnn}
FLAT = {"lenet5": ("dense1", 16, 5, 5), "cnn": ("dense", 64, 12, 12), "small-cnn": ("dense", 16, 5, 5)}
"""The dense layer that follows the flattening, and the shape that is flattened: torch does it channels first."""


def to_haiku(kind: str, weights: Weights) -> dict:
    """Our weights in Haiku's layouts: dense (in, out), convolutions (height, width, in, out)."""
    params: dict[str, dict] = {}
    for name, value in weights.items():
        layer, _, what = name.rpartition(".")
        if what == "weight" and value.ndim == 4:
            value = value.transpose(2, 3, 1, 0)
        elif what == "weight":
            if kind in FLAT and layer == FLAT[kind][0]:
                value = value.reshape(-1, *FLAT[kind][1:]).transpose(0, 2, 3, 1).reshape(len(value), -1)
            value = value.T
        params.setdefault(layer, {})["w" if what == "weight" else "b"] = jnp.asarray(value)
    return params


def from_haiku(kind: str, params: dict) -> Weights:
    """And back."""
    weights = {}
    for layer, parts in params.items():
        value = np.asarray(parts["w"])
        if value.ndim == 4:
            value = value.transpose(3, 2, 0, 1)
        else:
            value = value.T
            if kind in FLAT and layer == FLAT[kind][0]:
                channels, high, wide = FLAT[kind][1:]
                value = value.reshape(-1, high, wide, channels).transpose(0, 3, 1, 2).reshape(len(value), -1)
        weights |= {f"{layer}.weight": np.ascontiguousarray(value), f"{layer}.bias": np.asarray(parts["b"])}
    return weights


def main() -> None:
    """Play."""
    work = asked()
    if BACKEND == "pmap":
        fedjax.set_for_each_client_backend("pmap")
    network = hk.transform(lambda batch: hk.Sequential(LAYERS[work.model]())(batch["x"]))
    example = {"x": np.zeros((1, 28, 28, 1), np.float32), "y": np.zeros(1, np.int64)}

    def loss(batch: dict, logits: jnp.ndarray) -> jnp.ndarray:
        return fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], logits)

    model = fedjax.create_model_from_haiku(transformed_forward_pass=network, sample_batch=example, train_loss=loss)
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        fedjax.model_grad(model),
        client_optimizer=fedjax.optimizers.sgd(learning_rate=work.rate),
        server_optimizer=fedjax.optimizers.sgd(learning_rate=1.0),
        client_batch_hparams=fedjax.ShuffleRepeatBatchHParams(batch_size=work.batch, num_epochs=1),
    )
    clients = [
        (b"%d" % number, fedjax.ClientDataset({"x": x.transpose(0, 2, 3, 1).copy(), "y": y}))
        for number, (x, y) in enumerate(zip(work.x, work.y, strict=True))
    ]
    # Haiku names layers by where they are: "sequential/head" or "head", as the version has it.
    names = {name.rpartition("/")[2]: name for name in model.init(jax.random.PRNGKey(0))}
    state = algorithm.init({names[k]: v for k, v in to_haiku(work.model, work.weights).items()})
    turns, number = Turns(), 0
    while turns.next(
        lambda state=state: from_haiku(work.model, {k.rpartition("/")[2]: v for k, v in state.params.items()})
    ):
        keys = jax.random.split(jax.random.PRNGKey(number), len(clients))
        state, _ = algorithm.apply(state, [(*client, key) for client, key in zip(clients, keys, strict=True)])
        jax.block_until_ready(state.params)
        number += 1


if __name__ == "__main__":
    main()
