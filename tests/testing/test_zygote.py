import os
import signal
import time
from pathlib import Path

import pytest

from wtransfer.errors import ClosedError, ForkedError, LimitError, PeerLostError, StallError
from wtransfer.testing.zygote import Zygote

HERE = Path(__file__).parent
PATIENCE_S = 20.0


def eventually(condition):
    """Return what the condition returns once it is true."""
    end = time.monotonic() + PATIENCE_S
    while not (result := condition()):
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.005)
    return result


def descriptors():
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


def is_gone(pid):
    """Whether a process has ended (a zombie has, too)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.fixture
def zygote():
    before = descriptors()
    with Zygote(preload=["zygote_jobs"], paths=[HERE]) as made:
        yield made
    assert descriptors() == before
    assert is_gone(made.pid)


def test_a_child_returns_what_its_function_returns(zygote):
    assert zygote.spawn("zygote_jobs:add", 3, other=4).wait(PATIENCE_S) == 7
    assert zygote.spawn("zygote_jobs:nothing").wait(PATIENCE_S) == 0
    assert zygote.spawn("zygote_jobs:leave").wait(PATIENCE_S) == 7


def test_output_goes_where_it_is_told(zygote, tmp_path):
    out, err = tmp_path / "out", tmp_path / "err"
    for text in ("one", "two"):
        zygote.spawn("zygote_jobs:say", text, stdout=out, stderr=err).wait(PATIENCE_S)
    assert out.read_text() == "one\ntwo\n"
    assert err.read_text() == "ONE\nTWO\n"


def test_an_exception_is_printed_and_ends_with_1(zygote, tmp_path):
    err = tmp_path / "err"
    assert zygote.spawn("zygote_jobs:fail", stderr=err).wait(PATIENCE_S) == 1
    assert "ValueError: this child fails" in err.read_text()


def test_a_child_inherits_neither_threads_nor_descriptors(zygote, tmp_path):
    sleeper = zygote.spawn("zygote_jobs:sleep", stdout="/dev/null")
    out = tmp_path / "out"
    zygote.spawn("zygote_jobs:what_a_child_has", stdout=out).wait(PATIENCE_S)
    assert sleeper.poll() is None
    assert out.read_text() == "1\n"


def test_wait_gives_up_at_its_deadline(zygote):
    child = zygote.spawn("zygote_jobs:sleep", stdout="/dev/null")
    with pytest.raises(StallError, match=f"the end of process {child.pid} within 0.1 s"):
        child.wait(0.1)
    assert child.poll() is None


@pytest.mark.parametrize("stopped", [False, True])
def test_killing_shows_as_a_negative_return_code(zygote, stopped):
    child = zygote.spawn("zygote_jobs:sleep", stdout="/dev/null")
    if stopped:
        os.kill(child.pid, signal.SIGSTOP)
    child.kill()
    assert child.wait(PATIENCE_S) == -signal.SIGKILL
    child.kill()
    assert child.poll() == -signal.SIGKILL


def test_close_kills_the_children_and_says_so():
    zygote = Zygote(preload=["zygote_jobs"], paths=[HERE])
    children = [zygote.spawn("zygote_jobs:sleep", stdout="/dev/null") for _ in range(3)]
    os.kill(children[0].pid, signal.SIGSTOP)
    zygote.close()
    zygote.close()
    assert [child.poll() for child in children] == [-signal.SIGKILL] * 3
    assert all(is_gone(pid) for pid in [zygote.pid, *(child.pid for child in children)])
    with pytest.raises(ClosedError):
        zygote.spawn("zygote_jobs:nothing")


def test_a_killed_zygote_takes_its_children_along(zygote):
    child = zygote.spawn("zygote_jobs:sleep", stdout="/dev/null")
    os.kill(zygote.pid, signal.SIGKILL)
    eventually(lambda: is_gone(child.pid))
    with pytest.raises(PeerLostError, match="the zygote is gone"):
        child.wait(PATIENCE_S)
    with pytest.raises(PeerLostError, match="the zygote is gone"):
        zygote.spawn("zygote_jobs:nothing")


def test_a_stopped_zygote_can_be_closed(monkeypatch):
    zygote = Zygote(preload=["zygote_jobs"], paths=[HERE])
    child = zygote.spawn("zygote_jobs:sleep", stdout="/dev/null")
    monkeypatch.setattr("wtransfer.testing.zygote.REPLY_DEADLINE_S", 0.3)
    os.kill(zygote.pid, signal.SIGSTOP)
    with pytest.raises(StallError, match="an answer of the zygote"):
        zygote.spawn("zygote_jobs:nothing")
    zygote.close()
    eventually(lambda: is_gone(zygote.pid) and is_gone(child.pid))


def test_zygote_and_children_end_with_their_maker(zygote, tmp_path):
    out = tmp_path / "out"
    maker = zygote.spawn("zygote_jobs:make_a_zygote_and_sleep", stdout=out)
    words = eventually(
        lambda: out.exists() and out.read_text().endswith("\n") and out.read_text().split()
    )
    inner, child, copy = map(int, words)
    assert not is_gone(inner)
    assert not is_gone(child)
    maker.kill()
    assert maker.wait(PATIENCE_S) == -signal.SIGKILL
    eventually(lambda: is_gone(inner) and is_gone(child))
    assert not is_gone(copy)
    os.kill(copy, signal.SIGKILL)


def test_a_forked_copy_of_its_maker_cannot_use_or_end_it(zygote):
    child = zygote.spawn("zygote_jobs:sleep", stdout="/dev/null")
    pid = os.fork()
    if pid == 0:
        try:
            zygote.spawn("zygote_jobs:nothing")
        except ForkedError:
            zygote.close()
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert child.poll() is None
    assert zygote.spawn("zygote_jobs:add", 1).wait(PATIENCE_S) == 1


def test_arguments_that_are_too_large_are_refused(zygote):
    with pytest.raises(LimitError, match="too large; pass a file"):
        zygote.spawn("zygote_jobs:add", bytes(1 << 20))
    assert zygote.spawn("zygote_jobs:add", 1).wait(PATIENCE_S) == 1


def test_a_module_that_cannot_be_imported_is_named():
    with pytest.raises(PeerLostError, match="No module named 'no_such_module'"):
        Zygote(preload=["no_such_module"])


def test_a_module_that_leaves_a_thread_is_refused(tmp_path):
    (tmp_path / "threaded.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    with pytest.raises(PeerLostError, match="importing threaded left 1 threads running"):
        Zygote(preload=["threaded"], paths=[tmp_path])
