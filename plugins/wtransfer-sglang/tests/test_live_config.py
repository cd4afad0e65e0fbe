"""A trainer whose configuration is not that of the checkpoint which a live SGLang serves."""

import contextlib
import json
import shutil

import pytest
import wtransfer
from publishers import pushed
from server import PROMPT, TOKEN, Server
from wtransfer.errors import SchemaError

pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.timeout(600)]

LINE = "rope_parameters.rope_theta is 10000.0 here and 500000.0 in the update"


def test_update_of_another_rope_theta_is_refused_by_name_unless_that_is_allowed(models, tmp_path):
    other = shutil.copytree(models / "llama-B", tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 5e5
    (other / "config.json").write_text(json.dumps(config))
    with contextlib.ExitStack() as stack:
        started = []
        for name, env in (("own", {}), ("any", {"WTRANSFER_CONFIG_MAY_DIFFER": "1"})):
            server = Server(tmp_path / name, models / "llama-A", env=env)
            started.append(stack.enter_context(contextlib.closing(server)))
        server, allowing = (each.ready() for each in started)
        before = server.ask(PROMPT)
        source = wtransfer.CheckpointSource(other)
        for each in (server, allowing):
            with wtransfer.Publisher(
                source, hosts=[each.address], token=TOKEN, deadline_s=30
            ) as publisher:
                if each is allowing:
                    report = publisher.publish("other")
                    assert any(LINE in note for note in report.workers[0].notes)
                    continue
                with pytest.raises(SchemaError) as refused:
                    publisher.publish("other")
                assert LINE in str(refused.value)
                assert "WTRANSFER_CONFIG_MAY_DIFFER=1" in str(refused.value)
        assert server.ask(PROMPT).tokens == before.tokens
        pushed(models / "llama-B", server, "B")
        # The same weights, computed by the configuration that each server began with.
        assert server.ask(PROMPT).tokens == allowing.ask(PROMPT).tokens != before.tokens
