"""Other frameworks on our works: processes of their own environments, which `peers/make.py` makes."""

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import Tensor

from fedtide.data.population import Population
from machine import MB
from works import CLASSES, RATE, Work, pictures

SCRIPTS = Path(__file__).with_name("peers")
ENVIRONMENTS = Path(os.environ.get("BENCH_ENVS", Path(__file__).parent.parent / ".bench-envs"))
PEERS = ("pfl", "fedjax", "flower")
DEADLINE = 30.0
"""Seconds that a peer has to end once its input has ended; Ray's processes take a few."""


@dataclass(frozen=True)
class Way:
    """How a peer is run.

    Args:
        peer: its environment, and its script `with_<peer>.py`.
        environment: variables that its script reads.
        processes: started by torchrun, so many of them with one thread each; 0 is one process without it.
    """

    peer: str
    environment: Mapping[str, str] = field(default_factory=dict)
    processes: int = 0

    @property
    def python(self) -> Path:
        """The interpreter of its environment."""
        return ENVIRONMENTS / self.peer / "bin" / "python"

    @property
    def installed(self) -> bool:
        """Whether its environment was made, to the end."""
        return (ENVIRONMENTS / self.peer / "made").is_file()

    def command(self, job: Path, threads: int) -> list[str]:
        """What is started."""
        script = [str(SCRIPTS / f"with_{self.peer}.py"), str(job), str(1 if self.processes else threads)]
        if not self.processes:
            return [str(self.python), *script]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.processes}"]
        return [str(self.python), *torchrun, *script]

    def variables(self, threads: int) -> dict[str, str]:
        """Its environment variables: ours, less what would lead it to our packages, and its own."""
        ours = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        return {**ours, "OMP_NUM_THREADS": str(1 if self.processes else threads), **self.environment}


def versions() -> dict[str, str]:
    """What is installed in the environments, as `peers/make.py` noted it."""
    made = {peer: ENVIRONMENTS / peer / "made" for peer in PEERS}
    return {peer: note.read_text(encoding="utf-8").strip() for peer, note in made.items() if note.is_file()}


def write_job(path: Path, work: Work, population: Population, weights: Mapping[str, Tensor], *, batch: int) -> None:
    """A work for peers: every client's pictures, where training begins, and how it goes on; 0 for `batch` is all."""
    x, y = pictures(work.clients * work.rows)
    rows = torch.stack([population.parts["train"][client] for client in range(work.clients)])
    begins = {f"weights/{name}": value.numpy() for name, value in weights.items()}
    about = {"model": work.model["kind"], "batch_size": batch or work.rows, "lr": RATE, "classes": CLASSES}
    np.savez(path, x=x[rows].numpy(), y=y[rows].numpy(), **about, **begins)


class Peer:
    """A peer's process, our side of the talk that `peers/turns.py` tells of."""

    def __init__(self, name: str, process: subprocess.Popen, log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log

    def round(self) -> float:
        """Play one round; its seconds, as the peer measured them."""
        return float(self._told("round")["seconds"])

    def weights(self) -> dict[str, Tensor]:
        """Its global weights."""
        path = self.log.with_suffix(".npz")
        self._told(f"weights {path}")
        with np.load(path) as file:
            return {name: torch.from_numpy(file[name]) for name in file.files}

    def resident(self) -> float:
        """Resident memory in MB of its processes together; pages that they share count in each."""
        held = 0
        with suppress(psutil.Error):
            root = psutil.Process(self.process.pid)
            for member in [root, *root.children(recursive=True)]:
                with suppress(psutil.Error):
                    held += member.memory_info().rss
        return held / MB

    def _told(self, line: str) -> dict[str, float]:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        with suppress(BrokenPipeError):
            stdin.write(line + "\n")
            stdin.flush()
        answer = stdout.readline()
        if not answer:
            last = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-12:]
            raise RuntimeError(
                f"{self.name} ended with status {self.process.wait()}; it said last:\n" + "\n".join(last)
            )
        return json.loads(answer)


@contextmanager
def started(name: str, way: Way, job: Path, threads: int) -> Iterator[Peer]:
    """A peer ready to play; it and all processes that it started end with the block."""
    log = job.with_name(f"{job.stem}-{name}.log")
    with log.open("wb") as said:
        process = subprocess.Popen(
            way.command(job, threads), env=way.variables(threads), cwd=job.parent, text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said,
        )  # fmt: skip
    try:
        yield Peer(name, process, log)
    finally:
        _ended(process)


def _ended(process: subprocess.Popen) -> None:
    """End of input asks it to end; what is still there after the deadline is killed."""
    tree: list[psutil.Process] = []
    with suppress(psutil.Error):
        tree = psutil.Process(process.pid).children(recursive=True)
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(DEADLINE)
    process.stdout.close()
    for left in [*tree, *([psutil.Process(process.pid)] if process.poll() is None else [])]:
        with suppress(psutil.Error):
            left.kill()
    process.wait()


def alone(name: str, way: Way, job: Path, threads: int, rounds: int) -> tuple[float, float]:
    """Seconds from the start of the process to the end of its first round, and its peak memory in MB after `rounds`."""
    began, over, peak = time.perf_counter(), threading.Event(), [0.0]
    with started(name, way, job, threads) as peer:

        def watch() -> None:
            while not over.wait(0.05):
                peak[0] = max(peak[0], peer.resident())

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            peer.round()
            first = time.perf_counter() - began
            for _ in range(rounds - 1):
                peer.round()
        finally:
            over.set()
            watcher.join()
    return first, peak[0]
