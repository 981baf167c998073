"""Files that other programs read: predictions of a trained run as a table, and its network."""

import csv
import io
import json
import logging
import math
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from fedtide._version import installed
from fedtide.config import Experiment, resolved
from fedtide.core.atomic import check_free, check_new, making, replacing, write_text
from fedtide.core.base import Weights
from fedtide.core.errors import FedtideError, refused, uninstalled
from fedtide.core.files import check_file
from fedtide.data.rows import Rows, find_known_rows
from fedtide.data.sources.arrays import open_arrays, standardize
from fedtide.data.sources.cells import format_times, read_cells
from fedtide.data.sources.series import Series
from fedtide.data.sources.table_files import Spelling, read_names
from fedtide.data.sources.tabular import CSV, Features
from fedtide.data.sources.texts import Texts, names_of_files
from fedtide.data.transforms import Prepare, apply_transforms, features
from fedtide.draw.prose import listed
from fedtide.draw.tables import escape_formula
from fedtide.learn.target import CLASSES, DEVIATION, Target
from fedtide.learn.task import Task
from fedtide.models.adapters import save_adapters
from fedtide.models.transformer import save_merged
from fedtide.runs.job import Asked, Format
from fedtide.runs.language import Speaker, embed, predicts_tokens
from fedtide.runs.trained import Models, Trained, agree, module_of

TABLES = "CSV, Parquet or NPZ"
TEXTS = "CSV, Parquet or JSON lines, or a folder of texts"
LABEL = "label"
"""Column of a table that is no feature if the run's source names none."""


def predict_file(
    trained: Trained,
    path: Path,
    out: Path,
    *,
    client: int | None = None,
    cluster: int | None = None,
    asked: Asked = Asked(),
) -> tuple[int, tuple[str, ...]]:
    """Predict the rows of a CSV, Parquet or NPZ file, and write their classes and probabilities as CSV.

    Of other targets the outputs are written: a number in the units of the data, quantiles, or labels. A run of texts
    reads texts from CSV, Parquet or JSON lines. One of next tokens continues them, or chooses among answers. A run of
    series forecasts the times of a file of series, and the times after its end.

    Args:
        trained: the run.
        path: the file, with the features of the run's rows; a label is ignored.
        out: the file that is written; it must not exist.
        client: as this client; None for a new one.
        cluster: with this network of the server's state alone.
        asked: what is asked of a run of texts.

    Returns:
        The number of rows, and lines for people.

    Raises:
        FedtideError: the rows are not like those of the run, or there is no such client or network.
    """
    check_free(out)
    if not isinstance(trained.run.experiment.data.source, Texts):
        asked.check_unasked("the run does not learn from texts")
    if asked.embeddings:
        asked.check()
        x = token_rows(trained, path)
        write_text(out, table_of(embed(trained, x, client, cluster), names_of_files(path)), new=True)
        return len(x), ()
    if predicts_tokens(trained):
        answer = Speaker(trained, client, cluster).say(checked_texts(path), asked)
        write_text(out, table_of(answer.numbers, {**names_of_files(path), **answer.texts}), new=True)
        return len(next(iter(answer.texts.values()))), answer.lines
    asked.check_unasked("the run does not predict next tokens of texts")
    data, target = trained.run.experiment.data, trained.host.population.target

    def outputs_of(x: Tensor) -> Tensor:
        if cluster is None:
            return trained.predict(x, client).told
        ((weights, _),) = trained.parts(client, cluster)
        return trained.predict_with(weights, x).told

    if isinstance(data.source, Series):
        check_file(path, TABLES)
        series = data.source.ahead(path, data.folder)
        values = [
            _in_units(
                one, target.columns(outputs_of(prepared(torch.from_numpy(one.x), torch.float32, data.transforms)))
            )
            for one in series
        ]
        names = [one.name for one in series for _ in one.time]
        times = format_times(np.concatenate([one.time for one in series]))
        columns = {name: torch.cat([value[name] for value in values]) for name in values[0]}
        write_text(out, table_of(columns, {"series": names, "time": times}), new=True)
        return len(names), ()
    x = seen_rows(trained, path)
    outputs = outputs_of(x)
    if target == CLASSES:
        text = table(outputs, names_of_classes(trained), names_of_files(path))
    else:
        text = table_of(target.columns(outputs))
    write_text(out, text, new=True)
    return len(x), ()


