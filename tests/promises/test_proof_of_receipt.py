"""README, promise 2.

Proof of receipt. No success without a digest of every tensor, from every worker of the round and
every host that was named (`hosts=`), also one that a supervisor has restarted meanwhile.
"""

import json
import re

import pytest

SAVE = """
    from actors import *
    from safetensors.torch import save_file
    for value in (1, 2):
        os.makedirs(f"step-{value}", exist_ok=True)
        save_file(weights(value), f"step-{value}/model.safetensors")
"""


@pytest.fixture
def checkpoints(prompt, tmp_path):
    prompt("saver").do(SAVE)
    return {value: tmp_path / f"step-{value}" for value in (1, 2)}


@pytest.fixture
def serve(command, checkpoints, address):
    """Return a function that starts ``wtransfer worker`` at the address of this test."""

    def start(name, at):
        made = command(
            "worker", "--checkpoint", checkpoints[1], "--listen", at, "--name", name
        )  # fmt: skip
        while at not in made.line():
            pass
        return made

    return start


def test_checkpoint_spoilt_after_it_was_sealed_reaches_no_worker(command, checkpoints, serve):
    at = "unix:@promises-" + checkpoints[1].parent.name
    serve("worker", at)
    sealed = command("seal", checkpoints[2])
    assert sealed.wait() == 0, sealed.log.read_text()
    file = checkpoints[2] / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1  # the last element of a tensor
    file.write_bytes(data)
    push = command("push", checkpoints[2], "--to", at)
    assert push.wait() == 1
    assert re.search(r"layer\.\d", push.log.read_text()), "the tensor has no name in the error"
    status = command("status", "--to", at, "--json")
    assert status.wait() == 0
    assert "step-2" not in status.output()
    data[-1] ^= 1
    file.write_bytes(data)
    push = command("push", checkpoints[2], "--to", at, "--json")
    assert push.wait() == 0, push.log.read_text()
    assert [each["digests_equal"] for each in json.loads(push.output())["workers"]] == [True]


def test_version_spoilt_on_disk_is_not_rolled_back_to(worker, trainer, tmp_path):
    """The rollback sends other bytes than were proven: one bit of them."""
    kept = tmp_path / "versions"
    first = worker("first")
    publisher = trainer(1, engine="file", options={"path": str(kept)})
    publisher.do("source.gate.set(), publisher.publish('v2')")
    publisher.do("source.tensors = weights(3); publisher.publish('v3')")
    old = min(kept.rglob("*.safetensors"), key=lambda each: each.stat().st_mtime_ns)
    data = bytearray(old.read_bytes())
    data[-1] ^= 1
    old.chmod(0o600)
    old.write_bytes(data)
    with pytest.raises(worker.error) as caught:
        publisher.do("publisher.rollback('v2').ok")
    assert "WTransferError" in caught.value.kinds
    assert first.do("serving.state()") == [[1, 2, 3], [], "v3"]
    data[-1] ^= 1
    old.write_bytes(data)
    assert publisher.do("publisher.rollback('v2').ok")
    assert first.do("serving.state()") == [[1, 2, 3, 2], [], "v2"]


def test_named_host_restarted_halfway_is_in_no_report_before_it_holds_the_version(
    serve, prompt, command
):
    names = ["one", "two"]
    places = {each: f"unix:@promises-{each}-{id(serve)}" for each in names}
    hosts = {each: serve(each, places[each]) for each in names}
    trainer = prompt("trainer")
    trainer.do(f"""
        from actors import *
        source = Gated(weights(2))
        publisher = wtransfer.Publisher(
            source, hosts={list(places.values())!r}, options=dict(bucket_nbytes=1), deadline_s=20
        )
        round = publisher.publish("v2", wait=False)
        until(lambda: source.reached.is_set() and all(round.progress().values()))
    """)
    hosts["two"].kill()
    hosts["two"] = serve("two", places["two"])  # by a supervisor
    trainer.start("""
        source.gate.set()
        report = round.result(40)
        report.ok, {each.worker: (each.outcome, each.digests_equal) for each in report.workers}
    """)
    # Either the round ends with an error that names it, or the report is of both.
    try:
        ok, by_worker = trainer.answer(60)
    except RuntimeError as error:
        ok, by_worker = False, {"two": str(error)}
    assert "two" in str(by_worker)
    if ok:
        assert by_worker == {each: ["committed", True] for each in names}
    else:
        assert trainer.do("publisher.publish('v2').raise_unless_ok().ok")
    status = command("status", *(f"--to={each}" for each in places.values()), "--json")
    assert status.wait() == 0, status.log.read_text()
    assert status.output().count('"v2"') >= len(names)


def test_named_host_that_stays_away_ends_the_round_before_a_byte_moves(serve, prompt):
    places = [f"unix:@promises-{each}-{id(serve)}" for each in "ab"]
    hosts = [serve(each, each) for each in places]
    trainer = prompt("trainer")
    trainer.do(f"""
        from actors import *
        source = Gated(weights(2))
        source.gate.set()
        publisher = wtransfer.Publisher(source, hosts={places!r}, return_s=0.5)
        publisher.publish("v2").ok
    """)
    hosts[1].kill()
    with pytest.raises(Exception, match=re.escape(places[1])) as caught:
        trainer.do("source.tensors = weights(3); publisher.publish('v3').ok")
    assert "HostsError" in caught.value.kinds
    # The other one has the old version, and both have the next one once the host is back.
    assert trainer.do("[each.version for each in publisher.workers()]") == ["v2"]
    serve("b", places[1])
    assert trainer.do("""
        until(lambda: len(publisher.workers()) == 2)
        publisher.publish("v3").ok
    """)
