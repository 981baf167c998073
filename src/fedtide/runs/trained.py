"""Trained models of a run, from a checkpoint that it has, and their predictions for a new client or for one client."""

from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedtide.config import slug
from fedtide.core import checkpoint, codec
from fedtide.core.base import Grouping, Memory, Moment, Payload, Prediction, Weights
from fedtide.core.errors import FedtideError, quote, refused, unknown
from fedtide.core.memory import MemoryStore
from fedtide.core.record import ASKS
from fedtide.core.rng import Rng
from fedtide.core.trees import Tree
from fedtide.core.weights import shapes_of
from fedtide.fleets.ask import Ask
from fedtide.fleets.engines import Host
from fedtide.fleets.scoring import decision_units
from fedtide.learn.device import CPU, to_cpu
from fedtide.learn.target import CLASSES
from fedtide.learn.task import TURNS, Task
from fedtide.models.branched import unbranched
from fedtide.runs.build import built, read_again
from fedtide.runs.digest import digest_to_read
from fedtide.runs.folder import Planned, check_rows, go_on, load, plan
from fedtide.runs.job import check_positive
from fedtide.transforms.transform import models_in
from fedtide.wire.answer_schema import made_up

ROWS = 256
"""Number of rows of clients, and of invented ones, on which a network is compared with the method."""

REAL = 10_000_000
"""More clients than real ones are."""

AFTER = 1_000_000
"""Number of an ask that is after all of its round."""

TOLERANCE = 1e-5
"""How far probabilities of the same model may be apart: they are computed in another order."""


AT_NODES = "none, because rows and memory of the clients are at their nodes: predict there"
"""Clients of a server of real clients."""


