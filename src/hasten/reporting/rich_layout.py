"""Building blocks of the terminal output: headlines, tables without lines, pairs and bars."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

GOOD, DIM, BOLD = "bold cyan", "dim", "bold"


def stack(*parts: RenderableType) -> Group:
    """The parts one below the other, strings as they are written (no markup); empty strings are left out."""
    return Group(*(Text(part) if isinstance(part, str) else part for part in parts if part != ""))


def headline(text: str, task: str, good: bool) -> Text:
    """``text`` as a bold line, colored if ``good``, followed by the name of the task."""
    return Text.assemble((text, GOOD if good else BOLD), (f"  {task}" if task else "", DIM))


def bar(share: float, width: int, style: str = "cyan") -> Text:
    """A bar of at most ``width`` characters for a share of 0 to 1, drawn to an eighth of a character."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    return Text("█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip(), style=style, no_wrap=True, overflow="crop")


def grid(*heads: str) -> Table:
    """A table without lines. A heading that begins with ``>`` makes a right-aligned column that is never wrapped."""
    show_header = any(head.strip(">") for head in heads)
    table = Table(box=None, show_header=show_header, header_style=DIM, padding=(0, 2, 0, 0), pad_edge=False)
    for head in heads:
        is_number = head.startswith(">")
        justify = "right" if is_number else "left"
        table.add_column(head.removeprefix(">"), justify=justify, no_wrap=is_number, overflow="fold")
    return table


def pairs(rows: Sequence[tuple[str, str]]) -> RenderableType:
    """A table of (name, value) rows in two columns, without those whose value is empty."""
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        if value:
            table.add_row(Text(name, DIM, no_wrap=True), Text(value, overflow="fold"))
    return indented(table)


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int]) -> list[str]:
    """Each row as one line, its cells as wide as their columns; columns whose index is in ``right`` align right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
            if width
        )
        for row in rows
    )
    return [line.rstrip() for line in lines]


def indented(renderable: RenderableType, by: int = 2) -> Padding:
    """The renderable, indented by ``by`` characters."""
    return Padding(renderable, (0, 0, 0, by))
