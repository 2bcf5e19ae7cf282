"""What two processes train together, for test_recsys_torchrun.py to compare: torchrun ... train_ranks.py TABLE FOLDER.

SASRec; ContrastVAE; CLRec; and CLRec stopped within an epoch and resumed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from fastcl.recsys import CLRec, ContrastVAE, Interactions, SASRec, fit, launch, resume, state

OPTIONS: dict[type, dict[str, Any]] = {
    SASRec: {"dim": 16, "batch": 7, "max_len": 5, "dropout": 0.0},
    CLRec: {
        **{"dim": 16, "batch": 21, "negatives": 50, "max_len": 5},
        **{"negatives_from": "vectors", "tasks": ("u2i", "u2u"), "momentum": 0.9},
    },
    ContrastVAE: {"dim": 16, "batch": 7, "max_len": 5, "dropout": 0.0, "kl_steps": 10},
}


class Stop(Exception):
    """An interruption that meets every process at the same save."""


def main(table: Path, out: Path) -> None:
    split = Interactions.read(table, user="who", item="what", time="when").split()
    with launch.threads(1), launch.processes("cpu"):
        options: dict[str, Any] = {"epochs": 3, "progress": False}
        fit(SASRec(split.items, seed=0, **OPTIONS[SASRec]), split, out=out / "sasrec", **options)
        fit(ContrastVAE(split.items, seed=0, **OPTIONS[ContrastVAE]), split, out=out / "contrastvae", **options)
        options["save_every"] = 0.0
        fit(CLRec(split.items, seed=0, **OPTIONS[CLRec]), split, out=out / "clrec", **options)
        save, saves = state.save, 0

        def save_or_stop(*args: Any) -> None:
            nonlocal saves
            if saves == 20:
                raise Stop
            saves += 1
            save(*args)

        state.save = save_or_stop
        try:
            fit(CLRec(split.items, seed=0, **OPTIONS[CLRec]), split, out=out / "stopped", **options)
        except Stop:
            state.save = save
        resume(out / "stopped", split, progress=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
