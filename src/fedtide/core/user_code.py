"""The user's own code, named `module:function` in a configuration."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
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
    except Exception as error:  # whatever the user's module raises while it is loaded
        raise FedtideError(f"{key}: cannot import '{name}' ({type(error).__name__}: {error})") from None
    return found


def call(function: Any, key: str, *given: Any, **options: Any) -> Any:
    """Call the user's function; options that it does not take are named.

    >>> call(dict, "model.options", a=1)
    {'a': 1}
    """
    if not callable(function):
        raise FedtideError(f"{key}: found {function!r}, allowed: a function")
    try:
        inspect.signature(function).bind(*given, **options)
    except TypeError as error:
        raise FedtideError(f"{key}: {getattr(function, '__name__', function)}() {error}") from None
    except ValueError:  # built in, without a signature
        pass
    try:
        return function(*given, **options)
    except FedtideError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's code raises: where it did, in one line
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise FedtideError(
            f"{key.rpartition('.')[0]}: {getattr(function, '__name__', function)}() failed with "
            f"{type(error).__name__}: {' '.join(str(error).split())} ({at.filename}, line {at.lineno})"
        ) from error
