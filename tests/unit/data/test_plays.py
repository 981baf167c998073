"""The text that ships with the package: what it holds, where it is from, and that it is small."""

from __future__ import annotations

import gzip
import json
import os
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from fedtide.data.sources import PlayRoles

FILE = Path(str(files("fedtide.data").joinpath("bundled/plays.jsonl.gz")))


@pytest.fixture(scope="module")
def lines():
    with gzip.open(FILE, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@pytest.fixture(scope="module")
def rows():
    return PlayRoles().load(None, 0)


def test_the_file_is_small_and_has_two_domains_of_similar_size(lines):
    assert FILE.stat().st_size < 400_000
    size = {
        domain: sum(len(s) for x in lines if x["domain"] == domain for s in x["speeches"])
        for domain in ("day", "night")
    }
    assert size["day"] == pytest.approx(size["night"], rel=0.1)
    assert [sum(x["domain"] == domain for x in lines) for domain in ("day", "night")] == [125, 123]
    assert len({(x["play"], x["role"]) for x in lines}) == len(lines)


def test_comedies_are_day_and_tragedies_and_histories_night(lines):
    assert {(x["genre"], x["domain"]) for x in lines} == {("comedy", "day"), ("tragedy", "night"), ("history", "night")}
    of = {genre: {x["play"] for x in lines if x["genre"] == genre} for genre in ("comedy", "tragedy", "history")}
    assert [len(of[genre]) for genre in of] == [11, 6, 5]
    assert {"midsummer", "tempest"} < of["comedy"]
    assert {"hamlet", "lear"} < of["tragedy"]
    assert {"henryv", "richardiii"} < of["history"]


def test_roles_are_clients_and_the_most_frequent_words_come_first(rows):
    assert (rows.name, rows.shape, rows.steps, rows.classes) == ("play-roles", (20,), 20, 1023)
    assert (rows.domain_names, len(rows.client_names), rows.padding) == (("day", "night"), 248, 0)
    assert rows.unscored == (2, *range(3, 23))  # ends, and twenty numbers for words that are not known
    assert "hamlet/HAMLET" in rows.client_names
    for client in range(248):
        assert len(rows.domain[rows.client == client].unique()) == 1
    train = rows.y[~rows.held_out]
    counts = torch.bincount(train.flatten(), minlength=1023)
    assert (counts[23:-1] >= counts[24:]).all()
    known = counts[23:].sum() / (train > 2).sum()
    assert 0.75 < known < 0.9  # a thousand words make most of what is said


@pytest.mark.shared
def test_every_speech_is_a_roles_own_in_the_order_spoken(lines):
    beside = Path(__file__).resolve().parents[4] / "shared" / "data"
    source = Path(os.environ.get("FEDTIDE_DATA") or beside) / "shakespeare" / "mit_shakespeare_roles.jsonl.gz"
    if not source.is_file():
        pytest.skip(f"no file {source}")
    with gzip.open(source, "rt", encoding="utf-8") as file:
        known = {(x["play"], x["role"]): x["speeches"] for x in map(json.loads, file)}
    for x in lines:
        assert known[x["play"], x["role"]][: len(x["speeches"])] == x["speeches"]
