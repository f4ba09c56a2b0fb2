"""Plots; the only module that needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from distopt.cli.bench import Row
from distopt.errors import MissingDependencyError

from .models.scaling import Prediction


def require_matplotlib() -> None:
    """Local. Check for matplotlib before the measurement, rather than after it.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise MissingDependencyError('--plot needs matplotlib: pip install "distopt[plot]"')


def new_figure(columns: int = 1, size: tuple[float, float] = (8, 5)) -> tuple[Any, Any]:
    """A figure with so many pairs of axes side by side, drawn without a display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(1, columns, sharey=True)


def finish(figure: Any, axes: Any, path: Path) -> None:
    """Give the axes powers of two, a grid and a legend, and save the figure."""
    axes.set_xscale("log", base=2)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def plot_bandwidths(rows: list[Row], path: Path) -> None:
    """Plot algorithm bandwidth against size, one line for each candidate and kind of memory."""
    figure, axes = new_figure()
    colours: dict[str, str] = {}
    for who, buffers in dict.fromkeys((row.who, row.buffers) for row in rows):
        points = [row for row in rows if (row.who, row.buffers) == (who, buffers)]
        second = who in colours
        colour = colours.setdefault(who, "black" if who == "floor" else f"C{len(colours)}")
        axes.plot(
            [row.size_bytes for row in points],
            [row.algorithm_bandwidth / 1e9 for row in points],
            color=colour,
            marker="s" if second else "o",
            linestyle="--" if second else "-",
            label=f"{who}, {buffers}",
        )
    axes.set(
        yscale="log",
        xlabel="bytes",
        ylabel="algorithm bandwidth (GB/s)",
        title=f"{rows[0].collective}, {rows[0].world_size} ranks, {rows[0].dtype}",
    )
    finish(figure, axes, path)


def plot_efficiencies(predictions: list[Prediction], path: Path, network: str) -> None:
    """Plot efficiency against ranks: a band per strategy, from no communication hidden to as much as possible."""
    figure, axes = new_figure()
    for strategy in dict.fromkeys(prediction.strategy for prediction in predictions):
        points = [prediction for prediction in predictions if prediction.strategy == strategy]
        ranks = [point.ranks for point in points]
        exposed, hidden = ([100 * point.efficiency[index] for point in points] for index in (0, 1))
        (line,) = axes.plot(ranks, exposed, marker="o", label=strategy)
        axes.fill_between(ranks, exposed, hidden, color=line.get_color(), alpha=0.15)
    axes.set(xlabel="ranks", ylabel="predicted scaling efficiency (%)", title=network, ylim=(0, None))
    finish(figure, axes, path)


def plot_errors(errors: dict[str, Sequence[float]], labels: dict[str, str], path: Path) -> None:
    """Plot the test error (%) after each epoch, by codec: those named "...-bare" in a panel of their own, fp32 in both."""
    figure, panels = new_figure(2, (11, 4.5))
    for axes, title, bare in zip(panels, ("dense, and error feedback", "no feedback"), (False, True), strict=True):
        for name, error in errors.items():
            if name == "fp32" or name.endswith("-bare") == bare:
                style = {"color": "black", "linewidth": 2} if name == "fp32" else {"linewidth": 1}
                axes.plot(range(1, len(error) + 1), error, label=labels[name], **style)
        axes.set(title=title, xlabel="epoch", yscale="log")
        axes.legend(fontsize=7)
        axes.grid(visible=True, which="both", alpha=0.3)
    panels[0].set_ylabel("test error (%)")
    figure.savefig(path, dpi=110)
