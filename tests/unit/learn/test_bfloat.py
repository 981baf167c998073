"""bfloat16: parameters, updates, losses and predictions stay in float32; only what is between them is lowered."""

import pytest
import torch
from pydantic import TypeAdapter
from torch import nn

from fedtide.core.base import Moment, Shard
from fedtide.core.errors import FedtideError
from fedtide.core.memory import MemoryStore
from fedtide.core.rng import Rng
from fedtide.core.trees import leaves, same
from fedtide.fleets.engines import WorkersEngine
from fedtide.learn.device import warn_of_bfloat
from fedtide.learn.local import LocalTrainer
from fedtide.learn.task import Task
from fedtide.models import Model
from fedtide.models.branched import branched
from fedtide.personal.client_networks import Networks
from fedtide.runs.build import spec_of
from fedtide.runs.digest import digest_of
from fedtide.runs.preflight import preflight
from helpers.toys import played, toy

MODELS = {
    "linear": ({"kind": "linear"}, (1, 28, 28)),
    "mlp": ({"kind": "mlp", "hidden": [20]}, (1, 28, 28)),
    "small-cnn": ({"kind": "small-cnn"}, (1, 28, 28)),
    "lenet5": ({"kind": "lenet5"}, (1, 28, 28)),
    "batch norm": ({"kind": "resnet8"}, (3, 32, 32)),
    "mobilenet-v2": ({"kind": "mobilenet-v2"}, (3, 32, 32)),
    "shufflenet-v2": ({"kind": "shufflenet-v2"}, (3, 32, 32)),
    "lstm": ({"kind": "lstm", "embedding": 8, "hidden": 16}, (6,)),
}
NAMES = [pytest.param(name, marks=[pytest.mark.thorough] if name == "mobilenet-v2" else []) for name in MODELS]
CLASSES = 10


def _has_lstm() -> bool:
    """Whether this processor has an LSTM in bfloat16: oneDNN refuses one below AVX-512."""
    lstm = nn.LSTM(8, 16, batch_first=True)
    try:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            lstm(torch.zeros(2, 3, 8))
    except RuntimeError:
        return False
    return True


@pytest.fixture
def kind(request):
    if request.param == "lstm" and not _has_lstm():
        pytest.skip("this processor has no LSTM in bfloat16")
    return request.param


def rows(shape: tuple[int, ...], count: int = 12) -> Shard:
    generator = torch.Generator().manual_seed(0)
    ids = torch.arange(count)
    if len(shape) == 1:
        x = torch.randint(1, CLASSES, (count, *shape), generator=generator)
        return Shard(x, x, ids, mask=torch.ones_like(x, dtype=torch.bool))
    return Shard(torch.rand(count, *shape, generator=generator), ids % CLASSES, ids)


def tasks(kind: str) -> tuple[Task, Task, Shard]:
    settings, shape = MODELS[kind]
    model = TypeAdapter(Model).validate_python(settings)
    return *(Task(lambda: model.build(shape, CLASSES), channels_last=True, bfloat=b) for b in (False, True)), rows(
        shape
    )


@pytest.mark.parametrize("kind", NAMES, indirect=True)
def test_what_comes_out_is_float32_and_near_to_what_it_was(kind):
    """A product of bfloat16 is off by 2^-9 of its size at most; a network's logits by some percent of the largest."""
    plain, lowered, shard = tasks(kind)
    weights = plain.init(Rng(0))
    exact, rough = plain.logits(weights, shard.x), lowered.logits(weights, shard.x)
    assert rough.dtype == torch.float32
    assert not torch.equal(exact, rough)
    assert (exact - rough).abs().max() < 0.05 * exact.abs().max()
    assert lowered.losses(weights, shard).dtype == torch.float32
    assert all(value.dtype == torch.float32 for value in lowered.gradient(weights, shard)[0].values())


@pytest.mark.parametrize("kind", NAMES, indirect=True)
def test_steps_are_taken_in_float32(kind):
    """A step far below bfloat16's eight bits of the parameters still moves them."""
    _, lowered, shard = tasks(kind)
    weights = lowered.init(Rng(0))
    fitted = LocalTrainer(lr=1e-5, batch_size=6)(lowered, lowered.loss, weights, shard, Moment(0, 1), Rng(0))
    moved = list(fitted.delta.params.values())
    assert all(value.dtype == torch.float32 for value in moved)
    assert 0 < max(float(value.abs().max()) for value in moved) < 1e-3
    assert all(value.dtype.itemsize >= 4 for value in leaves(fitted.weights))


