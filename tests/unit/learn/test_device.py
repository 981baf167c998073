"""A device besides the CPU: all that a model computes with is moved there, all that comes of it is brought home.

No machine of the tests need have a GPU. "cpu:0" is a device of another name with the same numbers. On torch's "meta"
device tensors have no numbers, and whatever was left on the CPU is refused by the first operation that meets both, but
for sums, products, quotients and copies of lists in place (`torch._foreach_add_`), which take both there; what comes
home is zeros.
"""

import os
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fedtide.algorithms import REGISTRY
from fedtide.core.base import Moment, Shard
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import leaves, same
from fedtide.data.population import Population
from fedtide.data.ragged import Ragged
from fedtide.data.rows import Rows
from fedtide.data.shift import Shift
from fedtide.data.shift.how import Rotation
from fedtide.data.transforms import Normalize
from fedtide.fleets.engines import LocalEngine
from fedtide.fleets.stacked_engine import StackedEngine, why_alone
from fedtide.laws.every import judged
from fedtide.learn import device, local, stack
from fedtide.learn import losses as loss
from fedtide.learn import task as tasks
from fedtide.learn.local import LocalTrainer
from fedtide.learn.losses import WSM, Blended, CrossEntropy
from fedtide.learn.steps import Train
from fedtide.learn.target import CountTarget, LabelsTarget, NumberTarget, QuantileTarget
from fedtide.learn.task import Task, with_branches
from fedtide.mixtures.branches import BranchLoss, predict_by_certainty
from fedtide.models.networks import LSTM
from fedtide.runs import build, digest
from fedtide.runs.digest import digest_of
from helpers.toys import VARIANTS, played, toy

ENTRIES = {
    "fedavg": {"local": {"epochs": 2, "momentum": 0.5, "weight_decay": 0.1, "max_grad_norm": 1.0}},
    "fedavg wsm": {"loss": "wsm"},
    "fedprox": {"local": {"proximal": 0.5}},
    "scaffold": {"variant": "I"},
    "ifca": {"n_init": 2},
    "aem": {"mixture": {"gating": {"epochs": 2}, "solver": {"epochs": 2}}},
    "aem stacking": {"transforms": [{"kind": "stacking", "solver": {"epochs": 2}, "tuning": {"epochs": 2}}]},
    "fielding": {"representation": "gradient"},
}
ENTRIES |= {name: {} for name in REGISTRY if name not in ENTRIES}


def zeros(value):
    """What comes home from the meta device."""
    return torch.zeros(value.shape, dtype=value.dtype) if value.device.type == "meta" else value


@pytest.fixture
def elsewhere(monkeypatch):
    """Tasks on a device."""

    def on(name):
        monkeypatch.setattr(build, "find_device", lambda wanted: name)
        if name == "meta":
            monkeypatch.setattr(torch.Tensor, "cpu", zeros)

    return on


FIRST = (
    "fedavg",
    "scaffold",
    "ifca",
    "aem",
    "fedtem",
    "fedtkm",
    "feddrift",
    "fielding",
    "local",
    "centralized",
    "pfedem",
)
OTHERS = [name for name in ENTRIES if name not in FIRST]
"""Whose works compute as others do."""
NAMES = [pytest.param(name, marks=pytest.mark.thorough if name in OTHERS else ()) for name in ENTRIES]


@pytest.mark.parametrize("name", NAMES)
def test_every_work_gives_the_same_bits_on_a_device_of_another_name(name, elsewhere):
    experiment = toy(name.partition(" ")[0], ENTRIES[name])
    here = played(experiment, rounds=2)
    elsewhere("cpu:0")
    there = played(experiment, rounds=2)
    assert same(here.state, there.state)
    assert same(*(judged(run)[3].loss for run in (here, there)))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_that_a_model_computes_with_is_left_behind(name, elsewhere):
    elsewhere("meta")
    run = played(toy(name.partition(" ")[0], ENTRIES[name]), rounds=2)
    judged(run)
    kept = [run.host.memory.read(client, (9, 0)) for client in range(8)]
    assert {leaf.device.type for leaf in leaves([run.state, kept]) if isinstance(leaf, torch.Tensor)} == {"cpu"}


