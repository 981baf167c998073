"""Construction of a population from rows and settings: groups, partition, parts, held-out clients."""

import math
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fedtide.core.base import PARTS
from fedtide.core.errors import FedtideError, refused
from fedtide.core.rng import Rng
from fedtide.data.partition import (
    IID,
    ByGroup,
    ByLabels,
    Groups,
    HeldOutClients,
    Natural,
    OneGroup,
    Partition,
    Rotation,
    Split,
    follow,
    with_limit,
)
from fedtide.data.population import Population
from fedtide.data.ragged import Ragged, Spans, count_pairs, part_sizes
from fedtide.data.rows import GeneratedRows, Rows
from fedtide.data.saved import Saved
from fedtide.data.shift import Shift
from fedtide.data.shift.how import Rotation as Turned
from fedtide.data.transforms import Prepare
from fedtide.fields.user_code import build_part


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

    >>> toy = Rows("toy", torch.zeros(40, 2), torch.arange(40) % 2, classes=2)
    >>> population = build(toy, IID(clients=4), split=Split(val=0.0, test=0.2))
    >>> population.registered, population.counts(population.clients, "train").tolist()
    (4, [8, 8, 8, 8])
    """
    if partition is None:
        named = isinstance(rows, GeneratedRows) or rows.client is not None
        partition = Natural() if named else IID()
    val_from = test_from = math.inf
    in_time = split.by == "time"
    if in_time:
        _check_in_time(shift, held_out_clients)
        val_from, test_from = split.in_time(rows)
    if isinstance(rows, GeneratedRows):
        check_generated(rows, partition, groups, held_out_clients, shift, public_samples)
        return generated_population(rows, split, shift, seed, transforms)
    rule: Any = build_part(partition, "data.partition", ("clients", "deal", "by_labels", "shares_rows"))
    if isinstance(rule, Saved):
        return _fit(replace(_replay(rows, rule, shift, seed, public_samples), transforms=transforms))
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
    if isinstance(rule, Rotation) and shift.how.kind == "identity":
        shift = replace(shift, how=Turned(rule.angles))
    samples = rows if rows.steps is None else _remove_labels(rows, rule, groups)
    early = replace(samples, held_out=_from(samples, min(val_from, test_from))) if in_time else samples
    public = _public(early, groups, public_samples, rng.at("public"))
    free = torch.ones(len(rows), dtype=torch.bool).index_fill_(0, public, False)
    deal = _natural if isinstance(rule, Natural) else _by_group
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
    return _fit(Population(rows, parts, *clients, shift, seed, names=names, transforms=transforms, public=public))


def _fit(people: Population) -> Population:
    """Return the population with features made by its training rows alone: by the others models are judged."""
    rows = cast(Rows, people.rows)
    rows_fitted = rows.fitted(people.trained_on)
    return people if rows_fitted is rows else replace(people, rows=rows_fitted)


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


def _remove_labels(rows: Rows, partition: Partition, groups: Groups) -> Rows:
    """Return sequences as rows of a single class; raise for partitions and groups that need labels."""
    parts: dict[str, Any] = {"data.partition.kind": partition}
    if isinstance(partition, ByGroup):
        parts = {f"data.partition.of.{name}.kind": part for name, part in partition.of.items()}
    but = f"rows of {rows.name} are sequences"
    for key, part in parts.items():
        if part.by_labels:
            allowed = "iid" if isinstance(partition, ByGroup) else "iid, natural, resample, saved"
            raise refused(key, part.kind, allowed, f"it deals by labels, and {but}")
    if isinstance(groups, ByLabels):
        raise refused("data.groups.by", "labels", "none, domain", but)
    return replace(rows, y=torch.zeros(len(rows), dtype=torch.int64), classes=1, padding=None, unscored=())


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
    turn = np.empty(len(order), dtype=np.int64)
    for k in np.unique(domain):
        turn[domain == k] = np.arange((domain == k).sum())
    return torch.from_numpy(np.sort(order[np.lexsort((domain, turn))[:wanted]]))


def _replay(rows: Rows, partition: Saved, shift: Shift, seed: int, public_samples: int) -> Population:
    saved = partition.fitting(len(rows), rows.name)
    public = saved["public"]
    if public_samples not in (0, len(public)):
        raise refused("data.public_samples", public_samples, f"0, or as many as in {partition.path}, {len(public)}")
    parts = {name: Ragged(part["start"], part["rows"]) for name, part in saved["parts"].items()}
    clients = saved["group"], tuple(saved["group_names"]), saved["registered"]
    names = tuple(saved["names"])
    return Population(rows, parts, *clients, shift, seed, names=names, public=public[:public_samples])


@dataclass(frozen=True)
class _Dealt:
    """Rows of each client before the division into parts: training clients, their given test rows, held-out clients.

    names: names of the groups. client_names: the source's own names of the clients, in their order.
    """

    seen: Ragged
    test: Ragged
    held_out_clients: Ragged
    group: Tensor
    names: tuple[str, ...]
    client_names: tuple[str, ...] = ()


def _by_group(
    rows: Rows, free: Tensor, partition: Any, groups: Groups, held_out_clients: HeldOutClients, rng: Rng
) -> _Dealt:
    """Deal each group's `free` rows to its share of the clients; ids go group by group, held-out ones last."""
    held_out = torch.zeros(len(rows), dtype=torch.bool) if rows.held_out is None else rows.held_out
    masks, names = _row_masks(rows, partition, groups)
    parts = partition.within(names) if isinstance(partition, ByGroup) else [partition] * len(masks)
    seen, test, outside, sizes = [], [], [], []
    for k, (mask, part) in enumerate(zip(masks, parts, strict=True)):
        n = part.clients if isinstance(partition, ByGroup) else _part_size(partition.clients, k, len(masks))
        n_unseen = _part_size(held_out_clients.clients, k, len(masks))
        trained, tested = mask & free & ~held_out, mask & held_out
        if not n or not trained.any():
            but = f"of {len(masks)} groups '{names[k]}' gets no {'rows' if n else 'clients'}"
            raise refused("data.partition.clients", partition.clients, "rows and clients for each group", but)
        prefix = f"data.partition.of.{names[k]}" if isinstance(partition, ByGroup) else "data.partition"
        try:
            if n_unseen:
                out_of = tested if tested.any() else trained
                taken = _deal_held_out(part, rows, out_of, n, n_unseen, held_out_clients, rng.at(k, "unseen"))
                trained = trained & ~torch.zeros_like(trained).index_fill_(0, taken.rows.long(), True)
                outside.append(taken)
            seen.append(_deal(part, rows, trained, n, rng.at(k)))
        except FedtideError as error:
            raise FedtideError(str(error).replace("data.partition", prefix, 1)) from None
        if tested.any() and not n_unseen:
            where, counts = tested.nonzero().flatten(), _class_counts(seen[-1], rows)
            test.append(follow(rows.y[where].numpy(), counts, rng.at(k, "test")).translated(where))
        sizes.append((n, n_unseen))
    if test and len(test) < len(masks):
        allowed = f"{len(masks)} or more, or a test set for every group"
        but = f"some groups have test rows of their own in {rows.name}, and some have none"
        raise refused("data.held_out_clients.clients", held_out_clients.clients, allowed, but)
    which = torch.arange(len(masks)).repeat(2).repeat_interleave(torch.tensor(sizes).T.flatten())
    none = Ragged.empty(sum(n for n, _ in sizes))
    return _Dealt(Ragged.join(seen), Ragged.join(test) if test else none, Ragged.join(outside), which, names)


