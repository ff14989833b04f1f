"""The few SVG elements that charts are made of, as Markup: every text and attribute is escaped here and nowhere else."""

from markupsafe import Markup, escape


def svg(width: float, height: float, title: str, description: str, parts: list, class_: str = "") -> Markup:
    """A whole drawing. Without a class it fills its place, and is the wide or the narrow one of a pair."""
    inside = [element("title", title)] + ([element("desc", description)] if description else []) + parts
    size = {"width": width, "height": height} if class_ else {}
    kind = class_ or ("wide" if width > 500 else "narrow")
    return element("svg", *inside, viewBox=f"0 0 {width:g} {height:g}", role="img", class_=kind, **size)


def clipped(x: float, y: float, width: float, height: float, parts: list) -> Markup:
    """A nested SVG hides what leaves it; the view box keeps the outer coordinates."""
    return element("svg", *parts, x=x, y=y, width=width, height=height, viewBox=f"{x:g} {y:g} {width:g} {height:g}")


def whisker(low: float, high: float, y: float, cap: float, kind: str) -> list[Markup]:
    """A lying interval with caps at its ends."""
    return [
        line(low, y, high, y, kind),
        line(low, y - cap, low, y + cap, kind),
        line(high, y - cap, high, y + cap, kind),
    ]


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=kind)


def box(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> Markup:
    return element(
        "rect", *([element("title", title)] if title else []), x=x, y=y, width=width, height=height, class_=kind
    )


def dot(x: float, y: float, radius: float, kind: str) -> Markup:
    return element("circle", cx=x, cy=y, r=radius, class_=kind)


def text(x: float, y: float, told: str, kind: str, title: str = "") -> Markup:
    return element("text", told, *([element("title", title)] if title and title != told else []), x=x, y=y, class_=kind)


def element(name: str, *children: str, **attributes) -> Markup:
    told = "".join(
        f' {key.rstrip("_")}="{escape(_number(value))}"' for key, value in attributes.items() if value not in ("", None)
    )
    return Markup(f"<{name}{told}>{''.join(escape(child) for child in children)}</{name}>")


def _number(value) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
