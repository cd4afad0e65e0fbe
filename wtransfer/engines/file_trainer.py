"""Engine ``file``, trainer side: writes versions, tells the workers as it goes, keeps some."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from wtransfer.calls import Announcer
from wtransfer.checkpoint.incoming import Incoming
from wtransfer.checkpoint.keeper import Keeper
from wtransfer.checkpoint.manifest_file import ManifestFile
from wtransfer.checkpoint.shards import lay_out
from wtransfer.checkpoint.source import CheckpointSource
from wtransfer.checkpoint.versions import MAX_KEPT, Version, VersionStore, check_identity
from wtransfer.engines.interface import (
    KeptVersion,
    ParamMeta,
    RoundSource,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightSyncClient,
)
from wtransfer.errors import NotInitializedError
from wtransfer.transport.layout import aligned
from wtransfer.transport.tensors import dtype_name, own_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wtransfer.manifest import Piece


@dataclass
class FileTrainerInitInfo(TrainerInitInfo):
    """Options of the engine."""

    backend: ClassVar[str] = "file"

    path: str
    """Folder of the versions, which every worker can read; made if it is not there."""
    keep: int = 3
    """Versions to keep, the current one among them."""
    bucket_nbytes: int = 32 << 20
    """Bytes in memory, and announced, at a time; one tensor may be larger."""
    shard_nbytes: int = 5_000_000_000
    """Bytes of a file; one tensor may be larger."""

    def __post_init__(self) -> None:
        # The CLI hands over strings.
        for name in ("keep", "bucket_nbytes", "shard_nbytes"):
            value = int(getattr(self, name))
            if value <= 0:
                raise ValueError(f"{name} is {value}, expected > 0")
            setattr(self, name, value)
        if self.keep > MAX_KEPT:
            raise ValueError(f"keep is {self.keep}, expected <= {MAX_KEPT}")
        if not self.path:
            raise ValueError("path is empty, expected the folder of the versions")
        # Workers may have another working directory.
        self.path = str(Path(self.path).expanduser().absolute())


@dataclass
class Sent:
    """A version that lies in the store, and what was announced of it."""

    version: Version
    announced: list[dict[str, Any]]


class Bucket:
    """Tensors of one file that are in memory, on their way to it.

    Args:
        nbytes: Size.
    """

    def __init__(self, nbytes: int) -> None:
        # Made once: fresh pages cost ten times a copy.
        self._memory = own_memory(nbytes)
        self._end = 0
        self.file = ""
        """File that the tensors belong to."""
        self.tensors: list[tuple[ParamMeta, memoryview]] = []
        """What is in it."""

    @property
    def nbytes(self) -> int:
        """Size."""
        return self._memory.size

    def fits(self, file: str, nbytes: int) -> bool:
        """Return whether a tensor of that file can be added."""
        return self.file == file and self._end + nbytes <= self._memory.size

    def clear(self, file: str) -> None:
        """Begin anew, with tensors of that file."""
        self.tensors = []
        self.file, self._end = file, 0

    def take(self, nbytes: int) -> memoryview:
        """Return memory for one more tensor."""
        start = self._end
        self._end += aligned(nbytes)
        return self._memory[start : start + nbytes].data


class FileTrainerEngine(TrainerWeightTransferEngine[FileTrainerInitInfo]):
    """Writes each update as a version of its own.

    Has the folder to itself for as long as it lives.

    Args:
        init_info: Options.
        client: Reaches all workers.
        source: The weights.

    Raises:
        StorageInUseError: Another process publishes to this folder.
        StorageError: The folder cannot be made, or not be written to.
    """

    init_info_cls = FileTrainerInitInfo

    def __init__(
        self,
        init_info: FileTrainerInitInfo,
        *,
        client: WeightSyncClient,
        source: RoundSource | None = None,
    ) -> None:
        super().__init__(init_info, client=client, source=source)
        self._keeper = Keeper(Path(init_info.path), init_info.keep)
        self._bucket = Bucket(0)
        self._committed: Sent | None = None
        self._next: Sent | None = None
        self._unfinished: str | None = None

    def worker_init_info(self) -> dict[str, Any]:
        """Return where versions are."""
        return {"root": self.init_info.path}

    def send_weights(self) -> None:
        """Write and announce, the one beside the other; then give the version its name."""
        source = self.source
        if source is None:
            raise NotInitializedError("not initialized: the engine has no source to send")
        self._discard_unfinished()
        shards = lay_out(source.manifest.pieces, self.init_info.shard_nbytes)
        incoming = Incoming(*self._keeper.begin(), shards)
        name = incoming.name
        try:
            announced = self._write(source, incoming)
            manifest = ManifestFile.of(source.version, source.manifest, source.digests())
            incoming.complete(manifest)
            name = self._keeper.publish(name, manifest.fingerprint)
        except BaseException:
            # Workers may still read it, and would say that it is missing before the round has heard
            # what is wrong: it goes when the round is over.
            self._unfinished = name
            raise
        finally:
            incoming.close()
        self._next = _sent(source, manifest, name, announced)

    def resend(self, client: WeightSyncClient) -> None:
        """Announce the current version again."""
        if self._committed is None:
            raise NotInitializedError("not initialized: nothing has been committed yet")
        for info in self._committed.announced:
            client.update_weights(info)

    def round_finished(self, *, committed: bool) -> None:
        """List what was committed; remove what was not."""
        self._discard_unfinished()
        sent, self._next = self._next, None
        if sent is None:
            return
        if committed:
            # First: those who have it are served by it, whatever becomes of the listing.
            self._committed = sent
            self._keeper.commit(sent.version)
        else:
            self._keeper.discard(sent.version.folder)

    def shutdown(self) -> None:
        """Let others publish there; the versions stay."""
        self._discard_unfinished()
        self._keeper.close()

    def _discard_unfinished(self) -> None:
        name, self._unfinished = self._unfinished, None
        if name is not None:
            self._keeper.discard(name)

    @classmethod
    def kept(cls, init_info: FileTrainerInitInfo) -> Sequence[KeptVersion]:
        """Return what can be gone back to, oldest first."""
        if not Path(init_info.path).exists():
            return []
        return [
            KeptVersion(each.version, each.fingerprint, each.nbytes, each.committed_at)
            for each in VersionStore(init_info.path).versions()
        ]

    @classmethod
    def kept_source(cls, init_info: FileTrainerInitInfo, kept: KeptVersion) -> CheckpointSource:
        """Return a source of the weights of a kept version.

        Raises:
            VersionNotKeptError: It is not kept any more.
            SourceError: Its files are damaged.
        """
        store = VersionStore(init_info.path)
        version = store.find(kept.fingerprint)
        source = CheckpointSource(store.folder_of(version))
        check_identity(source.manifest, kept.fingerprint, str(store.folder_of(version)))
        return source

    def _write(self, source: RoundSource, incoming: Incoming) -> list[dict[str, Any]]:
        bucket = self._bucket = self._roomy(source.manifest.pieces)
        # A round that was ended may have left something in it.
        bucket.clear("")
        announced: list[dict[str, Any]] = []

        def tell(info: dict[str, Any]) -> None:
            # Workers on other hosts see what has left this one.
            incoming.sync(info["file"])
            self.client.update_weights(info)

        with Announcer(tell) as announcer:

            def flush() -> None:
                if bucket.tensors:
                    incoming.write((meta.name, data) for meta, data in bucket.tensors)
                    announced.append(_update_info(incoming, bucket))
                    announcer.announce(announced[-1])

            def allocate(meta: ParamMeta) -> memoryview:
                file = incoming.file_of(meta.name)
                if not bucket.fits(file, meta.nbytes):
                    flush()
                    bucket.clear(file)
                return bucket.take(meta.nbytes)

            for meta, data in source.iter_into(allocate):
                bucket.tensors.append((meta, data))
            flush()
        return announced

    def _roomy(self, pieces: Sequence[Piece]) -> Bucket:
        """Return a bucket that holds the largest tensor; the one from before, if it does."""
        largest = max((aligned(piece.nbytes) for piece in pieces), default=0)
        nbytes = max(largest, self.init_info.bucket_nbytes)
        return self._bucket if self._bucket.nbytes == nbytes else Bucket(nbytes)


def _sent(
    source: RoundSource, manifest: ManifestFile, folder: str, announced: list[dict[str, Any]]
) -> Sent:
    version = Version(
        version=source.version,
        fingerprint=manifest.fingerprint,
        nbytes=source.manifest.nbytes,
        committed_at=time.time(),
        folder=folder,
    )
    return Sent(version, [{**info, "folder": folder} for info in announced])


def _update_info(incoming: Incoming, bucket: Bucket) -> dict[str, Any]:
    metas = [meta for meta, _ in bucket.tensors]
    return {
        "folder": incoming.name,
        "file": bucket.file,
        "names": [meta.name for meta in metas],
        "dtype_names": [dtype_name(meta.dtype) for meta in metas],
        "shapes": [list(meta.shape) for meta in metas],
        "offsets": [incoming.offset_of(meta.name) for meta in metas],
    }
