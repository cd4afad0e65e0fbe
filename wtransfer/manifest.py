"""Contents of one update: pieces, dtypes from a closed table, sizes, digests, fingerprint.

Plain data without torch: a peer's manifest is judged here, before a byte is allocated for it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import secrets
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import xxhash

from wtransfer.dtypes import DTYPES
from wtransfer.errors import ManifestError

if TYPE_CHECKING:
    from collections.abc import Sequence


MAX_PIECES = 262_144
"""Most pieces of one update."""
MAX_NAME_NBYTES = 512
"""Longest piece name, in UTF-8 bytes."""
MAX_RANK = 16
"""Most dimensions of a piece."""
MAX_NBYTES = 2**63 - 1
"""Largest piece or update, in bytes."""
MAX_LABEL_LENGTH = 256
"""Longest label of a version, in characters."""
MAX_SCHEME_LENGTH = 128
"""Longest text of a quantisation scheme, in characters."""
MAX_CONFIG_LENGTH = 1 << 20
"""Longest text of a model's configuration, in characters."""
DIGEST_LENGTH = 32
"""Hexadecimal digits of a digest, for every algorithm."""

Algorithm = Literal["xxh3-128", "wsum64"]
Coverage = Literal["full", "slice", "patch"]
Digests = Annotated[list[str], msgspec.Meta(max_length=MAX_PIECES)]
"""Digests in plan order."""
_HEXADECIMAL = re.compile(rf"[0-9a-f]{{{DIGEST_LENGTH}}}")
WHOLE = "whole"
"""The slice of a piece that is the entire tensor."""


# Not for the cyclic collector: a piece holds no reference back to itself, and there are many.
class Piece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One tensor of an update, in the form in which it travels."""

    name: str
    """Name in the trainer's schema."""
    dtype: str
    """Key of `wtransfer.dtypes.DTYPES`."""
    # The lengths here and below are checked by the decoder before it makes an object per entry.
    shape: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_RANK)]
    """Dimensions; ``()`` for a scalar."""
    slice: str = WHOLE
    """Part of the tensor; only ``"whole"`` so far."""

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        return math.prod(self.shape) * DTYPES[self.dtype]

    def check(self) -> None:
        """Raise unless the piece could be allocated.

        Raises:
            ManifestError: Bad name, unknown dtype, bad or too large dimensions.
        """
        self._check_name()
        if self.dtype not in DTYPES:
            raise ManifestError(
                f"piece {self.name!r} has dtype {_short(self.dtype)}, which is not one of "
                f"{', '.join(DTYPES)}",
                piece=self.name,
            )
        self._check_shape()

    def _check_name(self) -> None:
        if not isinstance(self.name, str) or not self.name or "\0" in self.name:
            raise ManifestError(f"{_short(self.name)} is not a piece name")
        try:
            nbytes = len(self.name.encode())
        except UnicodeEncodeError as error:
            raise ManifestError(f"{_short(self.name)} is not a piece name: {error}") from error
        if nbytes > MAX_NAME_NBYTES:
            raise ManifestError(
                f"piece name {_short(self.name)} is longer than {MAX_NAME_NBYTES} bytes"
            )

    def _check_shape(self) -> None:
        if len(self.shape) > MAX_RANK:
            raise ManifestError(
                f"piece {self.name!r} has {len(self.shape)} dimensions, at most {MAX_RANK} are "
                "allowed",
                piece=self.name,
            )
        for size in self.shape:
            # bool is an int to isinstance; a dimension of True is a mistake all the same.
            if type(size) is not int or size < 0:
                raise ManifestError(
                    f"piece {self.name!r} has dimension {size!r}, expected an integer >= 0",
                    piece=self.name,
                )
        # A dimension of 0 excuses no other: torch could not even state the shape.
        if math.prod(max(size, 1) for size in self.shape) * DTYPES[self.dtype] > MAX_NBYTES:
            raise ManifestError(
                f"piece {self.name!r} of shape {self.shape} is larger than 2^63 bytes",
                piece=self.name,
            )


