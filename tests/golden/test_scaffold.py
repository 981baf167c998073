"""SCAFFOLD by pencil and paper on two quadratics (see quadratics.py), derived before the algorithm was written.

The gradient of client 0 is w, that of client 1 w - 4; both do two steps of 1/2 on all rows at once. Client 0 has one
row and client 1 three. Means are uniform unless said otherwise, and the joint optimum is 2.
"""

import pytest

from fedtide.algorithms.fedavg import fedavg
from fedtide.algorithms.scaffold import State, scaffold
from fedtide.cohorts import Everyone, OneModel
from fedtide.learn.local import LocalTrainer
from fedtide.learn.server import SGD
from helpers import quadratics
from helpers.handmade import By
from helpers.quadratics import TASK, after, at, fleet_of, value

TWO = LocalTrainer(lr=0.5, batch_size=0, epochs=2)
EVERYONE = Everyone()


def start(w: float = 1.0, control: float = 0.0, server: SGD = SGD()) -> State:
    return State(at(w), server.init(at(w)), at(control).params, clients=2)


def control(state: State) -> float:
    return float(state.control["weight"])


def in_turn(rng, fleet):
    """One client after the other: client r in round r, then from the first again."""
    return fleet.clients[fleet.moment.round % 2 :][:1]


def kept(fleet, client: int) -> float | None:
    """The control variate that a client keeps."""
    row = fleet.engine.memory.read(client, (99, 0))
    return None if row is None else float(row["control"]["weight"])


def played(algorithm, rounds: int):
    """The state after some rounds, and the fleet with its clients' memory."""
    fleet = fleet_of(algorithm)
    *_, (state, _) = quadratics.played(algorithm, fleet, start(), rounds)
    return state, fleet


def test_the_first_round_is_that_of_fedavg():
    """All variates are 0. Client 0: 1 -> 1/2 -> 1/4, update -3/4. Client 1: 1 -> 5/2 -> 13/4, update 9/4. w = 7/4."""
    assert value(after(scaffold(TASK, TWO, cohort=EVERYONE), start())) == 1.75
    uniform = fedavg(TASK, TWO, cohort=EVERYONE, weighting="uniform")
    assert value(after(uniform, OneModel(at(1.0), None))) == 1.75


def test_option_two():
    """Variates (w - y) / (2 * 1/2) = 3/4 and -9/4, c = -3/4.

    Round 1 from 7/4. Client 0 adds c - c_0 = -3/2: 7/4 - 1/2 (7/4 - 3/2) = 13/8, then 13/8 - 1/2 (1/8) = 25/16, update
    -3/16. Client 1 adds 3/2: 7/4 - 1/2 (-9/4 + 3/2) = 17/8, then 17/8 - 1/2 (-15/8 + 3/2) = 37/16, update 9/16.
    w = 7/4 + 3/16. c_0 = 3/4 + 3/4 + 3/16 = 27/16; c_1 = -9/4 + 3/4 - 9/16 = -33/16; c = -3/4 + (15/16 + 3/16)/2.
    """
    one, _ = played(scaffold(TASK, TWO, cohort=EVERYONE), 1)
    assert (value(one), control(one)) == (1.75, -0.75)
    two, fleet = played(scaffold(TASK, TWO, cohort=EVERYONE), 2)
    assert (value(two), control(two)) == (1.9375, -0.1875)
    assert [kept(fleet, client) for client in (0, 1)] == [1.6875, -2.0625]


def test_option_one():
    """Variates are the gradients at the received w = 1: 1 and -3, c = -1.

    Round 1 from 7/4. Client 0 adds c - c_0 = -2: 7/4 - 1/2 (-1/4) = 15/8, then 15/8 - 1/2 (-1/8) = 31/16. Client 1 adds
    2: 7/4 - 1/2 (-9/4 + 2) = 15/8, then 31/16. Both updates 3/16. c_0 = 7/4, c_1 = 7/4 - 4 = -9/4, c = -1/4.
    """
    one, _ = played(scaffold(TASK, TWO, variant="I", cohort=EVERYONE), 1)
    assert (value(one), control(one)) == (1.75, -1.0)
    two, fleet = played(scaffold(TASK, TWO, variant="I", cohort=EVERYONE), 2)
    assert (value(two), control(two)) == (1.9375, -0.25)
    assert [kept(fleet, client) for client in (0, 1)] == [1.75, -2.25]


