"""A checkpoint on disk: read as a source of weights, sealed, and checked against its seal.

A checkpoint is one safetensors file, or shards with an index. `seal` writes ``wtransfer.json``
beside it: every tensor's name, dtype, shape and digest, and the fingerprint of the whole.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from wtransfer.checkpoint.model_config import parse_config, read_config
from wtransfer.checkpoint.safetensors import (
    INDEX_NAME,
    SUFFIX,
    StoredTensor,
    read_bytes,
    read_header,
    read_tensor,
    stored_form,
)
from wtransfer.errors import ManifestError, SourceError, StorageError, TruncatedError
from wtransfer.manifest import (
    DIGEST_LENGTH,
    MAX_CONFIG_LENGTH,
    MAX_PIECES,
    MAX_RANK,
    MAX_SCHEME_LENGTH,
    Algorithm,
    KeptPiece,
    Manifest,
    Piece,
    fingerprint,
)
from wtransfer.transport.digests import digest
from wtransfer.transport.files import Folder
from wtransfer.transport.tensors import dtype_name, torch_dtype
from wtransfer.weights import ParamMeta

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

MANIFEST_NAME = "wtransfer.json"
"""Name of a checkpoint's seal, beside its files."""
MAX_MANIFEST_NBYTES = 256 << 20
"""Largest seal, in bytes: the most pieces with the longest names, and some."""
MAX_INDEX_NBYTES = 256 << 20
"""Largest index of shards, in bytes."""
ENFORCED: Algorithm = "xxh3-128"
"""The digest of rounds: only seals with this one can be enforced."""

Digest = Annotated[str, msgspec.Meta(pattern=rf"^[0-9a-f]{{{DIGEST_LENGTH}}}\Z")]
"""A digest or a fingerprint."""


# -- wtransfer.json


class SealedPiece(msgspec.Struct, frozen=True):
    """One tensor and its proof."""

    name: str
    """Name."""
    dtype: str
    """Wire dtype."""
    shape: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_RANK)]
    """Dimensions."""
    digest: Digest
    """Digest of its bytes."""


class ManifestFile(msgspec.Struct, frozen=True):
    """Content of ``wtransfer.json``."""

    format: Literal["wtransfer/1"]
    """Name and version of this format."""
    version: str | None
    """Label, if one was given."""
    fingerprint: Digest
    """Identity of the whole."""
    created_at: float
    """Time of writing, in seconds since the epoch."""
    algorithm: Algorithm
    """Algorithm of the digests."""
    pieces: Annotated[tuple[SealedPiece, ...], msgspec.Meta(max_length=MAX_PIECES)]
    """Every tensor."""
    scheme: Annotated[str, msgspec.Meta(max_length=MAX_SCHEME_LENGTH)] = ""
    """How the weights are quantised, as the round said that brought them; else empty."""
    kept: Annotated[tuple[SealedPiece, ...], msgspec.Meta(max_length=MAX_PIECES)] = ()
    """The rest of the set, which the round that brought them left as it was: not in the files."""
    config: Annotated[str, msgspec.Meta(max_length=MAX_CONFIG_LENGTH)] = ""
    """Configuration of the model, as the round said that brought them; else empty."""

    @classmethod
    def of(cls, version: str | None, manifest: Manifest, digests: Sequence[str]) -> ManifestFile:
        """Describe an update.

        Args:
            version: Label.
            manifest: Its pieces, all of them whole.
            digests: Digests in the manifest's order.
        """
        rows = zip(manifest.pieces, digests, strict=True)
        kept = ((each.piece, each.digest) for each in manifest.kept)
        return cls(
            format="wtransfer/1",
            version=version,
            fingerprint=fingerprint(manifest, digests),
            created_at=time.time(),
            algorithm=manifest.algorithm,
            pieces=tuple(SealedPiece(p.name, p.dtype, p.shape, digest) for p, digest in rows),
            scheme=manifest.scheme,
            kept=tuple(SealedPiece(p.name, p.dtype, p.shape, digest) for p, digest in kept),
            config=manifest.config,
        )

    @property
    def manifest(self) -> Manifest:
        """The pieces, as a round has them."""
        pieces = tuple(Piece(each.name, each.dtype, each.shape) for each in self.pieces)
        kept = tuple(
            KeptPiece(Piece(each.name, each.dtype, each.shape), each.digest) for each in self.kept
        )
        return Manifest(
            pieces,
            algorithm=self.algorithm,
            scheme=self.scheme,
            kept=kept,
            config=self.config,
        )

    @property
    def digests(self) -> list[str]:
        """The digests, in the manifest's order."""
        return [each.digest for each in self.pieces]

    def write(self, folder: Folder) -> None:
        """Write the manifest to a folder; an existing one is replaced atomically.

        Raises:
            StorageError: The manifest could not be written.
        """
        folder.replace(MANIFEST_NAME, msgspec.json.encode(self))


