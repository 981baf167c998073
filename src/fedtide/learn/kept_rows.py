"""Rows that a client keeps beside those that it holds now."""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from fedtide.core.base import Shard
from fedtide.learn.device import to_cpu


def keep_rows(shard: Shard) -> Shard:
    """Return the samples as a client keeps them: on the CPU, without validation samples."""
    return replace(shard, x=to_cpu(shard.x), fetch_val=None)


def merge_shards(shards: Sequence[Shard]) -> Shard:
    """Concatenate samples of several shards; a sample in several of them comes from the first."""
    first, *rest = shards
    for more in rest:
        first = first.joined(more.pick(~torch.isin(more.ids, first.ids)))
    return first


def pick_evenly(shard: Shard, most: int) -> Shard:
    """Return at most so many rows of a shard, as evenly by label as there are rows; of sequences the first ones.

    >>> y = torch.tensor([0, 0, 0, 0, 1, 2])
    >>> pick_evenly(Shard(torch.zeros(6, 1), y, torch.arange(6)), 4).y.tolist()
    [0, 0, 1, 2]
    """
    y = shard.y if shard.y.dim() == 1 else torch.zeros(len(shard), dtype=torch.int64)
    turn = F.one_hot(y).cumsum(0).gather(1, y[:, None])[:, 0]
    return shard.pick(turn.argsort(stable=True)[:most].sort().values)
