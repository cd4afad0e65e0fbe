"""Tiers that are broken in one way each. `test_kits.py` runs this file as a test module."""

import base64
import contextlib
import io
import multiprocessing
import os
import pickle
import shelve
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import ClassVar

import numpy as np

from wtransfer import Tier
from wtransfer.errors import StorageError
from wtransfer.specs.file import FileTier
from wtransfer.testing.fakes import MemoryTier, MemoryTierOptions
from wtransfer.testing.tier import TierConformance

NOTHING = pickle.dumps(b"")
REMOVED = defaultdict(Counter)


def broken(caught_by, **attributes):
    """Have the kit run with a class that overrides a part of a healthy tier."""

    def make(cls):
        in_files = issubclass(cls, FileTier)
        option = "shared_storage_path" if in_files else "shelf"
        # Other processes find the class by this name.
        cls.__qualname__ = f"{cls.__name__}.tier_cls"
        kit = {
            "caught_by": caught_by,
            "tier_cls": cls,
            "in_processes": in_files,
            "options_in": lambda self, folder: {option: str(folder)},
            "ends_within_s": 0.5,
            "__module__": cls.__module__,
            **attributes,
        }
        return type(cls.__name__, (TierConformance,), kit)

    return make


# -- one value


@broken("test_one_value_is_put_and_found", says="contains() does not find a key that was put")
class TestDropsValues(MemoryTier):
    def put(self, key, data): ...


@broken(
    "test_one_value_is_put_and_found",
    says="TypeError: get() returned None, not True or False",
    hints="a method lacks its return, or returns another type.",
)
class TestForgetsToReturnTrue(MemoryTier):
    def get(self, key, into):
        super().get(key, into)


@broken(
    "test_one_value_is_put_and_found",
    says="put() of TestHangs (Keep bytes under a key, in place of its former value; `data` is "
    "reused afterwards.) has not returned in 1.2 s",
    excused="test_put_replaces",
    deadline_s=0.2,
)
class TestHangs(MemoryTier):
    def put(self, key, data):
        time.sleep(3)


@broken("test_missing_key_is_not_found", says="contains() finds a key never put")
class TestContainsEverything(MemoryTier):
    def contains(self, keys):
        return [True] * len(keys)


@broken("test_missing_key_is_not_found", says="KeyError:", passes=("test_put_replaces",))
class TestRaisesForMissingKeys(MemoryTier):
    def get(self, key, into):
        into[:] = self.kept[key]
        return True


@broken(
    "test_missing_key_is_not_found",
    deadline_s=0.2,
    says="get() of TestWaitsForMissingKeys (Fill `into` with the value of a key; `fill` does so "
    "with bytes.) has not returned in 1.2 s",
    hints="a call waits without an end, for a lock, a peer or a server: give each a time-out; or "
    "the machine or store is slower: raise deadline_s; or that the answer for a key that is not "
    "there",
)
class TestWaitsForMissingKeys(MemoryTier):
    def get(self, key, into):
        for _ in range(1000):
            if key in self.kept:
                break
            time.sleep(0.01)
        return super().get(key, into)


@broken("test_missing_key_is_not_found", says="get() finds a key that was never put")
class TestFillsWithZeros(MemoryTier):
    def get(self, key, into):
        if key not in self.kept:
            into[:] = bytes(len(into))
            return True
        return super().get(key, into)


@broken(
    "test_value_of_another_length_is_not_found[1]",
    says="get() of 1 bytes found 1000",
    passes=("test_put_replaces",),
)
class TestCopiesWhatFits(MemoryTier):
    def get(self, key, into):
        data = self.kept.get(key)
        if data is None or len(data) < len(into):
            return False
        into[:] = data[: len(into)]
        return True


@broken("test_value_of_another_length_is_not_found[1001]", says="get() of 1001 bytes found 1000")
class TestPadsWhatIsShort(MemoryTier):
    def get(self, key, into):
        data = self.kept.get(key)
        if data is None or len(data) > len(into):
            return False
        into[: len(data)] = data
        return True


@broken(
    "test_value_stays_when_it_was_read",
    says="as it is read for the 2. time",
    passes=("test_put_replaces",),
)
class TestTakesValuesAway(MemoryTier):
    def get(self, key, into):
        found = super().get(key, into)
        if found:
            del self.kept[key]
        return found


@broken("test_put_replaces", says="after put 2", passes=("test_value_of_any_length[1]",))
class TestKeepsTheFirstValue(MemoryTier):
    def put(self, key, data):
        self.kept.setdefault(key, bytes(data))


@broken("test_put_replaces", says="after put 4")
class TestReplacesTheBeginning(MemoryTier):
    def put(self, key, data):
        self.kept[key] = bytes(data) + self.kept.get(key, b"")[len(data) :]