def _row_masks(rows: Rows, partition: Partition, groups: Groups) -> tuple[list[Tensor], tuple[str, ...]]:
    """Return the mask of each group's rows and the group names; a rotation gives every group all rows."""
    row_group, names = groups.of(rows)
    if not isinstance(partition, Rotation):
        return [torch.from_numpy(row_group == k) for k in range(len(names))], names
    if len(names) > 1:
        raise refused("data.groups.by", groups.by, "'none'", "the partition 'rotation' makes the groups itself")
    angles = partition.angles
    return [torch.ones(len(rows), dtype=torch.bool)] * len(angles), tuple(f"{angle} degrees" for angle in angles)


def _deal(partition: Any, rows: Rows, mask: Tensor, clients: int, rng: Rng) -> Ragged:
    where = mask.nonzero().flatten()
    dealt = partition.deal(rows.y[where].numpy(), rows.classes, clients, rng)
    if not isinstance(dealt, Ragged):
        raise refused("data.partition.function", dealt, "deal() that returns a fedtide.data.ragged.Ragged")
    return dealt.translated(where)


def _deal_held_out(
    partition: Partition, rows: Rows, mask: Tensor, seen: int, held_out_clients: int, settings: HeldOutClients, rng: Rng
) -> Ragged:
    """Deal rows to the held-out clients: `samples` each, else a whole given test set, else their share of all rows."""
    own_share = None
    if rows.held_out is None or not rows.held_out[mask].any():
        own_share = max(len(mask.nonzero()) // (seen + held_out_clients), 1)
    samples = settings.samples or own_share
    within = with_limit(partition, samples)
    if within is not None:
        return _deal(within, rows, mask, held_out_clients, rng)
    if samples is not None:  # A kind without a limit deals the wanted number of rows, drawn at random.
        where = mask.nonzero().flatten()
        drawn = where[torch.from_numpy(rng.at("drawn").numpy().permutation(len(where))[: held_out_clients * samples])]
        mask = torch.zeros_like(mask).index_fill_(0, drawn, True)
    return _deal(partition, rows, mask, held_out_clients, rng)


def _class_counts(dealt: Ragged, rows: Rows) -> np.ndarray:
    """Count the rows of each class of each client (clients, classes)."""
    counts = [count_pairs(part.owner, rows.y[part.rows.long()], len(part), rows.classes) for part in dealt.blocks()]
    return torch.cat(counts).numpy()


def _natural(
    rows: Rows, free: Tensor, partition: Natural, groups: Groups, held_out_clients: HeldOutClients, rng: Rng
) -> _Dealt:
    """Draw clients of the source at random and hold some out; a client's group is that of most of its rows."""
    if rows.client is None:
        raise refused("data.partition.kind", "natural", "a kind that deals rows", f"{rows.name} names no clients")
    row_group, names = groups.of(rows)
    client, inside_groups = rows.client.numpy(), (row_group >= 0) & free.numpy()
    held_out = np.zeros(len(rows), dtype=bool) if rows.held_out is None else rows.held_out.numpy()
    n = int(client.max()) + 1
    large = np.flatnonzero(np.bincount(client[inside_groups & ~held_out], minlength=n) >= partition.min_samples)
    seen = partition.clients or len(large) - held_out_clients.clients
    wanted = seen + held_out_clients.clients
    if wanted > len(large) or seen <= 0:
        allowed = f"at most {len(large)}, the clients of {rows.name} with {partition.min_samples} rows or more"
        raise refused("data.partition.clients and data.held_out_clients.clients", wanted, allowed)
    chosen = rng.at("natural").numpy().permutation(large)[:wanted]
    chosen = np.concatenate([np.sort(chosen[:seen]), np.sort(chosen[seen:])])
    number = np.full(n, -1)
    number[chosen] = np.arange(wanted)
    owner = np.where(inside_groups, number[client], -1)
    votes = np.zeros((wanted, len(names)), dtype=np.int64)
    np.add.at(votes, (owner[owner >= 0], row_group[owner >= 0]), 1)
    inside, outside = np.where(owner < seen, owner, -1), np.where(owner >= seen, owner - seen, -1)
    return _Dealt(
        Ragged.from_owner(np.where(held_out, -1, inside), seen),
        Ragged.from_owner(np.where(held_out, inside, -1), seen),
        Ragged.from_owner(outside, held_out_clients.clients),
        torch.from_numpy(votes.argmax(1)),
        names,
        tuple(rows.client_names[client] for client in chosen.tolist()) if rows.client_names else (),
    )


def divide(lists: Ragged, val: float, test: float, draw: np.random.Generator) -> tuple[Ragged, Ragged, Ragged]:
    """Divide each client's rows at random into train, val and test.

    A client with two rows or more gets at least one test row if `test` > 0. It gets at least one validation row if
    `val` > 0 and ten rows are left.
    """
    if not val and not test:
        return lists, Ragged.empty(len(lists)), Ragged.empty(len(lists))
    blocks = [_divided(block, val, test, draw) for block in lists.blocks()]
    train_part, val_part, test_part = (Ragged.join(parts) for parts in zip(*blocks, strict=True))
    return train_part, val_part, test_part


def _divided(lists: Ragged, val: float, test: float, draw: np.random.Generator) -> list[Ragged]:
    """Return the rows of some clients for training, validation and testing."""
    counts, owner = lists.counts.numpy(), lists.owner.numpy()
    n_test, n_val = part_sizes(counts, val, test)
    rank = np.empty(len(owner), dtype=np.int64)
    rank[np.lexsort((draw.random(len(owner)), owner))] = np.arange(len(owner)) - (counts.cumsum() - counts)[owner]
    part = torch.from_numpy((rank < (n_test + n_val)[owner]).astype(np.int8) + (rank < n_test[owner]))
    return [lists.only(part == number) for number in range(3)]


def _part_size(total: int, k: int, parts: int) -> int:
    """Return the size of the k-th of `parts` nearly equal parts of `total`."""
    return total // parts + (k < total % parts)


MOST = 100_000_000
"""Maximum number of registered clients: each takes some dozens of bytes while participants are drawn."""


def generated_population(
    rows: GeneratedRows, split: Split, shift: Shift, seed: int, transforms: tuple[Prepare, ...] = ()
) -> Population:
    """Build the population of a generated source without lists of rows.

    The first rows of a client are for testing, the next for validation, the others for training. Shares are those of
    `split`.
    """
    n_test, n_val = map(int, part_sizes(np.array(rows.each), split.val, 0.2 if split.test is None else split.test))
    first = {"test": 0, "val": n_test, "train": n_test + n_val}
    count = {"test": n_test, "val": n_val, "train": rows.each - n_test - n_val}
    parts = {part: Spans(rows.clients, rows.each, first[part], count[part]) for part in PARTS}
    group = torch.zeros(1, dtype=torch.int64).expand(rows.clients)  # one stored number for all clients
    return Population(rows, parts, group, ("all",), rows.clients, shift, seed, transforms=transforms)


def check_generated(
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
