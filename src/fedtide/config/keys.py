"""The keys of an experiment file, and what may stand there, in words: for the command line and the documentation."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from functools import cache
from textwrap import dedent
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from fedtide.algorithms import REGISTRY
from fedtide.config.overrides import as_toml
from fedtide.config.schema import SHARED, Experiment, Method, maker
from fedtide.core.errors import FedtideError, folded, nearest, synonyms
from fedtide.fields.shapes import bare, described, fields_of, is_choice, is_table, is_union, ranges, tags
from fedtide.fields.types import changed


def options(name: str) -> dict[str, tuple[Any, Any]]:
    """Return the options of a method with this algorithm: (type, default)."""
    make = maker(name)
    hints = get_type_hints(make, include_extras=True)
    return {
        key: (hints.get(key, Any), ... if p.default is inspect.Parameter.empty else p.default)
        for key, p in inspect.signature(make).parameters.items()
        if key != "task"
    }


def arguments(block: str) -> dict[str, str]:
    """Return the description of each name in an `Args:` section.

    >>> arguments("Args:\\n    rate: of learning,\\n        above 0.\\n    batch: rows.")
    {'rate': 'of learning, above 0.', 'batch': 'rows.'}
    """
    found: dict[str, str] = {}
    name = ""
    for line in dedent("\n".join(block.splitlines()[1:])).splitlines():
        if line.startswith(" "):
            found[name] += " " + line.strip()
        else:
            name, _, found_text = line.partition(":")
            found[name] = found_text.strip()
    return found


RANGES = {"gt": "more than {}", "ge": "{} or more", "lt": "less than {}", "le": "at most {}"}


def allowed(kind: Any) -> str:
    """Describe the values that a key may have."""
    marks, kind = ranges(kind), bare(kind)
    if is_choice(kind):
        return ", ".join(code(tag) for member in get_args(kind) for tag in tags(bare(member))[:1])
    if get_origin(kind) is Literal:
        return ", ".join(code(value) for value in get_args(kind))
    if get_origin(kind) is tuple:
        inside = get_args(kind)
        if inside[-1] is ...:
            return f"list of: {'table' if is_table(inside[0]) else allowed(inside[0])}"
        return f"list of {len(inside)}: {allowed(inside[0])}"
    if get_origin(kind) is dict or is_table(kind):
        return "table"
    if is_union(kind):
        return " or ".join(allowed(member) for member in get_args(kind) if member is not type(None))
    word = {int: "whole number", float: "number", bool: "`true`, `false`", str: "text", Any: "any value"}.get(kind)
    if word is None:
        return f"`{getattr(kind, '__name__', kind)}`"
    limits = {name: getattr(r, name) for r in marks for name in RANGES if getattr(r, name, None) is not None}
    if limits.keys() in ({"ge", "le"}, {"ge", "lt"}):
        most = _bound(limits["le"]) if "le" in limits else f"below {_bound(limits['lt'])}"
        return f"{word}, {_bound(limits['ge'])} to {most}"
    said = [RANGES[name].format(_bound(value)) for name, value in limits.items()]
    return ", ".join([word, " and ".join(said)] if said else [word])


def _bound(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def code(value: Any) -> str:
    """A value as it stands in TOML.

    >>> code({"kind": "sgd", "momentum": 0.9})
    '`{ kind = "sgd", momentum = 0.9 }`'
    """
    if isinstance(value, dict):
        return f"`{{ {', '.join(f'{key} = {code(each).strip(chr(96))}' for key, each in value.items())} }}`"
    if isinstance(value, list | tuple):
        return f"`[{', '.join(code(each).strip(chr(96)) for each in value)}]`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def spelled(value: Any) -> str:
    """A default as it would be written."""
    if value is ...:
        return "must be given"
    if value is None:
        return "none"
    if value == {}:
        return "empty"
    if dataclasses.is_dataclass(value) and (names := tags(type(value))):
        own = {key: each for key, each in changed(value).items() if key != "kind"}
        kind = {"by" if hasattr(value, "by") else "kind": names[0]}
        return code(kind | own) if own else code(names[0])
    if dataclasses.is_dataclass(value) and (own := changed(value)):
        return code(own)
    if isinstance(value, dict | BaseModel) or dataclasses.is_dataclass(value):
        return "see its keys"
    return code(value)


# -- docstrings -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Doc:
    """A docstring: its prose as Markdown, and what its Args section says of each name."""

    prose: str
    args: dict[str, str]


def docstring(text: str | None, names: Sequence[str] = ()) -> Doc:
    """A docstring in Google style. A paragraph `name: ... name: ...` about some of `names` counts as arguments."""
    prose: list[str] = []
    args: dict[str, str] = {}
    for block in re.split(r"\n\s*\n", inspect.cleandoc(text or "")):
        first = block.splitlines()[0] if block else ""
        if first in ("Args:", "Returns:", "Raises:"):
            args |= arguments(block) if first == "Args:" else {}
        elif first.startswith(">>>"):
            continue
        elif said := inline(block, names):
            args |= said
        else:
            prose.append(block)
    return Doc("\n\n".join(prose), args)


def inline(block: str, names: Sequence[str]) -> dict[str, str]:
    """Read a paragraph `name: ... name: ...` about some of `names`; nothing where it is no such paragraph."""
    known = "|".join(names)
    if not names or not re.match(rf"({known}): ", block):
        return {}
    parts = re.split(rf"(?:^|(?<=[.;] ))({known}): ", " ".join(block.split()))
    return dict(zip(parts[1::2], (part.strip(" ;") for part in parts[2::2]), strict=True))


# -- tables -----------------------------------------------------------------------------------------------------------

HIDDEN = {("Method", "options")}
"""Fields that are no keys of a file."""


def table_fields(kind: Any) -> dict[str, tuple[Any, Any]]:
    """The keys of a table: (type, default); `...` for a key that must be given."""
    shown = {name: hint for name, hint in fields_of(kind).items() if (kind.__name__, name) not in HIDDEN}
    return {name: (hint, _default(kind, name)) for name, hint in shown.items()}


def documented(kind: Any) -> Doc:
    """The docstring of a type, with what its bases say of their keys."""
    names = tuple(table_fields(kind))
    bases = [base for base in kind.__mro__[:0:-1] if dataclasses.is_dataclass(base)]
    args = {name: said for base in bases for name, said in docstring(base.__doc__, names).args.items()}
    own = docstring(kind.__doc__, names)
    return dataclasses.replace(own, args=args | own.args)


def _default(kind: Any, name: str) -> Any:
    if issubclass(kind, BaseModel):
        field = kind.model_fields[name]
        return ... if field.is_required() else field.get_default(call_default_factory=True)
    made = next(field for field in dataclasses.fields(kind) if field.name == name)
    if made.default_factory is not dataclasses.MISSING:
        return made.default_factory()
    return ... if made.default is dataclasses.MISSING else made.default


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
    """The tables that may stand at a key: one, the members of a choice, or none.

    >>> from fedtide.cohorts import Cohort
    >>> [tags(table)[0] for table in tables_in(Cohort)][:3], tables_in(int)
    (['arrivals', 'uniform', 'everyone'], [])
    """
    inside = within_list(bare(kind))
    return [bare(member) for member in get_args(inside)] if is_choice(inside) else [inside] if is_table(inside) else []


@cache
def ingredients() -> dict[str, Any]:
    """The tables and choices that algorithms take, by the name of the keyword; the first of a name stands for all."""
    found: dict[str, Any] = {}
    for name in REGISTRY:
        for keyword, (kind, _) in options(name).items():
            if tables_in(kind):
                found.setdefault(keyword, kind)
    return found


def _below(table: Any) -> dict[str, Any]:
    """The keys of a table with their types; of a method, those of every algorithm too."""
    own = {key: hint for key, (hint, _) in table_fields(table).items()}
    if table is Method:
        own = {key: hint for name in REGISTRY for key, (hint, _) in options(name).items()} | ingredients() | own
    return own


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
"""Tables in which a key is looked for, those first that people mean most often."""


def places(word: str, near: bool = False) -> list[str]:
    """The dotted keys that a word may mean, in whichever table, those first that people mean most often.

    With `near` also those that it is a misspelling of.

    >>> places("learning_rate")[:2], places("num_clients")[:1], places("alpa", near=True)[0]
    (['method.local.lr', 'method.server.lr'], ['data.partition.clients'], 'data.partition.alpha')
    """
    ends = {place: place.rpartition(".") for place in _places()}
    names = sorted({end for _, _, end in ends.values()})
    meant = [*(name for name in names if folded(name) == folded(word)), *synonyms(word, names)]
    if near and not meant:
        meant = get_close_matches(folded(word), names, n=1, cutoff=0.85)
    found = [place for name in meant for place, (_, _, end) in ends.items() if end == name]
    heads = {place: "".join(ends[place][:2]) for place in found}
    return sorted(found, key=lambda place: FIRST.index(heads[place]) if heads[place] in FIRST else len(FIRST))


def place(word: str, near: bool = False) -> str:
    """Say where the key stands that a word may mean; "" where there is none.

    >>> place("num_clients"), place("learning_rate"), place("nonsense")
    ("'data.partition.clients'", "'local.lr' in [[method]] or [defaults]", '')
    """
    found = next(iter(places(word, near)), "")
    name = found.removeprefix("method.")
    return "" if not found else f"'{found}'" if name == found else f"'{name}' in [[method]] or [defaults]"


def place_beside(word: str, near: bool = False) -> str:
    """Say where the key stands that a word in a method may mean, if that is no key of methods; else ""."""
    return next((f"'{found}'" for found in places(word, near) if not found.startswith("method.")), "")


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of a method: its name, what it may hold, its default, and what it means."""

    name: str
    allowed: str
    default: str
    meaning: str


