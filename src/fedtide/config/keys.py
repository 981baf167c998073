"""The keys of an experiment file, and their values, in words: for the command line and the documentation."""

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel

from fedtide.algorithms import REGISTRY
from fedtide.config.schema import SHARED, Experiment, Method, maker, options_model
from fedtide.config.writing import as_toml
from fedtide.core.docstrings import Doc, docstring
from fedtide.core.errors import FedtideError, folded
from fedtide.fields.shapes import bare, described, infos_of, is_choice, is_table, is_union, list_marks, tags
from fedtide.fields.types import changed
from fedtide.fields.vocabulary import meant, nearest

# -- values ------------------------------------------------------------------------------------------------------------

RANGES = {"gt": "more than {}", "ge": "{} or more", "lt": "less than {}", "le": "at most {}"}
WORDS = {int: "whole number", float: "number", bool: "`true`, `false`", str: "text", Any: "any value"}


def allowed(kind: Any) -> str:
    """Describe the values that a key may have."""
    marks, kind = list_marks(kind), bare(kind)
    if is_choice(kind):
        return ", ".join(code(tag) for member in get_args(kind) for tag in tags(bare(member))[:1])
    if get_origin(kind) is Literal:
        return ", ".join(code(value) for value in get_args(kind))
    if get_origin(kind) is tuple:
        inside = get_args(kind)
        if inside[-1] is ...:
            kinds = tags(bare(inside[0])) if is_table(bare(inside[0])) else ()
            inner = ", ".join(map(code, kinds[:1])) or ("table" if is_table(inside[0]) else allowed(inside[0]))
            return f"list of: {inner}"
        return f"list of {len(inside)}: {allowed(inside[0])}"
    if get_origin(kind) is dict or is_table(kind):
        return "table"
    if is_union(kind):
        return " or ".join(allowed(member) for member in get_args(kind) if member is not type(None))
    if kind not in WORDS:
        return f"`{getattr(kind, '__name__', kind)}`"
    limits = {name: getattr(mark, name) for mark in marks for name in RANGES if getattr(mark, name, None) is not None}
    if "gt" in limits:
        limits.pop("ge", None)
    bounds = {name: f"{value:,}" if isinstance(value, int) else f"{value:g}" for name, value in limits.items()}
    if bounds.keys() == {"ge", "le"}:
        return f"{WORDS[kind]}, {bounds['ge']} to {bounds['le']}"
    if bounds.keys() == {"ge", "lt"}:
        return f"{WORDS[kind]}, {bounds['ge']} to below {bounds['lt']}"
    words = [RANGES[name].format(bound) for name, bound in bounds.items()]
    return ", ".join(filter(None, [WORDS[kind], " and ".join(words)]))


def code(value: Any) -> str:
    """Return a value as TOML, in backticks.

    >>> code({"kind": "sgd", "momentum": 0.9})
    '`{ kind = "sgd", momentum = 0.9 }`'
    """
    return f"`{as_toml(value)}`"


def spelled(value: Any) -> str:
    """Return a default as a person would write it."""
    if value is ...:
        return "must be given"
    if value is None:
        return "none"
    if value == {}:
        return "empty"
    if isinstance(value, BaseModel):
        return "see its keys"
    if not dataclasses.is_dataclass(value):
        return code(value)
    options = {key: child for key, child in _as_file(value).items() if key != "kind"}
    if not (names := tags(type(value))):
        return code(options) if options else "see its keys"
    by = "by" if hasattr(value, "by") else "kind"
    return code({by: names[0], **options} if options else names[0])


