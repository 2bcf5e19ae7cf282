"""fastcl export: the item vectors of a run, as a NumPy file or a Faiss index, and its user encoder as a graph."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastcl.recsys.cli.cold import add_items_option, with_new_items
from fastcl.recsys.cli.runs import Run, inputs_of, tell, unfinished
from fastcl.recsys.data import Histories, Items
from fastcl.recsys.data.reading.formats import refuse_unused
from fastcl.recsys.data.source import Source
from fastcl.recsys.options import at_least
from fastcl.recsys.serving.graph import require_onnx
from fastcl.recsys.serving.recommend import known_histories
from fastcl.recsys.serving.vectors import FILES, WRITERS, export, require_faiss
from fastcl.recsys.training import checkpoint
from fastcl.recsys.training.threads import add_threads
from fastcl.recsys.writing import check_folder

# What an export needs beside fastcl; a missing package is an error before any work.
REQUIRED: dict[str, Callable[[], Any]] = {"faiss": require_faiss, "onnx": require_onnx}


def add(commands: Any) -> None:
    parser = commands.add_parser("export", help="item vectors and user encoder of a run, for other programs")
    option = parser.add_argument
    option("folder", metavar="RUN", help="run folder")
    option(
        "--to",
        choices=list(WRITERS),
        default="npy",
        help="npy: a NumPy file; faiss: an index (fastcl[ann]); torch, onnx: a NumPy file, and the user encoder as a "
        "graph for torch.export.load or onnxruntime (fastcl[onnx]) (default: %(default)s)",
    )
    kinds = "Faiss index factory string (default: HNSW32; from 200,000 items on IVF, as IVF1024,Flat for a million)"
    option("--index", help=kinds)
    option("--queries", metavar="FILE", help="interactions to measure recall with (default: the data of the run)")
    option("-k", type=int, default=10, help="length of the lists whose recall is measured (default: %(default)s)")
    option("--seed", type=int, default=0, help="seed of the sample of queries (default: %(default)s)")
    option("-o", "--out", metavar="FOLDER", required=True, help="folder to write to")
    add_items_option(parser)
    add_threads(parser)
    option("--json", action="store_true", help="one JSON document on stdout: the content of export.json")
    parser.set_defaults(run=run, names={"model": "RUN", "format": "--queries", "columns": "--queries"})


def run(args: argparse.Namespace) -> None:
    at_least(1, "-k", args.k)
    at_least(0, "--seed", args.seed)
    REQUIRED.get(args.to, lambda: None)()
    if args.to != "faiss":
        given = {"--queries": (args.queries, None), "--index": (args.index, None), "-k": (args.k, 10)}
        refuse_unused({**given, "--seed": (args.seed, 0)}, "expected --to faiss with it")
    config = checkpoint.read_config(args.folder)
    named = {"--queries": args.queries, "--items": args.items}
    check_folder("-o", args.out, FILES, {**named, **inputs_of(args.folder, config)})
    model = with_new_items(checkpoint.load(args.folder), config, args.items)
    tell([note for note in [unfinished(Run(Path(args.folder), config, model))] if note])
    queries = _queries(args.queries, config, model.items) if args.to == "faiss" else None
    found = export(model, args.out, args.to, queries=queries, k=args.k, index=args.index, seed=args.seed)
    if args.json:
        print(json.dumps(found))
        return
    print(f"{args.out}: {found['items']:,} vectors of {found['dim']} in {found['file']}, compare by inner product")
    if "encoder" in found:
        inputs = ", ".join(found["inputs"])
        print(f"{found['encoder']}: {inputs} of a history's newest {found['clicks']:,} clicks to a vector")
    if "index" in found:
        recall = next(f"{name} {value:.4f}" for name, value in found.items() if name.startswith("recall@"))
        print(f"{found['index']}: {recall} against exact search, {found['query_count']:,} queries ({found['queries']})")
        print(f"one query takes {found['query_ms']:.2f} ms, exact search {found['exact_ms']:.2f} ms")


def _queries(file: str | None, config: dict[str, Any], items: Items) -> Histories | None:
    """Histories of `file`, else of the run's data; None where the data has moved or the run does not name it."""
    if file is None and not config.get("data"):
        return None
    try:
        log = Source.recorded(config).read_clicks(*([] if file is None else [file]))
    except FileNotFoundError:
        if file is not None:
            raise
        print("the run's data has moved: recall is measured with single items; see --queries", file=sys.stderr)
        return None
    known, _ = known_histories(items, log)
    return known.take(known.lengths.nonzero()[0])
