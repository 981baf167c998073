"""Every method with branches on sequences: trained, judged, or refused in one clear line before anything runs."""

import pytest
import torch

from fedtide.algorithms.minloss import minloss
from fedtide.core.base import Weights
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import all_finite
from fedtide.learn.task import Task, with_branches
from fedtide.runs.preflight import preflight
from helpers.studies import A, study
from helpers.texts import Network, chatter
from helpers.toys import played

TIMED = {"prior": {"kind": "linear", "period": 4}}


@pytest.fixture
def talk(tmp_path):
    source = {"kind": "text", "path": chatter(tmp_path / "chatter.jsonl"), "domain": "topic", "length": 5}
    data = {"source": source, "partition": "natural", "split": {"val": 0.2}, "held_out_clients": {"clients": 1}}
    return {"data": data, "model": {"kind": "lstm", "embedding": 4, "hidden": 6}, "rounds": 3}


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("fedtem", TIMED),
        pytest.param("fedtem", {**TIMED, "lam": 0.0, "selection": "bayes"}, marks=pytest.mark.thorough),
        pytest.param("fedtkm", TIMED, marks=pytest.mark.thorough),
        ("fedtkm", {**TIMED, "distance": "vote"}),
        ("fedtem", {**TIMED, "feature": "branches"}),
        pytest.param("fedtkm", {**TIMED, "feature": "branches"}, marks=pytest.mark.thorough),
        pytest.param("scsgd", TIMED, marks=pytest.mark.thorough),
        ("scsgd", {**TIMED, "branch_layer": "*"}),
        pytest.param("min-loss", {}, marks=pytest.mark.thorough),
        ("min-loss", {"choose_per": "client", "lam": 0.0}),
        ("vanilla", {}),
        ("fedem", {}),
    ],
)
def test_every_method_with_branches_reads_text(talk, algorithm, options):
    layer = "component_layer" if algorithm == "fedem" else "branch_layer"
    experiment = study({**A, "algorithm": algorithm, layer: "projection", **options}, **talk)
    preflight(experiment)
    run = played(experiment)
    assert all_finite([run.state, *(step.facts for step in run.steps)])
    clients = run.host.population.clients
    scores = run.fleet.score(run.host.algorithm.serve(run.state, clients)[0], clients)
    assert float(scores.rows.sum()) > 0
    assert torch.isfinite(scores.loss).all()


def test_t_shot_is_not_defined_for_text_and_says_so_before_anything_runs(talk):
    experiment = study({**A, "algorithm": "t-shot", "branch_layer": "projection", "shots": 2}, **talk)
    with pytest.raises(FedtideError) as raised:
        preflight(experiment)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("sure", ["row", "client"])
def test_padding_does_not_say_which_branch_is_surer(sure):
    """Branch 1 is a little sure of words and of no padding, branch 2 very sure of padding and of no word."""
    task = Task(lambda: Network(4))
    algorithm = minloss(task, choose_per=sure)
    weights = with_branches(task, "head", 2).init(Rng(0))
    params = {name: torch.zeros_like(p) for name, p in weights.params.items()}
    params["model.embedding.weight"][1:, 0] = 1.0
    params["model.head.copies.0.weight"][1, 0] = 2.0
    params["model.head.copies.1.weight"][0, 0] = -10.0
    params["model.head.copies.1.bias"][0] = 10.0
    x = torch.tensor([[1, 2, 3, 1, 2], [3, 0, 0, 0, 0]])  # without padding, and one word
    made = algorithm.predict(Weights(params), [None, None], x, torch.arange(2))
    assert made.choice.tolist() == [0, 0]
