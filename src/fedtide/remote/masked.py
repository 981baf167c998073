"""Masked sums between nodes and server: what a node does with them, and how the server opens them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtide.core import codec
from fedtide.core.errors import FedtideError, refused
from fedtide.core.trees import Tree
from fedtide.fleets.ask import Ask
from fedtide.remote.messages import KeyHeader, MaskedHeader, MaskHeader, UnmaskHeader, WorkHeader, read
from fedtide.wire.masks import ALONE, SEED, Bundle, Context, Masker, Question, Shown, hidden

# -- at a node ---------------------------------------------------------------------------------------------------------


def objection(masker: Masker, asked: MaskedHeader, fewest: int) -> str | None:
    """Return why a node does not mask its answers to a question, or does not open a sum; None where it does."""
    mask = asked.mask
    if mask is None:
        return "its study masks sums, and this one would not be"
    for client in asked.clients:
        peers = mask.peers.get(_slot(asked, client), {})
        if peers.get(str(client)) != masker.node or not set(peers.values()) <= mask.keys.keys():
            return "the server does not say who else is asked"
        if len(peers) < fewest:
            return f"a sum of {len(peers)} clients is not masked; allowed: {fewest} or more"
        if not hidden({int(each): mask.keys[node].bundle().public for each, node in peers.items()}, fewest):
            return ALONE
    try:
        masker.check({name: key.bundle() for name, key in mask.keys.items()})
    except FedtideError as error:
        return str(error)
    return None


def masked(masker: Masker, asked: WorkHeader, received: Tree, sent: Mapping[int, Tree]) -> dict[int, Tree]:
    """Return what clients send, under the masks of a question and of what they received."""
    digests = {
        slot: hashlib.sha256(codec.to_bytes(received if asked.slot is None else received[int(slot)])).hexdigest()
        for slot in {_slot(asked, client) for client in sent}
    }
    name = json.dumps([asked.moment.round, asked.purpose])
    what = [asked.question, name, asked.moment.rounds, asked.moment.seconds, sorted(asked.reveal)]
    forms = {slot: form.model_dump() for slot, form in (asked.forms or {}).items()}
    about = {slot: Question(name, json.dumps([*what, forms.get(slot), digest])) for slot, digest in digests.items()}
    mask = asked.mask
    assert mask is not None
    return {
        client: {
            **each,
            "total": masker.masked(
                _context(asked, mask, client),
                client,
                each["total"],
                _publics(mask, asked, client),
                about[_slot(asked, client)],
            ),
        }
        for client, each in sent.items()
    }


def show(masker: Masker, asked: UnmaskHeader, fewest: int) -> dict[int, Tree]:
    """Return by client what opens the sum that it is in."""
    shown = {}
    for client in asked.clients:
        alive = asked.alive.get(_slot(asked, client), [])
        one = masker.show(_context(asked, asked.mask, client), client, alive, fewest)
        shown[client] = {"sealed": _packed(one.sealed), "opens": _table(one.opens), "links": _table(one.links)}
    return shown


def _slot(asked: MaskedHeader, client: int) -> str:
    return "0" if asked.slot is None else str(asked.slot[str(client)])


def _context(asked: MaskedHeader, mask: MaskHeader, client: int) -> Context:
    version = (asked.version[0], asked.version[1])
    return Context(asked.run, version, int(_slot(asked, client)), mask.attempt)


def _publics(mask: MaskHeader, asked: MaskedHeader, client: int) -> dict[int, bytes]:
    peers = mask.peers[_slot(asked, client)]
    return {int(each): mask.keys[node].bundle().public for each, node in peers.items()}


# -- on the way --------------------------------------------------------------------------------------------------------


def _packed(secret: bytes) -> Tensor:
    return torch.frombuffer(bytearray(secret), dtype=torch.uint8)


def _table(secrets: Mapping[int, bytes]) -> dict[str, Tensor]:
    clients = sorted(secrets)
    rows = torch.from_numpy(np.frombuffer(b"".join(secrets[client] for client in clients), np.uint8).copy())
    return {"clients": torch.tensor(clients, dtype=torch.int64), "secrets": rows.reshape(len(clients), SEED)}


def _secret(value: Any) -> bytes:
    if not isinstance(value, Tensor) or value.dtype != torch.uint8 or value.shape != (SEED,):
        raise refused("secret", value, f"{SEED} bytes")
    return value.numpy().tobytes()


def _secrets(value: Any) -> dict[int, bytes]:
    table = value if isinstance(value, dict) else {}
    clients, rows = table.get("clients"), table.get("secrets")
    if not isinstance(clients, Tensor) or not isinstance(rows, Tensor) or clients.dtype != torch.int64:
        raise refused("secrets", value, f"{SEED} bytes by client")
    if clients.dim() != 1 or rows.shape != (len(clients), SEED):
        raise refused("secrets", list(rows.shape), f"{SEED} bytes by client")
    return {client: _secret(row) for client, row in zip(clients.tolist(), rows, strict=True)}


def shown_of(tree: Tree) -> Shown:
    """Read what opens a sum, of bytes that anyone may have written.

    Raises:
        FedtideError: it is not that.
    """
    if not isinstance(tree, dict) or set(tree) != {"sealed", "opens", "links"}:
        raise refused("what opens a sum", tree, "sealed, opens, links")
    return Shown(_secret(tree["sealed"]), _secrets(tree["opens"]), _secrets(tree["links"]))


def bundle_of(tree: Tree) -> Bundle:
    """Read a node's key for masks, of bytes that anyone may have written.

    Raises:
        FedtideError: it is not that.
    """
    return read(KeyHeader, tree, "key for masks").bundle()


# -- at the server -----------------------------------------------------------------------------------------------------


@dataclass
class Attempts:
    """The tries of a server to have its sums masked and opened.

    Args:
        life: name of the server since it was started; a try of its earlier self is another one.
        signed: tells whether a key is signed by the registered one of its node; others would refuse to mask with it.
        keys: of the nodes that have said them.
    """

    life: str
    signed: Callable[[str, Bundle], bool] = lambda node, key: True
    keys: dict[str, Bundle] = field(default_factory=dict)
    _count: int = 0

    def name(self) -> str:
        """Return the name of a new try."""
        self._count += 1
        return f"{self.life}.{self._count}"

    def header(self, attempt: str, asked: Ask, nodes: Mapping[int, str]) -> dict[str, Any]:
        """Return how answers to a question are masked, in plain JSON.

        Args:
            attempt: name of the try.
            asked: the question, to those who are asked in this try.
            nodes: the node of each client.
        """
        names = sorted({nodes[client] for client in asked.clients.tolist()})
        peers = {
            str(slot): {str(client): nodes[client] for client in clients} for slot, clients in by_slot(asked).items()
        }
        return {"attempt": attempt, "keys": {name: KeyHeader.of(self.keys[name]) for name in names}, "peers": peers}


def by_slot(ask: Ask) -> dict[int, list[int]]:
    """Return the clients of each slot that has any, of 0 where there are no slots."""
    if ask.slot is None:
        return {0: ask.clients.tolist()} if len(ask.clients) else {}
    return {slot: ask.clients[ask.slot == slot].tolist() for slot in ask.slot.unique().tolist()}
