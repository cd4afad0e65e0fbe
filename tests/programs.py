"""What a child of the zygote runs: a program, as if an interpreter had been started with it."""

import os
import sys


def run(code, arguments, environ):
    os.environ.update(environ)
    sys.argv[1:] = arguments
    # There its variables live until the interpreter ends.
    exec(compile(code, "program", "exec"), vars(sys.modules["__main__"]))


def command(arguments, site=None):
    """The command line of users; where a plug-in is installed, if `site` is that folder."""
    if site is not None:
        sys.path.insert(0, site)
    from wtransfer.cli import main

    main(arguments)
