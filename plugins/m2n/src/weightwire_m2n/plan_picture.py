"""A plan as a picture: who sends how much to whom, and one parameter on both sides."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from weightwire.errors import MessageError, Unsupported
from weightwire.resharding.planner import Plan
from weightwire.resharding.source_layout import Integers
from weightwire_m2n.parameter_raster import (
    Projection,
    Shares,
    cells_at,
    most_telling,
    readers,
    share_read,
)
from weightwire_m2n.plan_report import PlanReport, shown_bytes, shown_ranks, shown_seconds

_MOST_WRITTEN: Final = 48
_MOST_PANELS: Final = 8
_LONGEST: Final = 60
_PALE: Final = np.array([0.93, 0.93, 0.93])


def figure_class() -> Any:
    """Matplotlib's `Figure`; it draws without a display.

    Raises:
        Unsupported: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise Unsupported("a picture needs matplotlib: pip install 'weightwire-m2n[plot]'") from None
    return Figure


def draw(path: str | os.PathLike[str], plan: Plan, found: PlanReport, name: str | None = None) -> None:
    """Draw the traffic between all ranks, and one parameter, into a PNG file.

    Args:
        path: Of the file.
        plan: Of all ranks.
        found: What it costs.
        name: Of the parameter; by default the largest that is sharded on either side.

    Raises:
        MessageError: There is no such parameter, or the file cannot be written.
        Unsupported: matplotlib is not installed.
    """
    parameter = most_telling(plan) if name is None else _index(plan, name)
    figure = figure_class()(figsize=(14, 7.5), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08)
    figure.suptitle(
        f"{len(found.sent)} trainer rank{'s' * (len(found.sent) > 1)} to {len(found.received)} worker "
        f"rank{'s' * (len(found.received) > 1)}: {shown_bytes(found.wire)} on the wire, {found.ratio:.4f} times the "
        f"lower bound; {shown_seconds(found.estimated_seconds)} at {found.speed:g} GiB/s a rank"
    )
    left, right = figure.subfigures(1, 2, wspace=0.04)
    _traffic(left.subplots(), plan.traffic())
    if parameter is not None:
        _parameter(right, plan, parameter)
    try:
        figure.savefig(path, format="png", dpi=110)
    except OSError as error:
        raise MessageError(f"{path} cannot be written: {error.strerror or error}") from None


