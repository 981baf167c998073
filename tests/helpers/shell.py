"""The command line in this process and in others, and what folders hold before and after."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedtide.cli.commands import main
from fedtide.runs.experiment import WAIT_SECONDS
from helpers.studies import raw

ROOT = Path(__file__).parents[2]


def written(path: Path, *methods: dict[str, Any], **changes: Any) -> Path:
    """The toy experiment as a file."""
    path.write_text(tomli_w.dumps(raw(*methods, **changes)), encoding="utf-8")
    return path


def contents(root: Path) -> dict[str, bytes]:
    """Every file below a folder, and every folder or pipe."""
    return {
        str(path.relative_to(root)) + "/" * path.is_dir(): path.read_bytes() if path.is_file() else b""
        for path in sorted(root.rglob("*"))
        if "__pycache__" not in path.parts
    }


def done(*arguments: object) -> int:
    """Run a command here; its exit status."""
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    assert isinstance(left.value.code, int)
    return left.value.code


def refused(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: object) -> str:
    """Run a command that a person got wrong: exit status 2, one line on stderr, and not a byte is changed."""
    before = contents(folder)
    capsys.readouterr()
    assert done(*arguments) == 2
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("fedtide: ")
    assert "Traceback" not in err + out
    assert contents(folder) == before
    return lines[0].removeprefix("fedtide: ")


class Shell:
    """Starts commands as processes of their own; a server that has loaded everything forks for each of them.

    Args:
        scratch: where what they print is put.
        modules: that commands import late, so that each of them would do it.
    """

    def __init__(self, scratch: Path, modules: Sequence[str] = ()) -> None:
        self.scratch, self.started = scratch, 0
        paths = [str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._server = subprocess.Popen(
            [sys.executable, "-c", "from helpers.forked import serve; serve()", *modules],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert self._told() == "ready"

    def _told(self) -> str:
        assert self._server.stdout is not None
        return self._server.stdout.readline().strip()

    def _order(self, **order: Any) -> int:
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        return int(self._told())

    def start(
        self,
        *arguments: object,
        cwd: Path,
        largest: int | None = None,
        forks: bool = False,
        waits: float = WAIT_SECONDS,
    ) -> "Command":
        """Start a command.

        Args:
            arguments: of the command line.
            cwd: its current folder.
            largest: how many bytes a file may have, as on a disk that is nearly full.
            forks: whether it forks its workers and starts no interpreter for them, which takes two seconds each.
            waits: seconds after a Ctrl-C after which it says what it waits for.
        """
        self.started += 1
        out, err = (self.scratch / f"{self.started}.{name}" for name in ("out", "err"))
        argv = [str(argument) for argument in arguments]
        pid = self._order(
            argv=argv, cwd=str(cwd), out=str(out), err=str(err), largest=largest, forks=forks, waits=waits
        )
        return Command(self, pid, out, err)

    def wait(self, pid: int) -> int:
        """The exit status of a command; negative where a signal ended it."""
        return self._order(wait=pid)

    def close(self) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(timeout=30)
        self._server.stdout.close()


class Command:
    """A command that was started."""

    def __init__(self, shell: Shell, pid: int, out: Path, err: Path) -> None:
        self.shell, self.pid, self._out, self._err = shell, pid, out, err

    def wait(self) -> int:
        return self.shell.wait(self.pid)

    @property
    def out(self) -> str:
        return self._out.read_text() if self._out.exists() else ""

    @property
    def err(self) -> str:
        return self._err.read_text() if self._err.exists() else ""  # killed before it was made
