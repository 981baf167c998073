"""Entry point of the command, and of `python -m fedtide`."""

import sys


def main() -> None:
    """Run a command; Ctrl-C while its modules are imported ends it with one line, too."""
    try:
        from fedtide.cli.commands import main as run_command
    except (KeyboardInterrupt, RuntimeError) as error:
        if KeyboardInterrupt not in (type(error), type(error.__cause__)):  # the cause of one in a class that is made
            raise
        print("fedtide: interrupted", file=sys.stderr)
        sys.exit(130)
    run_command()


if __name__ == "__main__":
    main()
