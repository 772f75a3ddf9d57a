"""Recorded loading: drive a model's own loader once with stand-ins, and write down what it does with them.

The model is a twin on the meta device, so the live one is never touched. A function mode sees every function of torch
that the loader calls. Copies of views of checkpoint tensors and constant fills are written down; anything else that
reaches a parameter makes its module opaque. So the plan may cost bytes, but never says what is not so.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weightwire.layout import ParamMeta, check_metadata
from weightwire.load_plan import LoadPlan, Opaque
from weightwire.recorder import Recorder
from weightwire.stand_in import HARMLESS, READS, StandIn
from weightwire.twin_slots import Slots

Load = Callable[[Iterable[tuple[str, Tensor]]], object]

_ROUNDS: Final = 6
_MOST_TRIED: Final = 64
_STAND_IN, _REAL, _WITHHELD = range(3)


def record_loads(twin: nn.Module, metadata: Sequence[ParamMeta], load: Load | None = None) -> LoadPlan:
    """What `twin`'s loader does with a checkpoint of these tensors, in this order.

    No loader that plain loading accepts raises here. One that chokes on a stand-in is run again with an ordinary
    tensor of ones in its place, whose module is then opaque; where that fails too the tensor is left out, or in the
    end the whole model is opaque. The twin's parameters and buffers are as before afterwards.

    Args:
        twin: The model, its parameters on the meta device.
        metadata: The checkpoint's tensors; layouts play no part.
        load: The loader, by default `twin.load_weights`; called with (name, tensor) pairs, several times at worst.

    Raises:
        MetadataError: A name is declared twice.
        ValueError: A parameter has memory: this is no twin.
        TypeError: There is no loader.
    """
    check_metadata(metadata)
    loader = getattr(twin, "load_weights", None) if load is None else load
    if not callable(loader):
        raise TypeError(f"a {type(twin).__name__} has no load_weights, and no load is given")
    for name, parameter in twin.named_parameters():
        if not parameter.is_meta:
            raise ValueError(f"parameter {name!r} is on {parameter.device}: recording needs a twin on the meta device")
    sources = [meta if meta.owners is None else ParamMeta(meta.name, meta.dtype, meta.shape) for meta in metadata]
    collects = gc.isenabled()
    gc.disable()  # there is little garbage among very many objects
    try:
        return _Attempts(twin, sources, loader).plan()
    finally:
        if collects:
            gc.enable()


class _Attempts:
    """Runs the loader until one run has gone through, with fewer stand-ins each time."""

    def __init__(self, twin: nn.Module, sources: list[ParamMeta], load: Load) -> None:
        self._twin = twin
        self._sources = sources
        self._load = load
        self._levels: dict[str, int] = {}
        self._reasons: dict[str, str] = {}

    def plan(self) -> LoadPlan:
        error: Exception | None = None
        for _ in range(_ROUNDS):
            recorder, error = self._run(self._sources)
            if error is None:
                return recorder.plan(self._reasons)
            if not self._learn(recorder, error):
                break
        targets = tuple(Slots(self._twin).targets)
        everything = Opaque("", f"the loader raised {_words(error)}", tuple(meta.name for meta in self._sources))
        return LoadPlan(tuple(self._sources), targets, opaque=(everything,) if self._sources else ())

    def _run(self, sources: Sequence[ParamMeta]) -> tuple[Recorder, Exception | None]:
        """One call of the loader; the twin is as before afterwards."""
        slots = Slots(self._twin)
        recorder = Recorder(slots, self._sources)
        error: Exception | None = None
        pairs = self._pairs(recorder, [self._made(recorder, meta) for meta in reversed(sources)])
        try:
            # A parameter on the meta device being given something that is not: that is the point.
            with torch.no_grad(), warnings.catch_warnings(), _Watch(recorder):
                warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
                self._load(pairs)
        except Exception as raised:  # noqa: BLE001  a loader may choke on a stand-in in any way
            error = raised.with_traceback(None)
        finally:
            pairs.close()
            recorder.compare(self._twin)
            slots.restore()
        return recorder, error

    def _made(self, recorder: Recorder, meta: ParamMeta) -> tuple[str, Tensor | None]:
        level = self._levels.get(meta.name, _STAND_IN)
        if level == _STAND_IN:
            return meta.name, recorder.stand_in(meta)
        return meta.name, recorder.real(meta, self._reasons[meta.name]) if level == _REAL else None

    def _pairs(
        self, recorder: Recorder, made: list[tuple[str, Tensor | None]]
    ) -> Generator[tuple[str, Any], None, None]:
        """Hands out what was made, last first, and keeps none of it."""
        while made:
            recorder.turn_to(made[-1][0])
            if made[-1][1] is None:
                made.pop()
            else:
                yield made.pop()
        recorder.turn_to(None)

    def _learn(self, recorder: Recorder, error: Exception) -> bool:
        """Find out which sources the loader chokes on, by going on behind each; False if it is none that we know."""
        blamed = recorder.blamed()
        if not blamed:
            return False
        self._blame(blamed, error)
        place = {meta.name: index for index, meta in enumerate(self._sources)}
        for _ in range(_MOST_TRIED):
            if recorder.current is None:
                break
            rest = self._sources[place[recorder.current] + 1 :]
            recorder, again = self._run(rest)
            if again is None or not recorder.blamed():
                break
            self._blame(recorder.blamed(), again)
        return True

    def _blame(self, names: Iterable[str], error: Exception) -> None:
        for name in names:
            self._levels[name] = min(self._levels.get(name, _STAND_IN) + 1, _WITHHELD)
            self._reasons[name] = f"the loader raised {_words(error)} at {name!r}"


def _words(error: Exception | None) -> str:
    first = str(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


class _Watch(TorchFunctionMode):
    """Sees every function of torch that the loader calls on this thread."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and StandIn in types:
            return self._recorder.function(func, args, kwargs or {})
        if func in HARMLESS:
            return func(*args, **kwargs) if kwargs else func(*args)
        if func in READS:
            return self._recorder.read(func, args, kwargs or {})
        return self._recorder.plain(func, args, kwargs or {})
