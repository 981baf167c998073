"""What is done to pictures before a model sees them: by hand, for any batch, and in every part of a run."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from fedtide.config import from_dict
from fedtide.core.base import Moment
from fedtide.core.errors import FedtideError
from fedtide.core.memory import MemoryStore
from fedtide.data.partition import IID, HeldOutClients, OneGroup, Rotation, Split
from fedtide.data.population_builder import build
from fedtide.data.rows import Rows
from fedtide.data.transforms import (
    CenterCrop,
    Downscale,
    Normalize,
    Prepare,
    Standardize,
    apply_transforms,
    shape_after,
)
from fedtide.fleets.engines import WorkersEngine
from fedtide.runs.build import host_of, rows_of, spec_of, task_of
from fedtide.runs.digest import digest_of
from fedtide.runs.preflight import preflight
from helpers.examples import examples
from helpers.toys import played

NOW = Moment(0, 4)
law = examples(40)

batches = st.tuples(st.integers(0, 7), st.integers(1, 3), st.integers(2, 33), st.integers(2, 33), st.integers(0, 2**32))


def pictures(rows: int, depth: int, height: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(rows, depth, height, width, generator=torch.Generator().manual_seed(seed))


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_a_crop_keeps_the_middle():
    """Of 4 x 5 two are cut to the left and one to the right of 2: (5 - 2) // 2 = 1 stays out above and to the left."""
    x = torch.arange(20.0).reshape(1, 1, 4, 5)
    assert CenterCrop(2).apply(x).tolist() == [[[[6, 7], [11, 12]]]]
    assert CenterCrop(4).apply(x).tolist() == [[[row[0:4] for row in x[0, 0].tolist()]]]
    assert torch.equal(CenterCrop(24).apply(pictures(2, 3, 32, 32)), pictures(2, 3, 32, 32)[..., 4:28, 4:28])


def test_a_picture_is_standardized_by_its_own_mean_and_deviation():
    """Of 1, 3, 5, 7 the mean is 4 and the deviation sqrt(5); of four tens it is 0, and 1/sqrt(4) takes its place."""
    x = torch.tensor([[[[1.0, 3.0], [5.0, 7.0]]], [[[10.0, 10.0], [10.0, 10.0]]]])
    made = Standardize().apply(x)
    assert made[0].flatten().tolist() == pytest.approx([v / 5**0.5 for v in (-3, -1, 1, 3)])
    assert made[1].flatten().tolist() == [0, 0, 0, 0]


def test_channels_are_normalized_each_by_its_own_numbers():
    x = torch.tensor([1.0, 1.0, 2.0, 2.0]).reshape(1, 2, 1, 2)
    assert Normalize(mean=(0.5, 1.0), std=(0.5, 0.25)).apply(x).flatten().tolist() == [1, 1, 4, 4]


def test_steps_are_done_in_order():
    """The mean of the middle alone is taken where the picture is cropped first."""
    x = torch.zeros(1, 1, 4, 4)
    x[..., 1:3, 1:3] = torch.tensor([[1.0, 3.0], [5.0, 7.0]])
    crop, standardize = CenterCrop(2), Standardize()
    first = apply_transforms((crop, standardize), x)
    assert first.flatten().tolist() == pytest.approx([v / 5**0.5 for v in (-3, -1, 1, 3)])
    assert not torch.allclose(first, apply_transforms((standardize, crop), x))


# -- for any batch -----------------------------------------------------------------------------------------------------

STEPS = {
    "center-crop": (CenterCrop(2),),
    "downscale": (Downscale(2),),
    "standardize": (Standardize(),),
    "both": (CenterCrop(2), Standardize()),
}


@pytest.mark.parametrize("name", STEPS)
@law
@given(batches)
def test_a_picture_does_not_feel_the_others_of_its_batch(name, batch):
    """To the bit: what a client's pictures are must not depend on who else is judged in the same pass."""
    x = pictures(*batch)
    made = apply_transforms(STEPS[name], x)
    assert len(made) == len(x)
    for i in range(len(x)):
        assert torch.equal(made[i], apply_transforms(STEPS[name], x[i : i + 1])[0])


@pytest.mark.parametrize("name", STEPS)
@law
@given(batches)
def test_the_shape_is_the_one_that_is_announced_and_the_input_stays_as_it_was(name, batch):
    x = pictures(*batch)
    before = x.clone()
    made = apply_transforms(STEPS[name], x)
    assert tuple(made.shape[1:]) == shape_after(STEPS[name], "toy", tuple(x.shape[1:]))
    assert made.is_contiguous()
    assert torch.equal(x, before)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "shape", "said"), [
    ((CenterCrop(29),), (1, 28, 28), r"data.transforms\[0\].size: found 29, allowed: at most 28, because images"),
    ((Standardize(), CenterCrop(5)), (1, 4, 9), r"data.transforms\[1\].size: found 5, allowed: at most 4, .* 4 x 9"),
    ((CenterCrop(8), CenterCrop(9)), (1, 28, 28), r"data.transforms\[1\].size: found 9, allowed: at most 8, .* 8 x 8"),
    ((CenterCrop(2),), (8,), r"data.transforms\[0\].kind: found 'center-crop', but rows of toy have shape \(8,\); "
                             r"allowed: images \(channels, height, width\)"),
    ((Standardize(),), (8,), r"data.transforms\[0\].kind: found 'standardize'"),
    ((Normalize(mean=(0.5,), std=(1.0,)),), (4, 4), r"data.transforms\[0\].kind: found 'normalize'"),
    ((Normalize(mean=(0.5,), std=(1.0,)),), (3, 4, 4), r"data.transforms\[0\].mean: found .0.5., allowed: one number "
                                                       r"per channel, 3"),
])  # fmt: skip
def test_steps_that_do_not_fit_are_one_line(steps, shape, said):
    with pytest.raises(FedtideError, match=said) as caught:
        shape_after(steps, "toy", shape)
    assert "\n" not in str(caught.value)
    with pytest.raises(FedtideError, match=said):
        build(Rows("toy", torch.zeros(20, *shape), torch.arange(20) % 2, 2), IID(2), transforms=steps)


