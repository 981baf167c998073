"""Macro-F1 and AUC from sums, by hand and against scikit-learn.

Six rows, three classes, labels 0 0 0 1 1 2, predicted 0 0 1 1 2 2. Class 0: TP 2, predicted 2, rows 3, F1 = 4/5. Class
1: 1, 2, 2, F1 = 2/4. Class 2: 1, 2, 1, F1 = 2/3. Macro-F1 = (4/5 + 1/2 + 2/3) / 3 = 59/90.

Five rows, two classes; p of class 1 is .9 .6 .3 where it is the label, .5 .2 where it is not. Of six pairs (.9, .5),
(.9, .2), (.6, .5), (.6, .2), (.3, .2) are in order and (.3, .5) is not: AUC = 5/6, and of class 0, whose scores are
those turned around, the same. Log-odds are 2.2, 0.4, -0.85, 0.0, -1.4, all in bins of their own, so it is exact.
"""

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, roc_auc_score

from fedtide.core.base import Prediction
from fedtide.evaluate.metrics import auc, macro_f1
from fedtide.fleets.scoring import BINS, Tally, concat_scores, confusion, odds
from fedtide.learn.target import CLASSES, LabelsTarget


def logits_of(predicted: list[int], classes: int) -> torch.Tensor:
    return torch.eye(classes)[predicted].mul(3.0).log_softmax(1)


def test_macro_f1_by_hand():
    counts = confusion(logits_of([0, 0, 1, 1, 2, 2], 3), torch.tensor([0, 0, 0, 1, 1, 2]))
    assert counts.tolist() == [[2, 2, 3], [1, 2, 2], [1, 2, 1]]
    assert macro_f1(counts.numpy()) == pytest.approx(59 / 90, abs=1e-15)


def test_auc_by_hand():
    p = torch.tensor([0.9, 0.6, 0.3, 0.5, 0.2])
    table = odds(torch.stack([1 - p, p], 1).log(), torch.tensor([1, 1, 1, 0, 0]))
    assert auc(table.numpy()) == (pytest.approx(5 / 6, abs=1e-15), 0.0)
    assert auc(table[1:].numpy())[0] == auc(table[:1].numpy())[0] == pytest.approx(5 / 6, abs=1e-15)


def test_equal_scores_count_half_and_are_all_that_is_unknown():
    """A constant score: AUC 1/2, and as all pairs are in one bin it may be anything from 0 to 1."""
    table = odds(torch.full((6, 2), 0.5).log(), torch.tensor([0, 1, 0, 1, 1, 0]))
    assert auc(table.numpy()) == (0.5, 0.5)


def test_a_class_that_no_row_has_is_left_out():
    y = torch.tensor([0, 0, 1])
    logp = torch.tensor([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.1, 0.8, 0.1]]).log()
    assert auc(odds(logp, y).numpy())[0] == 1.0
    assert macro_f1(confusion(logp, y).numpy()) == 1.0
    assert np.isnan(auc(odds(logp, torch.zeros(3, dtype=torch.int64)).numpy())).all()
    assert np.isnan(macro_f1(np.zeros((3, 3))))


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("sharp", [0.5, 4.0, 30.0])
def test_they_are_those_of_scikit_learn_within_the_bound(classes, sharp):
    made = torch.Generator().manual_seed(classes)
    y = torch.randint(classes, (800,), generator=made)
    logits = sharp * (torch.eye(classes)[y] + torch.randn(800, classes, generator=made))
    logp = logits.log_softmax(1)
    value, bound = auc(odds(logp, y).numpy())
    p = logp.double().exp().numpy()
    exact = roc_auc_score(y, p[:, 1]) if classes == 2 else np.mean(
        [roc_auc_score(y == k, logp[:, k].double() - torch.log(-torch.expm1(logp[:, k].double().clamp(max=-1e-300))))
         for k in range(classes)])  # fmt: skip
    assert abs(value - exact) <= bound + 1e-12
    assert bound < (0.01 if sharp < 30 else 0.2)
    expected = f1_score(y, logp.argmax(1), average="macro")
    assert macro_f1(confusion(logp, y).numpy()) == pytest.approx(expected, abs=1e-12)


def test_sums_of_blocks_are_those_of_all_rows():
    made = torch.Generator().manual_seed(0)
    y = torch.randint(4, (60,), generator=made)
    logp, owner = torch.randn(60, 4, generator=made).log_softmax(1), torch.arange(60) // 12
    whole = Tally(5, ("confusion", "odds"))
    whole.add(owner, Prediction(logp), y)
    blocks = []
    for clients in ([0, 1], [2, 3, 4]):
        part = Tally(len(clients), ("confusion", "odds"))
        where = (owner >= clients[0]) & (owner <= clients[-1])
        part.add(owner[where] - clients[0], Prediction(logp[where]), y[where])
        blocks.append(part.scores(torch.tensor(clients)))
    joined, alone = concat_scores(blocks), whole.scores(torch.arange(5))
    for name, table in alone.pooled.items():
        assert joined.pooled[name].equal(table)
    assert joined.pooled["odds"].shape == (4, 2, BINS)
    assert joined.pick(torch.tensor([0])).pooled == {}  # a sum over all is not one over some


def test_of_sequences_only_scored_steps_count():
    logp = logits_of([0, 1, 1, 0], 2).reshape(2, 2, 2)
    y, scored = torch.tensor([[0, 1], [0, 0]]), torch.tensor([[True, True], [True, False]])
    tally = Tally(1, ("confusion",))
    tally.add(torch.zeros(2, dtype=torch.int64), Prediction(logp), y, scored)
    assert tally.pooled["confusion"].tolist() == [[1, 1, 2], [1, 2, 1]]


@pytest.mark.parametrize("target", [CLASSES, LabelsTarget(2)], ids=["classes", "labels"])
def test_a_row_of_which_a_model_says_nan_is_wrong_by_all_ways(target):
    told = torch.tensor([[float("nan"), -1.0], [1.0, -1.0]])
    y = torch.tensor([0, 0]) if target == CLASSES else torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    tally = Tally(1, target=target)
    tally.add(torch.tensor([0, 0]), Prediction(told, others={"other": target.predict_labels(told)}), y)
    scores = tally.scores(torch.tensor([0]))
    assert scores.correct.tolist() == scores.others["other"].tolist() == [1.0]
    if target != CLASSES:
        assert [scores.sums[name].tolist() for name in ("false_alarms", "exact")] == [[[1.0, 1.0]], [1.0]]


def test_nan_predicts_no_class():
    logp = logits_of([0, 1], 2)
    logp[0] = float("nan")
    assert confusion(logp, torch.tensor([0, 1])).tolist() == [[0, 0, 1], [1, 1, 1]]
    assert odds(logp, torch.tensor([0, 1]))[:, :, 0].tolist() == [[1, 0], [0, 1]]
