"""A node's worker that answers as it should, but in some rounds, by their number."""

import json
import math
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from fedtide.core import codec
from fedtide.core.base import Weighted
from fedtide.core.trees import map_leaves
from fedtide.site.node_process import answer_questions
from fedtide.site.seat import node_of

LIES = ("honest", "garbage", "nan", "shape", "weight", "version", "lost", "large", "honest")
LARGE = 400_000_000


def changed(tree, change):
    """Return a tree with every sum changed."""
    if isinstance(tree, Weighted):
        return change(tree)
    return {key: changed(value, change) for key, value in tree.items()} if isinstance(tree, dict) else tree


CHANGES = {
    "nan": lambda sum: Weighted(map_leaves(lambda value: value * math.nan, sum.value), sum.weight),
    "shape": lambda sum: Weighted(map_leaves(lambda value: torch.ones(1, 7), sum.value), sum.weight),
    "weight": lambda sum: Weighted(sum.value, 1e30),
}


def handle(node, header, payload):
    number = header.get("moment", {}).get("round", 0)
    lie = LIES[number] if header.get("kind") == "ask" and number < len(LIES) else "honest"
    aside = node.folder.with_name("aside")
    if lie == "lost":
        node.folder.rename(aside)
    told, answer = node.handle(header | {"protocol": 0} if lie == "version" else header, payload)
    if lie == "lost":
        aside.rename(node.folder)
    if lie == "garbage":
        answer = bytes(range(256)) * 10
    if lie == "large":
        answer = bytes(LARGE)
    if lie in CHANGES:
        answer = codec.to_bytes(changed(codec.decode_message(answer), CHANGES[lie]))
    return told, answer


if __name__ == "__main__":
    liar = node_of(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    answer_questions(Connection(int(sys.argv[2])), lambda header, payload: handle(liar, header, payload), print)
