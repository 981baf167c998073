"""An inspection of a site: its nodes answer, and a command says what their sums mean."""

import csv
import json
from datetime import datetime, timedelta

import pytest

pytest.importorskip("cryptography")

from fedtide.core.errors import FedtideError
from fedtide.core.record import LEDGER, read_lines
from fedtide.inspection.answers import QUESTIONS
from fedtide.inspection.bounded import VALUES
from fedtide.inspection.by_sums import STAGES
from fedtide.site.parity import replay
from helpers.hospitals import hospitals
from helpers.mortal import changes_in
from helpers.near_sites import site_of
from helpers.shell import done, refused
from helpers.shops import NAMES, made, play, shops


def test_a_site_is_inspected_while_it_is_served_and_after_and_its_simulation_has_the_same_bits(tmp_path, capsys):
    site = made(shops(tmp_path), tmp_path / "site")
    assert "0 of 9 questions were asked; answers follow the last" in refused(capsys, tmp_path, "inspect", site.root)
    play(site, 4)
    assert "5 of 9 questions were asked" in refused(capsys, tmp_path, "inspect", site.root)
    play(site, len(STAGES))  # server and nodes of another process go on
    assert done("inspect", site.root, "--json") == 0
    answers = {one["question"]: one["level"] for one in json.loads(capsys.readouterr().out)["answers"]}
    assert set(answers) == set(QUESTIONS)
    assert answers["labels"] == answers["mix"] == answers["drift"] == "no"
    assert changes_in("inspect", site.root) == 0, "it changes no file, so a kill leaves all as it was"
    line = refused(capsys, tmp_path, "inspect", site.root, "--out", "out")
    assert line == "--out: found 'out', but sums make no page; allowed: none with a site"
    assert "--label: found 'y'" in refused(capsys, tmp_path, "inspect", site.root, "--label", "y")
    again = replay(site.run, [tmp_path / f"{name}.csv" for name in NAMES])
    assert (again.rounds, again.equal) == (len(STAGES), True)


def test_a_site_that_trains_has_no_answers(tmp_path, capsys):
    site = site_of(tmp_path)
    line = refused(capsys, tmp_path, "inspect", site.root)
    assert "method 'FedAvg'.algorithm: found 'fedavg', allowed: 'inspection' or 'bounded-inspection'," in line


def test_noise_is_refused_because_sums_of_an_inspection_have_no_bounds(tmp_path, capsys):
    privacy = {"epsilon": 4.0, "delta": 1e-3, "clip": {"sums": 1.0}}
    study = hospitals(tmp_path, method=[{"name": "questions", "algorithm": "inspection"}], wire={"privacy": privacy})
    assert "its sums have no bounds" in refused(capsys, tmp_path, "run", study, "--out", tmp_path / "run")


def levels(site, capsys) -> dict[str, str]:
    capsys.readouterr()
    assert done("inspect", site.root, "--json") == 0
    return {one["question"]: one["level"] for one in json.loads(capsys.readouterr().out)["answers"]}


def rewritten(path, change) -> None:
    """Change the cells of each row of a file, and its header."""
    with open(path, newline="", encoding="utf-8") as file:
        lines = list(csv.reader(file))
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(change(number, line) for number, line in enumerate(lines))


def test_a_clock_that_is_a_day_off_and_a_node_with_other_columns_change_no_word(tmp_path, capsys):
    study = shops(tmp_path)
    play(asked := made(study, tmp_path / "site"), len(STAGES))
    words = levels(asked, capsys)

    def day_later(number, line):
        return line if not number else [str(datetime.fromisoformat(line[0]) + timedelta(days=1)), *line[1:]]

    rewritten(tmp_path / "shop-2.csv", day_later)
    rewritten(
        tmp_path / "shop-5.csv", lambda number, line: line if number else ["when", "a", "b", "c", "width", *line[5:]]
    )
    site = made(study, tmp_path / "other")
    with pytest.raises(FedtideError, match=r"shop-5\.csv: no column 'd'; the study reads: a, b, c, d"):
        play(site, 1)
    play(site, len(STAGES), NAMES[:5])  # its owner is told alone, and the others answer
    found = levels(site, capsys)
    assert {name: found[name] for name in ("labels", "presence", "drift")} == {
        name: words[name] for name in ("labels", "presence", "drift")
    }
    assert (found["meaning"], found["groups"]) == ("not asked", "not asked")  # five clients make no groups of three


# -- with noise --------------------------------------------------------------------------------------------------------


PRIVACY = {"epsilon": 4.0, "delta": 1e-3, "clip": dict.fromkeys(VALUES, 1.0)}
BOUNDED = {"rounds": 2, "eval_every": 2, "method": [{"name": "questions", "algorithm": "bounded-inspection"}]}


def test_noise_leaves_six_clients_no_word_and_is_accounted(tmp_path, capsys):
    site = made(shops(tmp_path, **BOUNDED, wire={"privacy": PRIVACY}), tmp_path / "site")
    assert "0 of 2 questions were asked" in refused(capsys, tmp_path, "inspect", site.root)
    play(site, 2)
    ledger = read_lines(site.record, LEDGER)
    assert [line["question"] for line in ledger] == ["asked", "asked"]
    assert ledger[-1]["epsilon"] == pytest.approx(4.0, rel=1e-3)
    capsys.readouterr()
    assert done("inspect", site.root) == 0
    said = capsys.readouterr().out
    assert said.count("cannot be told with this noise (6 clients, epsilon 4)") == 3
    assert said.count("not asked") == len(QUESTIONS)
    again = replay(site.run, [tmp_path / f"{name}.csv" for name in NAMES])
    assert (again.rounds, again.equal) == (2, True)


def test_bounded_sums_without_noise_say_what_they_can(tmp_path, capsys):
    play(site := made(shops(tmp_path, **BOUNDED), tmp_path / "site"), 2)
    words = levels(site, capsys)
    assert {name for name, level in words.items() if level != "not asked"} == {"labels", "presence"}
    assert words["labels"] == words["presence"] == "no"


def test_bounds_that_cut_answers_are_refused(tmp_path, capsys):
    privacy = PRIVACY | {"clip": PRIVACY["clip"] | {"hours": 0.5}}
    study = shops(tmp_path, **BOUNDED, wire={"privacy": privacy})
    line = refused(capsys, tmp_path, "run", study, "--out", tmp_path / "run")
    assert "wire.privacy.clip.hours: found 0.5, but" in line
    assert "would be read as another size; allowed: 1 or more" in line
