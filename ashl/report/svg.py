"""Draw SVG as text with a few functions; text from files is escaped here.

Matplotlib is not used because it takes half a second to import, converts text to outlines, and
writes files ten times as large.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

INK, SOFT, FAINT = "#1a1a1a", "#5f5f5f", "#d9d9d9"
FONT = 12  # px
GLYPH = 6.6  # pixels: an upper estimate of the mean width of a character at FONT

# A series has a colour, a dash and a marker; dash and marker are enough on grey paper. The colours
# are those of Okabe and Ito, darkened.
COLORS = ("#0060a8", "#c44e00", "#00815d", "#a8437f", "#7a6a00", "#2f8fc4", "#8a3b12", "#5a5a9e")
DASHES = ("", "7 3", "2 2.5", "9 3 2 3", "12 4", "4 2", "1 3", "6 2 1 2 1 2")
MARKERS = ("circle", "square", "triangle", "diamond", "cross", "ring", "box", "wedge")


def tag(name: str, *children: str, **attributes: object) -> str:
    """Return an element.

    In attribute names, `_` stands for `-`; the value None omits an attribute. Children are markup.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_plain(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{written}>{''.join(children)}</{name}>" if children else f"<{name}{written}/>"


def _plain(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


def text(x: float, y: float, content: str, **attributes: object) -> str:
    return tag("text", escape(content), x=float(x), y=float(y), **attributes)


def haloed(x: float, y: float, content: str, width: float, **attributes: object) -> str:
    """Return text on a white rim, drawn first, because not every viewer knows `paint-order`."""
    rim = {
        "fill": "#fff",
        "stroke": "#fff",
        "stroke_width": width,
        "stroke_linejoin": "round",
        "aria_hidden": "true",
    }
    return text(x, y, content, **attributes | rim) + text(x, y, content, **attributes)


def line(x1: float, y1: float, x2: float, y2: float, **attributes: object) -> str:
    return tag("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), **attributes)


def rect(
    x: float, y: float, width: float, height: float, hint: str = "", **attributes: object
) -> str:
    """Return a rectangle with a hint that appears under the pointer."""
    inside = (tag("title", escape(hint)),) if hint else ()
    size = {"x": float(x), "y": float(y), "width": max(float(width), 0.0), "height": float(height)}
    return tag("rect", *inside, **size, **attributes)


def boxes(rectangles: Iterable[tuple[float, float, float, float]], **attributes: object) -> str:
    """Return many rectangles (x, y, width, height) as one shape.

    In print, each hatched shape costs as much as a picture.
    """
    drawn = "".join(
        f"M{x:.1f} {y:.1f}h{width:.1f}v{height:.1f}h{-width:.1f}Z"
        for x, y, width, height in rectangles
    )
    return tag("path", d=drawn, **attributes) if drawn else ""


def path(points: Iterable[tuple[float, float]], **attributes: object) -> str:
    return tag("path", d=f"M{_steps(points)}", **attributes)


def shape(points: Iterable[tuple[float, float]], **attributes: object) -> str:
    return tag("path", d=f"M{_steps(points)}Z", **attributes)


def _steps(points: Iterable[tuple[float, float]]) -> str:
    return "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def marker(kind: str, x: float, y: float, color: str, size: float = 4.0) -> str:
    """Return one of MARKERS around a point; ring, box and wedge are hollow."""
    s = size
    fill = "#fff" if kind in ("ring", "box", "wedge") else color
    style = {"fill": fill, "stroke": color, "stroke_width": 1.4}
    if kind in ("circle", "ring"):
        return tag("circle", cx=float(x), cy=float(y), r=s, **style)
    if kind == "cross":
        return path(
            [(x - s, y - s), (x + s, y + s), (x, y), (x - s, y + s), (x + s, y - s)],
            **(style | {"fill": "none"}),
        )
    shapes = {
        "square": [(-s, -s), (s, -s), (s, s), (-s, s)],
        "triangle": [(-s, s), (0, -s), (s, s)],
        "diamond": [(0, -s - 1), (s + 1, 0), (0, s + 1), (-s - 1, 0)],
        "wedge": [(-s, -s), (s, -s), (0, s)],
    }
    corners = shapes.get(kind, shapes["square"])
    return shape([(x + dx, y + dy) for dx, dy in corners], **style)


def drawing(width: float, height: float, label: str, *parts: str) -> str:
    """Return a whole figure; `label` is for screen readers."""
    return tag(
        "svg",
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        width=f"{width:.0f}",
        height=f"{height:.0f}",
        role="img",
        aria_label=label,
        font_family="system-ui, sans-serif",
        font_size=FONT,
        fill=INK,
    )


def short(content: str, width: float) -> str:
    """Shorten a text to the given width in pixels."""
    room = max(int(width / GLYPH), 2)
    return content if len(content) <= room else content[: room - 1] + "…"


@dataclass(frozen=True)
class Scale:
    """A map from values to pixels: `low` is at `start`, `high` at `end`.

    `whole` is True if the values are counts.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    whole: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (value - low) / ((high - low) or 1.0) * (self.end - self.start)

    def ticks(self, most: int = 7) -> list[float]:
        if self.log:
            return log_ticks(self.low, self.high, most)
        return linear_ticks(self.low, self.high, most, least=1.0 if self.whole else 0.0)


def linear_ticks(low: float, high: float, most: int = 7, least: float = 0.0) -> list[float]:
    """Return round numbers between two values, in steps of 1, 2 or 5 times a power of ten.

    Args: least is the smallest step.
    """
    span = high - low
    if not span > 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(power * m for m in (1, 2, 5, 10, 20) if span / (power * m) <= most)
    step = max(step, least)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float, most: int = 7) -> list[float]:
    for factors in ((1, 2, 5), (1, 3), (1,)):
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [
            m * 10.0**p
            for p in powers
            for m in factors
            if low * 0.999 <= m * 10.0**p <= high * 1.001
        ]
        if len(found) <= most:
            break
    return found if len(found) > 1 else [low, high]


def tick_text(value: float, ticks: Sequence[float] = ()) -> str:
    """Format a number as briefly as the ticks next to it allow."""
    steps = [b - a for a, b in pairwise(ticks)]
    digits = max(0, -math.floor(math.log10(min(steps)) + 1e-9)) if steps and min(steps) > 0 else 2
    if abs(value) >= 10_000:
        return f"{value:.3g}" if value >= 1e7 else f"{value:,.0f}"
    return f"{value:.{digits}f}" if not ticks or digits <= 4 else f"{value:.3g}"


def x_axis(
    scale: Scale, y: float, title: str, *, top: float | None = None, factor: float = 1.0
) -> str:
    """Draw an axis below a plot, with faint lines up to `top`; labels are values times `factor`."""
    ticks = scale.ticks()
    shown = [tick * factor for tick in ticks]
    parts = [line(scale.start, y, scale.end, y, stroke=SOFT)]
    for tick, value in zip(ticks, shown, strict=True):
        x = scale(tick)
        parts.append(line(x, y, x, y + 4, stroke=SOFT))
        if top is not None:
            parts.append(line(x, y, x, top, stroke=FAINT, stroke_width=0.7))
        label = f"{value:g}" if scale.log else tick_text(value, shown)
        parts.append(text(x, y + 17, label, text_anchor="middle", fill=SOFT))
    parts.append(text((scale.start + scale.end) / 2, y + 34, title, text_anchor="middle"))
    return "".join(parts)


def y_axis(
    scale: Scale, x: float, title: str, *, right: float | None = None, factor: float = 1.0
) -> str:
    """Draw an axis left of a plot, with faint lines to `right`."""
    ticks = scale.ticks(6)
    shown = [tick * factor for tick in ticks]
    parts = [line(x, scale.start, x, scale.end, stroke=SOFT)]
    for tick, value in zip(ticks, shown, strict=True):
        y = scale(tick)
        parts.append(line(x - 4, y, x, y, stroke=SOFT))
        if right is not None:
            parts.append(line(x, y, right, y, stroke=FAINT, stroke_width=0.7))
        label = f"{value:g}" if scale.log else tick_text(value, shown)
        parts.append(text(x - 7, y + 4, label, text_anchor="end", fill=SOFT))
    middle = (scale.start + scale.end) / 2
    parts.append(
        text(
            x - 44,
            middle,
            title,
            text_anchor="middle",
            transform=f"rotate(-90 {x - 44:.0f} {middle:.0f})",
        )
    )
    return "".join(parts)