def turned(where="cpu"):
    """Two clients with four pictures of bytes each."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(256, (8, 1, 4, 4), generator=draw, dtype=torch.uint8)
    parts = {"train": Ragged.of([[0, 2, 4], [1, 3, 5]]), "val": Ragged.of([[6], []]), "test": Ragged.of([[], [7]])}
    rows, shift = Rows("p", x, torch.arange(8) % 2, 2), Shift(how=Rotation(angles=(0, 90)))
    steps = (Normalize((0.5,), (0.25,)),)
    return Population(rows, parts, torch.arange(2), ("a", "b"), 2, shift, transforms=steps, device=where)


def read(people):
    """All that clients are given."""
    clients, now = people.clients, Moment(0, 1)
    shards = [*people.shards(clients, now), people.shard(1, now), people.shard(0, now).val]
    return [*shards, people.pool(clients, now, "test")[0]]


def test_rows_lie_on_the_device_as_they_are_stored_and_are_turned_there():
    here = read(turned())
    for where in ("cpu:0", "meta"):
        there, people = read(turned(where)), turned(where)
        assert [shard.x.shape for shard in there] == [shard.x.shape for shard in here]
        assert {shard.x.device.type for shard in there} == {where.partition(":")[0]}
        assert {shard.y.device.type for shard in there} == {people.few()[0].x.device.type} == {"cpu"}
        assert people.rows.take(torch.tensor([1]), where)[0].dtype == torch.uint8
        if where == "cpu:0":
            assert same([shard.x for shard in here], [shard.x for shard in there])


def test_rows_that_take_too_much_of_a_gpu_stay_where_they_are(monkeypatch):
    rows = torch.zeros(100, 10)
    monkeypatch.setattr(device, "to_device", lambda value, where: where)
    for memory, where in ((8 * rows.nbytes, "cuda"), (8 * rows.nbytes - 1, rows)):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, m=memory: SimpleNamespace(total_memory=m))
        assert device.resident(rows, "cuda") is where


STACKED = {**ENTRIES, "window kept": {"window": 2}}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough if name in OTHERS[2:] else ()) for name in STACKED]
)
def test_stacks_lie_on_the_device(name, elsewhere):
    experiment = toy(name.partition(" ")[0], STACKED[name])
    here = played(experiment, rounds=2, engine=StackedEngine)
    elsewhere("cpu:0")
    assert same(here.state, played(experiment, rounds=2, engine=StackedEngine).state)
    elsewhere("meta")
    played(experiment, rounds=2, engine=StackedEngine)


def test_rows_that_a_client_kept_are_trained_beside_those_on_the_device(elsewhere):
    elsewhere("meta")
    task = Task(lambda: nn.Linear(4, 3), device="meta")
    own, kept = (Shard(torch.rand(4, 4, device=at), torch.arange(4) % 3, torch.arange(4)) for at in ("meta", "cpu"))
    for shards in ([own, kept], [kept, own]):
        weights, local = task.init(Rng(0)), LocalTrainer(batch_size=4)
        requests = [Train(task, local, weights, shard, Moment(0, 1), Rng(k)) for k, shard in enumerate(shards)]
        fit = stack.train_stacked(stack.make_stack(requests[0]), requests)
        assert fit.delta.params["weight"].device.type == "meta"


def test_branches_of_text_on_a_device_are_chosen_at_home(elsewhere):
    elsewhere("meta")
    task = Task(partial(LSTM(embedding=4, hidden=3).build, (4,), 5), device="meta")
    task, x = with_branches(task, "projection", 2), torch.tensor([[1, 2, 3, 0]] * 3, device="meta")
    said = predict_by_certainty(task, "row")(task.init(Rng(0)), [None], x, torch.zeros(3, dtype=torch.int64))
    assert said.told.shape == (3, 4, 5)


def pictures():
    """A client with pictures."""
    draw = torch.Generator().manual_seed(0)
    return Shard(torch.rand(9, 2, 8, 8, generator=draw), torch.arange(9) % 3, torch.arange(9))


def network():
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))


CHANGED = LocalTrainer(augment=({"kind": "flip"}, {"kind": "random-crop", "size": 8, "padding": 1, "fill": [0.5, 0.5]}))


@pytest.mark.parametrize("name", ["cpu:0", "meta"])
def test_pictures_and_their_changes_are_on_the_device(name, elsewhere):
    elsewhere(name)
    shard, now, keys = pictures(), Moment(0, 1), [Rng(0), Rng(1)]
    here, there = Task(network), Task(network, device=name)
    weights = here.init(Rng(0))
    assert same(weights, there.init(Rng(0)))
    if name == "cpu:0":  # there are no random numbers on the meta device
        one, other = (CHANGED(each, each.loss, weights, shard, now, Rng(0)) for each in (here, there))
        assert same(one.delta, other.delta)
    requests = [Train(there, LocalTrainer(batch_size=4), weights, shard, now, key) for key in keys]
    fit = stack.train_stacked(stack.make_stack(requests[0]), requests)
    assert fit.delta.params["0.weight"].device == torch.device(name) or name == "cpu:0"


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_device_is_waited_for_once_an_epoch(epochs, monkeypatch):
    read = []
    monkeypatch.setattr(local, "read", lambda losses: read.append(len(losses)) or device.read(losses))
    task, trainer = Task(network, device="cpu:0"), LocalTrainer(batch_size=4, epochs=epochs)
    given = task, task.loss, task.init(Rng(0)), pictures(), Moment(0, 1), Rng(0)
    whole = trainer(*given).loss
    assert read == [3] * epochs
    assert [fitted.loss for fitted in trainer.iter_epochs(*given)][-1] == whole


@pytest.mark.parametrize(
    "target",
    [
        *(NumberTarget(1.0, 2.0, (1.0,), form=form) for form in ("squared", "huber", "gaussian")),
        QuantileTarget(1.0, 2.0, (1.0, 2.0), at=(0.1, 0.9)),
        CountTarget(1.0, 2.0, (1.0,)),
        LabelsTarget(3),
    ],
    ids=lambda target: f"{target.kind} {getattr(target, 'form', '')}".strip(),
)
def test_every_target_trains_on_a_device(target, elsewhere):
    elsewhere("meta")
    task = Task(lambda: nn.Linear(4, target.width), target=target, device="meta")
    y = torch.arange(9.0) if target.kind != "labels" else torch.arange(27).reshape(9, 3) % 2
    given, now, weights = Shard(torch.rand(9, 4), y, torch.arange(9)), Moment(0, 1), task.init(Rng(0))
    assert LocalTrainer(batch_size=4)(task, task.loss, weights, given, now, Rng(0)).steps == 3
    requests = [Train(task, LocalTrainer(batch_size=4), weights, given, now, Rng(k)) for k in range(2)]
    fit = stack.train_stacked(stack.make_stack(requests[0]), requests)
    assert fit.steps.tolist() == [3, 3]


def sentences():
    """A client with five sequences of 1, 2, 3, 4 and 2 steps that count."""
    y = torch.tensor([[1, 0, 0, 0], [2, 3, 0, 0], [1, 1, 2, 0], [3, 2, 1, 4], [4, 4, 0, 0]])
    return Shard(torch.tensor([[1, 2, 3, 4]] * 5), y, torch.arange(5), mask=y != 0)


SHARES = torch.full((5, 2), 0.5)
PER_ROW = torch.tensor([0, 1, 0, 1, 0])
LOSSES = {
    "cross-entropy": CrossEntropy(),
    "wsm": WSM(),
    "branch": BranchLoss(CrossEntropy(), 1, 0.5, 0.2),
    "branch wsm": BranchLoss(WSM(), 1, 0.5, 0.2),
    "branch of each row": BranchLoss(CrossEntropy(), PER_ROW, 0.5, 0.2),
    "blend": Blended(SHARES),
}
"""Losses of sequences; those of a branched network have two branches."""


def of_words(name, where):
    """A task of sequences, and a loss for it."""
    task = Task(partial(LSTM(embedding=4, hidden=3).build, (4,), 5), LOSSES[name], device=where)
    return task if name in ("cross-entropy", "wsm") else with_branches(task, "projection", 2)


@pytest.mark.parametrize("name", LOSSES)
def test_sequences_with_a_mask_do_not_wait_for_a_device(name, elsewhere):
    elsewhere("meta")  # which refuses to be read
    task, given = of_words(name, "meta"), sentences()
    weights = task.init(Rng(0))
    trained = LocalTrainer(batch_size=2)(task, task.loss, weights, given, Moment(0, 1), Rng(0))
    assert (trained.steps, trained.loss) == (3, 0.0)
    assert task.objective(weights, given) == task.gradient(weights, given)[1] == 0.0


@pytest.mark.parametrize("name", LOSSES)
def test_steps_that_do_not_count_are_left_out_on_a_device_as_here(name, monkeypatch):
    task, given = of_words(name, "cpu"), sentences()
    weights = task.init(Rng(0))
    here = task.gradient(weights, given)
    monkeypatch.setattr(loss, "CPU", "another")
    there = task.gradient(weights, given)
    torch.testing.assert_close(there, here, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("ask", [Task.objective, Task.gradient])
def test_a_device_is_waited_for_once_however_many_passes(ask, monkeypatch):
    reads = []
    monkeypatch.setattr(device, "to_cpu", lambda value: reads.append(len(value)) or value)
    monkeypatch.setattr(tasks, "ROWS", 4)
    task = Task(network, device="cpu:0")
    ask(task, task.init(Rng(0)), pictures())
    assert reads == [3]


def test_the_devices_name_is_part_of_the_digest(monkeypatch):
    experiment = toy("fedavg")
    here = digest_of(experiment, experiment.method[0], 0)
    monkeypatch.setattr(digest, "find_device", lambda wanted: "cpu:0")
    assert digest_of(experiment, experiment.method[0], 0) != here


def test_a_gpu_is_told_to_give_the_same_bits_each_time(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    for where, name in (
        (torch.backends.cudnn, "allow_tf32"),
        (torch.backends.cudnn, "deterministic"),
        (torch.utils.deterministic, "fill_uninitialized_memory"),
    ):
        monkeypatch.setattr(where, name, getattr(where, name))  # is put back
    try:
        assert device.find_device("auto") == device.find_device("cuda") == "cuda"
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert (torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic) == (False, True)
    assert not torch.utils.deterministic.fill_uninitialized_memory


class Generator:
    """A GPU's global generator, whose state is a number."""

    def __init__(self):
        self.state = torch.tensor(7)

    def seed(self, start):
        self.state = torch.tensor(start)

    def set_state(self, state):
        self.state = state


