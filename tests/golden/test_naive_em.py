"""The naive rounds of FedEM, pFedEM and FedGMM by pencil and paper: two rows, two components."""

import math
from functools import partial

import numpy as np
import pytest

from helpers import naive_em as em

A = 1 / (1 + math.exp(-2))
"""How likely N(0, 1), and not N(2, 1), made 0 under even shares: densities 1 : e^-2. N(2, 1) made 2 as likely."""
B = 1 - A

LOG_3 = math.log(3)

diagonal = partial(em.posteriors, em.diagonal_log_density)
full = partial(em.posteriors, em.full_log_density)


def array(*values) -> np.ndarray:
    return np.array(values, dtype=np.float64)


def near(found, wanted) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=1e-12, atol=1e-14)


def model(bias: float = 0.0) -> em.Model:
    """Two classes, one feature: e^bias : 1 whatever the row."""
    return {"head.weight": np.zeros((2, 1)), "head.bias": array(bias, 0.0)}


def in_order(k: int):
    return np.arange


def rows(x: list[float], y: list[int]) -> em.Rows:
    return em.Rows(array(*x)[:, None], np.array(y), in_order)


# -- densities and posteriors ------------------------------------------------------------------------------------------


def test_diagonal_posteriors():
    """N((0, 0), diag(1, 1)) and N((2, 0), diag(1, 4)): odds 2 : 1 at (1, 0), 2 e^-(4 - 1)/2 : 1 at (1, 2)."""
    mu, var, z = array([0, 0], [2, 0]), array([1, 1], [1, 4]), array([1, 0], [1, 2])
    odds = 2 * math.exp(-1.5)
    near(diagonal(z, mu, var, array(0.5, 0.5)), [[2 / 3, 1 / 3], [odds / (1 + odds), 1 / (1 + odds)]])
    near(diagonal(z[:1], mu, var, array(1 / 3, 2 / 3)), [[0.5, 0.5]])
    near(em.diagonal_log_density(z[1], mu[1], var[1]), -0.5 - 0.5 - math.log(2) - math.log(2 * math.pi))


def test_full_posteriors():
    """Unit, and [[2, 1], [1, 2]] with determinant 3 and inverse [[2, -1], [-1, 2]]/3, both at 0.

    Squared distances 2 and 2/3 at (1, 1), 2 and 2 at (1, -1), so the odds are sqrt 3 e^-2/3 : 1 and sqrt 3 : 1.
    """
    mu, cov, z = np.zeros((2, 2)), array([[1, 0], [0, 1]], [[2, 1], [1, 2]]), array([1, 1], [1, -1])
    odds = [math.sqrt(3) * math.exp(-2 / 3), math.sqrt(3)]
    near(full(z, mu, cov, array(0.5, 0.5)), [[o / (1 + o), 1 / (1 + o)] for o in odds])
    near(em.full_log_density(z[0], mu[1], cov[1]), -1 / 3 - LOG_3 / 2 - math.log(2 * math.pi))


def test_posteriors_far_away_do_not_overflow():
    near(diagonal(array([1e4]), array([0.0], [1e3]), np.ones((2, 1)), array(0.5, 0.5)), [[0, 1]])


def test_features_are_projections_of_what_is_left_of_the_center():
    """Rows of any shape are flattened: (3, 1) - (1, 1) = (2, 0) on (1, 1) and (0, 5)."""
    near(em.projected(array([[3.0], [1.0]])[None], array(1, 1), array([1, 0], [1, 5])), [[2, 0]])


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wide", [0, 4])
def test_gradients_are_what_differences_say(wide):
    draw = np.random.default_rng(1)
    w = {"head.weight": draw.normal(size=(3, wide or 2)), "head.bias": draw.normal(size=3)}
    if wide:
        w |= {"dense1.weight": draw.normal(size=(wide, 2)), "dense1.bias": draw.normal(size=wide)}
    x, y, q = draw.normal(size=(5, 1, 2)), np.array([0, 2, 1, 1, 0]), draw.uniform(size=5)

    def value(w):
        return float(sum(q * em.cross_entropies([w], x, y)[:, 0]) / 5)

    for name, g in em.gradient(w, x, y, q).items():
        for at in np.ndindex(g.shape):
            nudge = np.zeros_like(g)
            nudge[at] = 1e-6
            slope = (value({**w, name: w[name] + nudge}) - value({**w, name: w[name] - nudge})) / 2e-6
            assert g[at] == pytest.approx(slope, abs=1e-8), name


