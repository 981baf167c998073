"""FedNTD and MOON by pencil and paper, and against naive implementations in plain torch and float64.

FedNTD by hand: the model is three logits w (a linear layer on x = 1), at first (0, log 3, 0), with the softmax
(1, 3, 1)/5. Client 0 has a row of class 0: of the others, 1 and 2, the received model says (3/4, 1/4). Client 1 has
three rows of class 1, and of the others it says (1/2, 1/2). Two steps of rate 1, beta = tau = 1.

At the first step the model is the received one, and the term has no gradient. Client 0 goes to w + (4, -3, -1)/5, which
is (4/5, log 3 - 3/5, -1/5). There the odds of class 1 against class 2 are 3 e^(-2/5), and the term adds q - (3/4, 1/4)
to the gradient of both. Client 1 moves classes 0 and 2 alike: its term stays zero.

MOON by hand: features are two numbers u (a linear layer on x = 1), the loss is nothing but the contrast. The received
features are (1, 0), those of the last own model (0, 1): cosines 1 and 0. With tau = 1 / log 3 the own model's share is
1 / (1 + 3) = 1/4. The cosine with the received features has no slope at u = (1, 0), the other has (0, 1). So the
gradient is mu / tau * 1/4 * (0, 1) = mu log 3 / 4 * (0, 1), which is (0, 1) for mu = 4 / log 3.
"""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import fedtide as ft
from fedtide.algorithms.fedccfa import Alignment
from fedtide.algorithms.fedntd import fedntd
from fedtide.algorithms.fedpac import Pull
from fedtide.algorithms.moon import Contrastive, moon
from fedtide.cohorts import Everyone, OneModel
from fedtide.core.base import Moment, Shard, Weights
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import same
from fedtide.learn.local import LocalTrainer
from fedtide.learn.task import Task, with_branches
from fedtide.learn.terms import Distill, Summed
from helpers.quadratics import after
from helpers.stages import holding
from helpers.toys import network_of, played, toy

LOG3 = math.log(3)
ROUNDS = 6
DATA = {"partition": {"kind": "dirichlet-class", "clients": 8, "alpha": 1.0, "min_samples": 5}}
LOCAL = {"lr": 0.1, "batch_size": 4, "epochs": 2}


# -- by hand -----------------------------------------------------------------------------------------------------------


def softmax(w: list[float]) -> list[float]:
    total = sum(math.exp(v) for v in w)
    return [math.exp(v) / total for v in w]


def test_fedntd():
    task = Task(lambda: nn.Linear(1, 3, bias=False), dtype=torch.float64)
    people = [(torch.ones(n, 1, dtype=torch.float64), torch.full((n,), label)) for n, label in ((1, 0), (3, 1))]
    start = OneModel(Weights({"weight": torch.tensor([[0.0], [LOG3], [0.0]], dtype=torch.float64)}), None)
    local = LocalTrainer(lr=1.0, batch_size=0, epochs=2)
    state = after(fedntd(task, local, cohort=Everyone()), start, who=holding(people, classes=3))
    one, q = [4 / 5, LOG3 - 3 / 5, -1 / 5], 3 * math.exp(-2 / 5) / (3 * math.exp(-2 / 5) + 1)
    p = softmax(one)
    first = [one[0] - (p[0] - 1), one[1] - p[1] - (q - 3 / 4), one[2] - p[2] - (1 - q - 1 / 4)]
    one = [-1 / 5, LOG3 + 2 / 5, -1 / 5]
    p = softmax(one)
    second = [one[0] - p[0], one[1] - (p[1] - 1), one[2] - p[2]]
    expected = [(a + 3 * b) / 4 for a, b in zip(first, second, strict=True)]
    assert state.weights.params["weight"].flatten().tolist() == pytest.approx(expected, abs=1e-12)


class Nothing:
    """A loss of zero."""

    def prepare(self, shard):
        return None, ()

    def value(self, outputs, y, shared, columns):
        return 0.0 * outputs.sum()


def layers() -> nn.Module:
    model = nn.Sequential()
    model.add_module("trunk", nn.Linear(1, 2, bias=False))
    model.add_module("head", nn.Linear(2, 2, bias=False))
    return model


