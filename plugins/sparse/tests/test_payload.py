from __future__ import annotations

import sys
import tracemalloc
from random import Random

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from weightwire.errors import MessageError, UpdateRefused
from weightwire.layout import Box
from weightwire_sparse import compression, payload, rice
from weightwire_sparse.changes import Bytes, Changes
from weightwire_sparse.pieces import AddressSpace, Piece

KERNELS = ("numpy", "numba")
DTYPES = (torch.complex128, torch.float64, torch.float32, torch.bfloat16, torch.uint8)  # 16, 8, 4, 2 and 1 bytes
HOSTILE = (0, 1, 7, 2**16, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1)

randoms = st.randoms(use_true_random=False)


def random_space(random: Random) -> AddressSpace:
    dtypes = random.choices(DTYPES, k=random.randint(0, 6))
    pieces = [Piece(place, Box((0,), (random.randint(1, 200),)), dtype) for place, dtype in enumerate(dtypes)]
    return AddressSpace(random.randrange(4), tuple(sorted(pieces, key=lambda piece: -piece.dtype.itemsize)))


def random_changes(random: Random, space: AddressSpace) -> Changes:
    fraction = random.choice([0.0, 0.02, 0.5, 1.0])
    addresses = np.array([a for a in range(space.numel) if random.random() < fraction], np.int64)
    size = int((space.counts(addresses) * space.widths).sum())
    values = random.randbytes(size) if random.random() < 0.5 else bytes(size)
    return Changes(addresses, np.frombuffer(values, np.uint8))


def built(changes: Changes, space: AddressSpace, compression: str = "none") -> Bytes:
    """What both kernels build, which is the same."""
    numpy, numba = (
        payload.build(changes, space, kernels=kernels, compression=compression, threads=2) for kernels in KERNELS
    )
    assert numpy.buffer.tobytes() == numba.buffer.tobytes() and numpy.saved == numba.saved
    return numpy.buffer


def bf16_space(numel: int) -> AddressSpace:
    return AddressSpace(0, (Piece(0, Box((0,), (numel,)), torch.bfloat16),))


def bf16_changes(space: AddressSpace) -> Changes:
    """Every tenth weight of a trained model's distribution."""
    addresses = np.arange(0, space.numel, 10)
    weights = torch.randn(len(addresses), generator=torch.Generator().manual_seed(0)) * 0.02
    return Changes(addresses, weights.bfloat16().view(torch.uint8).numpy())


@given(randoms, st.sampled_from(["none", "zstd"]))
def test_what_is_built_is_read(random: Random, compression: str) -> None:
    space = random_space(random)
    changes = random_changes(random, space)
    buffer = built(changes, space, compression)
    assert len(buffer) % 8 == 0
    for kernels in KERNELS:
        came = payload.read(buffer, space, kernels=kernels, threads=2)
        assert np.array_equal(came.addresses, changes.addresses) and np.array_equal(came.values, changes.values)


def test_no_change_is_tiny() -> None:
    space = bf16_space(1000)
    buffer = built(Changes(np.zeros(0, np.int64), np.zeros(0, np.uint8)), space, "zstd")
    assert len(buffer) == 64
    assert len(payload.read(buffer, space, kernels="numpy").addresses) == 0


def test_values_are_copied_once() -> None:
    """Into the caller's own buffer, and not out of what came."""
    space = bf16_space(1000)
    buffers: list[Bytes] = []

    def out(nbytes: int) -> memoryview:
        buffers.append(np.empty(nbytes, np.uint8))
        return buffers[0].data

    made = payload.build(bf16_changes(space), space, kernels="numpy", out=out)
    assert np.shares_memory(made.buffer, buffers[0]) and len(buffers) == 1
    came = payload.read(made.buffer, space, kernels="numpy")
    assert np.shares_memory(came.values, buffers[0])


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_buffer_may_lie_anywhere_and_be_read_only(kernels: str) -> None:
    space = bf16_space(1000)
    changes = bf16_changes(space)
    buffer = b"?" + payload.build(changes, space, kernels=kernels).buffer.tobytes()
    came = payload.read(np.frombuffer(buffer, np.uint8)[1:], space, kernels=kernels)
    assert np.array_equal(came.addresses, changes.addresses) and np.array_equal(came.values, changes.values)


def test_zstd_saves_a_fifth_of_real_values_and_says_so() -> None:
    space = bf16_space(400_000)
    changes = bf16_changes(space)
    plain = payload.build(changes, space, kernels="numpy")
    small = payload.build(changes, space, kernels="numpy", compression="zstd")
    assert plain.saved == 0
    assert small.saved == len(plain.buffer) - len(small.buffer) >= 0.2 * len(changes.values)
    assert np.array_equal(payload.read(small.buffer, space, kernels="numpy").values, changes.values)


def test_zstd_is_left_out_where_it_saves_nothing() -> None:
    space = bf16_space(10_000)
    changes = Changes(np.arange(10_000), np.frombuffer(Random(0).randbytes(20_000), np.uint8))
    plain, tried = (payload.build(changes, space, kernels="numpy", compression=how) for how in ("none", "zstd"))
    assert tried.saved == 0 and tried.buffer.tobytes() == plain.buffer.tobytes()


def test_compression_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MessageError, match="not 'lz4'"):
        compression.check("lz4")
    monkeypatch.setitem(sys.modules, "zstandard", None)  # what Python itself takes for "there is none"
    compression.check("none")
    with pytest.raises(MessageError, match=r"pip install 'weightwire-sparse\[zstd\]'"):
        compression.check("zstd")


