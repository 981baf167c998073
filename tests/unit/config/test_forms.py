"""Forms of methods: `safe` and transforms, their names, and a sweep, a tuning and Python with them."""

import pytest
import torch
from torch import nn

import fedtide as ft
from fedtide.config import from_dict, points, resolved
from fedtide.core.errors import FedtideError
from fedtide.learn.losses import WSM
from fedtide.runs.build import host_of
from fedtide.transforms import Anchored, Pooled, apply
from fedtide.tuning.tune import stages
from helpers.toys import TOY

IFCA = {"name": "IFCA", "algorithm": "ifca"}
FEW = {"name": "I", "algorithm": "ifca", "cohort": 4}
FEDAVG = {"name": "FedAvg", "algorithm": "fedavg"}
SHARED = {"kind": "shared", "layers": "trunk"}
TUNE = {"trials": 2, "ranges": {"method.local.lr": {"low": 0.01, "high": 0.1}}}
TASK = ft.Task(lambda: nn.Linear(4, 3), example=torch.zeros(1, 4))


def read(*methods, sets=(), **changes):
    return from_dict({**TOY, "method": list(methods), **changes}, sets=sets)


def built(method, **changes):
    settings = read(method, **changes)
    return host_of(settings, settings.method[0], 0)


def names(settings) -> list[str]:
    return [method.name for method in settings.method]


@pytest.mark.parametrize(("method", "name"), [
    (IFCA, "IFCA"),
    ({**IFCA, "safe": True}, "IFCA (safe)"),
    ({**IFCA, "transforms": ["anchored", SHARED]}, "IFCA (anchored, shared trunk)"),
    ({**IFCA, "safe": True, "transforms": [SHARED]}, "IFCA (safe, shared trunk)"),
    ({"algorithm": "ifca", "transforms": ["fine-tuned"]}, "ifca (fine-tuned)"),
])  # fmt: skip
def test_the_form_follows_the_name(method, name):
    assert names(read(method)) == [name]


def test_a_claim_and_the_baseline_may_use_the_name_as_it_is_written():
    ways = {"kind": "personalized", "way": "choice", "others": ["alone"]}
    other = {"name": "B", "algorithm": "ifca", "transforms": [ways]}
    claim = {"text": "it gains", "method": "IFCA", "versus": ["FedAvg", "B", "B, alone"]}
    methods = FEDAVG, {**IFCA, "safe": True}, other
    one = read(*methods, claim=[claim], baseline="IFCA")
    assert one.baseline == one.claim[0].method == "IFCA (safe)"
    assert one.claim[0].rivals == ("FedAvg", "B (choice)", "B, alone")
    both = read(*methods, IFCA, claim=[claim, {**claim, "text": "so", "method": "IFCA (safe)"}], baseline="IFCA")
    assert (both.baseline, *(claim.method for claim in both.claim)) == ("IFCA", "IFCA", "IFCA (safe)")


def test_safe_sets_options_and_transforms_and_wsm_is_blended():
    fielding, blended, thesis = read(
        {"algorithm": "fielding", "safe": True, "cohort": 4},
        {"name": "WSM", "algorithm": "fedavg", "loss": "wsm", "safe": True},
        {"name": "thesis", "algorithm": "fedavg", "loss": "wsm"},
    ).method
    assert fielding.settings()["clustering"].min_silhouette == 0.15
    assert [transform.kind for transform in fielding.all_transforms] == ["pooled"]
    assert (blended.name, blended.loss.blend, thesis.loss.blend) == ("WSM (safe)", 0.3, 0.0)


def test_safe_as_a_default_goes_to_the_methods_that_have_such_a_form():
    assert names(read({**FEDAVG, "cohort": 4}, FEW, defaults={"safe": True})) == ["FedAvg", "I (safe)"]


def test_dotted_keys_reach_a_transform_by_its_kind():
    method = {**IFCA, "transforms": ["anchored", {"kind": "fine-tuned"}]}
    assert (
        read(method, sets=["method.transforms.fine-tuned.solver.lr=0.5"]).method[0].transforms[1].way.solver.lr == 0.5
    )


def test_a_dumped_method_has_the_written_name_and_can_change_its_form():
    settings = read({**FEW, "name": "I" * 97, "safe": True})
    assert names(from_dict(resolved(settings))) == names(settings) == ["I" * 97 + " (safe)"]
    assert names(from_dict(resolved(settings), sets=["method.safe=false"])) == ["I" * 97]


