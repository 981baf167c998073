"""Options that have another name, or place, since a method's name plays its paper."""

from __future__ import annotations

CLUSTERED = ("auxo", "cfl", "feddrift", "fielding", "flexcfl", "ifca", "oracle")
ANCHORED = ("aem", "feddrift", "fedem", "fedgmm", "fedtem", "fedtkm", "ifca", "min-loss", "pfedem")
TRUNK = "write transforms = ['shared']", "write ft.transforms.shared(algorithm)"

NEW: dict[str, list[tuple[tuple[str, ...], str, str]]] = {
    "mu": [((), "write local.proximal", "write LocalTrainer(proximal=...)")],
    "anchor": [(ANCHORED, "write safe = true, or transforms = ['anchored']",
                "write safe=True, or ft.transforms.anchored(algorithm)")],
    "pooling": [
        (("auxo", "fielding", "flexcfl"), "write safe = true, or transforms = ['pooled']",
         "write safe=True, or ft.transforms.pooled(algorithm)"),
        (("feddrift",), "write transforms = ['pooled']", "write ft.transforms.pooled(algorithm)"),
    ],
    "cluster_layer": [(CLUSTERED, *TRUNK)],
    "component_layer": [(("fedgmm", "pfedem"), *TRUNK)],
    "hide_choice": [(("aem", "ifca"), "write wire.secure = true, because masked sums hide it", "leave it out")],
    "personal": [(("aem",), "write transforms = ['fine-tuned'], or another way; AEM's own is `mixture`",
                  "write ft.transforms.personalized(algorithm, 'fine-tuned'), or another way")],
    "personal_others": [(("aem",), "write transforms = [{ kind = 'personalized', others = [...] }]",
                         "write ft.transforms.personalized(algorithm, others=[...])")],
    "reveal": [(("fielding",), "write algorithm = 'fielding-by-sums'", "write ft.algorithms.fielding_by_sums")],
    "choose_on": [(("ifca",), *("leave it out: clients choose on validation samples if they have any",) * 2)],
    "normalize_by": [(("ifca",), *("leave it out: IFCA divides by participants, as its paper does",) * 2)],
    "keep_mixture": [(("pfedem",), *("write inference = 'client', by which a client keeps its shares",) * 2)],
    "window": [(("feddrift",), "write algorithm = 'window'", "write ft.algorithms.window")],
}  # fmt: skip
"""What to write in place of each, in a file and in Python, for the methods that had it; () are all."""


def old_key(algorithm: str, key: str, *, python: bool = False) -> str:
    """Return what an error says of an option that a method has no longer; "" for others.

    Args:
        algorithm: name of the method.
        key: the option.
        python: whether it was written in Python, and not in a file.

    >>> old_key("fedprox", "mu"), old_key("fedprox", "window")
    ('mu: no longer an option; write local.proximal', '')
    """
    for methods, in_file, in_python in NEW.get(key, ()):
        if not methods or algorithm in methods:
            return f"{key}: no longer an option; {in_python if python else in_file}"
    return ""
