"""The picture of the front page: time and memory of four losses in fastcl, eager PyTorch and torch.compile, as SVG.

The figures are those at two threads, forward and backward, in contrast-cpu.json, contrast-cpu-items.json and
memory.json. The longest bar of a group has full length. The SVG is written without a plotting package, so that the same
figures give the same bytes everywhere and `python -m benchmarks.tables --check` can compare them.
"""

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.common import results
from benchmarks.tables_speed import contrast, megabytes, shape

WIDTH, LABEL, BAR, LINE, GAP, TOP = 920, 20, 250, 19, 38, 74
COLOURS = {"fastcl": "#1f7a5c", "torch.compile": "#8aa4c8", "eager PyTorch": "#c9ced6"}
# The last one is a loss: eager PyTorch is faster there.
TIMED = {"batch": "in-batch", "moco": "MoCo, frozen queue", "items": "full softmax", "ntxent-small": "NT-Xent, small"}
REMEMBERED = ("in-batch", "MoCo, frozen queue", "full softmax", "NT-Xent")


class Group(NamedTuple):
    title: str
    sizes: str
    values: dict[str, float]  # by the names in COLOURS
    texts: dict[str, str]


def timed(case: str) -> Group:
    """The times of one case: fastcl's in milliseconds, the others' as multiples of it."""
    row = contrast()[case, "forward+backward"]
    ratio = {"fastcl": 1.0, "torch.compile": row["ratios"]["compile"], "eager PyTorch": row["ratios"]["reference"]}
    texts = {name: f"{row['ms']:.1f} ms" if name == "fastcl" else f"{value:.1f} x" for name, value in ratio.items()}
    return Group(TIMED[case], shape(row), ratio, texts)


def remembered(what: str) -> Group:
    row = next(row for row in results("memory")["rows"] if row["what"] == what and row["threads"] == 2)
    columns = {"fastcl": "fastcl MB", "torch.compile": "compile MB", "eager PyTorch": "reference MB"}
    values = {name: row[column] for name, column in columns.items() if column in row}
    return Group(what, row["N x M x D"], values, {name: f"{megabytes(value)} MiB" for name, value in values.items()})


def panel(groups: Sequence[Group], x: int, title: str) -> list[str]:
    lines = [f'<text x="{x}" y="30" class="head">{title}</text>']
    y = TOP
    for group in groups:
        sizes = group.sizes.replace(" x ", " × ")
        lines.append(f'<text x="{x}" y="{y}"><tspan class="name">{group.title}</tspan>  {sizes}</text>')
        longest = max(group.values.values())
        for nth, name in enumerate(name for name in COLOURS if name in group.values):
            top = y + 8 + nth * LINE
            length = max(2.0, BAR * group.values[name] / longest)
            lines.append(f'<rect x="{x}" y="{top}" width="{length:.1f}" height="14" fill="{COLOURS[name]}"/>')
            bold = ' class="name"' if name == "fastcl" else ""
            lines.append(f'<text x="{x + length + 6:.1f}" y="{top + 12}"{bold}>{group.texts[name]}</text>')
        y += 8 + len(COLOURS) * LINE + GAP - 8
    return lines


def legend(y: int) -> list[str]:
    lines, x = [], LABEL
    for name, colour in COLOURS.items():
        lines.append(f'<rect x="{x}" y="{y - 11}" width="14" height="14" fill="{colour}"/>')
        lines.append(f'<text x="{x + 20}" y="{y}">{name}</text>')
        x += 40 + 8 * len(name)
    return lines


def svg() -> str:
    time, memory = [timed(case) for case in TIMED], [remembered(what) for what in REMEMBERED]
    height = TOP + max(len(time), len(memory)) * (len(COLOURS) * LINE + GAP) + 30
    machine = results("contrast-cpu")["machine"]
    note = f"{machine['processor'].replace('(R)', '')}, 2 threads, torch {machine['torch']}, float32."
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-label="Time and memory of four losses: fastcl, torch.compile and eager PyTorch">',
        "<style>text { font: 13px system-ui, sans-serif; fill: #3b4148; white-space: pre } "
        ".head { font-size: 16px; font-weight: 600; fill: #14181c } .name { font-weight: 600; fill: #14181c }</style>",
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8" fill="#ffffff" stroke="#d9dee4"/>',
        *panel(time, LABEL, "Time of a loss and its gradients"),
        *panel(memory, LABEL + WIDTH // 2, "Memory beside inputs and gradients"),
        *legend(height - 38),
        f'<text x="{LABEL}" y="{height - 14}">{note} A bar is its share of the longest of its group.</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"
