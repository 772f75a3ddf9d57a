"""Tensors without storage that stand in for a checkpoint's while a model's loader runs.

Each carries a shadow, a tensor on the meta device. A view operation runs on the shadow; if what comes out shares the
shadow's storage, its offset, sizes and strides say which elements of the checkpoint tensor it is. So torch does the
algebra, and no operation needs code of its own. What is done with the result is up to a `Handler`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

from weightwire.region import Region

Call = Callable[..., Any]

_make: Final[Call] = Tensor._make_wrapper_subclass


def _functions(names: str) -> frozenset[Call]:
    """The methods of Tensor and the functions of torch of these names."""
    found = (getattr(place, name, None) for name in names.split() for place in (Tensor, torch))
    return frozenset(function for function in found if callable(function))


VIEWS: Final = _functions(
    "narrow view reshape __getitem__ unsqueeze squeeze transpose t permute flatten unflatten chunk unbind split"
    " split_with_sizes tensor_split hsplit vsplit dsplit select expand expand_as broadcast_to view_as reshape_as ravel"
    " movedim moveaxis swapaxes swapdims diagonal unfold as_strided detach adjoint atleast_1d atleast_2d atleast_3d"
    " view_as_real view_as_complex"
)
"""What changes nothing and usually gives a view."""

METADATA: Final = _functions(
    "size dim ndimension numel nelement stride storage_offset is_contiguous element_size is_floating_point is_complex"
    " get_device __len__ is_conj is_neg is_signed __hash__ is_inference is_pinned is_shared is_same_size dim_order"
    " has_names result_type is_tensor as_tensor requires_grad_ detach_"
)
"""What needs no values; asked of the stand-in itself."""

READS: Final = _functions(
    "item tolist numpy __array__ __bool__ __float__ __int__ __index__ __complex__ is_nonzero data_ptr untyped_storage"
    " storage _typed_storage __dlpack__ __reduce_ex__ __format__ __contains__"
)
"""What needs values, or an address."""

_ATTRIBUTES: Final = [getattr(Tensor, name) for name in dir(Tensor) if hasattr(getattr(Tensor, name), "__set__")]

HARMLESS: Final = VIEWS | METADATA | {one.__get__ for one in _ATTRIBUTES}
"""What does nothing worth noting to ordinary tensors."""

_MAY_HOLD: Final = (tuple, list, dict, Tensor)
_COPY: Final = Tensor.copy_
_SAME: Final = _functions("contiguous cpu cuda pin_memory clone to")
_PACKING: Final = _functions("contiguous clone")
_BY_STORAGE: Final = _functions("as_strided")
_RESHAPED: Final = _functions("resize_ resize_as_ t_ transpose_ squeeze_ unsqueeze_ swapaxes_ swapdims_ as_strided_")
_VIEW_ATTRIBUTES: Final = frozenset(("data", "T", "mT", "H", "mH", "real", "imag"))


class StandIn(Tensor):
    """A tensor without storage. Its `handler` decides what every operation on it does.

    Args:
        shadow: On the meta device: where in its checkpoint tensor this is.
        origin: Whatever the handler wants to know of it; views have it too.
        handler: Asked about every operation.
        packed: It claims to be contiguous and its shadow is not: `contiguous` and `clone` copy nothing.
        token: Kept alive by it and its views.
    """

    _shadow: Tensor
    _origin: Any
    _handler: Handler
    _packed: bool
    _token: Any

    @staticmethod
    def __new__(
        cls: Any, shadow: Tensor, origin: Any, handler: Handler, packed: bool = False, token: Any = None
    ) -> StandIn:
        """See the class."""
        if packed or shadow.is_contiguous():
            made = _make(cls, shadow.shape, dtype=shadow.dtype, device=handler.device)
        else:
            strides, offset = shadow.stride(), shadow.storage_offset()
            made = _make(
                cls, shadow.shape, strides=strides, storage_offset=offset, dtype=shadow.dtype, device=handler.device
            )
        made._shadow, made._origin, made._handler = shadow, origin, handler
        made._packed, made._token = packed, token
        return made  # type: ignore[no-any-return]

    def __init__(self, *_: Any) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See the class."""
        first = next(stand_ins((args, kwargs)))
        return first._handler.unwatched(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """See the class; reached where something looks past `__torch_function__`."""
        first = next(stand_ins((args, kwargs)))
        return first._handler.dispatch(func, args, kwargs or {})


def flat(value: Any) -> Iterator[Any]:
    """The leaves of nested tuples, lists and dicts."""
    if isinstance(value, tuple | list):
        for item in value:
            yield from flat(item)
    elif isinstance(value, dict):
        yield from flat(list(value.values()))
    else:
        yield value


def stand_ins(value: Any) -> Iterator[StandIn]:
    """The stand-ins among the leaves of `value`."""
    return (leaf for leaf in flat(value) if isinstance(leaf, StandIn))


def replaced(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with every leaf changed."""
    if isinstance(value, tuple | list):
        items = [replaced(item, change) for item in value]
        # torch's own tuples with named fields take one sequence, others take fields.
        return items if isinstance(value, list) else tuple(items) if type(value) is tuple else _remade(value, items)
    if isinstance(value, dict):
        return {key: replaced(item, change) for key, item in value.items()}
    return change(value)


def _remade(value: Any, items: list[Any]) -> Any:
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def shadow_of(leaf: Any) -> Any:
    """The shadow of a stand-in; anything else as it is."""
    return leaf._shadow if isinstance(leaf, StandIn) else leaf


def storage_key(tensor: Tensor) -> int:
    """The identity of a tensor's storage while it lives."""
    return int(tensor.untyped_storage()._cdata)


def region_of(tensor: Tensor) -> Region:
    """A strided tensor as a region of its storage, in its own elements."""
    return Region(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())


class Handler(ABC):
    """Decides what operations on stand-ins do: views are common to all, the rest is not.

    Attributes:
        device: Where stand-ins claim to be.
    """

    device: torch.device = torch.device("cpu")

    @abstractmethod
    def copy(self, destination: Tensor, stand_in: StandIn) -> Tensor:
        """`destination.copy_(stand_in)`, the destination being an ordinary tensor."""

    @abstractmethod
    def read(self, function: Call, args: Any, kwargs: Any) -> Any:
        """One of `READS`."""

    @abstractmethod
    def other(self, function: Call, args: Any, kwargs: Any) -> Any:
        """What is none of the known operations, or gave no view."""

    @abstractmethod
    def dispatch(self, function: Any, args: Any, kwargs: Any) -> Any:
        """An ATen operation that came past `function`."""

    def unwatched(self, function: Call, args: Any, kwargs: Any) -> Any:
        """As `function`, for calls that only a stand-in among the arguments gives away."""
        return self.function(function, args, kwargs)

    def function(self, function: Call, args: Any, kwargs: Any) -> Any:
        """A function of torch with stand-ins among its arguments."""
        if function is _COPY and len(args) > 1 and isinstance(args[1], StandIn):
            if not isinstance(args[0], StandIn):
                return self.copy(args[0], args[1])
        elif function in VIEWS:
            return self._view(function, args, kwargs)
        elif function in METADATA:
            return _of_itself(function, args, kwargs)
        elif function in READS:
            return self.read(function, args, kwargs)
        elif function in _SAME:
            return self._same(function, args, kwargs)
        return self._rarer(function, args, kwargs)

    def _rarer(self, function: Call, args: Any, kwargs: Any) -> Any:
        name = getattr(function, "__name__", "")
        subject = args[0] if args else None
        if name in ("__get__", "__set__"):
            attribute = getattr(function, "__self__").__name__  # noqa: B009  no attribute of a Callable
            if name == "__get__" and attribute in _VIEW_ATTRIBUTES:
                return self._view(function, args, kwargs)
            if isinstance(subject, StandIn) and attribute != "data":
                return _of_itself(function, args, kwargs)
        if function is Tensor.__iter__ and isinstance(subject, StandIn):
            return iter(self._view(Tensor.unbind, args, kwargs))
        if function is Tensor.__repr__ and isinstance(subject, StandIn):
            return f"StandIn({tuple(subject._shadow.shape)}, {subject._shadow.dtype})"
        if function in _RESHAPED and isinstance(subject, StandIn):
            raise NotImplementedError(f"{name} changes the shape of a checkpoint tensor in place")
        return self.other(function, args, kwargs)

    def _view(self, function: Call, args: Any, kwargs: Any) -> Any:
        subject = args[0] if args else None
        plain = not kwargs and not any(isinstance(one, _MAY_HOLD) for one in args[1:])
        if not isinstance(subject, StandIn) or not (plain or next(stand_ins((args[1:], kwargs)), None) is None):
            return self.other(function, args, kwargs)
        shadow = subject._shadow
        try:
            with torch._C.DisableTorchFunctionSubclass():
                result = function(shadow, *args[1:], **kwargs)
        except Exception:  # noqa: BLE001  what cannot be done to a shadow may be possible with values
            return self.other(function, args, kwargs)
        outputs = [result] if isinstance(result, Tensor) else list(result)
        if not all(_is_view(subject, function, output) for output in outputs):
            return self.other(function, args, kwargs)
        views = [StandIn(output, subject._origin, self, subject._packed, subject._token) for output in outputs]
        return views[0] if isinstance(result, Tensor) else tuple(views)

    def _same(self, function: Call, args: Any, kwargs: Any) -> Any:
        """A stand-in is wherever it is asked to be, and as contiguous as one wants."""
        subject = args[0]
        if not isinstance(subject, StandIn):  # an ordinary tensor is moved to what a stand-in has
            return function(args[0], dtype=args[1].dtype, device=args[1].device)
        dtypes = [
            leaf if isinstance(leaf, torch.dtype) else leaf.dtype for leaf in flat((args[1:], kwargs)) if _typed(leaf)
        ]
        if dtypes and dtypes[0] != subject._shadow.dtype:
            return self.other(Tensor.type, (subject, dtypes[0]), {})
        if kwargs.get("memory_format", torch.contiguous_format) not in (torch.contiguous_format, torch.preserve_format):
            return self.other(function, args, kwargs)
        if function not in _PACKING or subject._shadow.is_contiguous():
            return subject
        return StandIn(subject._shadow, subject._origin, self, True, subject._token)


def _typed(leaf: object) -> bool:
    return isinstance(leaf, torch.dtype | Tensor)


def _is_view(subject: StandIn, function: Call, output: Tensor) -> bool:
    """Whether `output` is nothing but other strides over the shadow of `subject`."""
    if storage_key(output) != storage_key(subject._shadow) or (subject._packed and function in _BY_STORAGE):
        return False
    return not (output.is_conj() or output.is_neg())


def _of_itself(function: Call, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


def every(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among the leaves of `values`."""
    return [leaf for leaf in flat(list(values)) if isinstance(leaf, Tensor)]
