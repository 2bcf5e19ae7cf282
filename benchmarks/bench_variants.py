"""What the variants of docs/guide/variants.md cost beside the same losses in eager PyTorch and in other packages.

    python -m benchmarks.bench_variants [--only hardness,cap] [--rows 2048] [--repeats 9] [--threads 1]
        [--output benchmarks/results/variants]

Forward and backward. All forms of a loss run in one process and take turns; a ratio is the median over measurements
that follow each other. eager: `fastcl.reference`, the textbook form. package: that of the row, if it is installed. A
value that differs from fastcl's by more than a thousandth ends the program.
"""

import argparse
import functools
import importlib
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import fastcl
from benchmarks.common import alternate, chosen, hardware, median_ratio, publish, report, step
from fastcl import reference

D, CLASSES, OWN = 128, 4096, 8
Loss = Callable[..., Tensor]


class Inputs(NamedTuple):
    query: Tensor  # [N, D], length 1
    key: Tensor  # [N, D], length 1
    shared: Tensor  # [N, D], length 1
    table: Tensor  # [CLASSES, D], length 1
    label: Tensor  # int64 [N]
    shares: Tensor  # [N, OWN], of the classes in `best`
    best: Tensor  # int64 [N, OWN]


def inputs(n: int) -> Inputs:
    g = torch.Generator().manual_seed(0)
    query, key, shared, table = (
        F.normalize(torch.randn(m, D, generator=g), dim=1).requires_grad_() for m in (n, n, n, CLASSES)
    )
    best = torch.randint(CLASSES, (n, OWN), generator=g)
    label = torch.randint(CLASSES, (n,), generator=g)
    return Inputs(query, key, shared, table, label, torch.rand(n, OWN, generator=g).softmax(1), best)


class Case(NamedTuple):
    ours: Callable[[Any, Inputs], Tensor]  # of fastcl or of fastcl.reference, and the inputs
    package: str = ""
    theirs: Callable[[Any, Inputs], Tensor] | None = None  # of the package's module of losses
    eager: bool = True  # False: the textbook form is written for clarity alone, one class after the other


def pair(name: str, **options: Any) -> Callable[[Any, Inputs], Tensor]:
    return lambda m, x: getattr(m, name)(x.query, x.key, **options)


def pairs(name: str, **options: Any) -> Callable[[Any, Inputs], Tensor]:
    return lambda m, x: getattr(m, name)(x.query, x.key, x.shared, **options)


def ranking(x: Inputs, m: Any, **options: Any) -> Tensor:
    loss = m.MultipleNegativesRankingLoss(None, scale=10.0, **options)
    return loss.compute_loss_from_embeddings([x.query, x.key], None)


def face(name: str, m: Any, x: Inputs, margin: float) -> Tensor:
    loss = getattr(m, name)(CLASSES, D, margin=margin, scale=10)
    del loss.W
    loss.W = x.table.T  # its own parameter is the table transposed
    return loss(x.query, x.label)


def margin(m: Any, x: Inputs, of: Callable[[Tensor], Tensor]) -> Tensor:
    return m.linear_cross_entropy(x.query, x.table, x.label, temperature=0.1, margin=of)


def stacked(x: Inputs) -> tuple[Tensor, Tensor]:
    """Both views, and the partner of each row."""
    return torch.cat([x.query, x.key]), torch.cat([x.key, x.query])


DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_doc")
RANKING = "sentence_transformers.sentence_transformer.losses"
METRIC = "pytorch_metric_learning.losses"
VIEWS = "lightly.loss"
AVERAGES = fastcl.Denominators(1 << 16).eval()
AVERAGES.log_average.zero_()
CASES: dict[str, Case] = {
    "infonce": Case(pair("infonce"), RANKING, lambda m, x: ranking(x, m)),
    "hardness": Case(
        pair("infonce", hardness=5.0), RANKING,
        lambda m, x: ranking(x, m, hardness_mode="in_batch_negatives", hardness_strength=5.0),
    ),
    "cap": Case(pair("infonce", cap=lambda s: s + 0.1)),
    "margin of a positive": Case(pair("infonce", margin=fastcl.cosface(0.2))),
    "label smoothing": Case(pair("infonce", label_smoothing=0.1)),
    "three directions": Case(
        lambda m, x: m.directional_infonce(x.query, x.key, 0.1, directions=DIRECTIONS), RANKING,
        lambda m, x: ranking(x, m, directions=DIRECTIONS),
    ),
    "cosface": Case(
        lambda m, x: margin(m, x, fastcl.cosface(0.35)), METRIC, lambda m, x: face("CosFaceLoss", m, x, 0.35),
        eager=False,
    ),
    "arcface": Case(lambda m, x: margin(m, x, fastcl.arcface(0.5)), eager=False),
    "several positives": Case(
        lambda m, x: m.multi_positive(
            x.query, x.key.repeat(2, 1), torch.arange(len(x.query)).repeat(2), x.shared
        )
    ),
    "soft targets": Case(lambda m, x: m.soft_cross_entropy(x.query, x.table, x.shares, x.best, 0.1)),
    "distillation": Case(lambda m, x: m.distill_kl(x.query, x.table, x.shares, x.best, 0.1)),
    "siglip": Case(
        lambda m, x: m.siglip(x.query, x.key, 10.0, -10.0), "open_clip.loss",
        lambda m, x: m.SigLipLoss()(x.query, x.key, torch.tensor(10.0), torch.tensor(-10.0)),
    ),
    "siglip of groups": Case(
        lambda m, x: m.siglip(x.query, x.key, 10.0, -10.0, ids=x.label % 512, key_ids=x.label % 512)
    ),
    "two views": Case(
        lambda m, x: m.nt_xent(x.query, x.key, 0.1), VIEWS, lambda m, x: m.NTXentLoss(0.1)(x.query, x.key)
    ),
    "decoupled views": Case(
        lambda m, x: m.dcl(*stacked(x), temperature=0.1, ids=torch.arange(len(x.query)).repeat(2)), VIEWS,
        lambda m, x: m.DCLLoss(0.1)(x.query, x.key),
    ),
    "gbce": Case(pairs("gbce", catalogue=100_000)),
    "sce": Case(
        lambda m, x: m.sce(x.query, x.table, x.label, temperature=0.1, buckets=x.shared[:32].detach()), eager=False
    ),
    "ccl": Case(pairs("ccl", margin=0.2)),
    "psl": Case(pairs("psl")),
    "bsl": Case(pairs("bsl", positive_temperature=0.2)),
    "sl_at_k": Case(pairs("sl_at_k", threshold=0.3)),
    "directau": Case(pair("directau")),
    "sogclr": Case(lambda m, x: m.sogclr(x.query, x.key, torch.arange(len(x.query)), AVERAGES, x.shared)),
}  # fmt: skip


def module(name: str) -> Any:
    try:
        return importlib.import_module(name) if name else None
    except ImportError:
        return None


def measured(name: str, n: int, repeats: int) -> dict[str, Any]:
    case, x = CASES[name], inputs(n)
    forms: dict[str, Callable[[], Tensor]] = {"fastcl": functools.partial(case.ours, fastcl, x)}
    if case.eager:
        forms["eager"] = functools.partial(case.ours, reference, x)
    other = module(case.package)
    if other is not None and case.theirs is not None:
        forms["package"] = functools.partial(case.theirs, other, x)
    values = {form: loss().item() for form, loss in forms.items()}
    for form, value in values.items():
        if abs(value - values["fastcl"]) > 1e-3 * max(1.0, abs(value)):
            raise SystemExit(f"{name}: expected {form} to have fastcl's value {values['fastcl']}, got {value}")
    learns = [t for t in x if t.requires_grad]
    seconds = alternate({form: step(loss, learns, True) for form, loss in forms.items()}, repeats)
    ratios = {form: median_ratio(seconds, form, "fastcl") if form in forms else None for form in ("eager", "package")}
    of = case.package.partition(".")[0] if case.package else None
    milliseconds = 1e3 * statistics.median(seconds["fastcl"])
    return {
        "variant": name, "ms": milliseconds, "eager / fastcl": ratios["eager"],
        "package / fastcl": ratios["package"], "package": of,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of variants")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, help="path without suffix")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    names = chosen(args.only, "--only", CASES, parser) or list(CASES)
    rows = [measured(name, args.rows, args.repeats) for name in names]
    what = f"{args.rows:,} rows and keys of {D} features, {CLASSES:,} classes, float32, {args.threads} threads"
    page = report(rows, f"{what}; forward and backward, medians of {args.repeats}")
    publish(page, {"machine": hardware(), "what": what, "rows": rows}, args.output)


if __name__ == "__main__":
    main()
