"""Tables for the documentation, beside those of the losses: reading, training, serving, floors, negatives, SASS.

From read.json, prepared.json, cached.json, train.json, threads.json, choices.json, serve.json, service.json,
negatives.json, sass.json, weeks.json, cold.json, contrastvae-cost*.json and demo-*.json. The bench program with the
same name tells how a figure was measured.
"""

import re
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.common import markdown, results
from fastcl.recsys.evaluation.measures import COUNTS
from fastcl.recsys.showing import number


def read() -> str:
    return markdown(
        [
            {
                "file": row["form"],
                "size, MiB": f"{row['file MiB']:.0f}",
                "rows": f"{row['rows']:,}",
                "seconds": f"{row['seconds']:.0f}",
                "peak memory, MiB": f"{row['peak RSS MiB']:,.0f}",
            }
            for row in results("read")["results"]
        ]
    )


def starts() -> str:
    """From a path to the data that training takes, and the first batch."""
    return markdown(
        [
            {
                "rows": f"{row['asked']:,}",
                "read from": row["form"],
                "start, seconds": f"{row['start, s']:.2g}" if row["start, s"] < 1 else f"{row['start, s']:.0f}",
                "start, CPU-seconds": f"{row['start, CPU-s']:.2g}",
                "own memory of the start, MiB": f"{row['own memory, MiB']:,.1f}",
                "first batch, seconds": f"{row['first batch, s']:.2f}",
                "own memory of the first batch, MiB": f"{row['first batch, MiB']:,.0f}",
            }
            for row in results("prepared")["starts"]
        ]
    )


def preparations() -> str:
    return markdown(
        [
            {
                "rows": f"{row['asked']:,}",
                "seconds": f"{row['s']:.0f}",
                "CPU-seconds": f"{row['CPU-s']:.0f}",
                "peak memory, MiB": f"{row['peak, MiB']:,.0f}",
                "files, MiB": f"{row['files, MiB']:,.0f}",
            }
            for row in results("prepared")["preparations"]
        ]
    )


def cached() -> str:
    """A step of a Transformer in chunks beside the plain one."""
    return markdown(
        [
            {
                "step": row["step"],
                "peak memory, MiB": f"{row['MiB']:,.0f}",
                "CPU-seconds": f"{row['CPU seconds']:.2f}",
                "CPU time / the plain step's": f"{row['time / plain']:.2f}",
                "largest difference of a gradient": f"{row['difference']:.0e}" if row["difference"] else None,
            }
            for row in results("cached")["rows"]
        ]
    )


def cached_what() -> str:
    found = results("cached")
    return f"{found['rows'][0]['rows']:,} pairs, {found['what']}"


def serve() -> str:
    return markdown(
        [
            {"model": row["model"], "items": f"{row['items']:,}"}
            | {"one history, ms": row["ms"], "histories per second, in batches": f"{row['users a second']:,.0f}"}
            for row in results("serve")["rows"]
        ]
    )


def service() -> str:
    return markdown(
        [
            {"threads": row["threads"], "batch": row["batch"], "clients": row["clients"]}
            | {"requests a second": f"{row['requests a second']:,.0f}"}
            | {"p50, ms": f"{row['p50 ms']:.1f}", "p95, ms": f"{row['p95 ms']:.1f}"}
            for row in results("service")["rows"]
        ]
    )


def service_machine() -> str:
    about = results("service")["machine"]
    return f"{about['processor']}, {about['cores']} cores"


def train() -> str:
    return markdown(
        [
            {"trainer": row["trainer"], "targets per CPU-second": f"{row['targets a CPU-s']:,}"}
            | {"epochs in equal CPU time": row["epochs"], "test NDCG@10": row["test ndcg@10"]}
            for row in results("train")["rows"]
        ]
    )


def threads() -> str:
    """The CPU time of a short training while other processes keep all cores busy."""
    return markdown(
        [
            {"threads": row["threads"], "CPU-seconds": f"{row['CPU-seconds']:.1f}"}
            | {"CPU-seconds / those of one thread": row["of one thread's CPU"]}
            for row in results("threads")["rows"]
        ]
    )


def demo(name: str) -> str:
    """What `fastcl demo` finds. Its run times are left out, since they are those of a busy machine."""
    report = results(f"demo-{name}")
    columns = [column for column in next(iter(report["results"].values())) if column not in COUNTS]
    return markdown(
        [
            {"": scorer} | {column: number(column, found[column]) for column in columns}
            for scorer, found in report["results"].items()
        ]
    )


def floor(shown: int = 5) -> str:
    """The best variants of the co-occurrence floor, by the mean over the sets of NDCG@10 divided by the best one's."""
    found: dict[tuple[float, int, float], dict[str, float]] = {}
    for row in results("choices")["rows"]:
        if row["choice"] == "floor":
            found.setdefault((row["decay"], row["steps"], row["mix"]), {})[row["set"]] = row["ndcg@10"]
    best = {name: max(of[name] for of in found.values()) for of in found.values() for name in of}
    share = {key: statistics.mean(value / best[name] for name, value in of.items()) for key, of in found.items()}
    order = sorted(share, key=share.__getitem__, reverse=True)[:shown]
    rows = [dict(zip(("decay", "steps", "weight of transitions"), map(str, key), strict=True)) for key in order]
    name = "NDCG@10 / the best variant's"
    return markdown([row | {name: f"{share[key]:.3f}"} for row, key in zip(rows, order, strict=True)])


