"""The methods that bench_debias.py trains on a log of clicks, by name. All but Multi-CLRec have the same encoder.

The models are fastcl's own. "IPW, known" also sees the policy and "CLRec, impressions" the impressions, neither of
which a log of clicks contains: they show what knowing these is worth.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import fastcl
from benchmarks.simulator import World
from fastcl.recsys import CLRec, MultiCLRec
from fastcl.recsys.data import Cases, Histories, Items, Split
from fastcl.recsys.models import Model
from fastcl.recsys.models.clrec.model import Batch, CLRecConfig
from fastcl.recsys.models.clrec.objectives import Objective, Pairs
from fastcl.recsys.training import loop
from fastcl.recsys.training.state import Progress, Settings


class Log(NamedTuple):
    """The clicks, which all methods see; the impressions and the policy, which one method each sees; the world."""

    clicks: Histories
    impressions: np.ndarray  # int64 [I+1]
    policy: np.ndarray  # [U, I]
    world: World


Method = Callable[[Log, int, int], Model]  # (log, epochs, seed) -> trained model


def trained(model: Model, clicks: Histories, epochs: int, seed: int) -> Model:
    """Trains by Adam with a falling learning rate. The last epoch is kept: validation clicks would be biased, too."""
    none = np.empty(0, np.int64)
    cases = Cases(none, clicks.take(none), none)
    users = tuple(f"user {row}" for row in range(len(clicks)))
    split = Split(model.items, users, clicks, cases, cases, np.bincount(clicks.item, minlength=len(model.items) + 1))
    run = loop.new_run(model, split, Settings(epochs, model.config.lr, seed=seed))
    with torch.random.fork_rng(devices=[]):
        for epoch in range(epochs):
            loss = sum(loop.epoch(run).values())
            run.progress = Progress([*run.progress.history, {"epoch": epoch + 1, "loss": loss}])
    return model.eval()


class ImpressionNegatives(CLRec):
    """CLRec as its theorem assumes it: negatives are drawn from the impressions, which follow q(y)."""

    def __init__(self, items: Items, impressions: np.ndarray, **options: Any) -> None:
        super().__init__(items, negatives_from="batch", **options)
        self.objective = Objective(_contrastive)
        self._share = impressions[1:] / impressions[1:].sum()

    def batches(self, train: Histories, rng: np.random.Generator) -> Iterator[Batch]:
        for batch in super().batches(train, rng):
            drawn = 1 + rng.choice(len(self._share), self.config.negatives, p=self._share)
            yield batch._replace(drawn=self.tensor(drawn))


def _contrastive(pairs: Pairs, config: CLRecConfig) -> Tensor:
    return fastcl.sampled_softmax(pairs.user, pairs.positive, pairs.keys, temperature=config.temperature)


class KnownPropensity(CLRec):
    """Inverse propensity weighting with the true propensities, q(y|x) of the policy."""

    def __init__(self, log: Log, **options: Any) -> None:
        super().__init__(log.world.items, objective="ipw", **options)
        self.propensity = _Policy(log.policy)

    def parts(self, batch: Batch) -> dict[str, Tensor]:
        assert isinstance(self.propensity, _Policy)
        self.propensity.row = batch.row
        return super().parts(batch)


class _Policy(nn.Module):
    row: Tensor

    def __init__(self, policy: np.ndarray) -> None:
        super().__init__()
        self.log_q = torch.from_numpy(np.log(policy)).float()

    def forward(self, before: Tensor, target: Tensor, log_share: Tensor) -> Tensor:
        return self.log_q[self.row, target - 1]


def method(make: Callable[..., Model], **options: Any) -> Method:
    def train(log: Log, epochs: int, seed: int) -> Model:
        return trained(make(log, seed=seed, **SHARED, **options), log.clicks, epochs, seed)

    return train


def on_items(model: Callable[..., Model]) -> Callable[..., Model]:
    """Adapts a model that sees only the clicks to a method's arguments."""
    return lambda log, **options: model(log.world.items, **options)


# Settings of all methods, for the pooling encoder; other settings are the models' defaults. The clicks have no times.
SHARED: dict[str, Any] = {
    "dim": 32,
    "hidden": 32,
    "max_len": 20,
    "dropout": 0.3,
    "batch": 512,
    "lr": 1e-3,
    "time_cuts": (),
}
METHODS: dict[str, Method] = {
    "full softmax": method(on_items(CLRec), objective="full_softmax"),
    "sampled softmax": method(on_items(CLRec), objective="sampled_softmax", negatives=1024),
    "IPW, known": method(KnownPropensity, weight_limit=100.0),
    "IPW, popularity": method(on_items(CLRec), objective="ipw", propensity="popularity"),
    "IPW, learned": method(on_items(CLRec), objective="ipw", propensity="learned"),
    "CLRec, impressions": method(
        lambda log, **options: ImpressionNegatives(log.world.items, log.impressions, **options), negatives=1024
    ),
    "CLRec, batch": method(on_items(CLRec), negatives_from="batch", log_q=0.0),
    "CLRec, queue of ids": method(on_items(CLRec), negatives_from="ids", log_q=0.0),
    "CLRec, queue of vectors": method(on_items(CLRec), negatives_from="vectors", log_q=0.0),
    "Multi-CLRec": method(on_items(MultiCLRec), intents=8),
    "Multi-CLRec, own clicks": method(on_items(MultiCLRec), intents=8, clicks="own"),
}
