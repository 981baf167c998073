"""The user's own code, named `module:function` in a configuration."""

import importlib
import inspect
import os
import re
import secrets
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import field
from difflib import get_close_matches
from functools import cache, reduce
from itertools import count
from types import ModuleType
from typing import Annotated, Any, Literal

from pydantic import Field, field_serializer

from fedtide.core.errors import FedtideError, refused
from fedtide.fields.types import allowing, ingredient

SESSION = "session_"
"""Start of the names of modules without a file."""

FUNCTION = (
    "of a module that can be imported from where the command runs; a class will do, and in Python the function itself."
)


@ingredient
class Python:
    """Your own kind: the result of your `module:function`, called with `options`, takes its place."""

    function: Annotated[str | Callable[..., Any], allowing("module:function"), Field(description=FUNCTION)]
    options: Annotated[dict[str, Any], Field(description="keyword arguments for it.")] = field(default_factory=dict)
    kind: Literal["python"] = "python"

    @field_serializer("function")
    def _written(self, function: Any) -> str:
        return function if isinstance(function, str) else name_of(function, "function")

    @property
    def name(self) -> str:
        """Name in a configuration."""
        if isinstance(self.function, str):
            return self.function
        return f"{self.function.__module__}:{getattr(self.function, '__qualname__', self.function)}"

    def find(self, key: str) -> Callable[..., Any]:
        """Return the function, imported if it is named; `key` is its key, for messages."""
        function = imported(self.function, f"{key}.function") if isinstance(self.function, str) else self.function
        if not callable(function):
            raise refused(f"{key}.function", self.name, "a function or class")
        return function


def called_itself(part: Any, key: str) -> Callable[..., Any] | None:
    """Return a person's function of two arguments, which is itself the part; None if it makes the part from options."""
    if not isinstance(part, Python) or part.options or inspect.isclass(function := part.find(key)):
        return None
    return function if _takes(function, 2) and not _takes(function, 0) else None


def _takes(function: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(function).bind(*[None] * count)
    except (TypeError, ValueError):  # of what is built in the signature may not be known
        return False
    return True


def build_part(part: Any, key: str, needs: Sequence[str]) -> Any:
    """Return a part of a configuration; for a `Python` kind, the result of the user's function with its options.

    Args:
        part: any kind, `Python` among them.
        key: key of the part, for messages.
        needs: names that the result must have.

    Raises:
        FedtideError: the module, the function or its result is not usable.

    >>> build_part(Python("collections:Counter", {"a": 2}), "data.partition", ("most_common",))
    Counter({'a': 2})
    """
    if not isinstance(part, Python):
        return part
    value = call(part.find(key), f"{key}.options", **part.options)
    missing = next((name for name in needs if not hasattr(value, name)), None)
    if missing is not None:
        raise FedtideError(
            f"{key}.function: '{part.name}' returned {type(value).__name__} without '{missing}', "
            f"allowed: an object with {', '.join(needs)}"
        )
    return value


def imported(name: str, key: str) -> Any:
    """The object `module:name`, importable from the current folder or wherever Python looks.

    Args:
        name: as written in the configuration; configurations may name code, data and checkpoints never do.
        key: its key, for messages.

    >>> imported("math:sqrt", "data.source.function")(4.0)
    2.0
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise refused(key, name, "module:function")
    if module.startswith(SESSION) and module not in sys.modules:
        raise FedtideError(
            f"{key}: '{attribute}' was code of a Python session that has ended; allowed: 'module:{attribute}', with "
            f"{attribute} in a file, in a new run"
        )
    if module.endswith(".py"):
        raise refused(key, name, f"'{module.removesuffix('.py')}:{attribute}', as it is imported")
    if (here := current_folder()) not in (None, *sys.path):
        sys.path.append(str(here))  # last: no file of that folder may stand in for a module of Python's or of ours
    code: Any = None
    try:
        code = importlib.import_module(module)
        for part in attribute.split("."):
            code = getattr(code, part)
    except Exception as error:  # whatever the user's module raises while it is loaded
        close = get_close_matches(attribute, dir(code), n=1) if inspect.ismodule(code) else []
        hint = "".join(f"; did you mean '{module}:{meant}'?" for meant in close)
        raise FedtideError(f"{key}: cannot import '{name}' ({type(error).__name__}: {error}){hint}") from None
    return code


@cache
def _session() -> ModuleType:
    """Return the module in which code of this Python session is found, whatever becomes of the names in it."""
    module = ModuleType(f"{SESSION}{secrets.token_hex(4)}", "Code of a Python session.")
    sys.modules[module.__name__] = module
    return module


def name_of(code: Any, called: str) -> str:
    """Return the `module:name` under which `imported` finds code: its own module, else this session's module.

    Args:
        code: a function, a class, or any other object.
        called: its name in the session if it has none of its own.

    >>> from collections import Counter
    >>> name_of(Counter, "count"), name_of(lambda: 3, "three").partition(":")[2]
    ('collections:Counter', 'three')
    """
    module, name = getattr(code, "__module__", None), getattr(code, "__qualname__", called)
    imported_code = reduce(
        lambda owner, part: getattr(owner, part, None), name.split("."), sys.modules.get(str(module))
    )
    if module not in (None, "__main__") and imported_code is code:
        return f"{module}:{name}"
    session = _session()
    name_there = next((name for name, thing in vars(session).items() if thing is code), None)
    if name_there is None:
        plain = getattr(code, "__name__", called)
        plain = called if plain == "<lambda>" else plain
        free = (plain if number == 1 else f"{plain}_{number}" for number in count(1))
        name_there = next(name for name in free if not hasattr(session, name))
        setattr(session, name_there, code)
    return f"{session.__name__}:{name_there}"


def session_code(text: str) -> list[str]:
    """Return the names of code of Python sessions that stand in a text.

    >>> session_code('{"algorithm": "session_0a1b2c3d:ditto", "loss": "mine:focal"}')
    ['ditto']
    """
    return list(dict.fromkeys(re.findall(rf"\b{SESSION}[0-9a-f]{{8}}:(\w+)", text)))


def current_folder() -> str | None:
    """Return the current folder; None if it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return None


def call(function: Any, key: str, *arguments: Any, **options: Any) -> Any:
    """Call the user's function; options that it does not take are named.

    >>> call(dict, "model.options", a=1)
    {'a': 1}
    """
    if not callable(function):
        raise refused(key, function, "a function")
    try:
        inspect.signature(function).bind(*arguments, **options)
    except TypeError as error:
        raise FedtideError(f"{key}: {getattr(function, '__name__', function)}() {error}") from None
    except ValueError:  # built in, without a signature
        pass
    try:
        return function(*arguments, **options)
    except FedtideError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's code raises: where it did, in one line
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise FedtideError(
            f"{key.rpartition('.')[0]}: {getattr(function, '__name__', function)}() failed with "
            f"{type(error).__name__}: {' '.join(str(error).split())} ({at.filename}, line {at.lineno})"
        ) from error