@dataclass(frozen=True, repr=False, kw_only=True)
class Models:
    """Trained models and their predictions.

    Args:
        title: name for people.
        host: the clients with their memory.
        task: model and loss.
        state: the server's state.
        moment: the last round.
        decide_per: which rows decide together which of several models answers for them.
        real: whether its clients are real ones, which are elsewhere and may be more than those of its study.
    """

    title: str
    host: Host
    task: Task
    state: Any
    moment: Moment
    decide_per: Grouping = "client"
    real: bool = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.title!r}, after round {self.moment.round + 1})"

    @cached_property
    def like(self) -> Weights:
        """Weights of one network."""
        return replace(self.task, begin=None).init(Rng(0))

    @property
    def networks(self) -> list[Weights]:
        """The networks of the server's state, in their order: its models, and each branch of a branched one."""
        return networks_in(getattr(self.state, "weights", None), self.like)

    def find_client(self, name: str | None) -> int | None:
        """Return the number of a client, from 0, by its name in the data, such as "B6" or "carrier=B6".

        Only if clients have no names, the name is that number.

        Raises:
            FedtideError: no client has the name; the message has a few that there are.
        """
        if name is not None and self.real:
            raise refused("--client", name, AT_NODES)
        return None if name is None else self.host.population.number_of(name, "--client")

    def predict(self, x: Tensor, client: int | None = None) -> Prediction:
        """Predict rows as the run's evaluation does.

        Args:
            x: (rows, ...) as the model sees them: scaled as in the run, if it scales them. As far as the method
                decides by rows which of its models answers, they decide together or not as `decide_per` says.
            client: for this client, with its memory, and adapted on its own rows; None for a new one.

        Raises:
            FedtideError: rows have another shape than those of the run, or there is no such client.
        """
        if not isinstance(x, Tensor) or not len(x) or self.shape not in (None, tuple(x.shape[1:])):
            kind = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            shape = "..." if self.shape is None else ", ".join(map(str, self.shape))
            raise refused("predict.x", kind, f"a tensor (rows, {shape}) with rows as the model sees them")
        with TURNS:
            return self._predict(*self._receive(client), x)

    @cached_property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of a row; None of sequences, whose length may differ, and of real clients, whose rows are elsewhere."""
        return None if self.real or self.host.population.rows.steps else tuple(self.trial_rows(1).shape[1:])

    def _predict(self, received: Payload, memory: Memory, x: Tensor) -> Prediction:
        """Predict rows with a message and a memory."""
        grouping = self.decide_per
        units, first = decision_units(
            torch.zeros(len(x), dtype=torch.int64), None, "batch" if grouping == "oracle" else grouping
        )
        return self.host.algorithm.predict(received, [memory] * len(first), x, units)

    def predict_with(self, weights: Weights, x: Tensor) -> Prediction:
        """Predict rows with one network."""
        return self.task.predict(weights, [], x, torch.zeros(len(x), dtype=torch.int64))

    def _receive(self, client: int | None) -> tuple[Payload, Memory]:
        """Return the message that a client receives to predict with, and its memory then."""
        population, algorithm = self.host.population, self.host.algorithm
        everyone = population.registered + len(population.held_out_clients)
        if self.real:
            if client is not None:
                raise refused("--client", client, AT_NODES)
            everyone += REAL
        if client is not None and not (isinstance(client, Integral) and 0 <= client < everyone):
            raise refused("--client", client, f"0 to {everyone - 1}")
        asked = torch.tensor([everyone if client is None else client])
        payload, slot = algorithm.serve(self.state, asked)
        received = payload if slot is None else payload[int(slot[0])]
        if client is None:
            return received, None
        ask = Ask("adapt", "adapt", self.moment, asked, number=AFTER)  # as in the evaluation of that round
        if algorithm.adapt is None:
            return received, self.host.memory.read(client, ask.version)
        return received, self.host.clients.adapt(ask, client, received, "test")

    @torch.no_grad()
    def parts(self, client: int | None = None, cluster: int | None = None) -> list[tuple[Weights, float]]:
        """Return the networks by which rows are predicted, with the share of each in the probabilities.

        Args:
            client: for this client, with its memory; None for a new one.
            cluster: number of a network of the server's state instead: a cluster's, a component's or a branch.

        Raises:
            FedtideError: there is no such network, or which of them predicts depends on the row.
        """
        if cluster is not None:
            if client is not None:
                raise refused("--cluster", cluster, "one of --client and --cluster")
            many = len(self.networks)
            numbers = f"0 to {many - 1}" if many > 1 else "0"
            if not 0 <= cluster < many:
                raise refused("--cluster", cluster, numbers if many else "none: the server has no network")
            return [(self.networks[cluster], 1.0)]
        received, memory = self._receive(client)
        rows = self.trial_rows()
        prediction = self.host.algorithm.predict(received, [memory] * len(rows), rows, torch.arange(len(rows)))
        if (parts := mixed(self.task, self.like, rows, received, memory, prediction)) is not None:
            return parts
        raise self._unfound("depends on the row", "fedtide predict")

    @torch.no_grad()
    def parts_of_rows(
        self, x: Tensor, client: int | None = None, cluster: int | None = None
    ) -> list[list[tuple[Weights, float]]]:
        """Return the networks by which each row is predicted, see `parts`; rows decide together as in `predict`.

        Raises:
            FedtideError: there is no such network, or none predicts a row as the method does.
        """
        if cluster is not None:
            return [self.parts(client, cluster)] * len(x)
        received, memory = self._receive(client)
        prediction = self._predict(received, memory, x)
        if (parts := mixed(self.task, self.like, x, received, memory, prediction)) is not None:
            return [parts] * len(x)
        parts_of: list[list[tuple[Weights, float]]] = []
        for row in (slice(k, k + 1) for k in range(len(x))):
            weights = None if prediction.weights is None else prediction.weights[row]
            one = Prediction(prediction.told[row], weights=weights)
            if (parts := mixed(self.task, self.like, x[row], received, memory, one)) is None:
                raise self._unfound("is not known")
            parts_of.append(parts)
        return parts_of

    def _unfound(self, what: str, *others: str) -> FedtideError:
        """Return the error of networks that cannot be told."""
        many = len(self.networks)
        named = [f"--cluster 0 to {many - 1} for one of its networks"] if many else []
        allowed = ", or ".join([*named, *others]) or "another method"
        return FedtideError(
            f"{self.title}: which of its networks predicts, or how much each counts, {what}; allowed: {allowed}"
        )

    def rows(self, most: int = ROWS) -> Tensor:
        """Return rows that clients train on, as the model sees them, at most so many.

        Raises:
            FedtideError: the number is below 1.
        """
        check_positive("rows.most", most)
        return self.task.inputs(self._known(most))

    def trial_rows(self, most: int = ROWS) -> Tensor:
        """Return rows of clients and as many invented ones, as the model sees them, to compare predictions on.

        Of sequences so many steps: each may have logits of a large vocabulary.
        """
        population = self.host.population
        most = max(most // (population.rows.steps or 1), 2)
        x, invented = self._known(most), made_up(*population.few(), rows=most).x
        return self.task.inputs(torch.cat([x, invented.to(x.dtype)]))

    def _known(self, most: int) -> Tensor:
        population = self.host.population
        shard, _ = population.pool(population.clients[:most], self.moment, "train")
        return to_cpu(shard.x[:most])

    def model(self, client: int | None = None, cluster: int | None = None) -> nn.Module:
        """Return a module, for use without this package, that predicts as the run does; see `parts`.

        It is in evaluation mode. The softmax of its outputs (rows, classes) are probabilities;
        `task.target.read_outputs` reads the outputs of other targets.
        """
        with TURNS:
            return module_of(self.task, self.parts(client, cluster))


@dataclass(frozen=True, repr=False, kw_only=True)
class Trained(Models):
    """Trained models of a run, from its newest checkpoint or one that is kept."""

    run: Planned

    @staticmethod
    def read(root: Path, method: str | None = None, seed: int | None = None, model: str | None = None) -> "Trained":
        """Read a run from its folder; nothing in it is changed.

        Args:
            root: the run folder, with a sweep that of one point.
            method: name of one of its methods; needed if there are several.
            seed: one of its seeds; by default the first.
            model: "last", "best", or the number of rounds of a model that is kept; None means the last.

        Raises:
            FedtideError: there is no such run or model, it has no checkpoint yet, or its files were changed.
        """
        read_again()
        run = _run_of(root, method, seed)
        folder = run.folder / "checkpoints"
        about = checkpoint.check(folder, config=digest_to_read(run))
        if about is None:
            raise FedtideError(f"{run.folder}: has no checkpoint yet; go on with: {go_on(root)}")
        if (number := _round_of(model, about)) != about.round:
            about = checkpoint.check(folder, config=about.config, number=number)
            assert about is not None
        saved = checkpoint.check_files(folder, about)
        memory = MemoryStore(run.folder / "memory")
        memory.read_index(saved / "memory.safetensors")
        # What was trained on a GPU can be read without one.
        fleet = run.experiment.fleet
        anywhere = fleet if fleet.device == CPU else replace(fleet, device="auto")
        experiment = run.experiment.model_copy(update={"fleet": anywhere})
        method_built = built(experiment, run.method, run.seed, memory)
        check_rows(run.folder, run.experiment, run.method, run.seed, method_built.host.population)
        asks = run.folder / ASKS
        return Trained(
            title=run.title,
            host=method_built.host,
            task=method_built.task,
            state=codec.from_file(saved / "state.safetensors"),
            moment=Moment(about.round - 1, run.experiment.shift_rounds, about.before),
            decide_per=run.method.decide_per,
            real=asks.is_file() and asks.stat().st_size > 0,
            run=run,
        )


class Mixture(nn.Module):
    """Networks whose probabilities are mixed in fixed shares; it returns log-probabilities."""

    def __init__(self, networks: list[nn.Module], shares: list[float]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)
        self.register_buffer("shares", torch.tensor(shares, dtype=next(networks[0].parameters()).dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return log-probabilities (rows, classes)."""
        logp = torch.stack([network(x).log_softmax(-1) for network in self.networks], -1)
        return (logp + self.get_buffer("shares").log()).logsumexp(-1)