@pytest.mark.parametrize("value", [
    {"kind": "center-crop"}, {"kind": "center-crop", "size": 0}, {"kind": "normalize", "mean": [0.0], "std": [0.0]},
    {"kind": "normalize", "mean": [0.0, 1.0], "std": [1.0]}, {"kind": "normalize", "mean": [], "std": []},
    {"kind": "standardize", "size": 3}, {"kind": "flip"},
])  # fmt: skip
def test_values_that_cannot_be(value):
    with pytest.raises(ValidationError):
        TypeAdapter(Prepare).validate_python(value)


# -- in a population ---------------------------------------------------------------------------------------------------

BOTH = (CenterCrop(2), Standardize())


def painted(rows: int = 64, side: int = 4, dtype: torch.dtype = torch.uint8) -> Rows:
    x = torch.randint(0, 256, (rows, 1, side, side), generator=torch.Generator().manual_seed(1)).to(dtype)
    return Rows(
        "painted", x, torch.arange(rows) % 2, 2, domain=torch.arange(rows) // 2 % 2, domain_names=("day", "night")
    )


def test_training_validation_test_and_unseen_rows_are_prepared_alike():
    rows = painted()
    people = build(rows, IID(clients=4), split=Split(0.2, 0.2), held_out_clients=HeldOutClients(1), transforms=BOTH)
    for client in range(5):
        for part in ("train", "val", "test"):
            shard = people.shard(client, NOW, part)
            wanted = apply_transforms(BOTH, rows.x[shard.ids].float() / 255)
            assert torch.allclose(shard.x, wanted, atol=1e-6)
    ids, owner = people.pooled(people.clients, NOW, "test")
    x, _ = people.fetch(ids, people.clients[owner], NOW)
    assert torch.equal(x, torch.cat([people.shard(int(c), NOW, "test").x for c in people.clients]))


def test_pictures_are_turned_before_they_are_prepared():
    """Cropping 2 of 5 takes one row more from below and the right: turned afterwards it would be another middle."""
    rows = painted(side=5, dtype=torch.float32)
    crop = CenterCrop(2)
    people = build(rows, Rotation(clients=4, angles=(0, 180)), OneGroup(), transforms=(crop,))
    differs = False
    for client in range(4):
        shard = people.shard(client, NOW)
        raw = rows.x[shard.ids]
        turned = torch.rot90(raw, 2, (-2, -1)) if int(people.group[client]) else raw
        assert torch.equal(shard.x, crop.apply(turned))
        differs |= not torch.equal(shard.x, torch.rot90(crop.apply(raw), 2, (-2, -1)))
    assert differs


def test_pictures_are_the_same_before_and_after_all_are_transformed_at_once():
    people = build(painted(), IID(4), transforms=(Downscale(2), Standardize()))
    first = people.shard(1, NOW)
    rounds = 2 + 64 // len(first.y)
    later = [people.shard(1, Moment(at, rounds)) for at in range(rounds)]
    assert people.rows.transformed(people.transforms, 0) is not None
    assert all(torch.equal(shard.x, first.x) and torch.equal(shard.y, first.y) for shard in later)


# -- in an experiment --------------------------------------------------------------------------------------------------

FILE = {
    "rounds": 3,
    "data": {
        "source": "day-night-characters",
        "partition": {"kind": "iid", "clients": 6, "samples": 8},
        "groups": {"by": "domain"},
        "held_out_clients": {"clients": 2, "samples": 6},
        "transforms": [{"kind": "center-crop", "size": 20}, "standardize"],
    },
    "shift": {"who": {"kind": "periodic", "period": 2}},
    "model": {"kind": "mlp", "hidden": [4]},
    "method": [{"algorithm": "fedtem", "local": {"lr": 0.1}, "cohort": 3}],
}


def changed(**data):
    return from_dict({**FILE, "data": {**FILE["data"], **data}})


def test_models_are_built_for_what_comes_out():
    experiment = changed()
    preflight(experiment)
    task = task_of(experiment, experiment.method[0], rows_of(experiment, 0))
    assert tuple(task.example.shape) == (1, 1, 20, 20)
    assert task.build()(torch.zeros(2, 1, 20, 20)).shape == (2, 10)
    assert tuple(task.scratch.weights.params["dense1.weight"].shape) == (4, 400)
    experiments = (experiment, changed(transforms=[]), changed(transforms=["standardize"]))
    assert len({digest_of(each, each.method[0], 0) for each in experiments}) == 3


def test_one_process_and_two_give_the_same_bits(pool):
    experiment = changed(source={"kind": "day-night-characters", "labels": "disjoint"})
    here = played(experiment)
    memory = MemoryStore(None)
    host = host_of(experiment, experiment.method[0], 0, memory)
    spec = spec_of(experiment, experiment.method[0], 0, None)
    there = played(experiment, host=host, memory=memory, engine=lambda host: WorkersEngine(host, pool, spec))
    for name, param in here.state.weights.params.items():
        assert torch.equal(param, there.state.weights.params[name])