def test_updates_may_be_weighted_by_rows_and_variates_never_are():
    """w = 1 + (1 * -3/4 + 3 * 9/4) / 4 = 5/2, but c = (3/4 - 9/4) / 2."""
    state = after(scaffold(TASK, TWO, cohort=EVERYONE, weighting="samples"), start())
    assert (value(state), control(state)) == (2.5, -0.75)


def test_the_server_has_a_rate_of_its_own():
    """w = 1 + 1/2 * 3/4; the variates know nothing of it."""
    state = after(scaffold(TASK, TWO, server=SGD(0.5), cohort=EVERYONE), start())
    assert (value(state), control(state)) == (1.375, -0.75)


def test_a_part_of_the_clients_moves_the_servers_variate_by_its_share_of_all():
    """Client 0 alone: w = 1/4, c_0 = 3/4, c = 3/4 / 2 (by all clients, not by those who were asked).

    Then client 1 alone, for the first time, with c - c_1 = 3/8: 1/4 - 1/2 (-15/4 + 3/8) = 31/16, then 31/16 - 1/2
    (-33/16 + 6/16) = 89/32, update 81/32. w = 89/32; c_1 = 0 - 3/8 - 81/32 = -93/32; c = 3/8 - 93/64 = (c_0 + c_1) / 2.
    """
    one, fleet = played(scaffold(TASK, TWO, cohort=By(in_turn)), 1)
    assert (value(one), control(one)) == (0.25, 0.375)
    assert (kept(fleet, 0), kept(fleet, 1)) == (0.75, None)
    two, fleet = played(scaffold(TASK, TWO, cohort=By(in_turn)), 2)
    assert (value(two), control(two)) == (89 / 32, 3 / 8 - 93 / 64)
    assert (kept(fleet, 0), kept(fleet, 1)) == (0.75, -93 / 32)


def test_clients_that_join_bring_the_variate_zero():
    """c = 1 is the mean of two clients; of four it is 1/2, before anybody trains."""
    nobody = scaffold(TASK, TWO, cohort=By(lambda rng, fleet: fleet.clients[:0]))
    state = after(nobody, start(control=1.0), targets=[[0]] * 4)
    assert (control(state), state.clients) == (0.5, 4)


def test_weight_decay_belongs_to_the_gradient():
    """Decay 1/2: gradients 3w/2 and 3w/2 - 4. Client 0: 1 -> 1/4 -> 1/16, c_0 = 15/16. Client 1: 1 -> 9/4 -> 41/16.

    c_1 = -25/16, w = 1 + (-15 + 25) / 32. Option I at w = 1: 3/2 and -5/2.
    """
    decayed = LocalTrainer(lr=0.5, batch_size=0, epochs=2, weight_decay=0.5)
    state, fleet = played(scaffold(TASK, decayed, cohort=EVERYONE), 1)
    assert (value(state), control(state)) == (1.3125, (15 - 25) / 32)
    assert (kept(fleet, 0), kept(fleet, 1)) == (15 / 16, -25 / 16)
    state, fleet = played(scaffold(TASK, decayed, variant="I", cohort=EVERYONE), 1)
    assert (value(state), control(state)) == (1.3125, -0.5)
    assert (kept(fleet, 0), kept(fleet, 1)) == (1.5, -2.5)


@pytest.mark.parametrize("variant", ["I", "II"])
def test_it_ends_at_the_joint_optimum_where_fedavg_does_not(variant):
    """Client 0 does one step where client 1, with rows for two batches, does two.

    Their updates are -w/2 and 3/4 (4 - w): uniform FedAvg ends where these add up to 0, at 12/5. SCAFFOLD ends at 2.
    """
    uneven = LocalTrainer(lr=0.5, batch_size=1, epochs=1)
    targets = [[0], [4, 4]]
    averaged = after(fedavg(TASK, uneven, cohort=EVERYONE, weighting="uniform"), OneModel(at(1.0), None), 60, targets)
    assert value(averaged) == pytest.approx(2.4, abs=1e-9)
    controlled = after(scaffold(TASK, uneven, variant=variant, cohort=EVERYONE), start(), 200, targets)
    assert value(controlled) == pytest.approx(2.0, abs=1e-9)
    assert control(controlled) == pytest.approx(0.0, abs=1e-9)
