"""README, "Weights".

    wtransfer push step-7/ --to unix:@worker-0    # all or nothing; exit code 0, 1 or 3
    wtransfer status --to unix:@worker-0          # which worker holds which version

`wtransfer push --help`: the exit code is 0 only if every worker has proven that it has the weights;
3 if some have and another, or a host that was dropped, has not; 1 if none has, 2 on a usage error.
"""

import pytest


@pytest.fixture
def places(prompt, command, tmp_path, address):
    """Two workers that serve step-1, and an address where none is; their folder has step-2."""
    prompt("saver").do("""
        from actors import *
        from safetensors.torch import save_file
        for value in (1, 2):
            os.mkdir(f"step-{value}")
            save_file(weights(value), f"step-{value}/model.safetensors")
    """)
    made = [f"{address}-{n}" for n in range(3)]
    for each in made[:2]:
        worker = command("worker", "--checkpoint", "step-1", "--listen", each)
        while each not in worker.line():
            pass
    return made


def run(command, *arguments):
    done = command(*arguments)
    return done.wait(), done.output() + done.log.read_text()


@pytest.mark.slow
def test_exit_code_says_who_has_the_weights(command, places):
    first, second, nobody = places
    both, all_of_them = [f"--to={each}" for each in places[:2]], [f"--to={each}" for each in places]
    short = ("--deadline", "1")
    code, said = run(command, "push", "step-2", *all_of_them, *short)
    assert code == 1
    assert nobody in said
    code, said = run(command, "status", *both)
    assert code in {0, 1}
    assert "step-2" not in said, "some have what not all could have"
    code, said = run(command, "push", "step-2", *all_of_them, *short, "--on-lost-worker", "drop")
    assert code == 3
    assert nobody in said
    code, said = run(command, "status", *all_of_them, *short)
    assert code == 3
    assert said.count("step-2") >= 2
    assert run(command, "push", "step-1", f"--to={first}")[0] == 0
    code, said = run(command, "status", *both)
    assert code == 1
    assert "step-1" in said
    assert "step-2" in said
    assert run(command, "push", "step-1", *both)[0] == 0
    assert run(command, "status", *both)[0] == 0
    assert run(command, "push", "no-such-folder", *both)[0] in {1, 2}
    assert run(command, "push", "step-1", "--to=ftp://nowhere")[0] == 2
    code, said = run(command, "push", "step-2", f"--to={second}", "--dry-run")
    assert code == 0
    assert "step-2" not in run(command, "status", *both)[1]
