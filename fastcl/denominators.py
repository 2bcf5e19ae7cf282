"""SogCLR: a contrastive loss whose denominators are averages over the steps of a training, one for each sample; and the
module that holds these averages.

The log-sum-exp of a step is that of rows.py. No similarity is computed here.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from fastcl.arithmetic import logaddexp
from fastcl.checks import as_ids, check_constant, check_tensor, check_weight, readable
from fastcl.losses import log_mean, unless_empty
from fastcl.registry import registered
from fastcl.rows import check_batch, reduced, rows_of
from fastcl.segments import Negatives, Queue


class Denominators(nn.Module):
    """Moving averages of the mean exponentials that a sample meets, for `fastcl.sogclr`.

        u_i <- (1 - gamma) u_i + gamma mean_j exp(z_ij);    the first mean of a sample is taken as it is

    They are kept as logarithms in one buffer, so that copies, state dicts, `.to()` and shared memory carry them. In
    `train()` a loss writes the averages of its batch, in `eval()` it only reads them, like running statistics of batch
    normalisation. Each process has its own. DistributedDataParallel would send those of the first process to all, so
    keep the module outside of the model, or pass broadcast_buffers=False.

    Args:
        size: >= 1, the number of samples.
        gamma: above 0 and at most 1, the weight of a new mean; 1 forgets all others, which is MINE's gradient.

    `log_average`, float32 [size] in a model of any dtype, is the buffer; -inf for a sample that was never in a batch.

    >>> import fastcl
    >>> fastcl.Denominators(4).log_average
    tensor([-inf, -inf, -inf, -inf])
    """

    log_average: Tensor

    def __init__(self, size: int, gamma: float = 0.9) -> None:
        super().__init__()
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"size: expected an int, got {type(size).__name__}")
        if size < 1:
            raise ValueError(f"size: expected at least 1, got {size}")
        check_constant("gamma", gamma, lambda x: 0 < x <= 1, "above 0 and at most 1")
        self.gamma = gamma
        self.register_buffer("log_average", torch.full((size,), -torch.inf, dtype=torch.float32))

    @torch.no_grad()
    def averaged(self, index: Tensor, log_new: Tensor) -> Tensor:
        """[N], the logarithms of the averages of samples int64 [N], with new means [N]; written in `train()`.

        A mean of -inf, of a sample that met nothing, changes no average. Of a sample that is twice in the batch one
        average is written, either of the two.
        """
        old, new = self.log_average[index].to(log_new), log_new.detach()
        if self.training:
            kept = math.log1p(-self.gamma) if self.gamma < 1 else -math.inf
            mixed = logaddexp(old + kept, new + math.log(self.gamma))
            mixed = torch.where(old == -torch.inf, new, torch.where(new == -torch.inf, old, mixed))
            self.log_average[index] = mixed.to(self.log_average.dtype)
            return mixed
        return torch.where(old == -torch.inf, new, old)

    def _apply(self, fn: Any, recurse: bool = True) -> "Denominators":
        held = self.log_average
        super()._apply(fn, recurse)
        if self.log_average.dtype != torch.float32:
            # Steps below the rounding of a logarithm in 16 bits, some per cent of the average, would never move it.
            self.log_average = held.to(self.log_average.device, torch.float32)
        return self

    def extra_repr(self) -> str:
        return f"{self.log_average.shape[0]}, gamma={self.gamma}"


@registered("SogCLR", inputs=3)
def sogclr(
    query: Tensor,  # [N, D]
    positive_key: Tensor,  # [N, D]
    index: Tensor,  # [N]
    denominators: Denominators,
    negative_keys: Tensor | None = None,  # [M, D] or [N, K, D]
    temperature: float | Tensor = 0.1,  # a number, [] or [N]
    reduction: str = "mean",
    *,
    normalize: bool = True,
    in_batch: bool | None = None,
    queue: Queue | None = None,
    ids: Tensor | None = None,  # [N]
    negative_ids: Tensor | None = None,  # [M] or [N, K]
    weight: Tensor | None = None,  # [N]
) -> Tensor:
    """SogCLR (Yuan et al. 2022, Algorithm 1): the gradient of a softmax over all data, from small batches.

        loss_i = mean_j exp(z_ij) / u_i - z_i,    z_ij = <q_i, k_j> / T,    z_i = <q_i, p_i> / T

    u_i is the sample's moving average of that mean, a constant of the step. Its gradient is that of `mine` with the
    average in the place of the batch's own mean, so that a batch need not stand for the data.

    Args:
        query, positive_key, negative_keys, temperature, reduction, normalize, in_batch, queue, ids, negative_ids,
            weight: those of `infonce`.
        index: [N], any integer dtype, the numbers of the samples in [0, size).
        denominators: a `fastcl.Denominators`, which the loss reads, and in `train()` writes. A loss in both directions
            is two calls, each with its own.

    Returns: float32 (float64 for float64 inputs), [] or [N]. A row without negatives has loss 0. The value is one of
    the step, and no measure of progress.

    Gradients: query, positive_key, negative_keys, temperature and weight.

    Errors: those of `infonce`. An index out of range is a ValueError on the CPU; elsewhere the gather fails instead.

    >>> import torch, fastcl
    >>> seen = fastcl.Denominators(10, gamma=0.5)
    >>> x, index = torch.eye(2), torch.tensor([3, 7])
    >>> round(fastcl.sogclr(x, x, index, seen, temperature=0.5).item(), 4)  # 1 - 2: the averages are those of the batch
    -1.0
    >>> round(fastcl.sogclr(x, x.flip(1), index, seen, temperature=0.5).item(), 4)  # e^2 / ((1 + e^2) / 2) - 0
    1.7616
    """
    check_batch(query, positive_key, negative_keys, temperature, reduction, None)
    (n, _), device = query.shape, query.device
    check_weight(weight, n, device)
    index = as_ids("index", index, (n,), device).resolve_neg()  # indexing reads through it
    if not hasattr(denominators, "averaged"):
        raise TypeError(f"denominators: expected a fastcl.Denominators, got {type(denominators).__name__}")
    check_tensor("denominators.log_average", denominators.log_average, ("size",), device)
    size = denominators.log_average.shape[0]
    if readable(index) and n:
        low, high = (x.item() for x in torch.aminmax(index))
        if low < 0 or high >= size:
            raise ValueError(f"index: expected values in [0, {size}), got {low if low < 0 else high}")
    negatives = Negatives(negative_keys, in_batch, queue, ids, negative_ids, None, None)
    rows = rows_of(query, positive_key, temperature, negatives, normalize=normalize)
    new = log_mean(rows)
    share = unless_empty(rows, new) - unless_empty(rows, denominators.averaged(index, new))
    return reduced(unless_empty(rows, share.exp() - rows.pos), reduction, weight)
