"""Tournaments on a toy: rungs, what they leave, stops and kills."""

import json
import math
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import fedtide as ft
from fedtide.cli.commands import main
from fedtide.config import Experiment, read
from fedtide.core.atomic import append
from fedtide.core.base import Moment
from fedtide.core.errors import FedtideError
from fedtide.evaluate.judge import views
from fedtide.evaluate.references import References, notes_on_missing
from fedtide.runs import folder
from fedtide.runs.build import population_of
from fedtide.tuning import ladder, tournament
from fedtide.tuning.ladder import Ladder
from fedtide.tuning.pages import standings_headline, standings_table, write_recommendation
from fedtide.tuning.tournament import Candidate, Step, execute, first_line, played_by, read_tournament, value_at
from helpers.studies import MOMENTUM, SCAFFOLD, A, study

PROX = {**A, "name": "prox", "algorithm": "fedprox"}
FAILS = {**A, "name": "fails", "local": {"lr": 1e30, "batch_size": 4}}


def begun(root: Path, *methods: dict[str, object], budget: float = 600.0) -> Path:
    """The folder of a tournament that is not played yet."""
    made: Experiment = study(*methods, rounds=4, eval_every=1, data={"split": {"val": 0.3}}, seeds=[0, 1])
    candidates = [Candidate(method.name, method.name, "a reason") for method in made.method]
    folder.make_folder(
        root, {"config.toml": folder.to_toml(made), tournament.LADDER: first_line(budget, candidates, [], 0.0)}
    )
    return root


@pytest.fixture
def plan(monkeypatch):
    """One plan whatever time methods take: rungs of two and four rounds, with two seeds."""
    monkeypatch.setattr(tournament, "planned", lambda costs, rounds, step, seconds: Ladder((2, 4), 2, len(costs)))


def told(root: Path) -> list[dict[str, object]]:
    """Lines of the ladder without seconds."""
    lines = [json.loads(line) for line in (root / tournament.LADDER).read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in ("spent", "costs", "enough")} for line in lines]


def test_the_study_of_a_tournament_has_its_safe_methods_too(tmp_path, plan, monkeypatch):
    """A method is called with its form, "B (safe)", and stands in a configuration as "B"."""
    root = begun(tmp_path / "t", A, {**SCAFFOLD, "name": "B", "algorithm": "ifca", "safe": True})
    monkeypatch.setattr(tournament.Tournament, "survivors", ("B (safe)",))
    assert execute(root, workers=1)
    assert [method.name for method in read(root / "study.toml").method] == ["A", "B (safe)"]


def test_half_of_the_methods_play_all_rounds_and_seeds_are_added_until_one_leads(tmp_path, plan):
    root = begun(tmp_path / "t", A, MOMENTUM, PROX, SCAFFOLD)
    assert execute(root, workers=1)
    made = read_tournament(root)
    assert [(rung.rounds, len(rung.values)) for rung in made.reached[:2]] == [(2, 4), (4, 2)]
    assert all(rung.rounds == 4 for rung in made.reached[1:])
    assert [len(rung.seeds) for rung in made.reached] == [2, *range(2, len(made.reached) + 1)]
    assert made.reached[0].seeds == (2, 3)  # none of the study's
    assert made.ended
    ready = read(root / "study.toml")
    assert ready.seeds == (0, 1)
    assert {*made.survivors, "A"} == {method.name for method in ready.method}
    assert ready.baseline == "A"
    comment = (root / "study.toml").read_text().splitlines()[0]
    assert comment.endswith('the methods of its tournament that may be the best, and "A" to compare them with.')
    rung, page = made.reached[-1], write_recommendation(root).read_text()
    assert f"{made.survivors[0]} {'has the highest score' if made.doubt else 'leads'}" in page
    # The reference is judged on the rows that methods are judged on, at each seed.
    assert set(rung.references["always answering the commonest class"]) == set(rung.seeds)
    assert "always answering the commonest class" in page


def test_what_is_left_of_the_budget_goes_into_more_rounds_of_the_better_half(tmp_path, monkeypatch):
    """The plan ends at two of four rounds, with one seed; a budget that is left pays for all four."""
    monkeypatch.setattr(tournament, "planned", lambda costs, rounds, step, seconds: Ladder((2,), 1, len(costs)))
    whole = begun(tmp_path / "whole", A, MOMENTUM, PROX, SCAFFOLD)
    assert execute(whole, workers=1)
    made = read_tournament(whole)
    assert [(rung.rounds, len(rung.values)) for rung in made.reached[:2]] == [(2, 4), (4, 2)]
    best = sorted(made.reached[0].values, key=lambda entry: -made.reached[0].values[entry][2])[:2]
    assert set(made.reached[1].values) == set(best)
    assert made.rungs == (2,)
    # Where it is not left nobody goes on; nor once another seed is played.
    short = begun(tmp_path / "short", A, MOMENTUM, PROX, SCAFFOLD)
    monkeypatch.setattr(tournament, "KEPT_BACK", 1e-9)
    assert execute(short, workers=1)
    assert {rung.rounds for rung in read_tournament(short).reached} == {2}


