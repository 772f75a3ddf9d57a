"""Every way in which somebody's transport can be wrong, all on one path: each is named, and none harms another."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import importlib_metadata
import pytest
import torch  # looks at all entry points when it is imported, and would meet the damaged ones

from core.tests.fake_site import PLUGIN, FakeSite
from weightwire import command, discovery, errors, loading
from weightwire.registry import engine_class


def hook(text: str) -> str:
    """A sound plugin with one hook more."""
    return f"{PLUGIN}\n    @hookimpl\n    {text}\n"


def first(text: str) -> str:
    """A sound plugin that does something else first."""
    return f"\n    {text}{PLUGIN}"


def other(old: str, new: str) -> str:
    """A sound plugin but for one place."""
    assert old in PLUGIN
    return PLUGIN.replace(old, new)


@dataclass(frozen=True, slots=True)
class Animal:
    """One transport: how it is wrong, and what has to be said of it."""

    state: str
    words: str = ""
    plugin: str = PLUGIN
    api: tuple[int, int] = (1, 0)
    aliases: tuple[str, ...] = ()
    entries: tuple[str, ...] | None = None
    requires: tuple[str, ...] = ()
    error: type[errors.PluginError] | None = None
    entry_points: bytes = b""

    def build(self, site: FakeSite, name: str) -> None:
        site.transport(
            f"{name}-weightwire",
            name,
            plugin=self.plugin,
            api=self.api,
            aliases=self.aliases,
            entries=self.entries,
            requires=self.requires,
        )
        if self.entry_points:
            (site.root / f"{name}_weightwire-1.0.dist-info" / "entry_points.txt").write_bytes(self.entry_points)


def broken(words: str, plugin: str = PLUGIN, **rest: Any) -> Animal:
    return Animal("broken", words, plugin, error=errors.TransportBroken, **rest)


def incompatible(words: str, plugin: str = PLUGIN, **rest: Any) -> Animal:
    return Animal("incompatible", words, plugin, error=errors.TransportIncompatible, **rest)


def damaged(words: str, line: bytes) -> Animal:
    """Its entry_points.txt cannot be read, so that nobody knows its name; it is listed by its distribution's."""
    return broken(words, entry_points=GROUP + line, requires=("weightwire",))


GROUP = f"[{discovery.GROUP}]\n".encode()
NO_ENGINES = PLUGIN[: PLUGIN.index("    @hookimpl\n    def weightwire_register_w")]
TOMORROW = "\n    @hookimpl(optionalhook=True)\n    def weightwire_tomorrow(): ...\n"

ZOO = {
    "good": Animal("ready"),
    "aliased": Animal("ready", aliases=("nickname",)),
    "fewer": Animal("ready", plugin=hook("def weightwire_available(): ...")),
    "forward": Animal("ready", plugin=PLUGIN + TOMORROW),
    "lazy": Animal("ready", plugin=f"{PLUGIN}\n    def __getattr__(name):\n        raise OSError(name)\n"),
    "chatty": Animal("ready", plugin=first("print('hello')")),
    "importer": broken("No module named 'not_there'", first("import not_there")),
    "exiting": broken("SystemExit(3)", first("import sys; sys.exit(3)")),
    "raising": broken("RuntimeError: no", other("return TransportSpec(", "raise RuntimeError('no')\n        dict(")),
    "unsure": broken("raised OSError: no bus", hook("def weightwire_available(role): raise OSError('no bus')")),
    "truthful": broken("True, not an Availability", hook("def weightwire_available(role): return True")),
    "silent": broken("needs a reason", hook("def weightwire_available(role): return Availability(False)")),
    "misspelt": incompatible("weightwire_register_worker_engine", other("worker_engines", "worker_engine")),
    "greedy": incompatible("moon_phase", hook("def weightwire_available(role, moon_phase): ...")),
    "older": incompatible("API 0.9", api=(0, 9)),
    "newer": incompatible("API 1.1", api=(1, 1)),
    "future": incompatible("requires 'weightwire~=7.0'", requires=("weightwire~=7.0",)),
    "thief": broken("'nccl' is not this transport's", other("register({backend!r}", "register('nccl'")),
    "liar": broken("declares ['liar']", entries=("liar", "lie")),
    "listed": broken("aliases must be a tuple of names", other("aliases={aliases!r}", "aliases='ab'")),
    "versionless": broken("api_version must be two integers", other("{api!r}", "'1.0'")),
    "stale": broken("No module named 'gone_away'", entry_points=GROUP + b"stale = gone_away.plugin"),
    "pointless": broken("which is no module", entry_points=GROUP + b"pointless = not a module!"),
    "torn-weightwire": damaged("entry_points.txt cannot be read", b"torn"),
    "garbled-weightwire": damaged("UnicodeDecodeError", b"\xff = x"),
    "mute": Animal("unavailable", "it has no", NO_ENGINES),
}


@pytest.fixture
def zoo(fake_site: FakeSite) -> FakeSite:
    for name, animal in ZOO.items():
        animal.build(fake_site, name.removesuffix("-weightwire"))
    for distribution in ("twin-a", "twin-b"):
        fake_site.transport(distribution, "twin")
    discovery.refresh()
    return fake_site


