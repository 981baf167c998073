"""`safe`, transforms and names: what is ours has a name of its own, and stands behind that of the method."""

from __future__ import annotations

import pytest

from fedtide.config import brief, from_dict, resolved
from fedtide.core.errors import FedtideError
from fedtide.core.memory import MemoryStore
from fedtide.runs.build import host_of
from helpers.toys import TOY


def read(*methods, **changes):
    return from_dict({**TOY, "method": list(methods), **changes})


def names(*methods, **changes):
    return [method.name for method in read(*methods, **changes).method]


IFCA = {"name": "IFCA", "algorithm": "ifca"}
SHARED = {"kind": "shared", "layers": "trunk"}


def test_what_is_ours_stands_behind_the_name():
    assert names(IFCA, {**IFCA, "safe": True}) == ["IFCA", "IFCA (safe)"]
    assert names({**IFCA, "transforms": ["anchored", SHARED]}) == ["IFCA (anchored, shared trunk)"]
    assert names({**IFCA, "safe": True, "transforms": [SHARED]}) == ["IFCA (safe, shared trunk)"]
    assert names({**IFCA, "transforms": ["fine-tuned"]}) == ["IFCA (fine-tuned)"]
    assert names({"algorithm": "ifca", "safe": True}) == ["ifca (safe)"]


def test_further_ways_have_the_name_of_the_method_and_their_own():
    ways = {"kind": "personalized", "way": "choice", "others": ["alone", "fine-tuned"]}
    made = read({**IFCA, "safe": True, "transforms": [ways]}).method[0]
    assert made.name == "IFCA (safe, choice)"
    assert [made.named(other).name for other in made.others] == ["IFCA, alone (safe)", "IFCA, fine-tuned (safe)"]


def test_a_claim_and_the_baseline_may_use_the_name_as_it_is_written():
    ways = {"kind": "personalized", "way": "choice", "others": ["alone"]}
    other = {"name": "B", "algorithm": "ifca", "transforms": [ways]}
    claim = {"text": "it gains", "method": "IFCA", "versus": ["FedAvg", "B", "B, alone"]}
    methods = {"algorithm": "fedavg", "name": "FedAvg"}, {**IFCA, "safe": True}, other
    made = read(*methods, claim=[claim], baseline="IFCA")
    assert made.baseline == made.claim[0].method == "IFCA (safe)"
    assert made.claim[0].rivals == ("FedAvg", "B (choice)", "B, alone")
    both = read(*methods, IFCA, claim=[claim, {**claim, "method": "IFCA (safe)"}], baseline="IFCA")
    assert (both.baseline, *(each.method for each in both.claim)) == ("IFCA", "IFCA", "IFCA (safe)")


def test_safe_sets_options_and_transforms_and_wsm_is_blended():
    made = read(
        {"algorithm": "fielding", "safe": True, "cohort": 4},
        {"name": "WSM", "algorithm": "fedavg", "loss": "wsm", "safe": True},
        {"name": "thesis", "algorithm": "fedavg", "loss": "wsm"},
    )
    fielding, blended, thesis = made.method
    assert fielding.settings()["clustering"].min_silhouette == 0.15
    assert [transform.kind for transform in fielding.all_transforms] == ["pooled"]
    assert (blended.loss.blend, thesis.loss.blend) == (0.3, 0.0)
    assert blended.name == "WSM (safe)"


@pytest.mark.parametrize(
    "method",
    [
        {**IFCA, "safe": True, "transforms": [SHARED]},
        {"algorithm": "fielding", "safe": True, "cohort": 4},
        {"algorithm": "fedavg", "loss": "wsm", "safe": True},
        {"algorithm": "fedtem", "safe": True, "prior": {"kind": "linear", "period": 4}},
        {**IFCA, "transforms": ["pooled", {"kind": "mixture", "held": 0.2}]},
    ],
)
def test_what_is_written_back_reads_the_same(method):
    made = read(method)
    assert from_dict(resolved(made)) == made
    import tomllib

    assert resolved(from_dict(tomllib.loads(brief(made)))) == resolved(made)


def test_dotted_keys_reach_a_transform_by_its_kind():
    values = {**TOY, "method": [{**IFCA, "transforms": ["anchored", {"kind": "fine-tuned"}]}]}
    made = from_dict(values, sets=["method.transforms.fine-tuned.solver.lr=0.5"]).method[0]
    assert made.transforms[1].way.solver.lr == 0.5


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ({"algorithm": "fedtem", "safe": True, "update": "overwrite"}, "update: is not allowed with safe = true"),
        ({"algorithm": "fedtkm", "safe": True, "alpha": "integral"}, "alpha: is not allowed with safe = true"),
        ({"algorithm": "fedavg", "loss": {"kind": "wsm", "blend": 0.0}, "safe": True}, "loss.blend: is not allowed"),
        (
            {"algorithm": "fedavg", "safe": True},
            "safe: 'fedavg' has no safe form; leave safe out",
        ),
        ({"algorithm": "ifca", "transforms": ["anchord"]}, "did you mean 'anchored'"),
        ({"algorithm": "ifca", "transforms": "anchored"}, "transforms"),
        ({"algorithm": "ifca", "safe": "yes"}, "safe"),
    ],
)
def test_a_mistake_is_one_line(method, said):
    with pytest.raises(FedtideError, match="method") as error:
        read(method)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (
            {"algorithm": "fedavg", "transforms": ["anchored"]},
            "'anchored' is not allowed with 'fedavg', because it trains",
        ),
        ({"algorithm": "fedtem", "transforms": ["pooled"]}, "'pooled' is not allowed with 'fedtem', because"),
        ({"algorithm": "fedtem", "transforms": [SHARED]}, "its branches share all other layers already"),
        ({"algorithm": "fedem", "transforms": ["fine-tuned"]}, "clients mix its models already"),
        ({"algorithm": "local", "transforms": ["pooled"]}, "its clients train no model together"),
        (
            {"algorithm": "ifca", "safe": True, "transforms": ["anchored"]},
            "'anchored' stands twice, with those of safe = true",
        ),
        ({"algorithm": "flexcfl", "transforms": ["pooled", "pooled"]}, "'pooled' stands twice"),
        ({"algorithm": "ifca", "transforms": [{"kind": "shared", "layers": "haed"}]}, "'haed'"),
        ({"algorithm": "fielding", "q": 1.0, "transforms": ["pooled"]}, "no mean of updates"),
    ],
)
def test_a_transform_without_meaning_is_refused_before_anything_is_played(method, said):
    made = read(method)
    with pytest.raises(FedtideError) as error:
        host_of(made, made.method[0], 0, MemoryStore(None))
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("method '")


def test_an_anchor_needs_validation_rows():
    made = read({**IFCA, "cohort": 4, "safe": True}, data={**TOY["data"], "split": {"val": 0.0, "test": 0.25}})
    with pytest.raises(
        FedtideError, match=r"without validation samples, because they choose its weight; set data.split"
    ):
        host_of(made, made.method[0], 0, MemoryStore(None))
