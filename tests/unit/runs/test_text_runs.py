"""Text through a whole run: from a file to a record, in one process and in many, and what a model must return."""

import pytest
import torch

from fedtide.core.errors import FedtideError
from fedtide.core.trees import same
from fedtide.fleets.engines import WorkersEngine
from fedtide.runs.build import spec_of
from fedtide.runs.preflight import preflight
from helpers.studies import A, lines_of, raw, run_of, study
from helpers.texts import chatter
from helpers.toys import played


@pytest.fixture
def talk(tmp_path):
    """Settings of an experiment on text: day clients about tea, night clients about rain."""
    source = {"kind": "text", "path": chatter(tmp_path / "chatter.jsonl"), "domain": "topic", "length": 5}
    data = {"source": source, "partition": "natural", "split": {"val": 0.2}, "held_out_clients": {"clients": 1}}
    return {"data": data, "model": "python:helpers.texts:Network", "rounds": 3}


def test_three_rounds_on_text_are_recorded(talk, tmp_path):
    experiment = study({**A, "local": {"lr": 2.0, "batch_size": 4}}, **talk)
    preflight(experiment)
    run = run_of(experiment, tmp_path / "run")
    assert len(list(run.play())) == 3
    lines = lines_of(run.folder)
    losses = [line["facts"]["loss"] for line in lines]
    assert losses[2] < losses[0]
    last = lines[-1]["scores"]
    assert set(last) == {"train_clients", "held_out_clients", "val"}
    assert set(last["train_clients"]["groups"]) == {"tea", "rain"}
    population = played(experiment, rounds=1).host.population
    test = population.parts["test"]
    y = population.rows.y[test.rows[test.owner < population.registered]]
    assert last["train_clients"]["rows"] == int(((y != 0) & (y != 2) & (y != 3)).sum())
    assert 0 < last["train_clients"]["accuracy"] < 1


def test_workers_and_one_process_agree_on_text(talk, pool):
    experiment = study(A, **talk)
    spec = spec_of(experiment, experiment.method[0], 0, None)
    alone, many = played(experiment), played(experiment, engine=lambda host: WorkersEngine(host, pool, spec))
    assert same(alone.state, many.state)
    everyone = torch.cat([alone.host.population.clients, alone.host.population.held_out_clients])
    scores = [run.fleet.score(run.state.weights, everyone) for run in (alone, many)]
    assert same(*scores)
    assert float(scores[0].rows.sum()) > 0


def test_a_blend_of_two_topics_may_be_held(talk, tmp_path):
    talk["data"] |= {
        "partition": {"kind": "iid", "clients": 4},
        "groups": {"by": "none"},
        "held_out_clients": {"clients": 0},
    }
    changes = {**talk, "shift": {"who": "always", "what": {"kind": "domain-mixture", "samples": 6}}}
    run = played(study(A, **changes))
    held = run.host.population.shard(0, run.steps[0].moment)
    assert held.mask.shape == held.y.shape == (6, 5)


SHAPES = """
import torch
from torch import nn
def last(classes):
    class Last(nn.Embedding):
        def forward(self, x):
            return super().forward(x[:, -1])
    return Last(classes, classes)
"""


@pytest.mark.parametrize(("model", "line"), [
    ("small-cnn", "model.kind: 'small-cnn' needs pictures"),
    ("python:shapes_of_mine:last", r"returns shape \(\d, \d+\) .*allowed: logits \(rows, 5 steps, classes\)"),
])  # fmt: skip
def test_a_model_that_reads_no_text_is_told_before_the_run_begins(talk, tmp_path, monkeypatch, model, line):
    (tmp_path / "shapes_of_mine.py").write_text(SHAPES)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(FedtideError, match=line):
        preflight(study(A, **{**talk, "model": model}))


@pytest.mark.parametrize(("change", "line"), [
    ({"partition": "dirichlet"}, "data.partition.kind: found 'dirichlet', but it deals by labels"),
    ({"groups": {"by": "labels", "labels": [[1], [2]]}}, "data.groups.by: found 'labels'"),
    ({"source": {"kind": "text", "path": 3}}, "data.source.path: found 3, allowed: a list"),
    ({"source": {"kind": "domains", "names": ["a", "b"], "sources": ["text:a.jsonl", "text:b.jsonl"]}}, "found 'text'"),
])  # fmt: skip
def test_settings_that_do_not_fit_text_are_one_line(talk, change, line):
    from fedtide.config import from_dict

    values = raw(A, **talk)
    values["data"] |= change
    with pytest.raises(FedtideError, match=line) as error:
        preflight(from_dict(values))
    assert "\n" not in str(error.value)
