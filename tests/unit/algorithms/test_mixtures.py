"""pFedEM, FedGMM and FedEM with whole models: what their papers promise, and what their edge cases do."""

import math
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedtide.algorithms.fedem import fedem
from fedtide.algorithms.pfedem import pfedem
from fedtide.config import from_dict
from fedtide.core.base import Moment, Shard
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import detached, same
from fedtide.learn.local import LocalTrainer
from fedtide.learn.losses import mixture_notes
from fedtide.learn.task import Task
from fedtide.mixtures.feature_gaussians import Random
from fedtide.runs.build import host_of
from fedtide.runs.preflight import preflight
from helpers import quadratics
from helpers.toys import TOY, played, toy

NOW, KEY = Moment(0, 1), Rng(5)


class Identity:
    """Features that are the rows themselves."""

    moves = False

    def of(self, task):
        return lambda first, x: x.double()


def headed(width=1, classes=2):
    model = nn.Sequential()
    model.add_module("head", nn.Linear(width, classes))
    return model


def shard_of(z, y=None):
    x = torch.tensor(z, dtype=torch.float64).reshape(len(z), -1)
    return Shard(x, torch.zeros(len(z), dtype=torch.int64) if y is None else torch.tensor(y), torch.arange(len(z)))


TASK = Task(headed, dtype=torch.float64, example=torch.zeros(1, 1, dtype=torch.float64))


def sent(algorithm, mu, var, pi):
    """A payload with the models that the algorithm begins with, and given Gaussians."""
    state = algorithm.init(None, Rng(0))
    columns = (torch.tensor(part, dtype=torch.float64).reshape(2, -1) for part in (mu, var))
    mu, var = columns
    state = replace(state, mu=mu, spread=var, pi=torch.tensor(pi, dtype=torch.float64))
    return algorithm.serve(state, torch.tensor([0]))[0]


# -- pFedEM ------------------------------------------------------------------------------------------------------------


def test_printed_and_stated_weights_agree_where_all_clients_split_alike():
    """Two clients of four rows, two of each component: n_ik / n_k = n_i / n, up to the printed sum over all of n_i."""
    deltas = []
    for divide in ("members", "participants"):
        algorithm = pfedem(
            TASK,
            LocalTrainer(0.1, local_steps=1, batch_size=0),
            features=Identity(),
            gaussian_init=Random(),
            normalize_by=divide,
        )
        payload = sent(algorithm, [0, 4], [1, 1], [0.5, 0.5])
        answers = [
            detached(algorithm.works["train"](payload, None, shard_of(z, [0, 1, 1, 0]), NOW, KEY).total)
            for z in ([0, 1, 3, 5], [0.5, 1.5, 4, 4])
        ]
        weights = [a["delta"].parts[0].weight for a in answers]
        everyone = sum(weights) if divide == "members" else sum(a["shares"].weight for a in answers)
        deltas.append(
            sum(
                w * a["delta"].parts[0].value.params["head.weight"] for w, a in zip(weights, answers, strict=True)
            ) / everyone
        )  # fmt: skip
    torch.testing.assert_close(*deltas)


BLOBS = {
    "source": {
        "kind": "gaussians",
        "samples": 1200,
        "dims": 6,
        "classes": 3,
        "domains": 2,
        "separation": 0.5,
        "offset": 4.0,
    },
    "partition": {"kind": "iid", "clients": 8},
    "groups": {"by": "none"},
    "public_samples": 60,
    "held_out_clients": {"clients": 0},
}
CYCLES = {"who": {"kind": "always"}, "what": {"kind": "domain-mixture", "cycles": 2, "samples": 40}}
PCA = {"features": {"kind": "pca", "width": 4}, "cohort": {"kind": "everyone"}}


def test_all_ways_to_weigh_models_are_reported_and_sum_to_one():
    options = {**PCA, "inference": "client"}
    run = played(toy("pfedem", options, rounds=12, data=BLOBS, shift=CYCLES, model="linear"))
    clients = run.host.population.clients
    payload, _ = run.host.algorithm.serve(run.state, clients)
    x = run.host.population.rows.x[:30]
    found = run.host.algorithm.predict(payload, [None], x, torch.zeros(30, dtype=torch.int64))
    assert set(found.others) == {"posterior", "uniform", "global"}
    torch.testing.assert_close(found.told.exp().sum(1), torch.ones(30, dtype=torch.float64))
    torch.testing.assert_close(found.weights.sum(1), torch.ones(30, dtype=torch.float64))
    assert found.density.shape == (30,)
    assert torch.equal(found.told.argmax(1), found.others["global"])  # a client that knows nothing of itself


def test_a_single_row_of_a_component_makes_no_step_with_batchnorm_and_does_not_lower_the_loss():
    build = lambda: nn.Sequential(OrderedDict(norm=nn.BatchNorm1d(1), head=nn.Linear(1, 2)))  # noqa: E731
    task = Task(build, dtype=torch.float64, example=TASK.example)
    algorithm = pfedem(
        task, LocalTrainer(1e-9, local_steps=1, batch_size=0), features=Identity(), gaussian_init=Random()
    )
    payload = sent(algorithm, [0, 4], [1, 1], [0.5, 0.5])
    answer = algorithm.works["train"](payload, None, shard_of([0, 1, 0, 5]), NOW, KEY)
    alone = algorithm.works["train"](payload, None, shard_of([0, 1, 0]), NOW, KEY)
    assert set(answer.total["delta"].parts) == {0}
    assert set(answer.total["gaussians"].parts) == {0, 1}
    assert answer.total["loss"] == alone.total["loss"]
    assert answer.total["loss"].weight == 3


