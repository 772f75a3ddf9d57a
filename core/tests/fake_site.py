"""Distributions that exist only as folders on `sys.path`, for tests of discovery; nothing is installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

import importlib_metadata
import pytest

from weightwire import discovery, loading, registry

_HIDDEN = set(discovery.FIRST_PARTY.values()) - {"weightwire-nccl"}

PLUGIN = """
    from weightwire.hookspecs import Availability, TransportSpec, hookimpl

    @hookimpl
    def weightwire_transport():
        return TransportSpec(backend={backend!r}, aliases={aliases!r}, api_version={api!r}, wire_version=1)

    @hookimpl
    def weightwire_register_worker_engines(register):
        register({backend!r}, "{package}.engine", "Engine")

    @hookimpl
    def weightwire_register_trainer_engines(register):
        register({backend!r}, "{package}.trainer", "Engine")
"""

ENGINE = """
    class Engine:
        def __init__(self, *arguments):
            self.arguments = arguments

        @classmethod
        def trainer_init(cls, init_info, *, client, source):
            return cls(init_info, client, source)

    class InitInfo:
        backend = {backend!r}
"""


class FakeSite:
    """A folder on `sys.path` that looks like a site-packages."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules: set[str] = set()

    def module(self, name: str, text: str) -> None:
        """Write module `name` (dotted); its packages are made on the way."""
        *packages, leaf = name.split(".")
        folder = self.root
        for package in packages:
            folder = folder / package
            folder.mkdir(exist_ok=True)
            (folder / "__init__.py").touch()
        (folder / f"{leaf}.py").write_text(dedent(text))
        self.modules.add(name.split(".")[0])

    def distribution(
        self,
        name: str,
        entries: Mapping[str, Mapping[str, str]],
        *,
        version: str = "1.0",
        requires: tuple[str, ...] = (),
        root: Path | None = None,
    ) -> Path:
        """Write the metadata of a distribution; `entries` is group to name to value."""
        folder = (root or self.root) / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(parents=True)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        (folder / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {one}" for one in requires), ""]))
        sections = [
            f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in points.items())
            for group, points in entries.items()
        ]
        (folder / "entry_points.txt").write_text("\n".join(sections))
        discovery.refresh()
        return folder

    def transport(
        self,
        distribution: str,
        backend: str,
        *,
        aliases: tuple[str, ...] = (),
        api: tuple[int, int] = (1, 0),
        plugin: str = PLUGIN,
        entries: tuple[str, ...] | None = None,
        requires: tuple[str, ...] = (),
    ) -> str:
        """Write a whole transport and return its package's name."""
        package = distribution.lower().replace("-", "_").replace(".", "_")
        self.module(f"{package}.engine", ENGINE.format(backend=backend))
        self.module(f"{package}.trainer", ENGINE.format(backend=backend))
        text = plugin.format(backend=backend, aliases=aliases, api=api, package=package)
        self.module(f"{package}.plugin", text)
        names = (backend, *aliases) if entries is None else entries
        points = dict.fromkeys(names, f"{package}.plugin")
        self.distribution(distribution, {discovery.GROUP: points}, requires=requires)
        return package


def _is_hidden(distribution: Any) -> bool:
    try:
        return distribution.metadata["Name"] in _HIDDEN
    except importlib_metadata.MetadataNotFound:
        return False


@pytest.fixture
def fake_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSite]:
    """A fake site on `sys.path`, no variable set, empty tables; everything is as before afterwards.

    Of weightwire's own transports `nccl` is installed, and no other, whatever this environment has.
    """
    everything = importlib_metadata.distributions

    def distributions(**context: Any) -> Iterator[Any]:
        return (one for one in everything(**context) if not _is_hidden(one))

    monkeypatch.setattr(importlib_metadata, "distributions", distributions)
    for variable in ("WEIGHTWIRE_PLUGINS", "WEIGHTWIRE_DISABLE", "WEIGHTWIRE_STRICT"):
        monkeypatch.delenv(variable, raising=False)
    for table in registry._tables.values():
        monkeypatch.setattr(table, "loaders", {})
    monkeypatch.setattr(loading, "_loaded", {})
    site = FakeSite(tmp_path / "site")
    site.root.mkdir()
    monkeypatch.syspath_prepend(site.root)
    discovery.refresh()
    yield site
    for name in list(sys.modules):
        if name.split(".")[0] in site.modules:
            del sys.modules[name]
    monkeypatch.undo()
    discovery.refresh()
