"""Engine `stream-engine`: weights through TCP streams, one from the trainer to each worker.

In every round the trainer listens, the workers dial and send the engine's token, and all tensors
follow, in the order of the round's layout. The token authenticates workers; nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import contextvars
import secrets
import selectors
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from wtransfer import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from wtransfer.engines.interface import LoadWeights
from wtransfer.transport.layout import TensorLayout

TOKEN_NBYTES = 32
CHUNK_NBYTES = 1 << 22


@dataclass
class StreamEngineInitInfo(WeightTransferInitInfo):
    """Init info of a worker, sent once over the authenticated control channel."""

    token: str
    timeout_s: float


@dataclass
class StreamEngineUpdateInfo(WeightTransferUpdateInfo):
    """Address that a worker dials in a round."""

    host: str
    port: int


@dataclass
class StreamEngineTrainerInitInfo(TrainerInitInfo):
    """Options, for `options=` and `-o`."""

    backend: ClassVar[str] = "stream-engine"
    host: str = "127.0.0.1"
    """Address of this machine at which workers reach it."""
    timeout_s: float = 30.0
    """Longest wait for a worker to dial, and for a chunk to be sent or to arrive, in seconds."""

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s < float("inf"):
            raise ValueError(f"timeout_s={self.timeout_s!r}: expected seconds above 0")


class StreamEngineTrainer(TrainerWeightTransferEngine[StreamEngineTrainerInitInfo]):
    """Sends while the workers receive."""

    init_info_cls = StreamEngineTrainerInitInfo
    _token = b""
    _sockets: tuple[socket.socket, ...] = ()

    def worker_init_info(self) -> dict[str, Any]:
        """Return what each worker gets as its init info, a later one, too."""
        self._token = secrets.token_bytes(TOKEN_NBYTES)
        return {"token": self._token.hex(), "timeout_s": self.init_info.timeout_s}

    def send_weights(self) -> None:
        """Send one round."""
        host, client = self.init_info.host, self.client
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with ThreadPoolExecutor(1) as pool:
            # Closed before the pool waits: workers that were not served fail at once.
            with socket.create_server((host, 0), family=family) as listener:
                self._sockets = (listener,)
                info = {"host": host, "port": listener.getsockname()[1]}
                # It returns when all workers have received, so it waits on a thread beside the
                # sending; the context binds the call to this round.
                update = pool.submit(contextvars.copy_context().run, client.update_weights, info)
                try:
                    self._send(listener, update)
                except OSError:
                    # The worker that closed its stream says why.
                    listener.close()
                    update.result()
                    raise
            update.result()

    def _send(self, listener: socket.socket, update: Future[None]) -> None:
        assert self.source is not None, "an engine without a source has nothing to send"
        with contextlib.ExitStack() as stack:
            streams = list(self._accept(listener, update, stack))
            for _, memory in self.source.iter_into(lambda meta: np.empty(meta.nbytes, np.uint8)):
                for start in range(0, len(memory), CHUNK_NBYTES):
                    chunk = memory.data[start : start + CHUNK_NBYTES]
                    for stream in list(streams):
                        try:
                            stream.sendall(chunk)
                        except OSError:
                            # A worker is lost. Whether the others go on is up to the publisher.
                            stream.close()
                            streams.remove(stream)
                            if not streams:
                                raise

    def _accept(
        self, listener: socket.socket, update: Future[None], stack: contextlib.ExitStack
    ) -> Iterator[socket.socket]:
        """Yield the streams of all workers; a peer that sends no token keeps nobody waiting."""
        num_accepted, end = 0, time.monotonic() + self.init_info.timeout_s
        selector = stack.enter_context(selectors.DefaultSelector())
        selector.register(listener, selectors.EVENT_READ)
        # Asked again each time: a worker that is lost meanwhile may be left out.
        while num_accepted < (num_workers := getattr(self.client, "num_workers", 1)):
            if update.done() or time.monotonic() > end:
                # A worker that failed before it dialled has ended the update.
                raise TimeoutError(f"{num_accepted} of {num_workers} workers have dialled")
            for key, _ in selector.select(0.05):
                if key.fileobj is listener:
                    peer = stack.enter_context(listener.accept()[0])
                    # It is readable when the whole token is there, or the peer has gone.
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, TOKEN_NBYTES)
                    peer.setblocking(False)
                    selector.register(peer, selectors.EVENT_READ, peer)
                    continue
                peer = key.data
                selector.unregister(peer)
                if not self._knows_token(peer):
                    peer.close()
                    continue
                peer.settimeout(self.init_info.timeout_s)
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets += (peer,)
                num_accepted += 1
                yield peer

    def _knows_token(self, peer: socket.socket) -> bool:
        with contextlib.suppress(OSError):
            return secrets.compare_digest(peer.recv(TOKEN_NBYTES), self._token)
        return False

    def abort_weight_update(self) -> None:
        """Unblock a running `send_weights`, from another thread: its calls fail."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def shutdown(self) -> None:
        """Unblock it here, too; the round itself closes what it has opened."""
        self.abort_weight_update()


class StreamEngine(WeightTransferEngine[StreamEngineInitInfo, StreamEngineUpdateInfo]):
    """Receives on a worker."""

    init_info_cls = StreamEngineInitInfo
    update_info_cls = StreamEngineUpdateInfo
    trainer_cls = StreamEngineTrainer
    multi_host = True
    # Each tensor has memory of its own, which is never written again: nothing needs to copy it,
    # or to digest it twice. "round" is until the worker releases it, many rounds later maybe.
    tensors_valid_until = "round"
    writes_after_return = False
    allocates = True

    _init_info: StreamEngineInitInfo | None = None
    _layout: TensorLayout | None = None
    _stream: socket.socket | None = None
    _aborted = False

    def init_transfer_engine(self, init_info: StreamEngineInitInfo) -> None:
        """Keep the token."""
        self._init_info = init_info

    def set_layout(self, layout: TensorLayout) -> None:
        """Take names, dtypes and shapes of the round's tensors: none of them has to be sent."""
        self._layout = layout

    def start_weight_update(self) -> None:
        """Begin a round: an abort concerned the one before."""
        self._aborted = False

    def receive_weights(
        self, update_info: StreamEngineUpdateInfo, load_weights: LoadWeights
    ) -> None:
        """Dial, and pass each tensor on when it is there."""
        known, layout = self._init_info, self._layout
        if known is None or layout is None:
            raise RuntimeError("this worker was not initialised")
        where = update_info.host, update_info.port
        with socket.create_connection(where, known.timeout_s) as stream:
            self._stream = stream
            if self._aborted:
                raise ConnectionAbortedError("the round was aborted while this worker dialled")
            stream.sendall(bytes.fromhex(known.token))
            for number, nbytes in enumerate(layout.sizes):
                memory = np.empty(nbytes, np.uint8)
                _receive(stream, memory)
                tensor = layout.view(memory, number, base=layout.starts[number])
                load_weights([(layout.names[number], tensor)])

    def abort_weight_update(self) -> None:
        """Unblock a running `receive_weights`, from another thread: its calls fail."""
        self._aborted = True
        if (stream := self._stream) is not None:
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)

    def shutdown(self) -> None:
        """Release everything."""
        self.abort_weight_update()


def _receive(stream: socket.socket, memory: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    filled = 0
    while filled < len(memory):
        part = stream.recv_into(memory.data[filled:])
        if not part:
            raise ConnectionError("the trainer has closed the stream")
        filled += part