@pytest.fixture
def listed(zoo: FakeSite, capsys: pytest.CaptureFixture[str]) -> dict[str, list[dict[str, str]]]:
    """`weightwire plugins --json` by name."""
    assert command.main(["plugins", "--json"]) == 0
    found: dict[str, list[dict[str, str]]] = {}
    for one in json.loads(capsys.readouterr().out)["transports"]:
        found.setdefault(one["name"], []).append(one)
    return found


def test_every_one_is_listed_with_its_state_and_its_reason(listed: dict[str, list[dict[str, str]]]) -> None:
    assert {name: one["state"] for name, (one, *_) in listed.items()} == {
        "nccl": "ready",
        "twin": "conflict",
        **{name: animal.state for name, animal in ZOO.items()},
    }
    for name, animal in ZOO.items():
        (one,) = listed[name]
        assert animal.words in one["reason"], one
        assert bool(one["reason"]) == (animal.state != "ready")
        if animal.state not in ("ready", "unavailable"):
            assert one["remedy"], one
    assert [one["distribution"] for one in listed["twin"]] == ["twin-a", "twin-b"]


def test_asking_gives_the_sound_ones_and_the_reasons_of_the_others(zoo: FakeSite) -> None:
    for name, animal in ZOO.items():
        if animal.state == "ready":
            assert engine_class("worker", name).__module__ == f"{name}_weightwire.engine"
            assert engine_class("trainer", name).__module__ == f"{name}_weightwire.trainer"
        elif animal.error is not None:
            with pytest.raises(animal.error) as raised:
                engine_class("worker", name)
            assert f"{name.removesuffix('-weightwire')}-weightwire 1.0" in str(raised.value)
            assert animal.words in str(raised.value)
    assert engine_class("worker", "nccl").__module__ == "weightwire_nccl.engine", "a name cannot be stolen"


def test_doctor_says_what_would_help(zoo: FakeSite, capsys: pytest.CaptureFixture[str]) -> None:
    for name, animal in ZOO.items():
        assert command.main(["doctor", name]) == (animal.state != "ready")
        words = capsys.readouterr().out
        assert f"{animal.state}\n" in words
        assert animal.words in words
        assert torch.__version__ in words
        assert "Traceback" not in words or animal.state in ("broken", "incompatible")


def test_an_alias_and_a_qualified_name_among_all_the_others(zoo: FakeSite) -> None:
    assert engine_class("worker", "nickname").__module__ == "aliased_weightwire.engine"
    assert engine_class("worker", "twin-b:twin").__module__ == "twin_b.engine"
    with pytest.raises(errors.TransportConflict, match='"twin-a:twin" or "twin-b:twin"'):
        engine_class("worker", "twin")


def test_what_cannot_be_read_can_be_switched_off(fake_site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTWIRE_STRICT", "1")
    ZOO["torn-weightwire"].build(fake_site, "torn")
    discovery.refresh()
    with pytest.raises(errors.TransportBroken, match="reinstall torn-weightwire"):
        engine_class("worker", "nccl")
    monkeypatch.setenv("WEIGHTWIRE_DISABLE", "torn-weightwire")
    discovery.refresh()
    assert engine_class("worker", "nccl")


def test_a_slow_module_is_named_and_holds_up_nobody_else(
    fake_site: FakeSite, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = fake_site.transport("slow-weightwire", "slow", plugin=first("import time; time.sleep(0.2)"))
    engine_class("worker", "nccl")
    discovery.transports()
    assert package not in sys.modules
    monkeypatch.setattr(loading, "SLOW_SECONDS", 0.1)
    assert command.main(["doctor", "slow"]) == 0
    assert re.search(r"its module took \d+\.\d s to import", capsys.readouterr().out)


def test_looking_twice_reads_the_metadata_once(fake_site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []
    points: Callable[..., object] = importlib_metadata.entry_points

    def counted(**selection: str) -> object:
        looks.append(selection.get("group", "all"))
        return points(**selection)

    monkeypatch.setattr(importlib_metadata, "entry_points", counted)
    discovery.refresh()
    for _ in range(3):
        discovery.transports()
        discovery.candidates("nccl")
    assert sorted(looks) == ["all", discovery.GROUP]
    discovery.refresh()
    discovery.transports()
    assert len(looks) == 4


def test_a_plugin_that_looks_for_transports_while_it_is_looked_for(fake_site: FakeSite) -> None:
    asking = "from weightwire.discovery import transports; FOUND = transports()"
    fake_site.transport("asking-weightwire", "asking", plugin=first(asking))
    assert engine_class("worker", "asking")


def test_a_new_process_finds_what_this_one_does(fake_site: FakeSite) -> None:
    fake_site.transport("acme-weightwire", "acme")
    code = "from weightwire.registry import engine_class; print(engine_class('worker', 'acme').__module__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(fake_site.root)},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.stdout == "acme_weightwire.engine\n", done.stderr


def test_a_folder_that_only_looks_like_an_installation(fake_site: FakeSite) -> None:
    (fake_site.root / "ghost_weightwire-1.0.dist-info").mkdir()
    discovery.refresh()
    assert [one.name for one in discovery.transports()] == ["nccl"]
