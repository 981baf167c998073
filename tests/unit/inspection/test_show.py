"""What is shown of a population before a run, by hand: two groups that take turns, each with a class of its own."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import fedtide as ft
from fedtide.cli.commands import main
from fedtide.core.errors import FedtideError
from fedtide.inspection.preview import ROUNDS, Preview
from fedtide.inspection.preview_page import pictures
from helpers.toys import toy

TITLES = ["Rows of each client", "Who holds which labels", "Who is there", "How the mix moves", "Which domains"]


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
    lines = shown.lines()
    assert "groups: a 3 and b 3" in lines
    assert "of those who arrive 0 to 100 % are a" in lines
    assert "the mix of labels that arrives is up to 0.50 from its mean (total variation)" in lines
    assert any(
        line.startswith("labels: the median client has 1 of 2 classes; a client's mix is 0.50") for line in lines
    )


def test_dealt_at_random_clients_are_as_far_apart_as_chance_has_it():
    people = ft.population(torch.zeros(4000, 2), torch.arange(4000) % 4, ft.data.IID(clients=20))
    real, dealt = Preview(people, rounds=2, cohort=5).label_distance
    assert abs(real - dealt) < 0.03


@pytest.mark.parametrize(("period", "last"), [(4.0, ROUNDS - 1), (400.0, 999)])
def test_of_many_rounds_those_are_looked_at_that_show_the_rhythm(period, last):
    shown = Preview(turns(period), rounds=1000, cohort=2)
    assert (len(shown.moments), shown.moments[-1].round) == (ROUNDS, last)


def test_every_shift_of_an_experiment_is_shown_with_its_pictures(tmp_path):
    experiment = toy("fedavg", rounds=6)
    shown = ft.show(experiment)
    (each,) = shown.previews
    assert [title for title, _, _ in pictures(each)] == TITLES
    assert shown.write(tmp_path / "show.html").read_text(encoding="utf-8").count("<svg") >= 3
    assert "<svg" in shown._repr_html_()
    assert repr(shown).splitlines() == each.lines()
    with pytest.raises(FedtideError, match=r"/page: not the name of a page; allowed: one that ends in .html"):
        shown.write(tmp_path / "page")


def test_the_command_prints_lines_and_writes_a_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["show", "recipe:fielding-fmow", "--scale", "nano", "--json"])
    assert not end.value.code
    told = json.loads(capsys.readouterr().out)
    assert told["page"] == "show.html"
    assert any(line.startswith("clients change in") for line in told["lines"])
    assert "How the mix moves" in (tmp_path / "show.html").read_text(encoding="utf-8")
    assert not (tmp_path / "runs").exists()
