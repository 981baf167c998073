"""The re-weighted softmax: against the formula written out, classes that are absent, large logits, where it applies."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fedtide as ft
from fedtide.algorithms.fedem import fedem
from fedtide.config import from_dict
from fedtide.core.base import Moment, Shard
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import same
from fedtide.learn.local import LocalTrainer
from fedtide.learn.losses import WSM, Blended, CrossEntropy, Plain
from fedtide.learn.task import Task, with_branches
from fedtide.mixtures.branches import BranchLoss, losses_of
from fedtide.models.branched import WHOLE
from helpers.examples import examples
from helpers.studies import A, raw
from helpers.toys import normed

KEY, NOW = Rng(0).at(0, 3, "train"), Moment(0, 10)


def shard(labels: list[int], width: int = 3) -> Shard:
    draw = torch.Generator().manual_seed(len(labels))
    x = torch.randn(len(labels), width, generator=draw, dtype=torch.float64)
    return Shard(x, torch.tensor(labels, dtype=torch.int64), torch.arange(len(labels)))


def logits(rows: int, classes: int, scale: float = 1.0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(rows)
    return (scale * torch.randn(rows, classes, generator=draw, dtype=torch.float64)).requires_grad_()


def valued(loss: WSM, z: torch.Tensor, labels: list[int], held: Shard | None = None):
    """Value and gradient in the logits."""
    value = loss.value(z, torch.tensor(labels), *loss.prepare(held or shard(labels)))
    return value.detach(), torch.autograd.grad(value, z)[0]


# -- the formula -------------------------------------------------------------------------------------------------------


@examples(60)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.sampled_from([0.0, 0.1, 0.5]))
def test_it_is_the_formula_of_the_thesis_less_the_logarithm_of_the_labels_fraction(labels, blend):
    z = logits(len(labels), 6)
    value, gradient = valued(WSM(blend=blend), z, labels)
    a = [(1 - blend) * labels.count(c) / len(labels) + blend / 6 for c in range(6)]
    total, z = 0.0, z.detach()
    for i, y in enumerate(labels):
        mass = sum(a[c] * math.exp(z[i, c]) for c in range(6))
        total += -(float(z[i, y]) - math.log(mass)) - math.log(a[y])
        for c in range(6):
            expected = (a[c] * math.exp(z[i, c]) / mass - (c == y)) / len(labels)
            assert float(gradient[i, c]) == pytest.approx(expected, abs=1e-12)
    assert float(value) == pytest.approx(total / len(labels), abs=1e-12)


def test_absent_classes_get_exactly_no_gradient():
    labels = [1, 1, 3]
    _, gradient = valued(WSM(blend=0.0), logits(3, 6, scale=5.0), labels)
    assert not gradient[:, [0, 2, 4, 5]].any()
    assert gradient[:, [1, 3]].all()
    _, gradient = valued(WSM(blend=1e-3), logits(3, 6, scale=5.0), labels)
    assert gradient.all()


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e4, 1e30])
def test_large_logits_stay_finite_even_those_of_absent_classes(size, kind):
    labels = [0, 1, 1]
    z = torch.tensor([[size, -size, size], [size, -size, size], [-size, size, size]], dtype=kind, requires_grad=True)
    value, gradient = valued(WSM(blend=0.0), z, labels)
    assert torch.isfinite(value)
    assert float(value) == pytest.approx(2 * size / 3, rel=1e-4)  # the second row is wrong by 2 size
    assert torch.isfinite(gradient).all()
    assert not gradient[:, 2].any()


@pytest.mark.parametrize("blend", [0.0, 1.0, 0.3])
def test_even_classes_give_cross_entropy_bit_for_bit(blend):
    labels = [0, 1, 2, 2, 1, 0]
    z = logits(6, 3).detach().float().requires_grad_()
    value, gradient = valued(WSM(blend=blend), z, labels)
    expected = F.cross_entropy(z, torch.tensor(labels))
    assert torch.equal(value, expected)
    assert torch.equal(gradient, torch.autograd.grad(expected, z)[0])


def test_the_loss_is_never_negative_and_zero_for_a_single_class():
    value, gradient = valued(WSM(blend=0.0), logits(4, 5, scale=3.0), [2, 2, 2, 2])
    assert float(value) == 0.0
    assert not gradient.any()
    for labels in ([0, 1], [0, 0, 0, 1], [3, 1, 1, 1]):
        assert float(valued(WSM(blend=0.0), logits(len(labels), 5), labels)[0]) >= 0.0


# -- which rows count --------------------------------------------------------------------------------------------------


def test_without_validation_rows_there_are_none_to_count():
    for fetch in (None, lambda: None, lambda: shard([])):
        held = Shard(torch.zeros(2, 3), torch.tensor([0, 1]), torch.arange(2), fetch_val=fetch)
        counts, _ = WSM(blend=0.0, val=True).prepare(held)
        assert counts.tolist() == [1.0, 1.0]


def test_validation_rows_may_have_other_labels_than_those_to_train_on():
    for labels, beside, expected in (([0, 1], [4], [1, 1, 0, 0, 1]), ([0, 4], [1, 1], [1, 2, 0, 0, 1])):
        held = Shard(torch.zeros(2, 3), torch.tensor(labels), torch.arange(2), fetch_val=lambda b=beside: shard(b))
        assert WSM(blend=0.0, val=True).prepare(held)[0].tolist() == expected
        assert len(WSM(blend=0.0).prepare(held)[0]) == max(labels) + 1


def test_of_sequences_only_steps_that_count_do():
    y = torch.tensor([[1, 2, 1, 0], [2, 0, 0, 0]])
    mask = y != 0
    held = Shard(torch.zeros(2, 4, dtype=torch.int64), y, torch.arange(2), mask=mask)
    z = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    shared, columns = WSM(blend=0.0).prepare(held)
    assert shared.tolist() == [0, 2, 2]
    value = WSM(blend=0.0).value(z, y, shared, columns)
    flat = Shard(torch.zeros(4, 1), y[mask], torch.arange(4))
    torch.testing.assert_close(value, WSM(blend=0.0).value(z[mask], y[mask], *WSM(blend=0.0).prepare(flat)))
    (gradient,) = torch.autograd.grad(value, z)
    assert not gradient[~mask].any()
    assert not gradient[..., [0, 3, 4]].any()


def test_labels_that_the_model_has_no_output_for_are_one_clear_line():
    with pytest.raises(FedtideError) as raised:
        valued(WSM(blend=0.0), logits(2, 3), [0, 1], shard([0, 12]))
    assert str(raised.value) == "loss: 'wsm': label: found 12, allowed: 0 to 2, the model's"
    people = ft.population(torch.randn(20, 4), torch.arange(20) % 4, ft.data.IID(clients=2))
    with pytest.raises(FedtideError, match=r"model: it returns shape \(2, 2\) for 2 rows, allowed: .* with 4 classes"):
        ft.simulate(
            ft.algorithms.fedavg(ft.Task(lambda: nn.Linear(4, 2), WSM(blend=0.0)), cohort=ft.cohorts.Arrivals(2)),
            people,
            rounds=1,
        )


# -- in training -------------------------------------------------------------------------------------------------------


def test_the_last_layer_of_an_absent_class_stays_where_it_is():
    task = Task(lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5)), WSM(blend=0.0), torch.float64)
    held, start = shard([0, 0, 2, 2, 2, 0]), task.init(Rng(1))
    fitted = LocalTrainer(0.5, epochs=5, batch_size=2)(task, task.loss, start, held, NOW, KEY)
    for name in ("2.weight", "2.bias"):
        moved = fitted.weights.params[name] != start.params[name]
        assert moved[[0, 2]].any()
        assert not moved[[1, 3, 4]].any()
    assert not torch.equal(fitted.weights.params["0.weight"], start.params["0.weight"])


def test_a_client_of_one_class_changes_nothing_but_running_statistics():
    task = Task(lambda: normed((3,), 4), WSM(blend=0.0), torch.float64)
    held, start = shard([2] * 6), task.init(Rng(1))
    fitted = LocalTrainer(0.5, epochs=3, batch_size=3)(task, task.loss, start, held, NOW, KEY)
    assert fitted.loss == 0.0
    assert same(fitted.weights.params, start.params)
    assert not same(fitted.weights.buffers, start.buffers)
    decayed = LocalTrainer(0.5, batch_size=3, weight_decay=0.1)(task, task.loss, start, held, NOW, KEY).weights.params
    for name, value in decayed.items():
        torch.testing.assert_close(value, start.params[name] * (1 - 0.5 * 0.1) ** 2)


def test_the_fractions_are_those_of_all_rows_and_not_of_a_batch():
    """Labels 0, 0, 0, 1 one by one: a batch of one class still has a gradient."""
    task = Task(lambda: nn.Linear(3, 2, bias=False), WSM(blend=0.0), torch.float64)
    held, start = shard([0, 0, 0, 1]), task.init(Rng(1))
    fitted = LocalTrainer(0.5, batch_size=1)(task, task.loss, start, held, NOW, KEY)
    w = start.params["weight"].clone()
    for i in torch.randperm(4, generator=KEY.at("shuffle").torch()).tolist():
        p = torch.softmax(w @ held.x[i] + torch.tensor([0.75, 0.25]).double().log(), 0)
        w -= 0.5 * torch.outer(p - F.one_hot(held.y[i], 2), held.x[i])
    torch.testing.assert_close(fitted.weights.params["weight"], w, rtol=1e-12, atol=1e-12)


def test_decisions_and_predictions_use_plain_cross_entropy():
    plain, weighted = (Task(lambda: nn.Linear(3, 4), loss, torch.float64) for loss in (CrossEntropy(), WSM(blend=0.0)))
    held, weights = shard([0, 0, 0, 2]), plain.init(Rng(0))
    two = [with_branches(task, WHOLE, 2) for task in (plain, weighted)]
    assert torch.equal(*(losses_of(task, two[0].init(Rng(0)), held) for task in two))
    owner = torch.zeros(4, dtype=torch.int64)
    assert torch.equal(*(t.predict(weights, [None], held.x, owner).told for t in (plain, weighted)))
    assert plain.objective(weights, held) != weighted.objective(weights, held)


def test_the_chosen_branch_minimizes_it_and_the_others_follow_by_its_smoothed_form():
    held, shared = shard([0, 0, 2]), WSM(blend=0.0).prepare(shard([0, 0, 2]))[0]
    z = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    outputs = (z, torch.zeros(3, 1))
    for choice, lam in ((1, 0.0), (0, 0.5)):
        loss = BranchLoss(WSM(blend=0.0), choice, lam, eps=0.2)
        expected = WSM(blend=0.0).value(z[choice], held.y, shared, ())
        if lam:
            expected = expected + lam * WSM(blend=0.0).each(z[1 - choice], held.y, shared, 0.2).mean()
        torch.testing.assert_close(loss.value(outputs, held.y, *loss.prepare(held)), expected)
    rows = torch.tensor([0, 1, 0])
    loss = BranchLoss(WSM(blend=0.0), rows)
    picked = z[rows, torch.arange(3)]
    torch.testing.assert_close(
        loss.value(outputs, held.y, *loss.prepare(held)), WSM(blend=0.0).value(picked, held.y, shared, ())
    )


# -- FedEM -------------------------------------------------------------------------------------------------------------


def test_fedem_weighs_it_row_by_row():
    held, q = shard([0, 0, 2]), torch.tensor([[0.1, 0.9], [1.0, 0.0], [0.5, 0.5]], dtype=torch.float64)
    z = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    loss = Blended(q, WSM(blend=0.0))
    shared, columns = loss.prepare(held)
    each = torch.stack([WSM(blend=0.0).each(z[k], held.y, shared) for k in range(2)], 1)
    found = loss.value((z, torch.zeros(3, 1)), held.y, shared, columns)
    torch.testing.assert_close(found, (q * each).sum() / 3)
    assert not torch.allclose(found, Blended(q).value((z, None), held.y, None, (q,)))


def test_fedem_leaves_out_steps_whose_label_is_absent():
    """Padding has label 0, which no step that counts has: an infinite loss that must not count."""
    y = torch.tensor([[1, 2, 0], [1, 0, 0]])
    held = Shard(torch.zeros(2, 3, dtype=torch.int64), y, torch.arange(2), mask=y != 0)
    q = torch.tensor([[0.3, 0.7], [0.6, 0.4]], dtype=torch.float64)
    z = torch.randn(2, 2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    loss = Blended(q, WSM(blend=0.0))
    value = loss.value((z, torch.zeros(2, 1)), y, *loss.prepare(held))
    shared, _ = WSM(blend=0.0).prepare(held)
    expected = sum(
        q[i, k] * WSM(blend=0.0).each(z[k, i, s, None], y[i, s, None], shared)[0]
        for k in range(2)
        for i, s in ((0, 0), (0, 1), (1, 0))
    )
    torch.testing.assert_close(value, expected / 3)
    (gradient,) = torch.autograd.grad(value, z)
    assert torch.isfinite(gradient).all()
    assert not gradient[:, y == 0].any()


def test_fedem_refuses_a_loss_that_has_only_a_mean():
    task = Task(lambda: nn.Sequential(nn.Linear(3, 2)), nn.CrossEntropyLoss(label_smoothing=0.1))
    with pytest.raises(FedtideError, match=r"^loss: found 'Plain', allowed: CrossEntropy, WSM.* as FedEM"):
        fedem(task)
    assert isinstance(task.loss, Plain)


# -- in a file ---------------------------------------------------------------------------------------------------------


def test_it_is_spelled_as_a_word_or_a_table():
    def loss_of(value):
        return from_dict(raw({**A, "loss": value})).method[0].loss

    assert loss_of("wsm") == loss_of({"kind": "wsm"}) == WSM() == WSM(0.0)
    assert loss_of({"kind": "wsm", "val": True}) == WSM(val=True)
    assert loss_of("cross-entropy") == CrossEntropy() == from_dict(raw(A)).method[0].loss


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (
            "wms",
            "loss: found 'wms', did you mean 'wsm'? Allowed: cross-entropy, wsm, fedlc, masked, python:module:function",
        ),
        ({"kind": "wsm", "smoothing": 1.0}, "unknown key; did you mean 'blend'? Allowed: blend, val, kind"),
        ({"kind": "wsm", "blend": -1.0}, "method 'A'.loss.blend: found -1.0, allowed: 0.0 or more"),
        (
            {"blend": 1.0},
            "found {'blend': 1.0}, allowed: a table with 'kind' = one of cross-entropy, wsm, fedlc, masked",
        ),
        ({"blend": 1.0}, "allowed: a table with 'kind' = one of cross-entropy, wsm, fedlc, masked, python"),
    ],
)
def test_a_mistake_in_it_is_one_clear_line(value, line):
    with pytest.raises(FedtideError) as raised:
        from_dict(raw({**A, "loss": value}))
    assert line in str(raised.value)
