"""Clients that keep much: what thousands of SCAFFOLD's clients with a large model take of memory and of the disk.

python bench/memory.py [--clients 2000] [--rounds 2] [--folder /tmp] [--out bench/results.jsonl]

The run is killed in its last round and goes on with `fedtide resume`. It needs three times 4.8 MB for each client on
the disk, 29 GB by default, and removes what it wrote.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import tomli_w

from machine import MB, machine, now, options, told
from works import source

MODEL = "cnn"
ROWS = 10


def crowd(clients: int, rounds: int) -> dict[str, Any]:
    """A federation whose clients all take part in every round, one step each, and are all judged after each."""
    return {
        "rounds": rounds,
        "eval_every": 1,
        "checkpoint_every": 1,
        "data": {
            "source": source(clients * ROWS),
            "partition": {"kind": "iid", "clients": clients, "samples": ROWS},
            "split": {"val": 0.0},
        },
        "model": {"kind": MODEL},
        "method": [
            {
                "algorithm": "scaffold",
                "cohort": {"kind": "everyone"},
                "local": {"lr": 0.02, "local_steps": 1, "batch_size": 8},
            }
        ],
    }


@dataclass
class Watched:
    """The largest resident memory of a command and the largest size of a folder so far, in MB; how long it took."""

    memory: float = 0.0
    disk: float = 0.0
    seconds: float = 0.0
    said: str = ""

    def play(self, command: list[str], folder: Path, kill_at: int | None = None) -> int:
        """Run a command, and kill it when the record has so many rounds and half a round more; its exit status."""
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
        began, looked, reached = time.monotonic(), 0.0, 0.0
        told = folder.with_suffix(".txt")
        with open(told, "ab") as file:
            process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
        watched = psutil.Process(process.pid)
        while process.poll() is None:
            with contextlib.suppress(psutil.Error):
                self.memory = max(self.memory, watched.memory_info().rss / MB)
            if time.monotonic() - looked > 1:
                looked = time.monotonic()
                self.disk = max(self.disk, size_of(folder) / MB)
                if kill_at is not None and not reached and recorded(folder) >= kill_at:
                    reached = time.monotonic()
                if reached and time.monotonic() - reached > (reached - began) / 2:
                    process.kill()
            time.sleep(0.02)
        self.seconds += time.monotonic() - began
        self.said = next((line for line in told.read_text().splitlines() if line.startswith("clients keep")), "")
        return process.returncode


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def recorded(folder: Path) -> int:
    """How many rounds the only run of a folder has recorded."""
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("*/*/rounds.jsonl"))


def measured(clients: int, rounds: int, place: Path) -> dict[str, Any]:
    """Run, kill, resume; the memory and the disk that it took."""
    fedtide = [sys.executable, "-m", "fedtide"]
    with tempfile.TemporaryDirectory(dir=place) as temporary:
        file, folder = Path(temporary) / "crowd.toml", Path(temporary) / "run"
        file.write_text(tomli_w.dumps(crowd(clients, rounds)), encoding="utf-8")
        watched = Watched()
        command = [*fedtide, "run", str(file), "--out", str(folder), "--workers", "1"]
        killed = watched.play(command, folder, kill_at=rounds - 1)
        status = watched.play([*fedtide, "resume", str(folder), "--workers", "1"], folder) if killed < 0 else killed
        if status:
            raise SystemExit(f"fedtide ended with {status}: {folder.with_suffix('.txt').read_text()}")
        kept = sum(path.stat().st_size for path in folder.glob("*/*/memory/*"))
        files = sum(1 for _ in folder.glob("*/*/memory/*"))
    return {
        "clients": clients,
        "rows": ROWS,
        "model": MODEL,
        "rounds": rounds,
        "killed": killed < 0,
        "said": watched.said,
        "kept": files,
        "kept_gb": round(kept / 1e9, 2),
        "disk_gb": round(watched.disk / 1e3, 2),
        "peak_mb": round(watched.memory),
        "seconds": round(watched.seconds),
    }


def main() -> None:
    """Measure, print, append."""
    parser = options(__doc__)
    parser.add_argument("--clients", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=2, help="all clients take part in each")
    parser.add_argument("--folder", type=Path, default=None, help="where there is room; by default the system's")
    given = parser.parse_args()
    line = {"bench": "memory", "date": now(), **measured(given.clients, given.rounds, given.folder), **machine()}
    told("clients that keep much", line, given.out)


if __name__ == "__main__":
    main()
