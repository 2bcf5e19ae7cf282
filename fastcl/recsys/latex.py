"""Tables for papers: rows of cells as LaTeX. Nothing here measures."""

from collections.abc import Iterable, Sequence

_SPECIAL = {
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\\": r"\textbackslash{}",
    "±": r"$\pm$",
}


def escaped(text: str) -> str:
    """Text without anything that LaTeX would take for a command.

    >>> print(escaped("50% of a_b ±1"))
    50\\% of a\\_b $\\pm$1
    """
    return "".join(_SPECIAL.get(letter, letter) for letter in text)


def bold(text: str) -> str:
    return f"\\textbf{{{text}}}"


def tabular(header: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> str:
    """A `tabular` of cells that are LaTeX already: the first column to the left, the others to the right. It needs the
    package booktabs. caption: a comment above it.
    """
    lines = [f"% {caption}" if caption else "", "% \\usepackage{booktabs}"]
    lines += [f"\\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}", "\\toprule", _row(header), "\\midrule"]
    return "\n".join([line for line in lines if line] + [*map(_row, rows), "\\bottomrule", "\\end{tabular}"])


def _row(cells: Sequence[str]) -> str:
    line = " & ".join(cells) + r" \\"
    # The command that ends the row above would take these for its arguments.
    return "{}" + line if line.startswith(("[", "*")) else line
