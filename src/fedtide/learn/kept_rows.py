"""Rows that a client keeps beside those that it holds now."""

from collections.abc import Sequence
from dataclasses import replace

import torch

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
