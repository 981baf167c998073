"""Questions that a silent client is not asked again before its samples or memory change: the same run, less work."""

from dataclasses import replace

import pytest

from fedtide.core.memory import MemoryStore
from fedtide.core.trees import same
from fedtide.runs.build import host_of
from helpers.toys import played, toy

SWAPS = {"how": {"kind": "label-swaps", "every": 2, "fraction": 0.3}}
CONCEPTS = {"how": {"kind": "label-swaps", "every": 3, "concepts": 2, "begin": "dealt"}}
STREAM = {"what": {"kind": "stream", "by": "labels", "intervals": 3, "gap": 2, "retention": 4, "empty": "wait"}}
ALWAYS = {"who": "always"}
LOSSY = {"who": {"kind": "always", "dropout_rate": 0.4}}

CASES = [
    ("fielding", {}, ALWAYS),
    ("fielding", {}, SWAPS | LOSSY),
    ("fielding", {"representation": "embedding"}, STREAM | ALWAYS),
    ("fielding", {"representation": {"kind": "gradient", "sketch": 8}}, CONCEPTS | ALWAYS),
    ("fielding", {"representation": {"kind": "labels", "malicious": 0.5}, "drift_eps": 0.3}, SWAPS | ALWAYS),
    ("fielding", {"reporters": "participants"}, SWAPS | LOSSY),
    ("fielding", {"representation": {"kind": "gradient", "at": "global", "sketch": 8}}, SWAPS | ALWAYS),
    ("flexcfl", {"clusters": 2, "pretrain": 3, "migrate": 0.1}, SWAPS | LOSSY),
]


def run(algorithm, options, shift, *, shortcut: bool):
    """Play, and count how often a client worked out an answer to each question."""
    experiment = toy(algorithm, options, shift=shift, rounds=9)
    memory = MemoryStore(None)
    host = host_of(experiment, experiment.method[0], 0, memory)
    worked: dict[str, int] = {}

    def counted(question, work):
        def count(*given):
            worked[question] = worked.get(question, 0) + 1
            return work(*given)

        return count

    algorithm = host.algorithm
    works = {name: work if name == "train" else counted(name, work) for name, work in algorithm.works.items()}
    silent = algorithm.traits.unless_changed if shortcut else ()
    host = replace(
        host, algorithm=replace(algorithm, works=works, traits=replace(algorithm.traits, unless_changed=silent))
    )
    return played(experiment, memory=memory, host=host), worked


@pytest.mark.parametrize(("algorithm", "options", "shift"), CASES)
def test_a_run_is_the_same_with_and_without(algorithm, options, shift):
    (short, fewer), (long, more) = (run(algorithm, options, shift, shortcut=each) for each in (True, False))
    assert len(short.steps) == len(long.steps) == 9
    for a, b in zip(short.steps, long.steps, strict=True):
        assert same(a.state.weights, b.state.weights)
        assert same(a.facts, b.facts)
        assert a.seconds == b.seconds
    assert short.fleet.spent_on == long.fleet.spent_on
    question = "shifted" if algorithm == "flexcfl" else "report"
    follows = options.get("representation") == {"kind": "gradient", "at": "global", "sketch": 8}
    assert fewer[question] == more[question] if follows else fewer[question] < more[question]
