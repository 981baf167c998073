"""How many faults are tried, from which seed, and what was tried in all.

`make test` tries a few of each kind with fixed seeds; `make faults` (`--tries 1000`) many, with seeds of the day. A
test is named by its seed, so that `pytest tests/faults -k NAME --tries N --faults-seed S` plays a failure again.
"""

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

BATCH = 10
"""Tries in one test, or with all other parameters of a test that has `each` in its place."""

LIMIT = 120
"""Seconds after which one try counts as a hang."""


class Hang(BaseException):
    """A try took longer than `LIMIT` seconds."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tries", type=int, default=0, help="faults to try of each kind; 0 tries a few")
    parser.addoption("--faults-seed", type=int, default=0, help="from which all draws follow")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames and "faults" in str(metafunc.definition.path):
        each = getattr(metafunc.function, "each", BATCH)
        batches = -(-metafunc.config.getoption("--tries") // each) or 1
        first = 100_000 * metafunc.config.getoption("--faults-seed")
        metafunc.parametrize("seed", range(first, first + batches))


@contextmanager
def limited(seconds: int = LIMIT) -> Iterator[None]:
    """Raise `Hang` in a block that takes too long."""

    def ring(number: int, frame: object) -> None:
        raise Hang(f"no end within {seconds} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def tried(record_property: Callable[[str, object], None]) -> Iterator[Counter[str]]:
    """What was tried and what came of it, for the count at the end."""
    counted: Counter[str] = Counter()
    yield counted
    for name, count in counted.items():
        record_property(f"faults {name}", count)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    total: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "teardown":
                for name, count in getattr(report, "user_properties", ()):
                    if str(name).startswith("faults "):
                        total[str(name).removeprefix("faults ")] += int(count)
    if total:
        terminalreporter.section("faults tried")
        for name, count in sorted(total.items()):
            terminalreporter.write_line(f"{name}: {count:,}")
