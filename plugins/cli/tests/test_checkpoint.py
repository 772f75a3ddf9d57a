from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from plugins.cli.tests.scene import Model, write
from weightwire.errors import MetadataError, SourceMismatch
from weightwire_cli import SafetensorsSource, SelectedSource

Header = dict[str, Any]
GOOD: Header = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "I64", "shape": [2], "data_offsets": [24, 40]},
}


def file_of(path: Path, header: Header | bytes, data: int = 40, length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + bytes(data))
    return path


def changed(**fields: Any) -> Header:
    return {**GOOD, "b": {**GOOD["b"], **fields}}


def tensors_of(source: SafetensorsSource) -> dict[str, torch.Tensor]:
    found = dict(source.iter_full())
    assert list(found) == [meta.name for meta in source.metadata]
    for meta in source.metadata:
        assert (found[meta.name].dtype, tuple(found[meta.name].shape)) == (meta.dtype, meta.shape)
    return found


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64,
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.complex64,
]  # fmt: skip


def test_every_dtype_and_odd_shapes(tmp_path: Path) -> None:
    made = {}
    for place, dtype in enumerate(DTYPES):
        raw = torch.randint(0, 2, (15 * dtype.itemsize,), dtype=torch.uint8)
        made[f"t{place:02}"] = raw.view(dtype).reshape(3, 5)
    made |= {"scalar": torch.tensor(2.5), "hollow": torch.empty(0, 4), "bytes": torch.arange(3, dtype=torch.uint8)}
    save_file(made, tmp_path / "a.safetensors")
    expected = load_file(tmp_path / "a.safetensors")
    found = tensors_of(SafetensorsSource(tmp_path / "a.safetensors"))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].flatten().view(torch.uint8).equal(tensor.flatten().view(torch.uint8)), name


def test_what_is_not_aligned_is_copied(tmp_path: Path) -> None:
    header = {
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
    }
    raw = json.dumps(header).encode()
    values = struct.pack("<2f", 1.5, -2.0)
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + b"abc" + values)
    found = tensors_of(SafetensorsSource(tmp_path / "a.safetensors"))
    assert found["b"].tolist() == [1.5, -2.0]
    assert found["b"].data_ptr() % 4 == 0


def test_a_tensor_is_the_mapped_file(tmp_path: Path) -> None:
    source = SafetensorsSource(write(tmp_path / "a.safetensors"))
    first, second = tensors_of(source), tensors_of(source)
    assert all(first[name].data_ptr() == second[name].data_ptr() for name in first)


def sharded(folder: Path) -> dict[str, Any]:
    state = Model(7.0).state_dict()
    names = list(state)
    files = {"model-1.safetensors": names[:2], "model-2.safetensors": names[2:]}
    for file, held in files.items():
        save_file({name: state[name] for name in held}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, held in files.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return index


def test_folders(tmp_path: Path) -> None:
    expected = Model(7.0).state_dict()
    sharded(tmp_path)
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        found = tensors_of(SafetensorsSource(path))
        assert found.keys() == expected.keys()
        assert all(found[name].equal(expected[name]) for name in expected)
    single = tmp_path / "single"
    single.mkdir()
    write(single / "odd.safetensors")
    assert SafetensorsSource(single).nbytes == SafetensorsSource(tmp_path).nbytes
    write(single / "model.safetensors", 8.0)
    assert tensors_of(SafetensorsSource(single))["embed"][0, 0] == 8.0
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "model.safetensors").symlink_to(single / "odd.safetensors")
    assert tensors_of(SafetensorsSource(linked))["embed"][0, 0] == 7.0


LIES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "empty": (lambda path: _cut(path, 0), "it has 0 bytes"),
    "three bytes": (lambda path: _cut(path, 3), "it has 3 bytes"),
    "header longer than the file": (lambda path: file_of(path, GOOD, length=4000), "truncated: a header of 4000"),
    "huge header": (lambda path: file_of(path, GOOD, length=1 << 40), "a header has 100,000,000 bytes at most"),
    "no JSON": (lambda path: file_of(path, b"{'a': 1}"), "its header is not JSON"),
    "not UTF-8": (lambda path: file_of(path, b'{"\xff": 1}'), "its header is not JSON"),
    "nested without end": (lambda path: file_of(path, b"[" * 200_000), "its header is not JSON"),
    "no object": (lambda path: file_of(path, b"[]"), "its header is no object"),
    "no tensors": (lambda path: file_of(path, {}, 0), "holds no tensors"),
    "a name twice": (
        lambda path: file_of(path, b'{"a": %b, "a": %b}' % ((json.dumps(GOOD["a"]).encode(),) * 2), 24),
        "names 'a' twice",
    ),
    "a key twice": (lambda path: file_of(path, b'{"a": {"dtype": "F32", "dtype": "F32"}}'), "names 'dtype' twice"),
    "an empty name": (lambda path: file_of(path, {"": GOOD["a"]}, 24), "has no name"),
    "more keys": (lambda path: file_of(path, changed(strides=[1])), "'b' is not described by"),
    "no entry": (lambda path: file_of(path, {**GOOD, "b": 7}), "'b' is not described by"),
    "unknown dtype": (lambda path: file_of(path, changed(dtype="F4")), "'b' has dtype 'F4', which cannot be sent"),
    "dtype of another type": (lambda path: file_of(path, changed(dtype=["F32"])), "'b' has dtype"),
    "negative size": (lambda path: file_of(path, changed(shape=[-2])), "'b' has a shape that is none"),
    "a size that is true": (lambda path: file_of(path, changed(shape=[True, 2])), "'b' has a shape that is none"),
    "a size beyond 63 bits": (lambda path: file_of(path, changed(shape=[0, 1 << 63])), "shape that is none"),
    "65 dimensions": (lambda path: file_of(path, changed(shape=[1] * 64 + [2])), "shape that is none"),
    "shape and bytes": (lambda path: file_of(path, changed(shape=[3])), r"I64 of shape \(3,\), which takes 24 bytes"),
    "dtype and bytes": (lambda path: file_of(path, changed(dtype="I32")), "takes 8 bytes, and has 16"),
    "offsets backwards": (lambda path: file_of(path, changed(data_offsets=[40, 24])), "data_offsets that are none"),
    "three offsets": (lambda path: file_of(path, changed(data_offsets=[24, 32, 40])), "data_offsets that are none"),
    "overlap": (lambda path: file_of(path, changed(data_offsets=[16, 32])), "'b' overlaps the one before it"),
    "a gap": (lambda path: file_of(path, changed(data_offsets=[32, 48]), 48), "'b' leaves a gap before it"),
    "cut short": (lambda path: file_of(path, GOOD, 39), "truncated: tensor 'b' ends at byte"),
    "padded": (lambda path: file_of(path, GOOD, 41), "has 1 bytes after its last tensor"),
}


