"""Trackers that an experiment may name: where each writes to. Nothing here needs their libraries."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from fedtide.core.errors import FedtideError, unknown
from fedtide.fields.types import by_kind, ingredient


@ingredient
class TensorBoard:
    """TensorBoard: a folder of event files, which `tensorboard --logdir` shows.

    Args:
        path: the folder; None means `track/tensorboard` in the run folder.
    """

    path: str | None = None
    kind: Literal["tensorboard"] = "tensorboard"


@ingredient
class MLflow:
    """MLflow: an experiment with a run for each method and seed.

    Args:
        path: where it keeps them, as MLflow writes it (http://..., sqlite:///...); None means MLFLOW_TRACKING_URI, or
            else `track/mlflow.db` in the run folder.
        experiment: what it is called there; None means the run folder's name.
    """

    path: str | None = None
    experiment: str | None = None
    kind: Literal["mlflow"] = "mlflow"


@ingredient
class WandB:
    """Weights & Biases: a project with a run for each method and seed.

    Args:
        project: what it is called there.
        mode: "offline" writes to a folder beside the run folder, `study-wandb`, for `wandb sync`; "online" sends as
            rounds are played.
    """

    project: str = "fedtide"
    mode: Literal["offline", "online"] = "offline"
    kind: Literal["wandb"] = "wandb"


Track = Annotated[TensorBoard | MLflow | WandB, Field(discriminator="kind")]
"""Trackers."""

KINDS = ("tensorboard", "mlflow", "wandb")


def spelled(text: str) -> Track:
    """Read `"tensorboard"`, or with a place `"mlflow:http://localhost:5000"`.

    >>> spelled("tensorboard:logs")
    TensorBoard(path='logs', kind='tensorboard')
    """
    kind, _, place = text.partition(":")
    if kind not in KINDS:
        raise unknown("track", kind, KINDS)
    if place and kind == "wandb":
        return WandB(project=place)
    made: Track = TypeAdapter(Track).validate_python(by_kind(text))
    return made


def check_installed(track: Track) -> None:
    """Raise where the library of a tracker is not installed.

    Raises:
        FedtideError: it says how it is installed.
    """
    if find_spec(track.kind) is None:
        raise FedtideError(f'track.kind: "{track.kind}" needs its library; pip install "fedtide[track]"')
