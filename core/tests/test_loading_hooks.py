"""Each hook, as a plugin answers it: one test of its name for each (tests/test_hooks_documented.py sees to it)."""

from __future__ import annotations

import pytest

from core.tests.fake_site import PLUGIN, FakeSite
from weightwire import discovery, errors, loading
from weightwire.hookspecs import Availability, Role, TransportSpec


def plugin_of(site: FakeSite, text: str = PLUGIN, *, aliases: tuple[str, ...] = ()) -> loading.Plugin:
    site.transport("acme-weightwire", "acme", plugin=text, aliases=aliases)
    (transport,) = discovery.candidates("acme")
    return loading.load(transport)


def test_weightwire_transport(fake_site: FakeSite) -> None:
    plugin = plugin_of(fake_site, aliases=("fast",))
    assert plugin.spec == TransportSpec(backend="acme", aliases=("fast",), api_version=(1, 0), wire_version=1)
    assert plugin.transport.names == {"acme", "fast"}


def test_weightwire_register_worker_engines(fake_site: FakeSite) -> None:
    assert plugin_of(fake_site).engines("worker") == {"acme": ("acme_weightwire.engine", "Engine")}


def test_weightwire_register_trainer_engines(fake_site: FakeSite) -> None:
    assert plugin_of(fake_site).engines("trainer") == {"acme": ("acme_weightwire.trainer", "Engine")}


@pytest.mark.parametrize("role", ["worker", "trainer"])
@pytest.mark.parametrize("hook", ["weightwire_register_worker_engines", "weightwire_register_trainer_engines"])
def test_a_register_hook_that_raises_breaks_its_role(fake_site: FakeSite, role: Role, hook: str) -> None:
    plugin = plugin_of(fake_site, PLUGIN.replace(f"{hook}(register):", f"{hook}(register):\n        1 / 0"))
    if role in hook:
        with pytest.raises(errors.TransportBroken, match=f"{hook} raised ZeroDivisionError"):
            plugin.engines(role)
    else:
        assert plugin.engines(role)
    (transport, _), *_ = loading.survey()
    assert (transport.state, "not as a" in transport.reason) == ("ready", True)


def test_weightwire_available(fake_site: FakeSite) -> None:
    answers = """
    @hookimpl
    def weightwire_available(role):
        return Availability(False, f"no room for a {{role}}", "make room") if role == "worker" else None
    """
    plugin = plugin_of(fake_site, PLUGIN + answers)
    assert plugin.usable("trainer").state == "ready"
    worker = plugin.usable("worker")
    assert (worker.state, worker.reason, worker.remedy) == ("unavailable", "no room for a worker", "make room")


def test_declarations_are_checked_where_they_are_made() -> None:
    fields = {"backend": "acme", "api_version": (1, 0), "wire_version": 1}
    wrong: list[dict[str, object]] = [
        {"backend": ""},
        {"aliases": ["a"]},
        {"api_version": 1},
        {"api_version": (1, 0, 0)},
        {"wire_version": "1"},
        {"capabilities": {"full"}},
    ]
    for field in wrong:
        with pytest.raises(TypeError, match=f"TransportSpec.{next(iter(field))} must be"):
            TransportSpec(**{**fields, **field})  # type: ignore[arg-type]
    for arguments in (("no",), (False, None), (True, "", 3)):
        with pytest.raises(TypeError, match="Availability.* must be"):
            Availability(*arguments)
    with pytest.raises(ValueError, match="needs a reason"):
        Availability(False)