def test_batches_are_cut_from_the_order_and_the_last_one_is_smaller():
    asked, seen = [], []

    def order(count):
        asked.append(count)
        return np.array([2, 0, 1]) if len(asked) == 1 else np.array([1, 2, 0])

    class Watched(np.ndarray):
        def __getitem__(self, where):
            if isinstance(where, np.ndarray):
                seen.append(where.tolist())
            return super().__getitem__(where)

    x = array(1.0, 2.0, 3.0)[:, None].view(Watched)
    y, ones = np.array([0, 1, 0]), np.ones(3)
    em.sgd(model(), x, y, ones, order, lr=0.1, batch_size=2, local_steps=3)
    assert seen == [[2, 0], [1], [1, 2]]
    assert asked == [3, 3]
    seen.clear()
    em.sgd(model(), x, y, ones, np.arange, lr=0.1, batch_size=9, epochs=2)
    em.sgd(model(), x, y, ones, np.arange, lr=0.1, batch_size=0, local_steps=1)
    assert seen == [[0, 1, 2]] * 3


# -- FedEM -------------------------------------------------------------------------------------------------------------


def test_a_round_of_fedem():
    """Model 1 says 3/4 : 1/4, model 2 says 1/2 : 1/2; client 7 holds (1, class 0) and (2, class 1), client 9 (1, 0).

    q is (3/5, 2/5) for class 0 and (1/3, 2/3) for class 1, so pi is (7/15, 8/15) and (3/5, 2/5). Errors of class 0's
    logit on client 7: model 1 (-1/4, 3/4), times q (-3/20, 1/4), mean 1/20, mean times x 7/40; model 2 (-1/2, 1/2),
    times q (-1/5, 1/3), 1/15 and 7/30. On client 9: -3/20 and -1/5. The server weighs them 2 : 1.
    """
    start = [model(LOG_3), model()]
    clients = {7: rows([1, 2], [0, 1]), 9: rows([1], [0]), 4: rows([], [])}
    models, blends, seen = em.fedem_round(start, {}, clients, lr=1.0, batch_size=5, epochs=1)
    near(seen[7], [[3 / 5, 2 / 5], [1 / 3, 2 / 3]])
    near(blends[7], [7 / 15, 8 / 15])
    near(blends[9], [3 / 5, 2 / 5])
    assert blends.keys() == {7, 9}
    first = [-(2 / 20 - 3 / 20) / 3, -(2 / 15 - 1 / 5) / 3]
    near(models[0]["head.bias"], [LOG_3 + first[0], -first[0]])
    near(models[1]["head.bias"], [first[1], -first[1]])
    near(models[0]["head.weight"], [[-1 / 15], [1 / 15]])
    near(models[1]["head.weight"], [[-4 / 45], [4 / 45]])
    near(start[0]["head.bias"], [LOG_3, 0])  # arguments stay as they are
    # The blend is kept: (3/5 * 3/4, 2/5 * 1/2) is 9 : 4.
    _, again, _ = em.fedem_round(start, blends, {9: rows([1], [0])}, lr=1.0, batch_size=5, epochs=1)
    near(again[9], [9 / 13, 4 / 13])
    near(again[7], blends[7])


# -- pFedEM ------------------------------------------------------------------------------------------------------------


def played_pfedem(clients, mu=(0, 2), var=(1, 1), pi=(0.5, 0.5), models=None, **options) -> em.PFedEM:
    return em.pfedem_round(
        models or [model(), model()], array(*mu)[:, None], array(*var)[:, None], array(*pi), clients,
        center=np.zeros(1), components=np.eye(1), lr=1.0, batch_size=5, local_steps=1, **options,
    )  # fmt: skip


TWO = {1: rows([0, 2], [0, 1]), 2: rows([0], [0])}
"""Client 1 has a row at the mean of each component, client 2 one at the first."""


def test_the_em_step_of_a_client():
    """Client 1: means 2b and 2a, variances a (2b)^2 + b (2 - 2b)^2 = 4ab for both. Client 2: all its mass is at 0."""
    made = played_pfedem(TWO)
    mu, var, pi = made.own[1]
    near(mu[:, 0], [2 * B, 2 * A])
    near(var[:, 0], [4 * A * B, 4 * A * B])
    near(pi, [0.5, 0.5])
    mu, var, pi = made.own[2]
    near(mu[:, 0], [0, 0])
    near(var[:, 0], [0, 0])
    near(pi, [A, B])
    assert {i: each.tolist() for i, each in made.split.items()} == {1: [0, 1], 2: [0]}
    assert {i: each.tolist() for i, each in made.counts.items()} == {1: [1, 1], 2: [1, 0]}


