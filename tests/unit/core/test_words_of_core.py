"""Small things that everything else relies on: errors, imports by name, costs, scores, shards."""

import math

import pytest
import torch

from fedtide.core.base import Scores, Shard
from fedtide.core.errors import FedtideError, nearest
from fedtide.fields.types import by_kind
from fedtide.fields.user_code import imported

# -- errors ------------------------------------------------------------------------------------------------------------


def test_an_error_is_one_line_whatever_it_was_made_of():
    cut = str(FedtideError(f"kind: found 'x', allowed: {', '.join(f'choice-{number}' for number in range(300))}"))
    assert {word.strip(",") for word in cut.split()[4:]} <= {"...", *(f"choice-{number}" for number in range(300))}
    assert str(FedtideError("a file:\n  line 3\r\n\tcolumn   4 ")) == "a file: line 3 column 4"


@pytest.mark.parametrize(("word", "meant"), [
    ("perod", "period"), ("phas", "phase"), ("Period", "period"), ("zzz", None), ("", None),
])  # fmt: skip
def test_the_nearest_spelling_is_offered_where_there_is_one(word, meant):
    said = nearest(word, ["period", "phase", "curve"])
    assert said.endswith("llowed: period, phase, curve")
    assert said.startswith(f"did you mean '{meant}'? Allowed: ") == (meant is not None)


# -- the user's own code -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", ":", "module", "module:", ":function"])
def test_a_name_without_two_parts_says_what_is_allowed(name):
    with pytest.raises(FedtideError, match=rf"^model.function: found '{name}', allowed: module:function$"):
        imported(name, "model.function")


@pytest.mark.parametrize("name", ["no_such_module_at_all:f", "math:no_such", "math:pi.x.y", "json.nothing:f"])
def test_a_name_that_cannot_be_imported_is_one_clear_line(name):
    with pytest.raises(FedtideError, match=rf"^data.source.function: cannot import '{name}' \(.*\)$"):
        imported(name, "data.source.function")


# -- short spellings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "expected"), [
    ("iid", {"kind": "iid"}),
    ("idx:mnist", {"kind": "idx", "path": "mnist"}),
    ("csv:C:/data/x.csv", {"kind": "csv", "path": "C:/data/x.csv"}),
    ("python:mine:load", {"kind": "python", "function": "mine:load"}),
    ("python", {"kind": "python"}),
    ({"kind": "iid"}, {"kind": "iid"}),
    (3, 3),
    (None, None),
])  # fmt: skip
def test_a_choice_may_be_spelled_as_a_word(value, expected):
    assert by_kind(value) == expected


# -- what travels ------------------------------------------------------------------------------------------------------


def scores() -> Scores:
    clients, rows = torch.tensor([2, 5, 9]), torch.tensor([4.0, 0.0, 6.0], dtype=torch.float64)
    correct, loss = torch.tensor([1.0, 0.0, 6.0]), torch.tensor([2.0, 0.0, 3.0])
    return Scores(clients, rows, correct, loss, torch.eye(3), 2 * torch.eye(3))


def test_pooled_accuracy_counts_rows_and_not_clients():
    assert scores().accuracy == 0.7
    assert len(scores()) == 3


def test_accuracy_without_rows_is_unknown():
    assert math.isnan(scores().pick(torch.tensor([1])).accuracy)
    assert math.isnan(scores().pick(torch.zeros(3, dtype=torch.bool)).accuracy)


def test_scores_are_picked_by_mask_or_by_position_with_everything_that_belongs_to_them():
    for where in (torch.tensor([True, False, True]), torch.tensor([0, 2])):
        picked = scores().pick(where)
        assert picked.clients.tolist() == [2, 9]
        assert picked.choice.tolist() == [[1, 0, 0], [0, 0, 1]]
        assert picked.weights.tolist() == [[2, 0, 0], [0, 0, 2]]
        assert picked.accuracy == 0.7


def test_validation_rows_are_fetched_once_and_only_when_they_are_looked_at():
    fetched = []
    val = Shard(torch.zeros(1, 2), torch.zeros(1), torch.zeros(1))
    shard = Shard(torch.zeros(3, 2), torch.zeros(3), torch.arange(3), fetch_val=lambda: fetched.append(1) or val)
    assert (len(shard), fetched) == (3, [])
    assert shard.val is val
    assert shard.val is val
    assert fetched == [1]
    assert val.val is None
