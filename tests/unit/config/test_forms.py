"""Names and forms: a written name, what is ours behind it, and what a sweep, a tuning and Python make of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedtide as ft
from fedtide.config import from_dict, points, resolved
from fedtide.core.errors import FedtideError
from fedtide.learn.losses import WSM
from fedtide.tuning.plan import stages
from helpers.toys import TOY

IFCA = {"name": "I", "algorithm": "ifca", "cohort": 4}
TASK = ft.Task(lambda: nn.Linear(4, 3), example=torch.zeros(1, 4))


def experiment(*methods: dict, **changes):
    return from_dict({**TOY, "method": list(methods), **changes})


def names(made) -> list[str]:
    return [method.name for method in made.method]


def test_a_tuning_searches_every_form_of_a_written_name():
    tune = {"trials": 2, "ranges": {"method.local.lr": {"low": 0.01, "high": 0.1}}}
    made = experiment(IFCA, {**IFCA, "safe": True}, tune=tune)
    assert [[search.method for search in stage] for stage in stages(made)] == [["I", "I (safe)"]]


def test_a_range_may_be_about_a_written_name():
    tune = {"trials": 2, "ranges": {"method.I.local.lr": {"low": 0.01, "high": 0.1}}}
    assert stages(experiment({**IFCA, "safe": True}, tune=tune))[0][0].method == "I (safe)"


def test_what_is_dumped_has_the_written_name_and_can_change_its_form():
    made = experiment({**IFCA, "name": "I" * 97, "safe": True})
    assert names(from_dict(resolved(made))) == names(made) == ["I" * 97 + " (safe)"]
    assert names(from_dict(resolved(made), sets=["method.safe=false"])) == ["I" * 97]


def test_a_swept_layer_is_in_the_name_once():
    shared = {"transforms": [{"kind": "shared", "layers": "trunk"}]}
    made = experiment({**IFCA, **shared}, sweep={"method.I.transforms.shared.layers": ["trunk", "all"]})
    assert [names(point.experiment) for point in points(made)] == [["I (shared trunk)"], ["I (shared all)"]]


def test_a_form_is_not_swept():
    made = experiment(IFCA, sweep={"method.I.safe": [True, False]})
    with pytest.raises(FedtideError, match=r"sweep: found 'method\.I\.safe', allowed: other keys; write a method"):
        points(made)


def test_a_key_of_a_name_that_two_forms_have_is_refused_unless_it_is_one_of_them():
    both = ({**IFCA, "transforms": ["anchored"]}, {**IFCA, "safe": True})
    with pytest.raises(FedtideError, match="several methods are called 'I'; name one with its form"):
        from_dict({**TOY, "method": list(both)}, sets=["method.I.clusters=3"])
    made = from_dict({**TOY, "method": list(both)}, sets=["method.I (safe).clusters=3"])
    assert [method.settings()["clusters"] for method in made.method] == [2, 3]


def test_safe_as_a_default_goes_to_the_methods_that_have_such_a_form():
    made = experiment({"name": "F", "algorithm": "fedavg", "cohort": 4}, IFCA, defaults={"safe": True})
    assert names(made) == ["F", "I (safe)"]


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ({"transforms": ["fine-tund"]}, "found 'fine-tund', allowed: anchored, pooled, shared, personalized, choice"),
        ({"transforms": ["fine-tund"]}, "did you mean 'fine-tuned'"),
        ({"algorithm": "fedavg", "window": 3}, "window: unknown key"),
        ({"algorithm": "fedavg", "anchor": True}, "anchor: unknown key"),
    ],
)
def test_a_mistake_names_what_this_method_can_take(method, said):
    with pytest.raises(FedtideError) as error:
        experiment({**IFCA, **method})
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: ft.transforms.anchored(TASK), r"found 'Task', allowed: an Algorithm"),
        (lambda: ft.transforms.apply(ft.algorithms.ifca(TASK), "anchored"), r"found 'anchored', allowed: a transform"),
        (lambda: ft.transforms.pooled(ft.algorithms.ifca(TASK)), "its models begin with different weights"),
    ],
)
def test_a_mistake_in_python_is_one_line_in_python(build, said):
    with pytest.raises(FedtideError, match=said):
        build()


def test_the_safe_form_of_a_loss_is_the_same_in_python():
    task = ft.Task(lambda: nn.Linear(4, 3), loss=WSM(), example=torch.zeros(1, 4))
    assert ft.algorithms.ifca(task, safe=True).options["task"].loss.blend == 0.3
    assert ft.algorithms.fedavg(task, safe=True).options["task"].loss.blend == 0.3
    assert ft.algorithms.ifca(task).options["task"].loss.blend == 0.0
