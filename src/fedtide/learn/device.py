"""The device and the precision that models compute with.

Weights, answers, memory and sums stay on the CPU. A task has its module on its device, moves inputs to the device, and
moves results back. Features of a simulation's rows are on the device (`resident`), and a client's `Shard.x` is gathered
from them. Other code moves `Shard.x` to the CPU before it computes with it or keeps it.

In bfloat16, parameters, gradients, sums and updates stay in float32. Matrix products and convolutions use bfloat16; the
output of a module is converted back to float32, and so losses, decisions and predictions are in float32.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from fedtide.core.errors import FedtideError, refused

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


STEPS, LOOKS = 3, 10
"""Steps that are timed in either type of number at a look, and looks until bfloat16 is believed to lose."""
LEAST = 0.95
"""Gain below which bfloat16 is refused: less than that is within what a busy machine makes of no gain."""


@lru_cache(maxsize=1)
def gain() -> float:
    """Measure how many times as long a step takes in float32 as in bfloat16, with a convolution and a product.

    The instructions that a processor names do not tell: some have them and lose. Steps take turns, on one thread, and
    the least processor time counts, so that others who use the machine hardly matter. About 20 ms a look, and there
    is another one only if bfloat16 seems to lose.
    """
    threads, random = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    try:
        module = nn.Sequential(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 12 * 12, 128))
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x = torch.rand(8, 32, 14, 14).contiguous(memory_format=torch.channels_last)
        plain, lowered = float("inf"), float("inf")
        for _ in range(LOOKS):
            for _ in range(STEPS):
                plain = min(plain, _seconds(module, lambda: module(x)))
                lowered = min(lowered, _seconds(module, lambda: run_in_bfloat(module, x)))
            if lowered < plain:
                break
        return plain / lowered
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(random)


def _seconds(module: nn.Module, run: Callable[[], Tensor]) -> float:
    """Return the processor seconds of a step, without its update."""
    began = time.process_time()
    torch.autograd.grad(run().sum(), list(module.parameters()))
    return time.process_time() - began


def check_gain(device: str) -> None:
    """Raise if this processor loses by bfloat16; models on another device do not ask it."""
    if device == CPU and gain() < LEAST:
        raise FedtideError(
            f"precision: found 'bf16', in which a step takes {1 / gain():.1f} times as long here as in float32; "
            "allowed: fp32, fp64"
        )


def run_in_bfloat(module: nn.Module, x: Tensor) -> Any:
    """Run a module on `x` in bfloat16, and return its output as float32.

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
