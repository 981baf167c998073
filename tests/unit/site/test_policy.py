"""A node's own rules: read strictly, and refused in words."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedtide.core.base import Scores
from fedtide.core.errors import FedtideError
from fedtide.site.policy import LARGEST, Policy

ALL = """
reveals = ["pi"]
questions = ["train", "score"]
fewest = 3
"""


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "policy.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def header(**values: Any) -> dict[str, Any]:
    return {"kind": "ask", "question": "train", "reveal": [], "members": 5, **values}


def test_rules_are_read(tmp_path):
    assert Policy.read(written(tmp_path, ALL)) == Policy(reveals=("pi",), questions=("train", "score"), fewest=3)


def test_a_rule_that_is_not_there_forbids_nothing(tmp_path):
    policy = Policy.read(written(tmp_path, ""))
    assert policy == Policy()
    assert policy.refuses(header(question="any", reveal=["all"], members=1)) is None


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (header(), None),
        (header(reveal=["pi"]), None),
        (header(kind="score", question="adapt"), None),
        (header(members=3), None),
        (header(question="report"), "its owner does not allow the question 'report'; allowed: train, score"),
        (header(reveal=["pi", "mu"]), "its owner does not reveal 'mu'; allowed: pi"),
        (header(members=2), "its owner does not answer for a sum of 2; allowed: 3 clients or more"),
        ({"kind": "ask", "question": "train", "reveal": []},
         "its owner does not answer for a sum of 0; allowed: 3 clients or more"),
    ],
)  # fmt: skip
def test_what_is_forbidden_is_refused_in_words(tmp_path, asked, why):
    assert Policy.read(written(tmp_path, ALL)).refuses(asked) == why


def test_empty_lists_allow_nothing():
    policy = Policy(reveals=(), questions=())
    assert policy.refuses(header()) == "its owner does not allow the question 'train'; allowed: nothing"
    assert policy.refuses(header(kind="score")) == "its owner does not allow the question 'score'; allowed: nothing"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("reveals = 'pi'", r"reveals: found 'pi', allowed: a list of values"),
        ("reveals = [1]", r"reveals\[0\]: found 1, allowed: a string"),
        ("questions = [\"\"]", r"questions.*: found '', allowed: 1 or more"),
        ("fewest = 0", r"fewest: found 0, allowed: 1 or more"),
        ("fewest = true", r"fewest: found True, allowed: a whole number"),
        ("fewest = 3.0", r"fewest: found 3\.0, allowed: a whole number"),
        ("reveal = []", r"reveal: unknown key; allowed: reveals, questions, .*; did you mean 'reveals'\?"),
        ("fewest", r"damaged or not TOML|nested too deeply"),
        ("fewest = 3\nfewest = 4", r"damaged or not TOML|nested too deeply"),
        (b"\xff", r"damaged or not TOML|nested too deeply"),
        ("x = " + "[" * 5000, r"damaged or not TOML|nested too deeply"),
        ("#" * (LARGEST + 1), r"bytes: found .more than 65,536., allowed: at most 65,536"),
    ],
)  # fmt: skip
def test_what_is_no_rule_is_named(tmp_path, text, line):
    path = written(tmp_path, text)
    with pytest.raises(FedtideError, match=line) as caught:
        Policy.read(path)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("name", ["none.toml", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path, name):
    with pytest.raises(FedtideError, match=r"no such file|is a folder"):
        Policy.read(tmp_path / name)


def test_what_is_told_of_an_evaluation():
    one, two = torch.tensor([40.0, 0.0]).double(), torch.tensor([[30.0, 10.0], [0.0, 0.0]]).double()
    scores = Scores(torch.arange(2), one, one, 1.23456 * one, two, two, {"gate": one, "vote": one}, one)
    told = Policy(reveals=("weights", "vote")).shown(scores)
    assert told.loss.tolist() == pytest.approx([49.2, 0.0])
    assert (told.choice, told.density, list(told.others)) == (None, None, ["vote"])
    assert told.weights is two
    assert (told.rows is one, told.correct is one) == (True, True)
    all_of_it = Policy().shown(scores)
    assert (all_of_it.choice is two, list(all_of_it.others)) == (True, ["gate", "vote"])
    for odd in (math.nan, math.inf):
        assert not math.isfinite(Policy().shown(replace(scores, loss=one * odd)).loss[0])
