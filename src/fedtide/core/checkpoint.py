"""Checkpoints: safetensors and JSON, written under a temporary name and renamed; never pickle.

A checkpoint is a folder `checkpoints/<round>` with the server's state, the clients' memory, and how long each record
file was, so that a resumed run continues the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtide.core import codec
from fedtide.core.errors import FedtideError
from fedtide.core.loop import Start
from fedtide.core.memory import MemoryStore

FILES = ("state.safetensors", "memory.safetensors")

FORMAT = 1
"""The version of what is written; raised whenever an older checkpoint can no longer be read."""


@dataclass(frozen=True)
class Resumed:
    """A checkpoint read back: where to start, and the length in bytes of each record file at that moment."""

    start: Start[Any]
    lengths: Mapping[str, int]


def save(
    folder: Path, start: Start[Any], memory: MemoryStore, *, config: str, lengths: Mapping[str, int], keep: int = 1
) -> None:
    """Write the checkpoint for the round that `start` plays next, then remove all but the newest `keep`.

    Args:
        folder: the run's `checkpoints` folder.
        start: state, next round and clock.
        memory: the clients' memory; it is told that its older versions are not needed any more.
        config: digest of the configuration, compared when the checkpoint is read.
        lengths: bytes of each record file that belong to the rounds before.
        keep: how many checkpoints stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    now = (start.round, 0)
    temporary = folder / f"writing-{start.round:08d}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    codec.to_file(temporary / "state.safetensors", start.state)
    memory.save(temporary / "memory.safetensors", now)
    about = {
        "format": FORMAT,
        "config": config,
        "round": start.round,
        "seconds": start.seconds,
        "before": start.before,
        "lengths": dict(lengths),
        "sha256": {name: _digest(temporary / name) for name in FILES},
    }
    (temporary / "checkpoint.json").write_text(json.dumps(about | {"sum": _sum(about)}, indent=1) + "\n")
    for path in temporary.iterdir():
        _flush(path)
    final = folder / f"{start.round:08d}"
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)
    _flush(folder)
    memory.settle(now)
    _remove_old(folder, keep)


def _remove_old(folder: Path, keep: int) -> None:
    for old in [*_written(folder)[:-keep], *folder.glob("writing-*")]:
        shutil.rmtree(old)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _written(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("[0-9]*") if path.is_dir()) if folder.is_dir() else []


def newest_state(folder: Path) -> Path:
    """The file with the server's state in the newest checkpoint, whatever configuration wrote it.

    Raises:
        FedtideError: there is no checkpoint.
    """
    written = _written(folder)
    if not written:
        raise FedtideError(f"{folder}: found no checkpoint, allowed: the folder of a run that has one")
    return written[-1] / FILES[0]


def check(folder: Path, *, config: str) -> dict[str, Any] | None:
    """What the newest checkpoint says of itself; None if there is none yet.

    Raises:
        FedtideError: it is damaged, or was written by another configuration or an unreadable version.
    """
    written = _written(folder)
    if not written:
        return None
    about = _about(written[-1])
    if about["config"] != config:
        raise FedtideError(
            f"{written[-1]}: this checkpoint belongs to another configuration (digest {about['config']}, "
            f"now it is {config}); restore config.toml and the files that it names, or start a new run folder"
        )
    return about


def load(folder: Path, memory: MemoryStore, *, config: str) -> Resumed | None:
    """Read the newest checkpoint and restore the clients' memory; None if there is none yet.

    What a process that was killed left of older checkpoints and memory is removed.

    Raises:
        FedtideError: the checkpoint is damaged, or was written by another configuration or an unreadable version.
    """
    about = check(folder, config=config)
    if about is None:
        return None
    newest = _written(folder)[-1]
    for name, digest in about["sha256"].items():
        if _digest(newest / name) != digest:
            raise FedtideError(f"{newest / name}: damaged (its sha256 is not the one that was written)")
    state = codec.from_file(newest / "state.safetensors")
    memory.restore(newest / "memory.safetensors", (about["round"], 0))
    _remove_old(folder, keep=1)
    return Resumed(Start(state, about["round"], about["seconds"], about.get("before", 0.0)), about["lengths"])


def _about(folder: Path) -> dict[str, Any]:
    path = folder / "checkpoint.json"
    try:
        about: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found, claimed = about["format"], about.pop("sum", None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FedtideError(f"{path}: damaged or missing ({type(error).__name__}: {error})") from None
    if found != FORMAT:
        raise FedtideError(f"{path}: found format {found!r}, allowed: {FORMAT}; it was written by another version")
    if claimed != _sum(about):
        raise FedtideError(f"{path}: damaged (its content is not what was written)")
    return about


def _sum(about: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _digest(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise FedtideError(f"{path}: missing") from None