def test_every_step_sees_the_parameters_of_the_step_before():
    """Autocast keeps copies of parameters while it lasts; steps that halve the error each would show stale ones.

    Of y = w x with x = 1 and loss w^2 / 2 the weight is 2^-10 of what it was after ten steps of rate 1/2.
    """

    class Squared:
        def prepare(self, shard):
            return None, ()

        def value(self, outputs, y, shared, columns):
            assert outputs.dtype == torch.float32
            return outputs.square().mean() / 2

    class Line(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(1, 1, bias=False)

        def forward(self, x):
            return self.line(x)

    task = Task(Line, Squared(), bfloat=True)
    weights = task.init(Rng(0))
    ones = Shard(torch.ones(4, 1), torch.zeros(4, dtype=torch.int64), torch.arange(4))
    fitted = LocalTrainer(lr=0.5, batch_size=0, local_steps=10)(task, task.loss, weights, ones, Moment(0, 1), Rng(0))
    ratio = float(fitted.weights.params["line.weight"] / weights.params["line.weight"])
    assert ratio == pytest.approx(2**-10, rel=0.05)


def test_branches_and_networks_of_clients_are_lowered_too():
    model = TypeAdapter(Model).validate_python({"kind": "small-cnn"})
    shard = rows((1, 28, 28))
    task = Task(lambda: branched(model.build((1, 28, 28), CLASSES), "head", 2), bfloat=True)
    logits, features = next(iter(task.outputs(task.init(Rng(0)), shard.x)))
    assert (logits.dtype, features.dtype) == (torch.float32, torch.float32)
    assert logits.shape == (2, 12, CLASSES)
    one = Task(lambda: model.build((1, 28, 28), CLASSES), example=shard.x[:1], bfloat=True)
    both = Networks(one).mixture(None, TypeAdapter(Model).validate_python({"kind": "linear"}), 2)
    assert both.bfloat
    logp = both.logits(both.init(Rng(0)), shard.x)
    torch.testing.assert_close(logp.exp().sum(1), torch.ones(12), rtol=1e-5, atol=1e-5)


def test_parameters_of_another_type_are_refused():
    with pytest.raises(FedtideError, match=r"Task.dtype: found torch\.float64, allowed: torch\.float32, with bfloat"):
        Task(lambda: nn.Linear(1, 1), dtype=torch.float64, bfloat=True)


def test_a_processor_without_bfloat16_is_told_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    warn_of_bfloat.cache_clear()
    for _ in range(2):
        preflight(toy("fedavg", {}, precision="bf16"))
    assert capsys.readouterr().err.splitlines() == [
        "fedtide: precision: 'bf16' is slow here, because the processor has no bfloat16"
    ]


def test_it_counts_in_the_digest_and_keeps_what_clients_keep_as_large():
    fp32, bf16 = (toy("scaffold", {}, precision=precision) for precision in ("fp32", "bf16"))
    assert digest_of(fp32, fp32.method[0], 0) != digest_of(bf16, bf16.method[0], 0)
    assert preflight(fp32).need == preflight(bf16).need


@pytest.mark.parametrize("name", ["scaffold", "fedtem"])
def test_workers_give_the_bits_of_one_process(name, pool, tmp_path):
    options = {"prior": {"kind": "linear", "period": 4}} if name == "fedtem" else {}
    experiment = toy(name, options, precision="bf16", rounds=2)
    spec = spec_of(experiment, experiment.method[0], 0, tmp_path)
    alone = played(experiment)
    many = played(
        experiment, memory=MemoryStore(tmp_path, small=0), engine=lambda host: WorkersEngine(host, pool, spec)
    )
    assert same(alone.state, many.state)
    assert torch.bfloat16 not in [value.dtype for value in leaves(alone.state) if isinstance(value, torch.Tensor)]
    assert not same(alone.state, played(toy(name, options, rounds=2)).state)
