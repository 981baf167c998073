"""The device that models compute on: what goes there, and what comes home.

Weights, answers, memory and sums stay on the CPU. A task has its module on its device, moves there what it is given,
and brings results home. Features of a simulation's rows lie there (`resident`), and a client's `Shard.x` is gathered
from them. Code that computes with it other than by the task, or keeps it, brings it home first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fedtide.core.errors import refused

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


def there(value: Any, device: str) -> Any:
    """Move tensors, also in tuples, to a device; anything else is unchanged.

    >>> there((torch.ones(1), 3), "cpu")
    (tensor([1.]), 3)
    """
    if device == CPU:
        return value
    if isinstance(value, tuple):
        return tuple(there(each, device) for each in value)
    return value.to(device) if isinstance(value, Tensor) else value


def home(value: Any) -> Any:
    """Bring tensors, also in tuples, to the CPU; those that are there are unchanged."""
    if isinstance(value, tuple):
        return tuple(home(each) for each in value)
    return value.cpu() if isinstance(value, Tensor) else value


def read(made: Sequence[tuple[Tensor, float]]) -> list[tuple[float, float]]:
    """Return losses as numbers, each with what stands beside it; the device is waited for once.

    >>> read([(torch.tensor(0.5), 3)])
    [(0.5, 3)]
    """
    values = home(torch.stack([value for value, _ in made])).flatten().tolist() if made else []
    return [(value, beside) for value, (_, beside) in zip(values, made, strict=True)]


def resident(rows: Tensor, device: str) -> Tensor:
    """Return rows on a device, as they are stored; where they take more than an eighth of a GPU, as they are.

    Those that stay on the CPU go there whenever they are used. The limit is of the whole GPU, not of what is free: it
    must not depend on who else computes.
    """
    if device == "cuda" and rows.nbytes > torch.cuda.get_device_properties(device).total_memory // 8:
        return rows
    return there(rows, device)


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
