"""Pages made from the code when the site is built: the keys of an experiment file, and one page per algorithm.

Nothing here is written down twice: types, ranges and defaults come from `fedtide.config`, meanings from
docstrings, the list of algorithms from the registry, the laws from `fedtide.laws`. An option that nobody explains
is a warning, and so an error of `mkdocs build --strict`.

A page says where generated text goes with a line `<!-- generated: NAME -->`.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import types
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any, get_type_hints

from kept import indented, recipes
from keys import anchor, configuration, explained, row

import fedtide
from fedtide.algorithms import REGISTRY, Entry
from fedtide.cohorts import Cohort
from fedtide.config.keys import code, docstring, options, source, spelled
from fedtide.core.shapes import bare, is_choice, is_table, tags
from fedtide.laws.every import LAWS

ROOT = Path(__file__).parents[1]


# -- algorithms -------------------------------------------------------------------------------------------------------


def title(name: str) -> str:
    """The paper's spelling, from the module's docstring: FedAdam for fedadam."""
    return source(name).title


def module_of(entry: Entry) -> types.ModuleType:
    """The file of an algorithm."""
    return sys.modules[entry.make.__module__]


def summary(name: str) -> str:
    """The first sentence of an algorithm's function."""
    return docstring(REGISTRY[name].make.__doc__).prose.split("\n\n")[0].replace("\n", " ")


