"""The SVG elements that the charts consist of, as Markup. Every text and attribute is escaped here and nowhere else."""

from collections.abc import Sequence

from markupsafe import Markup, escape

LETTER, LINE = 7.6, 16  # pixels: width of a letter (bold) and height of a line of text


def svg(width: float, height: float, title: str, description: str, parts: Sequence[Markup], class_: str = "") -> Markup:
    """A complete ``<svg>`` of ``parts``. Without ``class_`` it is the wide or narrow drawing of a pair."""
    head = [element("title", title)] + ([element("desc", description)] if description else [])
    size = {"width": width, "height": height} if class_ else {}
    kind = class_ or ("wide" if width > 500 else "narrow")
    return element("svg", *head, *parts, viewBox=f"0 0 {width:g} {height:g}", role="img", class_=kind, **size)


def whisker(low: float, high: float, y: float, cap: float, kind: str) -> list[Markup]:
    """An error bar from x ``low`` to ``high`` at height ``y``, caps of ``cap`` up and down; ``kind``: CSS class."""
    caps = (line(x, y - cap, x, y + cap, kind) for x in (low, high))
    return [line(low, y, high, y, kind), *caps]


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    """A straight line; ``kind`` is its CSS class."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=kind)


def box(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> Markup:
    """A rectangle; ``title`` is shown on hover."""
    children = [element("title", title)] if title else []
    return element("rect", *children, x=x, y=y, width=width, height=height, class_=kind)


def dot(x: float, y: float, radius: float, kind: str) -> Markup:
    """A circle; ``kind`` is its CSS class."""
    return element("circle", cx=x, cy=y, r=radius, class_=kind)


def text(x: float, y: float, content: str, kind: str, title: str = "") -> Markup:
    """A line of text; ``title`` is shown on hover if it differs."""
    children = [element("title", title)] if title and title != content else []
    return element("text", content, *children, x=x, y=y, class_=kind)


def element(name: str, *children: str, **attributes: float | str | None) -> Markup:
    """An XML element. ``class_`` becomes ``class``; attributes whose value is None are omitted."""
    present = [(key.rstrip("_"), value) for key, value in attributes.items() if value not in ("", None)]
    written = "".join(f' {key}="{escape(_number(value))}"' for key, value in present)
    return Markup(f"<{name}{written}>{''.join(escape(child) for child in children)}</{name}>")


def _number(value: float | str | None) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
