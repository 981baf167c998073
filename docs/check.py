"""Runs the examples of the documentation: python docs/check.py [PAGE ...]

Each page has a folder, with the files of docs/examples in it, and a Python session of its own. Blocks of `pycon` are
doctests, blocks of `python` are run, blocks with `title="name"` are written to that file. A block of `toml` must be a
valid experiment or become one with what is in BASE. Of `sh` the lines that start with `fedtide` are run. Blocks marked
`.norun` are left out.
"""

from __future__ import annotations

import doctest
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from fedtide.config import from_dict, read
from fedtide.core.errors import FedtideError

DOCS = Path(__file__).resolve().parent
BASE = {"method": [{"algorithm": "fedavg"}]}
BLOCK = re.compile(r"^```(?P<head>[^\n`]+)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


def check(page: Path) -> int:
    """Run a page's blocks in order; how many there were."""
    session: dict[str, object] = {"__name__": "__main__"}
    count = 0
    for found in BLOCK.finditer(page.read_text(encoding="utf-8")):
        head, body = found["head"], found["body"]
        kind, title = head.split()[0], re.search(r'title="([^"]+)"', head)
        if ".norun" in head:
            continue
        print(f"  {kind} {title[1] if title else body.splitlines()[0][:60]}", flush=True)
        if title:
            Path(title[1]).write_text(body, encoding="utf-8")
        if kind == "pycon":
            _doctest(page, body, session)
        elif kind == "python" and not title:
            exec(compile(body, f"{page.name}: {body.splitlines()[0]}", "exec"), session)
        elif kind == "toml":
            _experiment(title[1] if title else "", body)
        elif kind == "sh":
            _commands(body)
        count += 1
    return count


def _doctest(page: Path, body: str, session: dict[str, object]) -> None:
    runner = doctest.DocTestRunner()
    test = doctest.DocTestParser().get_doctest(body, session, page.name, page.name, 0)
    runner.run(test, clear_globs=False)
    session.update(test.globs)  # a doctest has a copy of the session
    if runner.failures:
        raise SystemExit(f"{page.name}: an example failed")


def _experiment(file: str, body: str) -> None:
    if file:
        read(file)
        return
    values = tomllib.loads(body)
    try:
        from_dict(values if "method" in values else {**BASE, **values})
    except FedtideError as error:
        raise SystemExit(f"{error}\n{body}") from None


def _commands(body: str) -> None:
    for line in body.splitlines():
        if line.startswith("fedtide "):
            command = line.partition("#")[0].replace("recipe:demo", "recipe:demo --scale nano")
            print(f"    {command}", flush=True)
            subprocess.run([sys.executable, "-m", *command.split()], check=True, stdout=subprocess.DEVNULL)


def main(names: list[str]) -> None:
    """Check some pages, or all."""
    sys.path.insert(0, "")
    sys.dont_write_bytecode = True
    for page in [DOCS / name for name in names] or sorted(DOCS.rglob("*.md")):
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            for file in (DOCS / "examples").glob("*.py"):
                shutil.copy(file, folder)
            print(page.name, flush=True)
            count = check(page)
            os.chdir(DOCS)
        print(f"  {count} blocks run", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