# Made once: threads that read a struct for the first time at once end the process (msgspec 0.22).
_decode_manifest = msgspec.json.Decoder(ManifestFile).decode


def read_manifest(folder: Folder, *, follow_links: bool = True) -> ManifestFile | None:
    """Read the ``wtransfer.json`` of a folder; None if there is none.

    Raises:
        ManifestError: The file is too large, malformed, states pieces that no update can hold, or
            contradicts itself.
    """
    shown = repr(f"{folder.path}/{MANIFEST_NAME}")
    try:
        raw = folder.read(MANIFEST_NAME, MAX_MANIFEST_NBYTES, follow=follow_links)
        if raw is None:
            return None
        found = _decode_manifest(raw)
    except StorageError as error:
        raise ManifestError(f"the manifest {shown} cannot be read: {error.message}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(f"{shown} is no manifest that can be read: {error}") from error
    manifest = found.manifest
    try:
        manifest.check()
    except ManifestError as error:
        raise ManifestError(f"{shown}: {error.message}", piece=error.piece) from error
    identity = fingerprint(manifest, found.digests)
    if identity != found.fingerprint:
        raise ManifestError(
            f"{shown} was changed after it was written: its pieces have the fingerprint "
            f"{identity}, it says {found.fingerprint}"
        )
    return found


# -- the checkpoint


class CheckpointSource:
    """Safetensors on disk in the usual layout: one file, or shards with an index.

    Tensors are read one at a time, each into memory of its own: a checkpoint larger than memory
    works, and a file that is cut or overwritten meanwhile is an error, not a signal.

    A folder with a ``wtransfer.json`` (``wtransfer seal`` writes it) must have the tensors that it
    states, and a round in which one has another digest is aborted. So must a single file, if the
    ``wtransfer.json`` beside it has the same names.

    Args:
        path: A ``.safetensors`` file, or a folder with one, or with shards and their index.
        sealed: Whether to enforce its ``wtransfer.json``, if there is one.
        follow_links: Whether the folder and its files may be symbolic links, as they are in
            download caches.

    Raises:
        SourceError: No such checkpoint, a shard is missing or damaged, or the manifest has other
            tensors; the text names the tensor where it can be known.
        ManifestError: The manifest cannot be read, or its digests cannot be enforced.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, sealed: bool = True, follow_links: bool = True
    ) -> None:
        self.manifest: ManifestFile | None = None
        """Content of the enforced ``wtransfer.json``; None if there is none."""
        path = Path(path)
        single = path.is_file()
        if not single and not path.is_dir():
            raise SourceError(f"{str(path)!r} is no checkpoint: no such file or directory")
        self._folder = path.parent if single else path
        self._is_single = single
        self._follow_links = follow_links
        self._metas: dict[str, ParamMeta] = {}
        self._file_of: dict[str, str] = {}
        with self._opened("") as folder:
            for file, names in ({path.name: None} if single else self._files(folder)).items():
                self._add(folder, file, names)
            manifest = read_manifest(folder, follow_links=follow_links) if sealed else None
        # A manifest of other names, beside a single file, belongs to other files.
        if manifest and not (single and {p.name for p in manifest.pieces} != self._metas.keys()):
            self._enforce(manifest)

    def _files(self, folder: Folder) -> dict[str, set[str] | None]:
        """Return file -> its tensors by the index; None: all."""
        raw = folder.read(INDEX_NAME, MAX_INDEX_NBYTES, follow=self._follow_links)
        if raw is None:
            files = [each for each in folder.names() if each.endswith(SUFFIX)]
            if len(files) == 1:
                return {files[0]: None}
            raise SourceError(
                f"{folder.path!r} is no checkpoint: expected one .safetensors file or "
                f"{INDEX_NAME}, found {len(files)} .safetensors files and no index"
            )
        try:
            weight_map = _decode_weight_map(raw).weight_map
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise SourceError(f"'{folder.path}/{INDEX_NAME}' is no index: {error}") from error
        shards: dict[str, set[str] | None] = {}
        for name, shard in weight_map.items():
            # An index names neighbours; any other path could lead out of the folder.
            if Path(shard).name != shard:
                raise SourceError(
                    f"{INDEX_NAME} names the file {shard!r}, which is not in its folder"
                )
            names = shards.setdefault(shard, set())
            assert names is not None
            names.add(name)
        return shards

    def _add(self, folder: Folder, file: str, names: set[str] | None) -> None:
        """Add the tensors of one file."""
        try:
            with _open_file(folder, file, follow=self._follow_links) as fd:
                header = read_header(fd, repr(f"{folder.path}/{file}"))
        except StorageError as error:
            # The tensors that the file should have tell the missing part.
            first = min(names) if names else None
            raise SourceError(f"no whole checkpoint: {error.message}", piece=first) from error
        for name in sorted(header if names is None else names):
            if name not in header:
                raise SourceError(
                    f"'{folder.path}/{file}' has no tensor {name!r}, though {INDEX_NAME} says so",
                    piece=name,
                )
            piece = header[name].piece
            self._metas[name] = ParamMeta(name, torch_dtype(piece.dtype), piece.shape)
            self._file_of[name] = file

    def _enforce(self, manifest: ManifestFile) -> None:
        """Take the tensors' forms and digests from the manifest.

        Raises:
            ManifestError: Rounds use another digest algorithm than the manifest.
            SourceError: The manifest has other tensors; the error names the first, and their count.
        """
        if manifest.algorithm != ENFORCED:
            raise ManifestError(
                f"'{self._folder}/{MANIFEST_NAME}' has digests by {manifest.algorithm!r}; a round "
                f"can only hold tensors against {ENFORCED!r}: seal the checkpoint anew with "
                "`wtransfer seal`"
            )
        wrong = _differences(self.metadata, manifest)
        if wrong:
            more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            name, problem = next(iter(wrong.items()))
            raise SourceError(
                f"the checkpoint is not what its {MANIFEST_NAME} says: {name!r} {problem}{more}; "
                "get it again, or seal it anew if it was changed on purpose",
                piece=name,
            )
        self.manifest = manifest
        for piece in manifest.pieces:
            dtype = torch_dtype(piece.dtype)
            self._metas[piece.name] = ParamMeta(piece.name, dtype, piece.shape, digest=piece.digest)

    @property
    def metadata(self) -> Sequence[ParamMeta]:
        """Name, dtype and shape of every tensor, from the files' headers; digests if sealed."""
        return list(self._metas.values())

    @property
    def scheme(self) -> str:
        """How the weights are quantised, by the manifest; empty where that does not say."""
        return "" if self.manifest is None else self.manifest.scheme

    @property
    def config(self) -> dict[str, Any] | None:
        """The model's configuration: the folder's ``config.json``, else the manifest's, else None.

        Beside a single file it may be that of other files.

        Raises:
            SourceError: There is one, and it cannot be read.
        """
        found = None
        if not self._is_single:
            with self._opened("") as folder:
                found = read_config(folder, follow_links=self._follow_links)
        if found is None and self.manifest is not None and self.manifest.config:
            try:
                found = parse_config(self.manifest.config)
            except ValueError as error:
                raise SourceError(
                    f"'{self._folder}/{MANIFEST_NAME}' has no configuration that can be read: "
                    f"{error}"
                ) from error
        return found

    def kept(self, algorithm: Algorithm) -> tuple[KeptPiece, ...]:
        """Return the rest of the set, which the files do not have, by the manifest.

        Raises:
            SourceError: The manifest names it by digests of another algorithm.
        """
        if self.manifest is None or not self.manifest.kept:
            return ()
        if self.manifest.algorithm != algorithm:
            raise SourceError(
                f"{self.manifest.kept[0].name!r} and others are not in the files and stay as the "
                f"workers have them, by {self.manifest.algorithm}; this engine digests by "
                f"{algorithm}",
                piece=self.manifest.kept[0].name,
            )
        return self.manifest.manifest.kept

    @property
    def files(self) -> set[Path]:
        """Files of the checkpoint."""
        return {self._folder / file for file in self._file_of.values()}

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors file by file, each read when it is asked for.

        Raises:
            SourceError: A file is gone, cut off, or has other tensors than when it was opened; the
                text names the tensor where it can be known.

        Cost: memory for one tensor, for as long as the caller holds it.
        """
        for name, unread in self.iter_unread():
            yield name, unread.load()

    def iter_unread(self) -> Iterator[tuple[str, UnreadTensor]]:
        """Yield tensors file by file, each to be read into the caller's memory.

        Raises:
            SourceError: As in `iter_full`.
        """
        of_file: dict[str, list[ParamMeta]] = {}
        for name, meta in self._metas.items():
            of_file.setdefault(self._file_of[name], []).append(meta)
        for file, metas in of_file.items():
            yield from self._open_tensors(file, metas)

    def tensor(self, name: str) -> torch.Tensor:
        """Read one tensor.

        Raises:
            KeyError: The checkpoint has no such tensor.
            SourceError: As in `iter_full`.

        Cost: the file's header is read each time; `iter_full` reads it once per file.
        """
        found = self._open_tensors(self._file_of[name], [self._metas[name]])
        # Read while its file is open.
        (tensor,) = (unread.load() for _, unread in found)
        return tensor

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the same as `iter_full`: a checkpoint on disk has no ranks."""
        return self.iter_full()

    def _open_tensors(
        self, file: str, metas: Sequence[ParamMeta]
    ) -> Iterator[tuple[str, UnreadTensor]]:
        shown = repr(f"{self._folder}/{file}")
        with self._opened(file) as folder, _open_file(folder, file, self._follow_links) as fd:
            # Read again: the file may be another one than when the tensors were listed.
            header = read_header(fd, shown)
            for meta in metas:
                piece, now = _piece(meta), header.get(meta.name)
                if now is None or stored_form(now.piece) != stored_form(piece):
                    got = "gone" if now is None else f"{now.piece.dtype} {list(now.piece.shape)}"
                    raise SourceError(
                        f"{shown} was changed after it was opened: tensor {meta.name!r} was "
                        f"{piece.dtype} {list(piece.shape)} and is {got} now; open the checkpoint "
                        "anew",
                        piece=meta.name,
                    )
                yield meta.name, UnreadTensor(fd, StoredTensor(piece, now.offset), shown)

    @contextlib.contextmanager
    def _opened(self, file: str) -> Iterator[Folder]:
        """Open the folder, anew each time: only that shows the present content of a share.

        Raises:
            SourceError: In place of any error of the disk, or of a file that ends too early.
        """
        with (
            _source_errors(repr(f"{self._folder}/{file}")),
            Folder(self._folder, follow=self._follow_links) as folder,
        ):
            yield folder


class UnreadTensor:
    """A tensor of a checkpoint, read on demand into memory of the caller's choice.

    Readable until the next tensor is asked for.

    Args:
        fd: The file.
        stored: Position of the tensor in it.
        shown: Name of the file, for errors.
    """

    def __init__(self, fd: int, stored: StoredTensor, shown: str) -> None:
        self.dtype: torch.dtype = torch_dtype(stored.piece.dtype)
        """Dtype of the tensor."""
        self.shape: tuple[int, ...] = stored.piece.shape
        """Shape of the tensor."""
        self.nbytes: int = stored.piece.nbytes
        """Bytes of the tensor."""
        self._fd, self._stored, self._shown = fd, stored, shown

    def read(self, into: memoryview, start: int) -> None:
        """Read bytes, from byte `start` on, until `into` is full.

        Raises:
            SourceError: The file is cut off, or cannot be read.
        """
        with _source_errors(self._shown):
            read_bytes(self._fd, self._stored, into, start, self._shown)

    def load(self) -> torch.Tensor:
        """Read the tensor into memory of its own. Raises as `read`; then nothing is allocated."""
        with _source_errors(self._shown):
            return read_tensor(self._fd, self._stored, self._shown)


@contextlib.contextmanager
def _source_errors(shown: str) -> Iterator[None]:
    """Raise a `SourceError` in place of an error of the disk, or of a file that ends too early."""
    try:
        yield
    except StorageError as error:
        raise SourceError(f"cannot read {shown}: {error.message}") from error
    except TruncatedError as error:
        # The file was whole when its header was read: not a peer's truncation.
        raise SourceError(error.message, piece=error.piece) from error


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


# Made once: threads that read a struct for the first time at once end the process (msgspec 0.22).
_decode_weight_map = msgspec.json.Decoder(_Index).decode


@contextlib.contextmanager
def _open_file(folder: Folder, file: str, follow: bool) -> Iterator[int]:
    fd = folder.open_file(file, follow=follow)
    try:
        yield fd
    finally:
        os.close(fd)


def _piece(meta: ParamMeta) -> Piece:
    return Piece(meta.name, dtype_name(meta.dtype), tuple(meta.shape))


def _differences(found: Sequence[ParamMeta], manifest: ManifestFile) -> dict[str, str]:
    """Return tensor -> its difference from the manifest in presence, dtype or shape."""
    pieces = {meta.name: _piece(meta) for meta in found}
    wrong: dict[str, str] = {}
    for sealed in manifest.manifest.pieces:
        piece = pieces.pop(sealed.name, None)
        if piece is None:
            wrong[sealed.name] = "is missing"
        elif stored_form(piece) != stored_form(sealed):
            wrong[sealed.name] = (
                f"is {piece.dtype} {list(piece.shape)}, sealed was {sealed.dtype} "
                f"{list(sealed.shape)}"
            )
    return wrong | dict.fromkeys(pieces, "is not in the manifest")


# -- sealing


def describe(source: CheckpointSource, version: str | None = None) -> ManifestFile:
    """Digest a checkpoint.

    Args:
        source: The checkpoint.
        version: Label, for people.

    Raises:
        SourceError: The checkpoint cannot be read.
        ManifestError: The checkpoint names something that no update can hold.

    Cost: reads everything once.
    """
    manifest = Manifest(tuple(map(_piece, source.metadata)))
    manifest.check()
    digests = {name: digest(tensor, manifest.algorithm) for name, tensor in source.iter_full()}
    return ManifestFile.of(version, manifest, [digests[each.name] for each in manifest.pieces])


def seal(checkpoint: Path, version: str | None = None) -> ManifestFile:
    """Write ``wtransfer.json`` beside a checkpoint; an existing one is replaced atomically.

    Args:
        checkpoint: Folder.
        version: Label, for people.

    Returns:
        The written manifest.

    Raises:
        SourceError: The folder holds no whole checkpoint.
        StorageError: The file could not be written.

    Cost: reads everything once.
    """
    written = describe(CheckpointSource(checkpoint, sealed=False), version)
    with Folder(checkpoint) as folder:
        written.write(folder)
    return written


def check(checkpoint: Path) -> tuple[ManifestFile, dict[str, str]]:
    """Compare a checkpoint with its ``wtransfer.json``.

    Returns:
        The manifest; and name -> difference, for every tensor that differs.

    Raises:
        SourceError: The folder holds no whole checkpoint.
        ManifestError: There is no manifest, or none that can be read.

    Cost: reads everything once.
    """
    source = CheckpointSource(checkpoint, sealed=False)
    with Folder(checkpoint) as folder:
        manifest = read_manifest(folder)
    if manifest is None:
        raise ManifestError(
            f"{str(checkpoint)!r} has no {MANIFEST_NAME}: `wtransfer seal` writes one"
        )
    wrong = _differences(source.metadata, manifest)
    sealed = {piece.name: piece.digest for piece in manifest.pieces}
    for name, tensor in source.iter_full():
        found = None if name in wrong else digest(tensor, manifest.algorithm)
        if found not in (None, sealed.get(name)):
            wrong[name] = f"has other bytes: digest {found}, sealed was {sealed[name]}"
    return manifest, wrong
