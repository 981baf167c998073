"""What is shown of a population before a run, by hand: two groups that take turns, each with a class of its own."""

import json

import numpy as np
import pytest
import torch

import fedtide as ft
from fedtide.cli.commands import main
from fedtide.data.rows import make_rows
from fedtide.inspection.preview import Preview, Shown, pictures
from fedtide.laws.case import TOY


def turns(period=4.0, clients=6):
    """Clients 0, 2, 4 hold class 0 and 1, 3, 5 class 1; the groups take turns of half a period."""
    y = torch.arange(60) % 2
    kind = ft.shift.BlockCyclic(period=period, phase=0.0)
    return ft.population(
        torch.randn(60, 3), y, client=torch.arange(60) % clients, groups=ft.data.ByLabels(((0,), (1,)), ("a", "b")),
        shift=ft.Shift(who=kind),
    )  # fmt: skip


def test_who_arrives_decides_the_mix():
    shown = Preview(turns(), rounds=8, cohort=2)
    assert np.isin(shown.expected, (0.0, 1.0)).all()
    assert (shown.arrived == shown.expected).all()
    assert (shown.mix == shown.expected).all()  # a group is a class
    assert set(map(tuple, shown.mix.tolist())) == {(1.0, 0.0), (0.0, 1.0)}
    assert (
        shown.labels.sum(0).tolist() == shown.labels[::2].sum(0).tolist()[:1] + shown.labels[1::2].sum(0).tolist()[1:]
    )
    assert shown.changed is None
    assert "the mix of labels that arrives is up to 0.50 from its mean (total variation)" in shown.lines()


def test_dealt_at_random_clients_are_as_far_apart_as_chance_has_it():
    people = ft.population(torch.zeros(4000, 2), torch.arange(4000) % 4, ft.data.IID(clients=20))
    real, dealt = Preview(people, rounds=2, cohort=5).label_distance
    assert abs(real - dealt) < 0.03


def test_one_round_is_shown_without_a_warning(tmp_path):
    Shown("one round", [Preview(turns(), rounds=1, cohort=2)]).write(tmp_path / "show.html")
    assert (tmp_path / "show.html").is_file()


def test_no_more_clients_arrive_than_there_are():
    study = {**TOY, "method": [{"name": "A", "algorithm": "fedavg", "cohort": 3}]}
    shown = ft.show(study, clients_per_round=50).previews[0]
    assert shown.cohort == shown.population.registered < 50


def test_words_by_the_hour_by_hand():
    """0 is padding, 2 the end of a sentence, 3 and 4 are words outside the vocabulary.

    At one o'clock, on two days: two known words; three words, two of them unknown. At 13: one word, unknown.
    """
    y = torch.tensor([[5, 6, 2, 0], [3, 5, 4, 2], [4, 2, 0, 0]])
    time = np.array([3600.0 + 600, 86400 + 3600 + 3000, 13 * 3600])
    rows = make_rows("words", 7, x=y, y=y, padding=0, unscored=(2, 3, 4), client=np.arange(3), time=time)
    shown = Preview(ft.population(rows), rounds=1, cohort=1)
    sentences, words, unknown = shown.words
    assert {h: (sentences[h], words[h], unknown[h]) for h in np.flatnonzero(sentences)} == {1: (2, 5, 2), 13: (1, 1, 1)}
    figure = {title: drawn for title, _, drawn in pictures(shown)}["Words by the hour"].figure
    above, middle, _ = figure.axes
    assert [list(axes.lines[0].get_ydata()[[1, 13]]) for axes in (above, middle)] == [[40.0, 100.0], [2.5, 1.0]]


def test_rows_without_words_or_times_have_no_words_by_the_hour():
    assert Preview(turns(), rounds=8, cohort=2).words is None
    y = torch.tensor([[5, 6, 2, 0]] * 2)
    rows = make_rows("words", 7, x=y, y=y, padding=0, unscored=(2, 3, 4), client=np.arange(2))
    assert Preview(ft.population(rows), rounds=1, cohort=1).words is None


def test_the_command_prints_lines_and_writes_a_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["show", "recipe:fielding-fmow", "--scale", "nano", "--json"])
    assert not end.value.code
    told = json.loads(capsys.readouterr().out)
    assert told["page"] == "fielding-fmow-show.html"
    assert any(line.startswith("clients change in") for line in told["lines"])
    assert "How the mix moves" in (tmp_path / told["page"]).read_text(encoding="utf-8")
    assert not (tmp_path / "runs").exists()
