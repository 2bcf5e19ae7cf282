"""The names of pytorch_metric_learning.losses (2.9.0): NTXentLoss, SupConLoss and CrossBatchMemory."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fastcl.arithmetic import dot, softplus
from fastcl.compat import pairs
from fastcl.compat.pairs import Indices
from fastcl.normalize import normalized
from fastcl.ops import contrast
from fastcl.views import supcon


class PairLoss(nn.Module):
    """What NTXentLoss and SupConLoss share: a loss over positive and negative pairs of rows."""

    # Losses, what they belong to, and of what kind that is, as reducers take them; from rows, or from pairs' logits.
    _fused: Callable[..., Any]
    _composed: Callable[..., Any]
    _distinct: Callable[..., Indices]
    _mean: Callable[..., Tensor]

    def __init__(
        self,
        temperature: float,
        distance: Any = None,
        reducer: Callable[..., Tensor] | None = None,
        embedding_regularizer: None = None,
        embedding_reg_weight: float = 1,
        collect_stats: bool | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("embedding_regularizer", embedding_regularizer), ("collect_stats", collect_stats)):
            if value:
                raise ValueError(f"{name}: expected None or False, which are all that is taken here, got {value!r}")
        self.temperature, self.reducer = temperature, reducer
        self.distance = None if pairs.is_cosine(distance) else distance

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: Indices | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        """embeddings [N, D], labels [N], ref_emb [M, D], ref_labels [M]; indices_tuple takes the place of labels.

        Where ref_labels is the very tensor `labels`, row i of ref_emb is row i of embeddings, and not its positive.
        """
        ref, ref_labels = (embeddings, labels) if ref_emb is None else (ref_emb, ref_labels)
        own = torch.arange(len(embeddings), device=embeddings.device) if ref_labels is labels else None
        for name, given, rows in (("labels", labels, embeddings), ("ref_labels", ref_labels, ref)):
            if given is not None and given.shape != (len(rows),):
                raise ValueError(f"{name}: expected shape [{len(rows)}], got {list(given.shape)}")
        if indices_tuple is not None:
            return self._mined(embeddings, labels, pairs.as_pairs(indices_tuple), ref)
        if labels is None or ref_labels is None:
            raise ValueError("labels: expected labels of embeddings and ref_emb, or indices_tuple, got neither")
        return self.of_labels(embeddings, labels.to(ref.device), ref, ref_labels.to(ref.device), own)

    def of_labels(self, x: Tensor, labels: Tensor, ref: Tensor, ref_labels: Tensor, own: Tensor | None) -> Tensor:
        """own: int64 [N], the column of ref in which a row meets itself, which is not its positive."""
        if self.distance is not None:
            return self._mined(x, labels, pairs.all_pairs(labels, ref_labels, own), ref)
        classes, ref_classes = pairs.as_integers(labels, ref_labels)
        positives = pairs.all_positives(classes, ref_classes, own)
        lowest, highest = torch.cat([classes, ref_classes]).aminmax() if len(labels) else (0, 0)
        if not len(positives[0]) or lowest == highest:
            return (x * 0).sum()
        return self._reduced(x, labels, *self._fused(x, classes, ref, ref_classes, own, positives))

    def _mined(self, x: Tensor, labels: Tensor | None, indices: Indices, ref: Tensor) -> Tensor:
        positives, negatives = indices[:2], indices[2:]
        if not len(positives[0]) or not len(negatives[0]):
            return (x * 0).sum()
        positives, negatives = self._distinct(positives), self._distinct(negatives)
        logits = [s / self.temperature for s in pairs.similarities(self.distance, x, ref, positives, negatives)]
        return self._reduced(x, labels, *self._composed(*logits, positives, negatives, len(x)))

    def _reduced(self, x: Tensor, labels: Tensor | None, losses: Tensor, which: Any, kind: str) -> Tensor:
        losses = losses.to(x.dtype)
        if self.reducer is not None:
            return self.reducer({"loss": {"losses": losses, "indices": which, "reduction_type": kind}}, x, labels)
        return self._mean(losses)


class NTXentLoss(PairLoss):
    """`pytorch_metric_learning.losses.NTXentLoss`: a term for each positive pair, over it and its anchor's negatives.

    The result has the dtype of embeddings. distance and reducer are None or objects of that package. By labels and
    cosines the loss is fused; pairs given by indices_tuple, and other distances, are composed in plain PyTorch.

    Differs on purpose: a gap of more than 87 between logits gives the true loss and gradient instead of 87.3 and 0, and
    a single positive pair with a single negative pair counts.
    """

    def __init__(self, temperature: float = 0.07, **options: Any) -> None:
        super().__init__(temperature, **options)

    def _fused(self, x: Tensor, labels: Tensor, ref: Tensor, ref_labels: Tensor, own: Any, positives: Indices) -> Any:
        q, k = normalized(x), normalized(ref)
        anchor, positive = positives
        lse = contrast(q, k, scale=1 / self.temperature, row_id=labels, col_id=ref_labels)[1]
        return softplus(lse[anchor] - dot(q[anchor], k[positive]) / self.temperature), positives, "pos_pair"

    def _composed(self, pos: Tensor, neg: Tensor, positives: Indices, negatives: Indices, n: int) -> Any:
        lse = pairs.lse_by_anchor(neg, negatives[0], n)
        return softplus(lse[positives[0]] - pos), positives, "pos_pair"

    _distinct = staticmethod(tuple)  # a pair that is named twice counts twice
    _mean = staticmethod(torch.mean)


class SupConLoss(PairLoss):
    """`pytorch_metric_learning.losses.SupConLoss`: a term for each anchor, averaged over those above 0.

    dtype, distance, reducer, and what is fused: as in `NTXentLoss`.
    """

    def __init__(self, temperature: float = 0.1, **options: Any) -> None:
        super().__init__(temperature, **options)

    def _fused(self, x: Tensor, labels: Tensor, ref: Tensor, ref_labels: Tensor, own: Any, positives: Indices) -> Any:
        which = torch.arange(len(x), device=x.device)
        if ref is x and own is not None:
            return supcon(x, labels, self.temperature, "none"), which, "element"
        q, k = normalized(x), normalized(ref)
        places = None if own is None else torch.arange(len(k), device=k.device)
        lse = contrast(q, k, scale=1 / self.temperature, row_id=own, col_id=places)[1]
        return self._less_mean(lse, dot(q[positives[0]], k[positives[1]]) / self.temperature, positives[0])

    def _composed(self, pos: Tensor, neg: Tensor, positives: Indices, negatives: Indices, n: int) -> Any:
        each = torch.cat([torch.stack(positives), torch.stack(negatives)], dim=1)
        if torch.unique(each, dim=1).shape[1] < each.shape[1]:
            raise ValueError("indices_tuple: expected pairs that are positive or negative, got one that is both")
        lse = pairs.lse_by_anchor(torch.cat([pos, neg]), each[0], n)
        return self._less_mean(lse, pos, positives[0])

    def _less_mean(self, lse: Tensor, pos: Tensor, anchors: Tensor) -> Any:
        mean, number = pairs.mean_by_anchor(pos, anchors, len(lse))
        return (lse - mean).masked_fill(number == 0, 0.0), torch.arange(len(lse), device=lse.device), "element"

    def _distinct(self, indices: Indices) -> Indices:
        return tuple(torch.unique(torch.stack(indices), dim=1))

    def _mean(self, losses: Tensor) -> Tensor:
        above = losses > 0
        return losses.masked_fill(~above, 0.0).sum() / above.sum().clamp(min=1)


class Memory(nn.Module):
    """The rows of the last batches and their labels, in a ring."""

    embedding_memory: Tensor
    label_memory: Tensor

    def __init__(self, embedding_size: int, memory_size: int) -> None:
        super().__init__()
        self.embedding_size, self.memory_size = embedding_size, memory_size
        self.reset_queue()

    def reset_queue(self) -> None:
        memory = torch.zeros(self.memory_size, self.embedding_size, device="cpu", dtype=torch.float32)
        self.register_buffer("embedding_memory", memory)
        self.register_buffer("label_memory", torch.zeros(self.memory_size, device="cpu", dtype=torch.int64))
        self.has_been_filled, self.queue_idx = False, 0

    def add_to_memory(self, embeddings: Tensor, labels: Tensor, batch_size: int) -> None:
        if batch_size > self.memory_size:
            raise ValueError(f"embeddings: expected at most {self.memory_size} rows for the memory, got {batch_size}")
        end = self.queue_idx + batch_size
        self.curr_batch_idx = torch.arange(self.queue_idx, end, device=labels.device) % self.memory_size
        self.embedding_memory[self.curr_batch_idx] = embeddings.detach()
        self.label_memory[self.curr_batch_idx] = labels.detach()
        self.has_been_filled = self.has_been_filled or (batch_size > 0 and end >= self.memory_size)
        self.queue_idx = end % self.memory_size

    def held(self) -> tuple[Tensor, Tensor]:
        """The rows that are there, and their labels."""
        count = self.memory_size if self.has_been_filled else self.queue_idx
        return self.embedding_memory[:count], self.label_memory[:count]


class CrossBatchMemory(Memory):
    """`pytorch_metric_learning.losses.CrossBatchMemory`, around a loss of this module or of that package.

    Without miner, indices_tuple and enqueue_mask, a loss of this module is fused. A miner's triplets beside pairs in
    indices_tuple count as pairs.
    """

    def __init__(
        self, loss: Callable[..., Tensor], embedding_size: int, memory_size: int = 1024, miner: Any = None
    ) -> None:
        super().__init__(embedding_size, memory_size)
        self.loss, self.miner = loss, miner

    def forward(self, embeddings: Tensor, labels: Tensor, indices_tuple: Indices | None = None,
                enqueue_mask: Tensor | None = None) -> Tensor:  # fmt: skip
        """enqueue_mask [N], bool: the rows that go to the memory and take no other part; None: all do both."""
        if indices_tuple is not None and enqueue_mask is not None:
            raise ValueError("enqueue_mask: expected None beside indices_tuple, got both")
        labels = labels.to(embeddings.device)
        self.embedding_memory, self.label_memory = self.embedding_memory.to(embeddings), self.label_memory.to(labels)
        queued = slice(None) if enqueue_mask is None else enqueue_mask
        self.add_to_memory(embeddings[queued], labels[queued], len(labels[queued]))
        own: Tensor | None = self.curr_batch_idx
        if enqueue_mask is not None:
            embeddings, labels, own = embeddings[~enqueue_mask], labels[~enqueue_mask], None
        memory = self.held()
        if self.miner is None and indices_tuple is None and isinstance(self.loss, PairLoss):
            return self.loss.of_labels(embeddings, labels, *memory, own)
        found = self.create_indices_tuple(embeddings, labels, *memory, indices_tuple, own is not None)
        return self.loss(embeddings, labels, found, *memory)

    def create_indices_tuple(self, embeddings: Tensor, labels: Tensor, E_mem: Tensor, L_mem: Tensor,
                             input_indices_tuple: Indices | None,
                             do_remove_self_comparisons: bool) -> Indices:  # fmt: skip
        """The pairs, or a miner's triplets, of the batch with the memory [held, D] and its labels [held]."""
        own = self.curr_batch_idx if do_remove_self_comparisons else None
        if self.miner is None:
            found = pairs.all_pairs(labels, L_mem, own)
        else:
            found = self.miner(embeddings, labels, E_mem, L_mem)
            found = found if own is None else pairs.without_self(found, own)
        return found if input_indices_tuple is None else pairs.joined(found, input_indices_tuple)

    @staticmethod
    def supported_losses() -> list[str]:
        """The names of the losses that the original takes; here any function of the same arguments is taken."""
        return list(LOSSES_OF_THE_ORIGINAL)

    @classmethod
    def check_loss_support(cls, loss_name: str) -> None:
        if loss_name not in cls.supported_losses():
            raise ValueError(f"loss: expected one of {', '.join(cls.supported_losses())}, got {loss_name}")


LOSSES_OF_THE_ORIGINAL = (
    "AngularLoss", "CircleLoss", "ContrastiveLoss", "GeneralizedLiftedStructureLoss", "IntraPairVarianceLoss",
    "LiftedStructureLoss", "MarginLoss", "MultiSimilarityLoss", "NCALoss", "NTXentLoss",
    "SignalToNoiseRatioContrastiveLoss", "SupConLoss", "TripletMarginLoss", "TupletMarginLoss",
)  # fmt: skip