def keys_of(name: str) -> list[Key]:
    """The keys of a method with this algorithm, and then those that every method has.

    >>> keys = {key.name: key for key in keys_of("vanilla")}
    >>> list(keys)[:3], keys["branches"].allowed, keys["branches"].default, keys["branches"].meaning
    (['local', 'branches', 'branch_layer'], 'whole number, 1 to 1,000', '2', 'number of branches, K.')
    """
    own = [(key, *option) for key, option in options(name).items()]
    shared = [
        (key, field.annotation, ... if field.is_required() else field.default)
        for key, field in Method.model_fields.items()
        if key in {*SHARED, "shift"}
    ]
    said = docstring(Method.__doc__).args | docstring(maker(name).__doc__).args
    return [
        Key(key, _plain(allowed(hint)), _plain(spelled(default)), said.get(key) or described(hint))
        for key, hint, default in (*own, *shared)
    ]


def safe_form(name: str) -> str:
    """Say what `safe = true` stands for in a method with this algorithm; "" if it has no such form.

    >>> safe_form("fedem"), safe_form("fedavg")
    ('`transforms = ["anchored"]`', '')
    """
    safe = REGISTRY[name].safe
    if safe is None:
        return ""
    said = [_short(_as_file(transform)) for transform in safe.transforms]
    sets = [f"`{key} = {spelled(value).strip('`')}`" for key, value in safe.options.items()]
    usual = [f"by default `{key} = {spelled(value).strip('`')}`" for key, value in safe.usual.items()]
    return ", ".join([*sets, *([f"`transforms = {as_toml(said)}`"] if said else []), *usual])


