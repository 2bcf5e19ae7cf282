"""`fastcl demo`: trains SASRec and CLRec on purchases or ratings and writes one report about them.

The settings were chosen on validation data. All figures are measured in the run that prints them.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from fastcl.recsys.data import Scorer, Split, bundled
from fastcl.recsys.models import MODELS, CLRec, Model, SASRec
from fastcl.recsys.reporting import tables
from fastcl.recsys.reporting.cost import Shape, measure
from fastcl.recsys.serving.recommend import rank
from fastcl.recsys.training import checkpoint
from fastcl.recsys.training.fit import fit
from fastcl.recsys.writing import write_text

EXPECT = {
    "movies": "What to expect: on a log with so few ratings a movie, counting which movies the same people rate in a\n"
    "row, co-occurrence, is hard to beat. CLRec is level with it after two epochs; SASRec needs more than two\n"
    "minutes for that. With log_q=0, the form of its paper, CLRec's optimum ranks by preference over exposure: it\n"
    "widens what is shown, and on logs pays in recall for it.",
    "purchases": "What to expect: nearly half of all purchases are repeats. What a household bought most often, its\n"
    "personal frequency, is the floor to beat, and in these few epochs neither model gets there. A model is there for\n"
    "what is new to the household, which the last column shows. With log_q=0, the form\n"
    "of its paper, CLRec's optimum ranks by preference over exposure, widens what is shown and pays in recall for it.",
}

# data set -> how seen items are treated, and per model its epochs and settings
PLANS: dict[str, tuple[str, dict[str, tuple[int, dict[str, Any]]]]] = {
    "movies": (
        "mask",
        {
            "sasrec": (10, {"max_len": 20, "batch": 16, "lr": 3e-3, "dropout": 0.3}),
            "clrec": (2, {"lr": 2e-3}),
        },
    ),
    "purchases": (
        "keep",
        {"sasrec": (10, {"batch": 16, "lr": 2e-3}), "clrec": (2, {})},
    ),
}
USERS = 3


def run(data: str, out: str | Path, seed: int = 0) -> str:
    """Trains, measures, writes all files below `out` and returns the text of the report. Overwrites an earlier demo."""
    if data not in PLANS:
        raise ValueError(f"data: expected one of {', '.join(PLANS)}, got {data!r}")
    checkpoint.require_safetensors()
    out = Path(out)
    started = time.perf_counter()
    seen, plan = PLANS[data]
    split = bundled(data).split()
    results = {name: judged(scorer, split, seen) for name, scorer in tables.floors(split, seen).items()}
    models: dict[str, Model] = {}
    curves, shares = {}, {"what came next": tables.popularity_shares(split.test.target, split.counts)}
    for name, (epochs, options) in plan.items():
        model = models[name] = MODELS[name](split.items, seed=seed, **options)
        record = {"data": {"path": f"bundled:{data}"}}
        history = fit(model, split, epochs=epochs, out=out / name, seed=seed, seen=seen, force=True, record=record)
        seconds = sum(line["seconds"] for line in history)
        results[name] = judged(model, split, seen) | {"seconds": seconds}
        curves[name] = [line["ndcg@10"] for line in history]
        shown, _ = rank(model, split.test.history, 10, seen)
        shares[name] = tables.popularity_shares(shown, split.counts)
    print("measuring what the fused loss costs ...", file=sys.stderr, flush=True)
    costs = {name: measure(shape) | shape._asdict() for name, shape in _shapes(models, split).items()}

    counted = f"{len(split.users):,} users, {len(split.items):,} items, {int(split.counts.sum()):,} train clicks"
    picture = tables.draw(out / "report.png", curves, shares)
    text = "\n\n".join(
        [
            f"fastcl demo: {data} ({counted}; seen items: {seen})",
            tables.result_table(results),
            EXPECT[data],
            *(_for_user(case, models, split, seen) for case in _cases(len(split.test))),
            _cost_text(costs),
            "\n".join(
                [picture, *(f"run: {out / name}" for name in models), f"{time.perf_counter() - started:.0f} s in all"]
            ),
        ]
    )
    numbers = {
        "data": data,
        "seen": seen,
        "seed": seed,
        "results": results,
        "validation_ndcg@10": curves,
        "popularity": shares,
    }
    write_text(out / "report.txt", text + "\n")
    write_text(out / "report.json", json.dumps(numbers | {"cost": costs}, indent=2) + "\n")
    return text


def judged(scorer: Scorer, split: Split, seen: str) -> dict[str, float]:
    """The row of a scorer in the report: where seen items are kept, also how it does on items new to the user."""
    found = tables.on_test(scorer, split, seen)
    return found | tables.on_new_items(scorer, split) if seen == "keep" else found


def _cases(count: int) -> list[int]:
    return [count * (2 * nth + 1) // (2 * USERS) for nth in range(USERS)]


def _for_user(case: int, models: dict[str, Model], split: Split, seen: str) -> str:
    history = split.test.history.take(np.array([case]))
    label = split.items.label
    newest = history.last(3).item.tolist()
    lines = [
        f"user {split.users[split.test.user[case]]}, whose newest are  {' | '.join(map(label, newest))}",
        f"  and went on to  {label(int(split.test.target[case]))}",
    ]
    for name, model in models.items():
        items, _ = rank(model, history, 5, seen)
        lines.append(f"  {name:<6} shows  {' | '.join(label(item) for item in items[0].tolist() if item)}")
    return "\n".join(lines)


def _shapes(models: dict[str, Model], split: Split) -> dict[str, Shape]:
    """The shapes of the loss calls of the training. For SASRec the batch has its mean number of positions."""
    shapes = {}
    for name, model in models.items():
        if isinstance(model, SASRec):
            targets = int(np.maximum(split.train.lengths - 1, 0).sum())
            shapes[name] = Shape("softmax", targets // model.steps(split.train), len(split.items), model.config.dim)
        elif isinstance(model, CLRec):
            # All negatives have gradients, as the rows of an item table do.
            shapes[name] = Shape("softmax", model.config.batch, model.config.negatives, model.config.dim)
    return shapes


def _cost_text(costs: dict[str, dict[str, Any]]) -> str:
    rows = []
    for name, cost in costs.items():
        batch = cost["n"] if cost["kind"] == "queue" else 0
        extra = [f"{cost[f'{who}_bytes'] / 2**20:.1f}" for who in ("fused", "plain")]
        times = [f"{cost[f'{who}_ms']:.2f}" for who in ("fused", "plain")]
        shape = f"{name}: {cost['n']:,} x {cost['columns'] + batch:,} x {cost['dim']}"
        rows.append([shape, *times, f"{cost['plain_ms'] / cost['fused_ms']:.2f}x", *extra])
    header = ["loss, forward + backward", "fastcl ms", "PyTorch ms", "faster", "fastcl extra MiB", "PyTorch extra MiB"]
    return (
        tables.table(header, rows)
        + "\n(medians of alternating runs; extra peak resident memory, each in a process of its own)"
    )
