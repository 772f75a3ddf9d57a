"""What a peer says of its GPU's memory is looked at field by field before CUDA or torch sees it."""

from __future__ import annotations

import base64
import inspect
import json
import os
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from plugins.ipc.tests.golden import OTHER_UUID, PID, UUID, arguments, storage_fields
from weightwire.errors import MessageError, Unsupported
from weightwire_ipc.device import DeviceExport, cannot_open, counted, open_export, release_exports
from weightwire_ipc.handles import HandleArguments, parse_handles
from weightwire_ipc.storage_handle import COUNTERS, LARGEST, StorageHandle

EXPORT = DeviceExport(**storage_fields(4096, number=7), device_uuid=UUID, pid=PID)

GOLDEN = (
    '{"dtype": "uint8", "device_uuid": "4e5a1f3c-9d21-4b8e-8c77-0f3b5a6d2e19", "event_handle": '
    '"AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4vMDEyMzQ1Njc4OTo7PD0+Pw==", '
    '"event_sync_required": true, "handle": '
    '"AmMHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcH", '
    '"nbytes": 4096, "pid": 4711, "ref_counter_handle": "L3RvcmNoXzQ3MTFfMTM0NTYxMDE0OV8w", '
    '"ref_counter_offset": 7, "storage_offset": 3584}'
)


def record(**changes: Any) -> dict[str, Any]:
    return {**json.loads(GOLDEN), **changes}


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


# The typed form


def test_the_golden_record() -> None:
    assert EXPORT.to_json() == json.loads(GOLDEN)
    assert DeviceExport.from_json(json.loads(GOLDEN)) == EXPORT


def test_what_keeps_the_memory_is_not_told() -> None:
    kept = DeviceExport(**storage_fields(4096, number=7), device_uuid=UUID, pid=PID, keeper=torch.empty(1))
    assert kept.to_json() == EXPORT.to_json()
    assert kept == EXPORT
    with pytest.raises(MessageError, match="unknown key 'keeper'"):
        DeviceExport.from_json(record(keeper=None))


def test_secrets_of_cuda_are_not_printed() -> None:
    assert "handle=b" not in repr(EXPORT).replace("ref_counter_handle=b", "")


@pytest.mark.parametrize("handle", [b"x" * 64, b"\x03c" + b"x" * 64, b"\x03e" + b"x" * 500], ids=["old", "c", "e"])
def test_every_handle_that_torch_writes_is_taken(handle: bytes) -> None:
    assert DeviceExport.from_json(record(handle=encoded(handle))).handle == handle


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "no handle": ({"handle": ""}, "handle"),
    "short handle": ({"handle": encoded(b"\x02c" + b"x" * 63)}, "handle is no CUDA memory handle.*65 bytes"),
    "long handle": ({"handle": encoded(b"\x02c" + b"x" * 65)}, "handle"),
    "endless handle": ({"handle": encoded(b"\x02e" + b"x" * (1 << 20))}, "handle"),
    "other kind of handle": ({"handle": encoded(b"\x02q" + b"x" * 64)}, "handle"),
    "handle of numbers": ({"handle": [1, 2, 3]}, "handle must be a string of base64, got list"),
    "handle that is no base64": ({"handle": "?" * 88}, "handle is not standard base64"),
    "URL-safe handle": ({"handle": base64.urlsafe_b64encode(b"\xff" * 64).decode()}, "handle is not standard base64"),
    "handle with umlauts": ({"handle": "ä" * 88}, "handle is not standard base64"),
    "short event": ({"event_handle": encoded(b"x" * 63)}, "event_handle must be 64 bytes, got 63"),
    "negative size": ({"nbytes": -1}, "nbytes"),
    "no bytes": ({"nbytes": 0}, "nbytes"),
    "huge size": ({"nbytes": LARGEST + 1}, "nbytes"),
    "size of true": ({"nbytes": True}, "nbytes must be an integer"),
    "size of text": ({"nbytes": "4096"}, "nbytes"),
    "size of a float": ({"nbytes": 4096.0}, "nbytes"),
    "negative offset": ({"storage_offset": -512}, "storage_offset"),
    "offset that overflows": ({"storage_offset": LARGEST - 1}, "storage_offset"),
    "counter past its file": ({"ref_counter_offset": COUNTERS}, "ref_counter_offset"),
    "negative counter": ({"ref_counter_offset": -1}, "ref_counter_offset"),
    "counter elsewhere": ({"ref_counter_handle": encoded(b"/somebody_elses")}, "ref_counter_handle names none"),
    "counter on a path": ({"ref_counter_handle": encoded(b"/torch_4711_1_0/../x")}, "ref_counter_handle"),
    "counter with a zero byte": ({"ref_counter_handle": encoded(b"/torch_4711_1_0\0")}, "ref_counter_handle"),
    "counter with a line's end": ({"ref_counter_handle": encoded(b"/torch_4711_1_0\n")}, "ref_counter_handle"),
    "another's counter": ({"ref_counter_handle": encoded(b"/torch_1_1_0")}, "pid 4711 exports a counter of process 1"),
    "another's pid": ({"pid": 1}, "pid 1 exports a counter of process 4711"),
    "pid 0": ({"pid": 0}, "pid"),
    "pid of true": ({"pid": True}, "pid"),
    "flag of a number": ({"event_sync_required": 1}, "event_sync_required must be true or false"),
    "other dtype": ({"dtype": "float32"}, "dtype must be 'uint8'"),
    "no GPU": ({"device_uuid": ""}, "device_uuid"),
    "GPU with a line's end": ({"device_uuid": "a\nb"}, "device_uuid"),
    "GPU of a number": ({"device_uuid": 3}, "device_uuid"),
    "another key": ({"address": 1}, "unknown key 'address'"),
}