def test_moon():
    task = Task(layers, Nothing(), torch.float64)
    algorithm = moon(task, LocalTrainer(lr=1.0, batch_size=0), mu=4 / LOG3, tau=1 / LOG3, cohort=Everyone())
    zero = torch.zeros(2, 2, dtype=torch.float64)
    received, own = (
        Weights({"trunk.weight": torch.tensor(u, dtype=torch.float64)[:, None], "head.weight": zero})
        for u in ([1.0, 0.0], [0.0, 1.0])
    )
    shard = Shard(torch.ones(3, 1), torch.zeros(3, dtype=torch.int64), torch.arange(3))
    answer = algorithm.works["train"](received, {"own": own}, shard, Moment(1, 2), Rng(0))
    assert answer.total["delta"].value.params["trunk.weight"].flatten().tolist() == pytest.approx([0.0, -1.0])
    assert answer.memory["own"].params["trunk.weight"].flatten().tolist() == pytest.approx([1.0, -1.0])
    assert answer.total["loss"].value == pytest.approx(4 / LOG3 * math.log(4 / 3))
    new = algorithm.works["train"](received, None, shard, Moment(1, 2), Rng(0))
    assert new.total["delta"].value.params["trunk.weight"].flatten().tolist() == [0.0, 0.0]
    assert new.total["loss"].value == pytest.approx(4 / LOG3 * math.log(2))


# -- naive implementations ---------------------------------------------------------------------------------------------


def cross_entropy(z, y):
    return (z.exp().sum(1).log() - z[torch.arange(len(y)), y]).mean()


def without(z, y):
    """The logits of all classes but the true one (rows, classes - 1)."""
    return torch.stack([torch.cat([row[:label], row[label + 1 :]]) for row, label in zip(z, y.tolist(), strict=True)])


def not_true(own, received, previous, x, y, beta, tau):
    with torch.no_grad():
        old = (without(received(x), y) / tau).softmax(1)
    new = (without(own(x), y) / tau).softmax(1)
    return cross_entropy(own(x), y) + beta * (old * (old / new).log()).sum(1).mean()


def contrast(own, received, previous, x, y, mu, tau):
    z, near, far = (model[:2](x) for model in (own, received, previous))

    def cosine(other):
        return (z * other).sum(1) / (z.norm(dim=1) * other.norm(dim=1)).clamp(min=1e-8) / tau

    good, bad = cosine(near.detach()).exp(), cosine(far.detach()).exp()
    return cross_entropy(own(x), y) - mu * (good / (good + bad)).log().mean()


def naive(population, model, loss_of):
    """FedAvg with a loss of the own, the received and the last own model of a client."""
    last = {}
    for t in range(ROUNDS):
        moment, mean, total = Moment(t, ROUNDS, float(t)), {}, 0
        for client in population.arrivals(4, moment).tolist():
            shard, own = population.shard(client, moment), copy.deepcopy(model)
            shuffle = Rng(0).at(t, client, "train", "shuffle").torch()
            for _ in range(2):
                for batch in torch.randperm(len(shard.y), generator=shuffle).split(4):
                    own.zero_grad()
                    previous = last.get(client, model)
                    loss_of(own, model, previous, shard.x.double()[batch], shard.y[batch]).backward()
                    with torch.no_grad():
                        for p in own.parameters():
                            p -= 0.1 * p.grad
            last[client] = own
            total += len(shard)
            for name, value in own.state_dict().items():
                mean[name] = mean.get(name, 0.0) + len(shard) * value
        model.load_state_dict({name: value / total for name, value in mean.items()})
    assert len(last) < 4 * ROUNDS, "some client must take part twice"
    return model.state_dict()


