"""A serving engine's process names KV cache by the weights that it has loaded."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file

from wtransfer import CheckpointSource, WorkerSession
from wtransfer.checkpoint.file_state import FileState
from wtransfer.checkpoint.source import seal
from wtransfer.testing.fleet import Fleet
from wtransfer.weight_sync.worker import committer as committer_module
from wtransfer.weight_sync.worker import vouching
from wtransfer.weight_sync.worker.target import StateDictTarget
from wtransfer.weight_sync.worker.vouching import CheckpointFiles, vouch_for_checkpoint
from wtransfer.weight_version import ProcessWeights

F1 = "1" * 32
PATIENCE_S = 20.0


class Model:
    """Stands for the model that a serving engine has loaded from a folder."""

    def __init__(self, folder):
        self.folder = folder


def vouch(model):
    vouch_for_checkpoint(model, lambda: model.folder)


def weights(value=1.0):
    return {"a": torch.full((4, 4), value), "b": torch.arange(3.0) + value}


def write(folder, value=1.0):
    folder.mkdir(exist_ok=True)
    save_file(weights(value), folder / "model.safetensors")
    # What comes next has another time: the kernel's clock for files has ticks.
    time.sleep(0.02)
    return folder


def published(tensors):
    """Return the fingerprint that a worker has after a round of these weights."""
    with Fleet(dict(tensors)) as made:
        member = made.join()
        assert made.publish("v").ok
        return member.session.fingerprint


def wait_for(condition):
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WTRANSFER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def log(caplog):
    caplog.set_level(logging.INFO)
    return caplog


@pytest.fixture
def reads(monkeypatch):
    """Sources that were digested in this process."""
    found = []

    def noted(source):
        found.append(source)
        return describe(source)

    describe = vouching.describe
    monkeypatch.setattr(vouching, "describe", noted)
    return found


@pytest.fixture
def process(cache, monkeypatch):
    """The names of this process, as if the test were alone in it."""
    return new_process(monkeypatch)


def new_process(monkeypatch):
    made = ProcessWeights()
    for module in (vouching, committer_module):
        monkeypatch.setattr(module, "process_weights", made)
    return made


def name_of(process):
    wait_for(process.version)
    return process.version().fingerprint


@pytest.fixture
def vouched(monkeypatch, cache):
    """Return the name that a new process gives to a checkpoint's weights."""

    def vouched(folder):
        process, model = new_process(monkeypatch), Model(folder)
        vouch(model)
        return name_of(process)

    return vouched


def entry(cache):
    (found,) = cache.glob("checkpoints/*/fingerprint.json")
    return found


# -- which name ------------------------------------------------------------------------------------


def test_vouched_name_equals_that_of_an_update_of_equal_weights(vouched, tmp_path):
    names = [vouched(write(tmp_path / "A", value)) for value in (1.0, 2.0)]
    assert names == [published(weights(1.0)), published(weights(2.0))]
    assert vouched(write(tmp_path / "another place", 1.0)) == names[0]


