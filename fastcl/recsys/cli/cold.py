"""What evaluate, recommend and export share about items and clicks that came after the training of a run."""

import argparse
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fastcl.recsys.cli.runs import Run
from fastcl.recsys.data import Scorer, Split
from fastcl.recsys.data.later import Later, later
from fastcl.recsys.data.padded import Padded
from fastcl.recsys.data.source import Source
from fastcl.recsys.evaluation.ranking import evaluate
from fastcl.recsys.models import Model
from fastcl.recsys.models.carrying import Among, check_encodes, of_features, with_items
from fastcl.recsys.models.floors import Popularity


def add_items_option(parser: Any) -> None:
    text = (
        "table of items that were not in training, written like the run's item features, whose columns it has: a model "
        "that encodes features gives them vectors"
    )
    parser.add_argument("--items", metavar="FILE", help=text)


def with_new_items(model: Model, config: Mapping[str, Any], file: str | None) -> Model:
    """The model with the items of --items; without the option the model itself. The model is asked first, so that one
    which encodes no features is refused before the file is read.
    """
    if file is None:
        return model
    check_encodes(model)
    return with_items(model, Source.recorded(config).more_items(model.items, file))


def among_new(scorers: Mapping[str, Scorer], split: Split, k: tuple[int, ...]) -> dict[str, dict[str, float]]:
    """Recall of each scorer where each target is ranked among the items without a train click alone; beside them that
    of random scores ("chance"), and of the mean clicks of the items that share a feature value. Scorers that count
    clicks have no place here: all these items are equal to them.
    """
    new = np.append(False, split.counts[1:] == 0)
    which = np.flatnonzero(new)
    clicks = torch.from_numpy(split.counts)[1:, None]
    means, _ = of_features(clicks, split.items, split.items, which, ~new)
    popularity = np.zeros(len(new))
    popularity[which] = means[:, 0].numpy()
    found: dict[str, dict[str, float]] = {"chance": {f"recall@{n}": min(1.0, n / len(which)) for n in k}}
    of_values = {"popularity of the features": Popularity(popularity, split.items)} if split.items.features else {}
    for name, scorer in {**of_values, **scorers}.items():
        measured = evaluate(Among(scorer, new), split.test, k=k, metrics=("recall",))
        found[name] = {column: measured[column] for column in found["chance"]}
    return found


def on_later(run: Run, split: Split, args: argparse.Namespace) -> tuple[Scorer, Later]:
    """The cases of --on FILE, and the run's model as a scorer of their items."""
    model = with_new_items(run.model, run.config, args.items)
    source = Source.of_run(run.folder, run.config, args.data)
    found = later(split, source.read_clicks(), source.read_clicks(args.on), model.items)
    table = found.split.items
    return (model if len(table) == len(model.items) else Padded(model, table)), found
