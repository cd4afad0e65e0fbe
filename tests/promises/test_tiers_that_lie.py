"""README, "KV cache to cheaper tiers", and `help(wtransfer.Tier)`.

A store of bytes by key needs no spec of its own: a constructor and four methods make it a
`wtransfer.Tier`, and its name works wherever a spec's does.

So a store that loses, truncates, mixes up or flips bytes costs hits, and never makes an answer
wrong. Methods may block. An exception is a failure of that call alone: a miss, or a block that is
not kept.
"""

import pytest

TIER = """
    import sys, threading, types

    def module():
        import wtransfer

        class Store(wtransfer.Tier):
            kept, fault, gets, gate = {}, None, 0, threading.Event()

            def __init__(self, options):
                self.fault_of = Store

            def contains(self, keys):
                return [key in self.kept or self.fault == "claims" for key in keys]

            def put(self, key, data):
                self.kept[bytes(key)] = bytes(data)

            def get(self, key, into):
                Store.gets += 1
                data = bytearray(self.kept.get(bytes(key), b""))
                if self.fault == "flips":
                    data[Store.gets * 977 % len(data)] ^= 1 << Store.gets % 8
                if self.fault == "exchanges":
                    data = self.kept[max(each for each in self.kept if each != key)]
                if self.fault == "cuts":
                    data = data[:-1]
                if self.fault == "lies":
                    return True
                if self.fault == "raises":
                    raise OSError("the store has gone")
                if self.fault == "hangs":
                    self.gate.wait(60)
                return self.fill(into, data)

            def remove(self, keys):
                for each in keys:
                    self.kept.pop(bytes(each), None)

        return Store

    Store = module()
    lying = types.ModuleType("lying")
    lying.Store, Store.__module__ = Store, "lying"
    sys.modules["lying"] = lying
"""
PROMPT = [(5 * n + 1) % 250 for n in range(70)]
OPTIONS = {
    "spec_name": "Store",
    "spec_module_path": "lying",
    "skip_slow_loads": False,
    "deadline_s": 0.5,
}


@pytest.fixture
def instance(prompt):
    made = prompt("instance")
    made.do(TIER)
    made.do(f"""
        from actors import *
        instance = Instance(1, "v", "OffloadingConnector", {OPTIONS!r})
        serve = lambda: instance.serve({PROMPT}, 6)
    """)
    return made


def test_no_fault_of_a_store_makes_an_answer_wrong(instance):
    first = instance.do("serve()")
    assert first["right"]
    assert first["loaded"] == 0
    assert instance.do("until(lambda: instance.engine.step() or len(Store.kept) >= 4)")
    faults = ("flips", "exchanges", "cuts", "lies", "raises", "claims", "hangs")
    for fault in faults:
        # Other weights and back: nothing of the prompt is in the instance's own cache then.
        instance.do("instance.commit(2, 'v'); instance.commit(1, 'v')")
        instance.do(f"kept = dict(Store.kept); gets = Store.gets; Store.fault = {fault!r}")
        if fault == "claims":
            instance.do("Store.kept.clear()")
        found = instance.do("serve()")
        assert found["right"], fault
        assert instance.do("Store.gets > gets"), fault
        instance.do("Store.fault = None; Store.gate.set(); Store.kept.update(kept)")
    # The bytes that were kept at first are as good as they were.
    instance.do("instance.commit(2, 'v'); instance.commit(1, 'v')")
    found = instance.do("serve()")
    assert found["right"]
    assert found["loaded"] > 0
