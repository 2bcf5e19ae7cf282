"""Speed of training SASRec with full softmax, and the quality reached in equal CPU time, against other libraries.

    python -m benchmarks.bench_train LOG [--replay PYTHON] [--rectools PYTHON] [--cpu-seconds 60]

The trainers run one after the other on one thread, with the same data, width, depth, history length, batch size,
dropout and initial learning rate. The other libraries run in environments of their own (train_peers.py). A target is a
(history, next click) pair that enters the loss: the others take the newest `max_len` of a user, fastcl takes all, in
windows. CPU seconds are by time.process_time and leave out reading and ranking. "ndcg@10" ranks all unseen items for
the test clicks, after --cpu-seconds of training; an epoch that has begun is finished. fastcl's learning rate falls
linearly to zero, the others' is constant. There is one seed: differences in the third decimal are noise. Writes
benchmarks/results/train.json and train.md.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import RESULTS, machine, markdown, write_json, write_text
from fastcl.recsys import Interactions, SASRec, Split
from fastcl.recsys.serving.recommend import rank
from fastcl.recsys.training.loop import epoch, new_run
from fastcl.recsys.training.state import Progress, Settings

SETTINGS = {"dim": 64, "blocks": 2, "heads": 2, "max_len": 50, "batch": 128, "dropout": 0.2, "lr": 1e-3}
NAMES = {"replay": "RePlay 0.22", "rectools": "RecTools 0.19"}


def ours(split: Split, settings: dict[str, Any], cpu_seconds: float) -> dict[str, Any]:
    """Trains as `fit` does, without validation. A discarded training of two epochs tells how many fit the time."""
    targets = int(np.maximum(split.train.lengths - 1, 0).sum())

    def trained(epochs: int, first: int) -> tuple[SASRec, list[float]]:
        model, seconds = SASRec(split.items, seed=0, **settings), []
        run = new_run(model, split, Settings(epochs, settings["lr"]), None)
        for number in range(1, first + 1):
            begun = time.process_time()
            loss = sum(epoch(run, lambda: None, "").values())
            seconds.append(time.process_time() - begun)
            run.progress = Progress([*run.progress.history, {"epoch": number, "loss": loss, "best": True}])
        return model.eval(), seconds

    epochs = max(1, round(cpu_seconds / trained(2, 2)[1][1]))
    model, seconds = trained(epochs, epochs)
    best, _ = rank(model, split.test.history, 10, "mask")
    return {"seconds": seconds, "targets": targets, "best": best.tolist()}


def theirs(peer: str, python: str, split: Split, settings: dict[str, Any], cpu_seconds: float) -> dict[str, Any]:
    lists = {name: rows(histories) for name, histories in (("train", split.train), ("history", split.test.history))}
    task = {**settings, **lists, "items": len(split.items), "cpu_seconds": cpu_seconds}
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "in.json", Path(folder) / "out.json"
        source.write_text(json.dumps(task))
        script = Path(__file__).with_name("train_peers.py")
        subprocess.run([python, str(script), peer, str(source), str(target)], check=True, cwd=folder)
        return json.loads(target.read_text())


def rows(histories: Any) -> list[list[int]]:
    return [part.tolist() for part in np.split(histories.item, histories.offsets[1:-1])]


def row(name: str, found: dict[str, Any], target: np.ndarray) -> dict[str, Any]:
    """A row of the table. The first epoch is the warm-up, which counts in the total only."""
    seconds = statistics.median(found["seconds"][1:] or found["seconds"])
    hits = zip(target.tolist(), found["best"], strict=True)
    gain = [1.0 / np.log2(best.index(item) + 2.0) if item in best else 0.0 for item, best in hits]
    return {
        "trainer": name,
        "targets an epoch": found["targets"],
        "CPU-s an epoch": seconds,
        "targets a CPU-s": round(found["targets"] / seconds),
        "epochs": len(found["seconds"]),
        "CPU-s in all": sum(found["seconds"]),
        "test ndcg@10": f"{np.mean(gain):.4f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("log", metavar="LOG")
    for column, default in (("user", "user"), ("item", "item"), ("time", "timestamp")):
        option(f"--{column}", default=default, metavar="COLUMN")
    for peer, name in NAMES.items():
        option(f"--{peer}", metavar="PYTHON", help=f"the interpreter of an environment with {name}")
    option("--cpu-seconds", type=float, default=60.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    split = Interactions.read(args.log, user=args.user, item=args.item, time=args.time).split()
    found = {"fastcl": ours(split, SETTINGS, args.cpu_seconds)}
    for peer, name in NAMES.items():
        if python := getattr(args, peer):
            found[name] = theirs(peer, python, split, SETTINGS, args.cpu_seconds)
    lines = [row(name, one, split.test.target) for name, one in found.items()]
    for line in lines:
        line["fastcl is faster"] = f"{lines[0]['targets a CPU-s'] / line['targets a CPU-s']:.2f}x"
    data = f"{Path(args.log).name}: {len(split.users):,} users, {len(split.items):,} items"
    facts = {"data": data, "settings": SETTINGS, "cpu_seconds": args.cpu_seconds, "machine": machine()}
    write_json(RESULTS / "train.json", {**facts, "rows": lines})
    settings = ", ".join(f"{name} {value}" for name, value in SETTINGS.items())
    head = f"SASRec, full softmax, {data}; {settings}; one thread, {facts['machine']['processor']}"
    text = f"{head}\n\n{markdown(lines)}\n"
    write_text(RESULTS / "train.md", text)
    print(text)


if __name__ == "__main__":
    main()
