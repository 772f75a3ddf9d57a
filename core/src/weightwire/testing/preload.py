"""Imported once by the process that ranks of a `RankPool` are forked from: a rank then starts in 0.03 s."""

from __future__ import annotations

import contextlib
import gc
import importlib
import pkgutil

import weightwire

_FRAMEWORK = ("torch", "torch.distributed", "torch.distributed.fsdp", "torch.distributed.tensor")
_TESTS = ("hypothesis", "pytest")


def _own_modules() -> list[str]:
    found = pkgutil.walk_packages(weightwire.__path__, "weightwire.", onerror=lambda name: None)
    return [module.name for module in found if not module.name.endswith(".command")]


for _name in (*_FRAMEWORK, *_TESTS, *_own_modules()):
    # A module that cannot be imported here fails again, aloud, in the rank that needs it.
    with contextlib.suppress(Exception):
        importlib.import_module(_name)
gc.freeze()
