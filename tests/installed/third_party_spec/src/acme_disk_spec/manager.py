"""Scheduler's side: which files there are."""

from wtransfer import OffloadingManager
from wtransfer.errors import BlockNotKeptError
from wtransfer.specs.interface import (
    LoadStoreSpec,
    LookupResult,
    PrepareStoreOutput,
    RequestOffloadingContext,
)


class Files(LoadStoreSpec):
    def __init__(self, names, gone=()):
        self.names = list(names)
        self.gone = list(gone)


class DiskManager(OffloadingManager):
    def __init__(self, most):
        self.most = most
        # key -> names of those who hold it: "load" or "store", and the request.
        self.kept = {}
        self.ready = set()

    def on_new_request(self, req_context):
        return RequestOffloadingContext()

    def lookup(self, key, req_context):
        if key in self.ready:
            return LookupResult.HIT
        return LookupResult.HIT_PENDING if key in self.kept else LookupResult.MISS

    def touch(self, keys, req_context):
        for key in reversed(list(keys)):
            if key in self.kept:
                self.kept[key] = self.kept.pop(key)

    def prepare_load(self, keys, req_context):
        for key in keys:
            if key not in self.ready:
                raise BlockNotKeptError(key.hex())
        for key in keys:
            self.kept[key].append(("load", req_context.req_id))
        return Files(key.hex() for key in keys)

    def complete_load(self, keys, req_context):
        for key in keys:
            self.let_go(key, ("load", req_context.req_id))

    def prepare_store(self, keys, req_context):
        new = [key for key in dict.fromkeys(keys) if key not in self.kept]
        count = max(0, len(self.kept) + len(new) - self.most)
        idle = [key for key, holders in self.kept.items() if not holders and key not in keys]
        if count > len(idle):
            return None
        for key in idle[:count]:
            self.forget(key)
        for key in new:
            self.kept[key] = [("store", req_context.req_id)]
        names = [key.hex() for key in new]
        return PrepareStoreOutput(new, Files(names, [k.hex() for k in idle[:count]]), idle[:count])

    def complete_store(self, keys, req_context, success=True):
        for key in keys:
            if self.let_go(key, ("store", req_context.req_id)):
                if success:
                    self.ready.add(key)
                else:
                    self.forget(key)

    def reset_cache(self):
        self.kept.clear()
        self.ready.clear()

    def let_go(self, key, holder):
        known = holder in self.kept.get(key, ())
        if known:
            self.kept[key].remove(holder)
        return known

    def forget(self, key):
        del self.kept[key]
        self.ready.discard(key)