def _short(table: dict[str, Any]) -> Any:
    """Return a transform as briefly as a file may have it."""
    table = table["way"] if table.keys() == {"kind", "way"} else table
    return table["kind"] if len(table) == 1 else table


def _as_file(value: Any) -> Any:
    """Return a value with ingredients in it as tables."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _as_file(changed(value))
    return {key: _as_file(each) for key, each in value.items()} if isinstance(value, dict) else value


@dataclasses.dataclass(frozen=True)
class Section:
    """A table of an experiment file: where it stands, what it is, and its keys."""

    title: str
    about: str
    keys: list[Key]


def sections(path: str = "") -> list[Section]:
    """The tables at a dotted key, one for each kind that may stand there; without a key the top of the file.

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
            known = sorted({key for table in tables for key in (*_below(table), *tags(table))})
            hint = next((f"; did you mean '{place}'?" for place in places(steps[-1])), "")
            said = nearest(step, known) if tables else f"allowed: '{above}', which has no keys of its own"
            raise FedtideError(f"keys: found '{path}', {said}{'' if 'did you mean' in said else hint}")
        inside = kinds or [found for table in owners for found in tables_in(_below(table)[step])]
        if not inside and number == len(steps) - 1:
            return [_section(above, table, step) for table in owners]
        tables = list(dict.fromkeys(inside))
        above = above if kinds else f"{above}.{step}" if above else step
    return [_section(above, table) for table in tables]


