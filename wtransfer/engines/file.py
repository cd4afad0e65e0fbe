"""Engine ``file``, worker side: weights by way of a shared folder.

1. T (`FileTrainerEngine`) writes each tensor into a fresh folder, digesting it in the same pass,
   and announces bucket after bucket while it goes on writing.
2. W reads them into memory of its own and hands them out; the session digests what was read.
3. T gives the folder its name, and lists it as the current version once every worker has proven
   that it has it. The versions before stay for a while: publishers go back to them, and workers
   that come when the publisher has gone (``join="file:/shared/root"``) take the current one.

Any file system that all sides have mounted will do. Who may read or write there may use it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from wtransfer.checkpoint.stored import Place, read_tensors
from wtransfer.engines.interface import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from wtransfer.engines.update_lists import check_lengths
from wtransfer.errors import NotInitializedError, StorageError
from wtransfer.manifest import Piece
from wtransfer.transport.files import Folder, plain_name

if TYPE_CHECKING:
    from wtransfer.config import HasBackend, ParallelConfig
    from wtransfer.engines.interface import LoadWeights

ROOT_VARIABLE = "WTRANSFER_FILE_ROOT"
"""Where this worker has mounted the folder, if not where the trainer has."""
_ENTRY_TYPES: dict[str, type] = {"names": str, "dtype_names": str, "shapes": list, "offsets": int}


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """Where versions are."""

    root: str
    """The folder, as the trainer names it: an absolute path."""

    def __post_init__(self) -> None:
        _check_type("root", self.root, str)
        # A relative one would lead from wherever this worker was started.
        if not self.root.startswith("/") or "\0" in self.root:
            raise ValueError(f"`root` is {self.root[:300]!r}, expected an absolute path")


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """One bucket: tensors that lie in a file. All lists have the same length."""

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
        self._check_types()
        check_lengths(self, _ENTRY_TYPES)
        try:
            plain_name(self.folder)
            plain_name(self.file)
        except StorageError as error:
            raise ValueError(str(error)) from error
        for place in self.places():
            place.check()

    def _check_types(self) -> None:
        for name in ("folder", "file"):
            _check_type(name, getattr(self, name), str)
        for name, cls in _ENTRY_TYPES.items():
            entries = getattr(self, name)
            _check_type(name, entries, list)
            for index, entry in enumerate(entries):
                _check_type(f"{name}[{index}]", entry, cls)

    def places(self) -> list[Place]:
        """Return where each tensor is."""
        rows = zip(self.names, self.dtype_names, self.shapes, self.offsets, strict=True)
        return [
            Place(Piece(name, dtype, tuple(shape)), offset) for name, dtype, shape, offset in rows
        ]


class FileWeightTransferEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """Reads what the trainer has written.

    Args:
        config: Names the backend.
        parallel_config: Not needed: every worker reads the same files.
    """

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo
    trainer_cls = "wtransfer.engines.file_trainer:FileTrainerEngine"
    tensors_valid_until: ClassVar[Literal["return", "round"]] = "round"
    allocates: ClassVar[bool] = True
    multi_host: ClassVar[bool] = True

    def __init__(self, config: HasBackend, parallel_config: ParallelConfig) -> None:
        super().__init__(config, parallel_config)
        self._root: Folder | None = None

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Open the folder.

        Raises:
            StorageError: It is not there, or may not be read.
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
            TruncatedError: The file is shorter than was announced; the tensor is named.
            StorageError: No such file, or none that may be read.
        """
        if self._root is None:
            raise NotInitializedError("not initialized: call init_transfer_engine first")
        # Opened anew each time: only that makes a share look at what has been written since.
        with self._root.folder(update_info.folder) as folder:
            load_weights(read_tensors(folder, update_info.file, update_info.places()))

    def shutdown(self) -> None:
        """Close the folder."""
        root, self._root = self._root, None
        if root is not None:
            root.close()


def _check_type(field: str, value: object, cls: type) -> None:
    if not isinstance(value, cls):
        raise ValueError(f"`{field}` is of type {type(value).__name__}, expected {cls.__name__}")  # noqa: TRY004  # a dictionary from elsewhere that does not fit
