"""Initial weights from a file: from another run, or from any network saved as safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from fedtide.core import codec
from fedtide.core.base import Weights
from fedtide.core.checkpoint import newest_state
from fedtide.core.errors import FedtideError, refused, within

STATE = "state.safetensors"


def file_of(path: Path) -> Path:
    """Return the file that a path refers to: for a run folder (`RUN/METHOD/SEED`) the state of its newest checkpoint.

    Raises:
        FedtideError: the folder has no checkpoint.
    """
    return newest_state(path / "checkpoints") if path.is_dir() else path


def load_weights(path: Path, like: Weights, key: str) -> Weights:
    """Load weights from a file and check them against those of the network.

    Args:
        path: a safetensors file with weights by name, the state of a run, or the folder of a run.
        like: weights of the network.
        key: configuration key that names the file, for error messages.

    Raises:
        FedtideError: the file is missing or damaged, belongs to another network, or holds several models.
    """
    with within(key):
        weights = _read_tensors(path)
    wanted = {**like.params, **like.buffers}
    for name, value in wanted.items():
        value_found = weights.get(name)
        if value_found is None or value_found.shape != value.shape:
            shape = None if value_found is None else tuple(value_found.shape)
            raise refused(f"{key}: {path}: shape of '{name}'", shape, str(tuple(value.shape)))
    more = [name for name, value in weights.items() if name not in wanted and value.is_floating_point()]
    if more:
        raise refused(f"{key}: {path}", more[0], f"{', '.join(wanted)}, as the model has")
    return Weights(
        {name: weights[name].to(value.dtype) for name, value in like.params.items()},
        {name: weights[name].to(value.dtype) for name, value in like.buffers.items()},
    )


def _read_tensors(path: Path) -> dict[str, Tensor]:
    file = file_of(path)
    try:
        if file.name != STATE:
            return load(file.read_bytes())
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise FedtideError(f"{path}: {reason}; allowed: a file of safetensors, or RUN/METHOD/SEED") from None
    except SafetensorError as error:
        raise FedtideError(f"{path}: not a file of safetensors ({error}); allowed: one, or RUN/METHOD/SEED") from None
    saved: Any = getattr(codec.from_file(file), "weights", None)
    models = [model for model in (saved if isinstance(saved, tuple) else (saved,)) if isinstance(model, Weights)]
    if len(models) != 1:
        raise refused(f"{path}: number of models", len(models), "1, as in the state of a run with one model")
    return models[0].params | models[0].buffers
