"""bfloat16: where a processor gains by it, and what runs in it.

Parameters, their gradients, sums and updates stay in float32. Matrix products and convolutions of the forward pass, and
those of the backward pass that belong to them, are done in bfloat16; whatever comes out of a module is float32 again,
so that losses, decisions and predictions are.
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
"""What processors call an instruction that multiplies bfloat16: x86 the first two, ARM the others."""


@lru_cache(maxsize=1)
def processor_flags() -> frozenset[str]:
    """What the processor says that it can do; nothing where the system does not tell."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    told = (line.partition(":") for line in lines)
    return frozenset(word for key, _, words in told if key.strip() in ("flags", "Features") for word in words.split())


def check_gain(flags: Collection[str] | None = None) -> None:
    """Raise where this processor gains nothing by bfloat16.

    Args:
        flags: what it can do; None asks it.

    >>> check_gain(["avx2", "avx512_bf16"])
    """
    known = processor_flags() if flags is None else flags
    if not any(name in known for name in GAINING):
        raise FedtideError(
            f"precision: found 'bf16', and this processor has no instructions for it ({', '.join(GAINING[:2])}; on ARM "
            f"{GAINING[2]}), so that nothing is gained; allowed: fp32, fp64"
        )


def lowered(module: nn.Module, x: Tensor) -> Any:
    """What a module returns for `x`, computed in bfloat16 where that gains, and given back as float32.

    >>> lowered(nn.Linear(2, 1), torch.ones(3, 2)).dtype
    torch.float32
    """
    # One pass at a time: autocast remembers its copies of the parameters for as long as it lasts, and every step
    # changes them.
    with torch.autocast(x.device.type, torch.bfloat16):
        made = module(x)
    return tuple(full(part) for part in made) if isinstance(made, tuple) else full(made)


def full(made: Any) -> Any:
    """A tensor of bfloat16 as float32, anything else as it is."""
    return made.float() if isinstance(made, Tensor) and made.dtype == torch.bfloat16 else made