def _cut(path: Path, size: int) -> Path:
    path.write_bytes(bytes(size))
    return path


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_file(tmp_path: Path, lie: str) -> None:
    make, words = LIES[lie]
    path = make(tmp_path / "a.safetensors")
    with pytest.raises(MetadataError, match=words) as raised:
        SafetensorsSource(path)
    assert str(path) in str(raised.value)


def test_an_index_that_lies(tmp_path: Path) -> None:
    index = sharded(tmp_path)
    file = tmp_path / "model.safetensors.index.json"

    def refused(weight_map: Any, words: str) -> None:
        file.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(MetadataError, match=words):
            SafetensorsSource(tmp_path)

    good = index["weight_map"]
    refused({**good, "norm": "model-9.safetensors"}, "places 'norm' in model-9.safetensors, which is not there")
    refused({**good, "absent": "model-1.safetensors"}, "'absent' is in model-1.safetensors, which lacks it")
    refused({name: good[name] for name in good if name != "norm"}, "holds 'norm', which .* does not place there")
    refused({**good, "norm": "../a.safetensors"}, "places 'norm' in '../a.safetensors', which is no file beside it")
    refused({**good, "norm": 7}, "places 'norm' in 7")
    refused(None, "has no weight_map")
    file.write_text("{")
    with pytest.raises(MetadataError, match="is not JSON"):
        SafetensorsSource(tmp_path)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    def refused(path: Path, words: str) -> None:
        with pytest.raises(MetadataError, match=words):
            SafetensorsSource(path)

    refused(tmp_path / "absent", "cannot be read: No such file")
    refused(tmp_path, "holds no safetensors checkpoint")
    (tmp_path / "pytorch_model.bin").touch()
    refused(tmp_path, "pytorch_model.bin is pickled, which is not read")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "is no file")
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    refused(tmp_path / "loop.safetensors", "cannot be read: Too many levels of symbolic links")
    write(tmp_path / "a.safetensors")
    write(tmp_path / "b.safetensors")
    refused(tmp_path, "has several checkpoints .a.safetensors, b.safetensors")


def test_a_file_that_changes_meanwhile(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", 7.0)
    source = SafetensorsSource(path)
    os.replace(write(tmp_path / "b.safetensors", 8.0), path)
    assert tensors_of(source)["embed"][0, 0] == 7.0
    source = SafetensorsSource(path)
    pairs = source.iter_full()
    next(pairs)
    with path.open("ab") as file:
        file.write(b"more")
    with pytest.raises(SourceMismatch, match="was written to while it was being read"):
        list(pairs)


def test_patterns(tmp_path: Path) -> None:
    source = SafetensorsSource(write(tmp_path / "a.safetensors"))
    chosen = SelectedSource(source, ["layers.*.weight", "norm"])
    names = [meta.name for meta in chosen.metadata]
    assert sorted(names) == ["layers.0.weight", "layers.1.weight", "norm"]
    assert [name for name, _ in chosen.iter_full()] == names
    assert chosen.implements_iter_full()
    assert not chosen.implements_iter_local()
    with pytest.raises(MetadataError, match="no parameter of the checkpoint matches 'lm_head'"):
        SelectedSource(source, ["norm", "lm_head"])


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_change_is_refused_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    good = file_of(tmp_path / "a.safetensors", GOOD).read_bytes()
    text = st.sampled_from([*b'0129-[]{}:,"FI6432abdtypeshap_offsets\x00\xff'])
    changes = data.draw(st.lists(st.tuples(st.integers(0, len(good) - 1), text), max_size=4))
    raw = bytearray(good)
    for place, byte in changes:
        raw[place] = byte
    raw = raw[: data.draw(st.integers(0, len(raw)) | st.just(len(raw)))]
    (tmp_path / "a.safetensors").write_bytes(raw)
    try:
        source = SafetensorsSource(tmp_path / "a.safetensors")
    except MetadataError:
        return
    assert sum(tensor.nbytes for tensor in tensors_of(source).values()) == source.nbytes
