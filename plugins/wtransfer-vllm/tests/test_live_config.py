"""A trainer whose configuration is not that of the checkpoint which a live vLLM serves."""

import json
from contextlib import ExitStack, closing

import pytest
import tiny_models
import wtransfer
from engines import PROMPTS, Engine, publish
from wtransfer.errors import SchemaError

pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.timeout(600)]

OPTIONS = {"dtype": "bfloat16", "max_model_len": 512, "kv_cache_memory_bytes": 64 << 20}
LINE = "rope_parameters.rope_theta is 10000.0 here and 500000.0 in the update"


def test_update_of_another_rope_theta_is_refused_by_name_unless_that_is_allowed(models, tmp_path):
    other = tiny_models.make(tmp_path / "other", 2)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 5e5}))
    with ExitStack() as stack:

        def start(**env):
            backend = {"weight_transfer_config": {"backend": "shm"}}
            engine = Engine(tmp_path, env=env, model=str(models / "A"), **backend, **OPTIONS)
            return stack.enter_context(closing(engine))

        def publisher_of(folder, engine):
            source = wtransfer.CheckpointSource(folder)
            publisher = stack.enter_context(wtransfer.Publisher(source, deadline_s=60))
            engine.invite(publisher)
            publisher.wait_for_workers(1, timeout_s=20)
            return publisher

        engine, allowing = start(), start(WTRANSFER_CONFIG_MAY_DIFFER="1")
        before = engine.tokens(PROMPTS)
        with publisher_of(other, engine) as publisher:
            with pytest.raises(SchemaError) as refused:
                publish(publisher, engine, "other")
            assert LINE in str(refused.value)
            assert "WTRANSFER_CONFIG_MAY_DIFFER=1" in str(refused.value)
            assert refused.value.phase == "plan"
        assert engine.tokens(PROMPTS) == before
        report = publish(publisher_of(models / "B", engine), engine, "B")
        assert (report.outcome, report.with_config) == ("committed", True)
        of_b = engine.tokens(PROMPTS)
        assert of_b != before
        report = publish(publisher_of(other, allowing), allowing, "other")
        assert any(LINE in note for note in report.workers[0].notes)
        # The same weights, computed by the configuration that each engine began with.
        assert allowing.tokens(PROMPTS) == of_b