def _in_units(series: Any, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return forecasts in the units of their series; a deviation has no center."""
    centers = {name: 0.0 if name == DEVIATION else series.center for name in columns}
    return {name: centers[name] + series.spread * values.double() for name, values in columns.items()}


def seen_rows(trained: Trained, path: Path) -> Tensor:
    """Read features (rows, ...) as the model sees them."""
    rows = trained.host.population.rows
    if len(rows.take(torch.zeros(1, dtype=torch.int64))[1].shape) > 1:
        raise refused(f"{trained.run.title}: rows", "sequences", "rows with one label each")
    data = trained.run.experiment.data
    source: Any = data.source
    directory = data.folder
    if isinstance(source, Texts):
        return token_rows(trained, path)
    if not isinstance(source, CSV) or not source.learns or (path.suffix == ".npz" and not source.categories):
        settings = (source.feature_names(directory), source.spelling_in(directory)) if isinstance(source, CSV) else ()
        return as_seen(trained, read_features(path, tuple(rows.shape), *settings))
    check_file(path, TABLES)
    if path.suffix == ".npz":
        raise refused(str(path), "NPZ", "a CSV file, as the run's features are made of columns")
    people: Any = trained.host.population
    fitted_rows = people.trained_on.unique().long() if people.rows.time is None else None
    x = source.encoded(path, directory, fitted_rows, "; a run with data.source.missing = 'mean' fills features")
    return prepared(x, torch.float32, data.transforms)


def token_rows(trained: Trained, path: Path) -> Tensor:
    """Read texts as tokens (rows, steps), as the model of a run of texts sees them."""
    data = trained.run.experiment.data
    source: Any = data.source
    x, cut = source.texts_of(checked_texts(path), data.folder)
    if not len(x):
        raise refused(f"{path}: texts", 0, "1 or more")
    if cut:
        print(f"fedtide: {path}: {cut} of {len(x)} rows are cut to {source.context} tokens", file=sys.stderr)
    return prepared(x, torch.int64, data.transforms)


def checked_texts(path: Path) -> Path:
    """Return the path of a file, or of a folder of texts; raise for what is neither."""
    if not path.is_dir():
        check_file(path, TEXTS)
    return path


def read_features(
    path: Path, shape: tuple[int, ...], columns: Sequence[str] = (), spelling: Spelling = Spelling()
) -> Tensor:
    """Read the features of rows (rows, ...) from an NPZ or CSV file.

    Args:
        path: the file; a label in it is not looked at.
        shape: of a row.
        columns: names of the features in a CSV file, in their order; () takes all of its columns but the label.
        spelling: how the file is written.

    Raises:
        FedtideError: there is no such file, or its rows are others.
    """
    check_file(path, TABLES)
    x = _from_npz(path, shape) if path.suffix == ".npz" else _from_csv(path, shape, columns, spelling)
    if not len(x):
        raise refused(f"{path}: rows", 0, "1 or more")
    return x


def _from_npz(path: Path, shape: tuple[int, ...]) -> Tensor:
    with open_arrays(path) as arrays:
        if "x" not in arrays.names:
            raise FedtideError(f"{path}: no array 'x'")
        kind, whole = arrays.about["x"]
        if kind.kind not in "biuf" or len(whole) < 2:
            raise refused(f"{path}: x", f"{kind} {whole}", "numbers (rows, ...)")
        if whole[1:] != shape and (1, *whole[1:]) != shape:  # pictures of one channel may come without it
            raise refused(f"{path}: shape of a row", whole[1:], f"{shape}, as in the run")
        x = arrays.read("x")
        rows = torch.from_numpy(x if kind == np.uint8 else x.astype(np.float64)).reshape(-1, *shape)
    if rows.is_floating_point() and not rows.isfinite().all():
        raise refused(f"{path}: x", "a number that is not finite", "finite numbers")
    return rows


def _from_csv(path: Path, shape: tuple[int, ...], columns: Sequence[str], spelling: Spelling) -> Tensor:
    named = columns or [column for column in read_names(path, spelling) if column != LABEL]
    if len(named) != math.prod(shape):
        raise refused(f"{path}: columns of features", len(named), f"{math.prod(shape)}, as in the run")
    cells = read_cells(path, named, spelling)
    return torch.from_numpy(np.stack([cells.numbers(name) for name in named], 1)).reshape(-1, *shape)


def as_seen(trained: Trained, x: Tensor) -> Tensor:
    """Return rows as the model sees them: standardized, or bytes as 0 to 1, and transformed as the run's own are."""
    experiment = trained.run.experiment
    source: Any = experiment.data.source
    people: Any = trained.host.population
    rows = people.rows
    first, _ = rows.take(torch.zeros(1, dtype=torch.int64))
    if first.dtype != torch.uint8 and getattr(source, "scaled", False):
        directory = experiment.data.folder
        if isinstance(source, CSV) and source.learned is not None:
            names = source.feature_names(directory)
            x = Features("rows", names, x.numpy(), {}).encode(source.learned)
            return prepared(x, first.dtype, experiment.data.transforms)
        unscaled = replace(source, scaled=False)
        plain: Rows = unscaled.load(directory, 0, measured=rows.value is not None)
        fitted_rows = find_known_rows(plain) if rows.fit is None else people.trained_on.unique().long()
        reference = plain.fitted(fitted_rows).x[fitted_rows].numpy().astype(np.float64)
        x = torch.from_numpy(standardize(x.numpy(), reference))
    return prepared(x, first.dtype, experiment.data.transforms)


def prepared(x: Tensor, dtype: torch.dtype, transforms: Sequence[Prepare]) -> Tensor:
    """Return rows of a type as a model sees them: bytes as 0 to 1, and transformed."""
    if dtype == torch.uint8 and not ((x >= 0) & (x <= 255)).all():
        raise refused("rows", "numbers beyond these", "bytes, 0 to 255, as in the run")
    if dtype == torch.int64 and (x % 1 != 0).any():
        raise refused("rows", "numbers that are not whole", "integers, as in the run")
    return apply_transforms(tuple(transforms), features(x.to(dtype)))


def names_of_classes(trained: Models) -> list[str]:
    """Return the names of the run's classes, or their numbers."""
    rows = trained.host.population.rows
    return [str(name) for name in (rows.label_names if isinstance(rows, Rows) else ()) or range(rows.classes)]


def _written(number: float) -> str:
    """Return a number of float32 with six digits, or of large ones all that it has."""
    return f"{number:.6g}" if not abs(number) >= 1000 else np.format_float_positional(np.float32(number), trim="-")


def table_of(columns: Mapping[str, Tensor], texts: Mapping[str, Sequence[str]] | None = None) -> str:
    """Return columns of numbers as CSV, behind columns of texts; texts that a spreadsheet would compute are escaped.

    >>> print(table_of({"value": torch.tensor([1.1, 12345678.0])}), end="")
    value
    1.1
    12345678
    """
    numbers = {name: [*map(_written, column.tolist())] for name, column in columns.items()}
    cells = {name: [*map(escape_formula, column)] for name, column in (texts or {}).items()} | numbers
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(escape_formula, cells))
    writer.writerows(zip(*cells.values(), strict=True))
    return text.getvalue()


