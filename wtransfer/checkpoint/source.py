"""Weights that lie on disk, as a source: safetensors in the usual layout, sealed or not."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from wtransfer.checkpoint.manifest_file import MANIFEST_NAME, ManifestFile, read_manifest
from wtransfer.checkpoint.shards import INDEX_NAME, SUFFIX, WIRE_DTYPES, read_header, stored_form
from wtransfer.checkpoint.stored import Place, read_open
from wtransfer.engines.interface import ParamMeta
from wtransfer.errors import ManifestError, SourceError, StorageError, TruncatedError
from wtransfer.manifest import Algorithm, Piece
from wtransfer.transport.files import Folder, storage_errors
from wtransfer.transport.tensors import dtype_name, torch_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from wtransfer.checkpoint.manifest_file import SealedPiece
    from wtransfer.checkpoint.shards import Extent, Header

ENFORCED: Algorithm = "xxh3-128"
"""How a round digests what it sends: only such seals can be held to."""


class CheckpointSource:
    """Safetensors on disk in the usual layout: one file, or shards with an index.

    Tensors are read one at a time by ``pread``, each into memory of its own: a checkpoint larger
    than memory works, and a file that somebody cuts or overwrites is an error, not a signal. A
    folder with a ``wtransfer.json`` (``wtransfer seal`` writes it) must have the tensors that stand
    there, and a round in which one comes out with another digest is ended. So must a single file,
    if the ``wtransfer.json`` beside it has the same names.

    Args:
        path: A ``.safetensors`` file, or a folder with one, or with shards and their index.
        sealed: Whether to hold it against its ``wtransfer.json``, where there is one.

    Raises:
        SourceError: No such checkpoint, a shard is missing or damaged, a name appears twice, or
            the manifest has other tensors; the text names the tensor where it can be known.
        ManifestError: The manifest cannot be read, or its digests cannot be held to.
    """

    def __init__(self, path: str | os.PathLike[str], *, sealed: bool = True) -> None:
        self.manifest: ManifestFile | None = None
        """What was sealed; None if nothing was."""
        self._metadata: list[ParamMeta] = []
        self._file_of: dict[str, Path] = {}
        for file, names in _files(Path(path)):
            self._read_header(file, names)
        if sealed:
            self.manifest = _manifest_of(Path(path), set(self._file_of))
        if self.manifest is not None:
            self._metadata = _sealed_metadata(self._metadata, self.manifest)
        self._meta_of = {meta.name: meta for meta in self._metadata}

    def _read_header(self, file: Path, names: set[str] | None) -> None:
        with _opened(file) as fd:
            extents = read_header(fd, repr(str(file))).extents
        for name in sorted(extents if names is None else names):
            if name not in extents:
                raise SourceError(
                    f"{str(file)!r} has no tensor {name!r}, though {INDEX_NAME} says so",
                    piece=name,
                )
            self._add(file, name, extents[name])

    def _add(self, file: Path, name: str, extent: Extent) -> None:
        if name in self._file_of:
            raise SourceError(
                f"tensor {name!r} is in {self._file_of[name].name!r} and in {file.name!r}",
                piece=name,
            )
        dtype = torch_dtype(WIRE_DTYPES[extent.dtype])
        self._metadata.append(ParamMeta(name, dtype, extent.shape))
        self._file_of[name] = file

    @property
    def metadata(self) -> Sequence[ParamMeta]:
        """Name, dtype and shape of every tensor, from the files' headers; digests if sealed."""
        return self._metadata

    @property
    def files(self) -> set[Path]:
        """The files that it consists of."""
        return set(self._file_of.values())

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors file by file, each read when it is asked for.

        Raises:
            SourceError: A file is gone, cut off, or has other tensors than when it was opened; the
                text names the tensor where it can be known.

        Cost: memory for one tensor, for as long as the caller holds it.
        """
        of_file: dict[Path, list[ParamMeta]] = {}
        for meta in self._metadata:
            of_file.setdefault(self._file_of[meta.name], []).append(meta)
        for file, metas in of_file.items():
            yield from _tensors(file, metas)

    def tensor(self, name: str) -> torch.Tensor:
        """Read one tensor.

        Raises:
            KeyError: The checkpoint has no such tensor.
            SourceError: As in `iter_full`.

        Cost: the file's header is read each time; `iter_full` reads it once per file.
        """
        ((_, tensor),) = _tensors(self._file_of[name], [self._meta_of[name]])
        return tensor

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the same: a checkpoint on disk has no ranks."""
        return self.iter_full()


def _tensors(file: Path, metas: list[ParamMeta]) -> Iterator[tuple[str, torch.Tensor]]:
    with _opened(file) as fd:
        # Read again: the file may be another one than when its tensors were listed.
        header = read_header(fd, repr(str(file)))
        for meta in metas:
            yield meta.name, _read(fd, _place(header, meta, file), file)


def _place(header: Header, meta: ParamMeta, file: Path) -> Place:
    """Return where a tensor lies, if it still is what it was."""
    piece = Piece(meta.name, dtype_name(meta.dtype), tuple(meta.shape))
    extent = header.extents.get(meta.name)
    found = None if extent is None else (extent.dtype, extent.shape)
    if extent is None or found != stored_form(piece.dtype, piece.shape):
        got = "gone" if extent is None else f"{extent.dtype} {list(extent.shape)}"
        raise SourceError(
            f"{str(file)!r} was changed after it was opened: tensor {meta.name!r} was "
            f"{piece.dtype} {list(piece.shape)} and is {got} now; open the checkpoint anew",
            piece=meta.name,
        )
    return Place(piece, header.start(meta.name))


