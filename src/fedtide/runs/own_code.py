"""Files of a person's own code that an experiment names, as they were when its run began."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fedtide.core.atomic import sha256
from fedtide.core.errors import UNREADABLE

NAMED = re.compile(r'\b(?:algorithm|function) = "([A-Za-z_][\w.]*):')
"""What names code in a configuration, as it is written out."""


def code_of(configurations: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return of each module that configurations name its file, the digest of that, and the commit that git knows.

    >>> sorted(code_of(['function = "json:loads"'])["json"])[-1]
    'sha256'
    """
    names = {name: None for text in configurations for name in NAMED.findall(text)}
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in names}
    return {
        name: {"file": file, "sha256": sha256(Path(file)), **_commit(Path(file))}
        for name, file in files.items()
        if file is not None and Path(file).is_file()
    }


def _commit(file: Path) -> dict[str, Any]:
    """Return the commit of the folder that a file is in, and whether the file has changed since; {} without git."""
    try:
        commit = _git(file, "rev-parse", "HEAD").strip()
        return {"commit": commit, "changed": bool(_git(file, "status", "--porcelain", "--", file.name))}
    except (OSError, subprocess.SubprocessError):
        return {}


def _git(file: Path, *arguments: str) -> str:
    command = ["git", "-C", str(file.parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout


def changed_since(root: Path) -> Iterator[str]:
    """Yield the files of code that are not what they were when a run folder was made."""
    try:
        known = json.loads((root / "environment.json").read_text(encoding="utf-8")).get("code", {})
        for module in known.values():
            file = Path(module["file"])
            if not file.is_file() or sha256(file) != module["sha256"]:
                yield str(file)
    except (OSError, *UNREADABLE):
        return  # no run needs the file
