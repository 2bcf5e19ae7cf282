"""What several processes train with their tables cut by rows, for test_row_shares.py to compare with one process; all
in float64. Each process writes what it has to FOLDER/rank.pt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastcl.recsys import BERT4Rec, CLRec, Interactions, SASRec, Split
from fastcl.recsys.models.rowtable import RowTable
from fastcl.recsys.training import loop, processes, rowshare, state
from fastcl.recsys.training.rowadam import RowAdam
from fastcl.recsys.training.state import Settings

# 105 targets and 21 windows: the last batch has one, so that other processes have an empty share.
SMALL: dict[type, dict[str, Any]] = {
    CLRec: {"dim": 8, "max_len": 6, "batch": 26, "negatives": 30, "time_cuts": (), "dropout": 0.0},
    SASRec: {"dim": 8, "max_len": 6, "batch": 5, "loss": "popular", "samples": 30, "dropout": 0.0},
    # Without attention dropout either; all clicks but the newest are seen, so that a process's draw of masks is all's.
    BERT4Rec: {"dim": 8, "max_len": 6, "batch": 5, "dropout": 0.0, "attention_dropout": 0.0, "last_only": 1.0},
}


def clicks() -> list[tuple[str, str]]:
    """User and item of each, oldest first."""
    rng = np.random.default_rng(0)
    share = 1 / np.arange(1, 101) ** 0.9
    return [
        (f"u{user}", f"i{item}")
        for user in range(21)
        for item in rng.choice(100, size=8, replace=False, p=share / share.sum())
    ]


def split() -> Split:
    users, items = zip(*clicks(), strict=True)
    return Interactions.read({"user": users, "item": items}, time=None).split()


# CLRec's own objective has negatives from each process's batches, so that it depends on how many there are.
ALONE: dict[str, tuple[type, dict[str, Any]]] = {
    "clrec": (CLRec, {"objective": "sampled_softmax"}),
    "sasrec": (SASRec, {}),
    "gbce": (SASRec, {"loss": "gbce"}),
    "softmax": (SASRec, {"loss": "softmax", "debias": 0.5}),
    "bert4rec": (BERT4Rec, {"loss": "softmax"}),
}
TOGETHER: dict[str, tuple[type, dict[str, Any]]] = {
    "rows": (CLRec, {"negatives_from": "batch"}),
    "dense": (CLRec, {"negatives_from": "batch", "table": "dense"}),
}


def trained(kind: type, data: Split, options: dict[str, Any], eps: float = 1e-6) -> dict[str, Any]:
    """eps: of Adam. The larger it is, the less of the rounding of a gradient near zero becomes a step."""
    model = kind(data.items, seed=1, **{"table": "rows"} | SMALL[kind] | options).double()
    run = loop.new_run(model, data, Settings(2, 1e-2))
    run.optimizer = RowAdam(model, 1e-2, (0.9, 0.98), eps=eps)
    model.share = (processes.rank(), processes.count())
    losses = []
    for _ in range(2):
        losses.append(loop.epoch(run))
        run.progress = state.Progress([*run.progress.history, {"best": True}])
    rows = {name: len(table.weight) for name, table in run.optimizer.tables.items()}
    tables, cut = run.optimizer.tables, run.optimizer.cut_state
    kept = {
        key: rowshare.whole(tensor, tables[key.rpartition("/")[0]].num_embeddings) if key in cut else tensor
        for key, tensor in run.optimizer.row_state().items()
    }
    run.optimizer.join()
    return {"losses": losses, "weights": model.state_dict(), "rows": rows, "state": kept}


def lookups() -> dict[str, Any]:
    """Ids of one owner alone, of nobody, of all, and the same ones in all processes, from a table of three rows."""
    rank, found = processes.rank(), []
    model = torch.nn.ModuleDict({"table": RowTable(3, 2, std=0.1)}).double()
    model["table"].weight.data.copy_(torch.arange(6.0).view(3, 2))
    optimizer = RowAdam(model, 1e-2, (0.9, 0.98))
    with optimizer.reading():
        for ids in ([0], [], [2, 0, 1, 1], [1] * rank, [2] if rank == 0 else []):
            wanted = torch.tensor(ids, dtype=torch.int64)
            optimizer.read([(model["table"], wanted)])
            found.append(model["table"](wanted).detach().clone())
            (model["table"](wanted) * (1 + rank)).sum().backward()
        optimizer.step_rows(0.5)
    optimizer.join()
    return {"found": found, "table": model["table"].weight}


def main(folder: Path) -> None:
    with processes.threads(1), processes.processes("cpu"):
        data, rank = split(), processes.rank()
        results = {name: trained(kind, data, options) for name, (kind, options) in ALONE.items()}
        results |= {name: trained(kind, data, options, eps=1e-13) for name, (kind, options) in TOGETHER.items()}
        results["lookups"] = lookups()
        model = torch.nn.ModuleDict({"table": RowTable(3, 2, std=0.1)})
        optimizer = RowAdam(model, 1e-2, (0.9, 0.98))
        with optimizer.reading():
            try:
                optimizer.read([(model["table"], torch.tensor([7 if rank == 1 else 0]))])
            except ValueError as error:
                results["refused"] = str(error)
        torch.save(results, folder / f"{rank}.pt")
