"""Construction of a population from rows and settings: groups, partition, parts, held-out clients."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fedtide.core.base import PARTS
from fedtide.core.errors import FedtideError, refused
from fedtide.core.rng import Rng
from fedtide.data.partition import IID, Groups, HeldOutClients, Natural, OneGroup, Partition, Split, deal, remove_labels
from fedtide.data.population import Population
from fedtide.data.ragged import Ragged, Spans, part_sizes, rank_rows
from fedtide.data.rows import GeneratedRows, Rows
from fedtide.data.saved import Saved
from fedtide.data.shift import Shift
from fedtide.data.shift.how import Rotation as Turned
from fedtide.data.transforms import Prepare
from fedtide.fields.user_code import build_part

LEFT = "data.without_clients"
"""Key of the clients that have left."""


def build(
    rows: Rows | GeneratedRows,
    partition: Partition | None = None,
    groups: Groups = OneGroup(),
    split: Split = Split(),
    held_out_clients: HeldOutClients = HeldOutClients(),
    shift: Shift = Shift(),
    seed: int = 0,
    *,
    dealing: int | None = None,
    transforms: tuple[Prepare, ...] = (),
    public_samples: int = 0,
    without_clients: Sequence[str] = (),
) -> Population:
    """Build a population by dealing rows to clients.

    If rows have no time, the scales, means for gaps and categories of their features become those of the training rows.

    Args:
        rows: the samples.
        partition: the rule by which rows are dealt within each group; None means natural clients if the rows have
            them, else IID.
        groups: the assignment of rows to groups; clients are divided equally between groups, except with `ByGroup`.
        split: the train, validation and test part of each client.
        held_out_clients: clients for evaluation only.
        shift: the change over time: who, what, how.
        seed: the seed of all random draws: of the dealing, and of the shift over time.
        dealing: a separate seed for the dealing, so that populations with different `seed` hold the same rows.
        transforms: transforms of the images that clients receive, in order.
        public_samples: number of training rows that no client holds and that are public without their labels.
        without_clients: names, or numbers, of clients that have left.

    >>> toy = Rows("toy", torch.zeros(40, 2), torch.arange(40) % 2, classes=2)
    >>> population = build(toy, IID(clients=4), split=Split(val=0.0, test=0.2))
    >>> population.registered, population.counts(population.clients, "train").tolist()
    (4, [8, 8, 8, 8])
    """
    if partition is None:
        named = isinstance(rows, GeneratedRows) or rows.client is not None
        partition = Natural() if named else IID()
    if split.merge:
        rows, split = _merged(rows, split)
    val_from = test_from = math.inf
    in_time = split.by == "time"
    if in_time:
        _check_in_time(shift, held_out_clients)
        val_from, test_from = split.in_time(rows)
    if isinstance(rows, GeneratedRows):
        _check_generated(rows, partition, groups, held_out_clients, shift, public_samples)
        # The first rows of a client are for testing, the next for validation, the others for training.
        shares = split.val, 0.2 if split.test is None else split.test
        n_test, n_val = map(int, part_sizes(np.array(rows.each), *shares))
        sizes = {"test": n_test, "val": n_val, "train": rows.each - n_test - n_val}
        first = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
        spans = {part: Spans(rows.clients, rows.each, first[part], sizes[part]) for part in PARTS}
        group = torch.zeros(1, dtype=torch.int64).expand(rows.clients)  # one stored number for all clients
        people = Population(rows, spans, group, ("all",), rows.clients, shift, seed, transforms=transforms)
        return people.without(without_clients, LEFT)
    rule: Any = build_part(partition, "data.partition", ("clients", "deal", "by_labels", "shares_rows"))
    if isinstance(rule, Saved):
        people = replace(_replay(rows, rule, shift, seed, public_samples), transforms=transforms)
        return _fit(people.without(without_clients, LEFT))
    rng = Rng(seed if dealing is None else dealing).at("partition")
    ahead = getattr(shift.what, "ahead", False)
    if ahead:
        rows, split = _without_test(rows, split, shift)
    if rule.shares_rows and not ahead and rows.held_out is None:
        # Clients that share rows have a common test set, so that no client tests on a training row of another.
        fraction = 0.2 if split.test is None else split.test
        picked = rng.at("common").numpy().permutation(len(rows))[: round(fraction * len(rows))]
        mask = torch.zeros(len(rows), dtype=torch.bool).index_fill_(0, torch.from_numpy(picked), True)
        rows, split = replace(rows, held_out=_from(rows, test_from) if in_time else mask), replace(split, test=0.0)
    if getattr(rule, "kind", "") == "rotation" and shift.how.kind == "identity":
        shift = replace(shift, how=Turned(rule.angles))
    samples = rows if rows.steps is None else remove_labels(rows, rule, groups)
    early = replace(samples, held_out=_from(samples, min(val_from, test_from))) if in_time else samples
    public = _public(early, groups, public_samples, rng.at("public"))
    free = torch.ones(len(rows), dtype=torch.bool).index_fill_(0, public, False)
    dealt = deal(samples, free, rule, groups, held_out_clients, rng)
    empty = (dealt.seen.counts == 0).nonzero().flatten().tolist()
    if empty and len(dealt.seen.rows) and getattr(rule, "min_samples", 1):
        raise FedtideError(f"data.partition: client {empty[0]} has no rows; allowed: fewer clients, or more rows")
    own_test = 0.0 if len(dealt.test.rows) or (held_out_clients.clients and rows.held_out is not None) else 0.2
    fraction = own_test if split.test is None else split.test
    if fraction and len(dealt.test.rows):
        but = f"{rows.name} has a test set of its own, which is dealt to the clients"
        raise refused("data.split.test", fraction, "0, or data.held_out_clients.clients of 1 or more", but)
    outside, labeled = dealt.held_out_clients, held_out_clients.labeled
    if in_time:
        border = (_from(rows, val_from).int() + _from(rows, test_from))[dealt.seen.rows.long()]
        train, val, test = (dealt.seen.only(border == number) for number in range(3))
        outside = outside.only(_from(rows, test_from)[outside.rows.long()])
    elif rule.shares_rows and not ahead and getattr(rule, "kind", "") != "rotation" and (split.val or fraction):
        # A shared row has one part for all, so that no client is judged by what another trains on.
        n_test, n_val = map(int, part_sizes(np.array(len(rows)), split.val, fraction))
        order, part = torch.from_numpy(rng.at("parts").numpy().permutation(len(rows))), torch.zeros(len(rows)).byte()
        part[order[:n_test]], part[order[n_test : n_test + n_val]] = 2, 1
        train, val, test = (dealt.seen.only(part[dealt.seen.rows.long()] == number) for number in range(3))
    else:
        train, val, test = divide(dealt.seen, split.val, fraction, rng.at("divide").numpy())
    if len(dealt.test.rows) or ahead:
        test = train if ahead else dealt.test
    known_rows, checked, judged = (Ragged.empty(len(outside)),) * 2 + (outside,)
    if labeled:
        known_rows, checked, judged = divide(outside, split.val, 1 - labeled, rng.at("unseen").numpy())
    pairs = {"train": [train, known_rows], "val": [val, checked], "test": [test, judged]}
    parts = {part: Ragged.join(pair) for part, pair in pairs.items()}
    clients = dealt.group, dealt.names, len(dealt.seen)
    names = dealt.client_names
    people = Population(rows, parts, *clients, shift, seed, names=names, transforms=transforms, public=public)
    return _fit(people.without(without_clients, LEFT))


def _fit(people: Population) -> Population:
    """Return the population with features made by its training rows alone: by the others models are judged."""
    rows = cast(Rows, people.rows)
    rows_fitted = rows.fitted(people.trained_on)
    return people if rows_fitted is rows else replace(people, rows=rows_fitted)


def _merged(rows: Rows | GeneratedRows, split: Split) -> tuple[Rows, Split]:
    """Return rows and split with the source's own test set among all other rows."""
    if isinstance(rows, GeneratedRows) or rows.held_out is None or not bool(rows.held_out.any()):
        raise refused("data.split.merge", True, "false", f"{rows.name} has no test set of its own")
    return replace(rows, held_out=None), replace(split, merge=False)