def _as_file(value: Any) -> Any:
    """Return a value with ingredients in it as tables."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _as_file(changed(value))
    if isinstance(value, list | tuple):
        return [_as_file(child) for child in value]
    return {key: _as_file(child) for key, child in value.items()} if isinstance(value, dict) else value


# -- tables ------------------------------------------------------------------------------------------------------------

HIDDEN = {("Method", "options")}
"""Fields that are no keys of a file."""
FILLED = {("Method", "name")}
"""Keys that a file may leave out, because reading fills them."""


def table_fields(kind: Any) -> dict[str, tuple[Any, Any]]:
    """Return the keys of a table: (type, default); `...` for a key that must be given."""
    fields = {name: field for name, field in infos_of(kind).items() if (kind.__name__, name) not in HIDDEN}
    return {
        name: (
            Annotated[field.annotation, field],
            (None if (kind.__name__, name) in FILLED else ...)
            if field.is_required()
            else field.get_default(call_default_factory=True),
        )
        for name, field in fields.items()
    }


def chosen_fields(kind: Any) -> dict[str, tuple[Any, Any]]:
    """Return the keys of a table as `table_fields` does, but for the one that chooses it among others.

    >>> from fedtide.data.partition import Groups, Split
    >>> list(chosen_fields(tables_in(Groups)[0])), "by" in chosen_fields(Split)
    ([], True)
    """
    fields = table_fields(kind)
    choosing = [name for name in ("kind", "by") if name in fields and tags(kind)][:1]
    return {name: field for name, field in fields.items() if name not in choosing}


def options(name: str) -> dict[str, tuple[Any, Any]]:
    """Return the options of a method with this algorithm: (type, default)."""
    return table_fields(options_model(name))


def documented(kind: Any) -> Doc:
    """Return the docstring of a type, with descriptions of keys from its bases."""
    bases = [base for base in kind.__mro__[:0:-1] if dataclasses.is_dataclass(base)]
    args = {name: text for base in bases for name, text in docstring(base.__doc__).args.items()}
    doc = docstring(kind.__doc__)
    return Doc(doc.prose, args | doc.args)


def within_list(kind: Any) -> Any:
    """Return the tables, or choices among them, that a list or a table of names holds; other types as they are."""
    if get_origin(kind) is dict:
        inside = bare(get_args(kind)[1])
        return inside if is_table(inside) else kind
    if get_origin(kind) is not tuple:
        return kind
    inside = bare(get_args(kind)[0])
    return inside if is_choice(inside) or is_table(inside) else kind


def tables_in(kind: Any) -> list[Any]:
    """Return the tables that may stand at a key: one, the members of a choice, or none.

    >>> from fedtide.cohorts import Cohort
    >>> [tags(table)[0] for table in tables_in(Cohort)][:3], tables_in(int)
    (['arrivals', 'uniform', 'poisson'], [])
    """
    inside = within_list(bare(kind))
    return [bare(member) for member in get_args(inside)] if is_choice(inside) else [inside] if is_table(inside) else []


@cache
def ingredients() -> dict[str, Any]:
    """Return the tables and choices that algorithms take, by the keyword; the first of a name stands for all."""
    kinds: dict[str, Any] = {}
    for name in REGISTRY:
        for keyword, (kind, _) in options(name).items():
            if tables_in(kind):
                kinds.setdefault(keyword, kind)
    return kinds


def _below(table: Any) -> dict[str, Any]:
    """Return the keys of a table with their types; of a method, those of every algorithm too."""
    keys = {key: hint for key, (hint, _) in table_fields(table).items()}
    if table is Method:
        keys = {key: hint for name in REGISTRY for key, (hint, _) in options(name).items()} | ingredients() | keys
    return keys


# -- places of keys ----------------------------------------------------------------------------------------------------


@cache
def _places() -> tuple[str, ...]:
    return tuple(dict.fromkeys(_walk(Experiment, "", ())))


def _walk(table: Any, above: str, within: tuple[Any, ...]) -> Iterator[str]:
    for key, hint in _below(table).items():
        path = f"{above}.{key}" if above else key
        yield path
        for inside in tables_in(hint):
            if inside not in (*within, table):
                yield from _walk(inside, path, (*within, table))


FIRST = ("", "data.partition.", "method.local.", "method.cohort.", "method.server.", "data.", "method.")
"""Tables in which a key is looked for, the commonest first."""


def places(word: str) -> list[str]:
    """Return the dotted keys that a word may mean, in all tables, the commonest first.

    >>> places("learning_rate")[:2], places("num_clients")[:1]
    (['method.local.lr', 'method.server.lr'], ['data.partition.clients'])
    """
    heads = {place: place[: place.rfind(".") + 1] for place in _places()}
    names = sorted({place.removeprefix(head) for place, head in heads.items()})
    matches = [place for name in meant(word, names) for place, head in heads.items() if place == head + name]
    return sorted(matches, key=lambda place: FIRST.index(heads[place]) if heads[place] in FIRST else len(FIRST))


def place(word: str) -> str:
    """Describe the place of the key that a word may mean; "" if there is none.

    >>> place("num_clients"), place("learning_rate"), place("nonsense")
    ("'data.partition.clients'", "'local.lr' in [[method]] or [defaults]", '')
    """
    first = next(iter(places(word)), "")
    name = first.removeprefix("method.")
    return "" if not first else f"'{first}'" if name == first else f"'{name}' in [[method]] or [defaults]"


# -- for the command line ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of a method: its name, allowed values, its default, and its meaning."""

    name: str
    allowed: str
    default: str
    meaning: str


