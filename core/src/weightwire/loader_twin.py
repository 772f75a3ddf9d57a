"""The copy of a model that its loader fills while the model serves, and which tensors of the two belong together."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import nn

from weightwire.errors import UpdateRefused
from weightwire.inventory import Entry, Inventory
from weightwire.module_twin import twin_of


def make_twin(model: Any) -> tuple[Any, str | None]:
    """A deep copy of `model` whose `load_weights` loads into the copy, or None and why there is none."""
    if not isinstance(model, nn.Module):
        return None, f"a {type(model).__name__} is no nn.Module, so its storages are not known"
    try:
        twin: Any = twin_of(model)
    except Exception as error:  # noqa: BLE001  the attributes of somebody's model may raise anything
        return None, f"the model cannot be copied: {type(error).__name__}: {error}"
    if not isinstance(twin.load_weights, MethodType) or twin.load_weights.__self__ is not twin:
        return None, "load_weights is not a method of the model's class: a copy of it would load into the live model"
    return twin, None


def paired_with(live: Inventory, twin: Inventory) -> dict[Entry, Entry]:
    """The entries that commit exchanges, each with its twin.

    Raises:
        UpdateRefused: The loader has rebuilt the model instead of filling it.
    """
    pairs: dict[Entry, Entry] = {}
    if len(live.entries) == len(twin.entries):
        pairs = dict(zip(live.entries, twin.entries, strict=True))
    for here, there in pairs.items():
        a, b = here.tensors[0], there.tensors[0]
        if (here.names, a.shape, a.dtype, a.stride()) != (there.names, b.shape, b.dtype, b.stride()):
            pairs.clear()
            break
    if len(pairs) < len(live.entries):
        raise UpdateRefused(
            "load_weights replaced parameters by others instead of filling them: such a model needs staging='in_place'"
        )
    moved = {group for group in live.groups if any(entry.names for entry in group.entries)}
    return {here: there for here, there in pairs.items() if here.group in moved or (here.group is None and here.names)}