def test_the_value_of_a_rung_is_the_mean_of_the_last_evaluations_on_validation_rows(tmp_path, plan):
    root = begun(tmp_path / "t", A, PROX)
    assert execute(root, workers=1)
    made = read_tournament(root)
    lines = [json.loads(line) for line in (root / "a" / "2" / "rounds.jsonl").read_text().splitlines()]
    assert list(lines[0]["scores"]) == ["val"]
    over = ladder.window(2, 4, played_by(made.study).late, made.study.period)
    by_hand = [line["scores"]["val"]["accuracy"] for line in lines[:2]][-over:]
    assert made.reached[0].values["A"][2] == pytest.approx(sum(by_hand) / len(by_hand))


def test_a_budget_that_leaves_methods_out_says_which_would_pay_for_all(tmp_path, monkeypatch):
    monkeypatch.setattr(tournament, "planned", lambda costs, rounds, step, seconds: Ladder((2, 4), 1, 2))
    root = begun(tmp_path / "t", A, {**MOMENTUM, "name": "M, K = 2"}, {**PROX, "name": "P, K = 2"})
    assert execute(root, workers=1)
    made = read_tournament(root)
    absent = {"M, K = 2", "P, K = 2"} - made.played
    assert made.enough > 0
    line = standings_headline(made)
    assert f"the budget was too short: '{absent.pop()}'. A budget of about " in line
    monkeypatch.setattr(tournament, "planned", lambda costs, rounds, step, seconds: Ladder((2, 4), 1, len(costs)))
    whole = begun(tmp_path / "whole", A, PROX)
    assert execute(whole, workers=1)
    assert "budget" not in standings_headline(read_tournament(whole))


def test_a_tournament_that_was_stopped_anywhere_ends_as_another_one(tmp_path, plan, monkeypatch):
    whole = begun(tmp_path / "whole", A, PROX, MOMENTUM)
    assert execute(whole, workers=1)
    cut = begun(tmp_path / "cut", A, PROX, MOMENTUM)
    lines = (whole / tournament.LADDER).read_text().splitlines(keepends=True)
    for count in (1, 2, 3):  # as if killed after so many lines, and while the next was written
        (cut / tournament.LADDER).write_text("".join(lines[:count]) + lines[count][:10])
        assert execute(cut, workers=1)
        assert told(cut) == told(whole)
    assert (cut / "study.toml").read_text() == (whole / "study.toml").read_text()


def test_verify_looks_at_the_runs_that_were_played(tmp_path, plan, capsys):
    root = begun(tmp_path / "t", A, PROX, MOMENTUM)
    assert execute(root, workers=1)
    found = ft.verify(root)
    played = {(entry, seed) for rung in read_tournament(root).reached for entry in rung.values for seed in rung.seeds}
    assert {(verdict.run.method.name, verdict.run.seed) for verdict in found} >= played
    assert all(verdict.wrong is None and verdict.rounds in (2, 3, 4) for verdict in found)
    record = root / "a" / "2" / "rounds.jsonl"
    record.write_text(record.read_text().replace("0", "1", 1))
    shutil.rmtree(root / "a" / "3")
    with pytest.raises(SystemExit, match="1"):
        main(["verify", str(root)])
    said = [line for line in capsys.readouterr().out.splitlines() if not re.search(r": whole, [234] of 4 ", line)]
    assert [line.split(":")[0] for line in said] == ["A · seed 2", "A · seed 3"]
    assert "rounds.jsonl" in said[0]
    assert "ladder.jsonl has" in said[1]


def test_a_tune_folder_has_no_runs_to_verify(tmp_path):
    (tmp_path / "config.toml").touch()
    (tmp_path / "trials.jsonl").touch()
    with pytest.raises(FedtideError, match=r"but it is a tune folder; allowed: a run folder"):
        ft.verify(tmp_path)


def test_a_method_that_fails_is_left_out_and_named(tmp_path, plan):
    root = begun(tmp_path / "t", A, FAILS, PROX)
    assert execute(root, workers=1)
    made = read_tournament(root)
    assert "fails" not in made.survivors
    assert "fails" in made.failed


def test_a_budget_that_is_over_at_once_is_one_line(tmp_path):
    root = begun(tmp_path / "t", A, PROX, budget=1e-6)
    with pytest.raises(FedtideError, match=r"--budget: t: found 1e-06 s, allowed: \d+(s|m) or more, as \d+ s"):
        execute(root, workers=1)


