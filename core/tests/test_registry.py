from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch

from core.tests.fake_site import PLUGIN, FakeSite
from weightwire import errors
from weightwire.registry import WeightTransferEngineFactory, WeightTransferTrainerFactory, engine_class

register_worker = cast(Any, WeightTransferEngineFactory.register_engine)
trainer_init = cast(Any, WeightTransferTrainerFactory.trainer_init)


class WorkerEngine:
    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments


class TrainerEngine:
    def __init__(self, **arguments: object) -> None:
        self.arguments = arguments

    @classmethod
    def trainer_init(cls, init_info: object, *, client: object, source: object) -> TrainerEngine:
        return cls(init_info=init_info, client=client, source=source)


class InitInfo:
    backend: ClassVar[str] = "mine"


def create(backend: str) -> Any:
    config = cast(Any, SimpleNamespace(backend=backend))
    return WeightTransferEngineFactory.create_engine(config, "vllm", torch.device("cpu"), torch.nn.Identity())


def test_factory_builds_positionally(fake_site: FakeSite) -> None:
    register_worker("mine", WorkerEngine)
    config, host, device, model = create("mine").arguments
    assert (config.backend, host, device) == ("mine", "vllm", torch.device("cpu"))
    assert isinstance(model, torch.nn.Identity)


def test_factory_builds_an_installed_engine(fake_site: FakeSite) -> None:
    fake_site.transport("acme-weightwire", "acme", aliases=("a",))
    assert type(create("a")).__module__ == "acme_weightwire.engine"


def test_module_path_is_imported_when_needed(fake_site: FakeSite) -> None:
    fake_site.module("late.engine", "class Engine: pass")
    register_worker("late", "late.engine", "Engine")
    assert "late.engine" not in sys.modules
    assert engine_class("worker", "late").__name__ == "Engine"


def test_module_path_needs_a_class_name(fake_site: FakeSite) -> None:
    with pytest.raises(ValueError, match="class_name is required"):
        register_worker("late", "late.engine")


@pytest.mark.parametrize(
    ("factory", "engine", "label"),
    [
        (WeightTransferEngineFactory, WorkerEngine, "engine"),
        (WeightTransferTrainerFactory, TrainerEngine, "trainer engine"),
    ],
)
def test_a_name_is_registered_once(fake_site: FakeSite, factory: Any, engine: Any, label: str) -> None:
    factory.register_engine("mine", engine)
    with pytest.raises(ValueError, match=rf"Weight transfer {label} 'mine' is already registered\."):
        factory.register_engine("mine", engine)
    with pytest.raises(errors.TransportConflict, match="already registered.*weightwire-nccl declares it"):
        factory.register_engine("nccl", engine)


def test_a_name_of_a_disabled_distribution_is_free(fake_site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTWIRE_DISABLE", "nccl")
    fake_site.distribution("nothing", {})
    register_worker("nccl", WorkerEngine)
    assert engine_class("worker", "nccl").__name__ == "WorkerEngine"


def test_tables_are_separate(fake_site: FakeSite) -> None:
    register_worker("mine", WorkerEngine)
    with pytest.raises(errors.TransportNotFound, match=r"Available trainer engines: \['nccl'\]"):
        engine_class("trainer", "mine")


@pytest.mark.parametrize(("role", "other"), [("worker", "trainer"), ("trainer", "engine")])
def test_a_role_never_imports_the_other(fake_site: FakeSite, role: Any, other: str) -> None:
    package = fake_site.transport("acme-weightwire", "acme")
    engine_class(role, "acme")
    assert f"{package}.{other}" not in sys.modules


def test_a_transport_without_an_engine_for_the_role(fake_site: FakeSite) -> None:
    receiver = PLUGIN[: PLUGIN.index("    @hookimpl\n    def weightwire_register_trainer")]
    fake_site.transport("acme-weightwire", "acme", plugin=receiver)
    assert engine_class("worker", "acme")
    with pytest.raises(errors.TransportNotFound, match="acme-weightwire 1.0 has no trainer engine"):
        engine_class("trainer", "acme")


def test_unknown_backend_says_what_there_is(fake_site: FakeSite) -> None:
    register_worker("mine", WorkerEngine)
    with pytest.raises(ValueError, match="Invalid weight transfer backend: bogus") as raised:
        create("bogus")
    words = str(raised.value)
    assert "Available engines: ['mine', 'nccl']." in words
    assert "ipc: pip install weightwire-ipc" in words
    assert "pip install weightwire-nccl" not in words


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("ipc", "To have it: pip install weightwire-ipc."),
        ("sparse", "To have it: pip install weightwire-sparse."),
        ("nclc", "Did you mean 'nccl'?"),
        ("shared_rdt", "Did you mean 'sharded_rdt'?"),
        ("other-weightwire:nccl", "Invalid weight transfer backend: other-weightwire:nccl."),
    ],
)
def test_unknown_backend_says_what_to_do(fake_site: FakeSite, backend: str, words: str) -> None:
    with pytest.raises(errors.TransportNotFound) as raised:
        engine_class("worker", backend)
    assert words in str(raised.value)


@pytest.mark.parametrize("form", ["new", "new by name", "old", "old by name"])
def test_trainer_init_dispatches(fake_site: FakeSite, form: str) -> None:
    cast(Any, WeightTransferTrainerFactory).register_engine("mine", TrainerEngine)
    info, control = InitInfo(), {"client": "client", "source": "source"}
    made = {
        "new": lambda: trainer_init(info, **control),
        "new by name": lambda: trainer_init(init_info=info, **control),
        "old": lambda: trainer_init("mine", "config", info, **control),
        "old by name": lambda: trainer_init(backend="mine", config=None, init_info=info, **control),
    }[form]()
    assert made.arguments == {"init_info": info, **control}


@pytest.mark.parametrize(
    ("positional", "named"),
    [((), {}), (("mine", InitInfo()), {}), ((InitInfo(),), {"init_info": InitInfo()}), ((), {"config": None})],
)
def test_trainer_init_in_neither_form(positional: tuple[Any, ...], named: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"\(init_info\) or \(backend, config, init_info\)"):
        trainer_init(*positional, **named, client=None)


def test_trainer_init_with_an_unknown_backend(fake_site: FakeSite) -> None:
    with pytest.raises(ValueError, match="Invalid weight transfer backend: mine. Available trainer engines"):
        trainer_init(InitInfo(), client=None)


@pytest.mark.parametrize("derived", [False, True])
def test_the_class_of_the_init_info_ends_a_conflict(fake_site: FakeSite, derived: bool) -> None:
    package = fake_site.transport("acme-weightwire", "nccl")
    info_class = importlib.import_module(f"{package}.trainer").InitInfo
    info = type("Derived", (info_class,), {})() if derived else info_class()
    assert type(trainer_init(info, client=None)).__module__ == f"{package}.trainer"
    InitInfo.backend = "nccl"
    try:
        with pytest.raises(errors.TransportConflict):
            trainer_init(InitInfo(), client=None)
    finally:
        InitInfo.backend = "mine"
