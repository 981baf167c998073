"""The stacked engine, which trains several clients at once: several models in one step of torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedtide.core import sums
from fedtide.core.base import Answer, Notes, Shard, Slotted
from fedtide.core.rng import Rng
from fedtide.core.trees import Tree, all_finite, map_leaves, size_in_bytes
from fedtide.fleets.ask import Ask, BlockResult
from fedtide.fleets.local_engine import Host, LocalEngine, threads
from fedtide.learn.device import CPU, Drawing, drawing, drawn_from, to_cpu
from fedtide.learn.local import LocalTrainer, Term
from fedtide.learn.stack import (
    Copies,
    Fit,
    fitted_parts,
    stack_of,
    train_pair,
    train_stacked,
    unstackable,
    why_untrainable,
)
from fedtide.learn.steps import Gradient, Steps, Stepwise, Train, stack_key
from fedtide.learn.task import Task
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
            return end.value  # type: ignore[no-any-return]
        return None

    @property
    def rows(self) -> int:
        """Number of rows that it waits to be trained on."""
        return len(self.request.training.shard)

    def run_single(self) -> Any:
        """Compute the request for this client only."""
        return self._drawing(self.request.run_single)

    def _drawing(self, run: Callable[[], Any]) -> Any:
        with drawn_from(self.random):
            try:
                return run()
            finally:
                self.random = drawing()


def tried_stack(request: Train) -> Copies | None:
    """Return the stack that trains several copies of a model; None if two of them cannot be trained on some samples."""
    task, few, loss = request.task, request.shard.pick(slice(0, 2)), request.objective
    stack = stack_of(task, tuple(few.x.shape[1:]), loss)
    failed = why_untrainable(
        lambda: train_pair(stack, LocalTrainer(), None, request.weights, few, loss, features=request.features)
    )
    return stack if failed is None else None


STACK_BYTES = 8 * 2**20
"""Bytes of models trained together, which is what a processor's last cache holds."""
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
    works = host.algorithm.works
    if host.wire.fixed_point:
        return "answers are rounded one by one, as [wire] wants"
    if host.partial_work:
        return "devices.partial_work ends work early"
    reasons = {question: _unstackable(work) for question, work in works.items()}
    if reasons and None not in reasons.values():
        return reasons.get("train", next(iter(reasons.values())))
    shard, _ = host.population.few()
    for work in works.values():
        if not isinstance(work, Training) or _unstackable(work):
            continue
        if failure := why_untrainable(partial(_tried, work, shard)):
            return f"copies of the model do not train at once: {failure}"
    return None


def _tried(work: Training, shard: Shard) -> Tree:
    """Train two copies of a model and add them up."""
    stack = _stack_of(work.task, tuple(shard.x.shape[1:]))
    return work.sum_of(train_pair(stack, work.local, work.term, work.task.init(Rng(0)), shard), [shard] * 2)


def _stack_of(task: Task, shape: tuple[int, ...]) -> Copies:
    return stack_of(task, shape)


