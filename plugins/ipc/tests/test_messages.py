"""What users of vLLM's ipc engine rely on in its messages, and what a pickle may not do."""

from __future__ import annotations

import base64
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from plugins.ipc.tests.golden import OTHER_UUID, UUID, arguments
from weightwire.errors import MessageError
from weightwire_ipc.messages import IPCTrainerInitInfo, IPCWeightTransferInitInfo, IPCWeightTransferUpdateInfo
from weightwire_ipc.pickled import VARIABLE, decode_handles, encode_handles

HANDLES = [{UUID: arguments((2, 3), torch.bfloat16, number=1), OTHER_UUID: arguments((2, 3), torch.bfloat16)}]
UPDATE: dict[str, Any] = {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]], "ipc_handles": HANDLES}


def update(**changes: Any) -> IPCWeightTransferUpdateInfo:
    given = {key: value for key, value in {**UPDATE, **changes}.items() if value is not ...}
    return IPCWeightTransferUpdateInfo.parse(given, what="update_info")


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")


# Fields


def test_a_valid_update_is_a_stock_one() -> None:
    assert update().stock
    assert not IPCWeightTransferUpdateInfo(round=0).stock


def test_empty_lists_are_taken() -> None:
    empty = update(names=[], dtype_names=[], shapes=[], ipc_handles=[])
    assert (empty.names, empty.ipc_handles, empty.stock) == ([], [], True)


def test_lists_of_different_lengths_are_refused() -> None:
    for key, value in {"dtype_names": [], "shapes": [], "ipc_handles": [], "tensor_sizes": [1, 2]}.items():
        with pytest.raises(MessageError, match=f"{key} has {len(value)} elements for 1 names"):
            update(**{key: value})


def test_a_packed_update_has_one_mapping_for_all_names() -> None:
    two = {"names": ["a", "b"], "dtype_names": ["int8"] * 2, "shapes": [[1], [2]]}
    packed = update(**two, ipc_handles={UUID: arguments((3,), torch.uint8)}, tensor_sizes=[1, 2])
    assert packed.tensor_sizes == [1, 2]
    assert isinstance(packed.ipc_handles, dict)


def test_both_forms_of_the_handles_are_refused(allowed: None) -> None:
    with pytest.raises(MessageError, match="not both"):
        update(ipc_handles_pickled=encode_handles(HANDLES))


def test_neither_form_is_refused() -> None:
    with pytest.raises(MessageError, match="give ipc_handles or ipc_handles_pickled"):
        update(ipc_handles=...)
    with pytest.raises(MessageError, match="give ipc_handles or ipc_handles_pickled"):
        update(ipc_handles=None)


def test_a_pickled_key_of_none_is_taken() -> None:
    assert update(ipc_handles_pickled=None).ipc_handles == HANDLES


def test_an_unknown_key_is_named() -> None:
    with pytest.raises(ValueError, match="Invalid update_info: unknown key 'packed'"):
        update(packed=True)


def test_a_worker_is_told_packed_and_nothing_else() -> None:
    assert IPCWeightTransferInitInfo.parse({}, what="init_info").packed is False
    assert IPCWeightTransferInitInfo.parse({"packed": True}, what="init_info").packed is True
    with pytest.raises(ValueError, match="Invalid init_info: unknown key 'world_size'"):
        IPCWeightTransferInitInfo.parse({"world_size": 2}, what="init_info")


def test_the_trainers_defaults() -> None:
    info = IPCTrainerInitInfo()
    assert (info.backend, info.packed, info.rank) == ("ipc", False, 0)
    assert (info.buffer_bytes("host"), info.buffer_bytes("device")) == (4 << 20, 128 << 20)
    assert IPCTrainerInitInfo(wire="vllm").buffer_bytes("device") == 1 << 30


# The pickled form


def test_pickled_handles_are_read_and_the_field_is_cleared(allowed: None) -> None:
    read = update(ipc_handles=..., ipc_handles_pickled=encode_handles(HANDLES))
    assert read.ipc_handles == HANDLES
    assert read.ipc_handles_pickled is None


def test_one_mapping_is_read_as_one(allowed: None) -> None:
    packed = {UUID: arguments((10,), torch.uint8)}
    assert decode_handles(encode_handles(packed)) == packed


def test_a_client_of_vllms_is_understood(allowed: None) -> None:
    first = list(arguments())
    first[0], first[4] = torch.nn.Parameter, torch.UntypedStorage
    handles = [{UUID: tuple(first)}, {UUID: arguments((0, 2))}]
    text = base64.b64encode(pickle.dumps(handles)).decode("ascii")
    assert decode_handles(text) == [{UUID: arguments()}, {UUID: arguments((0, 2))}]


