"""Counts the instructions of the inner loops for 64-bit ARM, in the assembly that zig's compiler writes for the wheels.

    python -m benchmarks.arm_loops [--output benchmarks/results/arm-loops]

No such processor is needed, and nothing is timed. The floor is what the multiply-adds alone would take: one instruction
for 4 of float32, for 2 of float64, for 16 of bfloat16. What a loop has beyond that are loads and its own counting.
"""

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import RESULTS, markdown, write_json, write_text
from building.compiler import zig
from building.platforms import PLATFORMS

ROOT = Path(__file__).resolve().parent.parent


class Product(NamedTuple):
    what: str
    source: str
    function: str  # what its mangled name matches
    instruction: str
    at_once: int  # multiply-adds of one such instruction


PRODUCTS = [
    Product("similarities, float32", "baseline", r"walk\w*INS1_3FmaIf", "fmla", 4),
    Product("weights x values, float32", "baseline", r"3FmaIf\w*E10accumulateE", "fmla", 4),
    Product("column sums, float32", "baseline", "column_sumsI.*3FmaIf", "fmla", 4),
    Product("similarities, float64", "baseline", r"walk\w*INS1_3FmaId", "fmla", 2),
    Product("similarities, bfloat16", "bf16", r"walk\w*INS1_4Bf16", "bfmmla", 16),
]
LABEL = re.compile(r"^([\w.$]+):")
BRANCH = re.compile(r"\s+(?:b\.\w+|cbn?z|tbn?z|b)\s.*?(\.L\w+)$")


def loops(assembly: str) -> Iterator[tuple[str, list[str]]]:
    """(the function, the instructions) of each loop that has no other inside."""
    lines = [line.split("//")[0].rstrip() for line in assembly.splitlines()]
    function, labels = "", dict[str, int]()
    starts = set[int]()  # of loops already given: one that has such a start inside is an outer loop
    for at, line in enumerate(lines):
        if label := LABEL.match(line):
            labels[label[1]] = at
            if not label[1].startswith(".L"):
                function, labels = label[1], {}
        elif (branch := BRANCH.match(line)) and branch[1] in labels:
            start = labels[branch[1]]
            if not any(start < inner < at for inner in starts):
                body = [x.strip() for x in lines[start : at + 1]]
                yield function, [x for x in body if x and not x.startswith(".")]
            starts.add(start)


def assembly(source: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.s")
        command = [*zig(), "c++", "-target", PLATFORMS["linux-aarch64"].triple, "-g0", "-O3", "-std=c++17", "-fPIC"]
        command += ["-fvisibility=hidden", "-Icsrc", "-S", f"csrc/cpu/kernels_{source}.cpp", "-o", str(out)]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        return out.read_text()


def table(rows: list[dict[str, Any]]) -> str:
    return markdown([{k: f"{v:.3f}" if isinstance(v, float) else v for k, v in row.items()} for row in rows])


def row(product: Product, found: list[tuple[str, list[str]]]) -> dict[str, Any]:
    """Of the loop of this product that has the largest share of multiply-adds."""
    bodies = [body for function, body in found if re.search(product.function, function)]
    counts = [(sum(x.split()[0] == product.instruction for x in body), len(body)) for body in bodies]
    multiplies, length = max(counts, key=lambda count: count[0] / count[1], default=(0, 0))
    if multiplies == 0:
        raise SystemExit(f"{product.what}: expected a loop with {product.instruction}, found none")
    return {
        "product": product.what,
        "instructions of the loop": length,
        "of them multiply-adds": multiplies,
        "per multiply-add": round(length / (multiplies * product.at_once), 4),
        "floor": 1 / product.at_once,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / "arm-loops")
    args = parser.parse_args()
    found = {name: list(loops(assembly(name))) for name in {product.source for product in PRODUCTS}}
    rows = [row(product, found[product.source]) for product in PRODUCTS]
    print(table(rows))
    write_json(args.output.with_suffix(".json"), {"rows": rows})
    write_text(args.output.with_suffix(".md"), f"{table(rows)}\n")


if __name__ == "__main__":
    main()
