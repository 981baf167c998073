"""Lists, shares, counts and file names in words."""

import re
from collections.abc import Sequence


def listed(names: Sequence[str]) -> str:
    """Names with commas and an "and".

    >>> listed(["a", "b", "c"]), listed(["a"])
    ('a, b and c', 'a')
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def share_of(share: float) -> str:
    """A share of the clients, as a word if there is one.

    >>> share_of(0.5), share_of(0.05), share_of(1.0)
    ('half', '5 %', 'all')
    """
    return {0.5: "half", 1.0: "all"}.get(share, f"{100 * share:g} %")


def counted(count: float, noun: str) -> str:
    """A count with its noun.

    >>> counted(1, "round"), counted(0, "round"), counted(7.66, "round")
    ('1 round', '0 rounds', '7.7 rounds')
    """
    return f"{count:.0f} {noun}{'s' * (count != 1)}" if count == round(count) else f"{count:.1f} {noun}s"


def slug(name: str) -> str:
    """A name as the name of a folder or an anchor.

    >>> slug("FedAdam, rate 0.1"), slug("phase -8")
    ('fedadam-rate-0.1', 'phase-minus-8')
    """
    signed = re.sub(r"(^|[^\w])-(?=[\d.])", r"\1minus ", name)
    letters = "".join(c.lower() if c.isalnum() or c in "._" else "-" for c in signed)
    return "-".join(part for part in letters.split("-") if part.strip(".")) or "method"