@broken(
    "test_put_copies[put]",
    says="other bytes, from byte 0 on",
    passes=("test_put_replaces", "test_many_equal_singles"),
)
class TestKeepsViews(MemoryTier):
    def put(self, key, data):
        self.kept[key] = data


@broken(
    "test_put_copies[put_many]",
    says="other bytes, from byte 0 on",
    passes=("test_put_copies[put]", "test_many_equal_singles"),
)
class TestKeepsViewsOfMany(MemoryTier):
    def put_many(self, items):
        self.kept.update(items)


@broken(
    "test_value_of_any_length[4194309]",
    says="StorageError: 4194309 bytes are too many",
    passes=("test_value_of_any_length[65537]",),
)
class TestRefusesMoreThanAMegabyte(MemoryTier):
    def put(self, key, data):
        if len(data) > 2**20:
            raise StorageError(f"{len(data)} bytes are too many")
        super().put(key, data)


@broken(
    "test_value_of_any_length[65537]",
    says="nothing, though it was put",
    passes=("test_value_of_any_length[4096]",),
)
class TestCutsLengths(MemoryTier):
    def put(self, key, data):
        super().put(key, data[: len(data) % 2**16])


@broken(
    "test_value_of_any_bytes[ends with zeros]",
    says="nothing, though it was put",
    passes=("test_value_of_any_bytes[zeros]",),
)
class TestStripsZeros(MemoryTier):
    def put(self, key, data):
        self.kept[key] = bytes(data).rstrip(b"\0") or bytes(data)


@broken("test_value_of_any_bytes[zeros]", says="nothing, though it was put")
class TestTakesZerosForNothing(MemoryTier):
    def get(self, key, into):
        return super().get(key, into) and any(into)


@broken(
    "test_get_writes_only_to_into[13]",
    says="bytes before or behind `into` were written",
    passes=("test_value_of_any_length[511]",),
)
class TestWritesWholeWords(MemoryTier):
    def get(self, key, into):
        found = super().get(key, into)
        # The array that the view is part of, as a store in C would see it.
        memory, own = into.obj.base, np.frombuffer(into, np.uint8)
        if found and memory is not None:
            end = own.ctypes.data - memory.ctypes.data + len(own)
            memory[end : end + -end % 8] = 0
        return found


class Slow(FileTier):
    """Reads on threads of its own, and gives up after a moment, which nothing else notices."""

    writes_after_get = False
    patience_s = 0.1

    def get(self, key, into):
        def read():
            path = Path(self._current().blocks.path, key.hex())
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                return file.readinto(into) == len(into)
            return False

        done = Future()
        threading.Thread(target=lambda: done.set_result(read()), daemon=True).start()
        try:
            return done.result(self.patience_s)
        except FutureTimeoutError:
            return self.give_up()

    def give_up(self):
        return False

    def get_many(self, items):
        return [self.get(*item) for item in items]


@broken(
    "test_call_that_gives_up_leaves_memory_alone",
    says="`into` has changed after get() had given up",
    hints="a thread or a device of the client goes on filling `into` after a time-out",
    passes=("test_get_that_declares_it_writes_nothing_after_its_return",),
    gives_up_within_s=10.0,
)
class TestFillsLater(Slow): ...


@broken(
    "test_call_that_gives_up_leaves_memory_alone",
    says="`into` has changed after get() had given up",
    passes=("test_get_that_declares_it_writes_nothing_after_its_return",),
    gives_up_within_s=10.0,
)
class TestRaisesAndFillsLater(Slow):
    def give_up(self):
        raise StorageError("the disk is slow")


@broken(
    "test_call_that_gives_up_leaves_memory_alone",
    says="`into` has changed after get() had given up",
    passes=("test_many_equal_singles",),
    gives_up_within_s=10.0,
)
class TestFillsManyLater(Slow):
    def get(self, key, into):
        return FileTier.get(self, key, into)

    def get_many(self, items):
        return [Slow.get(self, *item) for item in items]


@broken(
    "test_call_that_gives_up_leaves_memory_alone",
    says="a value has bytes that `data` had after put() had given up",
    passes=("test_put_copies[put]", "test_put_replaces"),
    hints="or sending `data`",
    gives_up_within_s=10.0,
)
class TestSendsLater(FileTier):
    writes_after_get = False

    def put(self, key, data):
        path = Path(self._current().blocks.path, key.hex())
        path.touch()

        def write():
            with path.open("r+b") as file:
                file.write(data)
                file.truncate()

        thread = threading.Thread(target=write, daemon=True)
        thread.start()
        thread.join(0.5)
        if thread.is_alive():
            raise StorageError("the disk is slow")


