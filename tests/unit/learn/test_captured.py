"""Captured steps have the bits of those that are not, whatever changes in between; a tape stands for CUDA graphs."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fedtide.core.base import Moment, Shard, Weights
from fedtide.core.rng import Rng
from fedtide.core.trees import detached, same
from fedtide.fleets.stacked import StackedEngine
from fedtide.learn.branched import with_branches
from fedtide.learn.device import find_device, home
from fedtide.learn.fast import captured, stack
from fedtide.learn.fast.captured import CapturedStack, Graphs
from fedtide.learn.fast.known import known_layers
from fedtide.learn.fast.layer_stack import LayerStack
from fedtide.learn.fast.plan import Room
from fedtide.learn.local import LocalTrainer
from fedtide.learn.losses import WSM, CrossEntropy
from fedtide.learn.schedules import Exponential
from fedtide.learn.task import Task
from fedtide.learn.terms import Correction, Proximal
from fedtide.mixtures.branches import BranchLoss
from helpers.tape import Recorder
from helpers.toys import played, toy

SHAPE = (1, 12, 12)
SIZES = (10, 10, 9, 6)
"""Rows of clients: in batches of four steps have four or two rows, and four or three clients."""
ROUNDS = 5

MODELS = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(144, 6), nn.ReLU(), nn.Linear(6, 3)),
    "lenet": lambda: nn.Sequential(
        nn.Conv2d(1, 2, 5, padding=2), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(2, 3, 3, padding=1), nn.MaxPool2d(2),
        nn.ReLU(), nn.Flatten(), nn.Linear(27, 4), nn.ReLU(), nn.Linear(4, 3),
    ),
}  # fmt: skip

SETTINGS = {
    "plain": {},
    "momentum": {"momentum": 0.9, "weight_decay": 0.01},
    "clipped": {"max_grad_norm": 0.05},
    "adam": {"optimizer": "adam", "lr": 0.01},
}


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(captured, "AFTER", 1)


def stacks(task, loss=None, kind=CapturedStack):
    """A stack without captures and one with them, and what captures."""
    recorder, loss = Recorder(), loss or task.loss
    made = [(known_layers(task, SHAPE, room := Room(task.dtype, torch.device(task.device))), room) for _ in "ab"]
    return LayerStack(task, *made[0], loss), kind(task, *made[1], loss, recorder), recorder


def trained(made, local, sizes=SIZES, terms=None, choices=None):
    """What comes of every round, each from the mean of the last; sizes of each round, or of all."""
    weights, found = made.task.init(Rng(0)), []
    for number in range(ROUNDS):
        draw, now = torch.Generator().manual_seed(number), Moment(number, ROUNDS)
        rows = sizes[number] if isinstance(sizes[0], tuple) else sizes
        shards = [
            Shard(torch.rand(n, *SHAPE, generator=draw), torch.randint(3, (n,), generator=draw), torch.arange(n))
            for n in rows
        ]
        rngs = [Rng(0).at(number, client) for client in range(len(rows))]
        losses = None if choices is None else [BranchLoss(made.task.loss, choice, 0.5, 0.1) for choice in choices]
        fit = stack.train_stacked(made, local, terms, [weights] * len(shards), shards, now, rngs, losses)
        found.append(detached((fit.delta, fit.loss)))
        weights = Weights(
            {name: old + home(fit.delta.params[name].mean(0)) for name, old in weights.params.items()}, {}
        )
    return found


def local_of(case="plain", **settings):
    return LocalTrainer(**{"lr": 0.1, "batch_size": 4, "epochs": 2, **SETTINGS.get(case, {}), **settings})


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("case", [*SETTINGS, "proximal", "correction", "wsm"])
def test_captured_steps_have_the_same_bits(model, case):
    task = Task(MODELS[model], WSM() if case == "wsm" else CrossEntropy())
    eager, made, recorder = stacks(task)
    by = [torch.randn_like(each) for each in task.scratch.values]
    term = {"proximal": Proximal(0.5), "correction": Correction(by)}.get(case)
    terms = None if term is None else [term] * len(SIZES)
    assert same(trained(eager, local_of(case), terms=terms), trained(made, local_of(case), terms=terms))
    assert recorder.captures > 2
    assert recorder.replays > 2 * recorder.captures


@pytest.mark.parametrize("choices", [(0, 1, 2, 1), [torch.arange(n) % 3 for n in SIZES]], ids=["clients", "rows"])
def test_captured_branches_have_the_same_bits(choices):
    task = with_branches(Task(MODELS["mlp"]), "3", 3)
    eager, made, recorder = stacks(task, BranchLoss(task.loss, choices[0], 0.5, 0.1))
    assert same(*(trained(each, local_of(), choices=choices) for each in (eager, made)))
    assert recorder.replays > 2 * recorder.captures > 4


class Careless(CapturedStack):
    """Replays that find storage as steps of another shape left it."""

    asked = False

    def gradient(self, *given, **settings):
        self.asked = True
        return super().gradient(*given, **settings)

    def fit(self, x, purpose):
        if not self.asked:
            return super().fit(x, purpose)
        self.asked = False
        return None


def test_padding_is_put_back_where_shapes_take_turns():
    task = Task(MODELS["lenet"])
    eager, made, _ = stacks(task)
    _, careless, recorder = stacks(task, kind=Careless)
    sizes = (6, 6, 6)  # batches of four and of two, in turn
    assert same(wanted := trained(eager, local_of(), sizes), trained(made, local_of(), sizes))
    assert not same(wanted, trained(careless, local_of(), sizes))  # the checks do not see it: they come after a step
    assert recorder.replays > 2 * recorder.captures


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("case", ["plain", "momentum"])
def test_graphs_end_when_storage_has_moved(model, case):
    eager, made, _ = stacks(Task(MODELS[model]))
    sizes = (SIZES, SIZES, (20, *SIZES, *SIZES), SIZES, SIZES)
    local = local_of(case, epochs=3)
    graphs, step = [], made.gradient
    made.gradient = lambda *given, **rate: (step(*given, **rate), graphs.append(len(made.replays)))[0]
    assert same(trained(eager, local, sizes), trained(made, local, sizes))
    assert 0 in graphs[graphs.index(1) :]


def test_a_learning_rate_that_changes_takes_graphs_of_its_own():
    eager, made, recorder = stacks(Task(MODELS["mlp"]))
    local = local_of(epochs=4, lr_schedule=Exponential(factor=0.5))
    assert same(trained(eager, local), trained(made, local))
    assert {key[0] for key in made.replays} == {0.1 * 0.5**k for k in range(ROUNDS)}
    assert recorder.captures == len(made.replays)


def test_steps_are_captured_late_and_few_of_them(monkeypatch):
    monkeypatch.setattr(captured, "GRAPHS", 1)
    eager, made, recorder = stacks(Task(MODELS["mlp"]))
    assert same(trained(eager, local_of()), trained(made, local_of()))
    assert recorder.captures == len(made.replays) == 1
    monkeypatch.setattr(captured, "AFTER", 1000)
    _, made, recorder = stacks(Task(MODELS["mlp"]))
    trained(made, local_of())
    assert not recorder.captures


class Reading(CrossEntropy):
    """A loss that reads a number."""

    def graded(self, outputs, y, shared, eps=None):
        each, gradient = super().graded(outputs, y, shared, eps)
        return each, gradient * (1 + each.mean().item())


class Counting(CrossEntropy):
    """A loss that changes from call to call, and back: a capture calls it twice more."""

    calls = 0

    def graded(self, outputs, y, shared, eps=None):
        each, gradient = super().graded(outputs, y, shared, eps)
        Counting.calls += 1
        return each, gradient * (1 + Counting.calls % 2)


@pytest.mark.parametrize(("loss", "said"), [(Reading, "not permitted"), (Counting, "other bits")])
def test_steps_that_cannot_be_captured_are_taken_as_ever_after_a_warning(loss, said):
    eager, made, recorder = stacks(Task(MODELS["lenet"], loss()))
    Counting.calls = 0
    wanted = trained(eager, local_of(), (12, 12, 12))
    Counting.calls = 0
    with pytest.warns(UserWarning, match=said) as warned:
        found = trained(made, local_of(), (12, 12, 12))
    assert len(warned) == 1
    assert same(wanted, found)
    assert not made.replays
    assert recorder.captures == (loss is Counting)


def test_training_that_diverges_is_no_reason_to_warn():
    eager, made, recorder = stacks(Task(MODELS["mlp"]))
    found = trained(made, local_of(lr=1e30))
    assert same(trained(eager, local_of(lr=1e30)), found)
    assert found[-1][1].isnan().any()
    assert recorder.captures == len(made.replays) > 0


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold", "ifca", "fedtem"])
def test_rounds_have_the_same_bits(name, monkeypatch):
    experiment, recorder = toy(name), Recorder()
    eager = played(experiment, engine=StackedEngine).state
    monkeypatch.setattr(stack, "LayerStack", lambda *given: CapturedStack(*given, recorder))
    assert same(eager, played(experiment, engine=StackedEngine).state)
    assert recorder.replays > 2 * recorder.captures > 0


class FakeGpu:
    """What is told of streams and captures, in its order."""

    def __init__(self, monkeypatch, waits=False):
        self.told, self.waits, self.current, self.mode = [], waits, "here", 0
        gpu = torch.cuda
        monkeypatch.setattr(gpu, "Stream", lambda: self.stream("side"))
        monkeypatch.setattr(gpu, "current_stream", lambda: self.stream(self.current))
        monkeypatch.setattr(gpu, "CUDAGraph", lambda: self)
        monkeypatch.setattr(gpu, "stream", lambda stream: self.within(stream))
        monkeypatch.setattr(gpu, "graph", lambda graph, stream: self.capturing(stream))
        monkeypatch.setattr(gpu, "get_sync_debug_mode", lambda: self.mode)
        monkeypatch.setattr(gpu, "set_sync_debug_mode", lambda mode: setattr(self, "mode", mode))

    def stream(self, name):
        return SimpleNamespace(name=name, wait_stream=lambda other: self.told.append(f"{name} waits for {other.name}"))

    @contextmanager
    def within(self, stream):
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def capturing(self, stream):
        """As torch does, which leaves the stream behind where a capture fails."""
        before, self.current = self.current, stream.name
        self.told.append("capture")
        yield
        self.told.append("captured")
        self.current = before

    def replay(self):
        self.told.append("replay")

    def step(self):
        self.told.append(f"step on {self.current}, {self.mode}")
        if self.waits and self.told[-2] == "capture":
            raise RuntimeError("a step waits")
        return [], torch.ones(1), []


def test_a_step_is_captured_on_a_stream_of_its_own(monkeypatch):
    gpu = FakeGpu(monkeypatch)
    made, again = Graphs()(gpu.step)
    again()
    assert gpu.told == [
        "side waits for here", "step on side, error", "capture", "step on side, 0", "captured", "here waits for side",
        "replay",
    ]  # fmt: skip
    assert made == ([], torch.ones(1), [])


def test_a_capture_that_fails_leaves_the_streams_as_they_were(monkeypatch):
    gpu = FakeGpu(monkeypatch, waits=True)
    with pytest.raises(RuntimeError, match="a step waits"):
        Graphs()(gpu.step)
    assert (gpu.current, gpu.mode, gpu.told[-1]) == ("here", 0, "here waits for side")


def test_steps_are_captured_on_a_gpu_alone(monkeypatch):
    monkeypatch.setattr(stack, "Room", lambda dtype, device: Room(dtype, torch.device("cpu")))
    monkeypatch.setattr(stack, "Graphs", Recorder)
    task = Task(MODELS["lenet"])
    kinds = [type(stack.stack_of(task, torch.device(name), SHAPE)) for name in ("cpu", "meta", "cuda")]
    assert kinds == [LayerStack, LayerStack, CapturedStack]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("case", SETTINGS)
@pytest.mark.parametrize("sizes", [SIZES, (6, 6, 6)], ids=len)
def test_steps_captured_on_a_gpu_have_the_same_bits(model, case, sizes):
    eager, made, _ = stacks(Task(MODELS[model], device=find_device("cuda")))
    made.capture = Graphs()
    assert same(trained(eager, local_of(case), sizes), trained(made, local_of(case), sizes))
    assert len(made.replays) > 1
