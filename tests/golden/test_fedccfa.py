"""FedCCFA by pencil and paper, a naive implementation, and what it becomes without clusters and alignment.

Clusters of class 0, of four clients with balanced rows (2, 0), (1, 0), (0, 3), (1, 0), of which the last lacks the
class. Among the first three, cos = 1, 0, 0 for the pairs 01, 02, 12. With one other client each: d_01 = |0 - 0| = 0,
d_02 = |1 - 0| = 1, d_12 = 1. So clients 0 and 1 are a cluster, 2 is alone, and 3 is as before.

The alignment with anchors (2, 0) and (0, 1), of a third class none, temperature 1/2 and weight 3: a row with features
(5, 0) has cosines 1 and 0, so 2 and 0. Its loss is 3 log(1 + e^-2) if it is of class 0, 3 (2 + log(1 + e^-2)) if it is
of class 1, and 0 if it is of class 2.
"""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedtide as ft
from fedtide.algorithms.fedbabu import fedbabu
from fedtide.algorithms.fedccfa import Alignment, draw_balanced, fedccfa, madd, merge
from fedtide.algorithms.fedpac import fedpac
from fedtide.algorithms.fedrep import fedrep
from fedtide.algorithms.moon import moon
from fedtide.core.base import Moment, Shard, Weights
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.fleets.stacked_engine import StackedEngine
from fedtide.learn import LocalTrainer, Task
from helpers.toys import network_of, played, toy

LATE = (99, 0)


def test_clusters_by_hand():
    balanced = torch.tensor([[[2.0, 0.0]], [[1.0, 0.0]], [[0.0, 3.0]], [[1.0, 0.0]]])
    head, anchors = torch.arange(8.0).reshape(4, 1, 2), torch.tensor([[[4.0]], [[0.0]], [[7.0]], [[0.0]]])
    has = torch.tensor([[1.0], [1.0], [1.0], [0.0]])
    assert madd(balanced[:3, 0]).tolist() == [[0.0, 0.0, 1.0], [0.0, 0.0, 1.0], [1.0, 1.0, 0.0]]
    phi, a = merge(balanced, head, anchors, has, 0.1)
    assert phi.flatten(1).tolist() == [[1.0, 2.0], [1.0, 2.0], [4.0, 5.0], [6.0, 7.0]]
    assert a.flatten().tolist() == [2.0, 2.0, 7.0, 0.0]
    # With eps = 1 all three are one cluster. Two clients alone are never merged.
    assert merge(balanced, head, anchors, has, 1.0)[1].flatten().tolist() == pytest.approx([11 / 3] * 3 + [0.0])
    assert merge(balanced[:2], head[:2], anchors[:2], has[:2], 9.0)[1].flatten().tolist() == [4.0, 0.0]


def test_the_alignment_by_hand():
    anchors, has = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 0.0]]).double(), torch.tensor([1.0, 1.0, 0.0]).double()
    y = torch.tensor([0, 1, 2])
    shard = Shard(torch.zeros(3, 1), y, torch.arange(3))
    columns = Alignment(0.5, 3.0, anchors, has).prepare(None, None, shard)
    z = torch.tensor([[5.0, 0.0]] * 3, dtype=torch.float64, requires_grad=True)
    values = Alignment(0.5, 9.0, anchors * 0, has * 0).each(z, z, y, columns)
    least = math.log(1 + math.exp(-2))
    assert values.tolist() == pytest.approx([3 * least, 3 * (2 + least), 0.0], abs=1e-12)
    nothing = Alignment(0.5, 0.0, anchors * 0, has * 0)
    value = nothing.each(z, z, y, nothing.prepare(None, None, shard)).sum()
    assert value == 0.0
    assert not torch.autograd.grad(value, z)[0].any()


@pytest.mark.parametrize(("labels", "each"), [
    ([0] * 9 + [2] * 7, {0: 5, 2: 5}),
    ([0] * 9 + [1] * 2, {0: 2, 1: 2}),
    ([1] * 9, {1: 5}),
    ([1], {1: 1}),
    ([], {}),
])  # fmt: skip
def test_a_balanced_sample_has_equally_many_rows_of_each_class(labels, each):
    y = torch.tensor(labels, dtype=torch.int64)
    rows = draw_balanced(y, Rng(0))
    assert len(rows.unique()) == len(rows) == sum(each.values())
    assert torch.bincount(y[rows]).tolist() == [each.get(c, 0) for c in range(max(each, default=-1) + 1)]


# -- an independent naive implementation -------------------------------------------------------------------------------