@broken(
    "test_call_that_gives_up_leaves_memory_alone",
    says="get_stats() waits for the store",
    passes=("test_stats_are_numbers_and_counters_rise",),
    deadline_s=1.0,
)
class TestAsksTheStoreForStats(FileTier):
    def get_stats(self):
        files = [each for each in Path(self._current().blocks.path).iterdir() if each.is_file()]
        return {"bytes_kept": sum(len(each.read_bytes()) for each in files)}


# -- keys


class OtherKeys(MemoryTier):
    """A tier whose store has other keys than the product."""

    def other(self, key):
        raise NotImplementedError

    def contains(self, keys):
        return super().contains([self.other(key) for key in keys])

    def put(self, key, data):
        super().put(self.other(key), data)

    def get(self, key, into):
        return super().get(self.other(key), into)

    def remove(self, keys):
        super().remove([self.other(key) for key in keys])


@broken(
    "test_keys_of_any_bytes[no text]",
    says="2 of 6 keys have no or other values",
    passes=("test_keys_of_any_bytes[upper and lower case]",),
)
class TestDecodesKeys(OtherKeys):
    def other(self, key):
        return key.decode(errors="replace")


@broken(
    "test_keys_of_any_bytes[upper and lower case]",
    says="3 of 4 keys have no or other values",
    passes=("test_keys_of_any_bytes[no text]",),
)
class TestFoldsCase(OtherKeys):
    def other(self, key):
        return key.lower()


@broken("test_keys_of_any_bytes[1 to 66 zeros]", says="65 of 66 keys have no or other values")
class TestEndsKeysAtZero(OtherKeys):
    def other(self, key):
        return key.partition(b"\0")[0]


@broken(
    "test_keys_of_any_bytes[separators]",
    says="2 of 28 keys have no or other values",
    passes=("test_keys_of_any_bytes[no text]",),
)
class TestStripsKeys(OtherKeys):
    def other(self, key):
        return key.strip(b" ") or key


@broken(
    "test_keys_of_any_bytes[1 to 66 bytes, one the beginning of the next]",
    says="57 of 66 keys have no or other values",
)
class TestPadsKeys(OtherKeys):
    def other(self, key):
        return key + b"k" * (-len(key) % 8)


@broken(
    "test_keys_of_any_bytes[66 bytes, different in one]",
    says="33 of 66 keys have no or other values",
)
class TestComparesTheBeginning(OtherKeys):
    def other(self, key):
        return key[:32]


@broken(
    "test_keys_of_any_bytes[one byte]",
    says="is too short",
    passes=("test_keys_of_any_bytes[no text]",),
)
class TestRefusesShortKeys(OtherKeys):
    def other(self, key):
        if len(key) < 2:
            raise ValueError(f"the key {key!r} is too short")
        return key


@broken(
    "test_keys_of_any_bytes[one byte]",
    says="of 256 keys have no or other values",
    passes=("test_ranks_are_kept_apart",),
)
class TestNamesFilesInOneCase(OtherKeys):
    def other(self, key):
        return base64.urlsafe_b64encode(key).lower()


@broken(
    "test_keys_of_any_bytes[66 bytes, different in one]",
    says="1 of 66 keys have no or other values",
    passes=("test_keys_of_any_bytes[separators]",),
)
class TestCutsLongNames(OtherKeys):
    def other(self, key):
        return key if len(key) < 66 else key[:64]


@broken(
    "test_calls_leave_nothing",
    says="contains() finds removed keys",
    passes=("test_removed_keys_are_gone",),
)
class TestRemovesFewAtATime(MemoryTier):
    def remove(self, keys):
        super().remove(keys[:100])


@broken(
    "test_ranks_are_kept_apart",
    says="7 of 8 keys have no or other values",
    passes=("test_removed_keys_are_gone",),
)
class TestDropsTheRank(OtherKeys):
    def other(self, key):
        return key[:64]


@broken(
    "test_contains_answers_for_each_key",
    says="contains() does not answer for each key, in order",
    passes=("test_missing_key_is_not_found",),
)
class TestAnswersOnce(MemoryTier):
    def contains(self, keys):
        return super().contains(list(dict.fromkeys(keys)))


@broken(
    "test_contains_answers_for_each_key", says="contains() does not answer for each key, in order"
)
class TestAnswersInTheStoresOrder(MemoryTier):
    def contains(self, keys):
        found = super().contains(keys)
        return found if len(found) < 5 else sorted(found)


@broken(
    "test_contains_answers_for_each_key",
    says="ValueError: wrong number of arguments",
    passes=("test_ranks_are_kept_apart",),
)
class TestRefusesNoKeys(MemoryTier):
    def contains(self, keys):
        if not keys:
            raise ValueError("wrong number of arguments")
        return super().contains(keys)


@broken(
    "test_removed_keys_are_gone",
    says="contains() finds removed keys",
    passes=("test_missing_key_is_not_found",),
)
class TestRemovesNothing(MemoryTier):
    def remove(self, keys): ...