def shortened() -> str:
    """Validation NDCG@20 of trained models by the power of `normalize`."""
    found: dict[tuple[str, str, float], dict[str, str]] = {}
    for row in results("choices")["rows"]:
        if row["choice"] == "normalize":
            name = re.sub("^bundled:|^amazon/|_.*", "", row["set"])
            cells = found.setdefault((name, row["model"], row["debias"]), {})
            cells[f"{row['normalize']:g}"] = number("ndcg@20", row["ndcg@20"])
    heads = ("set", "model", "debias")
    return markdown([dict(zip(heads, map(str, key), strict=True)) | cells for key, cells in found.items()])


def negatives() -> str:
    return markdown(
        [
            {"items are encoded from": row["features"], "negatives": row["negatives"]}
            | {"samples per CPU-second": f"{row['samples per CPU-s']:,}"}
            | {"speed / sampled softmax's": row["of sampled softmax"], "peak memory, MiB": row["peak MB"]}
            for row in results("negatives")["rows"]
        ]
    )


def contrastvae_epoch() -> str:
    """CPU-seconds of an epoch on Beauty, with the instructions that MKL chooses by itself and with AVX-512."""
    plain, wide = ({row["an epoch"]: row for row in results(name)["epoch"]} for name in COSTS)
    ratio = "the authors' arithmetic over it"
    return markdown(
        [
            {
                "an epoch": name,
                "CPU-seconds": f"{plain[name]['CPU s']:.0f}",
                "speed-up": plain[name][ratio],
                "CPU-seconds, MKL with AVX-512": f"{wide[name]['CPU s']:.0f}",
                "speed-up, MKL with AVX-512": wide[name][ratio],
            }
            for name in plain
        ]
    )


COSTS = ("contrastvae-cost", "contrastvae-cost-mkl-avx512")


UNITS = {
    "tensor": "tensor cores",
    "exponential": "exponentials",
    "shared": "shared memory",
    "integer": "integers",
    "issue": "instructions",
}


def weeks() -> str:
    """Means over the weeks in which all ways of training are compared, each weighted by its cases."""
    rows = [row for row in results("weeks")["rows"] if row["week"] > 1]
    found = []
    for how in dict.fromkeys(row["how"] for row in rows):
        own = [row for row in rows if row["how"] == how]
        cases = sum(row["cases"] for row in own)
        means = {name: sum(row[name] * row["cases"] for row in own) / cases for name in ("recall@10", "ndcg@10")}
        cost = sum(row["cpu_s"] for row in own) / len(own)
        found.append(
            {"model of each week": how, "cases": f"{cases:,}"}
            | {name: number(name, value) for name, value in means.items()}
            | {"CPU-seconds a week": f"{cost:,.0f}" if cost else "0"}
        )
    return markdown(found)


def cold(name: str) -> str:
    """Recall of held-out items on one set, and of trained items by the same models."""
    heads = {
        "recall@10 among new": "recall@10 among the new items",
        "recall@10 among all": "among all items",
        "recall@10 of trained": "recall@10 of trained items",
    }
    return markdown(
        [
            {"scorer": row["how"]} | {head: number(c, row[c]) if c in row else "" for c, head in heads.items()}
            for row in results("cold")["rows"]
            if row["data"] == name
        ]
    )


def sass() -> str:
    """Cycles of an H100's multiprocessor for 64 x 64 logits, by unit; the largest is a lower bound for the loop."""
    found = {row["kernel"]: row for row in results("sass") if row["arch"] == "90"}
    rows: list[dict[str, Any]] = []
    for types in ("bfloat16 64", "bfloat16 128", "bfloat16 256", "tf32 128", "float32 64", "float32 128"):
        for walk, what in (("lse", "lse alone"), ("forward", "with sums")):
            row = found[f"walk {types} {walk}"]
            cycles = {head: f"{row['cycles'][unit]:,}" for unit, head in UNITS.items()}
            rows.append({"type, features": types, "walk": what} | cycles | {"bound by": UNITS[row["bound"]]})
    return markdown(rows)


TABLES: dict[str, Callable[[], str]] = {
    "read": read,
    "starts": starts,
    "preparations": preparations,
    "cached": cached,
    "cached what": cached_what,
    "serve": serve,
    "service": service,
    "service machine": service_machine,
    "train": train,
    "threads busy": threads,
    "floor": floor,
    "normalize": shortened,
    "negatives": negatives,
    "demo movies": partial(demo, "movies"),
    "demo purchases": partial(demo, "purchases"),
    "contrastvae epoch": contrastvae_epoch,
    "sass": sass,
    "weeks": weeks,
    "cold toys": partial(cold, "amazon/Toys_and_Games"),
    "cold purchases": partial(cold, "bundled:purchases"),
}
