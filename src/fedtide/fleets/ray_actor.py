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

from fedtide._version import installed
from fedtide.core import codec
from fedtide.core.trees import Tree, detached, raw
from fedtide.fleets.allocator import keep_freed
from fedtide.fleets.worker import Channel, LastShared, SharedRef, error_message, own_function

Packed = tuple[str, dict[str, np.ndarray[Any, Any]]]
"""A tree for Ray: a header, and each of its arrays as bytes, which Ray lays into shared memory one by one, aligned."""

PackedMessage = tuple[str, Packed]
"""Kind ("message", "done" or "error") and content of a message."""

POLL_SECONDS = 0.5
"""Seconds that an actor waits for a message before it returns none."""


def packed(tree: Tree) -> Packed:
    """Pack a tree for Ray; the arrays are views of its tensors.

    >>> unpacked(packed({"w": torch.ones(2), "n": (3, None)}))
    {'w': tensor([1., 1.]), 'n': (3, None)}
    """
    arrays, skeleton = codec.encode(tree)
    layout = {name: [str(array.dtype).removeprefix("torch."), list(array.shape)] for name, array in arrays.items()}
    return json.dumps({"tree": skeleton, "arrays": layout}), {name: raw(a).numpy() for name, a in arrays.items()}


def unpacked(parcel: Packed, *, copy: bool = True) -> Tree:
    """Unpack a tree; without a copy its tensors lie in shared memory, which must not be written to."""
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


class RayChannel:
    """The channel between a call and the pool that made it."""

    def __init__(self) -> None:
        self.outbox: queue.SimpleQueue[PackedMessage] = queue.SimpleQueue()
        self.stop = threading.Event()
        self.shared: dict[str, Packed] = {}
        self._last = LastShared()

    def send(self, value: Tree) -> None:
        """Send something small on the way."""
        self.outbox.put(("message", packed(detached(value))))

    def get(self, ref: SharedRef) -> Tree:
        """Return a shared tree, which stays in the node's shared memory."""
        return self._last.get(ref, lambda: unpacked(self.shared[ref.name], copy=False))

    def stopping(self) -> bool:
        """Tell whether a person has asked to stop."""
        return self.stop.is_set()


def run_call(function: str, arguments: Packed, channel: Channel) -> PackedMessage:
    """Run a call and return its result or error."""
    try:
        return "done", packed(own_function(function)(unpacked(arguments), channel))
    except Exception as error:
        return "error", packed(error_message(error))


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
        keep_freed()
        self._channel = RayChannel()

    def about(self) -> dict[str, Any]:
        """Return the process id and the versions of this actor."""
        return {"process": os.getpid(), "fedtide": installed(), "torch": torch.__version__}

    def call(self, function: str, arguments: Packed, names: list[str], *lent: Packed) -> list[PackedMessage]:
        """Run a short call to its end."""
        self._channel.shared = dict(zip(names, lent, strict=True))
        return [run_call(function, arguments, self._channel)]

    def start(self, function: str, arguments: Packed, stop: bool) -> None:
        """Start a long call, which may be asked at once to end."""
        channel = self._channel = RayChannel()
        if stop:
            channel.stop.set()
        threading.Thread(target=lambda: channel.outbox.put(run_call(function, arguments, channel)), daemon=True).start()

    def poll(self, stop: bool) -> list[PackedMessage]:
        """Return the messages of the long call since the last poll; wait a while for one.

        Args:
            stop: whether it should end soon.
        """
        if stop:
            self._channel.stop.set()
        said: list[PackedMessage] = []
        try:
            said.append(self._channel.outbox.get(timeout=POLL_SECONDS))
            while True:
                said.append(self._channel.outbox.get_nowait())
        except queue.Empty:
            return said