@broken("test_removed_keys_are_gone", says="KeyError:")
class TestMissesRemovedKeys(MemoryTier):
    def remove(self, keys):
        for key in keys:
            del self.kept[key]


@broken("test_removed_keys_are_gone", says="6 of 6 keys have no or other values")
class TestRemovesAll(MemoryTier):
    def remove(self, keys):
        if keys:
            self.kept.clear()


# -- several values at a time


@broken(
    "test_many_equal_singles",
    says="get_many() does not find what get() finds",
    passes=("test_put_copies[put_many]",),
)
class TestStopsAtAMissingOne(MemoryTier):
    def get_many(self, items):
        found = []
        for key, into in items:
            if not self.get(key, into):
                break
            found.append(True)
        return found + [False] * (len(items) - len(found))


@broken("test_many_equal_singles", says="4 of 5 keys have no or other values")
class TestPutsTheLastOfMany(MemoryTier):
    def put_many(self, items):
        keys = [key for key, _ in items]
        super().put_many([(key, items[-1][1]) for key in keys])


# -- memory


@broken(
    "test_registered_memory",
    says="value 0 has other bytes",
    passes=("test_get_writes_only_to_into[13]",),
)
class TestIgnoresOffsets(MemoryTier):
    registered = None

    def register_memory(self, memory):
        self.registered = memory

    def put(self, key, data):
        super().put(key, self.registered[: len(data)] if self.registered else data)


@broken("test_registered_memory", says="the tier has written elsewhere in the memory")
class TestUsesRegisteredMemory(MemoryTier):
    def register_memory(self, memory):
        memory[:64] = bytes(64)


@broken(
    "test_replaced_values_are_let_go",
    says="48 puts of 262144 bytes hold ",
    passes=("test_put_replaces",),
)
class TestHoldsAllValues(MemoryTier):
    def put(self, key, data):
        super().put(key, data)
        self.log = [*getattr(self, "log", ()), self.kept[key]]


@broken(
    "test_memory_of_removed_keys_is_let_go",
    says="50,000 keys that were removed hold ",
    passes=("test_replaced_values_are_let_go", "test_calls_leave_nothing"),
    is_long=True,
)
class TestRemembersEveryKey(MemoryTier):
    def __init__(self, options):
        super().__init__(options)
        self.missed = {}

    def contains(self, keys):
        self.missed.update((key, time.monotonic()) for key in keys if key not in self.kept)
        return super().contains(keys)


@broken(
    "test_nothing_is_unpickled",
    says="functions of the module pickle were called",
    passes=("test_put_replaces",),
)
class TestUnpickles(MemoryTier):
    def put(self, key, data):
        super().put(key, pickle.dumps(bytes(data)))

    def get(self, key, into):
        # Not by `pickle.loads`, which the record of what the tests unpickle would have.
        data = pickle.Unpickler(io.BytesIO(self.kept.get(key, NOTHING))).load()
        if len(data) != len(into):
            return False
        into[:] = data
        return True


@broken(
    "test_nothing_is_unpickled",
    says="functions of the module pickle were called",
    passes=("test_value_of_any_bytes[zeros]",),
)
class TestKeepsAShelf(MemoryTier):
    """As of the standard library."""

    def put(self, key, data):
        shelve.Shelf(self.kept, keyencoding="latin-1")[key.decode("latin-1")] = bytes(data)

    def get(self, key, into):
        if key not in self.kept:
            return False
        return self.fill(
            into, shelve.Shelf(self.kept, keyencoding="latin-1")[key.decode("latin-1")]
        )


@broken(
    "test_nothing_is_unpickled",
    says="functions of the module pickle were called",
    passes=("test_put_replaces",),
)
class TestUnpicklesOnAThread(MemoryTier):
    """As a client does whose answers another thread receives."""

    def get(self, key, into):
        with ThreadPoolExecutor(1) as thread:
            received = io.BytesIO(pickle.dumps(self.kept.get(key)))
            return self.fill(into, thread.submit(pickle.Unpickler(received).load).result())


@broken(
    "test_nothing_is_unpickled",
    says="functions of the module pickle were called",
    passes=("test_put_replaces",),
)
class TestAsksAPeerByPickle(MemoryTier):
    def __init__(self, options):
        super().__init__(options)
        self.here, self.there = multiprocessing.Pipe()

    def contains(self, keys):
        self.there.send_bytes(pickle.dumps([key in self.kept for key in keys]))
        return pickle._Unpickler(io.BytesIO(self.here.recv_bytes())).load()

    def close(self):
        self.here.close()
        self.there.close()


@broken(
    "test_calls_leave_nothing",
    says=" x descriptor of ",
    passes=("test_close_is_idempotent",),
    hints="each call opens a file or a connection",
    ends_within_s=0.1,
)
class TestOpensAFileForEachMiss(MemoryTier):
    opened: ClassVar = []

    def get(self, key, into):
        found = super().get(key, into)
        if not found and len(self.opened) < 200:
            self.opened.append(os.open(os.devnull, os.O_RDONLY))
        return found


