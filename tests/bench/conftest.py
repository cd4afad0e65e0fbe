import sys
from pathlib import Path

import pytest

# The processes of a case find there what the tests let them run.
sys.path.append(str(Path(__file__).parent))


@pytest.fixture(scope="module")
def runner():
    from wtransfer.bench.harness import Runner

    benches = [f"wtransfer.bench.{name}" for name in ("weights", "offload", "connectors")]
    with Runner([*benches, "bench_cases"]) as found:
        yield found
    assert not Path(found.folder).exists()


@pytest.fixture
def children(runner):
    """Return the processes that cases have left."""
    path = Path(f"/proc/{runner.zygote.pid}/task/{runner.zygote.pid}/children")
    return lambda: path.read_text().split()