def mixed(
    task: Task, like: Weights, rows: Tensor, received: Payload, memory: Memory, prediction: Prediction
) -> list[tuple[Weights, float]] | None:
    """Return the networks, with the share of each, that predict as a method does; None if that depends on the row.

    Args:
        task: the model and loss.
        like: weights of one network.
        rows: as the model sees them.
        received: the message that a client predicts with.
        memory: of the client.
        prediction: what the method predicts, each row by itself.
    """
    # What a client keeps is more its own than what everybody receives.
    shared = networks_in(received, like)
    tries = [[(network, 1.0)] for network in (*networks_in(memory, like), *shared)]
    if task.target == CLASSES and prediction.weights is not None and len(shared) == prediction.weights.shape[1]:
        tries.append(list(zip(shared, prediction.weights.double().mean(0).tolist(), strict=True)))
    candidates = ((parts, task.target.read_outputs(module_of(task, parts)(rows))) for parts in tries)
    return next((parts for parts, outputs in candidates if agree(task, outputs, prediction.told)), None)


def agree(task: Task, ours: Tensor, theirs: Tensor) -> bool:
    """Tell whether the same model said both, computed in another order: log-probabilities, or what other targets tell.

    Of other targets up to a ten-thousandth of the largest size.
    """
    if task.target != CLASSES:
        return bool((ours - theirs).abs().max() <= (0.02 if task.bfloat else 1e-4) * theirs.abs().max())
    far = (ours.double().exp() - theirs.double().exp()).abs().max()
    return bool(far <= (0.02 if task.bfloat else TOLERANCE))


