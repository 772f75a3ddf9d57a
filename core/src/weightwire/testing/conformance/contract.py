"""Group contract: what can be seen of a transport without sending anything."""

from __future__ import annotations

import subprocess
import sys
from functools import cached_property, partial
from typing import Any, Final

import torch
from torch import nn

from weightwire import discovery
from weightwire.clients.local import LocalClient
from weightwire.engine import WeightTransferEngine
from weightwire.errors import MessageError, MetadataError, WeightwireError
from weightwire.hookspecs import Role
from weightwire.layout import ParamMeta
from weightwire.loading import Plugin, load
from weightwire.messages import (
    TrainerInitInfo,
    WeightTransferConfig,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from weightwire.registry import WeightTransferEngineFactory, WeightTransferTrainerFactory, engine_class
from weightwire.source import WeightSource
from weightwire.testing.conformance.check import Check
from weightwire.testing.conformance.judging import Nonconforming
from weightwire.testing.conformance.stage import Stage, nonconforming
from weightwire.testing.conformance.subject import CAPABILITIES, TransportUnderTest
from weightwire.trainer import TrainerWeightTransferEngine
from weightwire.worker import Worker

_SECONDS: Final = 30.0
_BOTH_WAYS: Final[tuple[tuple[Role, Role], ...]] = (("worker", "trainer"), ("trainer", "worker"))


def _require(condition: object, words: str) -> None:
    if not condition:
        raise Nonconforming(words)


def _plugin(subject: TransportUnderTest) -> Plugin:
    return load(next(one for one in discovery.candidates(subject.backend) if one.state != "disabled"))


def _in_a_rank(stage: Stage, function: Any) -> None:
    (rank,) = stage.lend(1)
    rank.call(function, stage.subject)


def _declares_itself(stage: Stage) -> None:
    """The plugin is ready here, and says what its engines are."""
    subject = stage.subject
    plugin = _plugin(subject)
    for role, _ in _BOTH_WAYS:
        state = plugin.usable(role)
        _require(state.state == "ready", f"as a {role} it is {state.state}: {state.reason}")
        _require(plugin.spec.backend in plugin.engines(role), f"it registers no {role} engine {plugin.spec.backend!r}")
    _in_a_rank(stage, _wire_versions)


def _wire_versions(state: dict[str, Any], subject: TransportUnderTest) -> None:
    plugin = _plugin(subject)
    worker, trainer = engine_class("worker", subject.backend), engine_class("trainer", subject.backend)
    versions = (plugin.spec.wire_version, worker.wire_version, trainer.wire_version)
    _require(len(set(versions)) == 1, f"plugin, worker and trainer name different wire versions: {versions}")


def _capabilities(stage: Stage) -> None:
    """Only words that mean something."""
    backend = stage.subject.backend.rpartition(":")[2]
    strange = sorted(
        word for word in stage.subject.declared() if word not in CAPABILITIES and not word.startswith(f"{backend}.")
    )
    _require(
        not strange,
        f"it declares capability {strange[:1]}, which nobody knows: known are {', '.join(sorted(CAPABILITIES))}; "
        f"one of its own is written '{backend}.WORD'",
    )


_FINDING = """
import sys
from weightwire import discovery, loading
plugin = loading.load(next(one for one in discovery.candidates({backend!r}) if one.state != "disabled"))
for role in ("worker", "trainer"):
    plugin.engines(role)
sys.exit("torch" in sys.modules)
"""


def _run(script: str, words: str) -> None:
    try:
        run = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise Nonconforming(f"looking at its plugin takes longer than {_SECONDS:g} s") from error
    _require(run.returncode == 0, f"{words} {run.stderr[-2000:]}".strip())


def _found_without_torch(stage: Stage) -> None:
    """Listing what is installed must not cost seconds."""
    _run(_FINDING.format(backend=stage.subject.backend), "its plugin module imports torch")


def _roles_apart(stage: Stage) -> None:
    """A process that sends never imports what receives, and the other way round."""
    (rank,) = stage.lend(1)
    try:
        rank.call(_imported_by_roles, stage.subject)
    finally:
        rank.kill()  # its modules were imported twice


def _imported_by_roles(state: dict[str, Any], subject: TransportUnderTest) -> None:
    plugin = _plugin(subject)
    for role, other in _BOTH_WAYS:
        for name in [one for one in sys.modules if f"{one}.".startswith(f"{plugin.transport.package}.")]:
            del sys.modules[name]
        engine_class(role, subject.backend)
        module = plugin.engines(other)[plugin.spec.backend][0]
        _require(module not in sys.modules, f"its {role} engine's module imports the {other} engine's, {module}")


def _classes(state: dict[str, Any], subject: TransportUnderTest) -> None:
    subject.prepare()
    backend = subject.backend.rpartition(":")[2]
    worker, trainer = engine_class("worker", subject.backend), engine_class("trainer", subject.backend)
    pairs = (
        (worker, WeightTransferEngine, "worker engine"),
        (trainer, TrainerWeightTransferEngine, "trainer engine"),
        (worker.init_info_cls, WeightTransferInitInfo, "worker's init_info_cls"),
        (worker.update_info_cls, WeightTransferUpdateInfo, "worker's update_info_cls"),
        (trainer.init_info_cls, TrainerInitInfo, "trainer's init_info_cls"),
    )
    for cls, base, what in pairs:
        _require(issubclass(cls, base), f"its {what} {cls.__name__} is no {base.__name__}")
    named = trainer.init_info_cls.backend
    _require(named == backend, f"{trainer.init_info_cls.__name__}.backend is {named!r} and not {backend!r}")
    _require(worker.wire_version == trainer.wire_version, "its two engines name different wire versions")
    _require(trainer.consumes in ("full", "local"), f"consumes is {trainer.consumes!r}, neither 'full' nor 'local'")
    with nonconforming("making its init info"):
        subject.make_init_info(timeout=1.0)


def _fresh(subject: TransportUnderTest) -> WeightTransferEngine[Any, Any]:
    subject.prepare()
    config = WeightTransferConfig(backend=subject.backend)
    return WeightTransferEngineFactory.create_engine(config, None, torch.device("cpu"), nn.Linear(2, 2))


def _strict_messages(state: dict[str, Any], subject: TransportUnderTest) -> None:
    engine = _fresh(subject)
    for parse, what in ((engine.parse_init_info, "init_info"), (engine.parse_update_info, "update_info")):
        try:
            parse({"no_such_key": 1})
        except MessageError as error:
            words = str(error)
            _require("no_such_key" in words, f"the error about an unknown key of {what} does not name it: {words}")
            _require(f"Invalid {what} for" in words, f"the error does not say 'Invalid {what} for': {words}")
        else:
            raise Nonconforming(f"an unknown key of {what} is taken")


def _before_a_link(state: dict[str, Any], subject: TransportUnderTest) -> None:
    engine = _fresh(subject)
    with nonconforming("shutdown before any link"):
        engine.shutdown()
        engine.shutdown()
    engine.start_weight_update()
    try:
        engine.update_weights({})
    except WeightwireError:
        return
    except Exception as error:
        raise Nonconforming(f"update_weights before a link raised {type(error).__name__}: {error}") from error
    raise Nonconforming("update_weights before a link returned as if something had been received")


class _Modeless(WeightSource):
    """A source that declares and cannot be read."""

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta("weight", torch.float32, (2, 2))]


