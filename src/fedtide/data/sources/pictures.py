"""Image files read with Pillow, and caches of their pixels."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedtide.core.atomic import replacing
from fedtide.core.errors import FedtideError

Arrays = Mapping[str, np.ndarray]


def pillow(kind: str) -> Any:
    """Return Pillow's Image module, which a source of this kind needs."""
    try:
        from PIL import Image
    except ImportError:
        raise FedtideError(f"data.source.kind: '{kind}' needs Pillow; pip install \"fedtide[data]\"") from None
    return Image


def pixels(where: str, image: Any, data: bytes, channels: int, size: int | None = None) -> np.ndarray:
    """Read the pixels (channels, height, width) of one image file.

    Args:
        where: the file, for the error message.
        image: the result of `pillow`.
        data: bytes of the file.
        channels: 3 for color, 1 for gray.
        size: height and width to resize to; None keeps the size of the image.
    """
    try:
        with image.open(io.BytesIO(data)) as opened:
            picture = opened.convert("L" if channels == 1 else "RGB")
            if size is not None and picture.size != (size, size):
                picture = picture.resize((size, size), image.Resampling.BILINEAR)
            found = np.asarray(picture)
    except (OSError, ValueError, SyntaxError, EOFError, zlib.error, image.DecompressionBombError) as error:
        raise FedtideError(f"{where}: damaged or not a picture ({error})") from None
    return found[None] if channels == 1 else np.ascontiguousarray(found.transpose(2, 0, 1))


def same_size(where: str, found: np.ndarray, first: np.ndarray) -> None:
    """Raise if the size of an image differs from that of the first."""
    if found.shape != first.shape:
        sizes = [f"{p.shape[2]} x {p.shape[1]}" for p in (found, first)]
        raise FedtideError(f"{where}: found {sizes[0]} pixels, allowed: {sizes[1]}, as the first picture")


def cached(cache: Path, key: str, names: tuple[str, ...], read: Callable[[], Arrays]) -> Arrays:
    """Return the arrays cached under a key; otherwise call `read` and cache its result.

    Args:
        cache: the `.npz` file.
        key: identifier of the arrays; the file is replaced if it has another one.
        names: names of the arrays.
        read: the function that makes them.
    """
    if cache.exists():
        try:
            with open(cache, "rb") as file, np.load(file, allow_pickle=False) as kept:
                if str(kept["key"]) == key:
                    return {name: kept[name] for name in names}
        except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise FedtideError(f"data.source.cache: {cache} is damaged or no cache ({error}); delete it") from None
    arrays = read()
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with replacing(cache) as temporary, open(temporary, "wb") as written:
            np.savez(written, key=np.array(key), **arrays)  # type: ignore[arg-type]
    except OSError as error:
        raise FedtideError(f"data.source.cache: cannot write {cache} ({error})") from None
    return arrays
