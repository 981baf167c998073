"""The other end of a `fedtide.fleets.ray_pool.RayPool`: an actor that takes calls, and trees as Ray carries them."""

from __future__ import annotations

import json
import os
import queue
import threading
import warnings
from typing import Any

import numpy as np
import torch

import fedtide
from fedtide.core import codec
from fedtide.core.trees import Tree, detached, raw
from fedtide.fleets.worker import Held, Lent, Listener, own_function, told_of

Packed = tuple[str, dict[str, np.ndarray[Any, Any]]]
"""A tree for Ray: a header, and each of its arrays as bytes, which Ray lays into shared memory one by one, aligned."""

Said = tuple[str, Packed]
"""A message, a result ("done") or an error, and what it says."""

PATIENCE = 0.5
"""Seconds that an actor waits for something to tell before it says that there is nothing."""


def packed(tree: Tree) -> Packed:
    """A tree as Ray carries it; the arrays are views of its tensors.

    >>> unpacked(packed({"w": torch.ones(2), "n": (3, None)}))
    {'w': tensor([1., 1.]), 'n': (3, None)}
    """
    arrays, skeleton = codec.encode(tree)
    layout = {name: [str(array.dtype).removeprefix("torch."), list(array.shape)] for name, array in arrays.items()}
    return json.dumps({"tree": skeleton, "arrays": layout}), {name: raw(a).numpy() for name, a in arrays.items()}


def unpacked(parcel: Packed, *, copy: bool = True) -> Tree:
    """The tree that `packed` was given; without a copy its tensors lie in shared memory, which nobody may write to."""
    header, buffers = json.loads(parcel[0]), parcel[1]
    arrays = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it cannot be written to
        for name, (dtype, shape) in header["arrays"].items():
            if copy or not buffers[name].size:  # an array of nothing has no stride
                flat = torch.empty(buffers[name].size, dtype=torch.uint8)
                flat.numpy()[:] = buffers[name]
            else:
                flat = torch.from_numpy(buffers[name])
            arrays[name] = flat.view(getattr(torch, dtype)).reshape(shape)
    return codec.decode(arrays, header["tree"])


class RayLine:
    """Who made a call, as the call sees it: a `Listener`."""

    def __init__(self) -> None:
        self.told: queue.SimpleQueue[Said] = queue.SimpleQueue()
        self.stop = threading.Event()
        self.given: dict[str, Packed] = {}
        self._held = Held()

    def send(self, value: Tree) -> None:
        """Tell something on the way."""
        self.told.put(("message", packed(detached(value))))

    def lent(self, lent: Lent) -> Tree:
        """What the pool lends; it stays in the node's shared memory."""
        return self._held.get(lent, lambda: unpacked(self.given[lent.name], copy=False))

    def stopping(self) -> bool:
        """Whether a person has asked to stop."""
        return self.stop.is_set()


def answered(function: str, arguments: Packed, line: Listener) -> Said:
    """What came of a call."""
    try:
        return "done", packed(own_function(function)(unpacked(arguments), line))
    except Exception as error:
        return "error", packed(told_of(error))


class Actor:
    """Runs calls in a process of the cluster, one at a time.

    Args:
        directory: from which relative paths of the configuration start, where the node has it.
        threads: of torch.
    """

    def __init__(self, directory: str, threads: int) -> None:
        if os.path.isdir(directory):
            os.chdir(directory)
        torch.set_num_threads(threads)
        self._line = RayLine()

    def about(self) -> dict[str, Any]:
        """Who this is, and with what it computes."""
        return {"process": os.getpid(), "fedtide": fedtide.__version__, "torch": torch.__version__}

    def call(self, function: str, arguments: Packed, names: list[str], *lent: Packed) -> list[Said]:
        """Run a short call to its end."""
        self._line.given = dict(zip(names, lent, strict=True))
        return [answered(function, arguments, self._line)]

    def begin(self, function: str, arguments: Packed, stop: bool) -> None:
        """Begin a long call, which may learn at once that it is to end."""
        line = self._line = RayLine()
        if stop:
            line.stop.set()
        threading.Thread(target=lambda: line.told.put(answered(function, arguments, line)), daemon=True).start()

    def told(self, stop: bool) -> list[Said]:
        """What the long call has said since it was last asked; waits a while for something.

        Args:
            stop: whether it should end soon.
        """
        if stop:
            self._line.stop.set()
        said: list[Said] = []
        try:
            said.append(self._line.told.get(timeout=PATIENCE))
            while True:
                said.append(self._line.told.get_nowait())
        except queue.Empty:
            return said
