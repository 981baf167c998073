"""The study that `fedtide init` writes: it runs as it stands, and what it says may stand in it."""

import re
import tomllib
from importlib.resources import files

import pytest

from fedtide.config import from_dict
from helpers.shell import done

TEXT = files("fedtide.config").joinpath("study.toml").read_text(encoding="utf-8")
LINES = TEXT.splitlines()
CHOICES = [number for number, line in enumerate(LINES) if line.startswith("# or: ")]
BLOCKS = re.findall(r"(?:^# .*\n?)+", TEXT[TEXT.index("# What the report") :], re.MULTILINE)


@pytest.mark.parametrize("number", CHOICES, ids=lambda number: LINES[number])
def test_every_choice_may_stand_in_place_of_its_line(number):
    first = max(above for above in range(number) if not LINES[above].startswith("# or: "))
    choice = LINES[number].removeprefix("# or: ")
    assert choice.split(" = ")[0] == LINES[first].split(" = ")[0]
    from_dict(tomllib.loads("\n".join([*LINES[:first], choice, *LINES[first + 1 :]])))


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[0])
def test_every_table_that_is_left_out_may_be_added(block):
    _, *lines = block.splitlines()
    from_dict(tomllib.loads("\n".join([*LINES, *(line.removeprefix("# ") for line in lines)])))


def test_every_method_is_judged_on_clients_that_it_trains():
    assert from_dict(tomllib.loads(TEXT)).data.held_out_clients.clients == 0


def test_the_command_writes_it_and_it_is_right(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert done("init") == 0
    assert capsys.readouterr().out == "study: study.toml\nnext: fedtide run study.toml\n"
    assert done("init") == 2
    assert "study.toml: is there already" in capsys.readouterr().err
    assert done("run", "study.toml", "--set", "rounds=0") == 2
    assert "rounds: found 0" in capsys.readouterr().err
    assert (len(CHOICES), len(BLOCKS)) == (17, 3)