# -- FedEM -------------------------------------------------------------------------------------------------------------


def test_counting_everyone_damps_the_step_by_the_share_that_was_asked():
    options = {"components": 2, "cohort": {"kind": "uniform", "clients_per_round": 2}, "weighting": "uniform"}
    states = {
        divide: played(toy("fedem whole", {**options, "normalize_by": divide}), rounds=1)
        for divide in ("participants", "everyone")
    }
    first, damped = (run.state.weights.params for run in states.values())
    begun = states["everyone"].steps[0].received.weights.params
    for name, value in begun.items():
        torch.testing.assert_close(damped[name] - value, (first[name] - value) / 4, rtol=1e-4, atol=1e-6)


# -- what cannot be ----------------------------------------------------------------------------------------------------


def experiment_of(**method):
    data = {**TOY["data"], "public_samples": 10, "partition": {"kind": "iid", "clients": 8, "samples": 10}}
    base = {"name": "M", "cohort": 4, "features": {"kind": "pca", "width": 2}}
    return from_dict({**TOY, "data": data, "method": [{**base, **method}]})


@pytest.mark.parametrize(
    ("method", "line"),
    [
        ({"algorithm": "pfedem", "components": 40}, "method 'M'.components: found 40, allowed: at most"),
        ({"algorithm": "fedgmm", "gaussians": 40}, "method 'M'.gaussians: found 40, allowed: at most"),
        (
            {"algorithm": "pfedem", "features": {"kind": "pca", "width": 30}},
            "features.width: found 30, allowed: at most",
        ),
        ({"algorithm": "pfedem", "features": {"kind": "network", "layer": "hed"}}, "layer: found 'hed'"),
        ({"algorithm": "pfedem", "components": 0}, "components"),
        ({"algorithm": "pfedem", "update": "fast"}, "update: found 'fast', allowed: certainty, overwrite"),
        ({"algorithm": "pfedem", "inference": "posteriors"}, "inference: found 'posteriors'"),
    ],
)
def test_settings_that_cannot_be_are_said_before_anything_is_written(method, line):
    with pytest.raises(FedtideError) as caught:
        preflight(experiment_of(**method))
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_features_that_are_not_numbers_are_refused_and_those_that_never_change_are_borne():
    algorithm = pfedem(
        TASK, LocalTrainer(0.1, local_steps=1, batch_size=0), features=Identity(), gaussian_init=Random()
    )
    payload = sent(algorithm, [0, 4], [1, 1], [0.5, 0.5])
    still = algorithm.works["train"](payload, None, shard_of([2, 2, 2]), NOW, KEY)
    assert still.total["gaussians"].parts[0].value["var"].item() == 0.0  # floored when it is sent
    odd = algorithm.works["train"](payload, None, shard_of([2, math.nan, 2]), NOW, KEY)
    assert not math.isfinite(float(odd.total["log_likelihood"].value))  # the fleet refuses and reports such an answer


def test_a_gaussian_that_is_none_leaves_the_one_before():
    experiment = toy("fedgmm", rounds=3)
    host = host_of(experiment, experiment.method[0], 0)

    def train(*inputs):
        answer = host.algorithm.works["train"](*inputs)
        if answer is None:
            return None
        sent = answer.total["gaussians"]
        parts = {
            k: replace(part, value={"mu": part.value["mu"], "cov": -part.value["cov"]})
            for k, part in sent.parts.items()
        }
        return replace(answer, total={**answer.total, "gaussians": replace(sent, parts=parts)})

    lying = replace(host.algorithm, works={**host.algorithm.works, "train": train})
    first, *_, last = played(experiment, host=replace(host, algorithm=lying)).steps
    assert same((last.state.mu, last.state.spread), (first.state.mu, first.state.spread))
    assert not torch.linalg.cholesky_ex(last.state.spread).info.any()


def test_a_likelihood_fits_however_far_away_components_are():
    joints = torch.full((2, 3), -1e31, dtype=torch.float64)
    assert float(mixture_notes(torch.ones(2, 1), joints)["log_likelihood"].value) == -(2.0**53)


def test_whoever_did_not_answer_counts_as_having_the_mean_of_the_others():
    """Of clients with 1 and 3 rows the first answers: everyone has 2 rows."""
    algorithm = fedem(Task(lambda: nn.Linear(1, 5), dtype=torch.float64), normalize_by="everyone")
    fleet = quadratics.fleet_of(algorithm)
    whole = algorithm.init(fleet, Rng(0)).everyone
    ask = fleet.ask
    fleet.ask = lambda question, clients, payload, **options: ask(question, clients[:1], payload, **options)
    assert (whole, algorithm.init(fleet, Rng(0)).everyone) == (4.0, 2.0)