@pytest.mark.parametrize(("update", "steps"), [("overwrite", (1, 1)), ("certainty", (0.1, 0))])
def test_the_components_after_a_round(update, steps):
    """Means over members: b and 2a, 2ab and 4ab. Shares 2/3 and 1/3, of which 0.3 (2 * 2/3 - 1) = 0.1."""
    made = played_pfedem(TWO, update=update)
    near(made.mu[:, 0], [steps[0] * B, 2 + steps[1] * (2 * A - 2)])
    near(made.var[:, 0], [1 + steps[0] * (2 * A * B - 1), 1 + steps[1] * (4 * A * B - 1)])
    near(made.pi, [2 / 3, 1 / 3])


@pytest.mark.parametrize(("weights", "share"), [("participants", 2 / 3), ("members", 1)])
def test_the_models_after_a_round(weights, share):
    """Model 1 goes by (1/2, -1/2) in the biases on both clients; model 2 by (-1/2, 1/2), times 2 in its weights."""
    made = played_pfedem(TWO, weights=weights)
    near(made.models[0]["head.bias"], [0.5, -0.5])
    near(made.models[0]["head.weight"], [[0], [0]])
    near(made.models[1]["head.bias"], [-share / 2, share / 2])
    near(made.models[1]["head.weight"], [[-share], [share]])


@pytest.mark.parametrize("update", ["overwrite", "certainty"])
def test_a_component_without_data_keeps_everything_but_its_share(update):
    """At -100 the odds are e^-202: client and server keep mean, variance and model, the share is 1e-3 : 1."""
    models = [model(), model(LOG_3)]
    made = played_pfedem({3: rows([-100], [0])}, pi=(0.2, 0.8), models=models, update=update)
    mu, var, pi = made.own[3]
    near(mu[:, 0], [-100, 2])
    near(var[:, 0], [0, 1])
    assert pi[1] < 1e-80
    assert made.counts[3].tolist() == [1, 0]
    assert made.mu[1, 0] == 2
    assert made.var[1, 0] == 1
    near(made.mu[0, 0], -30 if update == "certainty" else -100)
    near(made.pi, [1 / 1.001, 0.001 / 1.001])
    near(made.models[1]["head.bias"], [LOG_3, 0])


def test_variances_of_zero_are_floored_where_densities_are_computed():
    """(1, 0) has the mean 1/2, so its floor is 5e-4: the second component is as good as sure of a row at its mean."""
    made = played_pfedem({1: rows([2], [0])}, var=(1, 0))
    odds = math.exp(2) / math.sqrt(5e-4)
    near(made.own[1][2], [1 / (1 + odds), odds / (1 + odds)])


def test_one_component_takes_every_row_and_moves_by_three_tenths():
    made = em.pfedem_round(
        [model()], array([0.0]), array([1.0]), array(1.0), {1: rows([0, 2], [0, 1])},
        center=np.ones(1), components=2 * np.eye(1), lr=1.0, batch_size=5, local_steps=1,
    )  # fmt: skip
    near(made.own[1][0], [[0]])
    near(made.own[1][1], [[4]])  # features -2 and 2
    near(made.var, [[1 + 0.3 * 3]])
    near(made.pi, [1])
    near(made.models[0]["head.bias"], [0, 0])
    near(made.models[0]["head.weight"], [[-0.5], [0.5]])


# -- FedGMM ------------------------------------------------------------------------------------------------------------


def played_fedgmm(clients, mu, models, blends=None, **options) -> em.FedGMM:
    return em.fedgmm_round(
        models, array(*mu)[:, None], np.ones((len(mu), 1, 1)), blends or {}, clients,
        center=np.zeros(1), components=np.eye(1), lr=1.0, batch_size=5, epochs=1, **options,
    )  # fmt: skip


