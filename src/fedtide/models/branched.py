"""Multi-branch networks: one layer of a model repeated K times, with all other layers shared."""

import copy
import re
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedtide.core.base import Weights
from fedtide.core.errors import FedtideError, refused, unknown
from fedtide.core.weights import renamed
from fedtide.fields.types import ModelCount
from fedtide.models.base import redraw

BranchCount = Annotated[ModelCount, Field(description="number of branches, K.")]

Feature = Literal["shared", "branches"]
"""Source of the features: the input of the repeated layer, or the outputs of all branches side by side."""


WHOLE = "*"
"""Layer name that stands for the whole model, so that nothing is shared."""

BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
"""Layers whose outputs for a row depend on the other rows of its batch."""

COPY = re.compile(r"(?:^|\.)copies\.(\d+)\.")
"""Part of the name of a parameter that says in which branch it is."""


def branched(
    model: nn.Module, layer: str, count: int, feature: Feature = "shared", key: str = "branch_layer"
) -> "Branched":
    """Repeat the layer named `layer` K times and share all layers before and after it.

    The first branch is the original layer, the others are copies with fresh initial weights.

    A sequence model has a method `counted(x)` that returns the mask (rows, steps) of the steps that count. Its logits
    are (K, rows, steps, classes), and the features of a row are the mean over its steps that count. If whole models are
    repeated that have a method `embedded(x)`, its features (rows, steps, d) stand for the ids of tokens.

    Args:
        model: a module that returns logits (rows, classes).
        layer: a name in `model.named_modules()`, for example "head", or `WHOLE`.
        count: K, the number of branches.
        feature: "shared" is the input of the repeated layer, "branches" the outputs of its copies side by side.
        key: the configuration key that names the layer, for messages.

    Returns:
        A module that returns logits (K, rows, classes) and features (rows, d).

    Raises:
        FedtideError: the model has no such layer, or a later one normalizes over the batch, which would be of all K.

    >>> from fedtide.models.networks import SmallCNN
    >>> net = branched(SmallCNN().build((1, 28, 28), 10), "head", 2)
    >>> logits, features = net(torch.zeros(5, 1, 28, 28))
    >>> logits.shape, features.shape, sum(p.numel() for p in net.parameters())
    (torch.Size([2, 5, 10]), torch.Size([5, 64]), 28212)
    >>> from fedtide.models.networks import LSTM
    >>> net = branched(LSTM(embedding=16, hidden=64).build((20,), 1_000), "projection", 2)
    >>> logits, features = net(torch.ones(5, 20, dtype=torch.int64))
    >>> logits.shape, features.shape
    (torch.Size([2, 5, 20, 1000]), torch.Size([5, 64]))
    """
    names = [name for name, _ in model.named_modules() if name]
    if layer != WHOLE and layer not in names:
        trained = [name for name in names if any(p.requires_grad for p in model.get_submodule(name).parameters())]
        if not trained:
            raise refused(key, layer, "a network of several layers", "the model has one layer")
        raise unknown(key, layer, trained)
    if layer == WHOLE:
        whole = Branches(model, count, feature)
        whole.counted = getattr(model, "counted", None)  # type: ignore[assignment]
        return Branched(whole, whole)
    _refuse_later_batch_norm(model, layer, key, count)
    parent, _, name = layer.rpartition(".")
    holder = model.get_submodule(parent)
    branches = Branches(holder.get_submodule(name), count, feature)
    setattr(holder, name, branches)
    return Branched(model, branches)


def _refuse_later_batch_norm(model: nn.Module, layer: str, key: str, count: int) -> None:
    modules = [(name, module) for name, module in model.named_modules() if name]
    within = [number for number, (name, _) in enumerate(modules) if in_layer(f"{name}.", layer)]
    later = [name for name, module in modules[max(within) + 1 :] if isinstance(module, BATCH_NORMS)]
    if count > 1 and later:
        why = f"'{later[0]}' comes later, and its mean and variance would be those of all branches together"
        raise refused(key, layer, "'head', '*', or a network without BatchNorm after it", why)


def refused_last_layer(layer: str) -> FedtideError:
    """The error of a model in which the layer that counts as the last one does not make the outputs.

    >>> str(refused_last_layer("body")).partition(";")[0]
    "model: found the last layer 'body', but it does not make the outputs"
    """
    return FedtideError(
        f"model: found the last layer '{layer}', but it does not make the outputs; allowed: a model whose module "
        "'head', or else whose last layer with parameters, does"
    )


def in_layer(name: str, layer: str) -> bool:
    """Tell whether a parameter belongs to a layer.

    >>> in_layer("head.weight", "head"), in_layer("header.weight", "head"), in_layer("head.weight", WHOLE)
    (True, False, True)
    """
    return layer == WHOLE or name.startswith(f"{layer}.")


