"""What a command sends: a checkpoint on disk, or what a function of the user's returns; all of it or some."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import nn

from weightwire.errors import MetadataError
from weightwire.layout import ParamMeta
from weightwire.sink import Scope
from weightwire.source import ModuleSource, StateDictSource, WeightSource
from weightwire_cli.checkpoint import SafetensorsSource

_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


class SelectedSource(WeightSource):
    """The parameters of another source whose names match a pattern: a partial update.

    Args:
        source: The other source.
        patterns: Shell patterns (`*`, `?`, `[...]`), case-sensitive; a name that matches any is sent.

    Raises:
        MetadataError: A pattern matches nothing.
    """

    scope: ClassVar[Scope] = "partial"
    """Workers keep the parameters that are not sent."""

    def __init__(self, source: WeightSource, patterns: Sequence[str]) -> None:
        self._source = source
        self._patterns = tuple(patterns)
        for pattern in self._patterns:
            if not any(fnmatchcase(meta.name, pattern) for meta in source.metadata):
                raise MetadataError(f"no parameter of the checkpoint matches {pattern!r}")

    def _selects(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._patterns)

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        """What the other source declares, as far as it is selected."""
        return [meta for meta in self._source.metadata if self._selects(meta.name)]

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        device: torch.device = getattr(self._source, "device", torch.device("cpu"))
        return device

    def mesh_ranks(self) -> set[int]:
        """As the other source."""
        return {rank for meta in self._source.metadata for rank in meta.owners or ()}

    def implements_iter_full(self) -> bool:
        """As the other source."""
        return self._source.implements_iter_full()

    def implements_iter_local(self) -> bool:
        """As the other source."""
        return self._source.implements_iter_local()

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the whole of each selected tensor; gathers of the others still line up."""
        return (pair for pair in self._source.iter_full() if self._selects(pair[0]))

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's piece of each selected tensor."""
        return (pair for pair in self._source.iter_local() if self._selects(pair[0]))


def open_source(path: str, *, only: Sequence[str] = (), device: str = "cpu") -> WeightSource:
    """The source that a command's PATH means.

    Args:
        path: A checkpoint (see `SafetensorsSource`), or `module:factory`, a callable without arguments that returns
            an `nn.Module`, a state dict or a `WeightSource`; the current folder is searched for the module first.
        only: Patterns of names to send; none sends all.
        device: Where a checkpoint's tensors are put before they are sent.

    Raises:
        MetadataError: Neither, or the checkpoint is not what it says.
    """
    if _FACTORY.fullmatch(path) and not os.path.exists(path):
        source = _called(path)
    else:
        source = SafetensorsSource(path, device=device)
    return SelectedSource(source, only) if only else source


def _called(name: str) -> WeightSource:
    module_name, _, attribute = name.partition(":")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        made: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            made = getattr(made, part)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise MetadataError(f"{name!r} is neither a path nor a factory: there is no module {error.name!r}") from error
    except AttributeError as error:
        raise MetadataError(f"{name!r} is no factory: {error}") from error
    if callable(made) and not isinstance(made, nn.Module):
        made = made()
    if isinstance(made, WeightSource):
        return made
    if isinstance(made, nn.Module):
        return ModuleSource(made, buffers=True)  # as a checkpoint of it would have them
    if isinstance(made, Mapping):
        return StateDictSource(made)
    raise MetadataError(f"{name!r} gave a {type(made).__name__}, not a module, a state dict or a source of weights")