def test_vouched_name_equals_that_of_a_push_of_the_checkpoint(vouched, tmp_path):
    folder = tmp_path / "A"
    folder.mkdir()
    parts = {"one.safetensors": {"a": torch.ones(2)}, "two.safetensors": {"b": torch.zeros(3)}}
    for file, tensors in parts.items():
        save_file(tensors, folder / file)
    weight_map = {name: file for file, tensors in parts.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with Fleet(CheckpointSource(folder)) as made:
        member = made.join({"a": torch.zeros(2), "b": torch.zeros(3)})
        assert made.publish("v").ok
        assert vouched(folder) == member.session.fingerprint


def test_stored_fingerprint_is_the_name_before_the_call_returns(
    vouched, reads, tmp_path, monkeypatch
):
    folder = write(tmp_path / "A")
    name = vouched(folder)
    process, model = new_process(monkeypatch), Model(folder)
    vouch(model)
    assert process.version().fingerprint == name
    assert len(reads) == 1


def test_folder_behind_a_link_is_the_same_checkpoint(vouched, reads, tmp_path):
    name = vouched(write(tmp_path / "A"))
    (tmp_path / "link").symlink_to(tmp_path / "A")
    assert vouched(tmp_path / "link") == name
    assert len(reads) == 1


def test_no_version_until_the_digest_is_known(process, tmp_path, monkeypatch):
    go = hold_up(monkeypatch)
    model = Model(write(tmp_path / "A"))
    vouch(model)
    time.sleep(0.05)
    assert process.version() is None
    go.set()
    assert name_of(process) == published(weights())


def hold_up(monkeypatch):
    """Let digests wait; return what lets them go on."""
    go, describe = threading.Event(), vouching.describe
    monkeypatch.setattr(
        vouching, "describe", lambda source: describe(source) if go.wait(PATIENCE_S) else None
    )
    return go


def vouching_has_ended():
    return all(thread.name != "wtransfer-vouch" for thread in threading.enumerate())


def commit(process, model):
    process.hold("local:" + F1, model).settle(F1)


def lose(process, model):
    process.hold("local:" + F1, model).settle("local:" + "2" * 32)


def replace(process, model):
    process.weights_replaced(model)


@pytest.mark.parametrize("meanwhile", [commit, lose, replace])
def test_change_of_the_weights_during_the_digest_wins(process, tmp_path, monkeypatch, meanwhile):
    go = hold_up(monkeypatch)
    model = Model(write(tmp_path / "A"))
    vouch(model)
    meanwhile(process, model)
    before = process.version().fingerprint
    go.set()
    wait_for(vouching_has_ended)
    assert process.version().fingerprint == before != published(weights())


def test_one_of_several_processes_reads_for_all(tmp_path, cache):
    folder, reads = write(tmp_path / "A"), tmp_path / "reads"
    code = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_vouching import Model, vouch, vouching
from wtransfer.weight_version import process_weights

describe = vouching.describe

def noted(source):
    with open({str(reads)!r}, "a") as file:
        file.write("read\\n")
    time.sleep(1.0)
    return describe(source)

vouching.describe = noted
model = Model({str(folder)!r})
print("ready", flush=True)
sys.stdin.readline()
vouch(model)
assert process_weights.version() is None
while process_weights.version() is None:
    time.sleep(0.01)
print(process_weights.version().fingerprint, flush=True)
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        assert [each.stdout.readline() for each in processes] == ["ready\n"] * 2
        for each in processes:
            each.stdin.write("go\n")
            each.stdin.flush()
        names = [each.communicate(timeout=60)[0].strip() for each in processes]
    finally:
        for each in processes:
            each.kill()
            each.wait()
    assert names == [published(weights())] * 2
    assert reads.read_text() == "read\n"


# -- when it is believed ---------------------------------------------------------------------------


def rewrite(folder):
    write(folder, 2.0)


def rewrite_as_old(folder):
    """Write other bytes of the same size in place, and set the time of change back."""
    file = folder / "model.safetensors"
    before = file.stat()
    other = write(folder.parent / "other", 2.0) / "model.safetensors"
    with file.open("r+b") as opened:
        opened.write(other.read_bytes())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_mtime_ns, file.stat().st_size) == (before.st_mtime_ns, before.st_size)


def put_another_there(folder):
    """Put another file of the same size and time in its place."""
    file = folder / "model.safetensors"
    before = file.stat()
    other = write(folder.parent / "other", 2.0) / "model.safetensors"
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.rename(file)
    assert (file.stat().st_mtime_ns, file.stat().st_size) == (before.st_mtime_ns, before.st_size)


def grow(folder):
    save_file(weights(2.0) | {"c": torch.zeros(9)}, folder / "model.safetensors")


@pytest.mark.parametrize("change", [rewrite, rewrite_as_old, put_another_there, grow])
@pytest.mark.parametrize("sealed", [False, True])
def test_changed_checkpoint_has_another_name(vouched, tmp_path, change, sealed):
    folder = write(tmp_path / "A")
    if sealed:
        seal(folder)
        time.sleep(0.02)
    before = vouched(folder)
    change(folder)
    tensors = load_file(folder / "model.safetensors")
    assert vouched(folder) == published(tensors) != before


def test_touched_files_are_read_again(vouched, reads, tmp_path):
    folder = write(tmp_path / "A")
    name = vouched(folder)
    os.utime(folder / "model.safetensors")
    assert vouched(folder) == name
    assert len(reads) == 2


@pytest.mark.parametrize("field", range(5), ids=FileState.__struct_fields__)
def test_stored_fingerprint_of_files_that_differ_in_any_field_is_void(
    vouched, reads, tmp_path, cache, field
):
    folder = write(tmp_path / "A")
    name = vouched(folder)
    known = json.loads(entry(cache).read_text())
    assert known["fingerprint"] == name
    known["fingerprint"] = F1
    entry(cache).write_text(json.dumps(known))
    assert vouched(folder) == F1, "it is believed as long as nothing differs"
    known["files"][0][field] = "x" if field == 0 else known["files"][0][field] + 1
    entry(cache).write_text(json.dumps(known))
    assert vouched(folder) == name
    assert len(reads) == 2


def of_another_folder(known):
    return json.dumps(known | {"folder": "/elsewhere"})


def of_fewer_files(known):
    return json.dumps(known | {"files": []})


def of_another_format(known):
    return json.dumps(known | {"format": "wtransfer-fingerprint/2"})


