"""Helpers for the pictures of reports and placements in notebooks.

A picture is HTML with an SVG. The HTML needs no script, style sheet or other file, so that every notebook viewer shows
it.
"""

from collections.abc import Iterable
from html import escape

PICTURE_WIDTH = 920
"""Width of a picture in units of its SVG."""
DEGREE_COLORS = ("#7b8a9a", "#2a9d8f", "#c2548a", "#b8860b", "#5b6fd9", "#a0623d", "#4f8f3a")
"""Colors of TP1, TP2, TP4 and so on, visible on light and dark pages. The live page has the same colors."""


def frame(label: str, caption: str, drawn: str, height: float) -> str:
    """Return the HTML of a picture, which contains an SVG.

    Args:
        label: name of the picture for screen readers.
        caption: HTML above the picture.
        drawn: content of the SVG.
        height: height of the SVG, in its units.
    """
    return (
        f'<div style="font-size:12px">{caption}'
        f'<svg viewBox="0 0 {PICTURE_WIDTH} {height:g}" role="img" aria-label="{escape(label)}" '
        'style="display:block;width:100%;max-width:1200px" font-family="sans-serif" font-size="11" '
        f'fill="currentColor">{drawn}</svg></div>'
    )


def legend(swatches: Iterable[tuple[str, str, float]]) -> str:
    """Return the HTML of a legend. A swatch is (name, color, opacity)."""
    swatch = '<span style="display:inline-block;width:.9em;height:.9em;background:{};opacity:{}"></span>'
    return "".join(
        f'<span style="white-space:nowrap;margin-right:1.2em">{swatch.format(color, opacity)} {escape(name)}</span>'
        for name, color, opacity in swatches
    )


def rectangle(x: float, y: float, width: float, height: float, color: str, opacity: float = 1.0) -> str:
    """Return the SVG of a rectangle."""
    return (
        f'<rect x="{x:.3f}" y="{y:.3f}" width="{width:.3f}" height="{height:.3f}" '
        f'fill="{color}" fill-opacity="{opacity}"/>'
    )


def number_step(width: float) -> int:
    """Return n such that a picture has room for the number of every n-th layer. n is 1, 2, 5 or more.

    Args:
        width: width of the narrowest layer, in units of the SVG.
    """
    return next((step for step in (1, 2, 5, 10, 20, 50) if step * width >= 20), 100)


def degree_color(degree: int) -> str:
    """Return the color of a tensor-parallel degree, which is a power of two."""
    return DEGREE_COLORS[(degree.bit_length() - 1) % len(DEGREE_COLORS)]
