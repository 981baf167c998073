"""Whether rows are the same bits."""

from fedtide.data.rows import Rows


def same(a: Rows, b: Rows) -> bool:
    """Tell whether features, labels, clients and times are the same bits, and names the same."""
    columns = ("x", "y", "client", "time")
    return (
        a.client_names == b.client_names
        and a.label_names == b.label_names
        and all(getattr(a, name).numpy().tobytes() == getattr(b, name).numpy().tobytes() for name in columns)
    )