def test_a_payload_for_another_space_is_refused() -> None:
    buffer = built(bf16_changes(bf16_space(1000)), bf16_space(1000))
    for space in (bf16_space(1001), AddressSpace(1, bf16_space(1000).pieces)):
        with pytest.raises(
            UpdateRefused, match=rf"malformed.*not {space.numel} elements of trainer rank {space.sender}"
        ):
            payload.read(buffer, space, kernels="numpy")


def outcome(buffer: Bytes, space: AddressSpace, kernels: str) -> Changes | UpdateRefused:
    try:
        return payload.read(buffer, space, kernels=kernels)
    except UpdateRefused as error:
        return error


def check_harmless(buffer: Bytes, space: AddressSpace) -> None:
    """Both kernels refuse, or both read the same, and that is what changes of this space have to be."""
    numpy, numba = (outcome(buffer, space, kernels) for kernels in KERNELS)
    if isinstance(numpy, UpdateRefused) or isinstance(numba, UpdateRefused):
        assert str(numpy) == str(numba)
        assert "malformed" in str(numpy) and isinstance(numpy, UpdateRefused) and numpy.transport == "sparse_nccl"
        return
    assert np.array_equal(numpy.addresses, numba.addresses) and np.array_equal(numpy.values, numba.values)
    assert numpy.addresses.dtype == np.int64 and numpy.values.dtype == np.uint8
    assert (np.diff(numpy.addresses, prepend=-1) > 0).all() and (numpy.addresses < space.numel).all()
    assert numpy.value_offsets(space)[-1] == len(numpy.values)


def spoilt(random: Random, buffer: Bytes, space: AddressSpace) -> Bytes:
    """A payload after what a broken or hostile sender may do to it."""
    spoilt = buffer.copy()
    place = random.randrange(len(buffer))
    wrong = random.choice(["flip", "flip", "truncate", "splice", "random", "header", "header"])
    if wrong == "flip":
        for _ in range(random.randint(1, 4)):
            spoilt[random.randrange(len(buffer))] ^= 1 << random.randrange(8)
    elif wrong == "truncate":
        return spoilt[:place]
    elif wrong == "splice":
        other = payload.build(random_changes(random, space), space, kernels="numpy", compression="zstd").buffer
        return np.concatenate((spoilt[:place], other[random.choice([place, random.randrange(len(other))]) :]))
    elif wrong == "random":
        spoilt[place:] = np.frombuffer(random.randbytes(len(buffer) - place), np.uint8)
    else:
        name = random.choice(payload.HEADER.names or ())
        field = spoilt[: payload.HEADER.itemsize].view(payload.HEADER)[name]
        field[0] = random.choice([*HOSTILE, int(field[0]) + 1]) & np.iinfo(field.dtype).max
    return spoilt


@given(randoms, st.sampled_from(["none", "zstd"]))
def test_a_malformed_payload_does_no_harm(random: Random, compression: str) -> None:
    space = random_space(random)
    buffer = built(random_changes(random, space), space, compression)
    for _ in range(3):
        check_harmless(spoilt(random, buffer, space), space)


@given(st.binary(max_size=300), st.booleans(), randoms)
def test_random_bytes_do_no_harm(content: bytes, header: bool, random: Random) -> None:
    space = random_space(random)
    if header:
        content = payload.build(random_changes(random, space), space, kernels="numpy").buffer.tobytes()[:64] + content
    check_harmless(np.frombuffer(content, np.uint8), space)


def test_a_frame_that_claims_to_be_larger_is_never_unpacked() -> None:
    """Neither by what its header says nor by what is in it."""
    space = bf16_space(1000)
    addresses = np.arange(1000)
    bomb = bytes(64_000_000)
    frames = [
        zstandard.ZstdCompressor().compress(bomb),
        zstandard.ZstdCompressor(write_content_size=False).compress(bomb),
        zstandard.ZstdCompressor().compress(bytes(1999)),
        zstandard.ZstdCompressor().compress(bytes(2000)) + bytes(8),
        b"\x28\xb5\x2f\xfd\xe0" + (2**63 - 1).to_bytes(8, "little") + bytes(16),
        b"no frame at all",
    ]
    coded = rice.encode(addresses, kernels="numpy")
    good = payload.build(
        Changes(addresses, np.zeros(2000, np.uint8)), space, kernels="numpy", compression="zstd"
    ).buffer
    start = 64 + coded.table.nbytes + 8 * coded.words
    tracemalloc.start()
    try:
        for frame in frames:
            buffer = np.concatenate((good[:start], np.frombuffer(frame + bytes(-len(frame) % 8), np.uint8)))
            buffer[:64].view(payload.HEADER)["values"] = len(frame)
            with pytest.raises(UpdateRefused, match="malformed"):
                payload.read(buffer, space, kernels="numpy")
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kernels", KERNELS)
def test_more_addresses_than_there_are_values_for_are_refused_before_they_are_decoded(kernels: str) -> None:
    space = bf16_space(2_000_000)
    changes = Changes(np.arange(2_000_000), np.zeros(4_000_000, np.uint8))
    buffer = payload.build(changes, space, kernels=kernels).buffer[:-4_000_000].copy()
    buffer[:64].view(payload.HEADER)["values"] = 0
    tracemalloc.start()
    try:
        with pytest.raises(UpdateRefused, match="malformed.*too few"):
            payload.read(buffer, space, kernels=kernels)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
