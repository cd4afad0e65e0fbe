"""A stand-in for a server of SGLang that takes updates, to be changed by a test."""

from types import SimpleNamespace as Bag

from wtransfer_sglang import places


def cache_of(name, module):
    """Return a stand-in for a prefix cache of SGLang, which is known by its class."""
    return type(name, (), {"__module__": module})()


def parts():
    """Return what a server that takes updates has, as SGLang has it."""
    given = Bag(
        scheduler=Bag(
            tp_worker=Bag(model_runner=Bag(model=None)),
            model_config=Bag(),
            server_args=None,
            tree_cache=cache_of("UnifiedRadixCache", "sglang.srt.mem_cache.unified_radix_cache"),
        ),
        parallel=Bag(),
        options=Bag(radix_cache_backend=None, hicache_storage_backend=None),
        derived=None,
    )
    for paths, row in places.OPTIONS.items():
        for path in paths.split(" and "):
            put(given, path, row.off)
    return given


def put(given, path, value):
    """Set a field of a server's, by its path."""
    *owners, name = path.split(".")
    for owner in owners:
        given = getattr(given, owner)
    setattr(given, name, value)