def in_branch(name: str, layer: str, k: int) -> str:
    """Return the name that a parameter of branch k has once `layer` is repeated.

    >>> in_branch("head.weight", "head", 1), in_branch("head.weight", WHOLE, 1), in_branch("conv.weight", "head", 1)
    ('model.head.copies.1.weight', 'model.copies.1.head.weight', 'model.conv.weight')
    """
    if layer == WHOLE:
        return f"model.copies.{k}.{name}"
    return f"model.{layer}.copies.{k}{name[len(layer) :]}" if in_layer(name, layer) else f"model.{name}"


def branch_of(parameter: str) -> int | None:
    """Return the number of the branch that a parameter of a branched model belongs to; None for shared parameters.

    >>> branch_of("model.head.copies.1.weight"), branch_of("model.conv1.weight")
    (1, None)
    """
    match = COPY.search(parameter)
    return None if match is None else int(match[1])


def unbranched(weights: Weights) -> list[Weights]:
    """Return each branch of a branched network with all that it shares, by the names of the network that was branched.

    >>> shared, own = {"model.conv.w": torch.ones(1)}, {f"model.head.copies.{k}.w": torch.ones(1) for k in (0, 1)}
    >>> [list(each.params) for each in unbranched(Weights(shared | own))]
    [['conv.w', 'head.w'], ['conv.w', 'head.w']]
    """
    branch = {name: branch_of(name) for name in (*weights.params, *weights.buffers)}
    count = len({*branch.values()} - {None})

    def plain(name: str) -> str:
        return COPY.sub(lambda copy: "." if copy[0][0] == "." else "", name.removeprefix("model."), count=1)

    def of(k: int) -> Weights:
        return renamed(weights, {name: plain(name) for name, number in branch.items() if number in (None, k)})

    return [of(k) for k in range(count)] or [weights]


class Averaged(nn.Module):
    """A branched model used as a single model, with the mean of its branches' logits (rows, classes)."""

    def __init__(self, model: "Branched") -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean logits (rows, classes)."""
        logits, _ = self.model(x)
        return logits.mean(0)


def without_average(weights: Weights) -> Weights:
    """Return the weights of the branched model in an `Averaged` one."""
    return renamed(weights, {name: name.removeprefix("model.") for name in (*weights.params, *weights.buffers)})


class Branches(nn.Module):
    """K copies of a layer, with their outputs concatenated along the rows so that later layers are shared."""

    def __init__(self, layer: nn.Module, count: int, feature: Feature) -> None:
        super().__init__()
        self.feature = feature
        copies = [layer, *(copy.deepcopy(layer) for _ in range(count - 1))]
        for fresh in copies[1:]:
            redraw(fresh)
        self.copies = nn.ModuleList(copies)
        self.features: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, d) to (K * rows, ...)."""
        outputs = [layer(x) for layer in self.copies]
        self.features = torch.cat(outputs, dim=-1) if self.feature == "branches" else self.shared(x)
        return torch.cat(outputs)

    def shared(self, x: Tensor) -> Tensor:
        """Return the features that all copies take."""
        # The id of a token is no quantity, so a model of tokens says what stands for them.
        return getattr(self.copies[0], "embedded", nn.Identity())(x)


class Branched(nn.Module):
    """A model with a repeated layer, which returns (logits (K, rows, classes), features (rows, d))."""

    def __init__(self, model: nn.Module, branches: Branches) -> None:
        super().__init__()
        self.model = model
        self._branches = [branches]  # in a list, so that it is not registered a second time

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Run one pass through the layers before the branches, and K passes through the branches and later layers."""
        logits = self.model(x)
        (branches,) = self._branches
        features, branches.features = branches.features, None
        if features is None:
            raise RuntimeError("the repeated layer was not reached")
        return logits.unflatten(0, (len(branches.copies), -1)), self._mean(features, x)

    def features(self, x: Tensor) -> Tensor:
        """Return the features (rows, d) alone; if the whole model is repeated and they are shared, no layer is run."""
        (branches,) = self._branches
        if branches is self.model and branches.feature == "shared":
            return self._mean(branches.shared(x), x)
        return self(x)[1]

    def _mean(self, features: Tensor, x: Tensor) -> Tensor:
        """Return the features of a row, if there are some at each of its steps."""
        counted = getattr(self.model, "counted", None)
        return features if counted is None or features.dim() < 3 else mean_over_steps(features, counted(x))


def mean_over_steps(features: Tensor, counted: Tensor) -> Tensor:
    """Return the mean (rows, d) of features (rows, steps, d) over the steps in a mask (rows, steps); 0 if it is empty.

    >>> mean_over_steps(torch.tensor([[[1.0], [3.0], [8.0]]]), torch.tensor([[True, True, False]]))
    tensor([[2.]])
    """
    share = counted.to(features.dtype)
    share = share / share.sum(1, keepdim=True).clamp(min=1)
    return torch.einsum("rs,rsd->rd", share, features)
