"""README, promise 8, and "A failure is an exception of `wtransfer.errors`".

    What is committed is what computes.

    A failure is an exception of `wtransfer.errors`: a `WTransferError` and the fitting built-in at
    once, which names worker, round and tensor.

Here for plain models; serving engines are tested beside them.
"""

import pytest

MODEL = """
    from actors import *
    import torch.nn.functional as F

    class Model(torch.nn.Module):
        # Two names of one weight, statistics, a weight that is packed, and a view that has no name.
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(200, 48)
            self.body = torch.nn.Sequential(torch.nn.Linear(48, 160), torch.nn.BatchNorm1d(160))
            self.down = torch.nn.Linear(160, 48, bias=False)
            self.head = torch.nn.Linear(48, 200, bias=False)
            self.head.weight = self.embed.weight
            self.rows = self.head.weight.detach()[:24]

        def forward(self, ids):
            hidden = self.embed(ids)
            hidden = hidden + self.down(F.gelu(self.body(hidden)))
            return F.linear(hidden, self.rows) + self.head(hidden)[:, :24]

    def made(seed):
        torch.manual_seed(seed)
        model = Model().eval()
        model.body[1].running_mean.normal_()
        return model

    ids = torch.arange(24)
"""
# Ways of a worker to call its model, each made before the first update.
CALLS = {
    "plain": "call = model",
    "traced": "call = torch.jit.trace(model, ids)",
    "bound": "call = model.forward",
}


@pytest.mark.parametrize("commit", ["adopt", "copy"])
def test_every_way_to_call_a_model_computes_with_what_was_committed(prompt, address, commit):
    trainer = prompt("trainer")
    trainer.do(MODEL)
    trainer.do(f"model = made(1); publisher = wtransfer.Publisher(model, listen={address!r})")
    workers = {}
    for name, source in CALLS.items():
        workers[name] = each = prompt(name)
        each.do(MODEL)
        each.do(f"""
            model = made(0)
            {source}
            session = wtransfer.WorkerSession(
                model, join={address!r}, name={name!r}, commit={commit!r}
            )
        """)
    trainer.do(f"publisher.wait_for_workers({len(workers)})")
    for version in (1, 2):
        trainer.do(f"model.load_state_dict(made({version}).state_dict())")
        trainer.start(f"publisher.publish('v{version}').ok")
        for each in workers.values():
            each.start(f"session.wait_for('v{version}', 20)")
        for each in workers.values():
            each.answer()
        assert trainer.answer()
        expected = trainer.do("model(ids).flatten().tolist()")
        for name, each in workers.items():
            assert each.do("call(ids).flatten().tolist()") == pytest.approx(expected), name
        # The trainer goes on at once: nothing of that reaches a worker.
        trainer.do("[each.data.fill_(7) for each in model.parameters()]; None")
        for name, each in workers.items():
            assert each.do("call(ids).flatten().tolist()") == pytest.approx(expected), name


@pytest.mark.parametrize("name", ["first", "update"])
def test_update_that_does_not_fit_names_tensor_worker_and_round(prompt, worker, address, name):
    first = worker(name)
    trainer = prompt("trainer")
    trainer.do(f"""
        from actors import *
        tensors = weights(2)
        publisher = wtransfer.Publisher(tensors, listen={address!r})
        publisher.wait_for_workers(1)
        publisher.publish("v2")
    """)
    for change, words in (
        ("tensors['layer.3'] = torch.zeros(32, 65)", ("layer.3", "[32, 64]", "[32, 65]")),
        ("tensors['layer.3'] = torch.zeros(32, 64).half()", ("layer.3", "float32", "float16")),
        ("del tensors['layer.3']", ("layer.3",)),
        ("tensors['layer.3'] = torch.zeros(32, 64); tensors['extra'] = torch.ones(1)", ("extra",)),
    ):
        with pytest.raises(worker.error) as caught:
            trainer.do(f"{change}\npublisher.publish('v3')")
        assert {"SchemaError", "WTransferError", "ValueError"} <= set(caught.value.kinds)
        for each in (*words, f"worker {name}", "round "):
            assert each in caught.value.text
        assert first.do("serving.state()") == [[1, 2], [], "v2"]
