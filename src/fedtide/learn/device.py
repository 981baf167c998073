"""The device and the precision that models compute with.

Weights, answers, memory and sums stay on the CPU. A task has its module on its device, moves inputs to the device, and
moves results back. Features of a simulation's rows are on the device (`resident`), and a client's `Shard.x` is gathered
from them. Other code moves `Shard.x` to the CPU before it computes with it or keeps it.

In bfloat16, parameters, gradients, sums and updates stay in float32. Matrix products and convolutions use bfloat16; the
output of a module is converted back to float32, and so losses, decisions and predictions are in float32.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fedtide.core.base import Weights
from fedtide.core.errors import FedtideError, refused
from fedtide.core.trees import map_leaves, same
from fedtide.models.base import BaseParameter, fixed_buffers
from fedtide.models.branched import BATCH_NORMS

CPU = "cpu"


def find_device(wanted: str) -> str:
    """Return the device that `fleet.device` names, ready to give the same bits each time.

    "auto" is a GPU where torch finds one.

    Raises:
        FedtideError: torch finds no GPU.

    >>> find_device("cpu")
    'cpu'
    """
    if wanted == CPU or not torch.cuda.is_available():
        if wanted == "cuda":
            raise refused("fleet.device", wanted, "cpu, auto", "torch finds no GPU on this machine")
        return CPU
    # cuBLAS reads it before the first product. TF32 has other bits, and some of cuDNN's algorithms not twice the same.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = False, True
    # Sums by index, as of embeddings and pools, come in any order else; of what has no fixed one torch says so.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.cuda.init()
    return "cuda"


def name_of(device: str) -> str:
    """Return the name of a device, for digests: others give other bits."""
    return f"{device} {torch.cuda.get_device_name()}" if device == "cuda" else device


def to_device(value: Any, device: str) -> Any:
    """Move tensors, also in tuples, to a device; anything else is unchanged.

    >>> to_device((torch.ones(1), 3), "cpu")
    (tensor([1.]), 3)
    """
    if device == CPU:
        return value
    if isinstance(value, tuple):
        return tuple(to_device(part, device) for part in value)
    return value.to(device) if isinstance(value, Tensor) else value


def to_cpu(value: Any) -> Any:
    """Move tensors, also in tuples, to the CPU; anything else is unchanged."""
    if isinstance(value, tuple):
        return tuple(to_cpu(part) for part in value)
    return value.cpu() if isinstance(value, Tensor) else value


def read(losses: Sequence[tuple[Tensor, float]]) -> list[tuple[float, float]]:
    """Return losses as numbers, each with what stands beside it; the device is waited for once.

    >>> read([(torch.tensor(0.5), 3)])
    [(0.5, 3)]
    """
    values = to_cpu(torch.stack([value for value, _ in losses])).flatten().tolist() if losses else []
    return [(value, count) for value, (_, count) in zip(values, losses, strict=True)]


def resident(rows: Tensor, device: str) -> Tensor:
    """Return rows on a device, as they are stored; unchanged if they take more than an eighth of a GPU.

    Those that stay on the CPU go there whenever they are used. The limit is of the whole GPU, not of what is free: it
    must not depend on who else computes.
    """
    if device == "cuda" and rows.nbytes > torch.cuda.get_device_properties(device).total_memory // 8:
        return rows
    return to_device(rows, device)


Drawing = tuple[Tensor, ...]
"""State of torch's global generators, the only ones that dropout knows: of the CPU, and of a GPU in use."""


def drawing() -> Drawing:
    """Return the state of torch's global generators."""
    gpu = (torch.cuda.get_rng_state(),) if torch.cuda.is_initialized() else ()
    return torch.get_rng_state(), *gpu


@contextmanager
def drawn_from(start: int | Drawing) -> Iterator[None]:
    """Draw from a seed, or go on from a state, and put torch's global generators back."""
    before = drawing()
    if isinstance(start, int):
        torch.default_generator.manual_seed(start)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(start)
    else:
        _set(start)
    try:
        yield
    finally:
        _set(before)


def _set(state: Drawing) -> None:
    torch.set_rng_state(state[0])
    for gpu in state[1:]:
        torch.cuda.set_rng_state(gpu)


@cache
def warn_of_bfloat(device: str) -> None:
    """Print a line, once, if the processor has no instructions for bfloat16, with which it is slower than float32."""
    if device == CPU and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        print("fedtide: precision: 'bf16' is slow here, because the processor has no bfloat16", file=sys.stderr)


def run_in_bfloat(module: Callable[[Tensor], Any], x: Tensor) -> Any:
    """Run a module, or one of its methods, on `x` in bfloat16, and return its output as float32.

    >>> run_in_bfloat(nn.Linear(2, 1), torch.ones(3, 2)).dtype
    torch.float32
    """
    # One pass at a time: autocast caches its copies of the parameters for as long as it lasts, and every step changes
    # the parameters.
    with torch.autocast(x.device.type, torch.bfloat16):
        outputs = module(x)
    return tuple(to_float32(part) for part in outputs) if isinstance(outputs, tuple) else to_float32(outputs)


