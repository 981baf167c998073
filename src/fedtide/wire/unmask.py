"""The server's half of masks (`fedtide.wire.masks`): it takes them off a sum, with secrets or shares of clients."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedtide.wire.masks import (
    SEED,
    Context,
    Dealt,
    Shown,
    add_stream,
    agree,
    derived,
    key_of_sum,
    link,
    link_seed,
    put_under,
    seed_of_sum,
    seeds_of,
    spell_key,
)
from fedtide.wire.shares import gather


@dataclass(frozen=True, repr=False)
class Vanished:
    """The secrets of a client that vanished, by the shares of others.

    Args:
        seed: its b.
        links: by client that was asked and is not in the list, what they share.
    """

    seed: bytes
    links: Mapping[int, bytes]


@dataclass(frozen=True)
class Wrong:
    """A share that does not count.

    Args:
        client: of whose secret.
        place: of the node whose share does not open; None if shares open, and give another secret than the client said.
    """

    client: int
    place: int | None


def recovered(
    context: Context,
    key: str,
    dealt: Mapping[int, Dealt],
    lost: Collection[int],
    gone: Collection[int],
    shown: Mapping[int, Shown],
) -> tuple[dict[int, Vanished], list[Wrong]]:
    """Return by client the secrets of those that vanished, if enough right shares came of all, and what is wrong.

    Args:
        context: which sum.
        key: what it was asked with, as of `Question`.
        dealt: what clients dealt.
        lost: those that vanished.
        gone: those that were asked, and are not in the list.
        shown: by place of a node, the unsealed secrets of its first client.
    """
    wrong = list[Wrong]()

    def gather_right(client: int, kind: Literal["seeds", "keys"]) -> bytes | None:
        """Return the secret of a client's b, or of its key, if shares give the one that it said."""
        dealing = dealt[client]
        keys = {place: getattr(helper, kind)[client] for place, helper in shown.items()}
        secret, places = gather(getattr(dealing, kind), keys, dealing.needed)
        wrong.extend(Wrong(client, place) for place in places)
        if secret is None:
            return None
        if kind == "seeds":
            is_right = derived(secret, context.info("digest", client)) == dealing.digest
        else:
            is_right = spell_key(key_of_sum(secret, context, client)) == dealing.public
        wrong.extend([] if is_right else [Wrong(client, None)])
        return secret if is_right else None

    seeds = {client: gather_right(client, "seeds") for client in lost}
    secret_keys = {client: gather_right(client, "keys") for client in gone}
    if None in seeds.values() or None in secret_keys.values():
        return {}, wrong
    private = {k: key_of_sum(secret, context, k) for k, secret in secret_keys.items() if secret is not None}
    return {
        v: Vanished(
            seed_of_sum(secret, context, v),
            {k: link_seed(agree(private[k], dealt[v].public), context, key, v, k) for k in gone},
        )
        for v, secret in seeds.items() if secret is not None
    }, wrong  # fmt: skip


def unsealed(shown: Mapping[int, Shown]) -> dict[int, Shown]:
    """Return the secrets of all clients that are left of a list, of which each opens those of the others."""
    return {i: put_under(secret, [shown[k].opens[i] for k in shown if k != i]) for i, secret in shown.items()}


def unmasked(
    masked: Mapping[int, Tensor],
    shown: Mapping[int, Shown],
    parts: Sequence[slice | Tensor] = (slice(None),),
    vanished: Mapping[int, Vanished] | None = None,
    numbers: Sequence[int] = (0,),
) -> list[Tensor]:
    """Return parts of the sum of masked vectors without their masks, each int64.

    Args:
        masked: the vector that each client in the list sent.
        shown: what each of them that is left gave to open these parts.
        parts: their places in a vector.
        vanished: secrets of the others in the list.
        numbers: those of the parts, of which secrets of the others are made.
    """
    secrets = unsealed(shown)
    seeds, links = {i: secrets[i].sealed for i in secrets}, {i: secrets[i].links for i in secrets}
    for i, lost in (vanished or {}).items():
        seeds[i] = seeds_of(lost.seed, numbers)
        links[i] = {k: seeds_of(secret, numbers) for k, secret in lost.links.items()}
    sums = []
    for number, part in enumerate(parts):
        seed = slice(SEED * number, SEED * (number + 1))
        total = np.zeros_like(next(iter(masked.values())).numpy().view(np.uint64)[part])
        for vector in masked.values():
            total += vector.numpy().view(np.uint64)[part]
        for i in masked:
            add_stream(total, seeds[i][seed], add=False)
            for j, secrets_of_parts in links[i].items():
                link(total, i, j, secrets_of_parts[seed], off=True)
        sums.append(torch.from_numpy(total.view(np.int64)))
    return sums
