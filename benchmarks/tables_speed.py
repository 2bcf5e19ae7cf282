"""Tables for the documentation of the losses' cost: time against other forms, memory, threads, columns, one call.

From contrast-cpu*.json, variants.json, maxsim.json, memory.json, scaling.json, threads-model.json, overhead.json,
ceilings-cpu.json and instructions.json. The bench program with the same name tells how a figure was measured; the
shapes are those of cases.py.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from typing import Any

from benchmarks.common import markdown, results

Row = dict[str, Any]

LARGE = ("clrec", "clrec-queue", "moco", "batch", "beauty", "items", "ntxent", "wide", "dcl")
SMALL = ("small", "tiny", "ntxent-small")
HALF = ("bf16", "bf16-64", "fp16", "fp16-64")
MARKED = ("ids", "bias")
# fastcl is slower than another form in the last of these five: the front page must not hide that.
FRONT = ("moco", "batch", "items", "ntxent", "ntxent-small")
# Runs with a table of their own.
BESIDE = ("contrast-cpu-clip", "contrast-cpu-pairs", "contrast-cpu-1-thread", "contrast-cpu-avx512")
# Clearer names in tables for cases whose name in the results is terse.
WHAT = {"bf16-64": "full softmax, bfloat16", "fp16-64": "full softmax, float16", "ntxent": "NT-Xent"}


@cache
def contrast() -> dict[tuple[str, str], Row]:
    """(case, pass) -> row, at 2 threads. The cases of later runs have results files of their own."""
    names = ("contrast-cpu", "contrast-cpu-items", "contrast-cpu-small")
    rows = [row for name in names for row in results(name)["rows"]]
    return {(row["case"], row["pass"]): row for row in rows}


def shape(row: Row) -> str:
    return " x ".join(f"{size:,}" for size in row["shape"])


def over(row: Row, column: str) -> str | None:
    """A ratio with two decimals, or None if the two were not compared."""
    ratio = row["ratios"].get(column)
    return f"{ratio:.2f}" if isinstance(ratio, float) else None


def passes(cases: Sequence[str]) -> list[Row]:
    return [contrast()[case, which] for case in cases for which in ("forward", "forward+backward")]


def named(row: Row) -> Row:
    which = "forward" if row["pass"] == "forward" else "with backward"
    return {"N x M x D": shape(row), "loss": WHAT.get(row["case"], row["what"]), "pass": which}


def against_torch(cases: Sequence[str]) -> str:
    """fastcl's milliseconds, and how many times longer the others take."""
    return markdown(
        [
            named(row)
            | {
                "fastcl, ms": row["ms"],
                "fastcl / bare products": over(row, "products"),
                "eager / fastcl": over(row, "reference"),
                "torch.compile / fastcl": over(row, "compile"),
            }
            for row in passes(cases)
        ]
    )


def against_others(cases: Sequence[str]) -> str:
    columns = {
        "leanest eager": "lean",
        "leanest, compiled": "lean compile",
        "chunked by hand": "chunked",
        "torch's linear_cross_entropy": "torch lce",
        "info-nce-pytorch": "info-nce",
        "lightly": "lightly",
    }
    return markdown([named(row) | {head: over(row, name) for head, name in columns.items()} for row in passes(cases)])


def half() -> str:
    return markdown(
        [
            named(row)
            | {
                "fastcl, ms": row["ms"],
                "fastcl / its float32": over(row, "plain"),
                "eager / fastcl": over(row, "reference"),
                "torch.compile / fastcl": over(row, "compile"),
            }
            for row in passes((*HALF, *MARKED))
        ]
    )


def front() -> str:
    """Five rows for the front page, with backward."""
    return markdown(
        [
            {
                "loss and shape (N x M x D)": f"{WHAT.get(case, row['what'])}, {shape(row)}",
                "fastcl": f"{row['ms']:.1f} ms",
                "eager PyTorch": f"{over(row, 'reference')} x",
                "torch.compile": f"{over(row, 'compile')} x",
            }
            for case, row in ((case, contrast()[case, "forward+backward"]) for case in FRONT)
        ]
    )


def losing() -> str:
    """Every comparison of losses in which another form takes less time than fastcl; the bare products are no loss."""
    label = {"reference": "eager", "lean": "leanest eager", "compile": "torch.compile of eager"}
    label |= {"lean compile": "torch.compile of the leanest eager"}
    measured = passes((*LARGE, *SMALL, *HALF, *MARKED)) + [row for name in BESIDE for row in results(name)["rows"]]
    rows = [
        named(row)
        | {"threads": row["threads"], "faster form": label.get(column, column), "its time / fastcl's": f"{ratio:.2f}"}
        for row in measured
        for column, ratio in row["ratios"].items()
        if column not in ("products", "plain") and isinstance(ratio, float) and ratio < 1
    ]
    return markdown(rows)