def test_a_budget_that_is_over_is_the_reason_also_where_some_failed(tmp_path):
    root = begun(tmp_path / "t", FAILS, A, PROX)
    line = {"failed": {"fails": "loss is not finite"}, "ended": tournament.OVER, "spent": 5.0}
    append(root / tournament.LADDER, json.dumps(line))
    with pytest.raises(FedtideError, match=r"^--budget: t: found .*; others failed: fails: loss is not finite$"):
        execute(root, workers=1)


def test_a_budget_that_is_over_amid_the_first_rung_compares_what_came_farthest(tmp_path, plan, monkeypatch):
    """All three have played the first seed, one the second, too."""
    root = begun(tmp_path / "t", A, PROX, MOMENTUM)
    runs = tournament.Play.runs

    def slower(play, step, below=0):
        if len(step.seeds) == 1:
            return runs(play, step, below)
        one, *other = step.seeds
        outcomes = runs(play, replace(step, seeds=[one])) | runs(play, Step(step.rounds, step.entries[:1], other))
        return outcomes | {(entry, seed): {} for entry in step.entries[1:] for seed in other}

    monkeypatch.setattr(tournament.Play, "runs", slower)
    assert execute(root, workers=1)
    made = read_tournament(root)
    assert made.ended == tournament.OVER
    assert [(rung.rounds, rung.seeds, len(rung.values)) for rung in made.reached] == [(2, (2,), 3)]
    assert len(made.survivors) == 3


def record_of(folder: Path, *scores: dict[str, object]) -> Path:
    """The record of a run with these scores on validation rows."""
    plain = {"seconds": 0.0, "down": 0, "up": 0, "refused": 0, "participants": {}}
    lines = [{"round": number, **plain, "scores": {"val": each}} for number, each in enumerate(scores)]
    (folder / "rounds.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def test_windows_in_which_nothing_came_are_left_out(tmp_path):
    assert value_at(record_of(tmp_path, {"accuracy": 0.5}, {}), 2, 1) == 0.5
    assert math.isnan(value_at(record_of(tmp_path, {"accuracy": 0.5}, {}, {"skill": None}), 3, 1))  # of one that failed


def test_methods_that_were_judged_on_nothing_are_one_line(tmp_path, plan, monkeypatch):
    monkeypatch.setattr(tournament, "value_at", lambda *_: math.nan)
    with pytest.raises(FedtideError, match="could be compared, as they failed: A: no accuracy on validation rows"):
        execute(begun(tmp_path / "t", A, PROX), workers=1)


@pytest.mark.parametrize(
    "line",
    ["{}", "[]", '{"rung": {"rounds": 1, "seeds": [], "values": {"B": {"0": 1.0}}, "kept": []}, "spent": 1}', "x"],
)
def test_a_damaged_ladder_is_one_line(tmp_path, line):
    root = begun(tmp_path / "t", A, PROX)
    with open(root / tournament.LADDER, "a", encoding="utf-8") as file:
        file.write(line + "\n")
    with pytest.raises(FedtideError, match=r"ladder.jsonl.*damaged"):
        read_tournament(root)


def test_the_value_of_a_run_weighs_skills_by_the_error_of_the_constant(tmp_path):
    """Errors 4 of a constant's 1 and 4.5 of 9: of all these rows the skill is 1 - 8.5 / 10; later ones do not count."""
    scores = [{"skill": -3.0, "reference": 1.0}, {"skill": 0.5, "reference": 9.0}, {"skill": 0.9, "reference": 7.0}]
    record_of(tmp_path, *scores)
    assert value_at(tmp_path, 2, 2) == pytest.approx(0.15)
    assert value_at(tmp_path, 1, 2) == -3.0


def test_trees_are_judged_on_the_rows_of_a_rung_and_named_without_scikit_learn(tmp_path, plan, monkeypatch):
    root = begun(tmp_path / "t", A, PROX)
    config = root / "config.toml"
    config.write_text(config.read_text().replace("references = []", 'references = ["tree"]'))
    assert execute(root, workers=1)
    made = read_tournament(root)
    people = population_of(played_by(made.study), made.study.shift, 2)
    (view,) = views(people, named=("val",))
    by_hand = References(people, ("tree",)).scores(view.clients, Moment(1, 4, 1.0), "val")["tree"]
    assert made.reached[0].references["a boosted tree"][2] == pytest.approx(by_hand)
    assert ["a boosted tree", "reference"] in [row[:2] for row in standings_table(made).rows]
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    bare = begun(tmp_path / "bare", A, PROX)
    (bare / "config.toml").write_text(config.read_text())
    assert execute(bare, workers=1)
    assert "fedtide[trees]" in standings_table(read_tournament(bare)).rows[-1][-1]
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert "fedtide[trees]" in notes_on_missing(("tree",))[0]
