"""Options that have another name, or place, since a method's name plays its paper."""

from __future__ import annotations

NEW = {
    "mu": "write local.proximal",
    "anchor": "a method plays its paper; for the anchor write safe = true, or transforms = ['anchored']",
    "pooling": "a method plays its paper; for pooling write safe = true, or transforms = ['pooled']",
    "cluster_layer": "write transforms = [{ kind = 'shared', layers = 'trunk' }]",
    "component_layer": "write transforms = [{ kind = 'shared', layers = 'trunk' }]",
    "hide_choice": "masked sums hide it: write wire.secure = true",
    "personal": "write transforms = [{ kind = 'personalized', way = ... }]; of aem its mixture is `mixture`",
    "personal_others": "write transforms = [{ kind = 'personalized', others = [...] }]",
    "reveal": "write algorithm = 'fielding-by-sums'; fewest and fewest_updates are options of it",
    "choose_on": "leave it out: clients choose on validation samples if they have any",
    "normalize_by": "leave it out: IFCA divides by participants, as its paper does",
    "keep_mixture": "write inference = 'client', by which a client keeps its shares",
    "window": "write algorithm = 'window'",
}
"""What to write in place of each."""


def old_key(key: str) -> str:
    """Return what an error says of an option that is no more; "" for others.

    >>> old_key("mu"), old_key("lr")
    ('mu: is no option any more; write local.proximal', '')
    """
    return f"{key}: is no option any more; {NEW[key]}" if key in NEW else ""
