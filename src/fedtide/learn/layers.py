"""Some of a model's layers: which are meant, and training while the others stay as they are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self

from torch import Tensor, nn

from fedtide.core.base import Moment, Shard, Weights
from fedtide.core.errors import refused, unknown
from fedtide.core.rng import Rng
from fedtide.core.trees import detached
from fedtide.core.weights import layers_of
from fedtide.fields.types import Distinct, Unbracketed
from fedtide.learn.local import LocalTrainer
from fedtide.learn.steps import Steps, Train
from fedtide.learn.task import Task
from fedtide.models.base import has_base
from fedtide.models.branched import BATCH_NORMS, in_layer, refused_last_layer

HEAD, TRUNK, NORM, ALL = "head", "trunk", "norm", "all"
"""The last layer or the module "head", all other layers, layers that normalize, and all layers."""

NORMS = (
    *BATCH_NORMS, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip

IsIn = Callable[[str], bool]
"""Tells whether a parameter or a running statistic, by name, is in some layers."""

Layers = Annotated[tuple[str, ...], Distinct, Unbracketed]
"""Layers of a model: "head", "trunk", "norm", "all", or names."""


def match_layers(task: Task, layers: Sequence[str], key: str, *, whole: bool = True) -> IsIn:
    """Return the predicate of what is in some layers of a task's model.

    Args:
        layers: "head" for the last layer (`last_layer`), "trunk" for all others, "norm" for those that normalize,
            "all", or names.
        key: where they are written, for errors.
        whole: whether the key allows "all", for errors.

    Raises:
        FedtideError: the model has no such layer.

    >>> from copy import deepcopy
    >>> model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    >>> is_in = match_layers(Task(lambda: deepcopy(model)), ("norm",), "home")
    >>> is_in("1.weight"), is_in("1.running_mean"), is_in("2.weight")
    (True, True, False)
    """
    names = task.scratch.names
    every = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    # A model whose head is frozen, as of a pretrained one for next tokens, has no such layer among those trained.
    is_last: IsIn = in_last_layer(task) if {HEAD, TRUNK} & {*layers} else lambda name: False
    norms = [name for name, module in task.scratch.module.named_modules() if isinstance(module, NORMS)]
    words: dict[str, IsIn] = {
        HEAD: is_last,
        TRUNK: lambda name: not is_last(name),
        NORM: lambda name: any(in_layer(name, norm) for norm in norms),
        ALL: lambda name: True,
    }
    for layer in layers:
        if layer == NORM and not norms:
            raise refused(key, NORM, "other layers, because the model has none that normalizes")
        if layer not in words and not any(in_layer(name, layer) for name in names):
            useless = {*([] if norms else [NORM]), *([] if whole else [ALL])}
            raise unknown(key, layer, [name for name in dict.fromkeys([*words, *every]) if name not in useless])
    return lambda name: any(words[layer](name) if layer in words else in_layer(name, layer) for layer in layers)


def last_layer(task: Task) -> str:
    """Return the name of the last layer of a task's model, whose inputs are its features; "" if it is the only one.

    This is the whole module "head" if there is one, and else the last layer with parameters. Their order is that in
    which the model registers them. All methods that name a layer "head" mean this one.

    Raises:
        FedtideError: the task has an example, and this layer does not make the outputs for it.

    >>> last_layer(Task(lambda: nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2))))
    '2'
    >>> from collections import OrderedDict
    >>> head = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    >>> last_layer(Task(lambda: nn.Sequential(OrderedDict(body=nn.Linear(3, 2), head=head))))
    'head'
    """
    names = task.scratch.names
    last = HEAD if any(in_layer(name, HEAD) for name in names) else names[-1].rpartition(".")[0]
    if last and task.example is not None and not _makes_outputs(task, last, task.example):
        raise refused_last_layer(last)
    return last


def _makes_outputs(task: Task, layer: str, example: Tensor) -> bool:
    """Tell whether the outputs for an example are as wide as those of a layer."""
    results: list[Any] = []
    hook = task.scratch.module.get_submodule(layer).register_forward_hook(lambda _, __, y: results.append(y))
    try:
        outputs = next(iter(task.outputs(task.scratch.weights, example)))
    finally:
        hook.remove()
    first = outputs[0] if isinstance(outputs, tuple) else outputs
    return bool(results) and isinstance(results[-1], Tensor) and results[-1].shape[-1] == first.shape[-1]


def in_last_layer(task: Task) -> IsIn:
    """Return the predicate of what is in the last layer of a task's model."""
    last = last_layer(task)
    return lambda name: in_layer(name, last) if last else "." not in name