@pytest.mark.parametrize(
    ("algorithm", "options", "loss_of"),
    [
        ("fedntd", {}, lambda *given: not_true(*given, 1.0, 1.0)),
        ("fedntd", {"beta": 0.5, "tau": 3.0}, lambda *given: not_true(*given, 0.5, 3.0)),
        ("fedavg", {"local": {"terms": [{"kind": "distill", "beta": 0.5, "tau": 3.0}]}},
         lambda *given: not_true(*given, 0.5, 3.0)),
        ("moon", {}, lambda *given: contrast(*given, 1.0, 0.5)),
        ("moon", {"mu": 5.0, "tau": 1.0}, lambda *given: contrast(*given, 5.0, 1.0)),
    ],
    ids=["fedntd", "fedntd by its options", "fedavg distills", "moon", "moon mu 5"],
)  # fmt: skip
def test_a_naive_implementation_agrees_to_1e_9(algorithm, options, loss_of):
    options = {**options, "local": {**LOCAL, **options.get("local", {})}}
    run = played(toy(algorithm, options, rounds=ROUNDS, precision="fp64", data=DATA))
    expected = naive(run.host.population, network_of(run.steps[0].received.weights), loss_of)
    for name, value in run.state.weights.params.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9)
    plain = played(toy("fedavg", {"local": LOCAL}, rounds=ROUNDS, precision="fp64", data=DATA))
    assert not torch.allclose(plain.state.weights.params["dense1.weight"], run.state.weights.params["dense1.weight"])


# -- terms -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5,), (2, 4)])
def test_the_gradient_of_distillation_is_that_of_autograd(shape):
    draw = torch.Generator().manual_seed(0)
    z, before = (3 * torch.randn(*shape, 4, generator=draw, dtype=torch.float64) for _ in range(2))
    y = torch.randint(4, shape, generator=draw)
    z.requires_grad_()
    losses, gradient = Distill(0.7, 2.0).graded(z.detach(), None, y, (before,))
    each = Distill(0.7, 2.0).each(z, None, y, (before,))
    torch.testing.assert_close(losses, each.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(each.sum(), z)[0], rtol=1e-10, atol=1e-12)
    assert not gradient.gather(-1, y[..., None]).any()


