"""What a child of the zygote runs: a program, as if an interpreter had been started with it."""

import os
import sys


def run(code, arguments, environ):
    os.environ.update(environ)
    sys.argv[1:] = arguments
    # There its variables live until the interpreter ends.
    exec(compile(code, "program", "exec"), vars(sys.modules["__main__"]))