ROUNDS = 5
LOCAL = {"lr": 0.05, "batch_size": 4, "epochs": 2, "momentum": 0.5, "weight_decay": 0.01}
SWAPS = {
    "kind": "concept-drift",
    "concepts": [{}, {"swaps": [[0, 1]]}],
    "when": {"kind": "drawn", "every": 2, "fraction": 0.5},
}
OPTIONS = {
    "head_epochs": 2,
    "head_lr": 0.2,
    "balanced_epochs": 3,
    "eps": 0.3,
    "gamma": 2.0,
    "tau": 0.5,
    "align_from": 1,
}
DATA = {"partition": {"kind": "dirichlet-class", "clients": 8, "alpha": 0.5, "min_samples": 5}}


def descend(model, part, x, y, key, lr, epochs, extra=lambda z, y: 0.0):
    """SGD of the parameters of one layer, with momentum and weight decay."""
    shuffle = key.at("shuffle").torch()
    optimizer = torch.optim.SGD(getattr(model, part).parameters(), lr=lr, momentum=0.5, weight_decay=0.01)
    for _ in range(epochs):
        for batch in torch.randperm(len(y), generator=shuffle).split(4):
            z = model[:2](x[batch])
            optimizer.zero_grad()
            (F.cross_entropy(model.head(z), y[batch]) + extra(z, y[batch])).backward()
            optimizer.step()


def distances(vectors):
    """The definition: for each pair the mean over all others."""
    m = len(vectors)
    cos = [[float(a @ b / (a.norm() * b.norm())) for b in vectors] for a in vectors]
    far = [[0.0] * m for _ in range(m)]
    for i in range(m):
        for j in range(m):
            others = [abs(cos[i][z] - cos[j][z]) for z in range(m) if z not in (i, j)]
            far[i][j] = sum(others) / len(others) if others else (0.0 if i == j else math.inf)
    return far


def groups(far, eps):
    """Connected components."""
    left, out = set(range(len(far))), []
    while left:
        reached = {min(left)}
        while more := {j for i in reached for j in left if far[i][j] <= eps} - reached:
            reached |= more
        out.append(sorted(reached))
        left -= reached
    return out


def naive(population, model):
    """The trunk, and head and anchors of each client after all rounds; how many rows were shared, and how many
    anchors are older."""
    kept, shared, again, first = {}, 0, 0, copy.deepcopy(model.head)
    for r in range(ROUNDS):
        moment, sums, total, met = Moment(r, ROUNDS, float(r)), {}, 0, {}
        for client in population.arrivals(4, moment).tolist():
            shard, key = population.shard(client, moment), Rng(0).at(r, client, "train")
            x, y = shard.x.double(), shard.y
            sample = draw_balanced(y, key.at("sample"))
            balanced = copy.deepcopy(model)
            balanced.head = copy.deepcopy(first)
            descend(balanced, "head", x[sample], y[sample], key.at("balanced"), 0.2, 3)
            own = copy.deepcopy(model)
            own.head = copy.deepcopy(kept[client][0] if client in kept else first)
            descend(own, "head", x, y, key.at("head"), 0.2, 2)

            def align(z, y, x=shard.y, before=kept.get(client) if r else None):
                if before is None:
                    return 0.0
                anchors, p = before[1], torch.bincount(x).double() / len(x)
                entropy = -sum(float(q * q.log()) for q in p if q > 0)
                names, loss = sorted(anchors), 0.0
                for row, label in zip(z, y.tolist(), strict=True):
                    if label in anchors:
                        logits = torch.stack([F.cosine_similarity(row, anchors[c], dim=0) / 0.5 for c in names])
                        loss = loss - F.log_softmax(logits, 0)[names.index(label)]
                return entropy / 2.0 * loss / len(y)

            descend(own, "dense1", x, y, key, 0.05, 2, align)
            with torch.no_grad():
                z = own[:2](x)
            means = {c: z[y == c].mean(0) for c in y.unique().tolist()}
            met[client] = balanced.head, own.head, means
            for name, p in own.dense1.named_parameters():
                sums[name] = sums.get(name, 0.0) + len(y) * (p.detach() - model.dense1.get_parameter(name).detach())
            total += len(y)
        for name, p in model.dense1.named_parameters():
            p.data += sums[name] / total
        after = {client: (copy.deepcopy(head), dict(means)) for client, (_, head, means) in met.items()}
        for c in range(3):
            holders = [client for client in sorted(met) if c in met[client][2]]
            rows = [torch.cat([met[i][0].weight[c], met[i][0].bias[c : c + 1]]).detach() for i in holders]
            for group in groups(distances(rows), 0.3):
                members = [holders[i] for i in group]
                shared += len(members) > 1
                for part in ("weight", "bias"):
                    mean = sum(getattr(met[i][1], part)[c].detach() for i in members) / len(members)
                    for i in members:
                        getattr(after[i][0], part).data[c] = mean
                mean = sum(met[i][2][c] for i in members) / len(members)
                for i in members:
                    after[i][1][c] = mean
        for i, (_, means) in after.items():
            again += len(set(kept[i][1]) - set(means)) if i in kept else 0
            after[i] = after[i][0], {**(kept[i][1] if i in kept else {}), **means}
        kept |= after
        last = [after[i][0] for i in sorted(after)]
    return model.dense1.state_dict(), kept, last, shared, again


