"""Runs the examples of the documentation: python pages/check.py [PAGE ...]

Each page has a folder and a Python session of its own, and as many pages run as there are cores. In the folder are the
files of docs/examples and every block of any page that has `title="name"`. Blocks of `pycon` are doctests, blocks of
`python` are run. Blocks of `toml` must be a valid experiment, or become one with BASE. Its population must be possible,
unless its data are not here. Of `sh` the lines that start with `fedtide` are run. Blocks marked `.norun` are left out.
Examples of the reference are doctests of the package, and run with its tests.
"""

import doctest
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stdout
from multiprocessing import get_context
from pathlib import Path

from fedtide.config import from_dict, read
from fedtide.core.errors import FedtideError
from fedtide.data.population_builder import build
from fedtide.runs.build import rows_of

DOCS = Path(__file__).resolve().parents[1] / "docs"
BASE = {"method": [{"algorithm": "fedavg"}]}
BLOCK = re.compile(r"^```(?P<head>[^\n`]+)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r'title="([^"]+)"')


def check(page: Path) -> int:
    """Run a page's blocks in order; how many there were."""
    session: dict[str, object] = {"__name__": "__main__"}
    _files()
    count = 0
    for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
        head, body = block["head"], block["body"]
        kind, title = head.split()[0], TITLE.search(head)
        if ".norun" in head:
            continue
        print(f"  {kind} {title[1] if title else body.splitlines()[0][:60]}")
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


def _files() -> None:
    for file in (DOCS / "examples").glob("*.py"):
        shutil.copy(file, file.name)
    for page in DOCS.rglob("*.md"):
        for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
            if title := TITLE.search(block["head"]):
                Path(title[1]).write_text(block["body"], encoding="utf-8")


def _doctest(page: Path, body: str, session: dict[str, object]) -> None:
    runner = doctest.DocTestRunner()
    test = doctest.DocTestParser().get_doctest(body, session, page.name, page.name, 0)
    runner.run(test, clear_globs=False)
    session.update(test.globs)  # a doctest has a copy of the session
    if runner.failures:
        raise SystemExit(f"{page.name}: an example failed")


def _experiment(file: str, body: str) -> None:
    values = tomllib.loads(body)
    try:
        experiment = read(file) if file else from_dict(values if "method" in values else {**BASE, **values})
        data = experiment.data
        rows = rows_of(experiment, 0)
        dealt = (data.partition, data.groups, data.split, data.held_out_clients)
        build(rows, *dealt, experiment.shift, transforms=data.transforms, public_samples=data.public_samples)
    except FedtideError as error:
        if "no such file or folder" not in str(error):
            raise SystemExit(f"{error}\n{body}") from None
        print(f"    not here: {error}")


def _commands(body: str) -> None:
    for line in body.splitlines():
        if line.startswith("fedtide "):
            command = line.partition("#")[0].replace("recipe:demo", "recipe:demo --scale nano")
            print(f"    {command}", flush=True)
            subprocess.run([sys.executable, "-m", *command.split()], check=True, stdout=subprocess.DEVNULL)


def main(names: list[str]) -> None:
    """Check some pages, or all."""
    pages = sorted(path for path in DOCS.rglob("*.md") if path.parent.name != "reference")
    pages.sort(key=lambda path: -path.read_text(encoding="utf-8").count("\nfedtide "))  # the longest begin first
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for page in as_completed([pool.submit(check_alone, page) for page in [DOCS / name for name in names] or pages]):
            print(page.result(), end="", flush=True)


def check_alone(page: Path) -> str:
    """Run a page's blocks in a folder of their own, and return what is to be printed."""
    sys.path.insert(0, "")
    sys.dont_write_bytecode = True
    output = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(output):
        os.chdir(folder)
        print(page.name)
        try:
            print(f"  {check(page)} blocks run")
        except BaseException:
            sys.stderr.write(output.getvalue())  # what failed stands there
            raise
        finally:
            os.chdir(DOCS)
    return output.getvalue()


if __name__ == "__main__":
    main(sys.argv[1:])