def _without_test(rows: Rows, split: Split, shift: Shift) -> tuple[Rows, Split]:
    """Return rows and split without a test set, because rows to come are the test."""
    kind = getattr(shift.what, "kind", "")
    but = f"shift.what is '{kind}', which tests on rows as they come"
    if split.test:
        raise refused("data.split.test", split.test, "0, or another kind of shift.what", but)
    if rows.held_out is not None and bool(rows.held_out.any()):
        raise refused("data.source", rows.name, "a source without a test set of its own", but)
    return replace(rows, held_out=None), replace(split, test=0.0)


def _from(rows: Rows, begin: float) -> Tensor:
    """Return the mask (rows,) of those from a time on."""
    assert rows.time is not None
    return rows.time >= begin


def _check_in_time(shift: Shift, held_out_clients: HeldOutClients) -> None:
    """Raise for what divides rows in time by itself, and for what would take later rows for earlier ones."""
    kind = getattr(shift.what, "kind", "")
    if kind != "static":
        raise refused("data.split.by", "time", "'random'", f"shift.what is '{kind}', which says itself when rows come")
    if held_out_clients.labeled:
        raise refused("data.held_out_clients.labeled", held_out_clients.labeled, "0 if data.split.by is 'time'")


def _public(rows: Rows, groups: Groups, wanted: int, rng: Rng) -> Tensor:
    """Draw public training rows from all groups, sorted, with the domains taken in turn."""
    if not wanted:
        return torch.empty(0, dtype=torch.int64)
    trained = groups.of(rows)[0] >= 0
    if rows.held_out is not None:
        trained &= ~rows.held_out.numpy()
    order = rng.numpy().permutation(np.flatnonzero(trained))
    if not 0 <= wanted < len(order):
        allowed = f"0 or more and fewer than {len(order)}, the training rows of {rows.name}"
        raise refused("data.public_samples", wanted, allowed)
    domain = np.zeros(len(order), dtype=np.int64) if rows.domain is None else rows.domain.numpy()[order]
    return torch.from_numpy(np.sort(order[np.lexsort((domain, rank_rows(domain)))[:wanted]]))