def _key(name: str, hint: Any, default: Any, meaning: str | None) -> Key:
    return Key(name, allowed(hint).replace("`", ""), spelled(default).replace("`", ""), meaning or described(hint))


def keys_of(name: str) -> list[Key]:
    """Return the keys of a method with this algorithm, and then those of every method.

    >>> keys = {key.name: key for key in keys_of("vanilla")}
    >>> list(keys)[:3], keys["branches"].allowed, keys["branches"].default, keys["branches"].meaning
    (['local', 'branches', 'branch_layer'], 'whole number, 1 to 1,000', '2', 'number of branches, K.')
    """
    shared = {key: field for key, field in table_fields(Method).items() if key in {*SHARED, "shift"}}
    meanings = docstring(Method.__doc__).args | docstring(maker(name).__doc__).args
    return [_key(key, *field, meanings.get(key)) for key, field in (*options(name).items(), *shared.items())]


def safe_form(name: str) -> str:
    """Describe what `safe = true` stands for in a method with this algorithm; "" if it has no such form.

    >>> safe_form("fedem"), safe_form("fedavg")
    ('`transforms = ["anchored"]`', '')
    """
    safe = REGISTRY[name].safe
    if safe is None:
        return ""
    transforms = [_short(_as_file(transform)) for transform in safe.transforms]
    sets = [f"`{key} = {spelled(value).strip('`')}`" for key, value in safe.options.items()]
    usual = [f"by default `{key} = {spelled(value).strip('`')}`" for key, value in safe.usual.items()]
    return ", ".join([*sets, *([f"`transforms = {as_toml(transforms)}`"] if transforms else []), *usual])


def _short(table: dict[str, Any]) -> Any:
    """Return a transform as briefly as a file may have it."""
    table = table["way"] if table.keys() == {"kind", "way"} else table
    return table["kind"] if len(table) == 1 else table


@dataclasses.dataclass(frozen=True)
class Section:
    """A table of an experiment file: its place as a title, its purpose, and its keys."""

    title: str
    about: str
    keys: list[Key]


