"""README, "Two commands" and "Use it".

One process trains. Others serve, each in its own process, as many as you like. Both need the
same secret in their environment.

The demo exits with 0 only if every promise held.
"""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture
def printed():
    """Return the programs of the README by the name in their first line."""
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", README.read_text(), re.DOTALL)
    return dict(blocks)


def test_trainer_and_worker_of_the_readme_run_as_printed(printed, program, tmp_path):
    started = {}
    workers = ["worker-0.py", "worker-1.py"]
    for name in [*workers, "trainer.py"]:
        source = printed[re.sub(r"-\d", "", name)]
        # The address is one of the whole machine; another run of these tests may have it.
        source = source.replace("unix:@quickstart", f"unix:@quickstart-{tmp_path.name}")
        if name == "trainer.py":
            source = source.replace("wait_for_workers(1", f"wait_for_workers({len(workers)}")
        (tmp_path / name).write_text(source)
        started[name] = program(tmp_path / name)
    for name, each in started.items():
        assert each.wait() == 0, (name, each.log.read_text())
    report = started["trainer.py"].output()
    assert "step-7" in report
    fingerprint = re.search(r"\b[0-9a-f]{32}\b", report)[0]
    assert report.count("digests equal") == len(workers)
    for name in workers:
        output = started[name].output()
        assert output.startswith(f"step-7 {fingerprint}")
        assert output.count("7.") == 8


def test_programs_of_the_readme_without_a_token_say_what_to_export(printed, program, tmp_path):
    (tmp_path / "worker.py").write_text(printed["worker.py"])
    worker = program(tmp_path / "worker.py", WTRANSFER_TOKEN=None)
    assert worker.wait() == 1
    assert "AuthenticationError" in worker.log.read_text()
    assert "WTRANSFER_TOKEN" in worker.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("of", [(), ("--kv",)])
def test_demo_ends_with_0(command, of):
    options = () if of else ("--rounds", 4, "--model-size", "tiny")
    demo = command("demo", *of, *options)
    assert demo.wait(100) == 0, demo.log.read_text()