def with_a_label(known):
    return json.dumps(known | {"fingerprint": "step-7"})


def cut(known):
    return json.dumps(known)[:-20]


def empty(_known):
    return ""


@pytest.mark.parametrize(
    "damage", [of_another_folder, of_fewer_files, of_another_format, with_a_label, cut, empty]
)
def test_damaged_cache_entry_is_replaced(vouched, reads, tmp_path, cache, damage):
    folder = write(tmp_path / "A")
    name = vouched(folder)
    entry(cache).write_text(damage(json.loads(entry(cache).read_text())))
    assert [vouched(folder), vouched(folder)] == [name, name]
    assert len(reads) == 2


def test_link_in_place_of_the_cache_entry_is_not_followed(vouched, reads, tmp_path, cache):
    folder = write(tmp_path / "A")
    name = vouched(folder)
    planted = tmp_path / "planted"
    planted.write_text(entry(cache).read_text().replace(name, F1))
    entry(cache).unlink()
    (next(cache.glob("checkpoints/*")) / "fingerprint.json").symlink_to(planted)
    assert vouched(folder) == name
    assert not entry(cache).is_symlink()


def test_sealed_checkpoint_is_not_read(vouched, reads, tmp_path, cache):
    folder = write(tmp_path / "A")
    written = seal(folder)
    assert vouched(folder) == written.fingerprint == published(weights())
    assert reads == []


@pytest.mark.parametrize("damage", ["{", "[]"])
def test_unreadable_seal_is_ignored(vouched, reads, tmp_path, damage):
    folder = write(tmp_path / "A")
    seal(folder)
    (folder / "wtransfer.json").write_text(damage)
    assert vouched(folder) == published(weights())
    assert len(reads) == 1


def test_seal_of_the_same_clock_tick_is_ignored(vouched, reads, tmp_path, monkeypatch):
    folder = write(tmp_path / "A")
    seal(folder)
    at = (folder / "wtransfer.json").stat().st_ctime_ns
    look = FileState.of
    monkeypatch.setattr(FileState, "of", lambda file: structs.replace(look(file), ctime_ns=at))
    assert vouched(folder) == published(weights())
    assert len(reads) == 1


def test_seal_of_other_tensors_is_ignored(vouched, tmp_path):
    folder, other = write(tmp_path / "A"), write(tmp_path / "B")
    grow(other)
    seal(other)
    shutil.copy(other / "wtransfer.json", folder)
    assert vouched(folder) == published(weights())


# -- the cache's folder ----------------------------------------------------------------------------


