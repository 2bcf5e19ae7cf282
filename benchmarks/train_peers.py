"""Trains another library's SASRec for bench_train.py, in that library's environment: PYTHON train_peers.py PEER IN OUT.

IN is JSON: train and history (a list of item numbers 1..I for each user), items (I), the settings, cpu_seconds. OUT is
JSON: the CPU seconds of every epoch, the targets of an epoch, and the ten best unseen items for each history. Full
softmax, one thread. Must not import fastcl, which these environments do not have.
"""

# mypy: disable-error-code="import-not-found,import-untyped"

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch


def clock(base: type, cpu_seconds: float, epochs: list[float]) -> Any:
    """A Lightning callback that appends each epoch's CPU seconds and ends the training once they are used up."""

    class Clock(base):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            self.begun = time.process_time()

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            epochs.append(time.process_time() - self.begun)
            trainer.should_stop = sum(epochs) >= cpu_seconds

    return Clock()


def trainer_options(callback: Any) -> dict[str, Any]:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return {"accelerator": "cpu", "max_epochs": 10_000, "callbacks": [callback], "enable_model_summary": False, **quiet}


def rectools(task: dict[str, Any], epochs: list[float]) -> list[list[int]]:
    import pandas as pd
    import pytorch_lightning as pl
    from rectools import Columns
    from rectools.dataset import Dataset
    from rectools.models import SASRecModel

    def dataset(lists: list[list[int]]) -> Any:
        rows = [(user, item, 1.0, place) for user, row in enumerate(lists) for place, item in enumerate(row)]
        frame = pd.DataFrame(rows, columns=[Columns.User, Columns.Item, Columns.Weight, Columns.Datetime])
        frame[Columns.Datetime] = pd.to_datetime(frame[Columns.Datetime], unit="s")
        return Dataset.construct(frame)

    options = trainer_options(clock(pl.Callback, task["cpu_seconds"], epochs))
    model = SASRecModel(
        n_factors=task["dim"],
        n_blocks=task["blocks"],
        n_heads=task["heads"],
        session_max_len=task["max_len"],
        dropout_rate=task["dropout"],
        batch_size=task["batch"],
        lr=task["lr"],
        loss="softmax",
        get_trainer_func=lambda: pl.Trainer(**options),
    )
    model.fit(dataset(task["train"]))
    users = list(range(len(task["history"])))
    found = model.recommend(users, dataset(task["history"]), k=10, filter_viewed=True, on_unsupported_targets="ignore")
    found = found.sort_values([Columns.User, Columns.Rank])
    best = found.groupby(Columns.User)[Columns.Item].agg(list).to_dict()
    return [[int(item) for item in best.get(user, [])] for user in users]


def replay(task: dict[str, Any], epochs: list[float]) -> list[list[int]]:
    import lightning
    import pandas as pd
    from replay.data import FeatureHint, FeatureSource, FeatureType
    from replay.data.nn import TensorFeatureInfo, TensorFeatureSource, TensorSchema
    from replay.data.nn.parquet import ParquetModule
    from replay.nn.lightning import LightningModule
    from replay.nn.lightning.optimizer import OptimizerFactory
    from replay.nn.sequential import SasRec
    from replay.nn.transform.template.sasrec import make_default_sasrec_transforms

    pad, length = task["items"], task["max_len"]  # items are 0..I-1 here
    schema = TensorSchema(
        [
            TensorFeatureInfo(
                "item_id",
                is_seq=True,
                feature_type=FeatureType.CATEGORICAL,
                embedding_dim=task["dim"],
                padding_value=pad,
                cardinality=pad,
                feature_hint=FeatureHint.ITEM_ID,
                feature_sources=[TensorFeatureSource(FeatureSource.INTERACTIONS, "item_id")],
            )
        ]
    )
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "train.parquet")
        frame = pd.DataFrame({"item_id": [[item - 1 for item in row] for row in task["train"] if len(row) > 1]})
        frame.to_parquet(path)
        columns = {"item_id": {"shape": length + 1, "padding": pad}}
        data = ParquetModule(
            batch_size=task["batch"],
            metadata={"train": columns, "validate": columns},
            transforms=make_default_sasrec_transforms(schema),
            train_path=path,
            validate_path=path,
        )
        model = SasRec.from_params(
            schema,
            embedding_dim=task["dim"],
            num_heads=task["heads"],
            num_blocks=task["blocks"],
            max_sequence_length=length,
            dropout=task["dropout"],
        )
        options = trainer_options(clock(lightning.Callback, task["cpu_seconds"], epochs))
        module = LightningModule(model, optimizer_factory=OptimizerFactory(learning_rate=task["lr"]))
        lightning.Trainer(limit_val_batches=0, **options).fit(module, data)
    model.eval()
    best: list[list[int]] = []
    with torch.inference_mode():
        for row in task["history"]:
            recent = [item - 1 for item in row[-length:]]
            item = torch.full((1, length), pad)
            item[0, length - len(recent) :] = torch.tensor(recent)
            scores = model(feature_tensors={"item_id": item}, padding_mask=item != pad)["logits"][0, :pad]
            scores[torch.tensor(row) - 1] = -torch.inf
            best.append((scores.topk(10).indices + 1).tolist())
    return best


def main(peer: str, source: str, target: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    task = json.loads(Path(source).read_text())
    epochs: list[float] = []
    best = {"rectools": rectools, "replay": replay}[peer](task, epochs)
    # Both libraries train on the newest max_len targets of a user.
    targets = int(np.clip([len(row) - 1 for row in task["train"]], 0, task["max_len"]).sum())
    Path(target).write_text(json.dumps({"seconds": epochs, "targets": targets, "best": best}))


if __name__ == "__main__":
    main(*sys.argv[1:])
