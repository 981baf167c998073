"""CFL: clients that are alike stay together, what it costs, and what is refused."""

import pytest

from fedtide.core.errors import FedtideError
from fedtide.core.trees import size_in_bytes
from fedtide.runs.preflight import preflight
from helpers.toys import played, toy

ALIKE = {"partition": {"kind": "iid", "clients": 12}, "held_out_clients": {"clients": 0}}


@pytest.mark.parametrize(
    ("rows", "gamma", "cohort", "seed"),
    [
        (4000, 0.1, 4, 0),
        pytest.param(4000, 0.1, 12, 1, marks=pytest.mark.thorough),
        pytest.param(400, 0.8, 4, 1, marks=pytest.mark.thorough),
        pytest.param(400, 0.8, 12, 0, marks=pytest.mark.thorough),
    ],
)
def test_clients_that_are_alike_are_never_split(rows, gamma, cohort, seed):
    """A model that has settled, with enough rows for each client; with few rows noise asks for a larger gamma."""
    source = {"kind": "gaussians", "samples": rows, "dims": 4, "classes": 3, "domains": 1}
    options = {"cohort": cohort, "local": {"lr": 0.1, "batch_size": 20 if rows > 1000 else 4}}
    data = {**ALIKE, "source": source, "groups": {"by": "none"}}
    run = played(toy("cfl", {"gamma": gamma, "eps1": None, "eps2": None, "split_after": 20, **options}, data=data,
                     shift={"who": "always"}, rounds=60, model="linear"), seed=seed)  # fmt: skip
    assert len(run.state.weights) == 1


def test_an_update_is_sent_once_though_the_server_sees_it():
    plain, clustered = (played(toy(name, {"cohort": 4}), rounds=1) for name in ("fedavg", "cfl"))
    (one,), (two,) = plain.fleet.queries, clustered.fleet.queries
    assert two.cost.up - one.cost.up == 8 * len(two.answered)  # what each counts for
    assert two.cost.down == one.cost.down
    assert one.cost.up > size_in_bytes(plain.state.weights) * len(one.answered)


@pytest.mark.parametrize(("key", "value"), [
    ("eps1", -1.0), ("gamma", 1.5), ("update_ttl", 0), ("linkage", "average"), ("split_after", -1),
])  # fmt: skip
def test_bad_values_are_one_line(key, value):
    with pytest.raises(FedtideError, match=rf"{key}: found"):
        preflight(toy("cfl", {key: value}))
