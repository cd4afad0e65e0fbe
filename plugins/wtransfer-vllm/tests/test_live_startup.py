"""What the plug-in costs each process of a starting server; `test_live_processes.py`: an engine."""

import pytest
from server import Server
from starting import check_costs, noted

pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.timeout(600)]


def test_each_of_a_servers_processes_registers_once(models, tmp_path, record_property):
    log, env = noted(tmp_path)
    Server(tmp_path, models / "A", "shm", env).close()
    check_costs(log, 3, record_property)