def variant(name: str) -> str:
    """The table of another run of bench_contrast: on one thread, or with another instruction set."""
    return markdown(
        [
            named(row)
            | {"fastcl, ms": row["ms"], "fastcl / bare products": over(row, "products")}
            | {"eager / fastcl": over(row, "reference"), "torch.compile / fastcl": over(row, "compile")}
            for row in results(name)["rows"]
        ]
    )


def both_directions() -> str:
    """`symmetric=True` with backward against the leanest eager form."""
    return markdown(
        [
            {
                "N x D": f"{row['shape'][0]:,} x {row['shape'][2]:,}",
                "threads": row["threads"],
                "fastcl, ms": row["ms"],
                "leanest eager / fastcl": over(row, "lean"),
            }
            for row in results("contrast-cpu-clip")["rows"]
        ]
    )


def pairs() -> str:
    """SigLIP, whose every pair counts on its own."""
    others = {"eager": "reference", "leanest eager": "lean"}
    return markdown(
        [
            named(row)
            | {"threads": row["threads"], "fastcl, ms": row["ms"], "of the ceiling": row.get("share")}
            | {"fastcl / bare products": over(row, "products")}
            | {f"{head} / fastcl": over(row, column) for head, column in others.items()}
            for row in results("contrast-cpu-pairs")["rows"]
        ]
    )


def machine(name: str = "contrast-cpu") -> str:
    found = results(name)
    facts = found["machine"]
    times = f", medians of {found['repeats']} alternating runs" if "repeats" in found else ""
    isa = {"amx": "AMX", "avx512_bf16": "AVX512_BF16", "avx512": "AVX-512", "avx2": "AVX2"}[facts["isa"]]
    cores = f"{facts['cores']} cores, {isa} kernels"
    return f"{facts['processor'].replace('(R)', '')}, {cores}, torch {facts['torch']}{times}"


def shares() -> str:
    """Which part of the processor's peak rate fastcl reaches, by instruction set and threads, beside bare products."""
    names = {"amx": "AMX", "avx512": "AVX-512"}
    found = {
        (case["case"], case["pass"], isa, case["threads"]): case
        for isa in names
        for case in results(f"contrast-cpu-share-{isa}")["rows"]
    }
    rows = []
    for case, which in dict.fromkeys(key[:2] for key in found):
        cells: dict[str, float] = {}
        for isa, (threads, head) in product(names, ((1, "1 thread"), (2, "2 threads"))):
            row = found[case, which, isa, threads]
            cells[f"{names[isa]}, {head}"] = row["share"]
            if isa == "avx512":  # torch multiplies float32 by AVX-512 or AVX2, whatever fastcl does
                cells[f"bare products, {head}"] = row["share"] * row["ratios"]["products"]
        rows.append(named(found[case, which, "amx", 1]) | cells)
    return markdown(rows)


def memory() -> str:
    columns = ("fastcl", "reference", "lean", "compile", "chunked", "torch lce")
    heads = ("fastcl", "eager", "leanest eager", "torch.compile", "chunked by hand", "torch's linear_cross_entropy")
    rows = [row for row in results("memory")["rows"] if row["threads"] == 2]
    return markdown(
        [
            {"N x M x D": row["N x M x D"], "loss": row["what"]}
            | {f"{head}, MiB": megabytes(row.get(f"{name} MB")) for head, name in zip(heads, columns, strict=True)}
            for row in rows
        ]
    )


def megabytes(value: float | None) -> str | None:
    return None if value is None else f"{value:,.1f}" if value < 10 else f"{value:,.0f}"


def threads() -> str:
    return markdown(
        [
            {"N x M x D": row["N x M x D"], "pass": row["pass"], "speed-up by 2 threads": row["2 threads"]}
            for row in results("scaling")["threads"]
        ]
    )


def threads_model() -> str:
    """How many times faster a step is than on one thread: by the model, and by measurement where there is one."""
    names = {"one thread, us": "one thread, us", "serial, us": "of them serial, us"}
    speeds = ["2 threads, measured", "2 threads, model", "speed beside another", "2 threads, cores shared"]
    speeds += ["8 threads, model", "64 threads, model"]
    return markdown(
        [
            {name: row[name] for name in ("N x M x D", "loss", "pass")}
            | {now: f"{row[name]:,.0f}" for name, now in names.items()}
            | {"parallel regions": row["regions"]}
            | {name: f"{row[name]:.2f}" for name in speeds if name in row}
            for row in results("threads-model")["rows"]
        ]
    )


def empty_region() -> str:
    return f"{results('threads-model')['empty region us']:.1f}"


def columns() -> str:
    """Nanoseconds per logit, from few to many columns."""
    rows = results("scaling")["columns"]
    sizes = [key for key in rows[0] if key.startswith("M = ")]
    who = {"fastcl": "fastcl", "products": "bare products"}
    return markdown(
        [
            {"keys": row["keys"], "pass": row["pass"], "": who[row["of"]]} | {size: row[size] for size in sizes}
            for row in rows
        ]
    )


