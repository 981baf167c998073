"""A trained network as a file that other programs read."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from fedtide._version import installed
from fedtide.config import resolved
from fedtide.core.atomic import replacing
from fedtide.core.base import Weights
from fedtide.core.errors import FedtideError
from fedtide.draw.prose import listed
from fedtide.learn.target import CLASSES, Target
from fedtide.learn.task import Task
from fedtide.runs.predict import names_of_classes
from fedtide.runs.trained import Trained, agree, module_of

Format = Literal["safetensors", "onnx", "torch-export"]
"""Kind of a file: weights by name, or a program with its weights for ONNX or `torch.export.load`."""

ENDINGS: dict[Format, str] = {"safetensors": ".safetensors", "onnx": ".onnx", "torch-export": ".pt2"}

CHECKED = 64
"""How many rows an exported program must predict as the run does."""


@dataclass(frozen=True)
class Model:
    """A model that is written to a file.

    Args:
        task: the kind of its networks.
        parts: the networks, with the share of each in the probabilities.
        rows: some rows as it sees them, to compare on.
        about: what the file says of itself.
    """

    task: Task
    parts: Sequence[tuple[Weights, float]]
    rows: Tensor
    about: Mapping[str, str]

    @staticmethod
    def of(trained: Trained, client: int | None, cluster: int | None) -> Model:
        """Return the model of a run, see `Trained.parts`."""
        parts = trained.parts(client, cluster)
        return Model(trained.task, parts, trained.rows(CHECKED), described(trained, client, cluster))


def export(model: Model, out: Path, format: Format) -> str:
    """Write the network by which rows are predicted to a file, and say what it is.

    A program takes rows as the model sees them, any number of them, and returns their log-probabilities, or the columns
    of another target (`Target.columns`) in the units of the data. It is written only if it predicts as the run does.

    Args:
        model: what is written.
        out: the file.
        format: "safetensors" for the weights alone, which `init_from` reads, too; "torch-export" or "onnx" for a
            program.

    Raises:
        FedtideError: several networks predict, a library is missing, or what was exported predicts otherwise.
    """
    parts, about, rows = list(model.parts), dict(model.about), model.rows
    if format == "safetensors":
        if len(parts) > 1:
            but = f"{len(parts)} networks mixed; allowed: --format torch-export or onnx, or --cluster for one of them"
            raise FedtideError(f"--format: safetensors holds the weights of one network, and this is {but}")
        ((weights, _),) = parts
        arrays = {name: value.contiguous().clone() for name, value in (weights.params | weights.buffers).items()}
        try:
            with replacing(out) as file:
                save_file(arrays, file, metadata=about)
        except SafetensorError as error:
            raise FedtideError(f"{out}: cannot be written ({error})") from None
        return f"weights of {sum(array.numel() for array in arrays.values()):,} numbers in {len(arrays)} arrays"
    program = Predicting(module_of(model.task, parts), model.task.target).eval()
    with torch.no_grad():
        said = program(rows)
    with replacing(out) as file:
        named = file.with_name(file.name + ENDINGS[format])  # exporters look at the ending
        try:
            with _quiet():
                found = (_torch_export if format == "torch-export" else _onnx)(program, rows, named, about)
            if not agree(model.task, found, said):
                raise FedtideError(f"--format: what {format} makes of this model predicts otherwise; allowed: another")
            named.replace(file)
        finally:
            named.unlink(missing_ok=True)
    returns = listed(columns_of(model.task.target)) or f"{said.shape[-1]} log-probabilities each"
    return f"program that takes rows {tuple(rows.shape[1:])} and returns {returns}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence exporters, which warn of what cannot be mended, and turn what they cannot do into one line."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (FedtideError, OSError):
        raise
    except Exception as error:  # whatever they raise for a model of a person's own
        why = str(error).strip().partition("\n")[0]
        raise FedtideError(f"--format: this model cannot be exported ({why}); allowed: safetensors") from None
    finally:
        logger.setLevel(before)


class Predicting(nn.Module):
    """A network that returns log-probabilities, or the columns of another target."""

    def __init__(self, network: nn.Module, target: Target) -> None:
        super().__init__()
        self.network = network
        self.target = target

    def forward(self, x: Tensor) -> Tensor:
        """Return log-probabilities (rows, classes), or columns (rows, columns)."""
        told = self.target.read_outputs(self.network(x))
        columns = self.target.columns(told)
        return torch.stack(list(columns.values()), -1) if columns else told


def columns_of(target: Target) -> list[str]:
    """Return the names of the columns that a target tells; none of classes."""
    return list(target.columns(torch.zeros(1, target.width)))


def described(trained: Trained, client: int | None, cluster: int | None) -> dict[str, str]:
    """Return what a file says of itself."""
    run = trained.run
    whose = "server" if client is None and cluster is None else f"client {client}" if cluster is None else ""
    return {
        "fedtide": installed(),
        "run": run.title,
        "rounds": str(trained.moment.round + 1),
        "whose": whose or f"cluster {cluster}",
        "model": json.dumps(resolved(run.experiment)["model"]),
        "shape": json.dumps(list(trained.host.population.rows.shape)),
        **_labeled(trained),
        "format": "pt",
    }


def _labeled(trained: Trained) -> dict[str, str]:
    """Return the names of the classes, or what another target is and its columns."""
    target = trained.task.target
    if target == CLASSES:
        return {"classes": json.dumps(names_of_classes(trained))}
    return {"target": json.dumps(vars(target)), "columns": json.dumps(columns_of(target))}


def _torch_export(program: nn.Module, rows: Tensor, file: Path, about: dict[str, str]) -> Tensor:
    """Write a program for `torch.export.load`, and return what it predicts once it is read again."""
    made = torch.export.export(program, (rows,), dynamic_shapes={"x": {0: torch.export.Dim("rows", min=1)}})
    torch.export.save(made, file, extra_files=about)
    read: Any = torch.export.load(file).module()
    return torch.cat([read(rows[:1]), read(rows[1:])])


def check_onnx() -> None:
    """Raise where the libraries for ONNX are missing."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        try:
            __import__(name)
        except ImportError:
            raise FedtideError(f"--format: onnx needs {name}: pip install 'fedtide[onnx]'") from None


def _onnx(program: nn.Module, rows: Tensor, file: Path, about: dict[str, str]) -> Tensor:
    """Write a program for ONNX, and return what onnxruntime predicts with it."""
    import onnx
    import onnxruntime

    torch.onnx.export(
        program,
        (rows,),
        file,
        input_names=["rows"],
        output_names=["columns" if "columns" in about else "logp"],
        dynamic_shapes={"x": {0: torch.export.Dim("rows", min=1)}},
        external_data=False,
        dynamo=True,
        verbose=False,
    )
    model = onnx.load(file)
    for key, value in about.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, value
    onnx.save(model, file)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    answers = [session.run(None, {"rows": part.numpy()})[0] for part in (rows[:1], rows[1:])]
    return torch.cat([torch.from_numpy(answer) for answer in answers])