def test_a_naive_implementation_agrees_to_1e_9():
    shift = {"who": {"kind": "periodic", "period": 4}, "how": SWAPS}
    run = played(toy("fedccfa", {"local": LOCAL, **OPTIONS}, rounds=ROUNDS, precision="fp64", data=DATA, shift=shift))
    trunk, kept, last, shared, again = naive(run.host.population, network_of(run.steps[0].received.weights))
    assert shared > 3
    assert again > 0
    for name, value in trunk.items():
        torch.testing.assert_close(run.state.weights.params[f"dense1.{name}"], value, rtol=1e-9, atol=1e-9)
    assert any(len(means) < 3 for _, means in kept.values())
    for client, (head, means) in kept.items():
        memory = run.host.memory.read(client, LATE)
        row = torch.cat([head.weight, head.bias[:, None]], 1).detach()
        torch.testing.assert_close(memory["head"], row, rtol=1e-9, atol=1e-9)
        assert memory["classes"].nonzero().flatten().tolist() == sorted(means)
        for c, mean in means.items():
            torch.testing.assert_close(memory["anchors"][c], mean, rtol=1e-9, atol=1e-9)
    row = torch.stack([torch.cat([head.weight, head.bias[:, None]], 1).detach() for head in last]).mean(0)
    torch.testing.assert_close(run.state.head, row, rtol=1e-9, atol=1e-9)
    payload, _ = run.host.algorithm.serve(run.state, torch.tensor([0]))
    torch.testing.assert_close(payload.params["head.bias"], row[:, -1], rtol=1e-9, atol=1e-9)


# -- reductions --------------------------------------------------------------------------------------------------------


def test_without_clusters_and_alignment_it_is_fedrep():
    """Trunks are the same if both begin with the same head; each cluster has one client with `eps` = 0."""
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    begin = Weights({name: p.detach() for name, p in net.named_parameters()})
    x = torch.randn(120, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    task = Task(lambda: copy.deepcopy(net), dtype=torch.float64, begin=begin, example=x[:1])
    people = ft.population(x, torch.arange(120) % 3, ft.data.Dirichlet(clients=6, alpha=1.0))
    local, cohort = LocalTrainer(lr=0.1, batch_size=8), ft.cohorts.Arrivals(4)
    ours = fedccfa(task, local, head_lr=0.1, eps=0.0, align_from=99, cohort=cohort)
    theirs = fedrep(task, local, head_epochs=1, cohort=cohort, weighting="samples")
    one, two = (ft.simulate(method, people, rounds=4).state for method in (ours, theirs))
    for name in ("0.weight", "0.bias"):
        torch.testing.assert_close(one.weights.params[name], two.inner.weights.params[name], rtol=1e-12, atol=1e-12)


def test_its_clients_are_trained_at_once():
    run = played(toy("fedccfa", {"local": LOCAL, **OPTIONS}), rounds=2, engine=StackedEngine)
    stacks = run.fleet.engine._stacks.values()
    assert len(stacks) > 2
    assert not any(isinstance(stack, str) for stack in stacks)


def test_networks_without_a_row_for_each_class_are_one_line():
    x = torch.zeros(1, 4)
    with pytest.raises(FedtideError, match=r"fedccfa.*the head has no row for each class"):
        fedccfa(Task(lambda: nn.Sequential(nn.Linear(4, 3), nn.LayerNorm((1, 3))), example=x[:, None]))


@pytest.mark.parametrize("make", [fedbabu, fedccfa, fedpac, moon])
def test_a_network_of_one_layer_has_no_trunk(make):
    with pytest.raises(FedtideError, match=rf"model: found 'one layer', but '{make.__name__}' needs one below"):
        make(Task(lambda: nn.Sequential(nn.Linear(4, 3)), example=torch.zeros(1, 4)))
    with pytest.raises(FedtideError, match="one layer"):
        make(Task(lambda: nn.Linear(4, 3), example=torch.zeros(1, 4)))
