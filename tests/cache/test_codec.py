"""Entries come back bit for bit; bytes that are not a complete, valid entry raise EntryError."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_encoder.cache import codec
from mm_encoder.cache.codec import FORMAT, HEAD_BYTES, EntryError, encode, header_length, read_header
from mm_encoder.cache.entry import Entry
from mm_encoder.contract import ImageMetadata

from .conftest import entry, key, metadata, same

KEY = key(1)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def serialized(of: bytes, what: Entry) -> bytes:
    header, payload = encode(of, what)
    return header + bytes(payload)


def read(data: bytes, of: bytes = KEY) -> Entry:
    """Read an entry as a tier does."""
    header = read_header(data)
    if len(data) != header.header_bytes + header.payload_bytes:
        raise EntryError(f"{len(data)} bytes")
    rows = codec.empty_rows(header)
    codec.payload_view(rows)[:] = data[header.header_bytes :]
    codec.check(header, of, rows)
    return Entry(rows, header.metadata)


GOOD = serialized(KEY, entry(KEY, 3, 5))
PAYLOAD_BYTES = 3 * 5 * 2


def forged(described: Any = None, *, payload: bytes = GOOD[-PAYLOAD_BYTES:], number: int = FORMAT) -> bytes:
    """An entry with right checksums and arbitrary contents; `described` is its JSON, as bytes or values."""
    text = described if isinstance(described, bytes) else json.dumps(described or good_json()).encode()
    head = struct.pack("<8sIIQ32s", GOOD[:8], number, len(text), len(payload), KEY)
    head += xxhash.xxh3_128_digest(payload)
    return head + xxhash.xxh3_128_digest(head + text) + text + payload


def good_json() -> dict[str, Any]:
    text: dict[str, Any] = json.loads(GOOD[HEAD_BYTES:-PAYLOAD_BYTES])
    return text


# --- round trips -------------------------------------------------------------------------------------

ints = st.integers(0, 2**70)


@settings(deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    changed=st.fixed_dictionaries(
        {},
        optional={
            "model": st.text(st.characters()),
            "mm_hash": st.text(),
            "length": ints,
            "shape": st.lists(ints).map(tuple),
            "dtype": st.text(),
            "device": st.text(),
            "strides": st.lists(ints).map(tuple),
            "embedding_offsets": st.lists(ints).map(tuple),
            "grid_thws": st.lists(st.tuples(ints, ints, ints)).map(tuple),
            "original_size": st.tuples(ints, ints),
        },
    ),
)
def test_an_entry_comes_back(dtype: torch.dtype, shape: tuple[int, int], changed: dict[str, Any]) -> None:
    wanted = Entry(entry(KEY, *shape, dtype).rows, metadata(KEY, *shape, dtype, **changed))
    got = read(serialized(KEY, wanted))
    assert same(got, wanted)
    assert got.rows.shape == shape
    assert hash(got.metadata) == hash(wanted.metadata)  # lists would not have one
    assert got.nbytes == shape[0] * shape[1] * dtype.itemsize


def test_cache_and_timings_are_not_stored() -> None:
    served = metadata(KEY, 3, 5, torch.bfloat16, cache="memory", timings=(("total", 3.0),))
    got = read(serialized(KEY, Entry(entry(KEY, 3, 5).rows, served)))
    assert got.metadata == metadata(KEY, 3, 5, torch.bfloat16)
    assert got.metadata.timings == ()


def test_encoding_does_not_copy_the_rows() -> None:
    what = entry(KEY, 3, 5)
    header, payload = encode(KEY, what)
    assert np.frombuffer(payload, np.uint8).ctypes.data == what.rows.data_ptr()
    assert payload.readonly
    assert len(header) % 64 == 0
    assert len(header) + len(payload) <= 1.1 * what.nbytes + 4096


def test_a_view_of_a_batch_is_stored_without_the_batch() -> None:
    batch = entry(KEY, 24, 64)
    part = Entry(batch.rows[9:12], batch.metadata)
    got = read(serialized(KEY, part))
    assert same(got, part)
    assert got.nbytes == 3 * 64 * 2


@pytest.mark.parametrize("host", ["inference mode", "default device", "default dtype", "gradients"])
def test_torch_modes_and_defaults_do_not_change_decoded_rows(host: str) -> None:
    dtype = torch.get_default_dtype()
    try:
        if host == "inference mode":
            with torch.inference_mode():
                got = read(GOOD)
        elif host == "default device":
            with torch.device("meta"):
                got = read(GOOD)
        else:
            torch.set_default_dtype(torch.float64 if host == "default dtype" else dtype)
            with torch.enable_grad():
                got = read(GOOD)
    finally:
        torch.set_default_dtype(dtype)
    assert same(got, entry(KEY, 3, 5))
    assert not got.rows.is_inference()
    assert not got.rows.requires_grad
    assert got.rows.device.type == "cpu"


def test_rows_with_a_graph_or_of_inference_mode_can_be_encoded() -> None:
    with torch.inference_mode():
        what = Entry(torch.ones(2, 3), metadata(KEY, 2, 3, torch.float32))
        data = serialized(KEY, what)
    assert torch.equal(read(data).rows, torch.ones(2, 3))
    with_gradient = what._replace(rows=torch.ones(2, 3, requires_grad=True))
    assert torch.equal(read(serialized(KEY, with_gradient)).rows, torch.ones(2, 3))


@pytest.mark.parametrize(
    "rows",
    [
        torch.ones(4, 6).t(),
        torch.ones(4, 6)[:, :3],
        torch.ones(6),
        torch.ones(1, 2, 3),
        torch.ones(2, 2, dtype=torch.float64),
        torch.ones(2, 2, dtype=torch.int32),
        torch.ones(2, 2, device="meta"),
    ],
    ids=["transposed", "cut", "1-D", "3-D", "float64", "int32", "meta"],
)
def test_unsupported_rows_are_refused(rows: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"rows must be contiguous \[length, width\] on the CPU in float32"):
        encode(KEY, Entry(rows, metadata(KEY, 2, 2, torch.float32)))


def test_unsupported_keys_and_metadata_are_refused() -> None:
    with pytest.raises(ValueError, match="a key is 32 bytes, got 31"):
        encode(KEY[1:], entry(KEY))
    with pytest.raises(ValueError, match="metadata must be plain values"):
        encode(KEY, entry(KEY)._replace(metadata=metadata(KEY, 3, 64, torch.bfloat16, model=b"bytes")))
    with pytest.raises(ValueError, match="bytes as JSON, more than"):
        encode(KEY, entry(KEY)._replace(metadata=metadata(KEY, 3, 64, torch.bfloat16, model="m" * 2**20)))


# --- damage ------------------------------------------------------------------------------------------


def test_the_undamaged_entry_is_accepted() -> None:
    assert same(read(GOOD), entry(KEY, 3, 5))
    assert same(read(forged()), entry(KEY, 3, 5))


def test_every_truncation_is_detected() -> None:
    for cut in range(len(GOOD)):
        with pytest.raises(EntryError):
            read(GOOD[:cut])
        if cut < len(GOOD) - PAYLOAD_BYTES:  # within the header, which must detect it itself
            with pytest.raises(EntryError, match=r"^\d+ bytes, but (a head|the header) has \d+$"):
                read_header(GOOD[:cut])


def test_every_flipped_bit_is_detected() -> None:
    missed = []
    for bit in range(8 * len(GOOD)):
        data = bytearray(GOOD)
        data[bit // 8] ^= 1 << bit % 8
        try:
            read(bytes(data))
        except EntryError:
            continue
        missed.append(bit)
    assert missed == []


def test_appended_bytes_are_detected() -> None:
    with pytest.raises(EntryError):
        read(GOOD + b"\0")


def test_the_entry_of_another_key_is_refused() -> None:
    other = KEY[:-1] + bytes([KEY[-1] ^ 1])
    with pytest.raises(EntryError, match=f"it is the entry of {KEY.hex()}, not of {other.hex()}"):
        read(GOOD, other)


@pytest.mark.parametrize("garbage", [b"", b"\0" * 5000, b"\xff" * 5000, b"<html>" * 100, GOOD[1:], GOOD[8:]])
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(EntryError):
        read_header(garbage)


def test_a_future_format_is_refused_by_number() -> None:
    for number in (FORMAT + 1, 0, 2**32 - 1):
        with pytest.raises(
            EntryError, match=f"^format {number}, but this version reads format {FORMAT}$"
        ) as caught:
            read(forged(number=number))
        assert caught.value.__cause__ is None


def test_huge_lengths_are_refused_before_allocation() -> None:
    """Neither JSON nor rows are needed for that: the data has none."""
    head = bytearray(GOOD[:HEAD_BYTES])
    struct.pack_into("<I", head, 12, 2**32 - 1)
    with pytest.raises(EntryError, match="4294967295 bytes of JSON, more than"):
        header_length(bytes(head))
    head = bytearray(GOOD)
    struct.pack_into("<Q", head, 16, 2**63)
    with pytest.raises(EntryError, match="checksum"):
        read_header(bytes(head))


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ([3, 6], "30 bytes of rows, but .* takes 36"),
        ([2**40, 2**40], "is not a length and a width"),
        ([-3, -5], "is not a length and a width"),
        ([15], "is not a length and a width"),
        ([1, 3, 5], "is not a length and a width"),
        ([3.0, 5], "is not a length and a width"),
        ([True, 15], "is not a length and a width"),
        ("35", "is not a length and a width"),
        (None, "is not a length and a width"),
        ([2**31 - 1, 2**31 - 1], "30 bytes of rows, but"),
    ],
)
def test_invalid_shapes_are_refused(shape: Any, reason: str) -> None:
    with pytest.raises(EntryError, match=reason):
        read(forged(good_json() | {"shape": shape}))


@pytest.mark.parametrize("dtype", ["float64", "torch.bfloat16", "", None, ["bfloat16"], 1])
def test_invalid_dtypes_are_refused(dtype: Any) -> None:
    with pytest.raises(EntryError, match=r"is not one of float32, bfloat16, float16$"):
        read(forged(good_json() | {"dtype": dtype}))


@pytest.mark.parametrize(
    "text",
    [b"", b"   ", b"{", b"[]", b"3", b"null", b"\xff\xfe", b"{}", b'"' * 9, b"[" * 100_000, b"1" * 10_000],
    ids=[
        "nothing",
        "spaces",
        "cut",
        "list",
        "number",
        "null",
        "not UTF-8",
        "empty",
        "quotes",
        "deep",
        "long",
    ],
)
def test_invalid_json_is_refused(text: bytes) -> None:
    with pytest.raises(EntryError, match="its JSON cannot be read"):
        read(forged(text or b" "))


@pytest.mark.parametrize(
    "changed",
    [{"new_field": 1}, {"cache": "disk"}, {"timings": []}, {"model": ...}, {"grid_thws": ...}],
    ids=str,
)
def test_metadata_with_other_fields_is_refused(changed: dict[str, Any]) -> None:
    fields = {name: value for name, value in (good_json()["metadata"] | changed).items() if value is not ...}
    with pytest.raises(EntryError, match="its metadata does not have the fields model, mm_hash, "):
        read(forged(good_json() | {"metadata": fields}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", None),
        ("mm_hash", 3),
        ("length", "3"),
        ("length", 3.0),
        ("shape", "ab"),
        ("shape", [3, None]),
        ("dtype", []),
        ("device", {}),
        ("strides", [5.0, 1]),
        ("strides", {"5": 1}),
        ("embedding_offsets", [[0], [3]]),
        ("grid_thws", [[1, 2]]),
        ("grid_thws", [1, 2, 3]),
        ("grid_thws", 3),
        ("original_size", [4]),
        ("original_size", [4, True]),
    ],
)
def test_metadata_of_the_wrong_type_is_refused(name: str, value: Any) -> None:
    described = good_json()
    described["metadata"][name] = value
    with pytest.raises(EntryError, match="a field of its metadata has the wrong type"):
        read(forged(described))


def test_every_compared_field_of_metadata_is_stored() -> None:
    """A new field of ImageMetadata must be decided on here, together with FORMAT."""
    kept = set(good_json()["metadata"])
    assert kept == set(ImageMetadata.__dataclass_fields__) - {"cache", "timings"}
    assert FORMAT == 1
    assert kept == {
        "model",
        "mm_hash",
        "length",
        "shape",
        "dtype",
        "device",
        "strides",
        "embedding_offsets",
        "grid_thws",
        "original_size",
    }
