"""The built site has source files of the package, and notebooks that were run, in place of links to them.

A notebook whose metadata name a module that it `needs` is not run where that is not installed: the site has what it
showed when it was written.
"""

import html
import importlib.util
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SECONDS = 600
"""Within which a cell of a notebook has to end."""


def on_page_markdown(markdown: str, **_: object) -> str:
    """Put the file where a line is nothing but a link to it."""
    markdown = re.sub(r"^\[`(src/[\w/]+\.py)`\]\(.*\)$", _shown, markdown, flags=re.MULTILINE)
    return re.sub(r"^\[`([\w-]+\.ipynb)`\]\(.*\)$", _run, markdown, flags=re.MULTILINE)


def _shown(link: re.Match[str]) -> str:
    lines = (ROOT / link[1]).read_text(encoding="utf-8").splitlines()
    return "\n".join([f'??? example "{link[1]}"', *(f"    {line}" for line in ["```python", *lines, "```"])])


def _run(link: re.Match[str]) -> str:
    """Return the cells of a notebook of docs/notebooks, and what they showed."""
    import nbformat  # here, because only a build runs notebooks

    notebook: Any = nbformat.read(ROOT / "docs" / "notebooks" / link[1], as_version=4)
    if (needs := notebook.metadata.get("needs")) is None or importlib.util.find_spec(needs) is not None:
        _execute(notebook, link[1])
    return "\n\n".join([*map(_cell, notebook.cells), f"[The notebook]({link[1]})"])


def _execute(notebook: Any, name: str) -> None:
    """Run the cells of a notebook; one that fails ends the build."""
    from mkdocs.exceptions import PluginError
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
    from traitlets.config import Config

    sockets = Config({"KernelManager": {"transport": "ipc"}})  # files, that no other user reads
    client = NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", config=sockets)
    with client.setup_kernel():
        for index, cell in enumerate(notebook.cells):
            where = f"docs/notebooks/{name}, cell {index + 1}"  # text counts, too
            try:
                client.execute_cell(cell, index)
            except CellExecutionError as error:
                raise PluginError(f"{where}: {error.ename}: {error.evalue}") from None
            except CellTimeoutError:
                raise PluginError(f"{where}: not done within {SECONDS} s") from None
            except DeadKernelError:
                raise PluginError(f"{where}: its process died") from None


def _cell(cell: Any) -> str:
    if cell.cell_type == "markdown":
        return re.sub(r"\A# .*\n*", "", cell.source)  # the page has the title
    shown = "\n\n".join(filter(None, map(_output, cell.outputs)))
    return f"```python\n{cell.source}\n```\n\n{shown}"


def _output(output: Any) -> str:
    if output.output_type == "stream":
        return _block(output.text)
    data = output.get("data", {})
    for kind in ("text/html", "image/svg+xml"):
        if kind in data:
            inside = re.sub(r"\n\s*\n", "\n", data[kind])  # a blank line would end the block
            return f'<div class="output">{inside}</div>'
    return _block(data.get("text/plain", ""))


def _block(text: str) -> str:
    return f'<div class="output"><pre>{html.escape(text.rstrip())}</pre></div>' if text.strip() else ""
