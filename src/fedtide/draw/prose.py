"""Lists, shares and counts in words, for kinds that say what they are and for reports."""

from collections.abc import Iterable, Sequence
from html import escape


def listed(names: Sequence[str]) -> str:
    """Names with commas and an "and".

    >>> listed(["a", "b", "c"]), listed(["a"])
    ('a, b and c', 'a')
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def share_of(share: float) -> str:
    """A share of the clients, in words where there is a short one.

    >>> share_of(0.5), share_of(0.05), share_of(1.0)
    ('half', '5 %', 'all')
    """
    return {0.5: "half", 1.0: "all"}.get(share, f"{100 * share:g} %")


def html_table(rows: Iterable[tuple[str, str]]) -> str:
    """Names and what is said of them as a table that a notebook shows.

    >>> html_table([("clients", "5 < 6")])
    '<table><tr><th>clients</th><td>5 &lt; 6</td></tr></table>'
    """
    cells = (f"<tr><th>{escape(name)}</th><td>{escape(said)}</td></tr>" for name, said in rows)
    return f"<table>{''.join(cells)}</table>"
