"""The names of open_clip (3.3.0): ClipLoss and SigLipLoss. Features come in with length 1, as there."""

from typing import Any

import torch
from torch import Tensor, nn

from fastcl.arithmetic import compute_dtype, dot, softplus
from fastcl.distributed import gather
from fastcl.losses import infonce
from fastcl.ops_pairwise import softplus_sum_expecting

Scale = Tensor | float
Result = Tensor | dict[str, Tensor]


def _scalar(scale: Scale) -> Scale:
    """The scale as a number or a 0-d tensor of at least float32. open_clip also makes scales of shape [1]."""
    if not isinstance(scale, Tensor):
        return scale
    return scale.reshape(()).to(torch.promote_types(scale.dtype, torch.float32))


class ClipLoss(nn.Module):
    """`open_clip.ClipLoss`. The result has the dtype of image_features.

    logit_bias, which cancels in a softmax, gets a gradient of exactly 0. cache_labels has no effect: none are made.
    """

    def __init__(
        self,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        use_horovod: bool = False,
    ) -> None:
        super().__init__()
        if use_horovod:
            raise ValueError("use_horovod: expected False, since fastcl gathers by torch.distributed, got True")
        self.local_loss, self.gather_with_grad, self.cache_labels = local_loss, gather_with_grad, cache_labels
        self.rank, self.world_size = rank, world_size

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Scale,
        logit_bias: Scale | None = None,
        output_dict: bool = False,
    ) -> Result:
        rows = (image_features, text_features)
        options: dict[str, Any] = {"temperature": 1 / _scalar(logit_scale), "normalize": False}
        everything = [self._gathered(x) for x in rows] if self.world_size > 1 else rows
        if self.world_size > 1 and self.local_loss:
            place = torch.arange(len(rows[0]), device=rows[0].device) + self.rank * len(rows[0])
            ids = {"ids": place, "negative_ids": torch.arange(len(everything[0]), device=place.device)}
            each = zip(rows, reversed(everything), strict=True)
            loss = torch.stack([infonce(own, keys[place], keys, **ids, **options) for own, keys in each]).mean()
        else:
            loss = infonce(*everything, symmetric=True, **options)
        loss = loss.to(image_features.dtype)
        if isinstance(logit_bias, Tensor):
            loss = loss + 0 * logit_bias.sum().to(loss)
        return {"contrastive_loss": loss} if output_dict else loss

    def _gathered(self, x: Tensor) -> Tensor:
        if self.gather_with_grad:
            return gather(x)
        parts = list(gather(x.detach()).split(len(x)))
        parts[self.rank] = parts[self.rank] if self.local_loss else x  # its own rows have a gradient then
        return torch.cat(parts)


class SigLipLoss(nn.Module):
    """`open_clip.SigLipLoss`. The result has the dtype of image_features.

    chunk_size has no effect: no block of logits is stored. Several ranks gather the texts, whatever dist_impl is.
    """

    def __init__(
        self,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        dist_impl: str | None = None,
        chunk_size: int = 0,
    ) -> None:
        super().__init__()
        if dist_impl not in (None, "bidir", "shift", "reduce", "gather"):
            raise ValueError(f"dist_impl: expected bidir, shift, reduce or gather, got {dist_impl!r}")
        self.cache_labels, self.rank, self.world_size = cache_labels, rank, world_size
        self.dist_impl, self.chunk_size = dist_impl or "bidir", chunk_size

    def _loss(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Scale,
        logit_bias: Scale | None = None,
        negative_only: bool = False,
    ) -> Tensor:
        """Image i belongs to text i + rank N; the others are negatives, and with negative_only all are."""
        logit_scale = _scalar(logit_scale)
        n, device = len(image_features), image_features.device
        place = torch.arange(n, device=device) + (self.rank * n if len(text_features) > n else 0)
        bias = torch.as_tensor(0.0 if logit_bias is None else logit_bias, device=device)
        bias = bias.to(compute_dtype(image_features, text_features)).expand(n)
        ids = {} if negative_only else {"row_id": place, "col_id": torch.arange(len(text_features), device=device)}
        rows = softplus_sum_expecting(1.0, image_features, text_features, scale=logit_scale, offset=bias, **ids)
        if not negative_only:
            rows = rows + softplus(-(dot(image_features, text_features[place]) * logit_scale + bias))
        return (rows.sum() / n).to(image_features.dtype)

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Scale,
        logit_bias: Scale | None = None,
        output_dict: bool = False,
    ) -> Result:
        if len(text_features) != len(image_features):
            raise ValueError(f"text_features: expected {len(image_features)} rows, as images, got {len(text_features)}")
        texts = gather(text_features) if self.world_size > 1 else text_features
        loss = self._loss(image_features, texts, logit_scale, logit_bias)
        return {"contrastive_loss": loss} if output_dict else loss
