"""How the figures look: one colour for one way of decoding, wherever it stands."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLAIN, AUTOREGRESSIVE, DSPARK, OFF = "#8b9199", "#d2822a", "#2b6cb0", "#7fb0dd"
GOOD, BAD, INK, FAINT = "#2f8f5b", "#c4493a", "#24292f", "#d5d9de"
UNDRAFTED = "#5d9a94"
COLOURS = {"plain": PLAIN, "undrafted": UNDRAFTED, "autoregressive": AUTOREGRESSIVE, "dspark": DSPARK}
NAMES = {
    "plain": "plain (transformers)",
    "undrafted": "plain (dspark-fast)",
    "autoregressive": "autoregressive drafter",
    "dspark": "DSpark",
}

DPI = 130
UNCROSSED = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # a text's box: no grid line runs through it


def check_plots() -> None:
    """Whether figures can be drawn, before minutes of measuring.

    Raises:
        ImportError: without matplotlib, naming the extra.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError('the report\'s figures need matplotlib: pip install "dspark-fast[plots]"') from error


def canvas(panels: int = 1, *, width: float = 7.6, height: float = 4.2, **options: Any) -> tuple[Figure, list[Any]]:
    """A figure and its panels, side by side.

    Raises:
        ImportError: without matplotlib, naming the extra.
    """
    check_plots()
    # Not pyplot, which would change the backend of a process that draws for itself.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    axes = list(figure.subplots(1, panels, squeeze=False, **options)[0])
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color("#9aa1a9")
        axis.tick_params(colors=INK, length=3)
        axis.xaxis.labelpad = axis.yaxis.labelpad = 7  # the default lets a label touch its ticks' numbers
        axis.grid(axis="y", color=FAINT, linewidth=0.7)
        axis.set_axisbelow(True)
    return figure, axes


def label_bars(axis: Any, bars: Any, texts: Iterable[str], above: Iterable[float] | None = None) -> None:
    """Write over each bar, or over ``above`` where a whisker is in the way; the axis grows to fit."""
    tops = [bar.get_height() for bar in bars] if above is None else list(above)
    for bar, text, top in zip(bars, texts, tops, strict=True):
        axis.annotate(
            text,
            (bar.get_x() + bar.get_width() / 2, top),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=9,
            color=INK,
            bbox=UNCROSSED,
        )


def key_above(axis: Any, highest: float, **options: Any) -> None:
    """A y axis from zero and a legend in a free strip on top of it, where no curve comes.

    Args:
        axis: of curves up to ``highest``.
        options: of the legend.
    """
    ticks = [tick for tick in axis.get_yticks() if 0 <= tick <= 1.001 * highest]
    axis.set_ylim(0, 1.26 * highest)
    axis.set_yticks(ticks)
    axis.legend(frameon=False, fontsize=8.5, loc="upper center", **options)


def from_zero(axis: Any, highest: float, *, room: float = 1.18) -> None:
    """A y axis that begins at zero and has room for labels on top."""
    axis.set_ylim(0, highest * room if highest > 0 else 1.0)


def literal(texts: Iterable[Any]) -> None:
    """Tokens as they are: a dollar sign begins no formula."""
    for text in texts:
        text.set_parse_math(False)
