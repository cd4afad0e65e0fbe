"""README, promise 7.

Serving goes on during a transfer. Only the commit pauses it, and the pause is measured.
"""

import json
import re


def test_worker_takes_steps_with_its_old_weights_while_half_an_update_is_there(worker, trainer):
    workers = worker("first"), worker("second", commit="copy")
    publisher = trainer(2)
    assert publisher.do("""
        round = publisher.publish("v2", wait=False)
        until(lambda: source.reached.is_set() and all(round.progress().values()))
    """)
    for each in workers:
        # The gate is closed, so these steps are taken within the transfer.
        before = each.do("serving.steps")
        assert each.do(f"until(lambda: serving.steps >= {before} + 20)")
        assert each.do("session.status().update.staged_nbytes") > 0
        assert each.do("serving.state()") == [[1], [], None]
    assert publisher.do("round.phase") == "transfer"
    publisher.do("source.gate.set(); report = round.result(20)")
    for each in workers:
        assert each.do("serving.state()") == [[1, 2], [], "v2"]
    # The pause of each worker is in the report.
    pauses = publisher.do("[each.seconds['commit'] for each in report.workers]")
    assert len(pauses) == len(workers)
    assert all(pauses)
    assert publisher.do("str(report).count('commit ')") >= len(workers)


def test_trainer_sees_what_a_worker_has_staged(worker, trainer):
    """`help(Round.progress)`: what a worker has told, which is never more than it has staged."""
    first = worker("first")
    publisher = trainer(1)
    assert publisher.do("""
        round = publisher.publish("v2", wait=False)
        until(lambda: source.reached.is_set() and all(round.progress().values()))
    """)
    # Every tensor before the gate has come, and no more will: so the worker says as well.
    staged = first.do("""
        until(lambda: session.status().update.staged_nbytes >= 4 * tensors["layer.0"].nbytes)
        session.status().update.staged_nbytes
    """)
    assert 0 < publisher.do("round.progress()['first']") <= staged


def test_command_answers_with_its_old_weights_while_half_an_update_is_there(
    command, prompt, tmp_path
):
    trainer = prompt("trainer")
    trainer.do("""
        from actors import *
        from safetensors.torch import save_file
        save_file(weights(1), "model.safetensors")
    """)
    host = command("worker", "--checkpoint", tmp_path / "model.safetensors", "--name", "host")
    while not (found := re.search(r"127\.0\.0\.1:\d+", host.line())):
        pass
    place = f"tcp:{found[0]}"
    assert trainer.do(f"""
        source = Gated(weights(2))
        publisher = wtransfer.Publisher(
            source, hosts=[{place!r}], options=dict(bucket_nbytes=1), deadline_s=20
        )
        round = publisher.publish("step-2", wait=False)
        until(lambda: source.reached.is_set() and all(round.progress().values()))
    """)
    status = command("status", "--to", place, "--json")
    status.wait()
    (before,) = json.loads(status.output())["workers"]
    assert before["version"] != "step-2"
    trainer.do("source.gate.set(); round.result(20)")
    status = command("status", "--to", place, "--json")
    assert status.wait() == 0
    (after,) = json.loads(status.output())["workers"]
    assert after["version"] == "step-2"
    assert after["fingerprint"] != before["fingerprint"]