def table(logp: Tensor, names: list[str], before: Mapping[str, Sequence[str]] | None = None) -> str:
    """Return predictions as CSV: columns that stand before, the class of each row, and the probabilities of all.

    >>> print(table(torch.tensor([[0.25, 0.75]]).log(), ["no", "yes"]), end="")
    class,p no,p yes
    yes,0.25,0.75
    """
    chances = dict(zip([f"p {name}" for name in names], logp.exp().T, strict=True))
    return table_of(chances, {**(before or {}), "class": [names[best] for best in logp.argmax(1).tolist()]})


ENDINGS: dict[Format, str] = {
    "safetensors": ".safetensors", "onnx": ".onnx", "torch-export": ".pt2", "peft": ".peft", "merged": ".merged",
}  # fmt: skip

CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""Variable of torch with the folder for compiled code."""
CHECKED, FEW = 64, 8
"""How many rows an exported program must predict as the run does, and a large pretrained model."""


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
    def of(trained: Trained, client: int | None, cluster: int | None) -> "Model":
        """Return the model of a run, see `Trained.parts`."""
        parts = trained.parts(client, cluster)
        whose = "server" if client is None else f"client {client}"
        about = described(trained, trained.run.experiment, whose if cluster is None else f"cluster {cluster}")
        return Model(trained.task, parts, trained.trial_rows(CHECKED), about)


def export(model: Model, out: Path, format: Format) -> str:
    """Write the network that predicts rows to a file, and return a description.

    A program takes any number of rows as the model sees them. It returns their log-probabilities, or the columns of
    another target (`Target.columns`) in the units of the data. It is written only if it predicts as the run does.

    Args:
        model: to be written.
        format: "safetensors" for the weights alone, which `init_from` reads, too; "torch-export" or "onnx" for a
            program; "peft" for a folder with adapters. "merged" is the folder of a pretrained model with them.

    Raises:
        FedtideError: several networks predict, a library is missing, or the exported program predicts otherwise.
    """
    parts, about, rows = list(model.parts), dict(model.about), model.rows
    if format in ("safetensors", "peft", "merged"):
        if len(parts) > 1:
            but = f"{len(parts)} networks mixed; allowed: --format torch-export or onnx, or --cluster for one of them"
            raise FedtideError(f"--format: {format} holds the weights of one network, and this is {but}")
        ((weights, _),) = parts
    if format == "peft":
        return f"adapters and head of {save_adapters(module_of(model.task, parts), out, about):,} numbers"
    if format == "merged":
        return _merged(model.task, module_of(model.task, parts), rows[:FEW], out, about)
    if format == "safetensors":
        arrays = {name: value.contiguous().clone() for name, value in (weights.params | weights.buffers).items()}
        try:
            with replacing(out, new=True) as file:
                save_file(arrays, file, metadata=about)
        except SafetensorError as error:
            raise FedtideError(f"{out}: cannot be written ({error})") from None
        return f"weights of {sum(array.numel() for array in arrays.values()):,} numbers in {len(arrays)} arrays"
    program = Predicting(module_of(model.task, parts), model.task.target).eval()
    with torch.no_grad():
        expected = program(rows)
    with replacing(out, new=True) as file:
        named = file.with_name(file.name + ENDINGS[format])  # exporters look at the ending
        try:
            with _quiet(), _without_cache():
                outputs = (_torch_export if format == "torch-export" else _onnx)(program, rows, named, about)
            if not agree(model.task, outputs, expected):
                raise FedtideError(f"--format: what {format} makes of this model predicts otherwise; allowed: another")
            named.replace(file)
        finally:
            named.unlink(missing_ok=True)
    returns = listed(columns_of(model.task.target)) or f"{expected.shape[-1]} log-probabilities each"
    return f"program that takes rows {tuple(rows.shape[1:])} and returns {returns}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warnings of exporters, and turn their failures into one line."""
    before = {logger: logger.level for logger in map(logging.getLogger, ("torch.onnx", "onnxscript"))}
    for logger in before:
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
        for logger, level in before.items():
            logger.setLevel(level)


