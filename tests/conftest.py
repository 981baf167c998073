"""Shared by all tests: one pool of worker processes, one torch thread."""

import gc
import os
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.doctest import DoctestModule
from hypothesis import settings

from fedtide.fleets.pool import Pool
from fedtide.fleets.ray_pool import RayPool
from fedtide.fleets.this_machine import cores
from helpers.shell import Shell

ROOT = Path(__file__).parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="play whole recipes, all laws and what takes long")


@pytest.fixture(scope="session")
def thorough(request: pytest.FixtureRequest) -> bool:
    """Whether what is much like what was tried is tried as well."""
    return bool(request.config.getoption("--thorough"))


def pytest_xdist_auto_num_workers() -> int:
    """One process more than there are cores: tests wait for commands, workers and actors that they started."""
    return cores() + 1


def pytest_configure(config: pytest.Config) -> None:
    """Let hypothesis find the same examples each time, and all that tests ask for with `--thorough`, else half of them
    (`helpers.examples`)."""
    percent = 100 if config.getoption("--thorough") else 50
    settings.register_profile("fedtide", max_examples=percent, deadline=None, derandomize=True)
    settings.load_profile("fedtide")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for no examples in docstrings of tests: there are none, and looking takes seconds."""
    collectors = yield
    return [each for each in collectors if not isinstance(each, DoctestModule)]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without garbage collection: all that is made stays, and what comes later is looked at less often."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(20_000)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable(
    report: pytest.CollectReport | pytest.TestReport,
) -> Generator[None, dict[str, Any] | None, dict[str, Any] | None]:
    """Send no words for `-k` with the report of what passed: they take a tenth of the time of a small test."""
    sent = yield
    if sent is not None and isinstance(report, pytest.TestReport) and report.passed:
        sent["keywords"] = {}
    return sent


SHARED = ("actors", "pool", "shell")
"""Fixtures of the session that take seconds to begin."""

LONG = ("deploy", "actors", "shell", "pool", "test_recipes", "test_recommend")
"""Groups of tests that take longest, which begin first, so that none of them is alone at the end."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several processes: an algorithm's laws in one, all that share what takes seconds to begin in one, and the
    other tests of a file in one. Long groups first, then those with many tests."""
    if not config.getoption("--thorough"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("thorough")])
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]
    group = {}
    for item in items:
        mark = item.get_closest_marker("xdist_group")
        shared = [name for name in SHARED if name in getattr(item, "fixturenames", ())]
        group[item] = mark.args[0] if mark else (shared or [item.path.stem])[0]
        if mark is None:
            item.add_marker(pytest.mark.xdist_group(group[item]))
    if config.getoption("loadgroup", False):
        sizes = Counter(group.values())
        rank = dict.fromkeys(sizes, len(LONG)) | {name: place for place, name in enumerate(LONG)}
        items.sort(key=lambda item: (rank[group[item]], -sizes[group[item]], group[item]))


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Two worker processes, beside this one, for the whole session."""
    with Pool(3, joined=True) as workers:
        yield workers


CLUSTER = pytest.StashKey[ExitStack]()
"""Ends the actors."""


@pytest.fixture(scope="session")
def actors(pytestconfig: pytest.Config) -> Iterator[RayPool]:
    """Two actors of a Ray cluster of our own, for the whole session; skipped without Ray."""
    if find_spec("ray") is None:  # not imported: it is quiet only where the pool is the first to do so
        pytest.skip("Ray is not installed")
    with ExitStack() as stack:
        pytestconfig.stash[CLUSTER] = stack
        yield stack.enter_context(RayPool(2))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the actors after the last test of their group: a cluster takes CPU while it waits."""
    theirs, next_ones = ("actors" in getattr(each, "fixturenames", ()) for each in (item, nextitem))
    if item.config.getoption("loadgroup", False) and theirs and not next_ones and CLUSTER in item.config.stash:
        item.config.stash[CLUSTER].close()


@pytest.fixture(scope="session")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """Starts commands; it has loaded what they would load late."""
    late = ("fedtide.runs.experiment", "fedtide.report.page", "optuna", "torch.fx.experimental.symbolic_shapes")
    made = Shell(tmp_path_factory.mktemp("shell"), late)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


LAID_OUT = ("test_ends", "test_kills", "test_recipes")
"""Files whose reports have pictures as a person has them, or as another process draws them."""


@pytest.fixture(scope="module", autouse=True)
def _as_they_come(request: pytest.FixtureRequest, thorough: bool) -> Iterator[None]:
    """Elsewhere, but with `--thorough`, panels of pictures stay where they are put: a layout measures every text, which
    takes as long as to draw it."""
    figures = sys.modules.get("fedtide.draw.figures")  # not imported: few need it
    with pytest.MonkeyPatch.context() as patch:
        if figures is not None and not thorough and request.path.stem not in LAID_OUT:
            patch.setitem(figures.STYLE, "figure.constrained_layout.use", False)
        yield


@pytest.fixture
def mine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A person's own module `mine` in the current folder: what the tests' file has in `MINE`."""
    (tmp_path / "mine.py").write_text(request.module.MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield
    sys.modules.pop("mine", None)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with the real data sets, for tests marked `shared`."""
    named = os.environ.get("FEDTIDE_DATA")
    folder = Path(named) if named else ROOT.parent / "shared" / "data"
    if not (folder / "mnist").is_dir():
        pytest.skip("the real data sets are not here; set FEDTIDE_DATA")
    return folder


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without pictures, which take longer than all else."""
    monkeypatch.setattr("fedtide.report.page.pictures_of", lambda record: [])
