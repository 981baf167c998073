"""Files of `deploy/`: what units of systemd and containers run are commands of this version, and how they end."""

import configparser
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fedtide.cli.commands import app

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy"
UNITS = sorted(FOLDER.glob("*.service"))
SCRIPT = FOLDER / "in-container.sh"


class Lines(configparser.ConfigParser):
    """A unit's lines, whose keys are written in capital letters."""

    def optionxform(self, optionstr: str) -> str:
        return optionstr


def unit(path: Path) -> configparser.ConfigParser:
    found = Lines(interpolation=None)
    found.read_string(path.read_text(encoding="utf-8"))
    return found


def services() -> dict[str, dict]:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))["services"]


def typed(program: str, *words: str) -> str:
    """Return the command that words are; raise if they are none of this version."""
    assert Path(program).name == "fedtide"
    command, *_ = app.parse_args([*words], exit_on_error=False, print_error=False)
    assert command.__name__ == words[0]
    return words[0]


def test_units_run_commands_and_start_again_after_failures_alone():
    ran = []
    for path in UNITS:
        service = unit(path)["Service"]
        ran.append(typed(*shlex.split(service["ExecStart"])))
        assert service["Restart"] == "on-failure"  # not for 0
        assert service["RestartPreventExitStatus"] == "2"
        assert service["CapabilityBoundingSet"] == ""
        assert service["NoNewPrivileges"] == "yes"
        assert service["WorkingDirectory"] == service["ReadWritePaths"]
    assert sorted(ran) == ["join", "serve"]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_systemd_finds_no_fault_in_a_unit(path, tmp_path):
    verify = shutil.which("systemd-analyze")
    if verify is None:
        pytest.skip("systemd-analyze is not here")
    program = unit(path)["Service"]["ExecStart"].split()[0]
    copy = tmp_path / path.name
    copy.write_text(path.read_text(encoding="utf-8").replace(program, sys.executable), encoding="utf-8")
    done = subprocess.run([verify, "verify", str(copy)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_containers_run_a_server_and_three_nodes():
    ran = {name: typed(*service["command"]) for name, service in services().items()}
    assert ran == {"server": "serve", "berlin": "join", "lyon": "join", "oslo": "join"}


def test_containers_have_what_their_commands_name_and_nothing_else():
    for name, service in services().items():
        assert (service["cap_drop"], service["read_only"], service["restart"]) == (["ALL"], True, "on-failure")
        places = {volume.split(":")[1] for volume in service["volumes"]}
        words = service["command"]
        named = {f"/work/{word}" for word in words if re.fullmatch(r"site|[\w.]+\.(ticket|csv|toml)", word)}
        home = set() if name == "server" else {f"/work/{name}"}
        assert places == named | home


def test_the_image_has_what_the_package_is_made_of():
    text = (FOLDER / "Containerfile").read_text(encoding="utf-8")
    copied = [word for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE) for word in line.split()[:-1]]
    assert all((ROOT / path).exists() for path in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {"pyproject.toml", project["readme"], *project["license-files"]}
    assert all(any(path == each or path.startswith(f"{each}/") for each in copied) for path in needed)
    assert "[deploy]" in text


@pytest.mark.parametrize(("status", "told"), [(0, 0), (1, 1), (2, 0), (3, 3)])
def test_a_container_does_not_start_again_after_a_mistake(status, told):
    assert subprocess.run([SCRIPT, "sh", "-c", f"exit {status}"], timeout=60).returncode == told


def test_a_container_that_was_killed_inside_says_so():
    assert subprocess.run([SCRIPT, "sh", "-c", "kill -9 $$"], timeout=60, stderr=subprocess.DEVNULL).returncode == 137


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_container_that_is_stopped_lets_its_command_save(number, tmp_path):
    waits = f"trap 'sleep 0.3; touch {tmp_path}/saved; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    # These tests may run where the signal is ignored. A function before the start would fork as threads of gRPC run.
    heard = f"import os, signal, sys; signal.signal({number:d}, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    words = [sys.executable, "-c", heard, SCRIPT, "sh", "-c", waits]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(60) == 0
    assert (tmp_path / "saved").exists()