@broken(
    "test_calls_leave_nothing",
    says="1000 keys were put and removed, and left 1000 files",
    passes=("test_removed_keys_are_gone",),
)
class TestLeavesAnIndex(FileTier):
    def put(self, key, data):
        super().put(key, data)
        Path(self._current().blocks.path, f"{key.hex()}.index").touch()


@broken(
    "test_calls_leave_nothing",
    says="thread ",
    passes=("test_put_replaces",),
    ends_within_s=0.1,
)
class TestStartsAThreadForEachRemoval(MemoryTier):
    def remove(self, keys):
        super().remove(keys)
        threading.Thread(target=time.sleep, args=(2,), daemon=True).start()


# -- several callers


@broken(
    "test_value_is_there_whole_or_not_at_all",
    says="contains() finds a key whose value get() does not find",
    passes=("test_threads_share_an_object",),
)
class TestTellsValuesBeforeTheyAreThere(MemoryTier):
    coming: ClassVar = set()

    def contains(self, keys):
        return [key in self.kept or key in self.coming for key in keys]

    def put(self, key, data):
        self.coming.add(key)
        time.sleep(0.005)
        super().put(key, data)
        self.coming.discard(key)


@broken(
    "test_value_is_there_whole_or_not_at_all",
    says="FileNotFoundError: ",
    passes=("test_threads_share_an_object",),
)
class TestLooksBeforeItReads(FileTier):
    def get(self, key, into):
        path = Path(self._current().blocks.path, key.hex())
        if not path.exists():
            return False
        # As long as a file server takes for its answer.
        time.sleep(0.003)
        return self.fill(into, path.read_bytes())


@broken(
    "test_value_is_there_whole_or_not_at_all",
    says="get() returns a mix of two values",
    passes=("test_value_stays_when_it_was_read",),
)
class TestReadsInParts(FileTier):
    def get(self, key, into):
        path = Path(self._current().blocks.path, key.hex())
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size != len(into):
                return False
            for first in range(0, len(into), 2**18):
                part = into[first : first + 2**18]
                with path.open("rb") as file:
                    file.seek(first)
                    file.readinto(part)
                time.sleep(0.001)
            return True
        return False


@broken(
    "test_value_is_there_whole_or_not_at_all",
    says="get() finds nothing while a value is replaced",
    passes=("test_put_replaces",),
)
class TestRemovesBeforeItReplaces(FileTier):
    def put(self, key, data):
        self.remove([key])
        time.sleep(0.002)
        super().put(key, data)