def _index(plan: Plan, name: str) -> int:
    names = [layout.name for layout in plan.layouts]
    if name in names:
        index = names.index(name)
        if not math.prod(plan.layouts[index].shape):
            raise MessageError(f"parameter {name!r} has no elements to draw")
        return index
    close = difflib.get_close_matches(name, names, n=1)
    raise MessageError(f"there is no parameter {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))


def _traffic(axes: Any, traffic: Integers) -> None:
    """The bytes of each pair as a heat map."""
    from matplotlib.ticker import MaxNLocator

    power = min(4, max(0, (int(traffic.max()).bit_length() - 1) // 10))
    shown = np.ma.masked_equal(traffic, 0) / 1024**power
    axes.set_facecolor("0.93")
    image = axes.imshow(
        shown, cmap="YlGnBu", vmin=0, vmax=traffic.max() / 1024**power or 1, aspect="auto", interpolation="nearest"
    )
    unit = ("bytes", "KiB", "MiB", "GiB", "TiB")[power]
    axes.figure.colorbar(image, ax=axes, label=f"{unit} for a pair of ranks", pad=0.02)
    idle = "; grey: nothing" if not traffic.all() else ""
    axes.set(title=f"Traffic{idle}", xlabel="worker rank", ylabel="trainer rank")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if max(traffic.shape) <= 32:
        for size, line in zip(traffic.shape, (axes.axhline, axes.axvline), strict=True):
            for index in range(1, size):
                line(index - 0.5, color="white", linewidth=1)
    if traffic.size <= _MOST_WRITTEN and traffic.shape[0] <= 24 and traffic.shape[1] <= 8:
        for trainer, worker in np.argwhere(traffic).tolist():
            nbytes = int(traffic[trainer, worker])
            color = "white" if nbytes > 0.6 * traffic.max() else "black"
            axes.text(worker, trainer, shown_bytes(nbytes), ha="center", va="center", color=color)


def _parameter(figure: Any, plan: Plan, parameter: int) -> None:
    """The cells with the ranks that hold them, above what each kind of worker rank reads."""
    layout, instance = plan.layouts[parameter], plan.instances[parameter]
    cells = instance.of.cells
    projection = Projection.of(layout.shape, cells)
    samples = projection.samples()
    owners = cells_at(samples[0], layout.shape, cells)
    colors = _colors(len(cells))
    above, below = figure.subfigures(2, 1, height_ratios=(1, 1.1), hspace=0.04)
    figure.suptitle(
        f"{_short(layout.name)} [{_shape(layout.shape)}], {shown_bytes(math.prod(layout.shape) * layout.itemsize)}",
        fontsize="medium",
    )
    axes = above.subplots()
    _tensor(axes, projection, colors[owners])
    held = [shown_ranks(group) for group in instance.groups]
    some = _label(axes, owners, projection, held)
    parts = f"{len(cells)} cell{'s' * (len(cells) > 1)}, and which ranks hold {'them' if len(cells) > 1 else 'it'}"
    axes.set_title(f"On the trainers: {parts}{some}", fontsize="medium")
    if not projection.down:
        axes.set_yticks([])
    axes.set(ylabel=_dimensions(layout.shape, 0, projection.down), xlabel=_dimensions(layout.shape, projection.down))
    _workers(below, plan, parameter, projection, samples, colors[owners])


def _colors(cells: int) -> Shares:
    """A color for each cell, as red, green and blue."""
    from matplotlib import colormaps

    if cells <= 10:
        return np.array(colormaps["tab10"](range(cells)))[:, :3]
    return np.array(colormaps["turbo"](np.linspace(0.08, 0.92, cells)))[:, :3]


def _tensor(axes: Any, projection: Projection, pixels: Shares) -> None:
    rows, columns = projection.extents
    axes.imshow(pixels, extent=(0, columns, rows, 0), aspect="auto", interpolation="nearest")
    axes.xaxis.set_major_locator(_ticks())
    axes.yaxis.set_major_locator(_ticks())


def _ticks() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=5, integer=True, min_n_ticks=1)


def _label(axes: Any, owners: Integers, projection: Projection, words: Sequence[str]) -> str:
    """Write each cell's word in its middle, as far as there is room; returns what to say if there is not."""
    rows, columns = owners.shape
    taken: list[tuple[float, float, int]] = []
    for cell, word in enumerate(words):
        where = np.argwhere(owners == cell) + 0.5
        if not len(where):
            continue
        middle = where.mean(axis=0)
        y, x = where[np.abs(where - middle).sum(axis=1).argmin()] if _scattered(where) else middle
        y, x = y / rows, x / columns
        if not 0.04 < y < 0.96:
            continue
        x = min(max(x, 0.006 * len(word) + 0.01), 1 - 0.006 * len(word) - 0.01)
        if all(abs(y - v) > 0.12 or abs(x - u) > 0.0068 * (len(word) + size) + 0.02 for v, u, size in taken):
            taken.append((y, x, len(word)))
            at = {"x": x, "y": 1 - y, "s": word, "transform": axes.transAxes, "fontsize": "small"}
            axes.text(**at, ha="center", va="center", bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5})
    return "" if len(taken) == len(words) else f" ({len(taken)} labelled)"


def _scattered(where: NDArray[Any]) -> bool:
    """Whether pixels are no rectangle."""
    extent = where.max(axis=0) - where.min(axis=0) + 1
    return bool(extent.prod() != len(where))


def _workers(
    figure: Any, plan: Plan, parameter: int, projection: Projection, samples: Sequence[Integers], pixels: Shares
) -> None:
    """A small copy of the tensor for each kind of worker rank, with what it reads in the colors of the cells."""
    found = list(readers(plan, parameter).items())
    idle = len(plan.workers.plan_of) - sum(len(of) for _, of in found)
    title = "On the workers: what is read of it (grey: not)" if found else "No worker rank reads it"
    title += f"; {idle} rank{' reads' if idle == 1 else 's read'} nothing" if idle and found else ""
    title += f"; {len(found) - _MOST_PANELS} more kinds of rank" if len(found) > _MOST_PANELS else ""
    figure.suptitle(title, fontsize="medium")
    shown = found[:_MOST_PANELS]
    if not shown:
        return
    across = min(len(shown), 4)
    panels = figure.subplots(-(-len(shown) // across), across, squeeze=False).flat
    for axes, (regions, of) in zip(panels, shown, strict=False):
        share = share_read(regions, samples)[:, :, None]
        _tensor(axes, projection, pixels * share + _PALE * (1 - share))
        axes.set(xticks=[], yticks=[])
        axes.set_title(f"rank{'s' * (len(of) > 1)} {shown_ranks(of)}", fontsize="small")
    for axes in panels:
        axes.set_axis_off()


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(f"{size:,}" for size in shape)


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST // 3]}...{name[-2 * _LONGEST // 3 :]}"


def _dimensions(shape: Sequence[int], first: int, stop: int | None = None) -> str:
    """The label of an axis that shows dimensions `first` to `stop`."""
    sizes = shape[first:stop]
    if not sizes:
        return ""
    dims = f"dim {first}" if len(sizes) == 1 else f"dims {first}-{first + len(sizes) - 1}"
    return f"{dims} ({_shape(sizes)})"