def _unreadable_sources(state: dict[str, Any], subject: TransportUnderTest) -> None:
    client = LocalClient(Worker(nn.Linear(2, 2)))
    # An engine that sends what its caller brings does without a source; one that cannot be read is of no use to it too.
    nothing = (None,) if getattr(engine_class("trainer", subject.backend), "needs_source", True) else ()
    for source in (*nothing, _Modeless()):
        info = subject.make_init_info(timeout=2.0)
        try:
            WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
        except MetadataError:
            continue
        except Exception as error:
            raise Nonconforming(f"trainer_init with source {source} raised {type(error).__name__}: {error}") from error
        raise Nonconforming(f"trainer_init took source {source}")


_NOTHING: Final[frozenset[str]] = frozenset()

CHECKS: Final = (
    Check("contract", "declares-itself", _declares_itself, _NOTHING, installed=True),
    Check("contract", "capabilities", _capabilities, _NOTHING),
    Check("contract", "found-without-torch", _found_without_torch, _NOTHING, installed=True),
    Check("contract", "roles-apart", _roles_apart, _NOTHING, installed=True),
    Check("contract", "classes", partial(_in_a_rank, function=_classes), _NOTHING),
    Check("contract", "strict-messages", partial(_in_a_rank, function=_strict_messages)),
    Check("contract", "before-a-link", partial(_in_a_rank, function=_before_a_link)),
    Check("contract", "unreadable-sources", partial(_in_a_rank, function=_unreadable_sources)),
)
