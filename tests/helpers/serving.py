"""A site that is served, and nodes that join it, by the commands that people type."""

import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedtide.config import read
from fedtide.core.record import ASKS, read_lines
from fedtide.site.deploying import make_site
from fedtide.site.node_process import node_command, write_settings
from fedtide.site.parity import free_port
from fedtide.site.seat import Seat
from fedtide.site.site import Roster, admit
from fedtide.site.tickets import Ticket
from helpers.federation import until
from helpers.hospitals import hospitals

WAIT = 600.0
"""Seconds after which something surely happens, on a busy machine too."""


class Command:
    """A command and the lines that it has printed."""

    def __init__(self, *words: str) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.lines.append(line.strip())

    def wait_for(self, text: str) -> str:
        """Return the first line with a text, when it is there."""

        def look() -> str:
            ended = self.process.poll() is not None
            found = next((line for line in self.lines if text in line), "")
            assert found or not ended, f"ended without '{text}': {self.lines}"
            return found

        return str(until(look, WAIT))

    def end(self) -> int:
        """End it as Ctrl-C does, or wait for its end; return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        self.process.wait(WAIT)
        self._listener.join(WAIT)
        return self.process.returncode


class Serving:
    """A site with what belongs to it in one folder.

    Args:
        folder: of the study, of the rows and of the site.
        nodes: as in `fedtide deploy --nodes`.
        method: which of the study's methods.
        deploy: settings of `[deploy]`.
        folders: where "site" and homes of nodes are, if not in `folder`.
        changes: other tables of the study.
    """

    def __init__(
        self,
        folder: Path,
        nodes: str,
        method: str,
        deploy: dict[str, Any],
        /,
        folders: Mapping[str, Path] | None = None,
        **changes: Any,
    ) -> None:
        self.folder, self._folders = folder, folders or {}
        study = hospitals(folder, deploy=deploy | {"address": f"127.0.0.1:{free_port()}"}, **changes)
        self.site = make_site(read(study), method, Roster.of(nodes), self._place("site"), None, "study.toml")
        self.commands: list[Command] = []

    def _place(self, name: str) -> Path:
        return self._folders.get(name, self.folder / f"{name}-folder")

    def _run(self, *words: str) -> Command:
        command = Command(*words)
        self.commands.append(command)
        return command

    def fedtide(self, *words: str) -> Command:
        return self._run(sys.executable, "-P", "-m", "fedtide", *words)

    def serve(self) -> Command:
        return self.fedtide("serve", str(self.site.root))

    def join(self, name: str, data: Sequence[str] = (), worker: Path | None = None) -> Command:
        """Let a node in and start it.

        Args:
            name: its name in the roster.
            data: files of its rows; () takes that of its name.
            worker: a program in place of its worker.
        """
        ticket, home = self.site.root / "tickets" / f"{name}.ticket", self._place(name)
        files = [self.folder / f"{each}.csv" for each in data or (name,)]
        seat = Seat.read(Ticket.read(ticket), files, None, home)
        seat.settle()
        admit(self.site.root, name, seat.public)
        if worker is None:
            told = [word for file in files for word in ("--data", str(file))]
            return self.fedtide("join", str(ticket), *told, "--home", str(home))
        (home / "ca.crt").write_text(seat.ticket.authority, encoding="ascii")
        line = replace(seat.line, worker=[sys.executable, str(worker)])
        return self._run(*node_command(write_settings(home, seat.settings, line)))

    def asks(self) -> list[dict[str, Any]]:
        """Return what the record says of each round that is over."""
        path = self.site.record / ASKS
        return [line for line in read_lines(self.site.record, ASKS) if line["round"] >= 0] if path.exists() else []

    def words(self, client: int) -> dict[int, list[str]]:
        """Return by round what became of a client's answers."""
        return {
            line["round"]: [
                node["clients"][str(client)]
                for ask in line["asks"]
                for node in ask["nodes"].values()
                if str(client) in node["clients"]
            ]
            for line in self.asks()
        }

    def close(self) -> None:
        """End everything that was started and is still there."""
        for command in reversed(self.commands):
            command.end()
