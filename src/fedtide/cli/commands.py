"""Federated learning when the data will not hold still.

Simulate a federation whose clients differ and come and go with the hour;
compare methods over seeds; read one report that shows the effects of the
shift and the method that coped.

    fedtide init study.toml        write a study to begin with
    fedtide recipes                list what ships with the package
    fedtide run recipe:demo        run a recipe
    fedtide show study.toml        see which client holds which rows, and when
    fedtide run study.toml         run your own experiment
    fedtide tune study.toml        search its learning rates and the like
    fedtide resume runs/study      go on after a stop or a crash
    fedtide report runs/study      make the report again
    fedtide track runs/study ...   send metrics to TensorBoard, MLflow, W&B
    fedtide inspect data.csv       find which shift your own data have
    fedtide recommend data.csv     find which methods may help with it
    fedtide export runs/study      write a model for other programs
    fedtide predict runs/study ... predict the rows of a file
    fedtide check mine:fednova     check your own algorithm against the laws
    fedtide algorithms             list the algorithms; models and keys likewise
    fedtide deploy study.toml ...  make a site for real clients, who join it

Exit status: 0 done; 1 a check failed (law, verify, replay); 2 wrong input,
and one line says what; 130 stopped by Ctrl-C.
"""

import inspect
import io
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from cyclopts import App, CoercionError, CycloptsError, Group, MissingArgumentError, Parameter

from fedtide import api
from fedtide._version import installed
from fedtide.cli import actions
from fedtide.core.docstrings import docstring
from fedtide.core.errors import FedtideError, refused, unknown
from fedtide.report.terminal import Screen
from fedtide.site import site_commands as deployment

AGAIN = "; make room, and run the same command again"
commands, real = Group("Commands", sort_key=0), Group("Real clients", sort_key=1)
# Whatever takes long to import (computing, checks of configurations, drawing) is imported by the commands that need it:
# `--help`, and a line about a wrong option, come at once.
app = App(
    name="fedtide",
    help=__doc__,
    help_format="plaintext",
    version=installed,
    group_commands=commands,
    suppress_keyboard_interrupt=False,
    default_parameter=Parameter(negative=()),  # options that turn off a default are not needed
)
app["--help"].group = "About"
app["--version"].group = "About"
app.register_install_completion_command(group="About")

COMMANDS = {
    actions: "run init tune recommend resume report verify track export predict show inspect check "
    "list_recipes algorithms keys models",
    deployment: "deploy rehearse serve admit invite status join replay",
}
"""Commands by module; those of real clients are a group by themselves."""


def described(command: Callable[..., int], function: Callable[..., Any]) -> None:
    """Give a command the description of a function and of the arguments that both have, before its own words."""
    theirs, ours = docstring(function.__doc__), docstring(command.__doc__)
    texts = {name: text.partition(" In Python")[0] for name, text in theirs.args.items()} | ours.args
    lines = [f"    {name}: {texts[name]}" for name in inspect.signature(command).parameters if name in texts]
    more = ours.prose.partition("`.")[2]  # behind "Command of `fedtide.run`."
    command.__doc__ = "\n".join([theirs.prose.partition("\n\n")[0] + more, "", "Args:", *lines])


for module, names in COMMANDS.items():
    for command in (getattr(module, name) for name in names.split()):
        name = command.__name__.removeprefix("list_")
        if function := getattr(api, "write_report" if name == "report" else name, None):
            described(command, function)
        app.command(command, name=name, group=real if module is deployment else commands)


def main(arguments: list[str] | None = None) -> None:
    """Run a command; exit status 2 and one line for anything a person can mend."""
    os.environ["MPLBACKEND"] = "agg"  # pictures are files; one that is set for screens may not exist here
    # Before NumPy is imported: its threads wait for each other in a loop, nine times the work on a busy machine.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal cannot write
    try:
        _check_text(sys.argv[1:] if arguments is None else arguments)
        status = app(arguments, console=Screen(), exit_on_error=False, print_error=False, result_action="return_value")
    except FedtideError as error:
        status = _fail(str(error))
    except CycloptsError as error:
        status = _fail(_of_option(error))
    except KeyboardInterrupt:
        status = _fail("interrupted", status=130)
    except ValueError as error:
        if "null" not in str(error):
            raise
        status = _fail("the name of a file or folder has the character NUL, allowed: names without it")
    except MemoryError as error:
        status = _fail(f"not enough memory: {error}" if str(error) else "not enough memory")
    except BrokenPipeError:  # what read the output has ended (`| head`)
        status = 0
    except OSError as error:
        place = error.filename or "input/output"
        no_folder = isinstance(error, FileExistsError | NotADirectoryError) and not Path(place).is_dir()
        status = _fail(f"{place}: {'no folder, allowed: a folder' if no_folder else error.strerror or error}")
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status if isinstance(status, int) else 0)


def _of_option(error: CycloptsError) -> str:
    """Describe an error of an option or argument in the words of all other errors."""
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        command = " ".join(["fedtide", *(error.command_chain or ())])
        return f"{error.keyword or error.argument.name}: no value given; {command} --help says what it is"
    if isinstance(error, CoercionError) and error.token is not None and error.argument is not None:
        name, value = error.token.keyword or error.argument.name, error.token.value
        if get_origin(error.target_type) is Literal:
            return str(unknown(name, value, get_args(error.target_type)))
        if error.target_type is int:
            return str(refused(name, value, "a whole number"))
    return " ".join(str(error).split())


def _check_text(arguments: list[str]) -> None:
    """Raise for an argument that no file could hold: bytes that are no text in this locale."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise FedtideError(f"{argument}: is not UTF-8, or no text in this locale; allowed: UTF-8") from None


def _fail(line: str, status: int = 2) -> int:
    """Print an error, with advice if the disk is full, and return an exit status."""
    # Folders and files are made under another name first, which is not the one that was asked for.
    line = re.sub(r"\.(making-[0-9a-f]{16}|[0-9a-f]{16}\.writing)\b", "", line)
    line += AGAIN if actions.is_full(line) and "make room" not in line else ""
    print(f"fedtide: {line}", file=sys.stderr)
    return status
