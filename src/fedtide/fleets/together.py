"""Works in steps of many clients at once: equal requests are computed together, the others one by one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedtide.core.base import Answer
from fedtide.core.trees import Tree, size_in_bytes
from fedtide.fleets.ask import Ask
from fedtide.fleets.host import Host
from fedtide.learn.device import Drawing, drawing, drawn_from
from fedtide.learn.fast.stack import (
    Copies,
    fitted_parts,
    stack_of,
    train_pair,
    train_stacked,
    unstackable,
    why_untrainable,
)
from fedtide.learn.local import LocalTrainer
from fedtide.learn.steps import Gradient, Steps, Stepwise, Train
from fedtide.learn.training import Training

RECEIVED_BYTES = 2**28
"""Bytes of what clients receive, for those that work in step: they may hold as much of their own."""

Cut = Callable[[Tensor, int, Copies | None, int], list[Tensor]]
"""(rows of clients, bytes of a model, the stack, batch size) -> positions of clients that go together."""


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

    def alone(self) -> Any:
        """Compute the request for this client only."""
        return self._drawing(self.request.alone)

    def _drawing(self, run: Callable[[], Any]) -> Any:
        with drawn_from(self.random):
            try:
                return run()
            finally:
                self.random = drawing()


@dataclass(frozen=True)
class Together:
    """Clients that work in step.

    Args:
        host: algorithm, population, memory.
        cut: cuts clients into those that go together.
        stacks: what trains several copies of each model, by `stack_key`; None where that cannot be.
    """

    host: Host
    cut: Cut
    stacks: dict[Hashable, Copies | None] = field(default_factory=dict)

    def answers(self, ask: Ask, payload: Tree) -> Iterator[tuple[int, Answer | None]]:
        """Yield clients with their answers, in the order in which they are done."""
        counts = self.host.population.counts(ask.clients, "train", ask.moment)
        received = next((size_in_bytes(each) for _, each in ask.sent(payload)), 0)
        for part in self.cut(counts, received, None, 0):
            yield from self._in_step(ask.of(part), payload)

    def _in_step(self, ask: Ask, payload: Tree) -> Iterator[tuple[int, Answer | None]]:
        working = list(self._begun(ask, payload))
        for each in working:
            answer = each.resume(None)
            if each.request is None:
                yield each.client, answer
        while working := [each for each in working if each.request is not None]:
            groups: dict[Hashable, list[Working]] = {}
            for each in working:
                groups.setdefault(each.request.key, []).append(each)
            for group in groups.values():
                for each, result in self._results(group):
                    answer = each.resume(result)
                    if each.request is None:
                        yield each.client, answer

    def _begun(self, ask: Ask, payload: Tree) -> Iterator[Working]:
        clients, work = self.host.clients, self.host.algorithm.works[ask.question]
        assert isinstance(work, Stepwise | Training)
        shards = self.host.population.shards(ask.clients, ask.moment)
        for (client, received), shard in zip(ask.sent(payload), shards, strict=True):
            rng = clients.key(ask, client)
            steps = work.start(*clients.given(ask, client, received, shard, rng))
            with drawn_from(rng.number):
                random = drawing()
            yield Working(client, steps, random)

    def _results(self, group: list[Working]) -> Iterator[tuple[Working, Any]]:
        """Yield clients with the results of equal requests, each of which may be lost when the next is taken."""
        first = group[0].request
        if hasattr(first, "together"):
            yield from zip(group, first.together([each.request for each in group]), strict=True)
            return
        if isinstance(first, Train | Gradient):
            least = 2 if first.training.task.scratch.needs_pairs else 1
            able = [each for each in group if each.rows >= least]  # whoever is not cannot show what can be stacked
            if able and (stack := self._stack(able[0].request.training)) is not None:
                group = [each for each in group if each.rows < least]
                yield from self._trained(stack, sorted(able, key=lambda each: -each.rows))
        for each in group:
            yield each, each.alone()

    def _trained(self, stack: Copies, group: list[Working]) -> Iterator[tuple[Working, Any]]:
        first: Train = group[0].request.training
        rate = first.local.lr * first.local.lr_schedule(first.moment)
        counts = torch.tensor([each.rows for each in group])
        for cut in self.cut(counts, size_in_bytes(first.weights), stack, first.local.batch_size):
            some = [group[k] for k in cut.tolist()]
            requests: list[Train] = [each.request.training for each in some]
            terms = None if first.term is None else [request.term for request in requests]
            shards, rngs = [request.shard for request in requests], [request.rng for request in requests]
            received = [request.weights for request in requests]
            losses = [request.objective for request in requests]
            fit = train_stacked(
                stack, first.local, terms, received, shards, first.moment, rngs, losses, features=first.features
            )
            for each, part in zip(some, fitted_parts(fit, received, rate), strict=True):
                yield each, each.request.result(part)

    def _stack(self, request: Train) -> Copies | None:
        """Return what trains several copies of a model; None if that cannot be."""
        if unstackable(request.task, request.local, request.term, request.objective) is not None:
            return None
        if request.loss is not None and getattr(request.loss, "alike", None) is None:  # a stack for this client alone
            return None
        if request.stack not in self.stacks:
            self.stacks[request.stack] = tried_stack(request)
        return self.stacks[request.stack]


def tried_stack(request: Train) -> Copies | None:
    """Return what trains several copies of a model; None if two of them on some samples cannot be trained."""
    task, few, loss = request.task, request.shard.pick(slice(0, 2)), request.objective
    stack = stack_of(task, torch.device(task.device), tuple(few.x.shape[1:]), loss)
    failed = why_untrainable(
        lambda: train_pair(stack, LocalTrainer(), None, request.weights, few, loss, features=request.features)
    )
    return stack if failed is None else None
