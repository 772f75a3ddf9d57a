"""What a test process and its ranks say to each other, and how a function and an exception travel.

Both ends are processes of one user's test run joined by an inherited pipe, so values are pickled; nothing
outside `weightwire.testing` does that.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import pickle
import sys
import threading
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from weightwire.errors import WeightwireError, error_from_json

Action = Literal["kill", "stop", "raise", "hold", "note"]
"""What a rank does at a fault point: SIGKILL or SIGSTOP itself, raise `FaultError`, wait, or only say so."""


class FaultError(RuntimeError):
    """Raised in a rank at a point armed with `"raise"`."""


class RemoteError(RuntimeError):
    """Stands for an exception of a rank that cannot be pickled; the message starts with its type."""


class RemoteTraceback(Exception):
    """The traceback of the exception it is the cause of, as text from the rank."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True, slots=True)
class FunctionReference:
    """A module-level function by where it stands, so that a rank finds it without being able to import it.

    Attributes:
        module: Name the function's module has in the test process, kept in the rank so that instances of the
            module's classes can travel.
        path: The module's file, absolute; empty for a module without one.
        qualname: Name within the module.
    """

    module: str
    path: str
    qualname: str


@dataclass(frozen=True, slots=True)
class Request:
    """From the test process to a rank: `kind` names a method of `pool_rank.RankServer`."""

    number: int
    kind: str
    payload: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """From a rank to the test process: the answer to request `number`, as pickled value or as a failure."""

    number: int
    value: bytes = b""
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Reached:
    """From a rank to the test process, before the rank acts: an armed point was reached."""

    point: str


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of a rank.

    Attributes:
        pickled: The exception itself, empty if it cannot be pickled and back.
        record: `WeightwireError.to_json()`, for errors of that tree.
        words: Type and message.
        traceback: Formatted, causes included.
    """

    pickled: bytes
    record: dict[str, Any] | None
    words: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe `error` so that it can be raised in another process."""
        try:
            pickled = dump(error)
            load(pickled)
        except Exception:  # noqa: BLE001 - pickling runs the exception's own code, which may raise anything
            pickled = b""
        return cls(
            pickled=pickled,
            record=error.to_json() if isinstance(error, WeightwireError) else None,
            words=f"{type(error).__name__}: {error}",
            traceback="".join(traceback.format_exception(error)),
        )

    def rebuild(self, where: str) -> BaseException:
        """The exception again, its type kept if this process knows it, caused by its `RemoteTraceback`."""
        error: BaseException | None = None
        if self.pickled:
            try:
                error = load(self.pickled)
            except Exception:  # noqa: BLE001 - a class this process cannot import: the words are kept below
                error = None
        if error is None:
            error = error_from_json(self.record) if self.record else RemoteError(self.words)
        error.__cause__ = RemoteTraceback(f"in {where}:\n{self.traceback}")
        return error


class _Pickler(pickle.Pickler):
    """Sends functions and classes as `FunctionReference`, so that those of test modules arrive too."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, types.FunctionType | type):
            return NotImplemented
        module = sys.modules.get(value.__module__)
        if value.__module__ == __name__ or "<" in value.__qualname__ or getattr(module, "__file__", None) is None:
            return NotImplemented  # by name: what carries the others, builtins, and what cannot travel at all
        return resolve, (reference_to(value),)


def dump(value: object) -> bytes:
    """Pickle by value: tensors too, so that no memory is shared and no helper thread is started."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def load(data: bytes) -> Any:
    """The inverse of `dump`."""
    return pickle.loads(data)  # noqa: S301 - from our own child or parent over an inherited pipe


def reference_to(function: Callable[..., object]) -> FunctionReference:
    """How a rank will find `function`.

    Raises:
        ValueError: It is not a function at module level (a lambda, a closure, a method of an instance).
    """
    name = getattr(function, "__qualname__", "")
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or "<" in name or getattr(function, "__self__", None) is not None:
        raise ValueError(f"a rank runs module-level functions only, got {function!r}")
    path = getattr(module, "__file__", None)
    return FunctionReference(module.__name__, os.path.abspath(path) if path else "", name)


def resolve(reference: FunctionReference) -> Callable[..., Any]:
    """Find the function in this process, loading its module from its file if its name does not lead there.

    pytest's importlib mode gives test modules names that nothing can import; the file is what counts.
    """
    with _loading:
        target: Any = _module(reference.module, reference.path)
    for part in reference.qualname.split("."):
        target = getattr(target, part)
    found: Callable[..., Any] = target
    return found


_loaded_at: dict[str, int] = {}
_loading = threading.RLock()


def _module(name: str, path: str) -> types.ModuleType:
    module = sys.modules.get(name)
    if module is not None and _same_file(module, path) and _loaded_at.get(path) in (None, _modified(path)):
        return module
    if path and not _importable(name, path):
        return _load_file(name, path)
    return importlib.import_module(name)


def _same_file(module: types.ModuleType, path: str) -> bool:
    file = getattr(module, "__file__", None)
    return not path or (file is not None and os.path.abspath(file) == path)


def _importable(name: str, path: str) -> bool:
    if path in _loaded_at:
        return False
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return False
    return spec is not None and spec.origin is not None and os.path.abspath(spec.origin) == path


def _load_file(name: str, path: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _loaded_at[path] = _modified(path)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name], _loaded_at[path]
        raise
    return module


def _modified(path: str) -> int:
    return os.stat(path).st_mtime_ns
