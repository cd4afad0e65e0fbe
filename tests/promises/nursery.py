"""Forks the processes of the tests: each has imported torch, which takes a second, already.

Run by the Python of the virtual environment with a Unix socket as its standard input. A request is
one JSON object, ``argv`` and ``env`` and ``cwd``, with three descriptors: its standard streams.
``argv`` is a script and its arguments, or nothing: then the process is a prompt.
"""

import ast
import contextlib
import json
import os
import runpy
import signal
import socket
import sys
import traceback

import torch

import wtransfer

torch.set_num_threads(1)
wtransfer.Publisher  # noqa: B018  # imports what all have in common
wtransfer.WorkerSession  # noqa: B018


def prompt() -> None:
    """Execute snippets from standard input, a JSON string each; answer each with a line.

    The answer is the value of the expression that ends the snippet, or the error that it raised.
    """
    names = {"torch": torch, "wtransfer": wtransfer, "os": os}
    for line in sys.stdin:
        statements = ast.parse(json.loads(line)).body
        last = ast.parse("None").body[0]
        if isinstance(statements[-1], ast.Expr):
            last = statements.pop()
        try:
            exec(compile(ast.Module(statements, []), "<prompt>", "exec"), names)
            answer = {"value": eval(compile(ast.Expression(last.value), "<prompt>", "eval"), names)}
        except BaseException as error:
            traceback.print_exc()
            kinds = [each.__name__ for each in type(error).__mro__]
            answer = {"error": str(error), "kinds": kinds, "worker": getattr(error, "worker", None)}
        tell(answer)


def tell(what: object) -> None:
    """Print a line of JSON."""
    sys.stdout.write(json.dumps(what, default=str) + "\n")
    sys.stdout.flush()


def become(argv: list[str]) -> None:
    """Run a script as its interpreter would, or the prompt."""
    if argv:
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")
    else:
        prompt()


def main() -> None:
    """Fork until the socket is closed; report each child that has ended when asked."""
    with socket.socket(fileno=os.dup(0)) as requests:
        while True:
            data, fds, _, _ = socket.recv_fds(requests, 1 << 20, 3)
            if not data:
                return
            request = json.loads(data)
            if "wait" in request:
                _, status = os.waitpid(request["wait"], 0)
                requests.sendall(json.dumps(os.waitstatus_to_exitcode(status)).encode())
                continue
            pid = os.fork()
            if not pid:
                break
            requests.sendall(json.dumps(pid).encode())
            for each in fds:
                os.close(each)
    for number, each in enumerate(fds):
        os.dup2(each, number)
        os.close(each)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    become(request["argv"])


with contextlib.suppress(BrokenPipeError):
    main()
