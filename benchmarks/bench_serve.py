"""The cost of serving: milliseconds for one history, users a second for many, and recall and speed of a Faiss index.

    OMP_NUM_THREADS=1 python -m benchmarks.bench_serve

Exact serving is measured with random weights, on which its cost does not depend. The recall of the index depends on
them: it is measured after a short training on the bundled purchases. `fastcl export` prints it for a model of your own.
Writes benchmarks/results/serve.json.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import alternate, machine, markdown, write_json
from fastcl.recsys import (
    MODELS,
    Histories,
    Interactions,
    Items,
    bundled,
    export,
    fit,
    frozen,
    recommend,
    recommend_users,
)
from fastcl.recsys.models import Model

RESULTS = Path(__file__).parent / "results" / "serve.json"
SIZES = (10_000, 100_000)
CLICKS = 20
USERS = 1_000


def one_history(model: Model, repeats: int) -> dict[str, float]:
    """Milliseconds of `recommend` for one history of 20 clicks and k = 10. "ms" and "CPU ms": wall time and CPU time in
    a `frozen` block, in which the items are encoded once, during the warm-up. "ms alone": wall time of a call outside
    such a block, which encodes the items too. Other work on the machine affects the CPU time less than the wall time.
    """
    history = [list(model.items.ids[:CLICKS])]
    processor = []

    def run() -> None:
        begin = time.process_time()
        recommend(model, history, k=10)
        processor.append(time.process_time() - begin)

    alone = alternate({"recommend": run}, repeats)["recommend"]
    processor.clear()
    with frozen(model):
        clock = alternate({"recommend": run}, repeats)["recommend"]
    found = {"ms": clock, "CPU ms": processor, "ms alone": alone}
    return {name: 1e3 * statistics.median(values) for name, values in found.items()}


def all_users(model: Model) -> float:
    """Users a second that `recommend_users` serves."""
    rng = np.random.default_rng(0)
    lists = rng.integers(1, len(model.items) + 1, (USERS, CLICKS)).tolist()
    data = Interactions(model.items, tuple(map(str, range(USERS))), Histories.from_lists(lists))

    def run() -> None:
        for _ in recommend_users(model, data, k=10).rows:
            pass

    return USERS / statistics.median(alternate({"users": run}, 3)["users"])


def index_recall() -> dict[str, Any]:
    split = bundled("purchases").split()
    model = MODELS["sasrec"](split.items, seed=0, batch=16)
    fit(model, split, epochs=2, lr=2e-3, seen="keep", progress=False)
    with tempfile.TemporaryDirectory() as folder:
        return export(model, folder, "faiss", queries=split.test.history)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = []
    for size in SIZES:
        items = Items(tuple(map(str, range(size))))
        for name in MODELS:
            model = MODELS[name](items, seed=0).eval()
            rows.append({"model": name, "items": size, **one_history(model, 30), "users a second": all_users(model)})
            print(rows[-1], flush=True)
    found = index_recall()
    write_json(RESULTS, {"machine": machine(), "clicks": CLICKS, "rows": rows, "index": found})
    print(markdown(rows))
    print(found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
