"""The two factories: from a backend's name to the engine class of one side.

Worker and trainer engines have tables of their own: they share names, and a process of one role never imports
the other's module. A name is looked for first among the classes registered at run time, then among the
installed distributions.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

from weightwire import discovery
from weightwire.errors import TransportBroken, TransportConflict, TransportNotFound
from weightwire.hookspecs import Role
from weightwire.loading import check_all, load, strict

if TYPE_CHECKING:
    import torch

    from weightwire.clients.protocol import VLLMWeightSyncClient
    from weightwire.engine import WeightTransferEngine
    from weightwire.messages import TrainerInitInfo, WeightTransferConfig
    from weightwire.source import WeightSource
    from weightwire.trainer import TrainerWeightTransferEngine

_LABELS = {"worker": "engine", "trainer": "trainer engine"}


class _Table:
    """The engines registered at run time for one role, and the way to the installed ones."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.label = _LABELS[role]
        self.loaders: dict[str, Callable[[], type[Any]]] = {}

    def register(self, name: str, module_path_or_cls: str | type[Any], class_name: str | None) -> None:
        owners = [one.distribution for one in discovery.candidates(name) if one.state != "disabled"]
        if name in self.loaders or owners:
            declared = f" The installed distribution {owners[0]} declares it." if owners else ""
            raise TransportConflict(f"Weight transfer {self.label} {name!r} is already registered.{declared}")
        if not isinstance(module_path_or_cls, str):
            self.loaders[name] = lambda: module_path_or_cls
            return
        if class_name is None:
            raise ValueError("class_name is required when an engine is registered with a module path")
        self.loaders[name] = lambda: getattr(importlib.import_module(module_path_or_cls), class_name)

    def find(self, backend: str, init_info: object = None) -> type[Any]:
        if backend in self.loaders:
            return self.loaders[backend]()
        if strict():
            check_all()
        plugin = load(self._choose(backend, init_info))
        state = plugin.usable(self.role)
        if state.state != "ready":
            raise state.error()
        engines = plugin.engines(self.role)
        name = backend.rpartition(":")[2]
        if (engine := engines.get(name) or engines.get(plugin.spec.backend)) is None:
            where = f"{state.distribution} {state.version}"
            raise TransportNotFound(f"Transport {name!r} of {where} has no {self.role} engine.")
        module_path, attribute = engine
        try:
            return getattr(importlib.import_module(module_path), attribute)  # type: ignore[no-any-return]
        except Exception as error:
            what = f"The {self.role} engine {module_path}:{attribute} of {state.distribution} {state.version}"
            raise TransportBroken(f"{what} cannot be imported: {type(error).__name__}: {error}") from error

    def _choose(self, backend: str, init_info: object) -> discovery.Transport:
        found = discovery.candidates(backend)
        if not found:
            raise TransportNotFound(self._unknown(backend))
        allowed = [one for one in found if one.state != "disabled"] or list(found[:1])
        if len(allowed) > 1:
            modules = [cls.__module__ for cls in type(init_info).__mro__]
            own = [one for one in allowed if any(f"{name}.".startswith(f"{one.package}.") for name in modules)]
            if len(own) != 1:
                name = backend.rpartition(":")[2]
                raise discovery.conflict(allowed[0], name, allowed).error()
            return own[0]
        return allowed[0]

    def _unknown(self, backend: str) -> str:
        installed = {name for one in discovery.transports() if one.state != "disabled" for name in one.names}
        available = sorted(installed | set(self.loaders))
        words = f"Invalid weight transfer backend: {backend}. Available {self.label}s: {available}."
        if backend in discovery.FIRST_PARTY:
            return f"{words} To have it: pip install {discovery.FIRST_PARTY[backend]}."
        close = difflib.get_close_matches(backend, {*available, *discovery.FIRST_PARTY}, n=1)
        if close:
            words += f" Did you mean {close[0]!r}?"
        present = {one.distribution for one in discovery.transports()}
        absent = {name: home for name, home in discovery.FIRST_PARTY.items() if home not in present}
        ways = "; ".join(f"{name}: pip install {home}" for name, home in absent.items())
        return f"{words} Not installed: {ways}." if ways else words


_tables: dict[Role, _Table] = {"worker": _Table("worker"), "trainer": _Table("trainer")}