@contextmanager
def _without_cache() -> Iterator[None]:
    """Have torch keep compiled code in a folder that is removed; else it leaves one among the temporary files."""
    if CACHE in os.environ:
        yield
        return
    with TemporaryDirectory() as os.environ[CACHE]:
        try:
            yield
        finally:
            del os.environ[CACHE]


class Predicting(nn.Module):
    """A network that returns log-probabilities, or the columns of another target."""

    def __init__(self, network: nn.Module, target: Target) -> None:
        super().__init__()
        self.network = network
        self.target = target

    def forward(self, x: Tensor) -> Tensor:
        """Return log-probabilities (rows, classes), or columns (rows, columns)."""
        outputs = self.target.read_outputs(self.network(x))
        columns = self.target.columns(outputs)
        return torch.stack(list(columns.values()), -1) if columns else outputs


def columns_of(target: Target) -> list[str]:
    """Return the names of a target's columns; none for classes."""
    return list(target.columns(torch.zeros(1, target.width)))


def described(trained: Models, experiment: Experiment, whose: str) -> dict[str, str]:
    """Return the description in the file of a model."""
    target = trained.task.target
    labels: dict[str, Any] = {"target": vars(target), "columns": columns_of(target)}
    if target == CLASSES:
        labels = {"classes": names_of_classes(trained)}
    return {
        "fedtide": installed(),
        "run": trained.title,
        "rounds": str(trained.moment.round + 1),
        "whose": whose,
        "model": json.dumps(resolved(experiment)["model"]),
        "shape": json.dumps(list(trained.host.population.rows.shape)),
        **{key: json.dumps(value) for key, value in labels.items()},
        "format": "pt",
    }


def _torch_export(program: nn.Module, rows: Tensor, file: Path, about: dict[str, str]) -> Tensor:
    """Write a program for `torch.export.load`, and return its predictions after it is read again."""
    exported = torch.export.export(program, (rows,), dynamic_shapes={"x": {0: torch.export.Dim("rows", min=1)}})
    torch.export.save(exported, file, extra_files=about)
    read: Any = torch.export.load(file).module()
    return torch.cat([read(rows[:1]), read(rows[1:])])


def _merged(task: Task, network: nn.Module, rows: Tensor, out: Path, about: dict[str, str]) -> str:
    """Write a folder with adapters merged, and return a description."""
    check_new(out)
    with making(out) as folder, torch.no_grad():
        merged = save_merged(network, folder)
        if not agree(task, *(Predicting(one, task.target)(rows) for one in (merged, network))):
            raise FedtideError("--format: the merged model predicts otherwise; allowed: another, such as peft")
        (folder / "fedtide.json").write_text(json.dumps(about), encoding="utf-8")
    return f"pretrained model of {sum(param.numel() for param in merged.parameters()):,} numbers with adapters merged"


def check_onnx() -> None:
    """Raise if the libraries for ONNX are missing."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        try:
            __import__(name)
        except ImportError:
            raise uninstalled(f"--format: onnx needs {name}", "onnx") from None


def _onnx(program: nn.Module, rows: Tensor, file: Path, about: dict[str, str]) -> Tensor:
    """Write a program for ONNX, and return the predictions of onnxruntime."""
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
