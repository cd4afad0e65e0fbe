"""README, promise 3.

    No stale KV. KV cache computed with one set of weights is never served under another: block keys
    contain the fingerprint of the weights, and a fence that fails serves nothing.

Labels are for people: every set of weights has the same label here.
"""

import pickle

import pytest

PROMPT = [(7 * n + 3) % 250 for n in range(70)]


@pytest.fixture
def instance(prompt):
    number = iter(range(99))

    def start(seed, connector, **options):
        made = prompt(f"instance-{next(number)}")
        made.do(f"""
            from actors import *
            instance = Instance({seed}, "latest", {connector!r}, {options!r})
        """)
        return made

    return start


def serve(instance, params=None, num_new=6):
    found = instance.do(f"instance.serve({PROMPT}, {num_new}, {params!r})")
    assert found["right"], "tokens of other weights"
    return found


def test_blocks_of_other_weights_and_damaged_blocks_are_not_loaded_from_a_folder(
    instance, tmp_path
):
    folder = tmp_path / "kv"
    options = {"shared_storage_path": str(folder), "skip_slow_loads": False}
    assert serve(instance(1, "SharedStorageConnector", **options))["loaded"] == 0
    ours = {path: path.read_bytes() for path in folder.rglob("blocks/*")}
    assert ours
    assert serve(instance(2, "SharedStorageConnector", **options))["loaded"] == 0
    # The same bytes, each spoilt in another way: turned, cut, exchanged, and a pickle.
    third = instance(1, "SharedStorageConnector", **options)
    order = sorted(ours)
    for number, path in enumerate(order):
        data = bytearray(ours[path])
        data[-number - 1] ^= 1
        other = ours[order[number - 1]]
        path.write_bytes([data, data[:-1], other, pickle.dumps(data)][number % 4])
    assert serve(third)["loaded"] == 0
    for path, data in ours.items():
        path.write_bytes(data)
    assert serve(instance(1, "SharedStorageConnector", **options))["loaded"] > 0


@pytest.mark.parametrize(
    ("connector", "options"),
    [
        ("OffloadingConnector", {"cpu_bytes_to_use": 1 << 22}),
        ("SharedStorageConnector", {"skip_slow_loads": False, "cpu_bytes_to_use": 1 << 22}),
    ],
)
def test_weights_that_change_and_come_back(instance, tmp_path, connector, options):
    if connector == "SharedStorageConnector":
        options["shared_storage_path"] = str(tmp_path / "kv")
    only = instance(1, connector, **options)
    assert serve(only)["loaded"] == 0
    other = only.do("instance.commit(2, 'latest')")
    assert serve(only)["loaded"] == 0
    assert only.do("instance.commit(1, 'latest')") != other
    # These are the weights that computed the blocks of the beginning.
    assert serve(only)["loaded"] > 0


@pytest.mark.parametrize("connector", ["SharedMemoryConnector", "ProcessGroupConnector"])
def test_prefill_of_other_weights_is_not_loaded_by_a_decode(instance, connector):
    prefill = instance(1, connector)
    handed = serve(prefill, {"do_remote_decode": True}, 1)["params"]
    again = serve(prefill, {"do_remote_decode": True}, 1)["params"]
    prefill.do("instance.go_on()")
    assert handed
    assert again
    decode = instance(2, connector)
    assert serve(decode, handed)["loaded"] == 0
    decode.do("instance.commit(1, 'latest')")
    assert serve(decode, again)["loaded"] > 0


def test_prefill_that_is_killed_before_its_blocks_are_fetched(instance):
    prefill = instance(1, "SharedMemoryConnector")
    handed = serve(prefill, {"do_remote_decode": True}, 1)["params"]
    prefill.kill()
    assert serve(instance(1, "SharedMemoryConnector"), handed)["loaded"] == 0
