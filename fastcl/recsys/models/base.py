"""What training, evaluation and run folders ask of a model; a model file fills it in. No layers and no mathematics
here.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from fastcl.recsys.data import Histories, Items


class Model(nn.Module, ABC):
    """A sequential recommender. All its parameters exist after construction."""

    name: ClassVar[str]
    Config: ClassVar[type]
    # Which part of each batch `batches` gives, of how many: several processes share the batches out. For `bucketed`.
    share: tuple[int, int] = (0, 1)

    def __init__(self, items: Items, config: Any) -> None:
        super().__init__()
        self.items = items
        self.config = config

    @abstractmethod
    def encode(self, histories: Histories) -> Tensor:
        """[B, D], one vector a history."""

    @abstractmethod
    def scores(self, histories: Histories) -> Tensor:
        """float32 [B, I+1]; the padding column is -inf."""

    @abstractmethod
    def loss(self, batch: Any) -> Tensor:
        """The mean loss of a batch, a scalar."""

    @abstractmethod
    def batches(self, train: Histories, rng: np.random.Generator) -> Iterator[Any]:
        """One epoch of batches: of each, the part that `share` names, possibly without targets.

        `rng` is at the same state in all processes, and at no other place does the order of the batches come from.
        """

    @abstractmethod
    def steps(self, train: Histories) -> int:
        """How many batches an epoch has."""

    def targets(self, batch: Any) -> int:
        """How many terms `loss` is the mean of: the weight of this batch beside others of the same step."""
        return len(batch.target)

    def after_step(self, batch: Any) -> None:
        """Called after each batch that had targets, for what a model carries from batch to batch: after the optimiser
        step, or where several batches make a step and more are to come, after the batch's backward pass.
        """

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)
