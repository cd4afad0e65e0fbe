"""Kinds of models beside those that write text: updated back and forth, or refused by name."""

import kinds
import pytest
import wtransfer
from engines import Engine, HostError, ask_each, publish
from safetensors.torch import load_file

pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.timeout(600)]


def of_kind(*, refused):
    """Return the kinds that are refused, or those that are not."""
    return [name for name, kind in kinds.KINDS.items() if bool(kind.refused) == refused]


def start(folder, model, name, **options):
    kind = kinds.KINDS[name]
    options |= (kinds.POOLING if kind.task else {}) | kind.options
    return Engine(folder, model=str(model), **options)


@pytest.mark.parametrize("name", of_kind(refused=False))
def test_answers_are_those_of_a_fresh_engine_after_each_update_and_amid_requests(name, tmp_path):
    kind, requests = kinds.KINDS[name], kinds.requests_of(name)
    models = {each: kinds.make(tmp_path / each, name, seed) for seed, each in enumerate("AB")}
    weights = {each: load_file(model / "model.safetensors") for each, model in models.items()}
    engine = start(tmp_path, models["A"], name, weight_transfer_config={"backend": "shm"})
    fresh = ask_each(
        {each: start(tmp_path, model, name) for each, model in models.items()},
        lambda each: each.do("ask", requests, kind.task),
    )
    assert fresh["A"] != fresh["B"]
    held = dict(weights["A"])
    try:
        with wtransfer.Publisher(held, deadline_s=60) as publisher:
            engine.invite(publisher)
            publisher.wait_for_workers(1, timeout_s=20)
            before = "A"
            for each in "BAB":
                engine.do("begin_asking", requests, kind.task)
                ended = engine.do("take", 1)
                held.update(weights[each])
                assert publish(publisher, engine, each).ok
                amid = engine.do("answers")
                assert not ended[-1]
                if kind.task:
                    assert amid == [
                        fresh[before if had_ended else each][number]
                        for number, had_ended in enumerate(ended)
                    ]
                assert engine.do("ask", requests, kind.task) == fresh[each]
                before = each
    finally:
        engine.close()


@pytest.mark.parametrize("name", of_kind(refused=True))
def test_kind_whose_old_weights_would_answer_is_refused_and_serves_on(name, tmp_path):
    kind, requests = kinds.KINDS[name], kinds.requests_of(name)
    model = kinds.make(tmp_path / "A", name, 1)
    engine = start(tmp_path, model, name, weight_transfer_config={"backend": "shm"})
    try:
        before = engine.do("ask", requests, kind.task)
        weights = load_file(model / "model.safetensors")
        with wtransfer.Publisher(weights, deadline_s=60) as publisher:
            for _ in range(2):
                with pytest.raises(HostError, match=kind.refused):
                    engine.invite(publisher)
            assert publisher.workers() == []
        assert engine.do("ask", requests, kind.task) == before
        assert engine.do("label") == "default"
    finally:
        engine.close()
