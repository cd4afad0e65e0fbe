"""One side of a connector in a process of its own, beside what is installed in a folder.

The worker's side prints its handshake metadata, hexadecimal; the scheduler's side is given them,
and prints what it says to them.
"""

from __future__ import annotations

import sys

import msgspec

from wtransfer.connectors.interface import KVConnectorRole
from wtransfer.errors import PluginIncompatibleError
from wtransfer.testing.mini_engine.config import EngineConfig
from wtransfer.testing.mini_engine.serialize import deserialize
from wtransfer.testing.mini_engine.worker import make_worker


def main(site: str, connector: str, options: dict, handshake: str = "") -> None:
    sys.path.insert(0, site)
    config = EngineConfig(connector=connector, options=options)
    if not handshake:
        worker = make_worker(config, owns_process=True)
        print(msgspec.msgpack.encode(worker.handshake()).hex())  # noqa: T201
        worker.close()
        return
    side = config.make_connector(KVConnectorRole.SCHEDULER)
    metadata = deserialize(msgspec.msgpack.decode(bytes.fromhex(handshake)))
    try:
        side.set_xfer_handshake_metadata({0: metadata})
        print("agreed")  # noqa: T201
    except PluginIncompatibleError as error:
        print(error.message, error.distribution, error.distribution_version, sep="\n")  # noqa: T201
    side.shutdown()