def module_of(task: Task, parts: list[tuple[Weights, float]]) -> nn.Module:
    """Return a module, in evaluation mode, of networks with shares."""
    networks = [task.module(weights) for weights, _ in parts]
    return networks[0] if len(networks) == 1 else Mixture(networks, [share for _, share in parts]).eval()


def _run_of(root: Path, method: str | None, seed: int | None) -> Planned:
    runs = plan(load(root), root)
    points = sorted({run.folder.parent.parent for run in runs})
    if len(points) > 1:
        raise FedtideError(f"{root}: is a sweep, allowed: the folder of one of its points, such as {points[0]}")
    names = list(dict.fromkeys(run.method.name for run in runs))
    if method is None and len(names) > 1:
        raise FedtideError(f"--method: found none, allowed: {quote(names)}")
    matches = [run for run in runs if method in (None, run.method.name, slug(run.method.name))]
    matches = matches or [run for run in runs if method == run.method.bare]
    if not matches or len({run.method.name for run in matches}) > 1:
        raise unknown("--method", str(method), names, quoted=True)
    seeds = [run.seed for run in matches]
    if seed is not None and seed not in seeds:
        raise refused("--seed", seed, ", ".join(map(str, seeds)))
    return matches[0 if seed is None else seeds.index(seed)]


def _round_of(model: str | None, about: checkpoint.About) -> int:
    """Return the number of rounds of a model that a run has: the last, the best, or one by that number."""
    numbers = {"last": about.round, **{str(number): number for number in (*about.kept, about.round)}}
    numbers |= {"best": about.kept[0]} if about.kept else {}
    if model is not None and model not in numbers:
        because = "" if about.kept else "the run has kept no others: `keep` says how many, by validation rows"
        raise refused("--model", model, ", ".join(dict.fromkeys(numbers)), because)
    return numbers[model or "last"]


def networks_in(tree: Tree, like: Weights) -> list[Weights]:
    """List all networks in a tree, in their order; a branched one counts as many as it has branches."""
    networks = (network for model in models_in(tree) for network in unbranched(model))
    return [network for network in networks if shapes_of(network) == shapes_of(like)]
