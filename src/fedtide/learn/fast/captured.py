"""Steps of stacked clients captured as CUDA graphs: a GPU takes them again without Python, and all kernels at once.

A graph reads and writes where its capture did, with the numbers of Python that were there, and tells nobody when they
are others by now. So it is for rows of the same shapes and the same learning rate, all are dropped when storage has
moved, and the first replays of each must have the bits of the step itself: a run that was resumed captures at other
times. Where they have others, or a step cannot be captured, a stack goes on without graphs. As where steps are
recorded, a loss is taken to be a function of its arguments, and is called more often.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedtide.core.trees import Tree, detached, leaves, same
from fedtide.learn.fast.layer_stack import LayerStack
from fedtide.learn.fast.plan import Layer, Room
from fedtide.learn.task import Task

AFTER = 100
"""Steps of one kind before it is captured: that waits for the GPU, and a learning rate may be that of one round."""
GRAPHS = 32
"""Largest number of graphs, as each keeps the memory that its step takes."""
CHECKED = 2
"""Replays of a graph that are compared: the first has the rows of the capture, and cannot tell if others are read."""

Made = tuple[list[Tensor], Tensor, list[Tensor]]
"""What `LayerStack.gradient` returns."""
Captured = tuple[Made, Callable[[], object]]
"""What a step makes, in storage that each replay overwrites, and what replays it."""
Capture = Callable[[Callable[[], Made]], Captured]
"""Captures a step, which it may take any number of times: who asks puts the parameters back."""


class Graphs:
    """Captures steps as CUDA graphs, on one stream; each has memory of its own, so they replay in any order."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()

    def __call__(self, step: Callable[[], Made]) -> Captured:
        """Capture a step; what it makes is there after the first replay.

        Raises:
            RuntimeError: it cannot be captured, such as a step that waits for a number.
        """
        here, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        self.stream.wait_stream(here)
        try:
            with torch.cuda.stream(self.stream):  # `graph` does not leave its stream when a capture fails
                with _without_waiting():
                    step()  # libraries set themselves up on a stream at the first call
                with torch.cuda.graph(graph, stream=self.stream):
                    made = step()
        finally:
            here.wait_stream(self.stream)
        return made, graph.replay


@contextmanager
def _without_waiting() -> Iterator[None]:
    """Raise where the processor waits for the GPU: a capture would break there, and never end for torch's allocator."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@dataclass
class CapturedStep:
    """A captured step.

    Args:
        rows: what it reads.
        made: what it makes, in storage that the next replay overwrites.
        again: takes it.
        checks: replays that are still to be compared.
    """

    rows: Tree
    made: Made
    again: Callable[[], object]
    checks: int = CHECKED

    def __call__(self, rows: Tree) -> Made:
        """Take the step on rows of the same shapes."""
        for into, each in zip(leaves(self.rows), leaves(rows), strict=True):
            if each is not None:
                into.copy_(each)
        self.again()
        return self.made


class CapturedStack(LayerStack):
    """Several copies of a network of known layers, whose frequent steps are captured.

    Args:
        task: the model.
        layers: the layers of its model.
        room: where their numbers are.
        loss: a loss with `graded`.
        capture: captures a step.
    """

    def __init__(self, task: Task, layers: Sequence[Layer], room: Room, loss: Any, capture: Capture) -> None:
        super().__init__(task, layers, room, loss)
        self.capture: Capture | None = capture
        self.seen: dict[Hashable, int] = {}
        self.replays: dict[Hashable, CapturedStep] = {}
        self.grown = room.grown

    def gradient(self, params: list[Tensor], held: list[Tensor], *rows: Any, rate: float | None = None) -> Made:
        """Return the gradient and the loss of every client; with a rate, take a step in place of the gradient.

        They are in storage that the next step overwrites.
        """
        step = partial(super().gradient, params, held, rate=rate)
        # All shapes share storage, with padding in other places.
        self.fit(rows[0], "gradient" if rate is None else "descent")
        if self.room.grown != self.grown:
            self.seen, self.replays, self.grown = {}, {}, self.room.grown
        key = (rate, *(None if each is None else (each.shape, each.dtype) for each in leaves(rows)))
        self.seen[key] = self.seen.get(key, 0) + 1
        replay = self.replays.get(key)
        if replay is not None and not replay.checks:
            return replay(rows)
        if replay is None and (self.capture is None or self.seen[key] <= AFTER or len(self.replays) >= GRAPHS):
            return step(*rows)
        return self._checked(key, step, params, rows)

    def _checked(self, key: Hashable, step: Callable[..., Made], params: list[Tensor], rows: Tree) -> Made:
        """Take a step, and again as a graph; all are given up for good if that does not do the same."""
        before = detached(params)
        wanted = detached((params, *step(*rows)))
        torch._foreach_copy_(params, before)
        try:
            if key not in self.replays:
                assert self.capture is not None
                read = detached(rows)
                self.replays[key] = CapturedStep(read, *self.capture(partial(step, *read)))
                torch._foreach_copy_(params, before)
            replay = self.replays[key]
            said = None if same(wanted, (params, *replay(rows))) else "a replay has other bits"
            replay.checks -= 1
        except RuntimeError as error:
            said = " ".join(str(error).split())[:200]
        if said is not None:
            warnings.warn(f"steps of stacked clients are not captured as CUDA graphs: {said}", stacklevel=2)
            self.capture, self.replays = None, {}
            torch._foreach_copy_(params, wanted[0])
        return wanted[1:]
