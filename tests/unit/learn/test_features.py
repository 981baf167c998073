"""Features that mixtures live in: public principal components, frozen networks, the first model as it is."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.learn.features import PCA, Frozen, Network, principal
from fedtide.learn.task import Task


def net():
    model = nn.Sequential()
    model.add_module("dense", nn.Linear(6, 4))
    model.add_module("relu", nn.ReLU())
    model.add_module("head", nn.Linear(4, 3))
    return model


def rows(n: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(n, 6)) * np.arange(6, 0, -1)).float()


def task(public: int = 50) -> Task:
    return Task(net, example=rows(1), public=rows(public) if public else None)


def test_principal_components_are_those_of_scikit_learn_up_to_their_sign():
    decomposition = pytest.importorskip("sklearn.decomposition")
    x = rows(50)
    theirs = decomposition.PCA(3, svd_solver="full").fit(x.double().numpy())
    center, components = principal(x, 3)
    np.testing.assert_allclose(center.numpy(), theirs.mean_, atol=1e-6)
    np.testing.assert_allclose(np.abs(components.numpy()), np.abs(theirs.components_.T), atol=1e-6)
    extract = PCA(width=3).of(task())
    found = extract(task().init(Rng(0)), rows(7, 1)).numpy()
    np.testing.assert_allclose(np.abs(found), np.abs(theirs.transform(rows(7, 1).double().numpy())), atol=1e-5)


def test_the_largest_entry_of_each_component_is_above_zero():
    _, components = principal(rows(50), 4)
    assert bool((components.gather(0, components.abs().argmax(0, keepdim=True)) > 0).all())


def test_the_space_of_public_components_does_not_depend_on_the_model_nor_on_who_asks_first():
    one, two = PCA(width=2).of(task()), PCA(width=2).of(task())
    first, x = task().init(Rng(0)), rows(5, 2)
    late = two(task().init(Rng(1)), rows(9, 3)), two(task().init(Rng(2)), x)
    assert torch.equal(one(first, x), late[1])


def test_a_network_gives_what_goes_into_its_head_as_it_is_now():
    made = task(public=0)
    extract, x = Network().of(made), rows(5)
    for seed in (0, 1):
        model = made.init(Rng(seed))
        wanted = torch.relu(x @ model.params["dense.weight"].T + model.params["dense.bias"])
        torch.testing.assert_close(extract(model, x), wanted.double(), rtol=1e-6, atol=1e-6)


def test_a_frozen_network_does_not_follow_the_model_and_may_come_from_a_file(tmp_path):
    made, x = task(public=0), rows(5)
    extract = Frozen().of(made)
    assert torch.equal(extract(made.init(Rng(0)), x), extract(made.init(Rng(1)), x))
    assert not torch.equal(extract(made.init(Rng(0)), x), Frozen(seed=1).of(made)(made.init(Rng(0)), x))
    held = made.init(Rng(7))
    save_file(dict(held.params), tmp_path / "net.safetensors")
    from_file = Frozen(weights=str(tmp_path / "net.safetensors")).of(made)
    assert torch.equal(from_file(made.init(Rng(0)), x), Network().of(made)(held, x))


def test_features_of_a_frozen_network_can_be_projected():
    assert Frozen(width=2).of(task())(task().init(Rng(0)), rows(5)).shape == (5, 2)


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda folder: PCA().of(task(public=0)), "features.kind: 'pca' needs public rows, found 0"),
        (lambda folder: PCA(width=7).of(task()), "features.width: found 7, allowed: at most 6, with 50 public"),
        (lambda folder: PCA(width=6).of(task(public=4)), "features.width: found 6, allowed: at most 3"),
        (lambda folder: Network(layer="hed").of(task()), "layer: found 'hed'"),
        (lambda folder: Frozen(weights=str(folder / "none")).of(task()), "none: no such file"),
        (lambda folder: Frozen(weights=str(folder / "text")).of(task()), "text: not a file of safetensors"),
        (
            lambda folder: Frozen(weights=str(folder / "other")).of(task()),
            "shape of 'dense.weight': found (2, 2), allowed",
        ),
    ],
)
def test_what_cannot_be_is_said_in_one_line(make, line, tmp_path):
    (tmp_path / "text").write_text("no tensors")
    save_file({"dense.weight": torch.zeros(2, 2)}, tmp_path / "other")
    with pytest.raises(FedtideError) as caught:
        make(tmp_path)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_seed_beside_a_file_of_weights_is_refused():
    with pytest.raises(FedtideError, match="found seed 3 and weights, allowed: one of the two"):
        Frozen(weights="net.safetensors", seed=3)
