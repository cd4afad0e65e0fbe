"""Run the command line as ``python -m wtransfer``."""

from wtransfer.cli import main

if __name__ == "__main__":
    main(prog_name="wtransfer")
