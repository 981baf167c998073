"""What the questions of each algorithm cost clients on a clock of devices."""

import pytest
import torch

from fedtide.runs.build import host_of
from helpers.toys import toy

LOCAL = {"lr": 0.1, "batch_size": 10, "epochs": 2}

# Of a client with 30 rows: two epochs are 60 rows forward and back, a pass without gradients is 10.
EFFORTS = [
    ("fedavg", {}, {"train": 60}),
    ("fedavg oort", {}, {"count": 0, "train": 60 + 10}),
    ("fedavg nearest", {}, {"labels": 0, "train": 60}),
    ("fedprox by-size", {}, {"count": 0, "train": 60}),
    ("q-fedavg", {}, {"train": 60 + 10}),
    ("q-fedavg oort", {}, {"train": 60 + 2 * 10}),
    ("scaffold", {}, {"train": 60}),
    ("auxo", {}, {"train": 60}),
    ("oracle", {}, {"train": 60}),
    ("scaffold", {"variant": "I"}, {"train": 60 + 30}),
    ("fedtem", {}, {"train": 60 + 2 * 10}),
    ("fedtkm", {}, {"train": 60 + 2 * 10}),
    ("min-loss", {}, {"train": 60 + 10}),
    ("scsgd", {}, {"train": 60}),
    ("t-shot", {}, {"collect": 0, "train": 60}),
    ("fedem", {"components": 3, "component_layer": "head"}, {"weigh": 0, "train": 60 + 10}),
    ("fedem", {"components": 3, "component_layer": "*"}, {"train": 3 * (60 + 10)}),
    ("fedgmm pca", {"components": 3}, {"train": 3 * (60 + 10)}),
    ("fedgmm", {"components": 2}, {"collect": 10, "train": 2 * (60 + 10) + 10}),
    ("pfedem pca", {}, {"collect": 0, "train": 60}),
    ("pfedem", {"components": 3}, {"collect": 10, "train": 60 + 10}),
    # Each of three models takes one step of ten rows.
    ("pfedem pca", {"components": 3, "local": {"lr": 0.1, "batch_size": 10, "local_steps": 1}}, {"train": 30}),
    ("ifca", {"clusters": 3}, {"train": 60 + 3 * 10}),
    ("ifca", {"clusters": 3, "variant": "gradient"}, {"train": 30 + 3 * 10}),
    ("ifca", {"clusters": 3, "n_init": 4}, {"fit": 12 * 10}),
    ("aem", {"clusters": 4}, {"train": 60 + 4 * 10}),
    ("aem", {"clusters": 4, "transforms": ["anchored"]}, {"train": 2 * 60 + 4 * 10}),
    ("fedem", {"transforms": ["anchored"], "components": 3, "component_layer": "head"}, {"train": 2 * 60 + 10}),
    ("fedem", {"transforms": ["anchored"], "components": 3, "component_layer": "*"}, {"train": 3 * (60 + 10) + 60}),
    ("cfl", {}, {"place": 60, "train": 60}),
    ("flexcfl", {"pretrain": 3}, {"cold": 30, "shifted": 0, "train": 60}),
    ("flexcfl", {"clusters": "silhouette", "pretrain": 3}, {"labels": 0, "cold": 30, "shifted": 0, "train": 60}),
    ("feddrift", {"max_clusters": 4}, {"judge": 10, "train": 60}),
    ("fielding", {}, {"report": 0, "train": 60}),
    (
        "fielding fair",
        {"cohort": {"kind": "oort", "clients_per_round": 3}},
        {"count": 0, "report": 0, "train": 60 + 2 * 10},
    ),
    ("fielding gradient", {}, {"report": 30, "train": 60}),
    ("fielding learned", {}, {"val": 10, "train": 60}),
    ("fielding combined", {}, {"report": 30 + 10, "train": 60}),
    # Before it tells a loss a client evaluates K models to choose one; one that the server knows takes one pass.
    *(
        (name, {"cohort": "power-of-choice", **options}, {"loss": 10 * passes, "count": 0})
        for name, options, passes in [
            ("fedavg", {}, 1),
            ("fedsgd", {}, 1),
            ("q-fedavg", {}, 1),
            ("fedtkm", {}, 1),
            ("oracle", {}, 1),
            ("ifca", {"clusters": 3}, 3 + 1),
            ("aem", {"clusters": 4}, 4 + 1),
            ("fedem", {"components": 3, "component_layer": "head"}, 1 + 1),
            ("fedem", {"components": 3, "component_layer": "*"}, 3 + 3),
            ("fedgmm pca", {"components": 3}, 3 + 3),
            ("fedgmm", {"components": 2}, 2 * (2 + 1)),
            ("pfedem pca", {"components": 3}, 3),
            ("pfedem", {"components": 3}, 1 + 1 + 3),
            ("auxo", {}, 1),
            ("cfl", {}, 1),
            ("feddrift", {}, 1),
            ("flexcfl", {"pretrain": 3}, 1),
            ("fielding", {}, 1),
        ]
    ),
]


@pytest.mark.parametrize(("name", "options", "costs"), EFFORTS, ids=[f"{row[0]} {row[1]}" for row in EFFORTS])
def test_effort(name, options, costs):
    experiment = toy(name, {"local": LOCAL, **options})
    method = experiment.method[0]
    algorithm = host_of(experiment, method, 0).algorithm
    found = {
        question: algorithm.traits.compute_cost(question, torch.tensor([30])).double().tolist() for question in costs
    }
    assert found == {question: pytest.approx([cost]) for question, cost in costs.items()}