class KeptPiece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor of the set that does not travel: every worker proves that it has it."""

    piece: Piece
    """Name, dtype and shape."""
    digest: str
    """Digest of its bytes, by the manifest's algorithm."""


class Manifest(msgspec.Struct, frozen=True):
    """The pieces of one update and how they are proven. Digests are known only after sending."""

    pieces: Annotated[tuple[Piece, ...], msgspec.Meta(max_length=MAX_PIECES)]
    """What travels, in plan order: digests and verdicts follow it."""
    algorithm: Algorithm = "xxh3-128"
    """How pieces are digested."""
    coverage: Coverage = "full"
    """``full`` if the pieces are the complete set of weights; else a part of it."""
    base: str | None = None
    """Fingerprint that a patch applies to."""
    scheme: Annotated[str, msgspec.Meta(max_length=MAX_SCHEME_LENGTH)] = ""
    """How the weights are quantised, as ``fp8:block128x128``; empty where that is not stated. No
    part of the fingerprint, which the bytes of each scheme have for themselves."""
    kept: Annotated[tuple[KeptPiece, ...], msgspec.Meta(max_length=MAX_PIECES)] = ()
    """The rest of the set, which stays as it is. With it the fingerprint is that of the whole."""
    config: Annotated[str, msgspec.Meta(max_length=MAX_CONFIG_LENGTH)] = ""
    """Canonical text of the model's configuration; empty where the source has none. No part of the
    fingerprint, which is that of weights."""

    @property
    def whole(self) -> tuple[Piece, ...]:
        """All tensors of the set: those that travel, and those that stay."""
        return (*self.pieces, *(each.piece for each in self.kept))

    @property
    def nbytes(self) -> int:
        """Bytes of what travels."""
        return sum(piece.nbytes for piece in self.pieces)

    def identity(self) -> str:
        """Return the xxh3-128 of its msgpack, by which both sides see that they mean the same.

        Cost: about 0.1 us per piece.
        """
        return xxhash.xxh3_128_hexdigest(_encode(self))

    def check(self) -> None:
        """Raise unless every piece is valid, names are unique and the whole is bounded.

        Raises:
            ManifestError: The first fault found, with the piece named.
        """
        whole = self.whole
        if len(whole) > MAX_PIECES:
            raise ManifestError(
                f"{len(whole)} pieces, at most {MAX_PIECES} are allowed in one update"
            )
        if not isinstance(self.scheme, str) or len(self.scheme) > MAX_SCHEME_LENGTH:
            raise ManifestError(
                f"the scheme {_short(self.scheme)} is no text of at most {MAX_SCHEME_LENGTH} "
                "characters"
            )
        if not isinstance(self.config, str) or len(self.config) > MAX_CONFIG_LENGTH:
            raise ManifestError(
                f"the configuration {_short(self.config)} is no text of at most "
                f"{MAX_CONFIG_LENGTH:,} characters"
            )
        for piece in whole:
            piece.check()
        for each in self.kept:
            if not isinstance(each.digest, str) or not _HEXADECIMAL.fullmatch(each.digest):
                raise ManifestError(
                    f"the digest of {each.piece.name!r} is {_short(each.digest)}, expected "
                    f"{DIGEST_LENGTH} hexadecimal digits",
                    piece=each.piece.name,
                )
        self._check_unique(whole)
        if sum(piece.nbytes for piece in whole) > MAX_NBYTES:
            raise ManifestError("the update is larger than 2^63 bytes")

    def _check_unique(self, whole: Sequence[Piece]) -> None:
        names = [piece.name for piece in whole]
        if len(set(names)) == len(names):
            return
        twice = [name for name, count in Counter(names).items() if count > 1]
        raise ManifestError(
            f"{len(twice)} names appear more than once, first {twice[0]!r}; a source must name "
            "each tensor once",
            piece=twice[0],
        )