def overhead() -> str:
    return markdown(
        [
            {"threads": row["threads"], "pass": row["pass"]}
            | {f"{name}, us": f"{row[f'{name} us']:.0f}" for name in ("contrast", "infonce", "eager")}
            | {"infonce / leanest eager": row["infonce / eager"], "infonce / eager": row["infonce / reference"]}
            for row in results("overhead")["rows"]
        ]
    )


def call(which: str) -> str:
    """Microseconds of a call of `contrast` with almost no arithmetic, on one thread."""
    rows = results("overhead")["rows"]
    return next(f"{row['contrast us']:.0f}" for row in rows if row["threads"] == 1 and row["pass"] == which)


def ceiling(unit: str) -> str:
    """Multiply-adds per nanosecond of one core, by the unit that makes them (ceilings.cpp)."""
    return f"{results('ceilings-cpu')[unit]:,.0f}"


def bf16() -> str:
    return markdown(
        [
            {name: row[name] for name in ("N x M x D", "pass", "float32, ms", "bfloat16, ms")}
            | {name: row[name] for name in ("float32, share of its ceiling", "bfloat16, share of its ceiling")}
            | {
                "bfloat16 / float32": row["bfloat16 / float32"],
                "modelled for AMD": row["imitated bfloat16 / float32"],
                "bfloat16 by AVX-512 / float32": row["bfloat16 by float32 / float32"],
                "float16 / float32": row["float16 / float32"],
            }
            for row in results("bf16")["rows"]
        ]
    )


def instructions() -> str:
    return markdown(
        [
            {name: row[name] for name in ("what", "N x M x D", "pass")}
            | {"instructions": f"{row['instructions']:,}", "per multiply-add": row["per multiply-add of N x M x D"]}
            for row in results("instructions")["rows"]
        ]
    )


def instructions_of_a_logit() -> str:
    """Of a full softmax: those that grow with the features, and those that every logit takes whatever its features."""
    rows = [row for row in results("instructions")["rows"] if row["what"] == "full softmax"]
    found = []
    for which in ("forward", "forward+backward"):
        few, many = (
            row["instructions"] / (512 * 2048)
            for features in (64, 128)
            for row in rows
            if row["pass"] == which and row["N x M x D"] == f"512 x 2,048 x {features}"
        )
        beside = 2 * few - many
        found.append({"pass": which, "products of 64 features": few - beside, "beside the products": beside})
    return markdown(found)


def variants() -> str:
    return markdown(
        [
            {
                "variant": row["variant"],
                "fastcl, ms": row["ms"],
                "eager / fastcl": row["eager / fastcl"],
                "package / fastcl": row["package / fastcl"],
                "package": row["package"] and row["package"].replace("_", "-"),
            }
            for row in results("variants")["rows"]
        ]
    )


def maxsim() -> str:
    return markdown(
        [
            {
                "case": row["what"].replace("-", " "),
                "queries x documents": shape({"shape": row["shape"][:2]}),
                "tokens of each, features": shape({"shape": row["shape"][2:]}),
                "forward, ms": f"{row['forward, ms']:.1f}",
                "eager / fastcl": f"{row['forward, eager / fastcl']:.2f}",
                "with backward, ms": f"{row['forward+backward, ms']:.1f}",
                "eager / fastcl, with backward": f"{row['forward+backward, eager / fastcl']:.2f}",
                "fastcl, MiB": megabytes(row["fastcl, MiB"]),
                "eager, MiB": megabytes(row["eager, MiB"]),
            }
            for row in results("maxsim")["rows"]
        ]
    )


def what(name: str) -> str:
    return results(name)["what"]


TABLES: dict[str, Callable[[], str]] = {
    "variants": variants,
    "variants what": partial(what, "variants"),
    "maxsim": maxsim,
    "maxsim what": partial(what, "maxsim"),
    "machine maxsim": partial(machine, "maxsim"),
    "machine cached": partial(machine, "cached"),
    "machine variants": partial(machine, "variants"),
    "speed": partial(against_torch, LARGE),
    "speed small": partial(against_torch, SMALL),
    "speed others": partial(against_others, (*LARGE, *SMALL)),
    "speed half": half,
    "speed front": front,
    "speed losing": losing,
    "speed one thread": partial(variant, "contrast-cpu-1-thread"),
    "speed avx512": partial(variant, "contrast-cpu-avx512"),
    "machine": machine,
    "machine memory": partial(machine, "memory"),
    "memory": memory,
    "threads": threads,
    "threads model": threads_model,
    "empty region": empty_region,
    "columns": columns,
    "both directions": both_directions,
    "pairs": pairs,
    "shares": shares,
    "machine shares": partial(machine, "contrast-cpu-share-avx512"),
    "machine pairs": partial(machine, "contrast-cpu-pairs"),
    "overhead": overhead,
    "bf16": bf16,
    "instructions": instructions,
    "instructions of a logit": instructions_of_a_logit,
    "us forward": partial(call, "forward"),
    "us with backward": partial(call, "forward+backward"),
    **{f"ceiling {unit}": partial(ceiling, unit) for unit in ("fma", "avx512_bf16", "amx")},
}
