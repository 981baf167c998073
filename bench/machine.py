"""What a line of results says about the machine, the memory of processes, and options of all benches."""

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

RESULTS = Path(__file__).with_name("results.jsonl")
MB = 1_000_000
QUARTILES = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)


def options(about: str | None) -> argparse.ArgumentParser:
    """Make a parser with the option that all benches have."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="file to which the results are appended")
    return parser


def among(allowed: Collection[str]) -> Callable[[str], list[str]]:
    """Make the type of an option: names separated by commas, none if it is empty."""

    def names(text: str) -> list[str]:
        found = [name for name in text.split(",") if name]
        for name in found:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"found '{name}', allowed: {', '.join(allowed)}")
        return found

    return names


def now() -> str:
    """The date and time, to tell runs apart."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def machine() -> dict[str, Any]:
    """Processor, versions, and how busy the machine was before."""
    return {
        "processor": _processor(),
        "cores": cores(),
        "load": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "fedtide": version("fedtide"),
    }


def told(title: str, line: dict[str, Any], out: Path | None) -> None:
    """Print one result, a row for each key, and append it to a file, where there is one."""
    table = Table(title=title, title_justify="left", show_header=False)
    for key, value in line.items():
        table.add_row(key, str(value))
    Console().print(table)
    if out is not None:
        append(out, [line])


def quartiles(values: Tensor | Sequence[float], digits: int) -> list[float]:
    """First quartile, median, third quartile."""
    return [round(q, digits) for q in torch.as_tensor(values, dtype=torch.float64).quantile(QUARTILES).tolist()]


def timed(act: Callable[[], Any]) -> tuple[float, float]:
    """Seconds on the clock, and of the processor."""
    began, worked = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - began, time.process_time() - worked


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    about = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    # A machine in a cloud may say no more than whose processor it is.
    kind = {key: about[key] for key in ("cpu family", "model", "stepping") if key in about}
    numbers = ", ".join(f"{key.removeprefix('cpu ')} {value}" for key, value in kind.items())
    name = about.get("model name") or platform.processor() or platform.machine()
    return f"{name} ({numbers})" if numbers else name


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def append(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Add lines to a file of results."""
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def resident() -> float:
    """Resident memory of this process in MB."""
    return psutil.Process().memory_info().rss / MB


def computed(processes: Sequence[psutil.Process]) -> float:
    """The processor seconds of processes so far; Linux tells them in nanoseconds, of which psutil tells hundredths."""
    total = 0.0
    for each in processes:
        with contextlib.suppress(psutil.Error, OSError):  # it is over
            if sys.platform == "linux":
                total += time.clock_gettime(~each.pid << 3 | 2)  # clock_getcpuclockid, which Python lacks
            else:
                spent = each.cpu_times()
                total += spent.user + spent.system
    return total


def peak_of(command: Sequence[str]) -> tuple[float | None, str]:
    """The largest resident memory in MB of a command and its children together, None if it failed; what it printed.

    Pages that processes share are counted in each of them. A command should print less than a pipe holds.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    tree, peak = psutil.Process(process.pid), 0
    while process.poll() is None:
        held = 0
        with contextlib.suppress(psutil.Error):
            for member in [tree, *tree.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    held += member.memory_info().rss
        peak = max(peak, held)
        time.sleep(0.01)
    assert process.stdout is not None
    with process.stdout as out:
        said = out.read().strip()
    return (peak / MB, said) if process.returncode == 0 else (None, "")
