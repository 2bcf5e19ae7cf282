"""DNN: the sum of the history's vectors beside the target's. The item's side of the published program, which is made of
users' vectors, is left out.
"""

import torch
from torch import Tensor

from benchmarks.clicks.model import Batch, ClickModel, at


class DNN(ClickModel):
    def build(self, width: int) -> int:
        return 2 * width

    def found(self, steps: Tensor, batch: Batch) -> Tensor:
        return torch.cat([at(steps, batch.last), (steps * batch.clicked[..., None]).sum(1)], -1)
