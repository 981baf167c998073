"""A module whose weights are loaded again and again: the only place where weights go into a module."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import nn

from fedtide.core.base import Weights
from fedtide.core.trees import map_leaves
from fedtide.learn.device import CPU, to_cpu


class Scratch:
    """A module whose parameters are overwritten again and again.

    Args:
        module: a fresh one.
        dtype: its number type.
        channels_last: memory format of 4-D parameters.
        device: device of its computation.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, channels_last: bool, device: str = CPU) -> None:
        self.module, self.dtype, self.device = module.to(device, dtype), dtype, device
        if channels_last:
            self.module = self.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        # Frozen parameters are carried like running statistics. Step counters (num_batches_tracked) are integers and
        # not carried: they are reset whenever weights are loaded.
        frozen = {name: p for name, p in self.module.named_parameters() if not p.requires_grad}
        buffers = {name: b for name, b in self.module.named_buffers() if b.is_floating_point()}
        counters = {name: b for name, b in self.module.named_buffers() if not b.is_floating_point()}
        self.counters = {name: b.clone() for name, b in counters.items()}
        self._counters = [(b, self.counters[name]) for name, b in counters.items()]
        self.names = list(trained)
        self.params = list(trained.values())
        self._views = Weights(
            {name: param.detach() for name, param in trained.items()},
            {name: buffer.detach() for name, buffer in {**buffers, **frozen}.items()},
        )
        # The same storage without autograd, for changes in place.
        self.values = list(self._views.params.values())
        self.loads = 0
        self.compared: Any = None  # models whose losses were compared last (`fedtide.learn.shared_passes`)
        self.passes: dict[tuple[int, ...], Any] = {}  # passes without autograd by the shape of rows
        self._home: tuple[int, Weights] | None = None
        layers = list(self.module.modules())
        self.needs_pairs = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in layers)
        # What `module.train` does to each, without looking for them anew: small models change modes all the time.
        plain = all(type(m).train is nn.Module.train and "train" not in vars(m) for m in layers)
        self._modes = [vars(m) for m in layers] if plain else None

    @property
    def weights(self) -> Weights:
        """Weights of the module: a view of its storage, or on another device a copy of it as it is now."""
        if self.device == CPU:
            return self._views
        now = self._changes
        if self._home is None or self._home[0] != now:
            self._home = now, map_leaves(to_cpu, self._views)
        return self._home[1]

    @property
    def _changes(self) -> int:
        """How often the module's storage was changed."""
        return sum(leaf._version for leaf in (*self.values, *self._views.buffers.values()))

    def _holds(self, weights: Weights) -> bool:
        """Tell whether these are the module's own weights, as they are now."""
        if self.device == CPU:
            return weights is self._views
        return self._home is not None and weights is self._home[1] and self._home[0] == self._changes

    @cached_property
    def _delta(self) -> Weights:
        """Buffer for `difference`, in the module's memory order, so that no copy is needed."""
        return map_leaves(torch.empty_like, self.weights)

    def difference(self, received: Weights, weights: Weights) -> Weights:
        """Return `weights` minus `received`, in a buffer that the next call overwrites."""
        for name, out in self._delta.params.items():
            torch.sub(weights.params[name], received.params[name], out=out)
        for name, out in self._delta.buffers.items():
            torch.sub(weights.buffers[name], received.buffers[name], out=out)
        return self._delta

    def load(self, weights: Weights, *, train: bool) -> nn.Module:
        """Copy `weights` into the module and return it in training or evaluation mode; its own weights need no copy."""
        current = self._holds(weights)
        self.loads += not current
        if self.device == CPU or not current:
            torch._foreach_copy_(self.values, [weights.params[name] for name in self.names])
            for name, buffer in self._views.buffers.items():
                buffer.copy_(weights.buffers[name])
        for counter, start in self._counters:
            counter.copy_(start)
        self.set_mode(train)
        return self.module

    def set_mode(self, train: bool) -> None:
        """Put the module in training or evaluation mode."""
        if self.module.training == train:
            return
        if self._modes is None:
            self.module.train(train)
        else:
            for attributes in self._modes:
                attributes["training"] = train
