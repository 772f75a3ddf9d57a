"""`Requires-Dist` lines, as far as they decide whether a plugin fits this weightwire.

A small part of PEP 440 and PEP 508: release numbers and the ordinary comparisons. What is beyond it (a URL, a
marker, a pre-release) counts as met, since pip has judged it already; this check only makes a plugin that pip
was not asked about fail with words instead of an ImportError.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import zip_longest

Release = tuple[int, ...]

_REQUIREMENT = re.compile(r"\s*(?P<name>[\w.-]+)\s*(\[[^]]*\])?\s*\(?(?P<specifiers>[^;@)]*)\)?\s*(?P<marker>;.*)?")
_SPECIFIER = re.compile(r"\s*(?P<operator>~=|==|!=|<=|>=|<|>)\s*v?(?P<release>\d+(\.\d+)*)(?P<wildcard>\.\*)?\s*")
_COMPARE: Mapping[str, Callable[[Release, Release], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}


def normalized(name: str) -> str:
    """A distribution's name as PEP 503 compares it: lower case, runs of `-`, `_` and `.` as one `-`."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def unmet(requires: Iterable[str], *, distribution: str, version: str) -> str | None:
    """The first of `requires` that is about `distribution` and that `version` does not meet.

    Args:
        requires: `Requires-Dist` values.
        distribution: Name of the distribution asked about.
        version: The version of it that is installed.
    """
    for line in requires:
        match = _REQUIREMENT.match(line)
        if match is None or match["marker"] or normalized(match["name"]) != normalized(distribution):
            continue
        if not all(_meets(version, specifier) for specifier in match["specifiers"].split(",")):
            return line.strip()
    return None


def _release(text: str) -> Release:
    return tuple(int(part) for part in re.findall(r"\d+", re.match(r"v?[\d.]*", text)[0]))  # type: ignore[index]


def _meets(version: str, specifier: str) -> bool:
    match = _SPECIFIER.fullmatch(specifier)
    if match is None:
        return True
    wanted = _release(match["release"])
    pairs = list(zip_longest(_release(version), wanted, fillvalue=0))
    held, padded = (tuple(side) for side in zip(*pairs, strict=True))
    if match["operator"] == "~=":
        return held >= padded and held[: len(wanted) - 1] == wanted[:-1]
    if match["wildcard"]:
        held, padded = held[: len(wanted)], wanted
    return _COMPARE[match["operator"]](held, padded)
