"""Trains the nine click models on the rows, by their settings in the program of HPMN: binary cross entropy, Adam,
batches of 128.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.clicks.caser import Caser
from benchmarks.clicks.dien import DIEN
from benchmarks.clicks.dnn import DNN
from benchmarks.clicks.hpmn import HPMN
from benchmarks.clicks.model import ClickModel, batches
from benchmarks.clicks.recurrent import LSTM, GRU4Rec
from benchmarks.clicks.rows import Data, Rows, every_click
from benchmarks.clicks.rum import RUM
from benchmarks.clicks.shan import SHAN
from benchmarks.clicks.svdpp import SVDpp

Scored = Callable[[Rows], dict[str, np.ndarray]]  # the scores [N] of rows, by the name of a way of scoring
MODELS: dict[str, type[ClickModel]] = {
    "dnn": DNN,
    "svd++": SVDpp,
    "gru4rec": GRU4Rec,
    "caser": Caser,
    "dien": DIEN,
    "rum": RUM,
    "lstm": LSTM,
    "shan": SHAN,
    "hpmn": HPMN,
}
BATCH = 128
LABELS: dict[str, Callable[[Data], Rows]] = {"one a user": lambda data: data.train, "every click": every_click}


def trained(name: str, data: Data, options: Mapping[str, Any], epochs: int, seed: int) -> Iterator[Scored]:
    """What scores rows after each epoch.

    options: lr; decay, which is lambda of lambda / 2 |weights|^2; labels, a name in LABELS.
    """
    rows = LABELS[options.get("labels", "one a user")](data)
    model = MODELS[name](data.items, seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=options["lr"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for epoch in range(epochs):
            model.train()
            for batch, label in batches(rows, BATCH, np.random.default_rng((seed, epoch))):
                optimizer.zero_grad()
                fit = F.binary_cross_entropy_with_logits(model(batch), label)
                weights = sum((weight.square().sum() for weight in model.decayed()), torch.zeros(()))
                (fit + model.penalty() + options["decay"] / 2 * weights).backward()
                optimizer.step()
            yield lambda rows: {"": logits(model, rows)}


@torch.no_grad()
def logits(model: ClickModel, rows: Rows) -> np.ndarray:
    """float64 [N]."""
    model.eval()
    order = np.argsort(rows.history.lengths, kind="stable")
    found = np.empty(len(order))
    found[order] = torch.cat([model(batch) for batch, _ in batches(rows.take(order), 512)]).double().numpy()
    return found
