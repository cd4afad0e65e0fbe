"""Fit of an update to a target: names, dtypes, shapes, and that nothing is missing.

`check_fit` judges a plan; `check_unchanged` checks again before the update is applied, and
`check_has` when the model is to consist of its previous set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import xxhash

from wtransfer.dtypes import WIRE_DTYPES
from wtransfer.errors import ManifestError, SchemaError
from wtransfer.manifest import WHOLE, Manifest, Piece
from wtransfer.transport.digests import digest
from wtransfer.transport.tensors import dtype_name, torch_dtype
from wtransfer.weights import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

MAX_LISTED = 20
"""Mismatches that an error lists."""
NUM_SHOWN = 3
"""Names of each side that an error shows beside each other."""
CAST_HINT = "WorkerSession(cast=True)"
"""How a user allows floating dtypes to differ."""


def canonical_names(schema: Mapping[str, TensorSpec]) -> dict[str, str]:
    """Return every name and alias of a schema -> the name that stands for the storage."""
    own = dict(zip(schema, schema, strict=True))
    return own | {alias: name for name, spec in schema.items() for alias in spec.aliases}


def check_fit(
    manifest: Manifest,
    schema: Mapping[str, TensorSpec],
    *,
    cast: bool,
    cast_hint: str = CAST_HINT,
    scheme: str = "",
) -> str:
    """Raise unless every piece has its place in the target and every place gets its piece.

    Args:
        manifest: The update, already valid in itself.
        schema: The target.
        cast: True if one floating dtype may take another at apply.
        cast_hint: How to allow that, for errors.
        scheme: How the target is quantised, for errors.

    Returns:
        Digest of the pieces to cast, and their dtypes; empty without casts.

    Raises:
        SchemaError: With one line per mismatch: every name, wanted and got (first 20).
        ManifestError: The update uses slices or patches, which are not supported yet.
    """
    check_whole(manifest)
    names = canonical_names(schema)
    covered: set[str] = set()
    wrong: list[str] = []
    casts: list[tuple[str, str]] = []
    would_cast = False
    kept = {each.piece.name for each in manifest.kept}
    for piece in manifest.whole:
        name = names.get(piece.name)
        if name is not None:
            covered.add(name)
        spec = None if name is None else schema[name]
        # A tensor that stays is proven in the dtype that the target has.
        is_sent = piece.name not in kept
        line = _mismatch(piece, spec, cast=cast and is_sent)
        if line:
            wrong.append(line)
            would_cast |= is_sent and spec is not None and _mismatch(piece, spec, cast=True) is None
        elif spec is not None and piece.dtype != dtype_name(spec.dtype):
            casts.append((piece.name, dtype_name(spec.dtype)))
    wrong += [
        f"{name}: wanted {dtype_name(spec.dtype)} {list(spec.shape)}, got nothing"
        for name, spec in schema.items()
        if name not in covered
    ]
    if wrong:
        strange = [piece.name for piece in manifest.whole if piece.name not in names]
        missing = [name for name in schema if name not in covered]
        hints = [f"the worker can be told to convert floating dtypes: {cast_hint}"] * would_cast
        if scheme and not manifest.scheme:
            hints.append(
                f"the target is quantised as {scheme}; the publisher can quantise its weights in "
                "the form of the checkpoint that the worker has, Publisher(base=FOLDER)"
            )
        if missing and not strange:
            # Of an update that has a base, whatever it lacks by itself has stayed.
            if not manifest.kept and not manifest.scheme:
                hints.append(
                    "tensors that the publisher does not hold can stay as they are in the "
                    "checkpoint that the worker was started with, Publisher(base=FOLDER)"
                )
            hints.append(
                "tensors that are tied in the model of the publisher travel once; where the target "
                "has them apart, the publisher can send a mapping that has a clone of one"
            )
        elif missing:
            hints.append(
                f"the update has {_first(strange)}; the target wants {_first(missing)}: the "
                "publisher can map its names and tensors to those of the target, "
                "Publisher(form=...); a source or a stream has to yield those"
            )
        raise _schema_error(wrong, hints)
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(sorted(casts))) if casts else ""


def check_scheme(manifest: Manifest, scheme: str) -> None:
    """Raise if an update and a target state two ways of quantising.

    Args:
        manifest: The update.
        scheme: The target's scheme; empty where it does not state one.

    Raises:
        SchemaError: Both are named. Where only one states a scheme, dtypes and shapes decide.
    """
    if manifest.scheme and scheme and manifest.scheme != scheme:
        raise SchemaError(
            f"the update is quantised as {manifest.scheme!r}, the target as {scheme!r}; give the "
            "publisher the checkpoint that the worker was started with, Publisher(base=FOLDER)"
        )


def check_unchanged(judged: Mapping[str, TensorSpec], now: Mapping[str, TensorSpec] | None) -> None:
    """Raise if the target has changed since an update was judged: coverage would be no proof.

    Args:
        judged: The target's schema when the plan was judged.
        now: Its schema now; None: the target has none any more.

    Raises:
        SchemaError: The first name that differs, then and now.
    """
    if now is None or judged == now:
        return
    names = [*judged, *(name for name in now if name not in judged)]
    wrong = [name for name in names if judged.get(name) != now.get(name)]
    name = wrong[0]
    raise SchemaError(
        f"the model has changed in {len(wrong)} of its names since the update was judged, "
        f"first {name!r}: {_shown(judged.get(name))} then, {_shown(now.get(name))} now",
        piece=name,
    )


def check_has(
    judged: Mapping[str, TensorSpec],
    tensors: Mapping[str, torch.Tensor] | None,
    now: Mapping[str, TensorSpec],
    present: Callable[[], Mapping[str, torch.Tensor] | None],
) -> None:
    """Raise unless a target can still consist of the set that it had.

    Names, dtypes and shapes must be those of the set. Where tensors are tied otherwise than they
    were, their bytes decide: a model that was loaded with one tensor under two names may have given
    each of them its own copy.

    Args:
        judged: The target's schema when the set was judged.
        tensors: The set; None: it was not kept.
        now: The target's schema now.
        present: Returns the target's tensors, by the names of `now`; None: the target cannot.

    Raises:
        SchemaError: The target cannot consist of the set; the first name that differs, then and
            now.
    """
    check_unchanged(_by_every_name(judged), _by_every_name(now))
    if judged == now:
        return
    then, names = canonical_names(judged), canonical_names(now)
    found = present()
    if tensors is None or found is None:
        raise SchemaError("the model's tensors are tied otherwise, and what they were is not known")
    had = {then[name]: tensor for name, tensor in tensors.items()}
    for name in names:
        is_now = found[names[name]]
        if digest(had[then[name]].to(is_now.dtype)) != digest(is_now):
            raise SchemaError(
                f"the model's tensors are tied otherwise, and {name!r} has other bytes than it had",
                piece=name,
            )


def _by_every_name(schema: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(schema[first].dtype, tuple(schema[first].shape))
        for name, first in canonical_names(schema).items()
    }


def _shown(spec: TensorSpec | None) -> str:
    if spec is None:
        return "not there"
    tied = f", tied to {', '.join(map(repr, spec.aliases))}" if spec.aliases else ""
    return f"{dtype_name(spec.dtype)} {list(spec.shape)}{tied}"


def schema_of(manifest: Manifest) -> Mapping[str, TensorSpec]:
    """Return the schema of a target whose only form is that of its last update."""
    return {
        piece.name: TensorSpec(torch_dtype(piece.dtype), piece.shape) for piece in manifest.whole
    }


def check_whole(manifest: Manifest) -> None:
    """Raise unless an update consists of whole tensors, and of all of them.

    Raises:
        ManifestError: The update uses slices or patches, which are not supported yet.
    """
    if manifest.coverage != "full":
        raise ManifestError(
            f"updates with coverage {manifest.coverage!r} are not supported, only 'full'"
        )
    sliced = next((piece for piece in manifest.whole if piece.slice != WHOLE), None)
    if sliced is not None:
        raise ManifestError(
            f"piece {sliced.name!r} is the slice {sliced.slice!r}; only whole tensors can be sent",
            piece=sliced.name,
        )


def _mismatch(piece: Piece, spec: TensorSpec | None, *, cast: bool) -> str | None:
    if spec is not None and _fits(piece, spec, cast=cast):
        return None
    got = f"{piece.dtype} {list(piece.shape)}"
    if spec is None:
        return f"{piece.name}: wanted nothing (the target has no such name), got {got}"
    return f"{piece.name}: wanted {dtype_name(spec.dtype)} {list(spec.shape)}, got {got}"


def _fits(piece: Piece, spec: TensorSpec, *, cast: bool) -> bool:
    if piece.shape != tuple(spec.shape):
        return False
    if piece.dtype == dtype_name(spec.dtype):
        return True
    return cast and _is_number(piece.dtype) and _is_number(dtype_name(spec.dtype))


def _is_number(dtype: str) -> bool:
    """Return whether an element is one floating number, which can be cast."""
    return torch_dtype(dtype).is_floating_point and WIRE_DTYPES[dtype].num_packed == 1


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - NUM_SHOWN} more" if len(names) > NUM_SHOWN else ""
    return ", ".join(map(repr, names[:NUM_SHOWN])) + more


def _schema_error(wrong: list[str], hints: list[str]) -> SchemaError:
    listed = "\n  ".join(wrong[:MAX_LISTED])
    more = f"\n  ... and {len(wrong) - MAX_LISTED} more" if len(wrong) > MAX_LISTED else ""
    return SchemaError(
        f"the update does not fit the target in {len(wrong)} of its names:\n  {listed}{more}"
        + "".join(f"\n{hint}" for hint in hints),
        mismatches=wrong[:MAX_LISTED],
        piece=wrong[0].partition(": ")[0],
    )
