"""A contrastive loss over a batch whose activations would not fit in memory: the encoder works in chunks, twice.

How rows are encoded and in which chunks; the loss is whatever function of the embeddings it is given. No formula and no
collective belongs here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# A batch as an encoder takes it: a tensor, or several as positional arguments or by name. All have N rows.
Batch = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
# The rows of each chunk, int64 [n], and the chunk: every row in one chunk, in any order.
Split = Callable[[Any], Iterator[tuple[Tensor, Any]]]


def cached(
    encoder: Callable[..., Tensor] | Sequence[Callable[..., Tensor]],
    loss: Callable[..., Any],
    chunk: int | Split = 32,
) -> "Cached":
    """A step whose memory is that of one chunk of the batch, with the loss and gradients of the whole (GradCache, Gao
    et al. 2021).

    Every chunk is encoded once and its activations are dropped. The loss sees the embeddings of the whole batch. In
    the backward pass each chunk is encoded again, with the same random numbers (dropout) and the same autocast, and its
    gradients are added. That costs one more forward pass of the encoder; gradients are those of the plain step, but for
    rounding.

    Args:
        encoder: a module or function from a batch to embeddings [n, ...]; or one for each batch. It must treat each row
            by itself. A batch is a tensor [N, ...], or tensors in a list or tuple (positional arguments of the encoder)
            or in a mapping (arguments by name), all with N rows.
        loss: any function of the embeddings, such as a loss of fastcl, its module, or a form of it from
            `fastcl.distributed`.
        chunk: the number of rows in a chunk, at least 1; or a function that splits a batch, such as
            `fastcl.token_chunks(4096)`.

    Returns: a module. Its forward takes one batch for each argument of the loss, which may have different numbers of
    rows, and by name whatever else the loss takes; it returns what the loss returns. Encoders and loss that are
    modules are its submodules.

    Gradients: whatever the plain step has a gradient for: parameters, a temperature that learns, the batch itself.

    Several processes: `DistributedDataParallel(fastcl.cached(encoder, loss))`. It then sees one forward and one
    backward pass, in which each gradient arrives once, after the last chunk, and its `no_sync` works as ever. Ranks may
    have different numbers of chunks.

    Errors: TypeError for an encoder that does not return a tensor, for what is no batch and for a chunk that is no int;
    ValueError for a chunk below 1, for an encoder inside DistributedDataParallel, which would exchange gradients for
    every chunk, for batch normalisation in training mode or without running statistics, which mixes the rows of a
    chunk, and for numbers of rows that differ within a batch.

    >>> import torch, fastcl
    >>> encoder = torch.nn.Linear(4, 3)
    >>> step = fastcl.cached(encoder, fastcl.nn.InfoNCE(temperature=0.2), chunk=2)
    >>> query, key = torch.randn(6, 4), torch.randn(6, 4)
    >>> loss = step(query, key)
    >>> loss.backward()
    >>> torch.allclose(loss, fastcl.infonce(encoder(query), encoder(key), temperature=0.2))
    True
    """
    return Cached(encoder, loss, chunk)


class Cached(nn.Module):
    """What `fastcl.cached` returns."""

    def __init__(self, encoder: Any, loss: Callable[..., Any], chunk: int | Split) -> None:
        super().__init__()
        self.shared = not isinstance(encoder, (list, tuple, nn.ModuleList))
        encoders = [encoder] if self.shared else list(encoder)
        for given in encoders:
            _check_encoder(given)
        if not callable(loss):
            raise TypeError(f"loss: expected a function of embeddings, got {type(loss).__name__}")
        self.split = chunk if callable(chunk) else _row_chunks(chunk)
        self.loss = loss
        # Modules are held here alone, and None in their place below, since torch's tools replace submodules.
        self.encoder = nn.ModuleList([given for given in encoders if isinstance(given, nn.Module)])
        self.functions = [None if isinstance(given, nn.Module) else given for given in encoders]

    def forward(self, *batches: Batch, **options: Any) -> Any:
        modules = iter(self.encoder)
        encoders = [next(modules) if given is None else given for given in self.functions]
        encoders = encoders * len(batches) if self.shared else encoders
        if len(encoders) != len(batches):
            raise ValueError(f"encoder: expected one for each batch, got {len(encoders)} for {len(batches)} batches")
        return self.loss(*(self._encoded(*pair) for pair in zip(encoders, batches, strict=True)), **options)

    def _encoded(self, encoder: Callable[..., Tensor], batch: Batch) -> Tensor:
        for module in encoder.modules() if isinstance(encoder, nn.Module) else ():
            if not isinstance(module, nn.modules.batchnorm._BatchNorm):
                continue
            if module.training or module.running_mean is None:
                how = "in training mode" if module.training else "without running statistics"
                raise ValueError(
                    f"encoder: expected rows that do not depend on each other, got {type(module).__name__} {how}, "
                    "whose statistics would be those of a chunk; use its eval() with running statistics or another "
                    "normalisation"
                )
        rows, parts = [], []
        for row, part in self.split(_checked(batch)):
            # Not re-entrant: gradients of all chunks are summed within one pass of autograd, so that hooks of
            # parameters run once, and torch.autograd.grad works.
            x = checkpoint(_call, encoder, part, use_reentrant=False)
            if not isinstance(x, Tensor):
                raise TypeError(f"encoder: expected a tensor [n, ...] as its result, got {type(x).__name__}")
            if x.shape[:1] != row.shape:
                raise ValueError(f"encoder: expected a row for each of the {len(row)} of a chunk, got {list(x.shape)}")
            rows.append(row)
            parts.append(x)
        return torch.cat(parts)[torch.cat(rows).argsort()]


def token_chunks(most: int, mask: str | int = "attention_mask") -> Split:
    """Chunks of at most `most` tokens, padding included, for `fastcl.cached`: rows of like length together.

    Rows are sorted by length, and a chunk takes rows as long as their number times the length of the longest is at most
    `most`. What lies behind the longest row of a chunk is cut off the tensors [N, L, ...] of the batch before they go
    to the encoder, so that a chunk of short rows has little padding.

    Args:
        most: tokens in a chunk; a single row longer than that makes a chunk of its own.
        mask: the name, or the position, of the batch's tensor [N, L] that is not 0 where there is a token.

    Returns: the function. Errors: TypeError and ValueError naming `most` or `mask`.

    >>> import torch, fastcl
    >>> batch = {"token": torch.tensor([[5, 6, 7], [8, 0, 0], [9, 0, 0]])}
    >>> for row, part in fastcl.token_chunks(3, mask="token")(batch):
    ...     print(row.tolist(), part["token"].tolist())
    [1, 2] [[8], [9]]
    [0] [[5, 6, 7]]
    """
    _at_least_one("most", most)
    return partial(_by_tokens, most=most, mask=mask)


def _by_tokens(batch: Any, most: int, mask: str | int) -> Iterator[tuple[Tensor, Any]]:
    try:
        given = batch[mask]
    except (KeyError, IndexError, TypeError):
        raise ValueError(f"mask: expected a tensor [N, L] of the batch, got {mask!r}, which it has not") from None
    if not isinstance(given, Tensor) or given.dim() != 2:
        raise ValueError(f"mask: expected a tensor [N, L], got {getattr(given, 'shape', type(given).__name__)}")
    n, width = given.shape
    place = torch.arange(1, width + 1, device=given.device)
    lengths = ((given != 0) * place).amax(1).clamp(min=1) if width else given.new_ones(n, dtype=torch.int64)
    length, order = lengths.sort(stable=True)
    if not n:  # one chunk, which has the embeddings' shape
        yield order, batch
    ends = length.tolist()
    start = 0
    for end in range(1, n + 1):
        if end == n or (end + 1 - start) * ends[end] > most:
            row = order[start:end]
            yield row, _each(batch, partial(_cut, row=row, width=width, cut=ends[end - 1]))
            start = end


def _cut(x: Tensor, row: Tensor, width: int, cut: int) -> Tensor:
    x = x[row.to(x.device)]
    return x[:, :cut] if x.dim() > 1 and x.shape[1] == width else x


def _row_chunks(size: int) -> Split:
    _at_least_one("chunk", size)
    return partial(_by_rows, size=size)


def _by_rows(batch: Any, size: int) -> Iterator[tuple[Tensor, Any]]:
    n = len(_tensors(batch)[0])
    for start in range(0, max(n, 1), size):  # a batch without rows is one chunk, which has the embeddings' shape
        rows = torch.arange(start, min(start + size, n), device="cpu")
        yield rows, _each(batch, itemgetter(slice(start, start + size)))


def _at_least_one(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, got {value}")


def _check_encoder(encoder: Any) -> None:
    if not callable(encoder):
        raise TypeError(f"encoder: expected a module or function, got {type(encoder).__name__}")
    if isinstance(encoder, nn.parallel.DistributedDataParallel):
        raise ValueError(
            "encoder: expected a module outside DistributedDataParallel, which would exchange gradients for every "
            "chunk; wrap what cached returns: DistributedDataParallel(fastcl.cached(encoder, loss))"
        )


def _call(encoder: Callable[..., Tensor], part: Any) -> Tensor:
    if isinstance(part, Tensor):
        return encoder(part)
    return encoder(**part) if isinstance(part, Mapping) else encoder(*part)


def _tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    return list(batch.values() if isinstance(batch, Mapping) else batch)


def _each(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {name: change(x) for name, x in batch.items()}
    return [change(x) for x in batch]


def _checked(batch: Any) -> Any:
    if not isinstance(batch, (Tensor, Mapping, list, tuple)) or not _tensors(batch):
        raise TypeError(f"batch: expected a tensor, or tensors in a list, tuple or mapping, got {type(batch).__name__}")
    found = _tensors(batch)
    for x in found:
        if not isinstance(x, Tensor) or not x.dim():
            raise TypeError(f"batch: expected tensors [N, ...], got {getattr(x, 'shape', type(x).__name__)}")
    if len({len(x) for x in found}) > 1:
        raise ValueError(f"batch: expected as many rows in each tensor, got {[len(x) for x in found]}")
    return batch