def _unstackable(work: object) -> str | None:
    """Return the reason why nothing of a work can be done for several clients at once; None if something can."""
    if isinstance(work, Training):
        return unstackable(work.task, work.local, work.term)
    return None if isinstance(work, Stepwise) else "its clients do more than train"


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

    _stacks: dict[Hashable, Copies | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    def ask(self, blocks: Sequence[Ask], payload: Tree) -> Iterator[BlockResult]:
        """Run a question; clients trained together give a single result."""
        work = self.host.algorithm.works[blocks[0].question] if blocks else None
        if _unstackable(work):
            yield from super().ask(blocks, payload)
            return
        ask = Ask.joined(blocks)
        with threads(self.threads):
            if isinstance(work, Training) and not work.forward_passes and not ask.reveal:
                done = self._summed(work, ask, payload)
            else:
                done = in_order(self.host.ask(ask, payload, self._answers))
        yield replace(done, blocks=len(blocks))

    def _answers(self, ask: Ask, payload: Tree) -> Iterator[tuple[int, Answer | None]]:
        """Yield clients with their answers, in the order in which they are done."""
        counts = self.host.population.counts(ask.clients, "train", ask.moment)
        received = next((size_in_bytes(payload_of_client) for _, payload_of_client in ask.sent(payload)), 0)
        for part in self._cut(counts, received, None, 0):
            yield from self._in_step(ask.of(part), payload)

    def _in_step(self, ask: Ask, payload: Tree) -> Iterator[tuple[int, Answer | None]]:
        working = list(self._begun(ask, payload))
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

    def _begun(self, ask: Ask, payload: Tree) -> Iterator[Working]:
        clients, work = self.host.clients, self.host.algorithm.works[ask.question]
        assert isinstance(work, Stepwise | Training)
        shards = self.host.population.shards(ask.clients, ask.moment)
        for (client, received), shard in zip(ask.sent(payload), shards, strict=True):
            rng = clients.key(ask, client)
            steps = work.start(*clients.arguments_of(ask, client, received, shard, rng))
            with drawn_from(rng.number):
                random = drawing()
            yield Working(client, steps, random)

    def _results(self, group: list[Working]) -> Iterator[tuple[Working, Any]]:
        """Yield clients with the results of equal requests, each of which may be lost when the next is taken."""
        first = group[0].request
        if hasattr(first, "run_batched"):
            yield from zip(group, first.run_batched([client.request for client in group]), strict=True)
            return
        if isinstance(first, Train | Gradient):
            least = 2 if first.training.task.scratch.needs_pairs else 1
            able = [
                client for client in group if client.rows >= least
            ]  # whoever is not cannot show what can be stacked
            if able and (stack := self._stack_tried(able[0].request.training)) is not None:
                group = [client for client in group if client.rows < least]
                yield from self._trained(stack, sorted(able, key=lambda client: -client.rows))
        for client in group:
            yield client, client.run_single()

    def _trained(self, stack: Copies, group: list[Working]) -> Iterator[tuple[Working, Any]]:
        first: Train = group[0].request.training
        rate = first.local.lr * first.local.lr_schedule(first.moment)
        counts = torch.tensor([client.rows for client in group])
        for cut in self._cut(counts, size_in_bytes(first.weights), stack, first.local.batch_size):
            members = [group[k] for k in cut.tolist()]
            requests: list[Train] = [client.request.training for client in members]
            terms = None if first.term is None else [request.term for request in requests]
            shards, rngs = [request.shard for request in requests], [request.rng for request in requests]
            received = [request.weights for request in requests]
            losses = [request.objective for request in requests]
            fit = train_stacked(
                stack, first.local, terms, received, shards, first.moment, rngs, losses, features=first.features
            )
            for client, part in zip(members, fitted_parts(fit, received, rate), strict=True):
                yield client, client.request.result(part)

    def _stack_tried(self, request: Train) -> Copies | None:
        """Return the stack that trains several copies of a model; None if it cannot be."""
        if unstackable(request.task, request.local, request.term, request.objective) is not None:
            return None
        if request.loss is not None and getattr(request.loss, "alike", None) is None:  # a stack for this client alone
            return None
        if request.stack not in self._stacks:
            self._stacks[request.stack] = tried_stack(request)
        return self._stacks[request.stack]

    def _stack(self, task: Task) -> Copies:
        """Return the stack that trains several copies of a model; `why_alone` has tried it."""
        key = stack_key(task, task.loss)
        stack = self._stacks[key] = self._stacks.get(key) or _stack_of(task, self.host.population.rows.shape)
        return stack

    def _summed(self, work: Training, ask: Ask, payload: Tree) -> BlockResult:
        """Train clients and add their updates up in stacks, without an answer of each."""
        counts = self.host.population.counts(ask.clients, "train", ask.moment)
        able = (counts >= (2 if work.task.scratch.needs_pairs else 1)).nonzero().flatten()
        able = able[counts[able].argsort(descending=True, stable=True)]
        total: Tree = None
        losses: dict[int, Tensor] = {}
        bad: list[int] = []
        up = 0
        one: Any = next((stack_losses for _, stack_losses in ask.sent(payload)), None)  # all are of one size
        for cut in self._cut(counts[able], size_in_bytes(one), self._stack(work.task), work.local.batch_size):
            summed, stack_losses, left_out = self._train(work, ask.of(able[cut]), payload)
            total = sums.merge(total, summed)
            bad += left_out
            losses |= stack_losses
            up += work.sent_bytes(one) * len(stack_losses)
        counted = sorted(losses)
        notes = {client: Notes(loss=losses[client]) for client in counted} if ask.question == "train" else {}
        return BlockResult(total, counted, {}, [], notes, sorted(bad), up)

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

    def _train(self, work: Training, ask: Ask, payload: Tree) -> tuple[Tree, dict[int, Tensor], list[int]]:
        """Return the sum of a stack, the loss of each counted client, and the clients whose numbers are not finite."""
        shards = self.host.population.shards(ask.clients, ask.moment)
        rngs = [self.host.clients.key(ask, client) for client in ask.clients.tolist()]
        stack, terms = self._stack(work.task), _terms(work, shards)
        received = [payload_of_client for _, payload_of_client in ask.sent(payload)]
        fit = train_stacked(stack, work.local, terms, received, shards, ask.moment, rngs)
        total = _sum_of(work, fit, shards, ask)
        bad: list[int] = []
        if not all_finite(total):
            good = _finite(fit)
            bad, ask = ask.clients[~good].tolist(), ask.of(good)
            fit, shards = _part(fit, shards, good.nonzero().flatten())
            total = _sum_of(work, replace(fit, delta=map_leaves(Tensor.double, fit.delta)), shards, ask)
        return total, dict(zip(ask.clients.tolist(), fit.loss.clone().unbind(), strict=True)), bad


def _sum_of(work: Training, fit: Fit, shards: Sequence[Shard], ask: Ask) -> Tree:
    """Return the sum of what clients send that were trained at once, or a sum for each slot; None of nobody."""
    if not shards:
        return None
    if ask.slot is None:
        return work.sum_of(fit, shards)
    members = {slot: (ask.slot == slot).nonzero().flatten() for slot in ask.slot.unique().tolist()}
    return Slotted({slot: work.sum_of(*_part(fit, shards, where)) for slot, where in members.items()}, ask.slots)


def _part(fit: Fit, shards: Sequence[Shard], where: Tensor) -> tuple[Fit, list[Shard]]:
    """Pick the updates and the samples of the clients at some positions."""
    if len(where) == len(shards):
        return fit, list(shards)
    delta = map_leaves(lambda leaf: leaf[where.to(leaf.device)], fit.delta)
    return replace(fit, delta=delta, loss=fit.loss[where]), [shards[k] for k in where.tolist()]


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


def _finite(fit: Fit) -> Tensor:
    """Return the mask (clients,) of clients whose numbers are all finite."""
    good = fit.loss.isfinite()
    for leaf in (*fit.delta.params.values(), *fit.delta.buffers.values()):
        good &= to_cpu(leaf.reshape(len(leaf), -1).isfinite().all(1))
    return good


def _terms(work: Training, shards: Sequence[Shard]) -> list[Term] | None:
    return None if work.term is None else [work.term] * len(shards)
