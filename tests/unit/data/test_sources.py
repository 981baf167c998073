"""Sources that are drawn, written in Python, bundled or put together, and where files are looked for."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from fedtide.core.errors import FedtideError
from fedtide.data.rows import Rows
from fedtide.data.sources import (
    CIFAR,
    CSV,
    IDX,
    NPZ,
    DayNightCharacters,
    Gaussians,
    Python,
    Source,
    from_arrays,
)

# -- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty current folder, and no data directory in the environment."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("FEDTIDE_DATA", raising=False)
    return tmp_path


def one_row(path, label: int) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"a,label\n1,{label}\n")


@pytest.mark.parametrize("source", [IDX("gone"), CIFAR("gone"), NPZ("gone.npz"), CSV("gone.csv")])
def test_a_missing_file_is_one_line_that_says_where_it_was_looked_for(elsewhere, source, monkeypatch):
    monkeypatch.setenv("FEDTIDE_DATA", str(elsewhere / "by-environment"))
    with pytest.raises(FedtideError, match="no such file or folder") as caught:
        source.load(elsewhere / "by-setting", 0)
    line = str(caught.value)
    for place in ("by-setting", "by-environment"):
        assert str(elsewhere / place / source.path) in line
    assert "set data.directory or FEDTIDE_DATA" in line


def test_the_data_directory_comes_before_the_environment_and_the_current_folder(elsewhere, monkeypatch):
    monkeypatch.setenv("FEDTIDE_DATA", str(elsewhere / "b"))
    for label, folder in ((2, elsewhere / "here"), (1, elsewhere / "b"), (0, elsewhere / "a")):
        one_row(folder / "data.csv", label)
        assert CSV("data.csv").load(elsewhere / "a", 0).y.tolist() == [label]


def test_a_folder_called_in_the_environment_is_honored(elsewhere, monkeypatch):
    one_row(elsewhere / "b" / "data.csv", 1)
    with pytest.raises(FedtideError, match="FEDTIDE_DATA"):
        CSV("data.csv").load(None, 0)
    monkeypatch.setenv("FEDTIDE_DATA", str(elsewhere / "b"))
    assert CSV("data.csv").load(None, 0).y.tolist() == [1]


def test_an_absolute_path_is_taken_as_it_is(elsewhere):
    one_row(elsewhere / "b" / "data.csv", 1)
    one_row(elsewhere / "a" / "data.csv", 0)
    assert CSV(str(elsewhere / "b" / "data.csv")).load(elsewhere / "a", 0).y.tolist() == [1]


# -- arrays and functions ---------------------------------------------------------------------------------------------

MODULE = """
import numpy as np
import torch
from fedtide.data.rows import Rows

X = np.arange(12.0).reshape(4, 3)

def rows(): return Rows("mine", torch.zeros(2, 3), torch.tensor([0, 1]), 2)
def pair(): return X, [0, 1, 1, 0]
def mapping(n=4): return {"x": X[:n], "y": ["b", "a", "a", "b"][:n], "client": [7, 7, 9, 9][:n]}
def tensors(): return torch.ones(2, 3), torch.tensor([0, 1])
def misspelt(): return {"x": X, "y": [0, 1, 1, 0], "clients": [7, 7, 9, 9]}
def unlabeled(): return {"x": X}
def short(): return X, [0, 1]
def words(): return [["a"], ["b"]], [0, 1]
def number(): return 5
"""


@pytest.fixture
def mine(elsewhere, monkeypatch):
    """A module of the user's own, in the current folder."""
    (elsewhere / "here" / "my_rows_for_tests.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield lambda name, **options: Python(f"my_rows_for_tests:{name}", options).load(None, 0)
    sys.modules.pop("my_rows_for_tests", None)


def test_a_function_may_return_rows_a_mapping_or_a_pair(mine):
    assert mine("rows").name == "mine"
    assert mine("pair").y.tolist() == [0, 1, 1, 0]
    assert mine("tensors").x.tolist() == [[1.0] * 3] * 2
    rows = mine("mapping")
    assert (rows.y.tolist(), rows.classes) == ([1, 0, 0, 1], 2)
    assert (rows.client.tolist(), rows.client_names) == ([0, 0, 1, 1], ("7", "9"))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("misspelt", "my_rows_for_tests:misspelt: found 'clients', allowed: .*; did you mean 'client'"),
        ("unlabeled", "my_rows_for_tests:unlabeled: .*y"),
        ("short", "my_rows_for_tests:short: rows of y: found 2, allowed: 4, as in x"),
        ("words", "my_rows_for_tests:words: x: not an array of numbers"),
        (
            "number",
            r"my_rows_for_tests:number: found .*, allowed: a function that returns Rows, a mapping",
        ),
        ("absent", "data.source.function: cannot import 'my_rows_for_tests:absent'"),
    ],
)
def test_a_function_that_returns_something_else_is_one_line(mine, name, line):
    with pytest.raises(FedtideError, match=line):
        mine(name)


@pytest.mark.parametrize("function", ["no_such_module_anywhere:load", "json", "json:", ":load", "json:decoder.absent"])
def test_a_function_that_cannot_be_imported_is_one_line(elsewhere, monkeypatch, function):
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(FedtideError, match=f"data.source.function: .*'{function}'"):
        Python(function).load(None, 0)


