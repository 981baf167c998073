"""The stacked engine, which trains several clients at once: several models in one step of torch."""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedtide.core import sums
from fedtide.core.base import Answer, Memory, Moment, Notes, Scores, Weighted
from fedtide.core.rng import Rng
from fedtide.core.trees import Tree, all_finite, size_in_bytes
from fedtide.fleets.ask import Ask, BlockResult, Scoring
from fedtide.fleets.engines import Host, LocalEngine, threads
from fedtide.fleets.scoring import Clients, adapt_one_by_one, score
from fedtide.learn.by_batch import STACK_BYTES
from fedtide.learn.device import CPU, Drawing, drawing, drawn_from
from fedtide.learn.stack import Copies, fitted_parts, make_stack, train_stacked
from fedtide.learn.steps import Steps, Stepwise, Train
from fedtide.learn.training import Training

RECEIVED_BYTES = 2**28
"""Bytes of what clients receive, for those that work in step: they may hold as much of their own."""


@dataclass
class Working:
    """A client in the midst of its work.

    Args:
        client: its id.
        steps: its work.
        random: state of torch's global generators, which dropout draws from.
        request: what it waits for; None before it begins and after it has answered.
    """

    client: int
    steps: Steps[Answer | None]
    random: Drawing
    request: Any = None

    def resume(self, result: Any) -> Answer | None:
        """Go on to the next request; without one left, return the answer."""
        try:
            self.request = self._drawing(lambda: self.steps.send(result))
        except StopIteration as end:
            self.request = None
            return end.value
        return None

    @property
    def rows(self) -> int:
        """Number of rows that it waits to be trained on."""
        return len(self.request.shard)

    def run_single(self) -> Any:
        """Compute the request for this client only."""
        return self._drawing(self.request.run_single)

    def _drawing(self, run: Callable[[], Any]) -> Any:
        with drawn_from(self.random):
            try:
                return run()
            finally:
                self.random = drawing()


GPU_STACK_BYTES = 2**30
"""Bytes of models trained together on a GPU."""
ROW_BYTES = 64 * 2**20
"""Bytes of rows, in float32, that are read together."""
STEP_BYTES = 64 * 2**20
"""Bytes of what a step makes of its rows."""
GPU_STEP_BYTES = 4 * 2**30
"""Bytes of what a step makes of its rows on a GPU, which is fast only with much to do at once."""


def why_alone(host: Host) -> str | None:
    """Return why no clients of a host can be trained together; None if they can be, in one of its works at least.

    Two copies of each model and the first rows show whether it can be stacked.
    """
    if host.wire.fixed_point:
        return "answers are rounded one by one, as [wire] wants"
    if host.partial_work:
        return "devices.partial_work ends work early"
    shard, _ = host.population.few()
    reasons: dict[str, str | None] = {}
    for question, work in host.algorithm.works.items():
        reasons[question] = None if isinstance(work, Stepwise) else "its clients do more than train"
        if isinstance(work, Training):
            stack = make_stack(work.request(work.task.init(Rng(0)), None, shard, Moment(0, 1), Rng(0)))
            reasons[question] = stack if isinstance(stack, str) else None
    failed = next((reason for reason in reasons.values() if reason and reason.startswith("copies")), None)
    if failed or not reasons or None in reasons.values():
        return failed
    return reasons.get("train", next(iter(reasons.values())))


