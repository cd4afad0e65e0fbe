"""README, promise 4.

Nothing hangs. Every wait has a deadline; a dead or stalled peer is named.
"""

import re
import signal
import socket

import pytest

HALFWAY = """
    round = publisher.publish({version!r}, wait=False)
    until(lambda: source.reached.is_set() and all(round.progress().values()))
"""


def test_worker_stopped_halfway_is_named_and_goes_on_later(worker, trainer):
    first, second = worker("first"), worker("second")
    publisher = trainer(2, deadline_s=3)
    publisher.do("source.gate.set(); publisher.publish('v1')")
    publisher.do("source.tensors = weights(3); source.reached.clear(); source.gate.clear()")
    assert publisher.do(HALFWAY.format(version="v2"))
    second.stop()
    with pytest.raises(worker.error, match="second") as caught:
        publisher.do("source.gate.set(); round.result()", 20)
    assert {"WTransferError", "TimeoutError"} <= set(caught.value.kinds) or (
        {"WTransferError", "ConnectionError"} <= set(caught.value.kinds)
    )
    assert first.do("serving.state()") == [[1, 2], [], "v1"]
    second.signal(signal.SIGCONT)
    publisher.do("publisher.wait_for_workers(2)")
    assert publisher.do("publisher.publish('v2').ok")
    for each in (first, second):
        assert each.do("serving.state()") == [[1, 2, 3], [], "v2"]


def test_stopped_trainer_holds_no_worker_and_no_status(worker, trainer, command, address):
    first = worker("first", deadline_s=1)
    publisher = trainer(1, deadline_s=3)
    publisher.do("source.gate.set(); publisher.publish('v2')")
    publisher.stop()
    with pytest.raises(worker.error) as caught:
        first.do("session.wait_for('v3', 0.5)")
    assert {"StallError", "TimeoutError"} <= set(caught.value.kinds)
    status = command("status", "--join", address, "--deadline", "0.5")
    assert status.wait() == 3
    assert address in status.output() + status.log.read_text()
    before = first.do("serving.steps")
    assert first.do(f"until(lambda: serving.steps > {before} + 2)")
    first.do("session.close()")


def test_push_to_a_server_that_never_answers_ends_and_names_it(command, prompt, tmp_path):
    prompt("saver").do("""
        from actors import *
        from safetensors.torch import save_file
        save_file(weights(2), "model.safetensors")
    """)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = f"127.0.0.1:{silent.getsockname()[1]}"
        file = tmp_path / "model.safetensors"
        push = command("push", file, "--to", f"tcp:{place}", "--deadline", "0.5")
        assert push.wait() == 1
        assert re.search(re.escape(place), push.log.read_text())
        status = command("status", "--to", f"tcp:{place}", "--deadline", "0.5")
        assert status.wait() == 3
        assert place in status.output() + status.log.read_text()


def test_source_that_never_yields_ends_the_round(worker, trainer):
    first = worker("first")
    publisher = trainer(1, deadline_s=0.5)
    with pytest.raises(worker.error) as caught:
        publisher.do("publisher.publish('v2')", 20)
    assert {"StallError", "TimeoutError"} <= set(caught.value.kinds)
    publisher.do("source.gate.set()")
    assert first.do("serving.state()") == [[1], [], None]