def to_float32(output: Any) -> Any:
    """Convert a bfloat16 tensor to float32; return anything else unchanged."""
    return output.float() if isinstance(output, Tensor) and output.dtype == torch.bfloat16 else output


# -- the module --------------------------------------------------------------------------------------------------------


def safe_in_channels_last(module: nn.Module) -> bool:
    """Tell whether torch's convolutions of a module stay within their memory in this memory format.

    With AVX2 the gradient of a 1 x 1 convolution with a stride and fewer than 8 input channels is written past its end
    (https://github.com/uxlfoundation/oneDNN/issues/6035): a wrong gradient, a crash, or no end.

    >>> safe_in_channels_last(nn.Conv2d(4, 8, 1, stride=2)), safe_in_channels_last(nn.Conv2d(8, 8, 1, stride=2))
    (False, True)
    """
    convolutions = (m for m in module.modules() if isinstance(m, nn.Conv2d))
    return not any(max(m.kernel_size) == 1 < max(m.stride) and m.in_channels < 8 for m in convolutions)


class Scratch:
    """A module whose parameters are overwritten again and again.

    Args:
        module: a fresh one.
        dtype: its number type.
        channels_last: keep 4-D parameters in that memory format, but for a module that is not `safe_in_channels_last`.
        device: device of its computation.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, channels_last: bool, device: str = CPU) -> None:
        for param in module.parameters():
            if isinstance(param, BaseParameter):
                param.move(device, dtype)
        self.module, self.dtype, self.device = module.to(device, dtype), dtype, device
        self.channels_last = channels_last and safe_in_channels_last(module)
        if self.channels_last:
            self.module = self.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        # The base of a model with adapters is no weights: modules share its parameters, and nothing writes to them.
        # Other frozen parameters are carried like running statistics. Step counters (num_batches_tracked) are integers,
        # masks are infinite, and buffers of a base are constants: they are reset whenever weights are loaded.
        self.fixed = fixed_buffers(self.module)
        others = dict(self.module.named_buffers()) | {
            name: p
            for name, p in self.module.named_parameters()
            if not (p.requires_grad or isinstance(p, BaseParameter))
        }
        finite = {name for name, b in others.items() if b.is_meta or bool(b.isfinite().all())} - self.fixed
        buffers = {name: b for name, b in others.items() if b.is_floating_point() and name in finite}
        constants = {name: b.detach() for name, b in others.items() if name not in buffers}
        self.constants = {name: b.clone() for name, b in constants.items()}
        self._constants = [(b, self.constants[name]) for name, b in constants.items()]
        self.names = list(trained)
        self.params = list(trained.values())
        self._views = Weights(
            {name: param.detach() for name, param in trained.items()},
            {name: buffer.detach() for name, buffer in buffers.items()},
        )
        # The same storage without autograd, for changes in place.
        self.values = list(self._views.params.values())
        self.loads = 0
        self.compared: Any = None  # models whose losses were compared last (`fedtide.learn.steps`)
        self.passes: dict[tuple[int, ...], Any] = {}  # passes without autograd by the shape of rows
        self.stacks: dict[tuple[str, tuple[int, ...]], Any] = {}  # stacks for gradients, by use and shape of rows
        self._home: tuple[int, Weights] | None = None
        layers = list(self.module.modules())
        self.needs_pairs = any(isinstance(m, BATCH_NORMS) for m in layers)

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
    def buffers(self) -> dict[str, Tensor]:
        """Running statistics of the module: a view of its storage, on its device."""
        return self._views.buffers

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
        for constant, start in self._constants:
            constant.copy_(start)
        self.set_mode(train)
        return self.module

    def check_constants(self) -> None:
        """Raise if a pass has changed a buffer that began infinite, or is of a base, because it is not carried.

        >>> net = nn.Linear(2, 1)
        >>> net.register_buffer("least", torch.tensor(float("inf")))
        >>> scratch = Scratch(net, torch.float32, channels_last=False)
        >>> net.least.fill_(1.0) and scratch.check_constants()
        Traceback (most recent call last):
        fedtide.core.errors.FedtideError: model: buffer 'least' begins infinite and changes, allowed: finite numbers
        """
        for (now, start), name in zip(self._constants, self.constants, strict=True):
            if start.is_floating_point() and not same(now, start):
                if name in self.fixed:
                    raise FedtideError(f"model: buffer '{name}' of the frozen base changes, allowed: one that stays")
                raise FedtideError(f"model: buffer '{name}' begins infinite and changes, allowed: finite numbers")

    def set_mode(self, train: bool) -> None:
        """Put the module in training or evaluation mode."""
        if self.module.training != train:
            self.module.train(train)