@pytest.mark.parametrize(("changes", "words"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_record_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(MessageError, match=words):
        DeviceExport.from_json(record(**changes))


@pytest.mark.parametrize("key", json.loads(GOLDEN))
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(MessageError, match=f"missing key '{key}'"):
        DeviceExport.from_json({name: value for name, value in record().items() if name != key})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(encoded(b"x" * 64)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@given(key=st.sampled_from(sorted(json.loads(GOLDEN))), value=json_values)
def test_any_value_in_any_field_is_taken_whole_or_refused(key: str, value: Any) -> None:
    try:
        taken = DeviceExport.from_json(record(**{key: value}))
    except MessageError:
        return
    assert taken.to_json() == record(**{key: value})
    assert 0 < taken.nbytes <= LARGEST - taken.storage_offset


@given(json_values)
def test_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(MessageError):
        DeviceExport.from_json(value)


# Opening


def test_another_gpu_is_refused_with_what_to_do() -> None:
    with pytest.raises(Unsupported, match=f"GPU {UUID} and this worker on GPU {OTHER_UUID}.*backend 'nccl'"):
        open_export(EXPORT, device=torch.device("cuda", 0), expected_uuid=OTHER_UUID, expected_pid=PID)


def test_another_process_than_the_peer_is_refused() -> None:
    with pytest.raises(Unsupported, match="is of process 4711 and came from process 4712.*memory='host'"):
        open_export(EXPORT, device=torch.device("cuda", 0), expected_uuid=UUID, expected_pid=PID + 1)


def test_an_export_of_this_process_is_refused() -> None:
    mine = DeviceExport(**storage_fields(pid=os.getpid()), device_uuid=UUID, pid=os.getpid())
    with pytest.raises(Unsupported, match="trainer and worker are one process"):
        open_export(mine, device=torch.device("cuda", 0), expected_uuid=UUID, expected_pid=os.getpid())


def test_memory_that_cannot_be_opened_says_what_to_do() -> None:
    fields = {**storage_fields(), "handle": b"\x03e" + b"x" * 100}
    for export, words in {
        EXPORT: "cannot be opened: invalid.*/dev/shm",
        StorageHandle(**fields): "expandable_segments:True",
        StorageHandle(**storage_fields(pid=os.getpid())): "one process",
    }.items():
        with pytest.raises(Unsupported, match=words):
            raise cannot_open(export, RuntimeError("invalid"))


def test_releasing_needs_no_gpu() -> None:
    release_exports()


def test_the_counter_is_read_where_torch_keeps_it() -> None:
    # torch's shared storage on the CPU lies in the same kind of file as its counters.
    storage = torch.tensor([5, 1, 0], dtype=torch.int64).untyped_storage()
    _, name, _ = storage._share_filename_cpu_()
    read = []
    for place in range(3):
        fields = {**storage_fields(), "ref_counter_handle": name, "ref_counter_offset": place}
        read.append(counted(StorageHandle(**fields)))
    assert read == [5, 1, 0]
    assert counted(StorageHandle(**storage_fields())) == 0


# The arguments of torch's rebuild_cuda_tensor


def test_arguments_are_read_and_written_as_torch_has_them() -> None:
    given = arguments((2, 3), torch.bfloat16, number=5)
    parsed = HandleArguments.parse(given)
    assert parsed.arguments() == given
    assert HandleArguments.from_json(json.loads(json.dumps(parsed.to_json()))) == parsed
    assert parsed.arguments(device=1) == (*given[:6], 1, *given[7:])


def test_torch_still_takes_them_in_this_order() -> None:
    assert " ".join(inspect.signature(rebuild_cuda_tensor).parameters) == (
        "tensor_cls tensor_size tensor_stride tensor_offset storage_cls dtype storage_device storage_handle "
        "storage_size_bytes storage_offset_bytes requires_grad ref_counter_handle ref_counter_offset event_handle "
        "event_sync_required"
    )


def test_an_empty_tensor_has_no_storage() -> None:
    given = arguments((0, 4))
    parsed = HandleArguments.parse(given)
    assert parsed.storage is None
    assert parsed.arguments() == given
    assert HandleArguments.from_json(parsed.to_json()) == parsed


def test_a_part_of_a_storage_with_strides() -> None:
    given = list(arguments((2, 3), torch.float32, nbytes=4 * 4 * 5))
    given[1:4] = torch.Size((2, 3)), (5, 1), 5
    assert HandleArguments.parse(tuple(given)).offset == 5


WRONG_ARGUMENTS: dict[str, tuple[int, Any, str]] = {
    "another class": (0, dict, "names the class <class 'dict'>"),
    "a class by another name": (0, "os.system", "names the class 'os.system'"),
    "size of text": (1, "23", "size must be a tuple"),
    "size of bools": (1, (True, 3), "an element of size"),
    "negative size": (1, (-2, 3), "an element of size"),
    "huge size": (1, (1 << 40, 1 << 40), "does not lie in a storage"),
    "size of another length": (1, (6,), "different lengths"),
    "negative stride": (2, (-3, 1), "an element of stride"),
    "stride past the end": (2, (4, 1), "a tensor of 28 bytes does not lie in a storage of 24"),
    "negative offset": (3, -1, "the tensor's offset"),
    "offset past the end": (3, 1, "a tensor of 28 bytes does not lie in a storage of 24"),
    "another storage class": (4, int, "names the class <class 'int'>"),
    "wider dtype": (5, torch.float64, "a tensor of 48 bytes"),
    "dtype of text": (5, "float99", "dtype"),
    "negative device": (6, -1, "the device index"),
    "no memory handle": (7, None, "does not lie in a storage of 0"),
    "handle of text": (7, "x" * 66, "got str"),
    "negative bytes": (8, -24, "nbytes"),
    "negative storage offset": (9, -1, "storage_offset"),
    "requires_grad of a number": (10, 0, "requires_grad"),
    "counter elsewhere": (11, b"/dev/shm/x", "ref_counter_handle"),
    "counter past its file": (12, 1 << 20, "ref_counter_offset"),
    "no event": (13, None, "event_handle must be 64 bytes, got NoneType"),
    "flag of a number": (14, 1, "event_sync_required"),
}


@pytest.mark.parametrize(("place", "value", "words"), WRONG_ARGUMENTS.values(), ids=WRONG_ARGUMENTS)
def test_a_wrong_argument_is_refused_by_name(place: int, value: Any, words: str) -> None:
    given = list(arguments())
    given[place] = value
    with pytest.raises(MessageError, match=words) as caught:
        parse_handles([{UUID: arguments()}, {UUID: tuple(given)}])
    assert "ipc_handles[1]: " in str(caught.value)


@pytest.mark.parametrize("given", [None, (), "x", arguments()[:14], (*arguments(), 1), {UUID: 1}])
def test_what_are_no_arguments(given: Any) -> None:
    with pytest.raises(MessageError, match="ipc_handles.0."):
        parse_handles([{UUID: given}])


@pytest.mark.parametrize("given", [None, 3, "x", [None], [[1]], [{3: arguments()}]])
def test_what_are_no_handles(given: Any) -> None:
    with pytest.raises(MessageError, match="must map GPU uuids to handles"):
        parse_handles(given)
