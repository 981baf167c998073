"""A stand-in for CUDA graphs: what a capture sees and does, on the CPU."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Tape(TorchDispatchMode):
    """Operations that are done again on the same storage, without Python, with numbers as they were.

    Unlike a capture it also does them, as what they return must be something; whoever captures undoes that.
    """

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        made = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, made))
        return made

    def replay(self):
        for function, args, kwargs, made in self.operations:
            if any(each.alias_info and not each.alias_info.is_write for each in function._schema.returns):
                continue  # a view
            again = function(*args, **kwargs)
            if not function._schema.is_mutable:
                several = isinstance(made, tuple | list)
                for into, each in zip(*((made, again) if several else ([made], [again])), strict=True):
                    into.copy_(each)


class Recorder:
    """Captures steps as `fedtide.learn.fast.captured.Graphs` does, and counts captures and replays."""

    def __init__(self):
        self.captures = self.replays = 0

    def __call__(self, step):
        step()
        with Tape() as tape:
            made = step()
        self.captures += 1

        def again():
            self.replays += 1
            tape.replay()

        return made, again
