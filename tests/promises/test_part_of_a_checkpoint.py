"""README, "Weights".

`Publisher(model, base=DIR)` knows the checkpoint that the workers were started with. A trainer
may then hold a part of it, as the language model beside a frozen vision tower: the rest stays,
nothing of it travels, and every worker proves that it has it.
"""

import json

import pytest


@pytest.fixture
def folders(prompt, tmp_path):
    """Two checkpoints that differ in one element of the tower, which the trainer does not have."""
    prompt("saver").do("""
        from actors import *
        from safetensors.torch import save_file
        for name in ("base", "odd-tower"):
            os.mkdir(name)
            whole = weights(1) | {"tower.weight": torch.arange(4096.0)}
            whole["tower.weight"][-1] += name == "odd-tower"
            save_file(whole, f"{name}/model.safetensors")
    """)
    return tmp_path


def serve(command, folder, place):
    made = command("worker", "--checkpoint", folder, "--listen", place, "--name", folder.name)
    while place not in made.line():
        pass
    return made


TRAINER = """
    from actors import *
    publisher = wtransfer.Publisher(weights(2), base={base!r}, hosts={places!r}, deadline_s=10)
"""


def test_rest_is_proven_and_does_not_travel(folders, command, prompt, address):
    places = [f"{address}-{n}" for n in range(2)]
    for each in places:
        serve(command, folders / "base", each)
    trainer = prompt("trainer")
    trainer.do(TRAINER.format(base=str(folders / "base"), places=places))
    assert trainer.do("""
        report = publisher.publish("v2").raise_unless_ok()
        report.nbytes == sum(each.nbytes for each in weights(2).values())
    """)
    status = command("status", *(f"--to={each}" for each in places), "--json")
    assert status.wait() == 0
    held = {each["fingerprint"] for each in json.loads(status.output())["workers"]}
    assert held == {trainer.do("report.fingerprint")}


def test_worker_with_another_rest_refuses_and_no_worker_changes(folders, command, prompt, address):
    places = [f"{address}-{n}" for n in range(2)]
    serve(command, folders / "base", places[0])
    serve(command, folders / "odd-tower", places[1])
    trainer = prompt("trainer")
    trainer.do(TRAINER.format(base=str(folders / "base"), places=places))
    with pytest.raises(Exception, match=r"tower\.weight") as caught:
        trainer.do("publisher.publish('v2')")
    assert "worker odd-tower" in str(caught.value)
    assert "v2" not in trainer.do("[each.version for each in publisher.workers()]")