@broken(
    "test_threads_share_an_object", says="beside other threads", passes=("test_many_equal_singles",)
)
class TestSharesABuffer(MemoryTier):
    def put(self, key, data):
        self.buffer = bytearray(data[: len(data) // 2])
        time.sleep(1e-4)
        self.buffer += data[len(data) // 2 :]
        super().put(key, self.buffer)


@broken(
    "test_threads_share_an_object",
    says="SQLite objects created in a thread",
    hints="threads share a connection of sqlite: give each thread its own",
)
class TestIsForOneThread(MemoryTier):
    def __init__(self, options):
        super().__init__(options)
        self.connection = sqlite3.connect(":memory:")

    def get(self, key, into):
        self.connection.execute("select 1")
        return super().get(key, into)

    def close(self):
        self.connection.close()


@broken(
    "",
    passes=(
        "test_any_call_may_fail[the tier alone]",
        "test_any_call_may_fail[under an arena]",
        "test_any_call_may_fail[under an arena that writes back]",
        "test_close_leaves_nothing",
    ),
)
class TestHealthyInSqlite(Tier):
    options_cls = MemoryTierOptions

    """It keeps descriptors of a file that another connection of the process has locked."""

    def __init__(self, options):
        self.path = f"{options.shelf}/kept.db"
        self.local, self.lock, self.connections = threading.local(), threading.Lock(), []
        self.run("create table if not exists kept (key blob primary key, value blob)")

    def run(self, text, *values):
        if not hasattr(self.local, "connection"):
            made = sqlite3.connect(
                self.path, timeout=30, isolation_level=None, check_same_thread=False
            )
            made.execute("pragma journal_mode=wal")
            made.execute("pragma synchronous=off")
            with self.lock:
                self.connections.append(made)
            self.local.connection = made
        return self.local.connection.execute(text, values).fetchone()

    def contains(self, keys):
        return [self.run("select 1 from kept where key = ?", key) is not None for key in keys]

    def put(self, key, data):
        self.run("insert or replace into kept values (?, ?)", key, bytes(data))

    def get(self, key, into):
        row = self.run("select value from kept where key = ?", key)
        return self.fill(into, row and row[0])

    def remove(self, keys):
        for key in keys:
            self.run("delete from kept where key = ?", key)

    def close(self):
        with self.lock:
            connections, self.connections = self.connections, []
        for each in connections:
            each.close()


@broken(
    "test_objects_reach_one_store",
    says="contains() of the other object",
    passes=("test_removed_keys_are_gone",),
)
class TestKeepsByObject(MemoryTier):
    def __init__(self, options):
        super().__init__(options)
        self.kept = {}


@broken(
    "test_object_made_before_a_put_finds_it",
    says="contains() misses what another object has put",
    passes=("test_removed_keys_are_gone",),
)
class TestListsTheStoreWhenMade(MemoryTier):
    def __init__(self, options):
        super().__init__(options)
        self.listed = set(self.kept)

    def put(self, key, data):
        super().put(key, data)
        self.listed.add(key)

    def contains(self, keys):
        return [key in self.listed and key in self.kept for key in keys]


@broken(
    "test_object_made_before_a_put_finds_it",
    says="contains() misses what another object has put",
    passes=("test_objects_reach_one_store",),
)
class TestRemembersMissingKeys(MemoryTier):
    def __init__(self, options):
        super().__init__(options)
        self.missing = set()

    def put(self, key, data):
        super().put(key, data)
        self.missing.discard(key)

    def contains(self, keys):
        self.missing.update(key for key in keys if key not in self.kept)
        return [key not in self.missing for key in keys]


@broken(
    "test_processes_see_each_others_values",
    says="contains() misses what another process has put",
    in_processes=True,
)
class TestIsMemoryOfOneProcess(MemoryTier): ...


@broken(
    "test_processes_see_each_others_values",
    says="value 2 of another process",
    passes=("test_objects_reach_one_store",),
)
class TestCachesByProcess(FileTier):
    cached: ClassVar = defaultdict(dict)

    def __init__(self, options):
        super().__init__(options)
        self.values = self.cached[options.shared_storage_path]

    def put(self, key, data):
        super().put(key, data)
        self.values[key] = bytes(data)

    def get(self, key, into):
        if len(self.values.get(key, b"")) == len(into):
            into[:] = self.values[key]
            return True
        return super().get(key, into)

    def remove(self, keys):
        super().remove(keys)
        for key in keys:
            self.values.pop(key, None)


@broken(
    "test_killed_process_leaves_whole_values",
    says="a value is torn",
    passes=("test_processes_see_each_others_values",),
)
class TestWritesInPlace(FileTier):
    def put(self, key, data):
        path = Path(self._current().blocks.path, key.hex())
        with path.open("wb", buffering=0) as file:
            file.write(data[: len(data) // 2])
            time.sleep(0.005)
            file.write(data[len(data) // 2 :])


@broken(
    "test_processes_put_under_one_key",
    says=", while two processes put",
    passes=("test_processes_see_each_others_values",),
)
class TestWritesUnderOneName(FileTier):
    """Whole files, but for two writers at a time."""

    def put(self, key, data):
        path = Path(self._current().blocks.path, key.hex())
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            for first in range(0, len(data), 2**16):
                file.write(data[first : first + 2**16])
                file.flush()
                time.sleep(0.0005)
        with contextlib.suppress(FileNotFoundError):
            part.replace(path)


@broken(
    "test_fault_of_the_store[full]",
    says="contains() and get() do not agree, after the store was full",
    passes=("test_value_is_there_whole_or_not_at_all",),
)
class TestTellsWhatItCouldNotPut(FileTier):
    def put(self, key, data):
        path = Path(self._current().blocks.path, key.hex())
        with contextlib.suppress(OSError):
            self.write_whole(path, data)
            return
        path.unlink(missing_ok=True)
        path.touch()


@broken(
    "test_fault_of_the_store[full]",
    says="20 calls of put() that failed have left 20 files",
    passes=("test_calls_leave_nothing",),
)
class TestLeavesHalfOfWhatItCouldNotPut(FileTier):
    def put(self, key, data):
        path = Path(self._current().blocks.path, key.hex())
        part = path.with_suffix(f".{time.monotonic_ns()}")
        part.write_bytes(data)
        part.replace(path)


@broken(
    "test_fault_of_the_store[read-only]",
    says="has not returned in another process",
    passes=("test_put_replaces",),
    deadline_s=2.0,
)
class TestTriesUntilItCanPut(FileTier):
    def put(self, key, data):
        while True:
            with contextlib.suppress(StorageError):
                return super().put(key, data)
            time.sleep(0.01)


class KeepsInMemory(FileTier):
    """Keeps in its own memory what it cannot put."""

    def __init__(self, options):
        super().__init__(options)
        self.spare = {}

    def _current(self):
        return self._folders

    def put(self, key, data):
        self.spare.pop(key, None)
        try:
            super().put(key, data)
        except StorageError:
            self.spare[key] = bytes(data)

    def get(self, key, into):
        return self.fill(into, self.spare.get(key)) or super().get(key, into)

    def contains(self, keys):
        found = super().contains(keys)
        return [has or key in self.spare for key, has in zip(keys, found, strict=True)]


@broken(
    "test_fault_of_the_store[gone]",
    says="another object finds other keys, after the store was gone",
    passes=("test_objects_reach_one_store",),
)
class TestKeepsInMemoryWhatIsGone(KeepsInMemory): ...


@broken(
    "test_fault_of_the_store[full]",
    says="another object finds other keys, after the store was full",
    passes=("test_processes_see_each_others_values",),
)
class TestKeepsInMemoryWhatHasNoRoom(KeepsInMemory):
    def put(self, key, data):
        super().put(key, data)
        if key in self.spare:
            self.remove([key])


@broken(
    "test_killed_process_leaves_whole_values",
    says="has not returned in",
    passes=("test_threads_share_an_object",),
    deadline_s=1.0,
)
class TestLeavesALock(FileTier):
    def put(self, key, data):
        lock = Path(self._current().blocks.path, "lock")
        for _ in range(1000):
            with contextlib.suppress(FileExistsError):
                lock.touch(exist_ok=False)
                break
            time.sleep(0.01)
        super().put(key, data)
        time.sleep(0.002)
        lock.unlink()


@broken(
    "test_kept_bytes_are_bounded",
    says="32 values are kept, room is for 8",
    passes=("test_put_replaces",),
    size_option="max_bytes",
)
class TestEvictsNothing(FileTier):
    def __init__(self, options):
        super().__init__(options)
        self._room.make = lambda blocks, nbytes: None


# -- construction, statistics and close


@broken(
    "test_unknown_option_is_refused",
    says="the option 'an_option_that_no_tier_has' is accepted",
    passes=("test_objects_reach_one_store",),
)
class TestIgnoresUnknownOptions(MemoryTier):
    options_cls = ()

    def __init__(self, options):
        super().__init__(MemoryTierOptions(shelf=options["shelf"]))


@broken(
    "test_unknown_option_is_refused",
    says="TestRaisesTypeErrors.open() got an unexpected keyword argument",
)
class TestRaisesTypeErrors(MemoryTier):
    options_cls = ()

    def __init__(self, options):
        self.open(**options)

    def open(self, shelf):
        super().__init__(MemoryTierOptions(shelf=shelf))


@broken(
    "test_stats_are_numbers_and_counters_rise",
    says="state of the tier is 'connected', not a number",
)
class TestHasTextForStats(MemoryTier):
    def get_stats(self):
        return {"state": "connected"}


@broken("test_stats_are_numbers_and_counters_rise", says="counters that have fallen")
class TestCountsWhatIsLeft(MemoryTier):
    num_left = 10

    def get_stats(self):
        self.num_left -= 1
        return {"left_total": self.num_left}


@broken(
    "test_close_is_idempotent",
    passes=("test_close_ends_one_object_only",),
    says="has no attribute 'kept'",
)
class TestClosesOnce(MemoryTier):
    def close(self):
        del self.kept


@broken(
    "test_close_is_idempotent",
    passes=("test_close_ends_one_object_only",),
    says="has no attribute 'connection'",
)
class TestCannotCloseUnused(MemoryTier):
    def put(self, key, data):
        super().put(key, data)
        self.connection = object()

    def close(self):
        assert self.connection


@broken(
    "test_close_ends_one_object_only",
    says="2 of 2 keys have no or other values",
    passes=("test_close_is_idempotent",),
)
class TestClosesTheStore(MemoryTier):
    def close(self):
        self.kept.clear()


@broken(
    "test_get_that_declares_it_writes_nothing_after_its_return",
    says="`into` has changed after get() had returned",
    passes=("test_value_stays_when_it_was_read",),
)
class TestWritesAfterGet(MemoryTier):
    writes_after_get = False

    def get(self, key, into):
        found = super().get(key, into)
        threading.Timer(0.05, super().get, (key, into)).start()
        return found


@broken(
    "test_close_leaves_nothing",
    says="after 0.5 s these are left:",
    passes=("test_close_is_idempotent",),
)
class TestLeavesAThread(MemoryTier):
    def __init__(self, options):
        super().__init__(options)
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()


class Listens(MemoryTier):
    """Has a server for peers."""

    host = ""

    def __init__(self, options):
        super().__init__(options)
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        self.server = socket.create_server((self.host, 0), family=family)

    def close(self):
        self.server.close()


@broken(
    "test_only_this_host_reaches_it",
    says="which other hosts reach, and none of the options",
    passes=("test_close_leaves_nothing",),
    hints="a server is bound to no address, which is all: bind it to 127.0.0.1",
)
class TestListensEverywhere(Listens): ...


@broken(
    "test_only_this_host_reaches_it",
    says="which other hosts reach, and none of the options",
)
class TestListensEverywhereByIPv6(Listens):
    host = "::"


@broken(
    "test_only_this_host_reaches_it",
    says="which other hosts reach, and none of the options",
    passes=("test_put_replaces",),
)
class TestStartsAServerThatListensEverywhere(MemoryTier):
    CODE = (
        "import socket, sys\n"
        "server = socket.create_server(('0.0.0.0', 0))\n"
        "print(flush=True)\n"
        "sys.stdin.read()"
    )

    def __init__(self, options):
        super().__init__(options)
        command = [sys.executable, "-S", "-c", self.CODE]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.process.stdout.readline()

    def close(self):
        self.process.communicate()


@broken("", passes=("test_only_this_host_reaches_it",))
class TestListensAtLoopback(Listens):
    host = "127.0.0.1"


# -- blocks, and a model


@broken(
    "test_damaged_block_is_refused[the tier alone]",
    says="a whole block is not loaded",
    passes=("test_removed_keys_are_gone",),
)
class TestBuriesWhatWasRemovedTwice(MemoryTier):
    def __init__(self, options):
        super().__init__(options)
        self.num_removed = REMOVED[options.shelf]

    def remove(self, keys):
        super().remove(keys)
        self.num_removed.update(keys)

    def put(self, key, data):
        if self.num_removed[key] < 5:
            super().put(key, data)


@broken(
    "test_damaged_block_is_refused[the tier alone]",
    says="bit 0 of byte 0: it is still there",
    passes=("test_put_replaces",),
)
class TestRemovesWhenClosed(MemoryTier):
    def __init__(self, options):
        super().__init__(options)
        self.removed = []

    def remove(self, keys):
        self.removed += keys

    def close(self):
        super().remove(self.removed)


@broken(
    "test_no_block_outlives_its_weights[alone]",
    says="blocks of other weights were found",
    passes=("test_ranks_are_kept_apart",),
)
class TestDropsTheWeights(OtherKeys):
    def other(self, key):
        return key[16:]


@broken(
    "test_any_call_may_fail[the tier alone]",
    says="StallError: no progress on blocks that are loaded once no call fails within 0.5 s",
    passes=("test_put_replaces",),
    deadline_s=0.5,
)
class TestReadsInItsOwnThreadOnly(MemoryTier):
    def __init__(self, options):
        super().__init__(options)
        self.thread = threading.get_ident()

    def get(self, key, into):
        if threading.get_ident() != self.thread:
            raise RuntimeError("made in another thread")
        return super().get(key, into)


@broken(
    "test_model_is_served_from_the_tier[alone]",
    says="no block was loaded",
    deadline_s=30.0,
    passes=("test_threads_share_an_object",),
)
class TestAnswersLate(MemoryTier):
    def contains(self, keys):
        # As long as keys that a model's requests have are asked for.
        time.sleep(3.5 if threading.current_thread().name.startswith("wtransfer") else 0)
        return super().contains(keys)


@broken(
    "test_runs_with_one_label_share_nothing[alone]",
    says="a run does not load its own blocks",
    passes=("test_threads_share_an_object",),
)
class TestRaisesOnOtherThreads(MemoryTier):
    def get(self, key, into):
        assert not threading.current_thread().name.startswith("wtransfer"), "another thread"
        return super().get(key, into)


# -- what another object, or another order, shows


@broken(
    "test_kept_bytes_are_bounded",
    says="16 values are kept, room is for 8",
    hints="or those that its own object has put only",
    passes=("test_put_replaces",),
    size_option="max_bytes",
)
class TestCountsWhatItHasPutItself(FileTier):
    def __init__(self, options):
        super().__init__(options)
        self._room.make = lambda blocks, nbytes: None
        self.own = []

    def put(self, key, data):
        super().put(key, data)
        self.own.append(key)
        if len(self.own) > 8:
            self.remove([self.own.pop(0)])


@broken(
    "test_threads_share_an_object",
    says="put_many() of TestLocksKeysInTheOrderOfItsCall (Keep several, as `put`. Only a tier that "
    "overrides it is given more than one at a time.) has not returned in 6 s",
    hints="a call waits without an end, for a lock",
    deadline_s=1.0,
    passes=("test_many_equal_singles",),
)
class TestLocksKeysInTheOrderOfItsCall(MemoryTier):
    locks: ClassVar = defaultdict(threading.Lock)

    def put_many(self, items):
        with contextlib.ExitStack() as stack:
            for key, _ in items:
                stack.enter_context(self.locks[key])
                time.sleep(1e-3)
            super().put_many(items)
