"""The pickled handles of vLLM's HTTP clients: written for a stock server, read without building anything.

A pickle is a program. This reader runs only the opcodes that plain containers, numbers, strings and bytes need, and
every global that a handle names stands for its own name, so that nothing in it can be called but `tuple`.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import pickle
import pickletools
from typing import Any, Final

import torch

from weightwire.errors import MessageError
from weightwire_ipc.handles import parse_handles

VARIABLE: Final = "VLLM_ALLOW_INSECURE_SERIALIZATION"

_DIMENSIONS: Final = 64
_OPCODES: Final = frozenset(
    (
        *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET"),
        *("EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS"),
        *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
        *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1"),
        *("SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES"),
        *("STACK_GLOBAL", "REDUCE"),
    )
)
_GLOBALS: Final = frozenset(
    (
        ("torch", "Tensor"),
        ("torch.nn.parameter", "Parameter"),
        ("torch.storage", "TypedStorage"),
        ("torch.storage", "UntypedStorage"),
        *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
    )
)


def encode_handles(handles: list[dict[str, Any]] | dict[str, Any]) -> str:
    """Handles as a stock vLLM server reads them: pickled, in base64.

    Args:
        handles: A mapping from GPU uuid to torch's arguments for each parameter, or packed one for all.
    """
    return base64.b64encode(pickle.dumps(handles)).decode("ascii")


def decode_handles(text: str) -> list[dict[str, Any]] | dict[str, Any]:
    """Read what `encode_handles`, or a stock client, wrote.

    Returns:
        The handles, every argument checked; classes are torch's plain ones.

    Raises:
        MessageError: The environment does not allow pickled handles, or this is something else.
    """
    if os.environ.get(VARIABLE) != "1":
        raise MessageError(
            f"ipc_handles_pickled is refused: a pickle may run code. Set {VARIABLE}=1 here if every trainer is "
            "trusted, or send with weightwire's trainer, which needs none"
        )
    try:
        data = base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise MessageError("ipc_handles_pickled is not standard base64") from error
    handles = _read(data)
    if not isinstance(handles, list | dict):
        raise MessageError(f"ipc_handles_pickled holds a {type(handles).__name__}, not handles")
    parsed = [{uuid: one.arguments() for uuid, one in found.items()} for found in parse_handles(handles)]
    return parsed if isinstance(handles, list) else parsed[0]


def _read(data: bytes) -> object:
    try:
        # Looked at first: the reader itself would make room for a place of its memo that a few bytes may put anywhere.
        for opcode, _, _ in pickletools.genops(data):
            if opcode.name not in _OPCODES:
                raise MessageError(f"ipc_handles_pickled is no pickle of handles: it has {opcode.name}")
        return _HandleReader(io.BytesIO(data)).load()
    except MessageError:
        raise
    except Exception as error:  # a malformed pickle may raise anything
        raise MessageError(f"ipc_handles_pickled cannot be read: {type(error).__name__}: {error}") from error


def _size(lengths: object) -> tuple[object, ...]:
    # Bounded: a pickle may call it on one long string again and again.
    if type(lengths) is not tuple or len(lengths) > _DIMENSIONS:
        raise MessageError("ipc_handles_pickled has a size that is none")
    return lengths


class _HandleReader(pickle.Unpickler):
    """Resolves no name: what a handle may name becomes a string, and a size a tuple."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return _size
        if (module, name) in _GLOBALS:
            return f"{module}.{name}"
        raise MessageError(f"ipc_handles_pickled names {module}.{name}, which is no part of a handle")

    def persistent_load(self, pid: Any) -> Any:
        raise MessageError("ipc_handles_pickled refers to something outside of it")
