"""Tables of what everything around the losses costs: reading, training, serving, a study's epoch, the CUDA kernels.

From read.json, train.json, serve.json, negatives.json, contrastvae-cost*.json, demo-*.json and sass.json; how each
figure was measured is in the program of the same name.
"""

from collections.abc import Callable
from typing import Any

from benchmarks.common import markdown, results
from fastcl.recsys.report import number


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


def serve() -> str:
    return markdown(
        [
            {"model": row["model"], "items": f"{row['items']:,}"}
            | {"one history, ms": row["ms"], "histories a second, in batches": f"{row['users a second']:,.0f}"}
            for row in results("serve")["rows"]
        ]
    )


def train() -> str:
    return markdown(
        [
            {"trainer": row["trainer"], "targets a CPU-second": f"{row['targets a CPU-s']:,}"}
            | {"epochs in equal CPU time": row["epochs"], "test NDCG@10": row["test ndcg@10"]}
            for row in results("train")["rows"]
        ]
    )


def negatives() -> str:
    return markdown(
        [
            {"items are encoded from": row["features"], "negatives": row["negatives"]}
            | {"samples a CPU-second": f"{row['samples per CPU-s']:,}"}
            | {"over sampled softmax": row["of sampled softmax"], "peak memory, MB": row["peak MB"]}
            for row in results("negatives")["rows"]
        ]
    )


def contrastvae_epoch() -> str:
    """CPU-seconds of an epoch on Beauty: as torch's float32 products run by themselves, and with AVX-512 in MKL."""
    plain, wide = ({row["an epoch"]: row for row in results(name)["epoch"]} for name in COSTS)
    ratio = "the authors' arithmetic over it"
    return markdown(
        [
            {
                "an epoch": name,
                "CPU-seconds": f"{plain[name]['CPU s']:.0f}",
                "the authors' arithmetic over it": plain[name][ratio],
                "CPU-seconds, MKL on AVX-512": f"{wide[name]['CPU s']:.0f}",
                "the authors' arithmetic over that": wide[name][ratio],
            }
            for name in plain
        ]
    )


COSTS = ("contrastvae-cost", "contrastvae-cost-mkl-avx512")


def demo(data: str) -> str:
    rows = []
    for name, found in results(f"demo-{data}")["results"].items():
        cells = {key: number(key, value) for key, value in found.items() if key not in NOT_SHOWN}
        rows.append({"": name} | cells | {"training, s": f"{found['seconds']:.0f}" if "seconds" in found else None})
    return markdown(rows)


NOT_SHOWN = ("cases", "unseen_targets", "seconds")


UNITS = {
    "tensor": "tensor cores",
    "exponential": "exponentials",
    "shared": "shared memory",
    "integer": "integers",
    "issue": "instructions",
}


def sass() -> str:
    """Cycles of an H100's multiprocessor for 64 x 64 logits, by unit; the largest is a floor for the loop."""
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
    "serve": serve,
    "train": train,
    "negatives": negatives,
    "contrastvae epoch": contrastvae_epoch,
    "sass": sass,
}
