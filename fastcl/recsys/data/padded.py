"""A model as the scorer of a larger item table than its own, such as that of a log with later items. The scores are the
model's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fastcl.recsys.data.containers import Histories, Items


class Padded:
    """A scorer of a larger item table that a model does not know: further items are passed over in histories and have
    the score -inf, so that they are never recommended.

    items: the items of `scorer`, then others. A history needs an item that the scorer knows.
    """

    def __init__(self, scorer: Any, items: Items) -> None:
        self.scorer, self.items, self.known = scorer, items, len(scorer.items)

    def readable(self, histories: Histories) -> Histories:
        """The histories without the items that the scorer passes over."""
        keep = histories.item <= self.known
        before = np.append(0, np.cumsum(keep))
        time = None if histories.time is None else histories.time[keep]
        offsets = before[histories.offsets].astype(np.int64)
        return Histories(offsets, histories.item[keep], time, histories.items, histories.users)

    def scores(self, histories: Histories) -> Tensor:
        """float32 [B, I+1]"""
        own = replace(self.readable(histories), items=self.scorer.items)
        scores: Tensor = self.scorer.scores(own)
        return nn.functional.pad(scores, (0, len(self.items) - self.known), value=-torch.inf)
