"""The names of the package info-nce-pytorch (0.1.4)."""

from torch import Tensor, nn

from fastcl.losses import infonce


def info_nce(
    query: Tensor,
    positive_key: Tensor,
    negative_keys: Tensor | None = None,
    temperature: float = 0.1,
    reduction: str = "mean",
    negative_mode: str = "unpaired",
) -> Tensor:
    """`info_nce.info_nce`. The result has the dtype of query.

    Differs on purpose: where the positive's logit is far above the others (17 nats in float32), the original's loss and
    gradient are exactly 0; here they are accurate.
    """
    mode = negative_mode if negative_keys is not None else None
    return infonce(query, positive_key, negative_keys, temperature, reduction, mode).to(query.dtype)


class InfoNCE(nn.Module):
    """`info_nce.InfoNCE`: see `info_nce`."""

    def __init__(self, temperature: float = 0.1, reduction: str = "mean", negative_mode: str = "unpaired") -> None:
        super().__init__()
        self.temperature = temperature
        self.reduction = reduction
        self.negative_mode = negative_mode

    def forward(self, query: Tensor, positive_key: Tensor, negative_keys: Tensor | None = None) -> Tensor:
        return info_nce(query, positive_key, negative_keys, self.temperature, self.reduction, self.negative_mode)
