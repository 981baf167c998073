"""Server optimizers, and FedAvg with them: FedAvgM, FedAdagrad, FedAdam and FedYogi.

FedAvgM (`sgd` with momentum): Hsu, Qi, Brown: *Measuring the Effects of Non-Identical Data Distribution for Federated
Visual Classification*, 2019. The others: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: *Adaptive
Federated Optimization*, ICLR 2021, Algorithm 2. `flash` is that of `fedtide.algorithms.flash`.

When to use it: rounds are few, updates are noisy, or gradients are sparse or of very different size from layer to layer
(language models). Each optimizer has a server learning rate to tune.

Choices:
    - paper: Adam has two kinds, which differ at the same numbers. "adam" is the paper's: v starts at eps^2, there is no
      bias correction, beta2 = 0.99. "keras-adam" is that of the periodic-shift experiments: v starts at 0, with bias
      correction, beta2 = 0.999, eps outside the correction.
    - ours: FedAdagrad, FedAdam and FedYogi weight clients by their samples. Algorithm 2 weights them equally
      (`weighting = "uniform"`).
    - ours: without an update there is no step. Parameters missing from an update, and their moments, stay unchanged.
    - ours: a step that would overflow (the square of a finite, huge update) is not taken.
    - ours: running statistics bypass the optimizer and move by their plain mean.
    - ours: all computation uses the parameters' own precision.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from fedtide.core.base import Facts, Weights
from fedtide.core.trees import all_finite
from fedtide.core.weights import add, zeros_like
from fedtide.fields.types import ForWeights, NonNegative, OpenFraction, Positive, ingredient

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "Flash",
    "KerasAdam",
    "Server",
    "Yogi",
    "step_server",
]  # fmt: skip

Params = dict[str, Tensor]


@dataclass(frozen=True)
class Moments:
    """The memo of an adaptive optimizer: first and second moments and number of steps of each parameter."""

    first: Params
    second: Params
    steps: dict[str, int]


@ingredient
class SGD:
    """SGD, `w += lr * d`; with momentum b, `m = b*m + d; w += lr * m` (FedAvgM, Hsu et al. 2019).

    Args:
        lr: server learning rate; 1 is FedAvg.
        momentum: the momentum b.

    >>> w = Weights({"w": torch.tensor([1.0])})
    >>> SGD(0.5).step(w, None, Weights({"w": torch.tensor([2.0])}))[0].params
    {'w': tensor([2.])}
    """

    lr: Positive = 1.0
    momentum: OpenFraction = 0.0
    kind: Literal["sgd"] = "sgd"

    def init(self, weights: Weights) -> Params | None:
        """Return zero momentum; None without momentum."""
        return zeros_like(weights.params) if self.momentum else None

    def step(self, weights: Weights, memo: Params | None, delta: Weights | None) -> tuple[Weights, Params | None]:
        """Take one step."""
        if delta is None:
            return weights, memo
        d = _like(weights.params, delta.params)
        m = d if memo is None else {name: self.momentum * memo[name] + d[name] for name in d}
        moved = {name: weights.params[name] + self.lr * m[name] for name in d}
        return Weights(weights.params | moved, _add_buffers(weights, delta)), None if memo is None else memo | m


@ingredient
class _Adaptive(ABC):
    """Optimizer with two moments: the common part of "adagrad", "adam", "keras-adam" and "yogi".

    Args:
        lr: server learning rate.
        eps: added to sqrt(v).
        beta1: decay rate of the first moment.
    """

    lr: Positive = 0.01
    eps: Annotated[Positive, ForWeights] = 1e-3
    beta1: OpenFraction = 0.9

    def first_v(self) -> float:
        """Return the initial second moment."""
        return self.eps**2

    @abstractmethod
    def next_v(self, v: Tensor, d: Tensor) -> Tensor:
        """Return the second moment after an update."""

    def rate(self, t: int) -> float:
        """Return the learning rate of step t = 1, 2, ... of a parameter."""
        return self.lr

    def init(self, weights: Weights) -> Moments:
        """Return m = 0 and the first v."""
        second = {name: torch.full_like(param, self.first_v()) for name, param in weights.params.items()}
        return Moments(zeros_like(weights.params), second, dict.fromkeys(weights.params, 0))

    def step(self, weights: Weights, memo: Moments, delta: Weights | None) -> tuple[Weights, Moments]:
        """Take one step."""
        if delta is None:
            return weights, memo
        d = _like(weights.params, delta.params)
        m = {name: self.beta1 * memo.first[name] + (1 - self.beta1) * d[name] for name in d}
        v = {name: self.next_v(memo.second[name], d[name]) for name in d}
        t = {name: memo.steps[name] + 1 for name in d}
        moved = {name: weights.params[name] + self.rate(t[name]) * m[name] / (v[name].sqrt() + self.eps) for name in d}
        if not all_finite([moved, v]):
            return weights, memo
        new = Weights(weights.params | moved, _add_buffers(weights, delta))
        return new, Moments(memo.first | m, memo.second | v, memo.steps | t)


@ingredient
class Adagrad(_Adaptive):
    """FedAdagrad: `v += d^2; w += lr * m / (sqrt(v) + eps)`, `m = b1*m + (1-b1)*d` (Reddi et al. 2021, Algorithm 2).

    `v` starts at eps^2 and b1 = 0, as in the original analysis.
    """

    lr: Positive = 0.1
    beta1: OpenFraction = 0.0
    kind: Literal["adagrad"] = "adagrad"

    def next_v(self, v: Tensor, d: Tensor) -> Tensor:
        """Return the second moment after an update."""
        return v + d * d


@ingredient
class _Decaying(_Adaptive):
    """Optimizer whose second moment decays.

    Args:
        beta2: decay rate of the second moment.
    """

    beta2: OpenFraction = 0.99

    def next_v(self, v: Tensor, d: Tensor) -> Tensor:
        """Return the second moment after an update."""
        return self.beta2 * v + (1 - self.beta2) * d * d


@ingredient
class Adam(_Decaying):
    """FedAdam: `v = b2*v + (1-b2)*d^2; w += lr * m / (sqrt(v) + eps)`, `m = b1*m + (1-b1)*d` (Reddi et al. 2021).

    Algorithm 2 of the paper: v starts at eps^2, and there is no bias correction.
    """

    kind: Literal["adam"] = "adam"


@ingredient
class KerasAdam(_Decaying):
    """Adam of Keras: v starts at 0, and the bias corrections go into the step size.

    `w += lr * sqrt(1-b2^t)/(1-b1^t) * m / (sqrt(v) + eps)`, t = 1, 2, ...: eps is Keras' "epsilon hat".
    """

    beta2: OpenFraction = 0.999
    kind: Literal["keras-adam"] = "keras-adam"

    def first_v(self) -> float:
        """Return the initial second moment."""
        return 0.0

    def rate(self, t: int) -> float:
        """Return the learning rate of step t = 1, 2, ... of a parameter."""
        return self.lr * (math.sqrt(1 - self.beta2**t) / (1 - self.beta1**t))


@ingredient
class Yogi(_Decaying):
    """FedYogi: `v -= (1-b2) * d^2 * sign(v - d^2)`, else the paper's FedAdam (Reddi et al. 2021, Algorithm 2).

    Args:
        initial_accumulator: initial value of v; None means eps^2 (FedScale's code has eps).
    """

    initial_accumulator: NonNegative | None = None
    kind: Literal["yogi"] = "yogi"

    def first_v(self) -> float:
        """Return the initial second moment."""
        return self.eps**2 if self.initial_accumulator is None else self.initial_accumulator

    def next_v(self, v: Tensor, d: Tensor) -> Tensor:
        """Return the second moment after an update."""
        return v - (1 - self.beta2) * d * d * torch.sign(v - d * d)


@dataclass(frozen=True)
class Drifting(Moments):
    """The memo of Flash: moments and steps, and the drift term of each parameter."""

    drift: Params


@ingredient
class Flash(_Decaying):
    """Flash: FedAdam with a drift term d in the denominator, `w += lr * m / (sqrt(v) - d + eps)` (Panchal et al. 2023).

    With the mean update D, `b3 = |v'| / (|D^2 - v| + |v'|)` and `d = b3*d + (1-b3) * (D^2 - v)`, where v' is the second
    moment before the update: d grows if updates are larger than usual, and with it the step. `fedtide.algorithms.flash`
    cites the paper and says when the denominator is negative.

    Args:
        eps: the paper's tau, added to sqrt(v); v starts at eps^2.

    >>> w = Weights({"w": torch.tensor([0.0])})
    >>> Flash(lr=1.0, eps=0.5).step(w, Flash(eps=0.5).init(w), Weights({"w": torch.tensor([0.5])}))[0].params
    {'w': tensor([0.0500])}
    """

    kind: Literal["flash"] = "flash"

    def init(self, weights: Weights) -> Drifting:
        """Return m = d = 0 and v = eps^2."""
        moments = super().init(weights)
        return Drifting(moments.first, moments.second, moments.steps, zeros_like(weights.params))

    def step(self, weights: Weights, memo: Any, delta: Weights | None) -> tuple[Weights, Drifting]:
        """Take one step."""
        if delta is None:
            return weights, memo
        moved, first, second, drift = Params(), Params(), Params(), Params()
        for name, d in _like(weights.params, delta.params).items():
            before = memo.second[name]
            first[name] = self.beta1 * memo.first[name] + (1 - self.beta1) * d
            second[name] = self.next_v(before, d)
            surplus = d * d - second[name]
            beta3 = before / (surplus.abs() + before)  # v is never negative
            drift[name] = beta3 * memo.drift[name] + (1 - beta3) * surplus
            moved[name] = weights.params[name] + self.lr * first[name] / (second[name].sqrt() - drift[name] + self.eps)
        if not all_finite([moved, second, drift]):
            return weights, memo
        steps = {name: memo.steps[name] + 1 for name in moved}
        new = Weights(weights.params | moved, _add_buffers(weights, delta))
        return new, Drifting(memo.first | first, memo.second | second, memo.steps | steps, memo.drift | drift)


KERAS = KerasAdam(lr=0.01, eps=1e-4)
"""Adam as in the released code of the periodic-shift paper, which tunes lr and eps for each data set."""

Server = Annotated[
    SGD | Adagrad | Adam | KerasAdam | Yogi | Flash,
    Field(discriminator="kind", description="server optimizer for a model's mean update."),
]


S = TypeVar("S", bound=Any)
"""State with one model: a dataclass with `weights`, and `server`, the optimizer's memo."""


def step_server(state: S, server: Server, got: dict[str, Any] | None) -> tuple[S, Facts]:
    """Take the server's step along the mean update; no step without answers."""
    got = got or {}
    weights, memo = server.step(state.weights, state.server, got.get("delta"))
    facts = {"loss": got["loss"]} if got.get("loss") is not None else {}
    return replace(state, weights=weights, server=memo), facts


def _add_buffers(weights: Weights, delta: Weights) -> Params:
    """Return running statistics moved by an update, which may lack some of them."""
    moved = {name: weights.buffers[name] for name in delta.buffers}
    return weights.buffers | add(moved, delta.buffers)


def _like(params: Params, delta: Params) -> Params:
    unknown = delta.keys() - params.keys()
    if unknown:
        raise ValueError(f"an update of unknown parameters: {sorted(unknown)}")
    return {name: change.to(params[name].dtype) for name, change in delta.items()}
