"""How answers are laid out in the terminal: headlines, tables without lines, pairs and bars."""

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

GOOD, QUIET, HEAD = "bold cyan", "dim", "bold"


def headline(text: str, task: str, good: bool) -> Text:
    return Text.assemble((text, GOOD if good else HEAD), (f"  {task}" if task else "", QUIET))


def bar(share: float, width: int, style: str = "cyan") -> Text:
    """A bar of at most ``width`` characters, drawn to an eighth of one."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    return Text("█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip(), style=style, no_wrap=True, overflow="crop")


def grid(*heads: str) -> Table:
    """A table without lines; a head that begins with ``>`` is a column of numbers, kept whole at the right."""
    table = Table(
        box=None,
        show_header=any(head.strip(">") for head in heads),
        header_style=QUIET,
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )
    for head in heads:
        number = head.startswith(">")
        table.add_column(head.removeprefix(">"), justify="right" if number else "left", no_wrap=number, overflow="fold")
    return table


def pairs(rows: list[tuple[str, str]]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(Text(name, QUIET, no_wrap=True), Text(value, overflow="fold"))
    return indented(table)


def indented(what: RenderableType) -> Padding:
    return Padding(what, (0, 0, 0, 2))