def test_cache_is_readable_by_its_user_only(vouched, tmp_path, cache):
    umask = os.umask(0)
    try:
        vouched(write(tmp_path / "A"))
    finally:
        os.umask(umask)
    folders = [cache, cache / "checkpoints", entry(cache).parent]
    assert [oct(folder.stat().st_mode & 0o777) for folder in folders] == ["0o700"] * 3
    assert [file.name for file in entry(cache).parent.iterdir()] == ["fingerprint.json"]


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({"XDG_CACHE_HOME": "x"}, "x/wtransfer"),
        ({"HOME": "h"}, "h/.cache/wtransfer"),
        ({"HOME": "h", "XDG_CACHE_HOME": "", "WTRANSFER_CACHE": ""}, "h/.cache/wtransfer"),
        ({"WTRANSFER_CACHE": "w", "XDG_CACHE_HOME": "x"}, "w"),
    ],
)
def test_environment_names_the_cache_folder(vouched, tmp_path, monkeypatch, environment, place):
    for name in ("WTRANSFER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, str(tmp_path / value) if value else "")
    vouched(write(tmp_path / "A"))
    assert entry(tmp_path / place).is_file()


def a_file(cache):
    cache.write_text("no folder")


def a_file_within(cache):
    cache.mkdir()
    (cache / "checkpoints").write_text("no folder")


def open_to_others(cache):
    cache.mkdir()
    (cache / "checkpoints").mkdir()
    (cache / "checkpoints").chmod(0o755)


def a_link(cache):
    cache.mkdir()
    (cache.parent / "elsewhere").mkdir(mode=0o700)
    (cache / "checkpoints").symlink_to(cache.parent / "elsewhere")


@pytest.mark.parametrize("spoil", [a_file, a_file_within, open_to_others, a_link])
def test_without_a_cache_each_process_reads(vouched, reads, cache, log, spoil):
    spoil(cache)
    folder = write(cache.parent / "A")
    assert [vouched(folder), vouched(folder)] == [published(weights())] * 2
    assert len(reads) == 2
    assert "no other process will know the checkpoint's digests: " in log.text
    assert list(cache.parent.rglob("fingerprint.json")) == []


def test_cache_of_another_user_is_ignored(vouched, reads, tmp_path, cache, monkeypatch):
    folder = write(tmp_path / "A")
    name = vouched(folder)
    entry(cache).write_text(entry(cache).read_text().replace(name, F1))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert vouched(folder) == name
    assert len(reads) == 2


def test_full_disk_prevents_only_the_storing(vouched, tmp_path, cache, log, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("wtransfer.transport.files.write_at", full)
    assert vouched(write(tmp_path / "A")) == published(weights())
    wait_for(vouching_has_ended)
    assert "no other process will know" in log.text
    assert [each.name for each in next(cache.glob("checkpoints/*")).iterdir()] == []


@pytest.mark.parametrize("at", ["half of it is written", "it is written", "it is there"])
def test_process_killed_while_storing_leaves_no_valid_entry_of_other_bytes(
    vouched, reads, tmp_path, cache, at
):
    folder = write(tmp_path / "A")
    code = f"""
import os, signal
from pathlib import Path
from wtransfer.transport import files
from wtransfer.weight_sync.worker.vouching import CheckpointFiles

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def write_half(fd, buffers, offset):
    os.pwrite(fd, bytes(buffers[0])[: buffers[0].nbytes // 2], offset)
    die()

if {at!r} == "half of it is written":
    files.write_at = write_half
elif {at!r} == "it is written":
    files.os = type("Os", (), {{**vars(os), "replace": die}})
else:
    files.Folder.sync = die
CheckpointFiles(Path({str(folder)!r})).fingerprint()
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    left = {each.name for each in next(cache.glob("checkpoints/*")).iterdir()}
    assert ".wtransfer-lock" in left
    assert any(each.endswith(".tmp") for each in left) is (at != "it is there")
    assert [vouched(folder), vouched(folder)] == [published(weights())] * 2
    assert len(reads) == (at != "it is there")
    left = {each.name for each in entry(cache).parent.iterdir()} - {".wtransfer-lock"}
    assert left == {"fingerprint.json"}


# -- when it cannot be known -----------------------------------------------------------------------


def two_files(folder):
    save_file({"c": torch.zeros(1)}, folder / "adapter.safetensors")


def a_consolidated_file_as_well(folder):
    weight_map = dict.fromkeys(weights(), "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    save_file(weights(2.0), folder / "consolidated.safetensors")


def cut_off(folder):
    os.truncate(folder / "model.safetensors", 100)


def no_file(folder):
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("spoil", [two_files, a_consolidated_file_as_well, cut_off, no_file])
def test_unknown_weights_have_a_local_name(vouched, tmp_path, log, spoil):
    folder = write(tmp_path / "A")
    spoil(folder)
    names = {vouched(folder) for _ in range(2)}
    assert len(names) == 2
    assert all(name.startswith("local:") for name in names)
    wait_for(vouching_has_ended)
    lines = [each for each in log.messages if "KV cache is not shared with other" in each]
    assert len(lines) == 2


def test_files_changed_during_the_digest_have_a_local_name(vouched, tmp_path, cache, monkeypatch):
    folder, describe = write(tmp_path / "A"), vouching.describe

    def described(source):
        found = describe(source)
        rewrite(folder)
        return found

    monkeypatch.setattr(vouching, "describe", described)
    assert vouched(folder).startswith("local:")
    wait_for(vouching_has_ended)
    assert list(cache.rglob("fingerprint.json")) == []


def test_without_a_thread_the_name_is_local(vouched, tmp_path, monkeypatch):
    def start(_thread):
        raise RuntimeError("can't start new thread")

    folder = write(tmp_path / "A")
    monkeypatch.setattr(threading.Thread, "start", start)
    assert vouched(folder).startswith("local:")


def test_process_that_waits_too_long_for_the_lock_reads(vouched, tmp_path, monkeypatch, log):
    folder = write(tmp_path / "A")
    monkeypatch.setattr(vouching, "LOCK_PATIENCE_S", 0.1)
    files = CheckpointFiles(folder)
    with files._opened_cache() as opened:
        lock = vouching.FolderLock(opened)
        assert vouched(folder) == published(weights())
        lock.release()
    assert "is in use by process" in log.text


def test_session_keeps_the_vouched_name(process, tmp_path):
    model = Model(write(tmp_path / "A"))
    vouch(model)
    name = name_of(process)
    target = StateDictTarget({"w": torch.zeros(4)})
    target.vouched_as = model
    with WorkerSession(target) as session:
        assert process.version().fingerprint == name
        assert session.fingerprint.startswith("local:")
        vouch(model)
        assert process.version().fingerprint == name, "the session knows better"
        session.weights_lost("asleep")
        assert process.version().fingerprint == session.fingerprint
