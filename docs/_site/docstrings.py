"""Our docstrings as the reStructuredText that Sphinx reads.

They are plain text: `names` in backquotes, "Args:" and what follows it, lines `name: text` with the rest indented,
formulas indented behind an empty line, examples behind `>>>`.
"""

import re
import textwrap
from collections.abc import Iterator
from typing import Any

# A line that opens a list of arguments, or a paragraph with a bold first word.
LISTS = {"Args:": "Arguments", "Returns:": "Returns", "Raises:": "Raises", "Yields:": "Yields", "Settings:": "Settings"}
HEADED = re.compile(r"^(Returns|Raises|Gradients|Errors|Autocast)(:| (?=[A-Z]\w+Error))")
NAME = r'(?:\*{0,2}[A-Za-z_]\w*|"[\w-]+")'
ITEM = re.compile(rf"^({NAME}(?:, {NAME})*): +(.*)$")
CODE = re.compile(r"(`+)([^`]+)\1")


def inline(text: str) -> str:
    """`name` becomes a literal; whatever else could mean something to reStructuredText is escaped."""
    parts, at = [], 0
    for found in CODE.finditer(text):
        parts.append(escaped(text[at : found.start()]))
        name = " ".join(found[2].split())  # it may run over the end of a line
        parts.append(f"\\ ``{name}``\\ ")  # escaped blanks, so that the literal may touch letters
        at = found.end()
    return "".join([*parts, escaped(text[at:])])


def escaped(text: str) -> str:
    return re.sub(r"([\\*|`]|_(?=\W|$))", r"\\\1", text)


def indented(line: str) -> bool:
    return line.startswith(" ")


def blocks(lines: list[str]) -> Iterator[list[str]]:
    """Runs of lines between empty ones."""
    block: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            block.append(line)
        elif block:
            yield block
            block = []


def converted(lines: list[str]) -> list[str]:
    done: list[str] = []
    for block in blocks(lines):
        first = block[0]
        if first.lstrip().startswith(">>> "):
            done += textwrap.dedent("\n".join(block)).split("\n")
        elif first.strip() in LISTS:
            done += [f"**{LISTS[first.strip()]}**", "", *listed(textwrap.dedent("\n".join(block[1:])).split("\n"))]
        elif indented(first):
            done += listed(block) if ITEM.match(first.strip()) and len(block) > 1 and hanging(block) else literal(block)
        elif ITEM.match(first) and (first[0].islower() or first[0] == '"'):
            done += listed(block)
        elif first.startswith("- "):
            done += inline("\n".join(block)).split("\n")
        else:
            done += paragraph(block)
        done.append("")
    return done


def hanging(block: list[str]) -> bool:
    """Whether every line is an item or goes on with one, further to the right."""
    lines = textwrap.dedent("\n".join(block)).split("\n")
    return all(indented(line) or ITEM.match(line) for line in lines)


def literal(block: list[str]) -> list[str]:
    return ["::", "", *textwrap.indent(textwrap.dedent("\n".join(block)), "    ").split("\n")]


def paragraph(block: list[str]) -> list[str]:
    head = HEADED.match(block[0])
    if head:
        rest = [block[0][head.end() :].strip(), *(line.strip() for line in block[1:])]
        return [f"**{head[1]}:** {inline(chr(10).join(rest))}"]
    # A formula may follow its sentence without an empty line.
    at = next((nth for nth, line in enumerate(block) if indented(line)), len(block))
    text = inline("\n".join(block[:at])).split("\n")
    return text if at == len(block) else [*text, "", *literal(block[at:])]


def listed(lines: list[str]) -> list[str]:
    """One bullet an item; a sentence at the left edge ends the list and is a paragraph."""
    entries: list[tuple[str, list[str]]] = [("", [])]  # what stands in front, and the text
    for line in textwrap.dedent("\n".join(lines)).split("\n"):
        found = ITEM.match(line)
        if found:
            names = ", ".join(f"``{name.strip()}``" for name in found[1].split(","))
            entries.append((f"- {names}: ", [found[2]]))
        elif not indented(line) and line[0].isupper():
            entries.append(("", [line]))
        else:
            entries[-1][1].append(line.strip())
    done: list[str] = []
    for (front, text), (before, _) in zip(entries, [("", []), *entries], strict=False):
        if text:
            # Between a list and a paragraph Sphinx wants an empty line.
            done += [""] if bool(front) != bool(before) else []
            body = textwrap.indent(inline("\n".join(text)), "  " if front else "").strip()
            done += f"{front}{body}".split("\n")
    return done


def process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = converted(lines)


def setup(app: Any) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", process)
    return {"parallel_read_safe": True}
