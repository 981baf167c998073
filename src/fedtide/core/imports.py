"""The user's own code, named `module:function` in a configuration."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from fedtide.core.errors import FedtideError


def imported(name: str, key: str) -> Any:
    """The object `module:name`, importable from the current folder or wherever Python looks.

    Args:
        name: as written in the configuration; configurations may name code, data and checkpoints never do.
        key: where it was written, for messages.

    >>> imported("math:sqrt", "data.source.function")(4.0)
    2.0
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise FedtideError(f"{key}: found '{name}', allowed: module:function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise FedtideError(f"{key}: cannot import '{name}' ({error})") from None
    return found