def algorithm_table() -> str:
    """All algorithms."""
    rows = ["| algorithm | what it is | sends | the server sees | clients keep |", "| --- | --- | --- | --- | --- |"]
    for name, entry in REGISTRY.items():
        cells = [f"[{title(name)}]({name}.md) `{name}`", summary(name), entry.sends, entry.sees, entry.keeps]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def algorithm_page(name: str) -> str:
    """The page of one algorithm."""
    entry = REGISTRY[name]
    module, function = module_of(entry), docstring(entry.make.__doc__)
    path = Path(inspect.getsourcefile(module) or "")
    shared = [other for other, e in REGISTRY.items() if module_of(e) is module and other != name]
    links = ", ".join(f"[{title(other)}]({other}.md)" for other in shared)
    parts = [
        f"# {title(name)}",
        function.prose,
        "| `algorithm =` | sends | the server sees of a client | clients keep |\n| --- | --- | --- | --- |\n"
        f'| `"{name}"` | {entry.sends} | {entry.sees} | {entry.keeps} |',
        "## Where it comes from",
        f"The file is shared with {links}." if shared else "",
        sections(module.__doc__),
        "## Options",
        option_table(name),
        "## In an experiment file",
        "Every plain option, with its default:",
        example(name),
        "## Reductions" if entry.reductions else "",
        reductions_of(entry),
        "## Laws",
        laws_of(entry),
        "## Source",
        f'??? example "{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name}"\n'
        + indented(f"```python\n{inspect.getsource(module)}```"),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def sections(text: str | None) -> str:
    """A module's docstring as Markdown, with headings for `When to use it:` and `Choices:`."""
    out = []
    for block in re.split(r"\n\s*\n", inspect.cleandoc(text or "")):
        first, _, rest = block.partition("\n")
        if first == "Choices:":
            out += ["## Choices", dedent(rest)]
        elif first.startswith("When to use it: "):
            said = block.removeprefix("When to use it: ")
            out += ["## When to use it", said[:1].upper() + said[1:]]
        else:
            out.append(block)
    return "\n\n".join(out)


def option_table(name: str) -> str:
    """What a method with this algorithm may say."""
    make, rows = REGISTRY[name].make, []
    for key, (kind, default) in options(name).items():
        text = row(key, kind, default, explained(make, docstring(make.__doc__), key, kind))
        if is_choice(bare(kind)) or is_table(bare(kind)):
            text = text.replace(f"`{key}`", f"[`{key}`](../configuration.md#{anchor(key)})", 1)
        rows.append(text)
    return "\n".join(["| key | allowed | default | meaning |", "| --- | --- | --- | --- |", *rows])


def example(name: str) -> str:
    """A method table with all plain options."""
    lines = ["[[method]]", f'name = "{title(name)}"', f'algorithm = "{name}"']
    for key, (kind, default) in options(name).items():
        if default is None or default is ...:
            continue
        if dataclasses.is_dataclass(default):
            if bare(kind) == bare(Cohort) and getattr(default, "clients_per_round", None):
                lines.append(f"{key} = {default.clients_per_round}")
            elif tags(type(default)):
                lines.append(f"{key} = {spelled(default).strip('`')}")
            continue
        lines.append(f"{key} = {spelled(default).strip('`')}")
    return "\n".join(["```toml", *lines, "```"])


def reductions_of(entry: Entry) -> str:
    """Which options make an algorithm another one."""
    rows = ["| with | it is | equal |", "| --- | --- | --- |"] if entry.reductions else []
    for found in entry.reductions:
        exact = "bit for bit" if found.tolerance is None else f"to {found.tolerance:g}"
        other = ", ".join(said for said in (f"[{title(found.to)}]({found.to}.md)", plain(found.its)) if said)
        rows.append(f"| {plain(found.options) or 'its defaults'} | {other} | {exact} |")
    return "\n".join(rows)


def plain(options: Mapping[str, Any]) -> str:
    """Options as they stand in a file, in a line."""
    return ", ".join(f"`{key} = {code(value).strip('`')}`" for key, value in options.items())


def laws_of(entry: Entry) -> str:
    """Which laws run on an algorithm."""
    link = "[the laws](../add-an-algorithm.md#laws)"
    if not entry.exempt:
        return f"All {link} run on it."
    return f"All {link} run on it, but for:\n\n" + "\n".join(f"- **{law}**: {why}" for law, why in entry.exempt.items())


# -- laws -------------------------------------------------------------------------------------------------------------


def laws() -> str:
    """The laws, each as its function says it."""
    names = dict.fromkeys(law.name for law in LAWS)
    rows = [f"| `{name}` | {'<br>'.join(law.says for law in LAWS if law.name == name)} |" for name in names]
    return "\n".join(["| law | what holds |", "| --- | --- |", *rows])


def worked(name: str) -> str:
    """A worked example: a file that runs."""
    text = (ROOT / "docs" / "examples" / f"{name}.py").read_text(encoding="utf-8")
    return f'```python title="{name}.py"\n{text}```'


def running() -> str:
    """References to what runs things from Python, and what it returns, wherever they live."""
    functions = (fedtide.population, fedtide.simulate, fedtide.run, fedtide.tune)
    results = (get_type_hints(function)["return"] for function in functions[1:])
    return "\n\n".join(f"::: {thing.__module__}.{thing.__name__}" for thing in (*functions, *results))


def namespaces() -> str:
    """A section for each namespace of the package: what it is for, and every class and function in it."""
    out = []
    for space in (getattr(fedtide, name) for name in fedtide.__all__):
        if not inspect.ismodule(space):
            continue
        example = docstring(space.__doc__).prose.split("\n\n")[0]
        things = [getattr(space, name) for name in dir(space) if not name.startswith("_")]
        pages = [f"::: {thing.__module__}.{thing.__qualname__}" for thing in things if documentable(thing)]
        doctest = "\n".join(line for line in (space.__doc__ or "").splitlines()[1:] if line)
        shown = doctest[doctest.find(">>>") :] if ">>>" in doctest else ""
        title = f"## ft.{space.__name__.removeprefix('fedtide.')}"
        out += [title, example, f"```pycon\n{shown}\n```" if shown else ""]
        if space is fedtide.algorithms:
            out.append("Every algorithm has a [page of its own](algorithms/index.md).")
        else:
            out.append("\n".join(pages))
    return "\n\n".join(part for part in out if part)


def documentable(thing: Any) -> bool:
    """Whether something is a class or a function of this package, and not an annotation."""
    return (inspect.isclass(thing) or inspect.isfunction(thing)) and thing.__module__.startswith("fedtide.")


# -- the events of mkdocs ---------------------------------------------------------------------------------------------

GENERATED: dict[str, Callable[[], str]] = {
    "configuration": configuration,
    "algorithms": algorithm_table,
    "laws": laws,
    "last_two": partial(worked, "last_two"),
    "ditto": partial(worked, "ditto"),
    "running": running,
    "namespaces": namespaces,
    "recipes": recipes,
}


def on_config(config: Any) -> Any:
    """Put a line for each algorithm into the navigation."""
    for entry in config.nav or []:
        for name, below in entry.items() if isinstance(entry, dict) else ():
            if name == "Algorithms":
                below += [{title(algorithm): f"algorithms/{algorithm}.md"} for algorithm in REGISTRY]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add a page per algorithm."""
    from mkdocs.structure.files import File

    for name in REGISTRY:
        files.append(File.generated(config, f"algorithms/{name}.md", content=algorithm_page(name)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in what is generated."""
    return re.sub(r"<!-- generated: (\w+) -->", lambda found: GENERATED[found[1]](), markdown)
