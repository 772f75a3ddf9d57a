from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet

from weightwire.requirements import normalized, unmet

releases = st.lists(st.integers(0, 3), min_size=1, max_size=4).map(lambda parts: ".".join(map(str, parts)))
long_releases = releases.filter(lambda release: "." in release)
specifiers = st.one_of(
    st.tuples(st.sampled_from(["==", "!=", "<=", ">=", "<", ">"]), releases).map("".join),
    long_releases.map(lambda release: f"~={release}"),
    st.tuples(st.sampled_from(["==", "!="]), releases).map(lambda pair: f"{pair[0]}{pair[1]}.*"),
)


@given(version=releases, parts=st.lists(specifiers, min_size=1, max_size=3), space=st.sampled_from(["", " "]))
def test_agrees_with_packaging_on_releases(version: str, parts: list[str], space: str) -> None:
    line = f"weightwire{space}{f'{space},'.join(parts)}"
    met = unmet([line], distribution="weightwire", version=version) is None
    assert met == SpecifierSet(",".join(parts)).contains(version)


@pytest.mark.parametrize(
    "line",
    [
        "weightwire",
        "weightwire ~=0.1",
        "weightwire[nccl] (>=0.1,<1)",
        "weightwire>=7; extra == 'future'",
        "weightwire @ https://example.org/weightwire.whl",
        "weightwire===0.1.0.custom",
        "weightwire-nccl>=7",
    ],
)
def test_met_or_beyond_it(line: str) -> None:
    assert unmet([line], distribution="weightwire", version="0.1.0") is None


def test_the_first_unmet_line_is_named() -> None:
    lines = ["torch", "WeightWire>=0.2 ", "weightwire<0.1"]
    assert unmet(lines, distribution="weightwire", version="0.1.0rc1") == "WeightWire>=0.2"


def test_names_compare_as_pep_503_says() -> None:
    assert normalized(" Acme._-Weightwire") == normalized("acme-weightwire") == "acme-weightwire"
