"""Image files read with Pillow, and caches of their pixels."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedtide.core.atomic import replacing
from fedtide.core.errors import FedtideError, refused
from fedtide.data.sources.files import Loading, reading

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
    with reading(where, "a picture", image.DecompressionBombError), image.open(io.BytesIO(data)) as opened:
        picture = opened.convert("L" if channels == 1 else "RGB")
        if size is not None and picture.size != (size, size):
            picture = picture.resize((size, size), image.Resampling.BILINEAR)
        found = np.asarray(picture)
    return found[None] if channels == 1 else np.ascontiguousarray(found.transpose(2, 0, 1))


def same_size(where: str, found: np.ndarray, first: np.ndarray) -> None:
    """Raise if the size of an image differs from that of the first."""
    if found.shape != first.shape:
        size, wanted = (f"{p.shape[2]} x {p.shape[1]}" for p in (found, first))
        raise refused(f"{where}: pixels", size, f"{wanted}, as the first picture")


class Cached(Loading):
    """A source that may keep its pixels in an `.npz` file, which changes no result."""

    cache: str | None

    def uncached(self) -> Any:
        """Return the source without its cache."""
        return replace(self, cache=None)  # type: ignore[type-var]

    def kept(self, key: Callable[[], str], names: tuple[str, ...], read: Callable[[], Arrays]) -> Arrays:
        """Return the arrays cached under a key; otherwise those that `read` makes, which are then cached.

        Args:
            key: function to an identifier of the arrays; the file is replaced if it has another one.
            names: names of the arrays.
            read: the function that makes them.
        """
        if self.cache is None:
            return read()
        cache, wanted = Path(self.cache).expanduser(), key()
        if cache.exists():
            what = "a cache: delete it"
            with reading(f"data.source.cache: {cache}", what), open(cache, "rb") as file, np.load(file) as found:
                if str(found["key"]) == wanted:
                    return {name: found[name] for name in names}
        arrays = read()
        try:
            cache.parent.mkdir(parents=True, exist_ok=True)
            with replacing(cache) as temporary, open(temporary, "wb") as written:
                np.savez(written, key=np.array(wanted), **arrays)  # type: ignore[arg-type]
        except OSError as error:
            raise FedtideError(f"data.source.cache: cannot write {cache} ({error})") from None
        return arrays