class _Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A piece with its digest, as it enters the fingerprint: a msgpack list of the fields."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    slice: str
    digest: str


def fingerprint(manifest: Manifest, digests: Sequence[str]) -> str:
    """Return the identity of a set of weights: equal bytes under equal names, equal fingerprint.

    Args:
        manifest: The pieces; their order does not matter.
        digests: One digest per piece, in the manifest's order.

    Returns:
        32 hexadecimal digits: xxh3-128 of the canonical msgpack list of the algorithm and of
        ``[name, dtype, shape, slice, digest]`` sorted by name. No label and no round enter it; a
        patch is prefixed by the fingerprint it applies to.
    """
    return Identities(manifest).fingerprint(digests)


class Identities:
    """Fingerprints of sets that consist of the same pieces, round after round.

    Apart from the digests, the hashed bytes follow from the manifest and are encoded once.

    Args:
        manifest: The pieces.
    """

    def __init__(self, manifest: Manifest) -> None:
        pieces = manifest.whole
        names = [piece.name for piece in pieces]
        self._num_pieces = len(manifest.pieces)
        self._kept = [each.digest for each in manifest.kept]
        self._order = sorted(range(len(names)), key=names.__getitem__)
        canonical: list[object] = [manifest.algorithm, *([None] * len(names))]
        if manifest.coverage == "patch":
            canonical.insert(0, manifest.base)
        # Without the rows: one byte for each.
        self._head = _encode(canonical)[: -len(names) or None]
        self._rows = [_row_head(pieces[number]) for number in self._order]

    def fingerprint(self, digests: Sequence[str]) -> str:
        """Return the fingerprint of the set whose pieces have these digests, in order.

        Raises:
            ValueError: Wrong number of digests, or an invalid one.

        Cost: about 0.1 us per piece.
        """
        if len(digests) != self._num_pieces:
            raise ValueError(f"{len(digests)} digests for {self._num_pieces} pieces")
        if not set(map(len, digests)) <= {DIGEST_LENGTH} or not all(map(str.isascii, digests)):
            raise ValueError(f"a digest has {DIGEST_LENGTH} hexadecimal digits")
        if self._kept:
            digests = [*digests, *self._kept]
        hasher = xxhash.xxh3_128(self._head)
        # In parts: memory for all of it would be fetched afresh from the system in every round.
        for first in range(0, len(self._rows), _PART):
            part = slice(first, first + _PART)
            ordered = map(digests.__getitem__, self._order[part])
            rows = zip(self._rows[part], ordered, strict=True)
            hasher.update("".join(itertools.chain.from_iterable(rows)).encode("latin-1"))
        return hasher.hexdigest()


_PART = 512


def _row_head(piece: Piece) -> str:
    """Return the msgpack list of a piece and its digest, up to the digits: a character per byte."""
    row = _Row(piece.name, piece.dtype, piece.shape, piece.slice, "0" * DIGEST_LENGTH)
    return _encode(row)[:-DIGEST_LENGTH].decode("latin-1")


_encode = msgspec.msgpack.Encoder().encode


def check_label(label: object) -> None:
    """Raise unless a version can have a label.

    Raises:
        ValueError: The label is no text, empty, too long, or has a lone surrogate.
    """
    if isinstance(label, str) and 0 < len(label) <= MAX_LABEL_LENGTH:
        with contextlib.suppress(UnicodeEncodeError):
            label.encode()
            return
    raise ValueError(
        f"version is {label!r:.100}, expected a label of 1 to {MAX_LABEL_LENGTH} characters that "
        "UTF-8 can hold"
    )


def local_fingerprint() -> str:
    """Return an identity for weights that no update has brought: new in every process."""
    return f"local:{secrets.token_hex(16)}"


def _short(value: object, limit: int = 80) -> str:
    text = repr(value[:limit] if isinstance(value, str) else value)
    return text if len(text) <= limit + 2 else f"{text[:limit]}..."
