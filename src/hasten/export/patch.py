"""Writes a recipe as a patch of the user's own script: a unified diff that ``patch -p1`` applies, without hasten.

A watched run has noted where the script makes its loaders, optimizers and models (the site map). The card of each
method states its edit there (``Card.script_edit``). Edits change the text of a call or insert a line, so that the
user's formatting stays. What cannot be written as an edit is listed in a comment above the diff, with what to do by
hand: nothing is left out silently.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hasten.engine.registry import options_of
from hasten.export.source_file import CannotEditError, SourceFile

NOT_IN_PATCH = "# Not in this patch:"
BESIDE_PATCH = "# Beside this patch:"

FROM_A_CALL = ("loader", "dataset", "optimizer")  # sites of objects that a framework may make in a call of the script
Site = dict[str, Any]


@dataclass(frozen=True)
class ScriptEdit:
    """The edit of one method."""

    method: str  # its name
    summary: str  # what it does, in one line
    at: dict[str, str]  # kind of site -> text, as ``Card.script_edit`` states it, with the values of the options
    by_hand: str  # what to do where no edit is possible


def write_patch(edits: Iterable[ScriptEdit], sites: Sequence[Site], directory: Path, script: str | None = None) -> str:
    """The patch that makes ``edits``.

    Args:
        edits: Those of the methods of a recipe, see ``edit_of``. An edit applies to all sites of its kind.
        sites: ``{"kind": "loader" | "dataset" | "optimizer" | "model" | "evaluation", "file": path, "line": int,
            "index": int}`` of each site; ``"type"``, if there, is the class of the object. Several objects of one
            line differ in index. ``"made_by"``: the framework that makes the object in a call of the script. A loader
            has two kinds: edits of "dataset" change what it reads. The kind "argument NAME" is a call that passes a
            number by this name; "step" is the update of an optimizer, whose "type" is the model's name there, see
            ``name_of_model``.
        directory: Where ``patch -p1`` will run; relative paths of files are relative to it.
        script: The file that is started, for edits of the process; relative to ``directory``.

    Returns:
        A comment block if something is to be done by hand, then the diff.
    """
    files: dict[str, SourceFile | str] = {}
    by_hand: dict[str, list[str]] = {NOT_IN_PATCH: [], BESIDE_PATCH: []}
    for edit in edits:
        failures: list[str] = []
        for kind, text in edit.at.items():
            for file, line, name, maker in _places(kind, sites, script):
                source = files[file] if file in files else SourceFile.read(directory, file)
                files[file] = source
                try:
                    if isinstance(source, str):
                        raise CannotEditError(source)
                    if maker and kind in FROM_A_CALL:
                        raise CannotEditError(f"{maker} makes it in this call")
                    source.edit(kind, line, name, text)
                except CannotEditError as error:
                    place = f"{file}:{line}" if line else file
                    failures.append(f"{place}: {error}; the edit is: {text}")
            if not _places(kind, sites, script):
                failures.append(f"the script has no known {kind} for the edit: {text}")
        if failures or not edit.at or edit.by_hand:
            lines = by_hand[NOT_IN_PATCH if failures or not edit.at else BESIDE_PATCH]
            lines += [f"{edit.method}: {edit.summary}", *(f"  {failure}" for failure in failures)]
            lines += [f"  by hand: {edit.by_hand}"] * bool(edit.by_hand)
            lines += ["  there is no edit for it"] * (not edit.at and not edit.by_hand)
    diffs = [source.diff() for _, source in sorted(files.items()) if not isinstance(source, str)]
    heading: list[str] = []
    for title, texts in by_hand.items():
        lines = "\n".join(texts).split("\n")  # a text may have several
        heading += [title, *(f"#   {line}" for line in lines)] if texts else []
    if any(diffs) and by_hand[NOT_IN_PATCH]:
        heading.append(
            "# The speed-up of the recipe was measured with all of its methods: without these it may be smaller."
        )
    return "".join(f"{line}\n" for line in heading) + "".join(diffs)


def line_of_model(directory: str | Path, file: str, line: int) -> int:
    """The line of a file that makes the model which line ``line`` calls; 0 if unclear or the file cannot be edited."""
    source = SourceFile.read(Path(directory), file)
    return 0 if isinstance(source, str) else source.line_of_assignment(line)


def name_of_model(directory: str | Path, file: str, line: int, step: int) -> str:
    """The name by which line ``line`` of a file calls the model that line ``step`` of the same function updates; "" if
    that is not clear or the file cannot be edited.
    """
    source = SourceFile.read(Path(directory), file)
    return "" if isinstance(source, str) else source.name_of_model(line, step)


def edit_of(method: Any) -> ScriptEdit:
    """The edit of a method: its card's, with the values of its options."""
    defaults = options_of(type(method))
    options = {name: getattr(method, name) for name in defaults} or dict(vars(method))
    changed = {name for name, value in options.items() if (value != defaults[name] if name in defaults else value)}
    texts = dict(method.card.script_edit)
    by_hand = _filled(texts.pop("by_hand", ""), options, changed)
    stated = " ".join(method.card.script_edit.values())
    if unsaid := sorted(name for name in changed if name not in stated):
        note = f"the edit is written for the default of {', '.join(unsaid)} only"
        texts, by_hand = {}, f"{by_hand} ({note})" if by_hand else note
    at = {kind: _filled(text, options, changed) for kind, text in texts.items()}
    return ScriptEdit(method.name, method.card.summary, at, by_hand)


def _filled(text: str, options: dict[str, Any], changed: set[str]) -> str:
    """Replaces ``{option}`` by its value; a part in ``[...]`` is left out unless an option in it is in ``changed``."""

    def optional(match: re.Match[str]) -> str:
        return match[1] if any(f"{{{name}" in match[1] for name in changed) else ""

    text = re.sub(r"\[(.*?)\]", optional, text).replace("(, ", "(")  # the arguments before may be left out
    return re.sub(r"\{(\w+)\}", lambda match: repr(options[match[1]]) if match[1] in options else match[0], text)


def _places(kind: str, sites: Sequence[Site], script: str | None) -> list[tuple[str, int, str, str]]:
    """(file, line, class, maker) of each line that has a site of a kind; edits of the process belong to the script."""
    if kind == "process":
        return [(script, 0, "", "")] if script else []
    found = [site for site in sites if site["kind"] == kind]
    places = ((site["file"], site["line"], site.get("type", ""), site.get("made_by", "")) for site in found)
    return [*dict.fromkeys(places)]
