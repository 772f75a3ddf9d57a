from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from core.tests.fake_site import PLUGIN, FakeSite
from weightwire import discovery, errors, loading
from weightwire.discovery import Transport
from weightwire.registry import engine_class


def survey() -> dict[str, Transport]:
    return {transport.qualified: transport for transport, _ in loading.survey()}


def test_installed_nccl_is_found_and_ready(fake_site: FakeSite) -> None:
    found = survey()["weightwire-nccl:nccl"]
    assert (found.state, found.version, found.aliases) == ("ready", "0.1.0", ())


def test_looking_imports_nothing(fake_site: FakeSite) -> None:
    package = fake_site.transport("acme-weightwire", "acme")
    assert [one.state for one in discovery.candidates("acme")] == ["found"]
    assert package not in sys.modules
    assert engine_class("worker", "acme").__module__ == f"{package}.engine"


def test_one_lookup_loads_one_plugin(fake_site: FakeSite) -> None:
    fake_site.transport("acme-weightwire", "acme")
    other = fake_site.transport("other-weightwire", "other")
    engine_class("worker", "acme")
    assert other not in sys.modules


def test_alias_is_the_same_transport(fake_site: FakeSite) -> None:
    fake_site.transport("acme-weightwire", "a", aliases=("acme_long", "b"))
    found = survey()["acme-weightwire:a"]
    assert (found.name, set(found.aliases), found.state) == ("a", {"acme_long", "b"}, "ready")
    assert engine_class("worker", "b") is engine_class("worker", "acme-weightwire:acme_long")


def test_each_plugin_answers_for_itself(fake_site: FakeSite) -> None:
    refusing = """
    @hookimpl
    def weightwire_available(role):
        return Availability(False, "nobody may use {backend}", "wait")
    """
    fake_site.transport("acme-weightwire", "acme")
    fake_site.transport("other-weightwire", "other", plugin=PLUGIN + refusing)
    assert survey()["acme-weightwire:acme"].state == "ready"
    stuck = survey()["other-weightwire:other"]
    assert (stuck.state, stuck.reason, stuck.remedy) == ("unavailable", "nobody may use other", "wait")
    with pytest.raises(errors.TransportUnavailable, match="nobody may use other.*wait"):
        engine_class("worker", "other")


def test_available_for_one_role_only(fake_site: FakeSite) -> None:
    worker_only = """
    @hookimpl
    def weightwire_available(role):
        return Availability(role == "worker", "it only receives")
    """
    fake_site.transport("acme-weightwire", "acme", plugin=PLUGIN + worker_only)
    found = survey()["acme-weightwire:acme"]
    assert (found.state, found.reason) == ("ready", "not as a trainer: it only receives")
    assert engine_class("worker", "acme")
    with pytest.raises(errors.TransportUnavailable, match="it only receives"):
        engine_class("trainer", "acme")


