"""What two processes train together, for test_torchrun.py to compare: torchrun ... train_ranks.py TABLE FOLDER.

SASRec; ContrastVAE; MF and LightGCN; CLRec and MultiCLRec, and both stopped within an epoch and resumed; then SASRec
again as the command line trains it. One start for all, since each imports torch three times.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from fastcl.recsys import MF, CLRec, ContrastVAE, Epoch, Interactions, LightGCN, MultiCLRec, SASRec, fit, resume
from fastcl.recsys.cli import main as command_line
from fastcl.recsys.training import processes, state

OPTIONS: dict[type, dict[str, Any]] = {
    SASRec: {"dim": 16, "batch": 7, "max_len": 5, "dropout": 0.0},
    CLRec: {
        **{"dim": 16, "batch": 21, "negatives": 50, "max_len": 5},
        **{"negatives_from": "vectors", "tasks": ("u2i", "u2u"), "momentum": 0.9},
    },
    MultiCLRec: {
        **{"dim": 16, "batch": 21, "main": 31, "secondary": 9, "max_len": 5},
        **{"negatives_from": "vectors", "intents": 3, "served": 2},
    },
    MF: {"dim": 16, "batch": 21, "count": 30},
    LightGCN: {"dim": 16, "batch": 40, "negatives": "uniform", "count": 30, "layers": 2},
    ContrastVAE: {"dim": 16, "batch": 7, "max_len": 5, "dropout": 0.0, "kl_steps": 10},
}


class Stop(Exception):
    """An interruption that meets every process at the same save."""


def main(table: Path, out: Path) -> None:
    split = Interactions.read(table, user="who", item="what", time="when").split()
    with processes.threads(1), processes.processes("cpu"):
        options: dict[str, Any] = {"epochs": 3, "progress": False}

        def told(epoch: Epoch) -> None:
            with open(out / f"told-{processes.rank()}", "a") as file:
                print(epoch.number, epoch.last, file=file)

        sasrec = SASRec(split.items, seed=0, **OPTIONS[SASRec])
        fit(sasrec, split, out=out / "sasrec", on_epoch=told, **options)
        fit(sasrec, split, out=out / "halted", on_epoch=lambda epoch: processes.leads(), **options)
        fit(ContrastVAE(split.items, seed=0, **OPTIONS[ContrastVAE]), split, out=out / "contrastvae", **options)
        for kind in (MF, LightGCN):
            fit(kind(split.items, users=split.users, seed=0, **OPTIONS[kind]), split, out=out / kind.name, **options)
        options["save_every"] = 0.0
        save, saves = state.save, 0

        def save_or_stop(*args: Any) -> None:
            nonlocal saves
            if saves == 20:
                raise Stop
            saves += 1
            save(*args)

        for model in (CLRec, MultiCLRec):
            fit(model(split.items, seed=0, **OPTIONS[model]), split, out=out / model.name, **options)
            state.save, saves = save_or_stop, 0
            try:
                fit(model(split.items, seed=0, **OPTIONS[model]), split, out=out / f"stopped-{model.name}", **options)
            except Stop:
                state.save = save
            resume(out / f"stopped-{model.name}", split, progress=False)
    names = {*OPTIONS[SASRec], *SASRec.suited(split.train)}  # what the command would choose by itself is given too
    settings = [f"{name}={getattr(sasrec.config, name)}" for name in sorted(names)]
    options = ["--user", "who", "--item", "what", "--time", "when", "--epochs", "3", "--threads", "1", "--json"]
    words = ["train", str(table), "--model", "sasrec", "--set", *settings, *options, "-o", str(out / "command")]
    assert command_line.main(words) == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
