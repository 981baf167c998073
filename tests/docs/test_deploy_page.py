"""The page on real clients: its commands are those of this version, and what it shows can be done."""

import re
import shlex
from pathlib import Path

import pytest
from cyclopts import CycloptsError

from fedtide.cli.commands import app
from helpers.shell import done

PATH = Path(__file__).parents[2] / "docs" / "deploy.md"
PAGE = PATH.read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(?P<head>[^\n`]+)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
TITLED = {
    title[1]: found["body"] for found in BLOCK.finditer(PAGE) if (title := re.search(r'title="([^"]+)"', found["head"]))
}
COMMANDS = [
    line for found in BLOCK.finditer(PAGE) if found["head"].startswith(("sh", "{.sh"))
    for line in found["body"].splitlines() if line.startswith("fedtide ")
]  # fmt: skip


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_of_the_page_can_be_typed(line):
    _, name, *words = shlex.split(line)
    command, *_ = app.parse_args([name, *words], exit_on_error=False, print_error=False)  # or it raises
    assert command.__name__ == name


def test_a_command_that_is_none_cannot_be_typed():
    for line in ("serv site", "admit site", "join berlin.ticket --rows mine.csv", "serve site --helth 8301"):
        with pytest.raises(CycloptsError):
            app.parse_args(shlex.split(line), exit_on_error=False, print_error=False)


def test_the_page_names_the_files_of_services_and_containers():
    files = {path.name for path in (PATH.parents[1] / "deploy").iterdir()}
    assert files == set(re.findall(r"`([\w.-]+\.(?:service|yaml|sh)|Containerfile)`", PAGE))


def test_the_site_of_the_page_is_made_and_its_ticket_read(tmp_path, monkeypatch, capsys):
    pytest.importorskip("cryptography")
    monkeypatch.chdir(tmp_path)
    exec(TITLED["hospitals.py"], {})
    for name in ("study.toml", "policy.toml"):
        (tmp_path / name).write_text(TITLED[name])
    make, look = (
        next(line for line in COMMANDS if all(word in line for word in words))
        for words in (["fedtide deploy"], ["fedtide join", "--dry"])
    )
    assert done(*shlex.split(make)[1:]) == 0
    assert done(*shlex.split(look)[1:], "--policy", "policy.toml") == 0
    assert "asks: train" in capsys.readouterr().out