@pytest.mark.parametrize("value", [None, "", "0", "true"])
def test_without_the_flag_pickled_handles_are_refused(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ValueError, match=f"Set {VARIABLE}=1"):
        update(ipc_handles=..., ipc_handles_pickled=encode_handles(HANDLES))


@pytest.mark.parametrize("text", ["?", "ä", "gASV", "", base64.urlsafe_b64encode(b"\xfb\xff" * 3).decode()])
def test_what_is_no_pickle_is_refused(text: str, allowed: None) -> None:
    with pytest.raises(MessageError, match="ipc_handles_pickled"):
        decode_handles(text)


@pytest.mark.parametrize("value", [None, 3, "x", (1,), [3], [{UUID: 1}], {UUID: arguments()[:3]}, [{UUID: ("f", ())}]])
def test_a_pickle_of_something_else_is_refused(value: Any, allowed: None) -> None:
    with pytest.raises(MessageError, match="ipc_handles"):
        decode_handles(base64.b64encode(pickle.dumps(value)).decode())


class Touch:
    """Runs a command when it is read by an ordinary reader."""

    def __init__(self, callable_: Any, *given: Any) -> None:
        self.reduced = callable_, given

    def __reduce__(self) -> Any:
        return self.reduced


def text(value: str) -> bytes:
    data = value.encode()
    return b"\x8c" + bytes([len(data)]) + data


def stack_global(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def hostile(path: Path) -> dict[str, bytes]:
    """Pickles that would touch `path`, or the reader, if anything of them ran."""
    command = f"touch {path}"
    call = text(command) + b"\x85R."
    proto = b"\x80\x04"
    return {
        "os.system": pickle.dumps(Touch(os.system, command)),
        "os.system, protocol 0": pickle.dumps(Touch(os.system, command), 0),
        "os.system, protocol 2": pickle.dumps(Touch(os.system, command), 2),
        "inside a handle": pickle.dumps([{UUID: (*arguments()[:7], Touch(os.system, command), *arguments()[8:])}]),
        "eval": pickle.dumps(Touch(eval, f"open({str(path)!r}, 'w')")),
        "getattr of getattr": proto
        + stack_global("builtins", "getattr")
        + stack_global("os", "system")
        + b"\x86R"
        + call,
        "a dotted name": proto + stack_global("torch", "os.system") + call,
        "a dotted dtype": proto + stack_global("torch", "float32.__class__.__base__.__subclasses__") + b")R.",
        "a name inside torch": proto + stack_global("torch", "load") + call,
        "a module beside torch": proto + stack_global("torch.storage", "os") + call,
        "the name from the memo": proto + text("posix") + b"\x94" + text("system") + b"\x94h\x00h\x01\x93" + call,
        "a name that is no text": proto + b"K\x01K\x02\x93" + call,
        "calling a dtype": proto + stack_global("torch", "float32") + call,
        "calling a storage's class": proto
        + stack_global("torch.storage", "UntypedStorage")
        + b"J\xff\xff\xff\x7f\x85R.",
        "calling a tensor's class": proto + stack_global("torch", "Tensor") + b"J\xff\xff\xff\x7f\x85R.",
        "a size of a long text": proto + stack_global("torch", "Size") + text("x" * 200) + b"\x85R.",
        "an instance of it": proto + stack_global("torch", "Tensor") + b")\x81.",
        "setting attributes": proto + stack_global("torch", "Size") + b"}" + text("count") + b"K\x01sb.",
        "GLOBAL": b"\x80\x02cposix\nsystem\n" + b"X\x01\x00\x00\x00a\x85R.",
        "INST": b"(S'touch'\niposix\nsystem\n.",
        "OBJ": b"(cposix\nsystem\nS'touch'\no.",
        "a persistent id": b"\x80\x04K\x01Q.",
        "an extension": b"\x80\x04\x82\x01.",
        "out of band": b"\x80\x05\x97.",
        "a memo of sixteen billion places": b"\x80\x04Nr\xff\xff\xff\xff.",
        "a place that was never kept": b"\x80\x04j\xff\xff\xff\xff.",
        "a number of megabytes": b"\x80\x04\x8b" + struct.pack("<i", 1 << 30) + b"\x01.",
        "bytes that do not come": b"\x80\x04B\xff\xff\xff\xff.",
        "a frame that does not end": b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b".",
        "nothing on the stack": b"\x80\x04.",
        "no end": b"\x80\x04N",
        "a later protocol": b"\x80\xffN.",
    }


@pytest.mark.parametrize("name", hostile(Path()))
def test_a_hostile_pickle_is_refused_and_nothing_of_it_runs(name: str, tmp_path: Path, allowed: None) -> None:
    path = tmp_path / "touched"
    with pytest.raises(MessageError, match="ipc_handles"):
        decode_handles(base64.b64encode(hostile(path)[name]).decode())
    assert not path.exists()