def _replay(rows: Rows, partition: Saved, shift: Shift, seed: int, public_samples: int) -> Population:
    saved = partition.fitting(len(rows), rows.name)
    public = saved["public"]
    if public_samples not in (0, len(public)):
        raise refused("data.public_samples", public_samples, f"0, or as many as in {partition.path}, {len(public)}")
    parts = {name: Ragged(part["start"], part["rows"]) for name, part in saved["parts"].items()}
    clients = saved["group"], tuple(saved["group_names"]), saved["registered"]
    names = tuple(saved["names"])
    return Population(rows, parts, *clients, shift, seed, names=names, public=public[:public_samples])


def divide(lists: Ragged, val: float, test: float, draw: np.random.Generator) -> tuple[Ragged, Ragged, Ragged]:
    """Divide each client's rows at random into train, val and test.

    A client with two rows or more gets at least one test row if `test` > 0. It gets at least one validation row if
    `val` > 0 and ten rows are left.
    """
    if not len(lists) or not (val or test):
        return lists, Ragged.empty(len(lists)), Ragged.empty(len(lists))
    blocks = [_divided(block, val, test, draw) for block in lists.blocks()]
    train_part, val_part, test_part = (Ragged.join(parts) for parts in zip(*blocks, strict=True))
    return train_part, val_part, test_part


def _divided(lists: Ragged, val: float, test: float, draw: np.random.Generator) -> list[Ragged]:
    """Return the rows of some clients for training, validation and testing."""
    counts, owner = lists.counts.numpy(), lists.owner.numpy()
    n_test, n_val = part_sizes(counts, val, test)
    place = np.empty(len(owner), dtype=np.int64)
    place[np.lexsort((draw.random(len(owner)), owner))] = rank_rows(owner)
    part = torch.from_numpy((place < (n_test + n_val)[owner]).astype(np.int8) + (place < n_test[owner]))
    return [lists.only(part == number) for number in range(3)]


MOST = 100_000_000
"""Maximum number of registered clients: each takes some dozens of bytes while participants are drawn."""


def _check_generated(
    rows: GeneratedRows, partition: Any, groups: Groups, held_out: HeldOutClients, shift: Shift, public_samples: int
) -> None:
    """Raise for settings that need all rows at once or deal them to clients."""
    wrong = [
        ("data.partition.kind", partition.kind, "natural"),
        ("data.partition.clients", getattr(partition, "clients", None), None),
        ("data.groups.by", groups.by, "none"),
        ("data.held_out_clients.clients", held_out.clients, 0),
        ("data.public_samples", public_samples, 0),
        ("shift.what.kind", shift.what.kind, "static"),
        ("shift.how.kind", shift.how.kind, "identity"),
    ]
    but = f"rows of '{rows.name}' are made client by client when they are asked for"
    for key, value, allowed in wrong:
        if value != allowed:
            raise refused(key, value, "none" if allowed is None else repr(allowed), but)
    if rows.clients > MOST:
        raise refused("data.source.clients", rows.clients, f"at most {MOST}")
    if partition.min_samples > rows.each:
        raise refused("data.partition.min_samples", partition.min_samples, f"at most {rows.each}")
