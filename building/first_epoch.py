"""The first epoch of a demo's CLRec, on the bundled purchases of some households: what try_wheels.py trains everywhere.

    python first_epoch.py HOUSEHOLDS

Needs nothing but an installed fastcl[recsys], writes a run into a temporary folder, and prints one line.
"""

import dataclasses
import sys
import tempfile
from pathlib import Path

import numpy as np

from fastcl.recsys.cli.main import main as command
from fastcl.recsys.data import bundled
from fastcl.recsys.models import CLRec
from fastcl.recsys.training.fit import fit


def main() -> None:
    whole = bundled("purchases")
    users = whole.users[: int(sys.argv[1])]
    data = dataclasses.replace(whole, users=users, log=whole.log.take(np.arange(len(users))))
    split = data.split()
    with tempfile.TemporaryDirectory() as folder:
        run, model = Path(folder) / "run", CLRec(split.items, seed=0)
        (epoch,) = fit(model, split, epochs=1, seed=0, seen="keep", out=run, progress=False)
        if command(["recommend", str(run), "--history", split.items.ids[0], "-o", str(Path(folder) / "list.csv")]) != 0:
            raise SystemExit(1)
    print(f"{len(users)} households, loss {epoch['loss']:.4f}, ndcg@10 {epoch['ndcg@10']:.4f}")


if __name__ == "__main__":
    main()
