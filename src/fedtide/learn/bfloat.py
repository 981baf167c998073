"""Training in bfloat16: which processors support it, and which operations use it.

Parameters, gradients, sums and updates stay in float32. Matrix products and convolutions of the forward and backward
pass use bfloat16; the output of a module is converted back to float32, and so losses, decisions and predictions are
in float32.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedtide.core.errors import FedtideError

GAINING = ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16")
"""Processor flags for bfloat16 multiplication: the first two are x86, the others ARM."""


@lru_cache(maxsize=1)
def processor_flags() -> frozenset[str]:
    """Return the features that the processor reports; empty where the system does not tell."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    told = (line.partition(":") for line in lines)
    return frozenset(word for key, _, words in told if key.strip() in ("flags", "Features") for word in words.split())


def check_gain(flags: Collection[str] | None = None) -> None:
    """Raise if this processor gains nothing from bfloat16.

    Args:
        flags: features of the processor; None reads them from the system.

    >>> check_gain(["avx2", "avx512_bf16"])
    """
    known = processor_flags() if flags is None else flags
    if not any(name in known for name in GAINING):
        raise FedtideError(
            f"precision: found 'bf16', and this processor has no instructions for it ({', '.join(GAINING[:2])}; on ARM "
            f"{GAINING[2]}), so that nothing is gained; allowed: fp32, fp64"
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
