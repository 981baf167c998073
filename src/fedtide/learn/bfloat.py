"""Training in bfloat16: whether this processor gains by it, and which operations use it.

Parameters, gradients, sums and updates stay in float32. Matrix products and convolutions of the forward and backward
pass use bfloat16; the output of a module is converted back to float32, and so losses, decisions and predictions are
in float32.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from fedtide.core.errors import FedtideError
from fedtide.learn.device import CPU

STEPS, LOOKS = 3, 10
"""Steps that are timed in either type of number at a look, and looks until bfloat16 is believed to lose."""
LEAST = 0.95
"""Gain below which bfloat16 is refused: less than that is within what a busy machine makes of no gain."""


@lru_cache(maxsize=1)
def gain() -> float:
    """Measure how many times as long a step takes in float32 as in bfloat16, with a convolution and a product.

    The instructions that a processor names do not tell: some have them and lose. Steps take turns, on one thread, and
    the least processor time counts, so that others who use the machine hardly matter. About 20 ms a look, and there
    is another one only where bfloat16 seems to lose.
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
    """Run a module on `x` in bfloat16 where that gains, and return its output as float32.

    >>> run_in_bfloat(nn.Linear(2, 1), torch.ones(3, 2)).dtype
    torch.float32
    """
    # One pass at a time: autocast caches its copies of the parameters for as long as it lasts, and every step changes
    # the parameters.
    with torch.autocast(x.device.type, torch.bfloat16):
        made = module(x)
    return tuple(to_float32(part) for part in made) if isinstance(made, tuple) else to_float32(made)


def to_float32(made: Any) -> Any:
    """Convert a bfloat16 tensor to float32; return anything else unchanged."""
    return made.float() if isinstance(made, Tensor) and made.dtype == torch.bfloat16 else made