def _read(fd: int, place: Place, file: Path) -> torch.Tensor:
    try:
        ((_, tensor),) = read_open(fd, [place], str(file))
    except TruncatedError as error:
        # It was whole a moment ago; and no peer is to blame.
        raise SourceError(error.message, piece=place.piece.name) from error
    return tensor


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[int]:
    """Open a file of a checkpoint, wherever links lead; never waits for another process.

    Raises:
        SourceError: It cannot be opened, or not be read.
    """
    try:
        with storage_errors("opening it"):
            fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        try:
            yield fd
        finally:
            os.close(fd)
    except StorageError as error:
        raise SourceError(f"cannot read {str(file)!r}: {error.message}") from error


def _manifest_of(path: Path, names: set[str]) -> ManifestFile | None:
    """Return what was sealed; None if nothing was, or other files beside this one.

    Raises:
        ManifestError: It cannot be read, or not be held against what is sent.
    """
    folder = path if path.is_dir() else path.parent
    # Asked by name first: a folder of which only the file may be opened can still be pushed from.
    if not os.path.lexists(folder / MANIFEST_NAME):
        return None
    with Folder(folder) as opened:
        manifest = read_manifest(opened, follow=True)
    if manifest is None or (path.is_file() and {p.name for p in manifest.pieces} != names):
        return None
    if manifest.algorithm != ENFORCED:
        raise ManifestError(
            f"{str(folder / MANIFEST_NAME)!r} has digests by {manifest.algorithm!r}; a round can "
            f"only hold tensors against {ENFORCED!r}: seal the checkpoint anew with `wtransfer "
            "seal`"
        )
    return manifest


def _sealed_metadata(found: Sequence[ParamMeta], manifest: ManifestFile) -> list[ParamMeta]:
    """Return the metadata in the manifest's form, with digests.

    Raises:
        SourceError: The manifest has other tensors; the first is named, and how many there are.
    """
    sealed = {piece.name: piece for piece in manifest.pieces}
    wrong = differences({meta.name: meta for meta in found}, sealed)
    if wrong:
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        name, problem = next(iter(wrong.items()))
        raise SourceError(
            f"the checkpoint is not what its {MANIFEST_NAME} says: {name!r} {problem}{more}; get "
            "it again, or seal it anew if it was changed on purpose",
            piece=name,
        )
    return [_sealed_meta(sealed[meta.name]) for meta in found]


def _sealed_meta(piece: SealedPiece) -> ParamMeta:
    return ParamMeta(piece.name, torch_dtype(piece.dtype), piece.shape, digest=piece.digest)


def differences(
    found: Mapping[str, ParamMeta], sealed: Mapping[str, SealedPiece]
) -> dict[str, str]:
    """Return tensor -> how it differs from the manifest in presence, dtype or shape."""
    problems = {name: _difference(found.get(name), piece) for name, piece in sealed.items()}
    wrong = {name: problem for name, problem in problems.items() if problem is not None}
    return wrong | {name: "is not in the manifest" for name in found if name not in sealed}


def _difference(meta: ParamMeta | None, piece: SealedPiece) -> str | None:
    if meta is None:
        return "is missing"
    expected = stored_form(piece.dtype, piece.shape)
    got = stored_form(dtype_name(meta.dtype), meta.shape)
    if got == expected:
        return None
    return (
        f"is {dtype_name(meta.dtype)} {list(meta.shape)}, sealed was {piece.dtype} "
        f"{list(piece.shape)}"
    )


def _files(path: Path) -> list[tuple[Path, set[str] | None]]:
    if path.is_file():
        return [(path, None)]
    if (path / INDEX_NAME).is_file():
        return _indexed_files(path)
    # Not what merely has such a name: opening a pipe would wait for its other end.
    files = sorted(each for each in path.glob(f"*{SUFFIX}") if each.is_file())
    if len(files) == 1:
        return [(files[0], None)]
    raise SourceError(
        f"{str(path)!r} is no checkpoint: expected one .safetensors file or {INDEX_NAME}, "
        f"found {len(files)} .safetensors files and no index"
    )


def _indexed_files(folder: Path) -> list[tuple[Path, set[str] | None]]:
    try:
        weight_map = json.loads((folder / INDEX_NAME).read_text("utf-8"))["weight_map"]
        pairs = [(str(name), str(shard)) for name, shard in weight_map.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SourceError(f"{str(folder / INDEX_NAME)!r} is no index: {error}") from error
    shards: dict[str, set[str]] = {}
    for name, shard in pairs:
        # An index names neighbours; anything else could point out of the folder.
        if Path(shard).name != shard:
            raise SourceError(f"{INDEX_NAME} names the file {shard!r}, which is not in its folder")
        shards.setdefault(shard, set()).add(name)
    return [(_checked(folder / shard, names), names) for shard, names in shards.items()]


def _checked(file: Path, names: set[str]) -> Path:
    if not file.is_file():
        name = min(names)
        raise SourceError(
            f"{str(file)!r} is missing, or no file; {INDEX_NAME} says that it has {len(names)} "
            f"tensors, first {name!r}",
            piece=name,
        )
    return file
