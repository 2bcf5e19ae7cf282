"""What a run looks like to its reader: the table of results beside the floors, and the picture of curves and
popularity.

Formatting and drawing only; every number comes in from the caller or from metrics.evaluate.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from fastcl.recsys.data import Scorer, Split
from fastcl.recsys.floors import CoOccurrence, PersonalFrequency, Popularity
from fastcl.recsys.metrics import evaluate


def floors(split: Split, seen: str) -> dict[str, Scorer]:
    """The scorers that stand beside every result; personal frequency only where seen items are kept."""
    found: dict[str, Scorer] = {
        "popularity": Popularity(split.counts),
        "co-occurrence": CoOccurrence(split.train, len(split.items)),
    }
    if seen == "keep":
        found["personal frequency"] = PersonalFrequency(split.counts)
    return found


def on_test(scorer: Scorer, split: Split, seen: str, k: tuple[int, ...] = (10,)) -> dict[str, float]:
    """Full-ranking metrics at each k, and "pop100 hr@10": among 100 popularity-drawn negatives, fixed seed, all
    users.
    """
    full = evaluate(scorer, split.test, counts=split.counts, k=k, seen=seen)
    sampled = evaluate(scorer, split.test, counts=split.counts, k=(10,), seen=seen, protocol="pop100")
    return full | {"pop100 hr@10": sampled["hr@10"]}


def result_table(results: Mapping[str, Mapping[str, float]], k: Sequence[int] = (10,)) -> str:
    """One row a scorer; a column "train s" where a result has "seconds"."""
    columns = [f"{name}@{cutoff}" for cutoff in k for name in ("recall", "ndcg")]
    columns += ["pop100 hr@10", *(f"{name}@{cutoff}" for cutoff in k for name in ("diversity", "popularity"))]
    timed = any("seconds" in result for result in results.values())
    rows = []
    for name, result in results.items():
        cells = [
            f"{result[c]:.0f}" if c.startswith(("diversity", "popularity")) else f"{result[c]:.4f}" for c in columns
        ]
        seconds = [f"{result['seconds']:.1f}" if "seconds" in result else "-"] if timed else []
        rows.append([name, *cells, *seconds])
    return table(["", *columns, *(["train s"] if timed else [])], rows)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Plain text columns, the first to the left, the others to the right."""
    width = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [
        "  ".join([row[0].ljust(width[0]), *(c.rjust(w) for c, w in zip(row[1:], width[1:], strict=True))])
        for row in [header, *rows]
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def popularity_shares(items: np.ndarray | torch.Tensor, counts: np.ndarray) -> list[float]:
    """Share of `items` per bucket of train clicks: none, 1, 2-3, 4-7, ... (a bucket is one step of log2)."""
    # frexp's exponent is floor(log2(count)) + 1 from 1 on, and 0 for 0.
    bucket = np.frexp(counts.astype(np.float64))[1]
    tally = np.bincount(bucket[np.asarray(items).ravel()], minlength=bucket.max() + 1)
    return [float(share) for share in tally / tally.sum()]


def draw(path: Path, curves: Mapping[str, Sequence[float]], shares: Mapping[str, Sequence[float]]) -> str:
    """Writes the PNG and returns one line that says so, or that matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return "no picture: it needs matplotlib (pip install 'fastcl[recsys]')"
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for name, values in curves.items():
        left.plot(range(1, len(values) + 1), values, marker="o", label=name)
    left.set(title="Validation", xlabel="epoch", ylabel="NDCG@10 (full ranking)")
    for name, share in shares.items():
        right.plot(share, marker="o", label=name)
    buckets = len(next(iter(shares.values())))
    right.set_xticks(range(buckets), ["0", *(str(2**b) for b in range(buckets - 1))], rotation=45)
    right.set(title="What is shown (top 10) and what came next", xlabel="clicks in train, from", ylabel="share")
    left.legend()
    right.legend()
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, format="png", dpi=120)
    temporary.replace(path)
    return f"picture: {path}"