def sections(path: str = "") -> list[Section]:
    """Return the tables at a dotted key, one for each kind that may stand there; without a key the top of the file.

    Args:
        path: such as "data.partition", "data.partition.dirichlet" (one kind), "data.partition.alpha" (one key) or
            "method.local"; "method." may be left out.

    Raises:
        FedtideError: there is no such key.

    >>> [(section.title, [key.name for key in section.keys]) for section in sections("data.partition.iid")]
    [('data.partition = { kind = "iid" }', ['clients', 'samples'])]
    """
    steps = [step for step in path.removeprefix("experiment").split(".") if step]
    if steps and steps[0] not in _below(Experiment):
        steps = ["method", *(steps[1:] if steps[0] == "defaults" else steps)]
    tables, above = [Experiment], ""
    for number, step in enumerate(steps):
        kinds = [table for table in tables if step in tags(table)]
        owners = [table for table in tables if step in _below(table)]
        if not kinds and not owners:
            choices = [sorted({key for table in tables for key in (*_below(table), *tags(table))})]
            if step == path.partition(".")[0]:  # of the top of the file, or of a method, whose name may be left out
                choices.insert(0, sorted(_below(Experiment)))
            hints = [nearest(step, words) for words in choices]
            other = next((f"did you mean '{place}'? A" for place in places(steps[-1])), "a")
            hint = next((hint for hint in hints if "did you mean" in hint), f"{other}{hints[0][1:]}")
            if not tables:
                hint = f"{other}llowed: '{above}', which has no keys of its own"
            raise FedtideError(f"keys: found '{path}', {hint}")
        inside = kinds or [inner for table in owners for inner in tables_in(_below(table)[step])]
        if not inside and number == len(steps) - 1:
            return [_section(above, table, step) for table in owners]
        tables = list(dict.fromkeys(inside))
        above = above if kinds else f"{above}.{step}" if above else step
    return [_section(above, table) for table in tables]


def _section(path: str, table: Any, only: str = "") -> Section:
    """Return a table at a dotted key, or one of its keys."""
    fields, kind = table_fields(table), next(iter(tags(table)), "")
    by = "kind" if "kind" in fields else "by"
    if only and only not in fields:  # of an algorithm
        fields = next(keys for name in REGISTRY if only in (keys := options(name)))
    doc = documented(table)
    title = f'{path} = {{ {by} = "{kind}" }}' if kind else f"[{path}]" if path else "the top of the file"
    names = [only] if only else list(chosen_fields(table))
    return Section(
        "[[method]]" if table is Method and not only else title,
        " ".join(doc.prose.partition("\n\n")[0].split()),
        [_key(name, *fields[name], doc.args.get(name)) for name in names],
    )


# -- one algorithm -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Source:
    """Title of an algorithm, a sentence about it, and the title and year of its paper."""

    title: str
    summary: str
    paper: str
    year: str


def source(name: str) -> Source:
    """Read the source of an algorithm in the docstrings of its module and function.

    >>> source("ifca").title, source("ifca").paper, source("ifca").year
    ('IFCA', 'An Efficient Framework for Clustered Federated Learning', '2020')
    >>> source("fedyogi").title, source("fedyogi").paper, source("fedyogi").year
    ('FedYogi', 'Adaptive Federated Optimization', '2021')
    """
    make = maker(name)
    module = inspect.cleandoc(sys.modules[make.__module__].__doc__ or "")
    head, _, rest = module.partition("\n")[0].partition(": ")
    titled = folded(head).startswith(folded(name)) and not is_preset(make)
    title = head if titled else next((word for word in re.findall(r"[\w-]+", module) if word.lower() == name), name)
    summary = rest[:1].upper() + rest[1:] if titled else (make.__doc__ or "").partition("\n")[0]
    text, pattern = " ".join(module.split()), r"\*([^*]+)\*[^*]*?\b((?:19|20)\d\d)\b"
    papers = re.findall(pattern, text)
    if is_preset(make):  # its module is about several papers: the one behind the name, else the last
        papers = re.findall(pattern, text.partition(f"{title} (")[2]) or papers[-1:]
    paper, year = papers[0] if papers else ("", "")
    return Source(title, summary, paper, year)


def is_preset(make: Any) -> bool:
    """Tell whether an algorithm is another one with other defaults."""
    return hasattr(make, "__wrapped__")


def about(name: str) -> Iterator[str]:
    """Describe an algorithm and its source: the first paragraphs of its module, one line each."""
    make = maker(name)
    if is_preset(make):  # its module is about several
        yield (make.__doc__ or "").partition("\n")[0]
    blocks = re.split(r"\n\s*\n", inspect.cleandoc(sys.modules[make.__module__].__doc__ or ""))
    for block in blocks[:2]:
        if not block.startswith(("|", "    ")):
            yield " ".join(block.split())
