"""S3-Rec from its authors' pre-trained weights: our network and our training of the next item beside their logs.

    python -m benchmarks.s3rec_published --data FOLDER --authors FOLDER [--only Toys] [--states FOLDER]

The second folder is `reproduce` of the authors' program (github.com/RUCAIBox/CIKM2020-S3Rec, commit 2a81540), with
their weights after 150 pre-training passes and the logs of the training that followed. Our model gets these weights,
and trains and tests as the rows of S3-Rec in studies/contrastvae.json do. The result goes to
results/s3rec-published.json. A training that was interrupted goes on from its state.
"""

import argparse
import ast
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import RESULTS, hardware, write_json
from benchmarks.protocols import PROTOCOLS
from benchmarks.sources import attributes
from benchmarks.study import Plan, train
from fastcl.recsys.baselines.s3rec import WEIGHTS, S3Rec
from fastcl.recsys.data import Split

PASSES = 150  # of the published weights
SETS = ("Beauty", "Toys_and_Games")
PLAN = Plan(epochs=400, patience=20, schedule="constant", betas=(0.9, 0.999), valid=5000)
PROTOCOL = "ranking and drawn"
# Layers by our names and theirs.
LAYERS = {
    "norm": "LayerNorm",
    "to_attribute": "aap_norm",
    "to_item": "mip_norm",
    "to_covered": "map_norm",
    "to_segment": "sp_norm",
}
OF_BLOCK = {
    "out": "attention.dense",
    "norm_attention": "attention.LayerNorm",
    "feed.0": "intermediate.dense_1",
    "feed.2": "intermediate.dense_2",
    "norm_feed": "intermediate.LayerNorm",
}


def fill(model: S3Rec, theirs: dict[str, Tensor]) -> None:
    """Gives the model the authors' weights. The ids of items and attributes are row numbers of the authors' tables."""
    ids = [int(name) for name in model.items.ids]
    values = [int(name) for feature in model.items.features.values() for name in feature.values]
    item = theirs["item_embeddings.weight"]
    ours = {
        "item.weight": item[[0, *ids, len(item) - 1]],  # the mask token is the last row
        "position.weight": theirs["position_embeddings.weight"].flip(0),  # their last row is that of the newest click
        "attribute.weight": theirs["attribute_embeddings.weight"][values],
        "pretrained": model.pretrained,
    }
    layers = dict(LAYERS)
    for block in range(model.config.blocks):
        of_theirs = f"item_encoder.layer.{block}"
        layers |= {f"blocks.{block}.{name}": f"{of_theirs}.{other}" for name, other in OF_BLOCK.items()}
        for part in ("weight", "bias"):
            three = [theirs[f"{of_theirs}.attention.{name}.{part}"] for name in ("query", "key", "value")]
            ours[f"blocks.{block}.qkv.{part}"] = torch.cat(three)
    for name, other in layers.items():
        ours |= {f"{name}.{part}": theirs[f"{other}.{part}"] for part in ("weight", "bias")}
    model.load_state_dict(ours)


@torch.no_grad()
def pretraining(model: S3Rec, split: Split, batches: int = 100) -> dict[str, float]:
    """The losses of the pre-training without their weights, per prefix, on some batches and without dropout."""
    rng = np.random.default_rng(0)
    some = zip(range(batches), model.eval().batches(split.train, rng), strict=False)
    parts = [model.parts(batch) for _, batch in some]
    return {name: float(torch.stack([of[name] for of in parts]).mean()) / weight for name, weight in WEIGHTS.items()}


def log(path: Path) -> dict[str, Any]:
    """The mean loss of each epoch, validation HR@10 after it, and the test figures, of a log of the authors."""
    lines = [ast.literal_eval(line) for line in path.read_text().splitlines() if line.startswith("{")]
    *validated, test = (line for line in lines if "HIT@10" in line)
    return {
        "loss": [float(line["rec_avg_loss"]) for line in lines if "rec_avg_loss" in line],
        "valid hr@10": [float(line["HIT@10"]) for line in validated],
        "test": {f"{ours}@10": float(test[f"{theirs}@10"]) for ours, theirs in (("hr", "HIT"), ("ndcg", "NDCG"))},
    }


def run(name: str, data: Path, authors: Path, state: Path) -> dict[str, Any]:
    split = attributes(f"amazon/{name}", data).split
    theirs = torch.load(authors / f"{name}-epochs-{PASSES}.pt", weights_only=True, map_location="cpu")
    probe = S3Rec(split.items, seed=0, pretrain=1)
    losses = {"ours, before the pre-training": pretraining(probe, split)}
    fill(probe, theirs)
    losses["theirs, after it"] = pretraining(probe, split)
    model = S3Rec(split.items, seed=0, pretrain=0)
    fill(model, theirs)
    print(name, json.dumps(losses), flush=True)
    done = train(model, PLAN, 0, split, state, partial(say, name), PROTOCOL)
    logs = {str(passes): log(authors / f"Finetune_sample-{name}-{passes}.txt") for passes in (0, PASSES)}
    tested = PROTOCOLS[PROTOCOL](model).test(model, split.test)
    return {"data": f"amazon/{name}", "pre-training": losses, "authors": logs, "machine": hardware(), **done, **tested}


def say(name: str, done: dict[str, Any]) -> None:
    print(name, done["epochs"], *done["curve"][-1], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--authors", type=Path, required=True)
    parser.add_argument("--only", default="", help="only data sets with this in their names")
    parser.add_argument("--states", type=Path, default=Path("runs/s3rec"), help="folder of unfinished trainings")
    parser.add_argument("--output", type=Path, default=RESULTS / "s3rec-published.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    known = json.loads(args.output.read_text())["runs"] if args.output.exists() else []
    for name in SETS:
        if args.only in name and not any(row["data"] == f"amazon/{name}" for row in known):
            known.append(run(name, args.data, args.authors, args.states / name))
            write_json(args.output, {"plan": PLAN._asdict(), "runs": known})


if __name__ == "__main__":
    main()
