"""Checking a person's own algorithm: what is right passes, and every mistake is found and said in words."""

from contextlib import nullcontext

import pytest

from fedtide.algorithms import REGISTRY
from fedtide.core.errors import FedtideError
from fedtide.laws import every as checking
from fedtide.laws.every import LAWS, check

FAULTS = {
    "melted": ("state", "`init` and `round` return Melted, allowed: a frozen dataclass"),
    "impure": ("purity", "'train' changes its payload in place"),
    "noise": ("determinism", "it draws from NumPy's global generator"),
    "reveal": ("sums", "the server sees 'loss' of single clients, and `reveals` of the Algorithm does not name it"),
    "closure": ("resume", "something is kept outside of the state"),
    "nobody": ("dropouts", "(fednova.py, line "),
    "empty": ("degenerate", "ZeroDivisionError: division by zero (if the rows of one client are odd: no sample)"),
    "share": ("update", "the update of an answer to 'train' is not what its local training did"),
    "mixing": ("pooled", "`predict` mixes rows"),
}


@pytest.fixture(autouse=True)
def workers(monkeypatch, pool):
    """The processes of all tests, in place of new ones for each check."""
    monkeypatch.setattr(checking, "Pool", lambda size, joined: nullcontext(pool))


def only(monkeypatch, name: str) -> None:
    """Leave the laws of a name, and that it can be played at all."""
    monkeypatch.setattr(checking, "LAWS", [law for law in LAWS if law is LAWS[0] or law.name == name])


def test_an_algorithm_that_is_right_keeps_every_law():
    verdicts = list(check("python:helpers.fednova:fednova"))
    assert [verdict for verdict in verdicts if verdict.broken] == []
    assert [verdict.law.check.__name__ for verdict in verdicts if verdict.silent] == ["stacks", "numbers"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_is_found_and_said_in_words(fault, monkeypatch):
    name, words = FAULTS[fault]
    only(monkeypatch, name)
    found = [v for v in check("helpers.fednova:fednova", [f"method.fault={fault}"]) if v.broken]
    assert any(verdict.law.name == name and words in str(verdict.broken) for verdict in found), found


def test_a_registered_name_may_be_checked_and_its_exemptions_are_said(monkeypatch):
    only(monkeypatch, "update")
    played, exempt = check("local")
    assert (played.broken, played.silent, exempt.broken) == (None, None, None)
    assert exempt.silent == REGISTRY["local"].exempt["update"]


@pytest.mark.parametrize(("name", "sets", "line"), [
    ("fedavgg", [], "did you mean 'fedavg'"),
    ("helpers.fednova:fednov", [], "cannot import 'helpers.fednova:fednov'"),
    ("helpers.fednova:fednova", ["method.mu=1"], "mu: unknown key"),
])  # fmt: skip
def test_a_name_or_a_key_that_there_is_not_is_an_error(name, sets, line):
    with pytest.raises(FedtideError, match=line):
        list(check(name, sets))