def test_tunings_and_sweeps_name_forms():
    both = read(FEW, {**FEW, "safe": True}, tune=TUNE)
    assert [[search.method for search in stage] for stage in stages(both)] == [["I", "I (safe)"]]
    one = {**TUNE, "ranges": {"method.I.local.lr": {"low": 0.01, "high": 0.1}}}
    assert stages(read({**FEW, "safe": True}, tune=one))[0][0].method == "I (safe)"
    swept = read({**FEW, "transforms": [SHARED]}, sweep={"method.I.transforms.shared.layers": ["trunk", "all"]})
    assert [names(point.experiment) for point in points(swept)] == [["I (shared trunk)"], ["I (shared all)"]]
    with pytest.raises(FedtideError, match=r"sweep: found 'method\.I\.safe', allowed: other keys; write a method"):
        points(read(FEW, sweep={"method.I.safe": [True, False]}))


def test_a_key_of_a_name_that_two_forms_have_is_refused_unless_it_is_one_of_them():
    both = ({**FEW, "transforms": ["anchored"]}, {**FEW, "safe": True})
    with pytest.raises(FedtideError, match="several methods are called 'I'; name one with its form"):
        read(*both, sets=["method.I.clusters=3"])
    settings = read(*both, sets=["method.I (safe).clusters=3"])
    assert [method.settings()["clusters"] for method in settings.method] == [2, 3]


MISTAKES = [
    ({"algorithm": "fedtem", "safe": True, "update": "overwrite"}, "update: is not allowed with safe = true"),
    ({"algorithm": "fedavg", "loss": {"kind": "wsm", "blend": 0.0}, "safe": True}, "loss.blend: is not allowed"),
    ({"algorithm": "fedavg", "safe": True}, "safe: 'fedavg' has no safe form; leave safe out"),
    (
        {"algorithm": "ifca", "transforms": ["fine-tund"]},
        "Allowed: anchored, at-home, on-need, pooled, robust, shared, trusted, watch, personalized, choice",
    ),
    ({"algorithm": "ifca", "safe": "yes"}, "safe"),
]
MEANINGLESS = [
    ({"algorithm": "fedavg", "transforms": ["anchored"]}, "'anchored' is not allowed with 'fedavg', because it trains"),
    ({"algorithm": "fedtem", "transforms": [SHARED]}, "its branches share all other layers already"),
    ({"algorithm": "local", "transforms": ["pooled"]}, "its clients train no model together"),
    (
        {"algorithm": "ifca", "safe": True, "transforms": ["anchored"]},
        "'anchored' stands twice, by itself or through safe = true",
    ),
    ({"algorithm": "flexcfl", "transforms": ["pooled", "pooled"]}, "'pooled' stands twice"),
    ({"algorithm": "ifca", "transforms": [{"kind": "shared", "layers": "haed"}]}, "'haed'"),
    ({"algorithm": "fielding", "q": 1.0, "transforms": ["pooled"]}, "no mean of updates"),
    ({"algorithm": "aem", "safe": True, "mixture": {"held": 0.5}}, "mixture: is not allowed with 'personalized'"),
    ({"algorithm": "knn-per", "k": 3, "transforms": ["fine-tuned"]}, "k: is not allowed with 'personalized'"),
]


@pytest.mark.parametrize(("method", "said"), [*MISTAKES, *MEANINGLESS])
def test_a_mistake_is_one_line_before_anything_is_played(method, said):
    with pytest.raises(FedtideError, match="method '") as error:
        built(method)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_an_anchor_needs_validation_rows():
    with pytest.raises(
        FedtideError, match=r"without validation samples, because they choose its weight; set data.split"
    ):
        built({**FEW, "safe": True}, data={**TOY["data"], "split": {"val": 0.0, "test": 0.25}})


@pytest.mark.parametrize(("build", "said"), [
    (lambda: apply(TASK, Anchored()), r"found 'Task', allowed: an Algorithm"),
    (lambda: apply(ft.algorithms.ifca(TASK), "anchored"), r"found 'anchored', allowed: a transform"),
    (lambda: apply(ft.algorithms.ifca(TASK), Pooled()), "its models begin with different weights"),
])  # fmt: skip
def test_a_mistake_in_python_is_one_line_in_python(build, said):
    with pytest.raises(FedtideError, match=said):
        build()


def test_the_safe_form_of_a_loss_is_the_same_in_python():
    task = ft.Task(lambda: nn.Linear(4, 3), loss=WSM(), example=torch.zeros(1, 4))
    for make, safe, blend in ((ft.algorithms.ifca, True, 0.3), (ft.algorithms.fedavg, True, 0.3),
                              (ft.algorithms.ifca, False, 0.0)):  # fmt: skip
        assert make(task, safe=safe).options["task"].loss.blend == blend
