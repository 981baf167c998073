"""Training and judging sequences: every mean is over the steps that count, whatever a batch or a pass holds."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedtide.algorithms.fedavg import fedavg
from fedtide.algorithms.fedsgd import fedsgd
from fedtide.cohorts import Everyone
from fedtide.core.base import Moment, Prediction, Shard
from fedtide.core.memory import MemoryStore
from fedtide.core.rng import Rng
from fedtide.core.trees import same
from fedtide.data.partition import Natural, Split
from fedtide.data.population_builder import build
from fedtide.data.rows import Rows
from fedtide.fleets.engines import Host, LocalEngine
from fedtide.fleets.simulated import SimulatedFleet
from fedtide.learn import task as tasks
from fedtide.learn.local import LocalTrainer
from fedtide.learn.losses import CrossEntropy, label_count
from fedtide.learn.target import CLASSES
from fedtide.learn.task import Task, logits_and_features, with_branches
from fedtide.mixtures.branches import blend_branches, losses_of, most_certain, predict_chosen
from fedtide.models.networks import LSTM
from fedtide.runs.simulate import simulate
from helpers.texts import Network, tiny

NOW = Moment(0, 4)


def shard() -> Shard:
    """Five sequences of 1, 2, 3, 4 and 2 steps that count; label 0 is padding."""
    y = torch.tensor([[1, 0, 0, 0], [2, 3, 0, 0], [1, 1, 2, 0], [3, 2, 1, 4], [4, 4, 0, 0]])
    x = torch.tensor([[1, 2, 3, 4]] * 5)
    return Shard(x, y, torch.arange(5), mask=y != 0)


def network() -> Task:
    return Task(lambda: Network(5), dtype=torch.float64)


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_the_loss_of_a_batch_is_the_mean_over_its_val_tokens():
    """Two steps count in the first row and one in the second, with probabilities 1/2, 1/4 and 1/8."""
    logp = torch.tensor(
        [[[1 / 2, 1 / 4, 1 / 4], [1 / 4, 1 / 4, 1 / 2]], [[1 / 8, 3 / 8, 1 / 2], [1.0, 1.0, 1.0]]]
    ).log()
    y, mask = torch.tensor([[0, 1], [0, 2]]), torch.tensor([[True, True], [True, False]])
    value = CrossEntropy().value(logp, y, None, (mask,))
    assert float(value) == pytest.approx((math.log(2) + math.log(4) + math.log(8)) / 3, rel=1e-6)
    assert label_count(y, mask) == 3
    assert label_count(y[:, 0], None) == 2
    means = CLASSES.losses(logp, y, mask).tolist()
    assert means == pytest.approx([(math.log(2) + math.log(4)) / 2, math.log(8)], rel=1e-6)
    with_padding = F.cross_entropy(logp.flatten(0, 1), y.masked_fill(~mask, -100).flatten())
    assert float(value) == pytest.approx(float(with_padding), rel=1e-6)


# -- the task ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [1, 4, 8, 12, 2048])
def test_objective_and_losses_do_not_depend_on_how_many_rows_pass_at_once(monkeypatch, at_once):
    monkeypatch.setattr(tasks, "ROWS", at_once)
    task, given = network(), shard()
    weights = task.init(Rng(0))
    logits = task.logits(weights, given.x)
    assert logits.shape == (5, 4, 5)
    expected = F.cross_entropy(logits[given.mask], given.y[given.mask])
    assert task.objective(weights, given) == pytest.approx(float(expected), rel=1e-12)
    losses = CLASSES.losses(F.log_softmax(logits, -1), given.y, given.mask)
    each = [float(F.cross_entropy(logits[i][given.mask[i]], given.y[i][given.mask[i]])) for i in range(5)]
    assert losses.tolist() == pytest.approx(each, rel=1e-12)
    assert not logits.requires_grad


class Watched(Network):
    """Notes how many rows come in each pass."""

    passes: list[int]

    def forward(self, x):
        self.passes.append(len(x))
        return super().forward(x)


@pytest.mark.parametrize(
    ("at_once", "passes"), [(1, [1] * 5), (4, [1] * 5), (8, [2, 2, 1]), (19, [4, 1]), (20, [5]), (2048, [5])]
)
def test_logits_of_sequences_are_made_in_passes_of_so_many_steps(monkeypatch, at_once, passes):
    """Sequences of four steps; rows of numbers and not of tokens count as rows."""
    monkeypatch.setattr(Watched, "passes", [], raising=False)
    task, given = Task(lambda: Watched(5), dtype=torch.float64), shard()
    weights = task.init(Rng(0))
    expected = network().logits(weights, given.x)
    monkeypatch.setattr(tasks, "ROWS", at_once)
    torch.testing.assert_close(task.logits(weights, given.x), expected, rtol=1e-12, atol=1e-14)
    assert Watched.passes == passes
    assert task.logits(weights, given.x[:0]).shape == (0, 4, 5)
    rows = Task(lambda: nn.Linear(4, 2))
    assert len(list(rows.outputs(rows.init(Rng(0)), torch.zeros(5, 4)))) == -(-5 // at_once)


@pytest.mark.parametrize("branches", [1, 2, 3])
@pytest.mark.parametrize("at_once", [1, 7, 12, 40])
def test_branches_on_text_do_not_depend_on_how_many_steps_pass_at_once(monkeypatch, branches, at_once):
    task = with_branches(
        Task(lambda: LSTM(embedding=4, hidden=6).build((4,), 5), dtype=torch.float64), "projection", branches
    )
    weights, given, owner = task.init(Rng(0)), shard(), torch.tensor([0, 0, 1, 1, 1])

    def everything():
        logits, z = logits_and_features(task, weights, given.x)
        blend = torch.linspace(0.1, 0.9, 5, dtype=torch.float64)[:, None] ** torch.arange(1.0, branches + 1)
        blend = blend / blend.sum(1, keepdim=True)
        mixed = torch.logsumexp(logits.log_softmax(-1) + blend.log().T[:, :, None, None], 0)
        torch.testing.assert_close(blend_branches(task, weights, given.x, blend).told, mixed, rtol=1e-12, atol=1e-14)
        surer = [most_certain(logits, owner, together, given.mask) for together in (False, True)]
        return (
            logits,
            z,
            *surer,
            predict_chosen(logits, surer[0]).told,
            losses_of(task, weights, given).mean(1).argmin(),
        )

    expected = everything()
    assert expected[0].shape == (branches, 5, 4, 5)
    monkeypatch.setattr(tasks, "ROWS", at_once)
    for ours, theirs in zip(everything(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


# -- the solver --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2, 3, 0])
def test_a_step_follows_the_mean_over_the_tokens_of_its_batch(batch):
    """One epoch, step by step, against plain torch with `ignore_index`."""
    task, given = network(), shard()
    start = task.init(Rng(0))
    fitted = LocalTrainer(lr=0.5, batch_size=batch)(task, task.loss, start, given, NOW, Rng(3))
    model = Network(5).double()
    model.load_state_dict(start.params)
    order = torch.randperm(5, generator=Rng(3).at("shuffle").torch())
    total = 0.0
    for rows in order.split(batch or 5):
        y = given.y[rows].masked_fill(~given.mask[rows], -100)
        loss = F.cross_entropy(model(given.x[rows]).flatten(0, 1), y.flatten())
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.5 * param.grad
        total += float(loss.detach()) * int(given.mask[rows].sum())
    assert fitted.loss == pytest.approx(total / 12, rel=1e-12)  # 12 steps count in all
    for name, param in model.named_parameters():
        torch.testing.assert_close(fitted.weights.params[name], param.detach())


@pytest.mark.parametrize("batch_size", [0, 2])
def test_a_plain_function_takes_the_steps_that_count(batch_size):
    fits = []
    for loss in (nn.CrossEntropyLoss(), CrossEntropy()):
        task = Task(lambda: Network(5), loss, dtype=torch.float64)
        local = LocalTrainer(lr=0.5, batch_size=batch_size)
        fits.append(local(task, task.loss, task.init(Rng(0)), shard(), NOW, Rng(0)))
    assert fits[0].loss == pytest.approx(fits[1].loss)
    for name, param in fits[0].weights.params.items():
        torch.testing.assert_close(param, fits[1].weights.params[name])


def test_a_loss_without_anything_per_row_is_weighed_by_steps_too():
    class Plain(CrossEntropy):
        def prepare(self, shard):
            return None, ()

        def value(self, outputs, y, shared, columns):
            assert columns == ()
            return outputs.sum() * 0.0 + float((y[:, 1] > 0).sum())

    task, given = network(), shard()
    fitted = LocalTrainer(lr=0.1, batch_size=1)(task, Plain(), task.init(Rng(0)), given, NOW, Rng(0))
    assert fitted.loss == pytest.approx((2 + 3 + 4 + 2) / 12)  # 1 for rows with a second step, 0 for the first row


def test_one_full_batch_of_fedavg_is_fedsgd_on_sequences():
    rows = Rows("toy", shard().x, shard().y, 5, client=torch.tensor([0, 0, 0, 1, 1]), padding=0)
    population = build(rows, Natural(), split=Split(0.0, 0.0))
    made = [
        algorithm(network(), LocalTrainer(lr=0.5, batch_size=0), cohort=Everyone()) for algorithm in (fedavg, fedsgd)
    ]
    states = [simulate(algorithm, population, rounds=3).state for algorithm in made]
    for name, param in states[0].weights.params.items():
        torch.testing.assert_close(param, states[1].weights.params[name], rtol=1e-10, atol=1e-12)


# -- scores ------------------------------------------------------------------------------------------------------------


def judged(rows: Rows, logp: torch.Tensor, **answers):
    """The scores of all rows of each natural client, whose labels all have log-probabilities `logp` (classes,)."""

    def predict(payload, memories, x, owner):
        return Prediction(
            logp.expand(*x.shape[: rows.y.dim()], -1), **{name: make(x) for name, make in answers.items()}
        )

    algorithm = replace(fedavg(Task(lambda: nn.Linear(1, 1))), predict=predict)
    population = build(rows, Natural(), split=Split(0.0, 0.0))
    memory = MemoryStore(None)
    fleet = SimulatedFleet(population, LocalEngine(Host(algorithm, population, 0, memory)))
    fleet.begin(NOW)
    return fleet.score({}, population.clients, part="train")


def test_accuracy_is_without_padding_ends_and_unknown_words(tmp_path):
    """Labels of tiny texts: ann 5 4 6 | 5 4 | 7, bob 5 4 6, without padding 0, ends 2 and unknown words 3."""
    logp = torch.tensor([0.30, 0.02, 0.15, 0.15, 0.20, 0.10, 0.05, 0.03]).log()
    logp[0] = -math.inf  # padding is never predicted, and costs nothing
    scores = judged(tiny(tmp_path), logp)
    assert scores.rows.tolist() == [6.0, 3.0]
    assert scores.correct.tolist() == [2.0, 1.0]
    ann, bob = -math.log(0.1**2 * 0.2**2 * 0.05 * 0.03), -math.log(0.1 * 0.2 * 0.05)
    assert scores.loss.tolist() == pytest.approx([ann, bob], rel=1e-6)
    assert scores.accuracy == pytest.approx(3 / 9)


def test_a_label_that_is_not_scored_is_never_right(tmp_path):
    for label, right in ((0, 0), (2, 0), (3, 0), (5, 3), (6, 2), (7, 1)):
        logp = torch.full((8,), -9.0).index_fill(0, torch.tensor([label]), -0.1)
        assert int(judged(tiny(tmp_path), logp).correct.sum()) == right, label


def test_a_client_without_a_scored_label_has_no_rows(tmp_path):
    scores = judged(tiny(tmp_path, vocabulary=1), torch.zeros(5))  # only "cat" is known
    assert scores.rows.tolist() == [2.0, 1.0]
    alone = Rows("ends", torch.ones(2, 2), torch.tensor([[1, 0], [2, 0]]), 3, client=torch.tensor([0, 1]),
                 padding=0, unscored=(1,))  # fmt: skip
    assert judged(alone, torch.zeros(3)).rows.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("at_once", [1, 4, 9, 2048])
def test_scores_do_not_depend_on_how_many_rows_pass_at_once(monkeypatch, tmp_path, at_once):
    rows = tiny(tmp_path)
    logp = torch.linspace(-3, -1, 8)
    expected = judged(rows, logp)
    for module in ("fedtide.fleets.scoring", "fedtide.fleets.simulated"):
        monkeypatch.setattr(f"{module}.ROWS", at_once)
    assert same(judged(rows, logp), expected)