@overload
def engine_class(
    role: Literal["worker"], backend: str, *, init_info: object = None
) -> type[WeightTransferEngine[Any, Any]]: ...
@overload
def engine_class(
    role: Literal["trainer"], backend: str, *, init_info: object = None
) -> type[TrainerWeightTransferEngine[Any]]: ...
def engine_class(role: Role, backend: str, *, init_info: object = None) -> type[Any]:
    """The engine class of a backend for one side; the other side's module is not imported.

    Args:
        role: "worker" or "trainer".
        backend: A backend name, an alias, or `"<distribution>:<name>"`.
        init_info: An init info whose class decides between several distributions that declare `backend`.

    Raises:
        TransportNotFound: Nobody provides it, or not for this role.
        TransportConflict: Several distributions provide it.
        PluginError: It is disabled, incompatible, broken or unavailable here.
    """
    return _tables[role].find(backend, init_info)


class WeightTransferEngineFactory:
    """Worker engines by backend name."""

    @classmethod
    def register_engine(
        cls,
        name: str,
        module_path_or_cls: str | type[WeightTransferEngine[Any, Any]],
        class_name: str | None = None,
    ) -> None:
        """Register a worker engine in this process.

        Args:
            name: Backend name.
            module_path_or_cls: The engine class, or the module to import it from when it is first needed.
            class_name: Name of the class in that module.

        Raises:
            ValueError: The name is registered already, an installed distribution declares it, or a module
                path came without a class name.
        """
        _tables["worker"].register(name, module_path_or_cls, class_name)

    @classmethod
    def create_engine(
        cls, config: WeightTransferConfig, vllm_config: Any, device: torch.device, model: torch.nn.Module
    ) -> WeightTransferEngine[Any, Any]:
        """Make the worker engine that `config.backend` names.

        Args:
            config: Its `backend` is read.
            vllm_config: The host's configuration; its `parallel_config` places this worker among the ranks.
            device: Where the model lives.
            model: The local model that receives the weights.

        Raises:
            PluginError: As `engine_class`.
        """
        return engine_class("worker", config.backend)(config, vllm_config, device, model)


class WeightTransferTrainerFactory:
    """Trainer engines by backend name."""

    @classmethod
    def register_engine(
        cls,
        name: str,
        module_path_or_cls: str | type[TrainerWeightTransferEngine[Any]],
        class_name: str | None = None,
    ) -> None:
        """Register a trainer engine in this process; as `WeightTransferEngineFactory.register_engine`."""
        _tables["trainer"].register(name, module_path_or_cls, class_name)

    @overload
    @classmethod
    def trainer_init(
        cls,
        init_info: TrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> TrainerWeightTransferEngine[Any]: ...
    @overload
    @classmethod
    def trainer_init(
        cls,
        backend: str,
        config: Any,
        init_info: TrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> TrainerWeightTransferEngine[Any]: ...
    @classmethod
    def trainer_init(
        cls,
        *positional: Any,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
        **named: Any,
    ) -> TrainerWeightTransferEngine[Any]:
        """Build a trainer engine that is ready for `send_weights`; called on every trainer rank.

        The backend is `init_info.backend`. The older form `trainer_init(backend, config, init_info, ...)` is
        accepted too: its backend may be a qualified name, and its config is not needed.

        Args:
            *positional: `init_info`, or `backend, config, init_info`.
            client: The control plane to the workers.
            source: What is sent each round, for backends that send whole models.
            **named: The positional ones, by name.

        Raises:
            TypeError: Neither form was used.
            PluginError: As `engine_class`.
        """
        backend, init_info = _init_arguments(positional, named)
        engine = engine_class("trainer", backend, init_info=init_info)
        return engine.trainer_init(init_info=init_info, client=client, source=source)


def _init_arguments(positional: tuple[Any, ...], named: dict[str, Any]) -> tuple[str, TrainerInitInfo]:
    names = ("init_info",) if len(positional) + len(named) == 1 else ("backend", "config", "init_info")
    given = dict(zip(names, positional, strict=False)) | named
    if len(given) != len(positional) + len(named) or sorted(given) != sorted(names):
        raise TypeError("trainer_init takes (init_info) or (backend, config, init_info), then client= and source=")
    init_info = given["init_info"]
    return given.get("backend") or init_info.backend, init_info
