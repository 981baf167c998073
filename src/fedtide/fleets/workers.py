"""The workers engine: blocks of clients in parallel processes, with the same bits as in one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from fedtide.core import codec
from fedtide.core.trees import Tree
from fedtide.core.types import Scores, State
from fedtide.fleets.host import Again, Done, Host, Job, Judged
from fedtide.fleets.pool import Pool
from fedtide.fleets.worker import Line, own_function


@dataclass(frozen=True)
class WorkersEngine:
    """Hands blocks to whichever worker is free.

    The payload lies once in shared memory for all workers. A worker that is killed is replaced and its block done
    again; works are pure and sums are added in the order of the blocks, so the result does not change.

    Args:
        pool: the processes.
        spec: from what a worker makes the host: "make" names the function of this package that does it (see
            `fedtide.runs.assemble.spec_of`).
    """

    pool: Pool
    spec: Mapping[str, Any]

    @cached_property
    def _spec_file(self) -> str:
        """The spec lies in a file, so that it need not travel with every block."""
        text = json.dumps(dict(self.spec), sort_keys=True)
        path = self.pool.folder / f"spec-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
        path.write_text(text, encoding="utf-8")
        return str(path)

    def ask(self, jobs: Sequence[Job], payload: Tree) -> Iterator[Done]:
        """Run a question."""
        return self._map("fedtide.fleets.workers:ask", jobs, payload)

    def score(self, jobs: Sequence[Job], payload: Tree) -> Iterator[Scores]:
        """Run a scoring."""
        return self._map("fedtide.fleets.workers:score", jobs, payload)

    def again(self, jobs: Sequence[Again], payload: Tree, state: State) -> Iterator[Judged]:
        """Put a question again, client by client."""
        return self._map("fedtide.fleets.workers:again", jobs, {"payload": payload, "state": state})

    def _map(self, function: str, jobs: Sequence[Job | Again], payload: Tree) -> Iterator[Any]:
        with self._shared(payload) as file:
            arguments = [{"spec": self._spec_file, "job": codec.sealed(job), "payload": file} for job in jobs]
            yield from self.pool.map(function, arguments)

    @contextmanager
    def _shared(self, payload: Tree) -> Iterator[str]:
        path = self.pool.unused("payload")
        codec.to_file(path, payload)
        try:
            yield str(path)
        finally:
            path.unlink(missing_ok=True)


@lru_cache(maxsize=1)
def _payload(file: str) -> Tree:
    """The payload of the current ask: all its blocks share it."""
    return codec.from_file(Path(file))


@lru_cache(maxsize=4)
def _host(spec: str) -> Host:
    """The host that a spec file describes; made once per process."""
    made = json.loads(Path(spec).read_text(encoding="utf-8"))
    return own_function(made["make"])(made, name=str(os.getpid()))


def ask(arguments: Tree, line: Line) -> Done:
    """In a worker: run one block of a question."""
    host = _host(arguments["spec"])  # first: it loads the classes that job and payload may hold
    return host.ask(codec.opened(arguments["job"]), _payload(arguments["payload"]))


def score(arguments: Tree, line: Line) -> Scores:
    """In a worker: run one block of a scoring."""
    host = _host(arguments["spec"])
    return host.score(codec.opened(arguments["job"]), _payload(arguments["payload"]))


def again(arguments: Tree, line: Line) -> Judged:
    """In a worker: put a question again to one client."""
    host = _host(arguments["spec"])
    both = _payload(arguments["payload"])
    return host.again(codec.opened(arguments["job"]), both["payload"], both["state"])
