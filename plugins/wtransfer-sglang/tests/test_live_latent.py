"""A live SGLang with multi-head latent attention, which keeps tensors made of the weights.

It is asked for no tokens: torch's own attention, SGLang's without a device, does not compute it.
"""

import pytest
import sglang_models
from publishers import pushed
from server import Server

pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.timeout(600)]


def test_load_that_renews_what_was_absorbed_is_proven_and_updates_are_taken(tmp_path):
    folders = {name: tmp_path / name for name in "AB"}
    for seed, folder in enumerate(folders.values(), start=1):
        sglang_models.make(folder, "latent", seed)
    server = Server(tmp_path / "server", folders["A"])
    try:
        server.ready()
        for name in "BA":
            pushed(folders[name], server, name)
            info = server.weight_info()
            assert (info["weight_version"], info["state"]) == (name, "serving")
    finally:
        server.close()