def test_a_gpus_generator_is_seeded_and_put_back(monkeypatch):
    gpu = Generator()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "manual_seed", gpu.seed)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: gpu.state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", gpu.set_state)
    before = torch.get_rng_state()
    with device.drawn_from(3):
        assert (torch.initial_seed(), int(gpu.state)) == (3, 3)
        gpu.seed(4)  # something was drawn
        torch.rand(1)
        left = device.drawing()
    assert int(gpu.state) == 7
    with device.drawn_from(left):
        assert int(gpu.state) == 4
        assert torch.equal(torch.get_rng_state(), left[0])
    assert int(gpu.state) == 7
    assert torch.equal(torch.get_rng_state(), before)


def test_a_gpu_that_is_not_there_is_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.find_device("auto") == device.find_device("cpu") == "cpu"
    line = "fleet.device: found 'cuda', but torch finds no GPU on this machine; allowed: cpu, auto"
    with pytest.raises(FedtideError, match=line) as said:
        played(toy("fedavg", fleet={"device": "cuda"}))
    assert "\n" not in str(said.value)


def numbers_of(run):
    """All numbers that a run leaves: its state, what clients keep, and losses."""
    kept = [run.host.memory.read(client, (9, 0)) for client in range(8)]
    return [*leaves([run.state, kept]), judged(run)[3].loss]


GPU = torch.cuda.is_available()


@pytest.mark.skipif(not GPU, reason="torch finds no GPU on this machine")
@pytest.mark.parametrize("engine", [LocalEngine, StackedEngine])
@pytest.mark.parametrize("name", VARIANTS if GPU else ["fedavg"])
def test_a_gpu_agrees_with_the_cpu_and_twice_with_itself(name, engine):
    run = played(toy(name, precision="fp64"), rounds=2)
    if engine is StackedEngine and why_alone(run.host) is not None:
        pytest.skip("its clients are trained one by one")
    experiment = toy(name, precision="fp64", fleet={"device": "cuda"})
    once, again = (numbers_of(played(experiment, rounds=2, engine=engine)) for _ in range(2))
    assert same(once, again)
    for here, there in zip(numbers_of(run), once, strict=True):
        if isinstance(here, torch.Tensor):
            torch.testing.assert_close(there.double(), here.double(), rtol=1e-12, atol=1e-12, equal_nan=True)
        else:
            assert there == (pytest.approx(here, rel=1e-12) if isinstance(here, float) else here)
