"""Engine ``file``: weights by way of a shared folder.

1. T (`FileTrainerEngine`) writes each tensor to a fresh folder, digesting it in the same pass, and
   announces bucket after bucket while it goes on writing.
2. W (`FileWeightTransferEngine`) reads them into memory of its own and hands them out; the session
   digests the bytes read.
3. T gives the folder its name, and makes it the current version once every worker has proven that
   it has it. Earlier versions are retained: publishers roll back to them. Workers that join the
   folder (``join="file:/shared/root"``) take the current version, also when no publisher lives.

Any file system that all sides have mounted will do. Its permissions say which users may read or
write there.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from wtransfer.calls import Announcer
from wtransfer.checkpoint.safetensors import CheckpointWriter, StoredTensor, read_tensor
from wtransfer.checkpoint.source import ManifestFile
from wtransfer.checkpoint.versions import MAX_RETAINED, Version, VersionStore, VersionWriter
from wtransfer.engines.interface import (
    KeptVersion,
    RoundSource,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightSyncClient,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from wtransfer.errors import NotInitializedError, StorageError
from wtransfer.manifest import Piece
from wtransfer.transport.files import Folder, plain_name
from wtransfer.transport.tensors import dtype_name, own_memory
from wtransfer.weights import ParamMeta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wtransfer.checkpoint.source import CheckpointSource
    from wtransfer.config import HasBackend, ParallelConfig
    from wtransfer.weights import LoadWeights

ROOT_VARIABLE = "WTRANSFER_FILE_ROOT"
"""Environment variable: path of the folder on this worker, if it differs from the trainer's."""
_ENTRY_TYPES: dict[str, type] = {"names": str, "dtype_names": str, "shapes": list, "offsets": int}


# -- the worker's side


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """Location of the versions."""

    root: str
    """The folder, as the trainer names it: an absolute path."""

    def __post_init__(self) -> None:
        _check_type("root", self.root, str)
        # A relative path would start from the working directory of this worker.
        if not self.root.startswith("/") or "\0" in self.root:
            raise ValueError(f"`root` is {self.root[:300]!r}, expected an absolute path")


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """One bucket: tensors of one file. The lists have the same length."""

    folder: str
    """Folder of the version, in the root."""
    file: str
    """File in that folder."""
    names: list[str] = field(default_factory=list)
    """Names of the tensors."""
    dtype_names: list[str] = field(default_factory=list)
    """Wire dtypes."""
    shapes: list[list[int]] = field(default_factory=list)
    """Shapes."""
    offsets: list[int] = field(default_factory=list)
    """First byte of each tensor in the file."""

    def __post_init__(self) -> None:
        for name in ("folder", "file"):
            _check_type(name, getattr(self, name), str)
            try:
                plain_name(getattr(self, name))
            except StorageError as error:
                raise ValueError(str(error)) from error
        for name, cls in _ENTRY_TYPES.items():
            entries = getattr(self, name)
            _check_type(name, entries, list)
            for index, entry in enumerate(entries):
                _check_type(f"{name}[{index}]", entry, cls)
            if len(entries) != len(self.names):
                raise ValueError(
                    f"`{name}` has {len(entries)} entries, `names` has {len(self.names)}"
                )
        for stored in self.tensors():
            stored.check()

    def tensors(self) -> list[StoredTensor]:
        """Return the tensors as they lie in the file."""
        rows = zip(self.names, self.dtype_names, self.shapes, self.offsets, strict=True)
        return [
            StoredTensor(Piece(name, dtype, tuple(shape)), offset)
            for name, dtype, shape, offset in rows
        ]


def _check_type(field: str, value: object, cls: type) -> None:
    if not isinstance(value, cls):
        raise ValueError(f"`{field}` is of type {type(value).__name__}, expected {cls.__name__}")  # noqa: TRY004  # a peer's dictionary that does not fit


class FileWeightTransferEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """Reads the files that the trainer has written.

    Args:
        config: Names the backend.
        parallel_config: Not needed: every worker reads the same files.
    """

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo
    trainer_cls = "wtransfer.engines.file:FileTrainerEngine"
    contract_version: ClassVar[str] = "1.0"
    tensors_valid_until: ClassVar[Literal["return", "round"]] = "round"
    writes_after_return: ClassVar[bool] = False
    allocates: ClassVar[bool] = True
    multi_host: ClassVar[bool] = True

    def __init__(self, config: HasBackend, parallel_config: ParallelConfig) -> None:
        super().__init__(config, parallel_config)
        self._root: Folder | None = None

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Open the folder.

        Raises:
            StorageError: The folder is not there, or may not be read.
        """
        self.shutdown()
        root = os.environ.get(ROOT_VARIABLE) or init_info.root
        try:
            self._root = Folder(root)
        except StorageError as error:
            raise StorageError(
                f"{error.message}; the trainer publishes to {init_info.root!r}: mount it here, or "
                f"set {ROOT_VARIABLE} to where it is mounted"
            ) from error

    def receive_weights(self, update_info: FileUpdateInfo, load_weights: LoadWeights) -> None:
        """Read one bucket.

        Raises:
            TruncatedError: The file is shorter than announced; the tensor is named.
            StorageError: No such file, or none that may be read.
        """
        if self._root is None:
            raise NotInitializedError("not initialized: call init_transfer_engine first")
        # Opened anew each time: only that makes a share show files written since.
        with self._root.folder(update_info.folder) as folder:
            shown = repr(f"{folder.path}/{update_info.file}")
            fd = folder.open_file(update_info.file)
            try:
                load_weights(
                    (each.piece.name, read_tensor(fd, each, shown))
                    for each in update_info.tensors()
                )
            finally:
                os.close(fd)

    def shutdown(self) -> None:
        """Close the folder."""
        root, self._root = self._root, None
        if root is not None:
            root.close()


# -- the trainer's side


@dataclass
class FileTrainerInitInfo(TrainerInitInfo):
    """Options of the engine."""

    backend: ClassVar[str] = "file"

    path: str
    """Folder of the versions, which every worker can read; made if it is not there."""
    keep: int = 3
    """Versions to keep, the current one among them."""
    bucket_nbytes: int = 32 << 20
    """Bytes announced at a time; one tensor may be larger."""
    shard_nbytes: int = 5_000_000_000
    """Bytes of a file; one tensor may be larger."""

    def __post_init__(self) -> None:
        for name in ("keep", "bucket_nbytes", "shard_nbytes"):
            value = getattr(self, name)
            if type(value) is not int or value <= 0:
                raise ValueError(f"{name} is {value!r}, expected > 0, a whole number")
        if self.keep > MAX_RETAINED:
            raise ValueError(f"keep is {self.keep}, expected <= {MAX_RETAINED}")
        if not self.path:
            raise ValueError("path is empty, expected the folder of the versions")
        # Workers may have another working directory.
        self.path = str(Path(self.path).expanduser().absolute())


class FileTrainerEngine(TrainerWeightTransferEngine[FileTrainerInitInfo]):
    """Writes each update as a version of its own.

    Holds the lock of the folder until `shutdown`.

    Args:
        init_info: Options.
        client: Client of all workers.
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
        self._versions = VersionWriter(Path(init_info.path), init_info.keep)
        # Allocated once: fresh pages cost ten times a copy.
        self._buffer = own_memory(0)
        # The version for `round_finished` to commit or discard; and the one for `resend`.
        self._written: tuple[Version, list[dict[str, Any]]] | None = None
        self._committed: list[dict[str, Any]] | None = None
        self._unfinished: str | None = None

    def worker_init_info(self) -> dict[str, Any]:
        """Return the location of the versions."""
        return {"root": self.init_info.path}

    def send_weights(self) -> None:
        """Write the version and announce its buckets; then give its folder its name."""
        source = self.source
        if source is None:
            raise NotInitializedError("not initialized: the engine has no source to send")
        self._discard_unfinished()
        # After a failure here workers may still be reading the folder, and would report it missing
        # before the round has the cause: the folder is removed when the round is over.
        self._unfinished, folder = self._versions.begin()
        pieces, shard_nbytes = source.manifest.pieces, self.init_info.shard_nbytes
        with folder, CheckpointWriter(folder, pieces, shard_nbytes) as writer:
            announced = self._write(source, writer, self._unfinished)
            writer.finish()
            manifest = ManifestFile.of(source.version, source.manifest, source.digests())
            manifest.write(folder)
            name = self._versions.publish(self._unfinished, manifest.fingerprint)
        self._unfinished = None
        nbytes = source.manifest.nbytes
        version = Version(source.version, manifest.fingerprint, nbytes, time.time(), name)
        self._written = version, [{**info, "folder": name} for info in announced]

    def _write(
        self, source: RoundSource, writer: CheckpointWriter, folder: str
    ) -> list[dict[str, Any]]:
        """Write every tensor; return the announcements."""
        largest = max((piece.nbytes for piece in source.manifest.pieces), default=0)
        if self._buffer.size < largest:
            self._buffer = own_memory(largest)
        buffer, announced = self._buffer.data, list[dict[str, Any]]()
        bucket, nbytes = list[ParamMeta](), 0

        def tell(info: dict[str, Any]) -> None:
            # Workers on other hosts see only bytes that have left this one.
            writer.sync(info["file"])
            self.client.update_weights(info)

        with Announcer(tell) as announcer:

            def announce() -> None:
                if bucket:
                    announced.append(_update_info(writer, folder, bucket))
                    announcer.announce(announced[-1])
                    bucket.clear()

            for meta, data in source.iter_into(lambda meta: buffer[: meta.nbytes]):
                file, _ = writer.locate(meta.name)
                if bucket and (
                    nbytes + meta.nbytes > self.init_info.bucket_nbytes
                    or file != writer.locate(bucket[-1].name)[0]
                ):
                    announce()
                    nbytes = 0
                writer.write(meta.name, data)
                bucket.append(meta)
                nbytes += meta.nbytes
            announce()
        return announced

    def resend(self, client: WeightSyncClient) -> None:
        """Announce the current version again."""
        if self._committed is None:
            raise NotInitializedError("not initialized: nothing has been committed yet")
        for info in self._committed:
            client.update_weights(info)

    def round_finished(self, *, committed: bool) -> None:
        """Commit the version that was written, or remove it."""
        self._discard_unfinished()
        written, self._written = self._written, None
        if written is None:
            return
        version, announced = written
        if committed:
            # First: the workers hold the version, so late ones must get it, whether or not the
            # index can be written.
            self._committed = announced
            self._versions.commit(version)
        else:
            self._versions.discard(version.folder)

    def shutdown(self) -> None:
        """Let other processes publish there; the versions stay."""
        self._discard_unfinished()
        self._versions.close()

    def _discard_unfinished(self) -> None:
        name, self._unfinished = self._unfinished, None
        if name is not None:
            self._versions.discard(name)

    @classmethod
    def kept(cls, init_info: FileTrainerInitInfo) -> Sequence[KeptVersion]:
        """Return the versions that can be rolled back to, oldest first."""
        if not Path(init_info.path).exists():
            return []
        return [
            KeptVersion(each.version, each.fingerprint, each.nbytes, each.committed_at)
            for each in VersionStore(init_info.path).versions()
        ]

    @classmethod
    def kept_source(cls, init_info: FileTrainerInitInfo, kept: KeptVersion) -> CheckpointSource:
        """Return a source of the weights of a retained version.

        Raises:
            VersionNotKeptError: The version is not retained any more.
            SourceError: Files of the version are damaged.
            ManifestError: The manifest is missing, damaged, or that of another version.
        """
        store = VersionStore(init_info.path)
        return store.source(store.find(kept.fingerprint))


def _update_info(
    writer: CheckpointWriter, folder: str, bucket: Sequence[ParamMeta]
) -> dict[str, Any]:
    return {
        "folder": folder,
        "file": writer.locate(bucket[0].name)[0],
        "names": [meta.name for meta in bucket],
        "dtype_names": [dtype_name(meta.dtype) for meta in bucket],
        "shapes": [list(meta.shape) for meta in bucket],
        "offsets": [writer.locate(meta.name)[1] for meta in bucket],
    }