def _section(path: str, table: Any, only: str = "") -> Section:
    """A table at a dotted key, or one of its keys."""
    fields, chosen = table_fields(table), next(iter(tags(table)), "")
    if only and only not in fields:  # of an algorithm
        fields = {only: next(found for name in REGISTRY if (found := options(name).get(only)) is not None)}
    doc = documented(table)
    by = "kind" if "kind" in fields else "by"
    title = f'{path} = {{ {by} = "{chosen}" }}' if chosen else f"[{path}]" if path else "the top of the file"
    if table is Method and not only:
        title = "[[method]]"
    return Section(
        title,
        " ".join(doc.prose.partition("\n\n")[0].split()),
        [
            Key(key, _plain(allowed(hint)), _plain(spelled(default)), doc.args.get(key) or described(hint))
            for key, (hint, default) in fields.items()
            if (key == only or not only) and not (chosen and key == by)
        ],
    )


def _plain(text: str) -> str:
    return text.replace("`", "")


# -- one algorithm ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Source:
    """Title of an algorithm, a sentence about it, and the paper that it is from, with its year."""

    title: str
    summary: str
    paper: str
    year: str


def source(name: str) -> Source:
    """Read where an algorithm is from in the docstrings of its module and function.

    >>> source("ifca").title, source("ifca").paper, source("ifca").year
    ('IFCA', 'An Efficient Framework for Clustered Federated Learning', '2020')
    >>> source("fedyogi").title, source("fedyogi").paper, source("fedyogi").year
    ('FedYogi', 'Adaptive Federated Optimization', '2021')
    """
    make = maker(name)
    module = inspect.cleandoc(sys.modules[make.__module__].__doc__ or "")
    head, _, rest = module.partition("\n")[0].partition(": ")
    named = folded(head).startswith(folded(name)) and not is_preset(make)
    called = head if named else next((word for word in re.findall(r"[\w-]+", module) if word.lower() == name), name)
    said = rest[:1].upper() + rest[1:] if named else (make.__doc__ or "").partition("\n")[0]
    between = " ".join(module.split()).split("*")  # what is in every other place is the title of a paper
    papers = [
        (text, paper, (re.findall(r"\b(?:19|20)\d\d\b", after) or [""])[0])
        for text, paper, after in zip(between[::2], between[1::2], between[2::2], strict=False)
        if paper
    ]
    if is_preset(make):  # its module tells of several papers: of the one behind its name, or of "the others"
        papers = [found for found in papers if f"{called} (" in found[0]] or [found for found in papers if found[2]][
            -1:
        ]
    _, paper, year = next(((text, paper, year) for text, paper, year in papers if year), ("", "", ""))
    return Source(called, said, paper, year)


def is_preset(make: Any) -> bool:
    """Tell whether an algorithm is another one with other defaults."""
    return hasattr(make, "__wrapped__")


def about(name: str) -> Iterator[str]:
    """Describe an algorithm and its source: the first paragraphs of its module, one line each."""
    make = maker(name)
    if is_preset(make):  # its module tells of several
        yield (make.__doc__ or "").partition("\n")[0]
    blocks = re.split(r"\n\s*\n", inspect.cleandoc(sys.modules[make.__module__].__doc__ or ""))
    for block in blocks[:2]:
        if not block.startswith(("|", "    ")):
            yield " ".join(block.split())
