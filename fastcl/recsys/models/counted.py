"""The floors as models: what floors.py counts and scores, trained in one pass, saved and served like any model. No
weights are learned here.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fastcl.recsys.data import Histories, Items, Scorer
from fastcl.recsys.data.scoring import check_items
from fastcl.recsys.models.base import Model
from fastcl.recsys.models.floors import DECAY, MIX, STEPS, CoOccurrence, PersonalFrequency, Popularity
from fastcl.recsys.models.ragged import Ragged
from fastcl.recsys.options import above, at_least, between
from fastcl.recsys.settings import setting, settled


class Counted(Model):
    """A model that counts the clicks of the training. One pass does that, so that `fit` takes epochs=1, and neither a
    learning rate nor a start from an earlier run.
    """

    learns = False
    item_tables = ()
    counts: nn.Parameter  # float64 [I+1], the train clicks of each item; frozen

    def __init__(self, items: Items, config: Any) -> None:
        super().__init__(items, config)
        self.counts = nn.Parameter(torch.zeros(len(items) + 1, dtype=torch.float64), requires_grad=False)

    @abstractmethod
    def scorer(self) -> Scorer:
        """The scorer of what was counted."""

    def count(self, train: Histories) -> None:
        """Counts the clicks of the training, in place of those that were counted before."""
        self.counts.copy_(torch.from_numpy(np.bincount(train.item, minlength=len(self.items) + 1)))

    def scores(self, histories: Histories) -> Tensor:
        check_items(self, histories, "histories")
        return self.scorer().scores(histories)

    def encode(self, histories: Histories) -> Tensor:
        """ValueError: scores are no inner products."""
        return self.item_vectors()

    def loss(self, batch: Histories) -> Tensor:
        """0: there is nothing to learn."""
        return torch.zeros((), dtype=torch.float32, device=self.device, requires_grad=True)

    def targets(self, batch: Histories) -> int:
        return 1

    def steps(self, train: Histories) -> int:
        return int(len(train.item) > 0)

    def batches(self, train: Histories, rng: np.random.Generator) -> Iterator[Histories]:
        """One batch, which is all of `train`; every process counts all of it."""
        self.count(train)
        return iter([train])

    @property
    def _counts(self) -> np.ndarray:
        return self.counts.numpy(force=True).astype(np.int64)


@dataclass(frozen=True)
class PopularConfig:
    """Settings of `Popular`: it has none."""


class Popular(Counted):
    """Every item by its train clicks, the same list for everybody.

    Args:
        items: the item table.
        config: the settings, none.
        seed: of no effect, since nothing is drawn.

    >>> from fastcl.recsys import Popular, bundled, evaluate, fit
    >>> split = bundled("purchases").split()
    >>> model = Popular(split.items)
    >>> history = fit(model, split, epochs=1, seen="keep", progress=False)
    >>> round(evaluate(model, split.test, seen="keep")["recall@10"], 4)
    0.2085
    """

    name = "popular"
    Config = PopularConfig
    serves_strangers = True

    def __init__(self, items: Items, config: PopularConfig | None = None, *, seed: int = 0, **options: Any) -> None:
        super().__init__(items, settled(PopularConfig, config, options))

    def scorer(self) -> Popularity:
        return Popularity(self._counts, self.items)


@dataclass(frozen=True)
class FrequentConfig:
    """Settings of `Frequent`."""

    decay: float = setting(
        1.0, "Weight of a click for each later click of its history: 1 counts all alike, less prefers recent items."
    )

    def __post_init__(self) -> None:
        above(0.0, "decay", self.decay)
        between(0.0, 1.0 + 1e-9, "decay", self.decay)


class Frequent(Counted):
    """Every item by how often it occurs in the history itself; items that occur equally often by their train clicks.
    The floor of data with repeats, served with seen="keep".

    Args:
        items: the item table.
        config: the settings; None: the settings are the keywords `options`.
        seed: of no effect, since nothing is drawn.

    >>> from fastcl.recsys import Frequent, Histories, Items
    >>> Frequent(Items(ids=("a", "b", "c"))).scores(Histories.from_lists([[2, 3, 2]])).tolist()
    [[-inf, 0.0, 2.0, 1.0]]
    """

    name = "frequent"
    Config = FrequentConfig

    def __init__(self, items: Items, config: FrequentConfig | None = None, *, seed: int = 0, **options: Any) -> None:
        super().__init__(items, settled(FrequentConfig, config, options))

    def scorer(self) -> PersonalFrequency:
        return PersonalFrequency(self._counts, self.items, decay=self.config.decay)


@dataclass(frozen=True)
class CoOccurringConfig:
    """Settings of `CoOccurring`."""

    decay: float = setting(
        DECAY, "Weight of a click for each later click of its history, and of a transition for each step."
    )
    steps: int = setting(STEPS, "Clicks behind an item that count as transitions from it.")
    mix: float = setting(MIX, "Weight of the transitions against the cosines of the items' users.")

    def __post_init__(self) -> None:
        above(0.0, "decay", self.decay)
        between(0.0, 1.0 + 1e-9, "decay", self.decay)
        at_least(1, "steps", self.steps)
        between(0.0, float("inf"), "mix", self.mix)


class CoOccurring(Counted):
    """Items by how often they occur with those of the history: cosines of the items' users, and transitions, as in
    `CoOccurrence`. A run folder holds the train histories, which every score is computed from.

    Args:
        items: the item table.
        config: the settings; None: the settings are the keywords `options`.
        seed: of no effect, since nothing is drawn.

    >>> from fastcl.recsys import CoOccurring, Interactions, fit, similar
    >>> log = {"user": list("aabbcc"), "item": list("xyxyzw"), "time": [1, 2, 3, 4, 5, 6]}
    >>> split = Interactions.read(log).split("none")
    >>> model = CoOccurring(split.items)
    >>> history = fit(model, split, epochs=1, progress=False)
    >>> [(item, round(cosine, 3)) for item, cosine in similar(model, "x", k=2)][0]
    ('y', 1.0)
    """

    name = "cooccurrence"
    Config = CoOccurringConfig

    def __init__(self, items: Items, config: CoOccurringConfig | None = None, *, seed: int = 0, **options: Any) -> None:
        super().__init__(items, settled(CoOccurringConfig, config, options))
        self.clicks = Ragged(len(items))
        self._counted: tuple[Tensor, CoOccurrence] | None = None

    def count(self, train: Histories) -> None:
        super().count(train)
        self.clicks.set(train.offsets, train.item)

    def scorer(self) -> CoOccurrence:
        known = self._counted
        if known is None or known[0] is not self.clicks.item:
            made = CoOccurrence(self.clicks.histories, len(self.items), **vars(self.config))
            known = self._counted = (self.clicks.item, made)
        return known[1]

    def neighbours(self, item: int) -> Tensor:
        """float32 [I+1], the cosine of the users of item `item` with those of each item."""
        return self.scorer().cosines(item)
