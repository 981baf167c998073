"""Columns of Parquet files, which a person may give where a CSV file is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedtide.core.errors import FedtideError
from fedtide.data.sources.column import Column, columns_of
from fedtide.data.sources.files import check_unpacked, reading


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise FedtideError(f'{path}: a Parquet file needs pyarrow; pip install "fedtide[data]"') from None
    with reading(path, "a Parquet file", ArrowException), ParquetFile(path) as file:
        about = file.metadata
        groups = sum(about.row_group(number).total_byte_size for number in range(about.num_row_groups))
        check_unpacked(path, max(groups, 8 * about.num_rows * about.num_columns))
        yield file


def is_parquet(path: Path) -> bool:
    """Tell whether a file begins as Parquet files do."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(4) == b"PAR1"


def names_of(path: Path) -> list[str]:
    """Return the names of the columns."""
    with _opened(path) as file:
        return list(file.schema_arrow.names)


def read_columns(path: Path, names: Sequence[str]) -> dict[str, Column]:
    """Read some columns."""
    with _opened(path) as file:
        return columns_of(file.read(columns=list(names)), str(path))