@dataclass(frozen=True)
class StackedEngine(LocalEngine):
    """An engine that trains clients together; questions that do more than train run as in the local engine.

    Rounds equal those of the local engine but for the last bits. All clients of an ask, whatever its blocks, are
    sorted by their rows and cut into stacks that a cache holds. Within a stack updates are summed in the precision of
    the weights, and stacks in float64. Only for hosts of which `why_alone` says nothing.

    Args:
        host: algorithm, population, memory.
        threads: torch threads.
    """

    _stacks: dict[Hashable, Copies | str] = field(default_factory=dict, init=False, repr=False, compare=False)
    _by_question: dict[str, Copies | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    def ask(self, blocks: Sequence[Ask], payload: Tree) -> Iterator[BlockResult]:
        """Run a question; clients trained together give a single result."""
        work = self.host.algorithm.works[blocks[0].question] if blocks else None
        if not isinstance(work, Stepwise | Training):
            yield from super().ask(blocks, payload)
            return
        ask, done = Ask.joined(blocks), None
        with threads(self.threads):
            if isinstance(work, Training) and not (work.forward_passes or work.squares or ask.reveal or ask.slots):
                done = self._summed(work, ask, payload)
            if done is None:
                done = in_order(self.host.ask(ask, payload, self._answers))
        yield replace(done, blocks=len(blocks))

    def score(self, scorings: Sequence[Scoring], payload: Tree) -> Iterator[Scores]:
        """Run a scoring; clients that adapt in steps do so together."""
        clients = self.host.clients
        return (self._with_threads(score, clients, scoring, payload, self._adapted) for scoring in scorings)

    def _adapted(self, clients: Clients, ask: Ask, received: Tree, part: str) -> Iterator[Memory]:
        """Yield the memory of each client in an evaluation, in their order."""
        work = clients.algorithm.adapt
        if not isinstance(work, Stepwise):
            yield from adapt_one_by_one(clients, ask, received, part)
            return
        counts = self.host.population.counts(ask.clients, "train", ask.moment)
        for cut in self._cut(counts, size_in_bytes(received), None, 0):
            members = ask.clients[cut].tolist()
            begun = (self._begin(work, c, clients.arguments(ask, c, received, part)) for c in members)
            answers = {client: clients.adapted_memory(ask, client, answer) for client, answer in self._in_step(begun)}
            yield from (answers[client] for client in members)

    def _answers(self, ask: Ask, payload: Tree) -> Iterator[tuple[int, Answer | None]]:
        """Yield clients with their answers, in the order in which they are done."""
        counts = self.host.population.counts(ask.clients, "train", ask.moment)
        received = next((size_in_bytes(payload_of_client) for _, payload_of_client in ask.sent(payload)), 0)
        for part in self._cut(counts, received, None, 0):
            yield from self._in_step(self._begun(ask.of(part), payload))

    def _in_step(self, begun: Iterator[Working]) -> Iterator[tuple[int, Answer | None]]:
        working = list(begun)
        for client in working:
            answer = client.resume(None)
            if client.request is None:
                yield client.client, answer
        while working := [client for client in working if client.request is not None]:
            groups: dict[Hashable, list[Working]] = {}
            for client in working:
                groups.setdefault(client.request.key, []).append(client)
            for group in groups.values():
                for client, result in self._results(group):
                    answer = client.resume(result)
                    if client.request is None:
                        yield client.client, answer

    def _arguments(self, ask: Ask, payload: Tree) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """Yield each client with the arguments of its work."""
        clients = self.host.clients
        shards = self.host.population.shards(ask.clients, ask.moment)
        for (client, received), shard in zip(ask.sent(payload), shards, strict=True):
            yield client, clients.arguments_of(ask, client, received, shard, clients.key(ask, client))

    def _begun(self, ask: Ask, payload: Tree) -> Iterator[Working]:
        work = self.host.algorithm.works[ask.question]
        assert isinstance(work, Stepwise | Training)
        for client, arguments in self._arguments(ask, payload):
            yield self._begin(work, client, arguments)

    def _begin(self, work: Stepwise | Training, client: int, arguments: tuple[Any, ...]) -> Working:
        with drawn_from(arguments[-1].number):
            random = drawing()
        return Working(client, work.start(*arguments), random)

    def _results(self, group: list[Working]) -> Iterator[tuple[Working, Any]]:
        """Yield clients with the results of equal requests, each of which may be lost when the next is taken."""
        first = group[0].request
        if hasattr(first, "run_batched"):
            yield from zip(group, first.run_batched([client.request for client in group]), strict=True)
            return
        if isinstance(first, Train):
            least = 2 if first.task.scratch.needs_pairs else 1
            able = [
                client for client in group if client.rows >= least
            ]  # whoever is not cannot show what can be stacked
            if able and (stack := self._stack(able[0].request)) is not None:
                group = [client for client in group if client.rows < least]
                yield from self._trained(stack, sorted(able, key=lambda client: -client.rows))
        for client in group:
            yield client, client.run_single()

    def _trained(self, stack: Copies, group: list[Working]) -> Iterator[tuple[Working, Any]]:
        first: Train = group[0].request
        counts = torch.tensor([client.rows for client in group])
        for cut in self._cut(counts, size_in_bytes(first.weights), stack, first.local.batch_size):
            members = [group[k] for k in cut.tolist()]
            requests = [client.request for client in members]
            yield from zip(members, fitted_parts(train_stacked(stack, requests), requests), strict=True)

    def _stack(self, request: Train) -> Copies | None:
        """Return the stack that trains several copies of a model; None if there is none."""
        if request.loss is not None and getattr(request.loss, "alike", None) is None:  # a stack for this client alone
            return None
        key = replace(request, local=replace(request.local, lr=1.0)).key  # a stack is the same at every learning rate
        if key not in self._stacks:
            self._stacks[key] = make_stack(request)
        stack = self._stacks[key]
        return None if isinstance(stack, str) else stack

    def _stack_of(self, work: Training, ask: Ask, payload: Tree) -> Copies | None:
        """Return the stack of a question, of whose requests one is tried: they differ in weights and samples alone."""
        if ask.question not in self._by_question:
            ((_, arguments),) = self._arguments(ask, payload)
            self._by_question[ask.question] = self._stack(work.request(*arguments))
        return self._by_question[ask.question]

    def _summed(self, work: Training, ask: Ask, payload: Tree) -> BlockResult | None:
        """Train clients and add their updates up in stacks; None if they have to be looked at one by one."""
        counts = self.host.population.counts(ask.clients, "train", ask.moment)
        able = (counts >= (2 if work.task.scratch.needs_pairs else 1)).nonzero().flatten()
        able = able[counts[able].argsort(descending=True, stable=True)]
        stack = self._stack_of(work, ask.of(able[:1]), payload) if len(able) else None
        if stack is None:
            return None
        total: Tree = None
        losses: dict[int, Tensor] = {}
        for cut in self._cut(counts[able], size_in_bytes(payload), stack, work.local.batch_size):
            part = ask.of(able[cut])
            requests = [work.request(*arguments) for _, arguments in self._arguments(part, payload)]
            fit = train_stacked(stack, requests)
            total = sums.merge(total, work.sum_of(fit, [request.shard for request in requests]))
            losses |= zip(part.clients.tolist(), fit.loss.clone().unbind(), strict=True)
        if not all_finite(total):
            return None
        notes = {client: Notes(loss=losses[client]) for client in sorted(losses)} if ask.question == "train" else {}
        up = size_in_bytes({"delta": Weighted(payload, 1.0), "loss": Weighted(0.0, 1)}) * len(losses)
        return BlockResult(total, sorted(losses), {}, [], notes, [], up)

    def _cut(self, counts: Tensor, model: int, stack: Copies | None, batch: int) -> list[Tensor]:
        """Cut positions of clients into those that go together; the cuts follow from numbers of rows alone.

        Args:
            counts: rows of each.
            model: bytes of a model, or of what a client receives.
            stack: what trains them; None if clients only work in step.
            batch: batch size, 0 for all rows.
        """
        most = RECEIVED_BYTES // max(model, 1)
        if stack is not None and len(counts):
            step = stack.row_bytes * (batch or int(counts.max()))
            cpu = stack.device.type == CPU
            models, rows = (STACK_BYTES, STEP_BYTES) if cpu else (GPU_STACK_BYTES, GPU_STEP_BYTES)
            most = min(models // model, rows // max(step, 1))
        row = 4 * math.prod(self.host.population.rows.shape)
        if 0 < len(counts) <= most and int(counts.sum()) * row <= ROW_BYTES:  # as of few clients that are small
            return [torch.arange(len(counts))]
        piece = (counts.cumsum(0) - counts) * row // ROW_BYTES
        number = torch.maximum(torch.arange(len(counts)) // max(most, 1), piece)
        return [(number == k).nonzero().flatten() for k in number.unique().tolist()]


def in_order(done: BlockResult) -> BlockResult:
    """Return a result with its clients, and what they revealed, in the order of their ids."""
    order = sorted(range(len(done.clients)), key=done.clients.__getitem__)
    revealed = {name: [rows[k] for k in order] for name, rows in done.revealed.items()}
    notes = {client: done.notes[client] for client in sorted(done.notes)}
    return replace(
        done,
        clients=sorted(done.clients),
        revealed=revealed,
        notes=notes,
        keepers=sorted(done.keepers),
        refused=sorted(done.refused),
    )