@pytest.mark.parametrize(
    "y", [["cat", "dog", "cat"], np.array(["cat", "dog", "cat"], dtype=object), np.array(["cat", "dog", "cat"])]
)
def test_labels_may_be_names(y):
    rows = from_arrays("toy", np.zeros((3, 2)), y)
    assert (rows.y.tolist(), rows.classes) == ([0, 1, 0], 2)


@pytest.mark.parametrize("y", [[0, 2, 1], [0.0, 2.0, 1.0], torch.tensor([0, 2, 1]), np.array([0, 2, 1], np.uint8)])
def test_labels_may_be_whole_numbers_of_any_type(y):
    rows = from_arrays("toy", np.zeros((3, 2)), y)
    assert (rows.y.tolist(), rows.y.dtype, rows.classes) == ([0, 2, 1], torch.int64, 3)


def test_an_array_that_cannot_be_written_to_is_copied():
    x = np.zeros((2, 2))
    x.flags.writeable = False  # as a column of pandas is
    assert from_arrays("toy", x, [0, 1]).x.tolist() == [[0.0, 0.0]] * 2


# -- Gaussians --------------------------------------------------------------------------------------------------------


def test_gaussians_follow_their_seed():
    once, again, other = (Gaussians(samples=40).load(None, seed) for seed in (3, 3, 4))
    assert torch.equal(once.x, again.x)
    assert torch.equal(once.y, again.y)
    assert not torch.equal(once.x, other.x)


def test_gaussians_leave_global_randomness_alone():
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    Gaussians().load(None, 0)
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # noqa: NPY002


@pytest.mark.parametrize(
    ("domains", "names"), [(1, ("domain 0",)), (2, ("day", "night")), (3, ("domain 0", "domain 1", "domain 2"))]
)
def test_gaussians_have_the_sizes_that_are_asked_for(domains, names):
    rows = Gaussians(samples=30, test_samples=12, classes=3, dims=5, domains=domains).load(None, 0)
    assert rows.domain_names == names
    assert rows.x.shape == (42 * domains, 5)
    for domain in range(domains):
        for held_out, n in ((False, 10), (True, 4)):
            mine = (rows.domain == domain) & (rows.held_out == held_out)
            assert torch.bincount(rows.y[mine]).tolist() == [n] * 3


def test_gaussian_labels_lie_in_a_place_of_their_own_in_each_domain():
    rows = Gaussians(samples=80, test_samples=40, classes=4, noise=1e-3).load(None, 0)
    centers = {}
    for domain in range(2):
        for label in range(4):
            blob = rows.x[(rows.domain == domain) & (rows.y == label)]
            centers[domain, label] = blob.mean(0)
            assert (blob - blob.mean(0)).abs().max() < 0.01
    places = torch.stack(list(centers.values()))
    assert (torch.cdist(places, places) + torch.eye(8) > 0.1).all()


def test_gaussian_centers_spread_as_they_are_told():
    rows = Gaussians(samples=400, classes=200, dims=50, domains=2, separation=2.0, offset=0.0, noise=1e-3).load(None, 0)
    assert abs(float(rows.x[rows.domain == 0].std()) - 2.0) < 0.1
    shifted = Gaussians(samples=400, dims=2000, domains=2, separation=0.0, offset=3.0, noise=1e-3).load(None, 0)
    assert abs(float(shifted.x[0].std()) - 3.0) < 0.2


# -- bundled pictures -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared_characters() -> Rows:
    return DayNightCharacters().load(None, 0)


def test_bundled_digits_and_letters_share_ten_labels(shared_characters):
    rows = shared_characters
    assert (rows.x.dtype, rows.shape, rows.classes) == (torch.uint8, (1, 28, 28), 10)
    assert rows.domain_names == ("day", "night")
    for domain in (0, 1):
        for held_out, n in ((False, 600), (True, 100)):
            mine = (rows.domain == domain) & (rows.held_out == held_out)
            assert torch.bincount(rows.y[mine]).tolist() == [n] * 10


def test_bundled_digits_and_letters_have_labels_of_their_own(shared_characters):
    rows = DayNightCharacters("disjoint").load(None, 0)
    assert (len(rows), rows.classes, rows.domain_names) == (14_280, 36, ("day", "night"))
    assert torch.equal(rows.domain, (rows.y >= 10).long())
    for held_out, digits, letters in ((False, 600, 240), (True, 100, 40)):
        assert torch.bincount(rows.y[rows.held_out == held_out]).tolist() == [digits] * 10 + [letters] * 26
    digits = rows.x[rows.domain == 0]
    assert torch.equal(digits, shared_characters.x[shared_characters.domain == 0])


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [
    {"kind": "domains", "names": ["a"], "sources": ["gaussians"]}, {"kind": "gaussians", "samples": 0},
    {"kind": "domains", "names": ["a", "b"], "sources": ["gaussians", {"kind": "domains"}]},
    {"kind": "cifar", "path": "here", "classes": 20}, {"kind": "npz", "path": "here", "names": {"label": "y"}},
    {"kind": "csv"}, {"kind": "mnist"},
], ids=str)  # fmt: skip
def test_settings_out_of_range_are_refused(value):
    with pytest.raises(ValidationError):
        TypeAdapter(Source).validate_python(value)