def test_joint_posteriors_of_even_shares_are_products():
    """Of the Gaussians' (a, b) and (b, a), and of the learners' (3/5, 2/5) and (1/3, 2/3)."""
    losses = em.cross_entropies([model(LOG_3), model()], array([0], [2]), np.array([0, 1]))
    g = em.joint_posteriors(array([0], [2]), array([0], [2]), np.ones((2, 1, 1)), np.full((2, 2), 0.25), losses)
    near(g[0], np.outer([A, B], [3 / 5, 2 / 5]))
    near(g[1], np.outer([B, A], [1 / 3, 2 / 3]))
    pi = array([1, 2], [3, 4]) / 10
    (skewed,) = em.joint_posteriors(array([0]), array([0], [2]), np.ones((2, 1, 1)), pi, losses[:1])
    odds = array([3 * A, 4 * A], [9 * B, 8 * B])
    near(skewed, odds / odds.sum())


def test_a_round_of_fedgmm():
    """Rows (0, class 0) and (2, class 1): mean 2b/1.1 and 2a/1.1, and variances with a tenth in and on them."""
    made = played_fedgmm({1: rows([0, 2], [0, 1])}, (0, 2), [model(LOG_3), model()])
    pi = (np.outer([A, B], [3 / 5, 2 / 5]) + np.outer([B, A], [1 / 3, 2 / 3])) / 2
    near(made.blends[1], pi)
    mu = [2 * B / 1.1, 2 * A / 1.1]
    cov = [(r * m**2 + (1 - r) * (2 - m) ** 2) / 1.1 + 0.1 for r, m in zip((A, B), mu, strict=True)]
    near(made.mu[:, 0], mu)
    near(made.cov[:, 0, 0], cov)
    # The learners' errors times q are (-3/20, 1/4) and (-1/5, 1/3), as the Gaussians sum to one.
    near(made.models[0]["head.bias"], [LOG_3 - 1 / 20, 1 / 20])
    near(made.models[0]["head.weight"], [[-1 / 4], [1 / 4]])
    near(made.models[1]["head.bias"], [-1 / 15, 1 / 15])
    near(made.models[1]["head.weight"], [[-1 / 3], [1 / 3]])


def test_the_server_of_fedgmm_weighs_by_rows_and_blends():
    """A second client with one row (0, class 0): gamma is 2 pi of the first, and the outer product of the second."""
    first, second = rows([0, 2], [0, 1]), rows([0], [0])
    models = [model(LOG_3), model()]
    made = played_fedgmm({1: first, 2: second}, (0, 2), models)
    one, other = (played_fedgmm({1: each}, (0, 2), models) for each in (first, second))
    near(made.blends[2], np.outer([A, B], [3 / 5, 2 / 5]))
    for m1, mass in enumerate(([2 * 0.5, A], [2 * 0.5, B])):
        near(made.mu[m1], np.average([one.mu[m1], other.mu[m1]], axis=0, weights=mass))
        near(made.cov[m1], np.average([one.cov[m1], other.cov[m1]], axis=0, weights=mass))
    for m2, mass in enumerate(([14 / 15, 3 / 5], [16 / 15, 2 / 5])):
        biases = [each.models[m2]["head.bias"] for each in (one, other)]
        near(made.models[m2]["head.bias"], np.average(biases, axis=0, weights=mass))


def test_fedgmm_with_one_gaussian_is_fedem_with_weights_by_blend():
    """With one client the blends cancel in the mean, and the models are those of FedEM."""
    start, clients = [model(LOG_3), model()], {1: rows([1, 2], [0, 1])}
    made = played_fedgmm(clients, (5,), start)
    models, blends, _ = em.fedem_round(start, {}, clients, lr=1.0, batch_size=5, epochs=1)
    near(made.blends[1][0], blends[1])
    for ours, theirs in zip(made.models, models, strict=True):
        near(ours["head.weight"], theirs["head.weight"])
    near(made.mu, [[3 / 2.1]])


@pytest.mark.parametrize("train", ["each", "last"])
def test_two_em_steps_are_two_rounds_of_a_client_alone(train):
    clients, start = {1: rows([0, 2], [0, 1])}, [model(LOG_3), model()]
    twice = played_fedgmm(clients, (0, 2), start, em_steps=2, train=train)
    once = played_fedgmm(clients, (0, 2), start)
    again = em.fedgmm_round(
        once.models if train == "each" else start, once.mu, once.cov, once.blends, clients,
        center=np.zeros(1), components=np.eye(1), lr=1.0, batch_size=5, epochs=1,
    )  # fmt: skip
    near(twice.mu, again.mu)
    near(twice.cov, again.cov)
    near(twice.blends[1], again.blends[1])
    for one, other in zip(twice.models, again.models, strict=True):
        near(one["head.weight"], other["head.weight"])
        near(one["head.bias"], other["head.bias"])
