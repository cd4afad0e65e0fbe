"""Watch every interpreter that the tests start: nothing may be unpickled where peers are heard.

Python imports this module when it starts, because the tests put its folder on PYTHONPATH. It must
therefore stay small, import little, and never raise.

Seen are the interpreter's own audit event for a global that a pickle names (also by the C
unpickler, however it was reached), and every call of `pickle.load` and `pickle.loads`, which plain
pickles do without that event. Each is written to a file, one line of JSON with the stack; what may
stand there is for `test_unpickled_nothing.py` to say.
"""

import os
import sys

RECORD = "WTRANSFER_TESTS_UNPICKLED"
"""Variable with the file's path."""


def _record(event, detail):
    import json

    frames, frame = [], sys._getframe(2)
    while frame is not None:
        frames.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back
    line = json.dumps({"event": event, "detail": detail, "pid": os.getpid(), "stack": frames})
    # One write to a file opened for appending: lines of several processes do not mix.
    fd = os.open(os.environ[RECORD], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(fd, line.encode() + b"\n")
    finally:
        os.close(fd)


def _on_audit(event, args):
    if event == "pickle.find_class" and RECORD in os.environ:
        _record(event, ".".join(map(str, args)))


def _watched(function, name):
    def call(*args, **kwargs):
        if RECORD in os.environ:
            _record(name, "")
        return function(*args, **kwargs)

    return call


def watch():
    """Begin; once per process."""
    import pickle

    if getattr(pickle.loads, "__name__", "") == "call":
        return
    sys.addaudithook(_on_audit)
    pickle.loads = _watched(pickle.loads, "pickle.loads")
    pickle.load = _watched(pickle.load, "pickle.load")


if RECORD in os.environ:
    watch()
