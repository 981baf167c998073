"""Files of pretrained models on this machine: a folder, a GGUF file, or what an installed package has."""

import importlib.util
import io
import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import torch
from safetensors.torch import save_file

from fedtide.core.atomic import making, sha256
from fedtide.core.errors import FedtideError, refused
from fedtide.fields.types import IsFile
from fedtide.models.adapters import SETTINGS, library

NOWHERE = "nothing is downloaded: allowed: a folder with config.json and a file of safetensors, or a GGUF file"
"""Advice if there is no model."""
ModelPath = Annotated[str, IsFile(NOWHERE)]

CONFIG, WEIGHTS, GGUF = "config.json", "*.safetensors", "*.gguf"
OTHERS = "tokenizer*.json", "*.safetensors.index.json", "special_tokens_map.json", "added_tokens.json"
"""Further files of a folder that the library reads if they are there."""
LOCAL = MappingProxyType({"local_files_only": True, "trust_remote_code": False})
"""How the library reads a folder: nothing is downloaded, and no code of the folder runs."""


def find_model(path: str | None, package: str | None, key: str | None = None) -> Path:
    """Return the folder of a model, by its path or the package that has it; a GGUF file is converted once.

    Raises:
        FedtideError: there is no model, or more than one.
    """
    where = locate_model(path, package, key)
    return where if where.is_dir() else _converted(where, key or f"model.{'path' if package is None else 'package'}")


def locate_model(path: str | None, package: str | None, key: str | None = None) -> Path:
    """Return the folder or the GGUF file of a model, by its path or the package that has it; nothing is run or changed.

    Args:
        path: a folder or a file; None if there is a package.
        package: an installed package.
        key: what says so, for error messages; None is `model.path` or `model.package`.

    Raises:
        FedtideError: there is no model, or more than one, or it has adapters of its own.
    """
    key = key or f"model.{'path' if package is None else 'package'}"
    where = _folder_of_package(package, key) if package is not None else Path(str(path)).expanduser()
    if not where.exists():
        raise FedtideError(f"{key}: no such file or folder: {where}; {NOWHERE}")
    if where.is_file():
        files = [where] if where.suffix == GGUF[1:] else []
    else:
        folders = [file.parent for file in sorted(where.rglob(CONFIG)) if any(file.parent.glob(WEIGHTS))]
        files = folders or sorted(where.rglob(GGUF))
    if not files:
        raise FedtideError(f"{key}: {where}: found no model; {NOWHERE}")
    if len(files) > 1:
        raise refused(f"{key}: {where}", f"{len(files)} models", f"one, such as path = '{files[0]}'")
    if (files[0] / SETTINGS).exists():  # the library would load them, too, and from a pickle if there is no other file
        allowed = "a model without adapters of its own; '--format merged' of export, or PEFT, merges them"
        raise refused(f"{key}: {files[0]}", SETTINGS, allowed)
    return files[0]


def digests_of_model(where: Path) -> dict[str, str]:
    """Return the digests of a model's files by their names; see `locate_model`.

    A GGUF file counts as it is, under any name, because what it is converted to depends on versions.

    Raises:
        FedtideError: a file is missing.
    """
    if where.is_file():
        return {"GGUF": sha256(where)}
    return {file.name: sha256(file) for file in model_files(where)}


def has_model(folder: Path) -> bool:
    """Tell whether a folder has a model somewhere."""
    return folder.is_dir() and any(True for kind in (CONFIG, GGUF) for _ in folder.rglob(kind))


def _folder_of_package(package: str, key: str) -> Path:
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        but = "nothing is downloaded at run time"
        raise refused(key, package, "an installed package with a model, as `pip install` gets it", but)
    return Path(spec.submodule_search_locations[0])


def cache_folder() -> Path:
    """Return the folder of what was converted: `FEDTIDE_CACHE`, else that of the user."""
    named = os.environ.get("FEDTIDE_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedtide"


def _converted(file: Path, key: str) -> Path:
    """Return the folder of a GGUF file's model, with weights in float32."""
    folder = cache_folder() / "models" / f"{file.stem}-{_digest_of(file, file.stat().st_mtime_ns)[:16]}"
    if folder.is_dir():
        return folder
    transformers = library("transformers", key)
    library("gguf", key)
    from_file = {"gguf_file": file.name, **LOCAL}
    print(f"fedtide: {key}: converting {file.name} once, which takes a minute, to {folder}", file=sys.stderr)
    with quiet(transformers), redirect_stderr(io.StringIO()), _made_once(folder) as temporary:
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(file.parent), **from_file)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                str(file.parent), dtype=torch.float32, **from_file
            )
        except Exception as error:  # whatever the reader raises for bytes that are none of its own
            raise FedtideError(f"{key}: {file}: damaged or not a GGUF file that transformers reads ({error})") from None
        save_file(
            {name: param.detach().contiguous() for name, param in model.named_parameters()},
            temporary / "model.safetensors", {"format": "pt"},
        )  # fmt: skip
        config = {name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
        (temporary / CONFIG).write_text(json.dumps(config, default=str), encoding="utf-8")
        tokenizer.save_pretrained(temporary)
    return folder


@lru_cache(maxsize=4)
def _digest_of(file: Path, changed: int) -> str:
    """Return the digest of a file that was changed at a time, which is read once."""
    del changed
    return sha256(file)


@contextmanager
def _made_once(folder: Path) -> Iterator[Path]:
    """A new folder, which is left out if another process has it first."""
    try:
        with making(folder) as temporary:
            yield temporary
    except OSError:
        if not (folder / CONFIG).is_file():
            raise


def model_files(folder: Path) -> list[Path]:
    """Return the files of a model that decide numbers."""
    return [folder / CONFIG, *(file for names in (WEIGHTS, *OTHERS) for file in sorted(folder.glob(names)))]


def stamps_of(folder: Path) -> tuple[tuple[str, int], ...]:
    """Return the files of a model with the times of their last changes."""
    return tuple((str(file), file.stat().st_mtime_ns) for file in model_files(folder))


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Let the library print and draw nothing, and leave it as it was."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of parts that the library itself uses
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