def test_the_gradients_by_features_are_those_of_autograd():
    """A row of zeros among them, as a ReLU may leave; and one client, or two that are trained at once."""
    draw = torch.Generator().manual_seed(0)
    z, *models = (torch.randn(2, 5, 3, generator=draw, dtype=torch.float64) for _ in range(3))
    z[0, 1], y = 0.0, torch.randint(4, (2, 5), generator=draw)
    anchors, classes = torch.randn(4, 3, generator=draw, dtype=torch.float64), torch.tensor([1.0, 0.0, 1.0, 1.0])
    terms = [Contrastive(0.7, 0.5, Weights({})), Alignment(0.1, 2.0, anchors, classes), Pull(0.3, anchors)]
    for term in terms:
        if isinstance(term, Contrastive):
            columns = [(term.turn(near, far),) for near, far in zip(*models, strict=True)]
        else:
            columns = [term.prepare(None, Weights({}), Shard(z[k], y[k], torch.arange(5))) for k in range(2)]
        both = tuple(map(torch.stack, zip(*columns, strict=True)))
        losses, gradient = term.graded(z, z, y, both)
        for k in range(2):
            features = z[k].clone().requires_grad_()
            each = term.each(z[k], features, y[k], columns[k])
            torch.testing.assert_close(losses[k], each.detach())
            torch.testing.assert_close(gradient[k], torch.autograd.grad(each.sum(), features)[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("classes", [1, 2, 3])
def test_distillation_stays_finite(kind, classes):
    """One class or two leave nothing to distill."""
    z = torch.tensor([[1e30, -1e30, 0.0]], dtype=kind)[:, :classes].requires_grad_()
    value = Distill().each(z, None, torch.tensor([0]), (torch.zeros(1, classes, dtype=kind),))
    assert value.isfinite().all()
    assert torch.autograd.grad(value.sum(), z)[0].isfinite().all()
    if classes < 3:
        assert value.item() == 0.0


def test_steps_of_sequences_that_do_not_count_distill_nothing():
    draw = torch.Generator().manual_seed(0)
    z, before = (torch.randn(2, 3, 4, generator=draw, dtype=torch.float64) for _ in range(2))
    y, mask = torch.randint(4, (2, 3), generator=draw), torch.tensor([[True, False, True], [True, False, False]])
    loss = Summed(ft.losses.CrossEntropy(), (Distill(),), Task(lambda: nn.Linear(1, 1)), Weights({}))
    value = loss.value(z, y, None, (before, mask))
    wrong = before.clone()
    wrong[~mask] = torch.nan
    assert loss.value(z, y, None, (wrong, mask)) == value
    each = Distill().each(z[mask], None, y[mask], (before[mask],)).mean()
    torch.testing.assert_close(value, nn.functional.cross_entropy(z[mask], y[mask]) + each)


def test_terms_add_up_and_a_sum_without_terms_is_the_loss():
    task = with_branches(Task(layers, dtype=torch.float64), "head", 1)
    w = task.init(Rng(0))
    base, more = task.loss, Contrastive(1.0, 0.5, task.init(Rng(1)))
    assert Summed.of(base, [], task, w) is base
    both = Summed.of(Summed.of(base, [more], task, w), [Distill()], task, w)
    assert both.terms == (more, Distill())
    shard = Shard(torch.rand(3, 1).double(), torch.tensor([0, 1, 0]), torch.arange(3))
    module, now = task.scratch.load(task.init(Rng(2)), train=True), task.scratch.loads
    prepared = both.prepare(shard)
    assert task.scratch.loads > now, "models were evaluated, and training has to load its own again"
    outputs = task.scratch.load(task.init(Rng(2)), train=True)(shard.x)
    alone = [Summed.of(base, [term], task, w) for term in (more, Distill())]
    values = [one.value(outputs, shard.y, *one.prepare(shard)) for one in alone]
    value = both.value(outputs, shard.y, *prepared)
    torch.testing.assert_close(value, sum(values) - base.value(outputs[0][0], shard.y, None, ()))
    assert module is task.scratch.module


# -- one line for a mistake --------------------------------------------------------------------------------------------

PLAIN = ft.Task(lambda: nn.Linear(4, 2))
PEOPLE = ft.population(torch.randn(20, 4), torch.arange(20) % 2, ft.data.IID(clients=2))
DISTILLING = ft.LocalTrainer(terms=(Distill(),))


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: ft.algorithms.moon(PLAIN), r"model: found 'one layer'"),
        (lambda: ft.algorithms.moon(PLAIN, layer="*"), r"layer: found '\*', allowed: a layer"),
        (lambda: ft.algorithms.fedem(PLAIN, DISTILLING, 2),
         r"local.terms: found \['distill'\], but the method trains several branches at once; allowed: none"),
        (lambda: ft.algorithms.scaffold(PLAIN, DISTILLING), r"local.terms: found \['distill'\]"),
        (lambda: ft.algorithms.fedsgd(PLAIN, DISTILLING), r"local.terms: found \['distill'\]"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(make, line):
    with pytest.raises(FedtideError, match=line):
        ft.simulate(make(), PEOPLE, rounds=1)


@pytest.mark.parametrize("name", ["fedntd", "apfl", "per_fedavg", "pfedme", "fedrod", "scaffold", "fedsgd"])
def test_terms_that_a_method_does_not_take_are_refused_when_it_is_built(name):
    task = ft.Task(lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    with pytest.raises(FedtideError, match=r"local.terms: found \['distill'\], but .*; allowed: none"):
        getattr(ft.algorithms, name)(task, local=DISTILLING)


def test_fedala_distills_in_training_and_learns_its_mix_by_the_plain_loss():
    """With two classes there is one beside the row's own, so nothing to distill. A first step has nothing either."""
    steps = ft.LocalTrainer(lr=0.5, epochs=2, batch_size=4)
    for classes, alike in ((2, True), (3, False)):
        people = ft.population(torch.randn(24, 4), torch.arange(24) % classes, ft.data.IID(clients=2))
        net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, classes))
        task = ft.Task(lambda net=net: copy.deepcopy(net))
        plain, distilled = (
            ft.simulate(ft.algorithms.fedala(task, local=local, cohort=2), people, rounds=2)
            for local in (steps, replace(steps, terms=DISTILLING.terms))
        )
        assert same(plain.state, distilled.state) is alike


def test_numbers_have_no_classes_to_distill():
    where, why = {"data": {"target": {"kind": "number"}}, "shift": {"how": {"kind": "identity"}}}, "it distills classes"
    for name, options, line in (
        ("fedntd", {}, rf"algorithm: found 'fedntd', but {why}, and rows have no classes \(data\.target\)"),
        ("fedavg", {"local": {"terms": ["distill"]}}, rf"local\.terms: found 'distill', but {why}"),
    ):
        with pytest.raises(FedtideError, match=line):
            played(toy(name, options, **where), rounds=1)