def in_last_trained(task: Task) -> IsIn:
    """Return the predicate of what is in the last layer of a task's model, or in the last adapter beside a base.

    A module "head" comes first. Models of next tokens have none, and a layer of the base makes their outputs.
    """
    names = task.scratch.names
    if has_base(task.scratch.module) and not any(in_layer(name, HEAD) for name in names):
        return lambda name: in_layer(name, names[-1].rpartition(".")[0])
    return in_last_layer(task)


def resolve_layer(task: Task, layer: str) -> str:
    """Return the name of a layer in a task's model: "head" is the last layer, others are their own names.

    A model of one layer has no such layer, and "head" stays what it is.

    >>> resolve_layer(Task(lambda: nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2))), "head")
    '2'
    """
    return (last_layer(task) or layer) if layer == HEAD else layer


def check_trunk(task: Task, method: str) -> None:
    """Raise if the last layer of a task's model is the only one, so that there is no trunk to train.

    Args:
        method: name of the method, for the error.
    """
    if all(map(in_last_layer(task), task.scratch.names)):
        raise refused("model", "one layer", "two layers or more", f"'{method}' needs one below the last")


def pick_layers(weights: Weights, is_in: IsIn) -> Weights:
    """Return the part of weights, or of an update, that is in some layers."""
    params, buffers = (
        {name: leaf for name, leaf in part.items() if is_in(name)} for part in (weights.params, weights.buffers)
    )
    return Weights(params, buffers)


def put_layers(weights: Weights, part: Weights) -> Weights:
    """Return weights with some layers replaced, in their order; layers that they lack come last."""
    return Weights(weights.params | part.params, weights.buffers | part.buffers)


def last_layers(task: Task, count: int, key: str) -> list[str]:
    """Return the names of the parameters of the last layers of a task's model, in their order.

    Args:
        count: number of layers.
        key: where it is written, for errors.

    Raises:
        FedtideError: the model has fewer layers.

    >>> last_layers(Task(lambda: nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2))), 1, "layers")
    ['2.weight', '2.bias']
    """
    is_last, names = in_last_layer(task), task.scratch.names
    trunk = [[name for name in layer if not is_last(name)] for layer in layers_of(task.scratch.weights).values()]
    layers = [*filter(None, trunk), [*filter(is_last, names)]]
    if count > len(layers):
        raise refused(key, count, f"0 to {len(layers)}, the layers of the model")
    return [name for layer in layers[len(layers) - count :] for name in layer]


# -- training while other layers stay as they are ----------------------------------------------------------------------


def freeze_layers(task: Task, is_frozen: IsIn) -> Task:
    """Return the task with some layers frozen. Their parameters are among the buffers of its weights.

    >>> task = freeze_layers(Task(lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))), lambda name: name[0] == "0")
    >>> list(task.scratch.weights.params), list(task.scratch.weights.buffers)
    (['1.weight', '1.bias'], ['0.weight', '0.bias'])
    """

    def build() -> nn.Module:
        module = task.build()
        for name, param in module.named_parameters():
            if is_frozen(name):
                param.requires_grad_(False)
        return module

    return replace(task, build=build, begin=None if task.begin is None else freeze_weights(task.begin, is_frozen))


def freeze_weights(weights: Weights, is_frozen: IsIn) -> Weights:
    """Return weights as the task with these layers frozen takes them."""
    frozen = {name: leaf for name, leaf in weights.params.items() if is_frozen(name)}
    params = {name: leaf for name, leaf in weights.params.items() if name not in frozen}
    return Weights(params, weights.buffers | frozen)


@dataclass(frozen=True)
class Part:
    """Training of some layers of a model while the others stay as they are.

    Args:
        task: the task with the others frozen.
        is_frozen: tells which these are.
    """

    task: Task
    is_frozen: IsIn

    @classmethod
    def of(cls, task: Task, is_frozen: IsIn) -> Self:
        """Return the training of a task's layers that are not frozen."""
        return cls(freeze_layers(task, is_frozen), is_frozen)

    def train(
        self,
        local: LocalTrainer,
        weights: Weights,
        shard: Shard,
        moment: Moment,
        rng: Rng,
        loss: Any = None,
        features: bool = False,
    ) -> Steps[tuple[Weights, Any]]:
        """Return all weights after training, by their usual names, and the result of the training.

        `loss` is minimized; None is that of the task. With `features` the result has those of the samples, too.
        """
        start = freeze_weights(weights, self.is_frozen)
        fitted = yield Train(self.task, local, start, shard, moment, rng, loss=loss, features=features)
        after = fitted.weights
        moved = Weights(after.params, {name: after.buffers[name] for name in weights.buffers})
        return put_layers(weights, detached(moved)), fitted
