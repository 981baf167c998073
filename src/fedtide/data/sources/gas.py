"""Drifting gas sensors: 128 features of 16 chemical sensors over 36 months, in ten batches."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Literal

import numpy as np

from fedtide.core.errors import FedtideError, refused, unknown
from fedtide.data.rows import Rows
from fedtide.data.sources.arrays import from_arrays, standardize
from fedtide.data.sources.cells import number
from fedtide.data.sources.files import Loading, folder_of, reading
from fedtide.fields.types import Flag, ingredient

GASES = ("ethanol", "ethylene", "ammonia", "acetaldehyde", "acetone", "toluene")
"""Classes in the order of their published numbers 1 to 6."""
LABELS = {name: k for k, name in enumerate(GASES)} | {str(k): k - 1 for k in range(1, len(GASES) + 1)}
FEATURES = 128
PLACES = [f"{place}:" for place in range(1, FEATURES + 1)]
"""Which number a feature has, as published before its value."""


@ingredient
class GasSensors(Loading):
    """A folder with some or all of `batch1.dat`, `batch2.dat`, ...: Gas Sensor Array Drift of the UCI repository.

    A line is a sample: as published, `gas;concentration 1:number 2:number ...` (in a later version without the
    concentration), or separated by commas, `gas,concentration,number,...`; the gas is the label, by its name or its
    number from 1 to 6. The time of a sample is the number of its batch. The batches cover unequal spans of 36 months.

    Args:
        path: the folder, below the data directory or absolute.
        scaled: standardize each feature by its mean and standard deviation in the first batch present; unscaled
            features differ by a factor of ten thousand.
    """

    path: str
    scaled: Flag = True
    kind: Literal["gas-sensors"] = "gas-sensors"

    def load(self, directory: Path | None, seed: int) -> Rows:
        """Read the batches in the folder, in order."""
        folder = folder_of(self.path, directory)
        found = {int(path.stem[5:]): path for path in folder.glob("batch*.dat") if path.stem[5:].isdecimal()}
        if not found:
            raise FedtideError(f"{folder}: no file called batch1.dat, batch2.dat, ...")
        batches = {number: _batch(found[number]) for number in sorted(found)}
        x = np.concatenate([x for x, _ in batches.values()])
        if self.scaled:
            x = standardize(x, next(iter(batches.values()))[0])
        y = np.concatenate([y for _, y in batches.values()])
        time = np.repeat(np.array(list(batches), np.float64), [len(y) for _, y in batches.values()])
        return replace(from_arrays(folder.name, x.astype(np.float32), y, time=time), classes=len(GASES))


def _batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return features and labels of one file."""
    with reading(path, "a text file"):
        lines = path.read_text(encoding="utf-8").splitlines()
    samples = [_sample(f"{path}: row {row}", line) for row, line in enumerate(lines, start=1) if line.strip()]
    if not samples:
        raise FedtideError(f"{path}: no rows")
    return np.array([x for x, _ in samples]), np.array([y for _, y in samples])


def _sample(where: str, line: str) -> tuple[list[float], int]:
    if "," in line:
        gas, _, *cells = line.split(",")
    else:
        first, *pairs = line.split()
        gas = first.partition(";")[0]
        cells = [pair.removeprefix(place) for place, pair in zip(PLACES, pairs, strict=False)] + pairs[FEATURES:]
    if gas.strip().lower() not in LABELS:
        raise unknown(f"{where}: gas", gas.strip(), [*GASES, f"1 to {len(GASES)}"])
    if len(cells) != FEATURES:
        raise refused(f"{where}: number of features", len(cells), f"{FEATURES}")
    return _numbers(where, cells), LABELS[gas.strip().lower()]


def _numbers(where: str, cells: list[str]) -> list[float]:
    text = "".join(cells)
    with suppress(ValueError):
        if text.isascii() and "_" not in text and all(map(isfinite, found := list(map(float, cells)))):
            return found
    return [number(where, f"feature {place}", cell) for place, cell in enumerate(cells, start=1)]  # one is none
