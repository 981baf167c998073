"""Keys: who draws, in which order, and how often changes nothing; the values are pinned."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtide.core.rng import Rng
from helpers.examples import examples

law = examples(100)
steps = st.integers(-5, 10**6) | st.sampled_from(["train", "train#1", "val", "shuffle", "", "1", "-1"])
keys = st.tuples(st.integers(0, 2**40), st.lists(steps, max_size=4).map(tuple))


@law
@given(keys, keys)
def test_different_keys_give_different_numbers(left, right):
    numbers = [Rng(seed, path).number for seed, path in (left, right)]
    assert (numbers[0] == numbers[1]) == (left == right)


@law
@given(st.integers(0, 2**63), st.lists(steps, max_size=5))
def test_a_key_is_the_same_however_it_is_built(seed, path):
    step_by_step = Rng(seed)
    for step in path:
        step_by_step = step_by_step.at(step)
    assert step_by_step == Rng(seed).at(*path)
    assert step_by_step.number == Rng(seed).at(*path).number
    assert 0 <= step_by_step.number < 2**63


def test_a_number_and_its_spelling_are_different_keys():
    assert Rng(0).at(1).number != Rng(0).at("1").number
    assert Rng(0).at(12).number != Rng(0).at(1, 2).number
    assert Rng(0).at("a", "b").number != Rng(0).at("ab").number
    assert Rng(0).at(0).number != Rng(0).number


def test_streams_of_neighboring_keys_are_not_correlated():
    draws = np.array([Rng(0).at(0, client, "train").numpy().standard_normal(400) for client in range(50)])
    correlation = np.corrcoef(draws)[~np.eye(50, dtype=bool)]
    assert abs(correlation).max() < 0.3
    assert abs(draws.mean()) < 0.03
    first = np.array([Rng(0).at(0, client, "train").numpy().random() for client in range(2000)])
    assert abs(first.mean() - 0.5) < 0.03
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.1


def test_a_key_leaves_global_randomness_alone():
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    key = Rng(0).at("x")
    key.torch(), key.numpy().random(), key.number
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == np.random.get_state()[1].tolist()  # noqa: NPY002


@pytest.mark.parametrize(("key", "number"), [
    (Rng(0), 4_246_866_556_266_386_882),
    (Rng(0).at(-1, "server"), 1_145_532_998_586_112_504),
    (Rng(7).at(3, 12, "train", "shuffle"), 4_878_466_190_236_506_556),
    (Rng(2**40).at("judged", "unseen"), 5_826_979_974_929_658_069),
])  # fmt: skip
def test_the_hash_of_a_key_never_changes(key, number):
    """Literal values: if this fails, every published result changes."""
    assert key.number == number


def test_the_draws_of_a_key_never_change():
    """Literal values: if this fails, every published result changes."""
    key = Rng(7).at(3, 12, "train", "shuffle")
    assert torch.randperm(8, generator=key.torch()).tolist() == [6, 7, 5, 1, 2, 3, 0, 4]
    assert key.numpy().integers(0, 100, 6).tolist() == [60, 87, 88, 63, 96, 91]
    assert key.numpy().random() == 0.8758211866031766
