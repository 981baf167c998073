"""What a method asks, sends, shows and keeps, in words for whoever is to take part."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedtide as ft
from fedtide.core.base import Shard
from fedtide.core.memory import MemoryStore
from fedtide.learn.target import LabelsTarget, NumberTarget
from fedtide.runs.build import host_of
from fedtide.site.policy import Policy, Term, describe_terms, terms_of
from fedtide.wire.clip import Clip
from fedtide.wire.pipeline import Wire
from helpers.toys import toy

LIKE = Shard(torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64), torch.zeros(1))


def said(name: str, policy: Policy = Policy()) -> list[str]:
    experiment = toy(name)
    algorithm = host_of(experiment, experiment.method[0], 0, MemoryStore(None)).algorithm
    return describe_terms(algorithm, LIKE, 3, policy, 3)


def test_a_method_that_reveals_nothing():
    assert said("fedavg") == [
        "asks: train: receives 172 B, sends 196 B: delta (43 numbers in 4 arrays), loss (1 number)",
        "asks: score: receives 172 B, sends of each client by itself: rows, hits, mean loss to three digits",
        "shows the server, for each client by itself: the answer to score, and no extra values of the method",
        "sums: the server adds them, so it receives the answer of each client by itself; nothing hides it",
        "keeps here, in the node's folder: nothing of the method, its key, the last model that it scored, "
        "questions and answers",
        "never leaves: rows, labels and memory; answers tell of them, the more the fewer rows there are",
    ]


def test_masked_sums():
    experiment = toy("fedavg")
    algorithm = host_of(experiment, experiment.method[0], 0, MemoryStore(None)).algorithm
    lines = describe_terms(algorithm, LIKE, 3, Policy(secure=True), 3, Wire())
    # 43 numbers and a loss, each with its weight, of 8 bytes.
    assert lines[0] == "asks: train: receives 172 B, sends 368 B: delta (43 numbers in 4 arrays), loss (1 number)"
    assert lines[3:5] == [
        "sums: masked; the server can open them for 3 clients or more together; answers to "
        "score and shown values are not masked",
        "masks: shared with the nodes whose keys the server names first; `peers` of your policy can name them",
    ]
    assert not [line for line in lines if "refused" in line]
    named = describe_terms(algorithm, LIKE, 3, Policy(fewest=5, peers=("SHA256:" + 43 * "x",)), 3, Wire())
    assert any("for 5 clients or more" in line for line in named)
    assert not [line for line in named if line.startswith("masks")]


def test_bounds_of_what_is_sent():
    experiment = toy("fedavg")
    algorithm = host_of(experiment, experiment.method[0], 0, MemoryStore(None)).algorithm
    lines = describe_terms(algorithm, LIKE, 3, Policy(), 3, Wire(clip=Clip({"delta": 0.5, "loss": 2.0})))
    said = "delta (43 numbers in 4 arrays, cut to a length of 0.5), loss (1 number, cut to a length of 2)"
    assert lines[0].endswith(said)


def test_an_owner_who_wants_masked_sums_of_a_study_that_does_not():
    assert "will be refused: every question but score, because your policy allows masked sums alone" in said(
        "fedavg", Policy(secure=True)
    )


def test_a_method_with_memory():
    lines = said("scaffold")
    assert any(line.startswith("keeps here, in the node's folder: 172 B for each client, its key, ") for line in lines)


def test_a_method_that_reveals_and_an_owner_who_does_not():
    lines = said("fielding learned", Policy(reveals=("count",), questions=("train", "report", "count"), fewest=3))
    assert "shows the server, for each client by itself: representation (3 numbers), at report" in lines
    assert "shows the server, for each client by itself: count (2 numbers), at count" in lines
    assert [line for line in lines if "refused" in line] == [
        "will be refused: report, because its owner does not reveal 'representation'; allowed: count",
        "will be refused: val, because its owner does not allow the question 'val'; allowed: train, report, count",
        "will be refused: score, because its owner does not allow the question 'score'; allowed: train, report, count",
        "will be refused: sums of fewer than 3 clients, as the server counts them",
    ]


def test_what_is_told_of_an_evaluation_and_what_an_owner_leaves_out():
    (line,) = [line for line in said("fedem") if line.startswith("asks: score")]
    assert "sends after work on the rows here, of each client by itself: rows, " in line
    assert line.endswith("mean loss to three digits, choice, weights")
    lines = said("fedem", Policy(reveals=(), rows_at_least=20))
    assert "will be left out of score: choice, weights (forbidden by your policy)" in lines
    assert "will be refused: score of a client with fewer than 20 rows for it" in lines


def test_what_a_trial_does_not_see_is_said():
    lines = said("flexcfl drifts", Policy(reveals=("update",)))
    assert "may ask later: shifted, of which a trial saw nothing" in lines
    assert "shows the server, for each client by itself: shifted, of which a trial saw nothing" in lines
    assert "will be refused: questions that reveal shifted (forbidden by your policy)" in lines


def test_slots_are_counted():
    experiment = toy("ifca")
    algorithm = host_of(experiment, experiment.method[0], 0, MemoryStore(None)).algorithm
    (train,) = [term for term in terms_of(algorithm, LIKE, 3) if term.question == "train"]
    assert isinstance(train, Term)
    assert train.down == 2 * 172
    assert train.sums["delta"] == "43 numbers in 4 arrays for some of 2"


@pytest.mark.parametrize(
    ("target", "y"),
    [
        (NumberTarget(0.0, 1.0, (0.0,), (0.0,)), torch.tensor([-1.0, 1.0])),
        (LabelsTarget(3), torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])),
    ],
)
def test_rows_that_have_no_classes(target, y):
    algorithm = ft.algorithms.fedavg(ft.Task(lambda: nn.Linear(4, target.width or 3), target=target))
    like = Shard(torch.zeros(2, 4), y, torch.arange(2), bins=torch.arange(2))
    train, judged = terms_of(algorithm, like, 2)
    assert train.sums["delta"].endswith("numbers in 2 arrays")
    assert judged.up == 0