BROKEN = {
    "import": ("import a_module_that_is_not_there", "No module named 'a_module_that_is_not_there'"),
    "raises": ("1 / 0", "ZeroDivisionError"),
    "no hook": ("x = 1", "answered None, not a TransportSpec"),
    "other type": (
        PLUGIN.replace("return TransportSpec(", "return dict("),
        "not a TransportSpec",
    ),
    "hook raises": (PLUGIN.replace("return TransportSpec(", "raise ValueError("), "raised TypeError"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_plugin_is_data_until_asked_for(fake_site: FakeSite, case: str) -> None:
    text, words = BROKEN[case]
    fake_site.transport("acme-weightwire", "acme", plugin=text)
    fake_site.transport("fine-weightwire", "fine")
    stuck = survey()["acme-weightwire:acme"]
    assert stuck.state == "broken"
    assert words in stuck.reason
    assert survey()["fine-weightwire:fine"].state == "ready"
    with pytest.raises(errors.TransportBroken, match="acme-weightwire 1.0") as raised:
        engine_class("worker", "acme")
    assert isinstance(raised.value, ImportError)
    assert raised.value.__cause__ is not None


def test_mended_plugin_loads_without_refresh(fake_site: FakeSite) -> None:
    package = fake_site.transport("acme-weightwire", "acme", plugin="1 / 0")
    assert survey()["acme-weightwire:acme"].state == "broken"
    fake_site.module(f"{package}.plugin", PLUGIN.format(backend="acme", aliases=(), api=(1, 0), package=package))
    assert survey()["acme-weightwire:acme"].state == "ready"


def test_names_must_match_the_entry_points(fake_site: FakeSite) -> None:
    fake_site.transport("acme-weightwire", "acme", entries=("acme", "acne"))
    stuck = survey()["acme-weightwire:acme"]
    assert stuck.state == "broken"
    assert "['acme'] and its entry points say ['acme', 'acne']" in stuck.reason


def test_engine_that_cannot_be_imported(fake_site: FakeSite) -> None:
    package = fake_site.transport("acme-weightwire", "acme")
    fake_site.module(f"{package}.engine", "raise OSError('no driver')")
    with pytest.raises(errors.TransportBroken, match="worker engine acme_weightwire.engine:Engine.*no driver"):
        engine_class("worker", "acme")


@pytest.mark.parametrize("api", [(2, 0), (0, 9), (1, 1)])
def test_other_api_is_incompatible(fake_site: FakeSite, api: tuple[int, int]) -> None:
    fake_site.transport("acme-weightwire", "acme", api=api)
    stuck = survey()["acme-weightwire:acme"]
    assert (stuck.state, stuck.remedy) == ("incompatible", "pip install --upgrade weightwire acme-weightwire")
    assert f"API {api[0]}.{api[1]}, this weightwire has API 1.0" in stuck.reason
    with pytest.raises(errors.TransportIncompatible):
        engine_class("worker", "acme")


@pytest.mark.parametrize(
    "hook", ["def weightwire_of_tomorrow(): ...", "def weightwire_available(role, moon_phase): ..."]
)
def test_unknown_hook_or_argument_is_incompatible(fake_site: FakeSite, hook: str) -> None:
    fake_site.transport("acme-weightwire", "acme", plugin=f"{PLUGIN}\n    @hookimpl\n    {hook}\n")
    assert survey()["acme-weightwire:acme"].state == "incompatible"


def test_requirement_is_checked_before_the_import(fake_site: FakeSite) -> None:
    package = fake_site.transport("acme-weightwire", "acme", requires=("torch", "weightwire>=7"))
    stuck = survey()["acme-weightwire:acme"]
    assert stuck.state == "incompatible"
    assert "requires 'weightwire>=7' and weightwire 0.1.0 is installed" in stuck.reason
    assert package not in sys.modules


def test_conflict_names_both_and_the_way_out(fake_site: FakeSite) -> None:
    fake_site.transport("Acme.Weightwire", "nccl")
    found = survey()
    assert found["acme-weightwire:nccl"].state == found["weightwire-nccl:nccl"].state == "conflict"
    with pytest.raises(errors.TransportConflict) as raised:
        engine_class("worker", "nccl")
    words = str(raised.value)
    assert "acme-weightwire 1.0" in words
    assert "weightwire-nccl 0.1.0" in words
    assert '"acme-weightwire:nccl"' in words
    for qualified in ("acme-weightwire:nccl", "Acme_Weightwire:nccl"):
        assert engine_class("worker", qualified).__module__ == "acme_weightwire.engine"


def test_conflict_over_one_alias_leaves_the_other_names(fake_site: FakeSite) -> None:
    fake_site.transport("acme-weightwire", "acme", aliases=("fast",))
    fake_site.transport("other-weightwire", "other", aliases=("fast",))
    assert engine_class("worker", "acme").__module__ == "acme_weightwire.engine"
    with pytest.raises(errors.TransportConflict, match="'fast' is declared by"):
        engine_class("worker", "fast")


def test_qualified_name_does_not_pass_over_other_checks(fake_site: FakeSite) -> None:
    fake_site.transport("acme-weightwire", "nccl", requires=("weightwire>=7",))
    with pytest.raises(errors.TransportIncompatible):
        engine_class("worker", "acme-weightwire:nccl")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("WEIGHTWIRE_PLUGINS", " weightwire_nccl , something-else"),
        ("WEIGHTWIRE_DISABLE", "acme-weightwire:nccl"),
        ("WEIGHTWIRE_DISABLE", "Acme.Weightwire"),
        ("WEIGHTWIRE_DISABLE", "*"),
    ],
)
def test_variables_end_a_conflict(
    fake_site: FakeSite, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    package = fake_site.transport("acme-weightwire", "nccl")
    found = survey()
    assert found["acme-weightwire:nccl"].state == "disabled"
    assert variable in found["acme-weightwire:nccl"].reason
    assert found["weightwire-nccl:nccl"].state == "ready"
    assert package not in sys.modules
    with pytest.raises(errors.TransportDisabled, match=variable):
        engine_class("worker", "acme-weightwire:nccl")


def test_empty_list_of_plugins_allows_none(fake_site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTWIRE_PLUGINS", "")
    discovery.refresh()
    assert {one.state for one in discovery.transports()} == {"disabled"}


def test_disabling_an_alias_disables_the_transport(fake_site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTWIRE_DISABLE", "fast")
    fake_site.transport("acme-weightwire", "acme", aliases=("fast",))
    with pytest.raises(errors.TransportDisabled):
        engine_class("worker", "acme")


def test_exact_duplicates_are_one(fake_site: FakeSite, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = fake_site.transport("acme-weightwire", "acme")
    twin = tmp_path / "twin"
    fake_site.distribution("Acme_Weightwire", {discovery.GROUP: {"acme": f"{package}.plugin"}}, root=twin)
    monkeypatch.syspath_prepend(twin)
    discovery.refresh()
    assert [one.state for one in discovery.candidates("acme")] == ["found"]


def test_one_distribution_that_declares_a_name_twice(fake_site: FakeSite) -> None:
    package = fake_site.transport("acme-weightwire", "acme")
    file = fake_site.root / "acme_weightwire-1.0.dist-info" / "entry_points.txt"
    file.write_text(f"[{discovery.GROUP}]\nacme = {package}.plugin\nacme = {package}.old\n")
    discovery.refresh()
    with pytest.raises(errors.TransportConflict, match="reinstall that distribution"):
        engine_class("worker", "acme")


def test_what_an_interrupted_pip_leaves_is_no_distribution(fake_site: FakeSite) -> None:
    package = fake_site.transport("acme-weightwire", "acme")
    (fake_site.root / f"{package}-1.0.dist-info" / "METADATA").unlink()
    discovery.refresh()
    assert discovery.candidates("acme") == ()


def test_refresh_sees_what_was_installed_since(fake_site: FakeSite) -> None:
    before = discovery.transports()
    fake_site.transport("acme-weightwire", "acme")
    assert {one.name for one in discovery.transports()} - {one.name for one in before} == {"acme"}


STRICT: list[tuple[dict[str, Any], type[errors.PluginError]]] = [
    ({"backend": "nccl"}, errors.TransportConflict),
    ({"backend": "acme", "plugin": "1 / 0"}, errors.TransportBroken),
    ({"backend": "acme", "api": (2, 0)}, errors.TransportIncompatible),
    ({"backend": "acme", "plugin": PLUGIN.replace("register({backend!r}", "register('other'")}, errors.TransportBroken),
]


@pytest.mark.parametrize(("options", "error"), STRICT)
def test_strict_raises_for_a_transport_nobody_asked_for(
    fake_site: FakeSite,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    error: type[errors.PluginError],
) -> None:
    fake_site.transport("acme-weightwire", **options)
    fake_site.transport("fine-weightwire", "fine")
    assert engine_class("worker", "fine")
    monkeypatch.setenv("WEIGHTWIRE_STRICT", "1")
    with pytest.raises(error):
        engine_class("worker", "fine")
