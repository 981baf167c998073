"""Entry point of `python -m fedtide`."""

from fedtide.cli.commands import main

if __name__ == "__main__":
    main()
