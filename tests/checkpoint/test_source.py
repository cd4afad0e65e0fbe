"""Checkpoints on disk: read lazily, sealed, damaged."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from wtransfer.checkpoint.safetensors import INDEX_NAME
from wtransfer.checkpoint.source import (
    MANIFEST_NAME,
    CheckpointSource,
    ManifestFile,
    check,
    seal,
)
from wtransfer.errors import ManifestError, SourceError
from wtransfer.manifest import Manifest, Piece
from wtransfer.testing.contents import contents, random_tensor
from wtransfer.testing.zygote import Zygote
from wtransfer.transport.digests import digest
from wtransfer.transport.files import Folder
from wtransfer.transport.tensors import dtype_name
from wtransfer.weight_sync.trainer.digesting import DigestingSource
from wtransfer.weights import ParamMeta

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(3), "c": torch.empty(0, 2)}


def whole(source):
    return dict(source.iter_full())


# -- read


@pytest.fixture
def shards(tmp_path):
    """A checkpoint in two files with an index."""
    save_file({"a": TENSORS["a"]}, tmp_path / "one.safetensors")
    save_file({"b": TENSORS["b"], "c": TENSORS["c"]}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"})
    return tmp_path


def write_index(folder, weight_map):
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


def test_a_checkpoint_in_shards_is_read_by_its_index(shards):
    source = CheckpointSource(shards)
    assert {meta.name: meta.shape for meta in source.metadata} == {
        "a": (2, 3),
        "b": (),
        "c": (0, 2),
    }
    assert contents(whole(source)) == contents(TENSORS)


@pytest.mark.parametrize("as_folder", [True, False])
def test_a_checkpoint_in_one_file_needs_no_index(tmp_path, as_folder):
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file)
    source = CheckpointSource(tmp_path if as_folder else file)
    assert contents(whole(source)) == contents(TENSORS)


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float8_e4m3fn, torch.float64],
    ids=str,
)
def test_every_dtype_of_the_format_is_known(tmp_path, dtype):
    tensors = {"w": random_tensor(dtype, (3, 4), seed=1)}
    save_file(tensors, tmp_path / "model.safetensors")
    source = CheckpointSource(tmp_path)
    assert source.metadata == [ParamMeta("w", dtype, (3, 4))]
    assert contents(whole(source)) == contents(tensors)


F4 = getattr(torch, "float4_e2m1fn_x2", None)
needs_f4 = pytest.mark.skipif(F4 is None, reason="this torch has no such dtype")


@needs_f4
@pytest.mark.parametrize("shape", [(3, 4), (5,), (2, 0)], ids=str)
def test_two_numbers_of_one_byte_are_one_element(tmp_path, shape):
    tensors = {"w": random_tensor(F4, shape, seed=1), "x": torch.ones(2)}
    # The format's own library counts each number.
    raw = save(tensors)
    assert json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["w"]["shape"] == [
        *shape[:-1],
        2 * shape[-1],
    ]
    (tmp_path / "model.safetensors").write_bytes(raw)
    source = CheckpointSource(tmp_path)
    assert {meta.name: (meta.dtype, meta.shape) for meta in source.metadata}["w"] == (F4, shape)
    assert contents(whole(source)) == contents(tensors)
    seal(tmp_path)
    assert contents(whole(CheckpointSource(tmp_path))) == contents(tensors)


@needs_f4
@pytest.mark.parametrize(
    ("shape", "nbytes"), [([3], 1), ([3], 2), ([3], 3), ([4, 3], 6), ([], 1), ([4], 4)]
)
def test_numbers_that_do_not_fill_their_bytes_are_refused(tmp_path, shape, nbytes):
    rows = {"a": {"dtype": "F4", "shape": shape, "data_offsets": [0, nbytes]}}
    raw_file(tmp_path / "model.safetensors", rows, nbytes)
    with pytest.raises(SourceError, match=r"is not what F4 \[.*\] takes") as caught:
        CheckpointSource(tmp_path)
    assert caught.value.piece == "a"


def cut_off(folder):
    os.truncate(folder / TWO, (folder / TWO).stat().st_size - 1)


def lose_index(folder, *others):
    for name in (INDEX_NAME, *others):
        (folder / name).unlink()


ONE, TWO = "one.safetensors", "two.safetensors"


@pytest.mark.parametrize(
    ("spoil", "text", "piece"),
    [
        (lambda folder: (folder / TWO).unlink(), r"two\.safetensors", "b"),
        (cut_off, "cut off: tensor 'b' ends at byte", "b"),
        (lambda folder: write_index(folder, {"a": ONE, "z": TWO}), "no tensor 'z'", "z"),
        *[
            (lambda folder, at=at: write_index(folder, {"a": at}), "not in its folder", None)
            for at in (f"../{ONE}", "/etc/passwd", f"sub/{ONE}")
        ],
        *[
            (lambda folder, text=text: (folder / INDEX_NAME).write_bytes(text), "is no index", None)
            for text in (b"", b"[]", b"{}", b'{"weight_map": []}', b"\xff")
        ],
        (lose_index, "found 2 .safetensors files and no index", None),
        (lambda folder: lose_index(folder, ONE, TWO), "found 0 .safetensors files", None),
        (shutil.rmtree, "is no checkpoint: no such file or directory", None),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_refused_and_the_tensor_named(shards, spoil, text, piece):
    spoil(shards)
    with pytest.raises(SourceError, match=text) as caught:
        CheckpointSource(shards)
    assert caught.value.piece == piece


# FAULTS 5
def test_a_shard_cut_anywhere_is_refused(shards):
    file = shards / "one.safetensors"
    data = file.read_bytes()
    for length in range(len(data)):
        file.write_bytes(data[:length])
        with pytest.raises(SourceError, match=r"one\.safetensors"):
            CheckpointSource(shards)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{",
        b"\xff",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}',
        b'{"a": {"dtype": "load", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a":' * 100_000,
    ],
)
def test_a_malformed_header_is_refused(tmp_path, header):
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    with pytest.raises(SourceError, match=r"model\.safetensors"):
        CheckpointSource(tmp_path)


# FAULTS 7
def test_a_header_that_claims_the_whole_address_space_is_refused_at_once(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2**63) + bytes(64))
    with pytest.raises(SourceError, match="cut off within its header"):
        CheckpointSource(tmp_path)


# FAULTS 36
@pytest.mark.parametrize(
    "name", ["model.safetensors", "one.safetensors", INDEX_NAME, MANIFEST_NAME]
)
def test_a_pipe_is_never_waited_for(shards, name):
    if name == "model.safetensors":
        (shards / INDEX_NAME).unlink()
    (shards / name).unlink(missing_ok=True)
    os.mkfifo(shards / name)
    with pytest.raises((SourceError, ManifestError)):
        CheckpointSource(shards)


def test_links_of_a_download_cache_are_followed(shards, tmp_path):
    seal(shards)
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for file in [each for each in shards.iterdir() if each.is_file()]:
        file.rename(blobs / file.name)
        file.symlink_to(blobs / file.name)
    assert contents(TENSORS) == contents(whole(CheckpointSource(shards)))


@pytest.mark.parametrize(
    ("old", "new", "got"),
    [
        (torch.bfloat16, torch.float16, r"float16 \[2, 3\]"),
        (torch.float32, torch.int32, r"int32 \[2, 3\]"),
        (torch.complex64, torch.float64, r"float64 \[2, 3\]"),
    ],
    ids=str,
)
def test_a_file_that_was_replaced_by_other_dtypes_is_refused(tmp_path, old, new, got):
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(2, 3, dtype=old)}, file)
    source = CheckpointSource(file)
    save_file({"a": torch.ones(2, 3, dtype=new)}, file)
    with pytest.raises(SourceError, match=f"'a' was .* and is {got} now") as caught:
        whole(source)
    assert caught.value.piece == "a"


def test_a_tensor_that_a_replaced_file_lacks_is_named(shards):
    source = CheckpointSource(shards)
    save_file({"x": TENSORS["a"]}, shards / "one.safetensors")
    with pytest.raises(SourceError, match=r"'a' was .* and is gone now") as caught:
        whole(source)
    assert caught.value.piece == "a"


@pytest.mark.parametrize("moment", ["before it is opened again", "between two tensors"])
def test_a_file_that_is_cut_while_it_is_read_names_the_tensor(tmp_path, moment):
    file = tmp_path / "model.safetensors"
    big = {name: torch.ones(1 << 20) for name in ("a", "b")}
    save_file(big, file)
    tensors = CheckpointSource(file).iter_full()
    if moment == "between two tensors":
        next(tensors)
    os.truncate(file, file.stat().st_size - 4)
    with pytest.raises(SourceError, match="cut off: tensor 'b' ends") as caught:
        list(tensors)
    assert caught.value.piece == "b"


def test_a_file_that_is_cut_between_two_system_calls_names_the_tensor(tmp_path, monkeypatch):
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file)
    source, read = CheckpointSource(file), os.preadv

    def cut_before_data(fd, buffers, offset):
        if sum(each.nbytes for each in buffers) == TENSORS["a"].nbytes:
            os.truncate(file, file.stat().st_size - 4)
        return read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", cut_before_data)
    with pytest.raises(SourceError, match="cut off: tensor 'a' ends") as caught:
        whole(source)
    assert caught.value.piece == "a"


def test_tensors_that_were_read_outlive_changes_of_their_file(shards):
    found = whole(CheckpointSource(shards))
    for file in shards.glob("*.safetensors"):
        file.write_bytes(b"\xff" * file.stat().st_size)
        os.truncate(file, 0)
    assert contents(TENSORS) == contents(found)


def test_a_file_that_is_gone_when_it_is_read_is_an_error(shards):
    source = CheckpointSource(shards)
    (shards / "two.safetensors").unlink()
    with pytest.raises(SourceError, match=r"two\.safetensors.*No such file"):
        whole(source)


def raw_file(file, rows, nbytes):
    text = json.dumps(rows).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(nbytes))


@pytest.mark.parametrize(
    ("begins", "nbytes", "text"),
    [
        ((0, 2), 6, "'b' .* begins at byte"),
        ((0, 8), 12, "'b' .* begins at byte"),
        ((4, 8), 12, "'a' .* begins at byte"),
        ((0, 4), 9, "1 bytes that belong to no tensor"),
    ],
    ids=["overlap", "gap", "late", "more"],
)
def test_a_file_that_does_not_consist_of_its_tensors_is_refused(tmp_path, begins, nbytes, text):
    rows = {
        name: {"dtype": "F32", "shape": [1], "data_offsets": [begin, begin + 4]}
        for name, begin in zip("ab", begins, strict=True)
    }
    raw_file(tmp_path / "model.safetensors", rows, nbytes)
    with pytest.raises(SourceError, match=text):
        CheckpointSource(tmp_path)


NUM_BIG, BIG_NBYTES = 80, 2 << 20
ALLOWANCE = 50 << 20


def read_within(folder):
    """Runs in a child: digest a checkpoint with an address space that is much smaller."""
    import resource

    source = DigestingSource(CheckpointSource(folder))
    next(CheckpointSource(folder).iter_full())
    used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + ALLOWANCE, used + ALLOWANCE))
    source.plan()
    memory = bytearray(BIG_NBYTES)
    for _ in source.iter_into(lambda _: memoryview(memory)):
        pass
    Path(folder, "digests").write_text(json.dumps(source.digests()))


@pytest.mark.slow
def test_a_checkpoint_much_larger_than_what_memory_allows_is_read(tmp_path):
    generator = torch.Generator().manual_seed(4)
    tensor = torch.randint(0, 256, (BIG_NBYTES,), dtype=torch.uint8, generator=generator)
    expected, weight_map = [], {}
    for number in range(NUM_BIG):
        tensor[0] = number
        expected.append(digest(tensor))
        weight_map[f"t{number:02d}"] = f"{number:02d}.safetensors"
        save_file({f"t{number:02d}": tensor}, tmp_path / f"{number:02d}.safetensors")
    write_index(tmp_path, weight_map)
    assert NUM_BIG * BIG_NBYTES > 3 * ALLOWANCE
    with Zygote(preload=["torch", "test_source"], paths=[Path(__file__).parent]) as zygote:
        child = zygote.spawn("test_source:read_within", str(tmp_path))
        assert child.wait(30.0) == 0
    assert expected == json.loads((tmp_path / "digests").read_text())


# -- sealed


@pytest.fixture
def sealed(shards):
    seal(shards, "step-7")
    return shards


def test_a_sealed_checkpoint_knows_its_digests(sealed):
    source = CheckpointSource(sealed)
    assert {m.name: m.digest for m in source.metadata} == {
        name: digest(tensor) for name, tensor in TENSORS.items()
    }
    assert source.manifest.version == "step-7"
    assert all(meta.digest is None for meta in CheckpointSource(sealed, sealed=False).metadata)


def rewrite(file, change):
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def lose(folder):
    rewrite(folder / "one.safetensors", lambda t: t.update(x=t.pop("a")))
    write_index(folder, {"b": "two.safetensors", "c": "two.safetensors"})


def add(folder):
    rewrite(folder / "one.safetensors", lambda t: t.update(x=t["a"].clone()))
    write_index(
        folder,
        {"a": "one.safetensors", "x": "one.safetensors", "b": "two.safetensors"}
        | {"c": "two.safetensors"},
    )


def retype(folder):
    rewrite(folder / "one.safetensors", lambda t: t.update(a=t["a"].view(torch.int32)))


def reshape(folder):
    rewrite(folder / "one.safetensors", lambda t: t.update(a=t["a"].reshape(3, 2)))


@pytest.mark.parametrize(
    ("change", "piece", "text"),
    [
        (lose, "a", "'a' is missing"),
        (add, "x", "'x' is not in the manifest"),
        (retype, "a", r"'a' is int32 \[2, 3\], sealed was float32 \[2, 3\]"),
        (reshape, "a", r"'a' is float32 \[3, 2\], sealed was float32 \[2, 3\]"),
    ],
    ids=["lost", "added", "of another dtype", "of another shape"],
)
def test_tensors_that_are_not_those_that_were_sealed_are_named(sealed, change, piece, text):
    change(sealed)
    with pytest.raises(SourceError, match=text) as caught:
        CheckpointSource(sealed)
    assert caught.value.piece == piece
    assert [piece] == list(check(sealed)[1])


def flip(folder):
    file = folder / "one.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_a_flipped_byte_ends_the_round_with_the_tensor_named(sealed):
    flip(sealed)
    source = DigestingSource(CheckpointSource(sealed))
    source.plan()
    with pytest.raises(SourceError, match="other bytes than when its digest was written") as caught:
        list(source.iter_full())
    assert caught.value.piece == "a"


@pytest.fixture
def single(tmp_path):
    """The one file of a sealed checkpoint, which lies beside a file of something else."""
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file)
    seal(tmp_path, "step-7")
    save_file({"x": TENSORS["a"]}, tmp_path / "adapter.safetensors")
    return file


def test_a_single_file_is_held_against_the_manifest_beside_it(single):
    assert CheckpointSource(single).manifest.version == "step-7"
    rewrite(single, lambda t: t.update(a=t["a"] + 1))
    source = DigestingSource(CheckpointSource(single))
    source.plan()
    with pytest.raises(SourceError, match="other bytes than when its digest was written") as caught:
        list(source.iter_full())
    assert caught.value.piece == "a"
    rewrite(single, lambda t: t.update(a=t["a"].reshape(3, 2)))
    with pytest.raises(SourceError, match=r"not what its wtransfer\.json says: 'a'"):
        CheckpointSource(single)


def test_a_single_file_that_the_manifest_is_not_about_is_not_held_against_it(single):
    source = CheckpointSource(single.with_name("adapter.safetensors"))
    assert (source.manifest, [meta.digest for meta in source.metadata]) == (None, [None])


@pytest.mark.parametrize("as_folder", [True, False])
def test_digests_that_rounds_do_not_make_are_refused(tmp_path, as_folder):
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file)
    names = sorted(TENSORS)
    pieces = [Piece(n, dtype_name(TENSORS[n].dtype), tuple(TENSORS[n].shape)) for n in names]
    manifest = Manifest(tuple(pieces), algorithm="wsum64")
    digests = [digest(TENSORS[name], "wsum64") for name in names]
    with Folder(tmp_path) as folder:
        ManifestFile.of(None, manifest, digests).write(folder)
    with pytest.raises(ManifestError, match=r"'wsum64'.*only hold tensors against 'xxh3-128'"):
        CheckpointSource(tmp_path if as_folder else file)


def test_pairs_of_numbers_that_were_sealed_as_complex_come_out_as_complex(tmp_path):
    tensor = random_tensor(torch.complex128, (2, 3), seed=1)
    save_file({"a": torch.view_as_real(tensor)}, tmp_path / "model.safetensors")
    manifest = Manifest((Piece("a", "complex128", (2, 3)),))
    with Folder(tmp_path) as folder:
        ManifestFile.of(None, manifest, [digest(tensor)]).write(folder)
    assert contents(whole(CheckpointSource(tmp_path))) == contents({"a": tensor})


def spoil(folder, **changes):
    file = folder / MANIFEST_NAME
    document = json.loads(file.read_text())
    document.update(changes)
    file.write_text(json.dumps(document))


PIECE = {"name": "a", "dtype": "float32", "shape": [2, 3], "digest": "0" * 32}


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "wtransfer/2"},
        {"format": None},
        {"fingerprint": "0" * 32},
        {"fingerprint": "x"},
        {"algorithm": "md5"},
        {"pieces": {}},
        {"pieces": [PIECE, PIECE]},
        {"pieces": [PIECE | {"dtype": "__class__"}]},
        {"pieces": [PIECE | {"shape": [2**62, 2**62]}]},
        {"pieces": [PIECE | {"shape": [-1]}]},
        {"pieces": [PIECE | {"shape": [1] * 17}]},
        {"pieces": [PIECE | {"digest": "0" * 31}]},
        {"pieces": [PIECE | {"name": "n" * 513}]},
        {"pieces": [PIECE | {"name": "\0"}]},
        {"pieces": [{"name": "a"}]},
    ],
    ids=str,
)
def test_a_manifest_that_contradicts_itself_is_refused(sealed, changes):
    spoil(sealed, **changes)
    with pytest.raises(ManifestError, match=r"wtransfer\.json"):
        CheckpointSource(sealed)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"\xff\xfe", b'{"x":' * 100_000, b"[" * 100_000]
)
def test_a_manifest_that_is_no_json_is_refused(sealed, text):
    (sealed / MANIFEST_NAME).write_bytes(text)
    with pytest.raises(ManifestError, match=r"wtransfer\.json"):
        CheckpointSource(sealed)


def test_a_huge_manifest_is_refused_before_it_is_read(sealed):
    os.truncate(sealed / MANIFEST_NAME, 1 << 40)
    with pytest.raises(ManifestError, match="larger than"):
        CheckpointSource(sealed)
