"""Losses over the batches of all processes: gathered keys, a ring of keys, queues, a table of classes in parts; on
torch.distributed (gloo, nccl).

No loss formula and no kernel is here: losses get negatives from other ranks. Every function is a collective, which all
ranks of the group must call in the same order, its backward pass included. Batches may differ in size between ranks,
since ranks exchange their sizes first. A batch may be empty; its loss and gradients are 0. Where one rank refuses its
arguments, all other ranks raise a RuntimeError that names it, so that no rank waits.

Scale: the mean over the ranks of a reduced loss is the loss of the one big batch (the ranks' rows, one rank after the
other). The mean over the ranks of its gradients, which DistributedDataParallel computes, is the gradient of that loss.
Code that sums gradients over ranks must divide by the number of ranks.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastcl.adjust import Adjustments, Cap, Harder, Hardness, Margin, graded
from fastcl.arithmetic import compute_dtype, dot
from fastcl.checks import as_ids, check_tensor, check_weight, learns
from fastcl.gathering import Gather, rows_and_facts
from fastcl.library import NONE
from fastcl.module import LossModule
from fastcl.negatives import Columns, Evicted, NegativeQueue
from fastcl.normalize import normalized_together
from fastcl.registry import formula_of
from fastcl.ring import Group, RingLse, agree, own_ids
from fastcl.ring_pairs import ring_siglip as ring_siglip
from fastcl.rows import Rows, check_batch, check_symmetric, inverse, reduced
from fastcl.segments import Negatives, Queue, columns_of
from fastcl.sharded import sharded_cross_entropy as sharded_cross_entropy

Loss = Callable[..., Tensor]


def gather(x: Tensor, group: Group = None) -> Tensor:
    """The rows of all ranks, one rank after the other, on every rank: [N_r, ...] -> [sum of N_r, ...].

    It serves keys, ids and log q. The gradient of a row is the sum of its gradients from all ranks' losses (open_clip's
    gather_with_grad). Any loss has a global form, in which all arguments are gathered and every rank computes the whole
    big batch. `gathered` and `ring` compute a rank's own rows only.

    Args:
        x: [N_r, ...], any dtype; only N_r may differ between ranks. One with a gradient is float64, float32, bfloat16
            or float16.
        group: a process group; None: the default group.

    Errors: TypeError and ValueError unless x is a tensor with rows. Double backward is not supported.

    >>> import torch, torch.distributed as dist, fastcl.distributed
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> fastcl.distributed.gather(torch.tensor([3, 4])).tolist()  # there is one rank here
    [3, 4]
    >>> dist.destroy_process_group()
    """
    return Gather.apply(x, agree(lambda: rows_and_facts("x", x), group), group)


def row_ids(count: int, group: Group = None, device: torch.device | str = "cpu") -> Tensor:
    """Numbers [count] of this rank's rows in the big batch, which serve as ids that no other row of any rank has.

    In NT-Xent over all ranks, for example, a row and its partner have the same id, so that neither is a negative.

    >>> import torch, torch.distributed as dist, fastcl.distributed
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> view1, view2 = torch.randn(4, 8), torch.randn(4, 8)
    >>> ids = fastcl.distributed.row_ids(4).repeat(2)
    >>> both, swapped = torch.cat([view1, view2]), torch.cat([view2, view1])
    >>> loss = fastcl.distributed.gathered(fastcl.infonce)(both, swapped, temperature=0.5, ids=ids)
    >>> torch.allclose(loss, fastcl.nt_xent(view1, view2))
    True
    >>> dist.destroy_process_group()
    """

    def checked() -> tuple[int, object]:
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"count: expected an int, got {type(count).__name__}")
        if count < 0:
            raise ValueError(f"count: expected at least 0, got {count}")
        return count, "row_ids"

    return own_ids(agree(checked, group), torch.device(device), group)


class _Anonymous(NamedTuple):
    """A queue whose ids the loss does not see."""

    queue: Any

    def columns(self, corrected: bool) -> Columns:
        return columns_of(self.queue, corrected)._replace(ids=None)


def _both_directions(one: Loss) -> Loss:
    """`one` with an option `symmetric`: True takes half the sum of both directions, as in `fastcl.infonce`."""

    @functools.wraps(one)
    def loss(query: Tensor, positive_key: Tensor, *, symmetric: bool = False, **options: Any) -> Tensor:
        there = one(query, positive_key, symmetric=symmetric, **options)
        return 0.5 * (there + one(positive_key, query, symmetric=symmetric, **options)) if symmetric else there

    return loss


# What a caller cannot give, since it is made of the keys of all ranks.
_MADE = ("negative_keys", "negative_mode", "negative_ids", "negative_log_q", "in_batch")
_INSTEAD = "the keys of all ranks take its place"
# The advice for losses and options without a local form.
_ELSE = "over all ranks, call the loss with gathered arguments: loss(fastcl.distributed.gather(x), ...)"


def _refuse(options: dict[str, Any], names: tuple[str, ...], why: str) -> None:
    for name in names:
        if options.get(name) is not None:
            raise ValueError(f"{name}: expected none, {why}, got one")


def _refuse_module(loss: Any) -> None:
    if isinstance(loss, LossModule):
        name = type(loss).__name__
        raise TypeError(f"loss: expected a function such as fastcl.infonce, whose call takes settings, got nn.{name}")


def _call_without_rows(loss: Loss, query: Tensor, positive_key: Tensor, options: dict[str, Any]) -> None:
    """Calls the loss without rows before anything is sent, so that it raises its errors about options."""
    inspect.signature(loss).bind(query, positive_key, **options)
    # Functions (`weight_fn`) are left out, since they may need rows. A queue is callable too, as all modules are.
    given = {name: value for name, value in options.items() if name == "queue" or not callable(value)}
    # An option of another length is a mistake, or belongs to a formula of the caller's: the loss sees it with all rows.
    if all(len(x) == len(query) for x in given.values() if isinstance(x, Tensor) and x.dim()):
        given = {name: x[:0] if isinstance(x, Tensor) and x.dim() else x for name, x in given.items()}
        query, positive_key = query[:0], positive_key[:0]
    with torch.no_grad():
        loss(query, positive_key, **given)


def _columns(
    query: Tensor,
    positive_key: Tensor,
    ids: Tensor | None,
    log_q: Tensor | None,
    queue: Any,
    symmetric: bool,
    loss: Loss,
    options: dict[str, Any],
) -> tuple[int, object]:
    """Checks what is sent to other ranks. Returns its number of rows, and the facts that must be equal on all ranks.

    options: the loss's other arguments; numbers and names among them must be equal on all ranks.
    """
    if symmetric:
        given = Negatives(None, None, queue, None, None, log_q, None)
        check_symmetric(given, options.get("temperature", 1.0))
    _refuse(options, ("group",), f"since its rows may lie on several ranks ({_ELSE})")
    check_tensor("positive_key", positive_key, ("N", "D"))
    n, device = positive_key.shape[0], positive_key.device
    if log_q is not None:
        check_tensor("log_q", log_q, (n,), device)
    if ids is not None:
        as_ids("ids", ids, (n,), device)
    _call_without_rows(loss, query, positive_key, options | ({} if queue is None else {"queue": queue, "log_q": log_q}))
    rows, keys = rows_and_facts("positive_key", positive_key)
    numbers = sorted((k, v) for k, v in options.items() if isinstance(v, (bool, int, float, str)))
    named = {"ids": ids is not None, "log_q": None if log_q is None else (log_q.dtype, learns(log_q))}
    # The gradients of the keys travel in the dtype of the loss, which the query has a part in.
    return rows, (getattr(loss, "__name__", ""), symmetric, keys, compute_dtype(query, positive_key), named, numbers)


def _share(sizes: list[int], reduction: str) -> float:
    """The factor of this rank's sum; the module's docstring explains it (Scale)."""
    return len(sizes) / ((sum(sizes) or 1) if reduction == "mean" else 1)


def gathered(loss: Loss, group: Group = None) -> Loss:
    """The local form of `loss`: this rank's rows of the big batch's loss, with the positives of all ranks as negatives.

    It takes any loss with the arguments of `fastcl.infonce`, and `fastcl.sampled_softmax`. Others (siglip, supcon, bpr,
    uniformity, ...) are a TypeError; call them with `gather`ed arguments. The returned function takes query and
    positive_key [N_r, D] and, by name, the loss's temperature, reduction, normalize, queue, ids, log_q, weight,
    symmetric and constants, each for this rank's rows. Their meaning is that of the loss on the big batch. Without ids
    a row leaves out its own positive only. The keys of all ranks are held in memory; `ring` avoids that.

    Reductions: "mean" is (number of ranks / rows of all ranks) times the sum of this rank's rows, "sum" the number of
    ranks times their sum, so that the mean over ranks is the loss of the big batch; "none" returns this rank's rows.

    Weights that depend on the whole batch (`fastcl.dclw`) see this rank's rows only. negative_keys with their ids and
    log q, and in_batch, raise ValueError, since the gathered keys take their place, and so does the `group` of
    `fastcl.bsl`, whose rows may lie on several ranks. The keywords of a functools.partial are defaults of the call; a
    module of `fastcl.nn` is a TypeError.

    >>> import torch, torch.distributed as dist, fastcl.distributed
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> infonce = fastcl.distributed.gathered(fastcl.infonce)
    >>> round(infonce(torch.eye(2), torch.eye(2), temperature=0.5).item(), 4)
    0.1269
    >>> dist.destroy_process_group()
    """

    if isinstance(loss, functools.partial):
        return functools.partial(gathered(loss.func, group), *loss.args, **loss.keywords)
    _refuse_module(loss)
    taken = inspect.signature(loss).parameters
    lacks = [name for name in ("ids", "negative_ids", "queue", "log_q") if name not in taken]
    if lacks and not any(p.kind is p.VAR_KEYWORD for p in taken.values()):
        name = getattr(loss, "__name__", repr(loss))
        raise TypeError(f"loss: expected the arguments of fastcl.infonce, got {name} without {lacks[0]}; {_ELSE}")

    @functools.wraps(loss, assigned=("__module__", "__name__", "__qualname__"))
    def local(
        query: Tensor,
        positive_key: Tensor,
        *,
        reduction: str = "mean",
        queue: Queue | _Anonymous | None = None,
        ids: Tensor | None = None,
        log_q: Tensor | None = None,
        symmetric: bool = False,
        **options: Any,
    ) -> Tensor:
        def checked() -> tuple[int, object]:
            _refuse(options, _MADE, _INSTEAD)
            check_batch(query, positive_key, None, options.get("temperature", 1.0), reduction, None)
            check_weight(options.get("weight"), query.shape[0], query.device)
            every = {**options, "reduction": reduction}
            return _columns(query, positive_key, ids, log_q, queue, symmetric, loss, every)

        sizes = agree(checked, group)
        if isinstance(options.get("hardness"), Mapping):  # the loss gets the batch's keys as negatives from elsewhere
            of = options["hardness"]
            options["hardness"] = {"negative_keys": of.get("in_batch", 0.0), "queue": of.get("queue", 0.0)}
        ids = None if ids is None else as_ids("ids", ids, ("N",))
        if ids is None:
            ids = own_ids(sizes, positive_key.device, group)
            queue = None if queue is None else _Anonymous(queue)
        value = loss(
            query,
            positive_key,
            Gather.apply(positive_key, sizes, group),
            reduction="sum" if reduction == "mean" else reduction,
            queue=queue,
            ids=ids,
            negative_ids=Gather.apply(ids, sizes, group),
            log_q=log_q,
            negative_log_q=None if log_q is None else Gather.apply(log_q, sizes, group),
            **options,
        )
        return value if reduction == "none" else value * _share(sizes, reduction)

    return _both_directions(local)


def ring(loss: Loss, group: Group = None) -> Loss:
    """`gathered` in memory that does not grow with the number of ranks: keys travel from rank to rank.

    Each rank holds the keys of one other rank at a time and merges their log-sum-exp into its own. In the backward pass
    the keys travel once more, together with their gradients. Values and gradients are those of `gathered`, for one more
    pass of the keys over the network. It takes the losses that are formulas over `pos` and `lse`: infonce, dcl, dclw,
    debiased_infonce, infonce_plus, mine, mine_plus and those of `fastcl.over_rows` (TypeError for others), without a
    queue. Double backward is not supported.

    >>> import torch, torch.distributed as dist, fastcl.distributed
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> infonce = fastcl.distributed.ring(fastcl.infonce)
    >>> round(infonce(torch.eye(2), torch.eye(2), temperature=0.5).item(), 4)
    0.1269
    >>> dist.destroy_process_group()
    """
    if isinstance(loss, functools.partial):
        return functools.partial(ring(loss.func, group), *loss.args, **loss.keywords)
    _refuse_module(loss)
    formula = formula_of(loss)
    if formula is None:
        raise TypeError(f"loss: expected a formula over pos and lse such as fastcl.infonce, got {loss!r}; {_ELSE}")

    @functools.wraps(loss, assigned=("__module__", "__name__", "__qualname__"))
    def local(
        query: Tensor,
        positive_key: Tensor,
        *,
        temperature: float | Tensor = 0.1,
        reduction: str = "mean",
        normalize: bool = True,
        ids: Tensor | None = None,
        log_q: Tensor | None = None,
        weight: Tensor | None = None,
        symmetric: bool = False,
        hardness: Hardness | None = None,
        margin: Margin | None = None,
        cap: Cap | None = None,
        **constants: Any,
    ) -> Tensor:
        adjust = Adjustments(hardness, margin, cap)

        def checked() -> tuple[int, object]:
            _refuse(constants, _MADE, _INSTEAD)
            _refuse(constants, ("queue",), "which distributed.gathered takes")
            check_batch(query, positive_key, None, temperature, reduction, None)
            check_weight(weight, query.shape[0], query.device)
            every = {**constants, "temperature": temperature, "reduction": reduction, "normalize": normalize}
            every |= {"hardness": hardness, "margin": margin, "cap": cap}
            return _columns(query, positive_key, ids, log_q, None, symmetric, loss, every)

        sizes = agree(checked, group)
        if normalize:
            query, positive_key = normalized_together(query, positive_key)
        row_id = own_ids(sizes, query.device, group) if ids is None else as_ids("ids", ids, ("N",))
        scale = inverse(temperature, query, positive_key)

        limit = None if cap is None else adjust.limit(dot(query, positive_key))

        def lse_at(factor: float) -> Tensor:
            at, bias, share = scale * factor, None if log_q is None else -log_q, None
            if beta := adjust.hardness_of("in_batch"):
                at, bias, share = Harder.of(at, bias, beta)
            tensor, number = (at, 1.0) if isinstance(at, Tensor) else (NONE, at)
            at = at.detach() if isinstance(at, Tensor) else at
            capped = NONE if limit is None else limit * at
            lse = RingLse.apply(query, positive_key, tensor, bias, row_id, capped, number, sizes, group)
            return lse if share is None else graded(lse, share)

        def count() -> Tensor:
            if limit is not None:
                raise ValueError("cap: expected none with a loss that averages over its negatives, got one")
            ordered = Gather.apply(row_id, sizes, group).sort().values
            own = torch.searchsorted(ordered, row_id, right=True) - torch.searchsorted(ordered, row_id)
            return sum(sizes) - own

        def mean() -> Tensor:
            raise ValueError("label_smoothing: expected 0 with distributed.ring, got another")

        pos = adjust.moved(dot(query, positive_key)) * scale
        if log_q is not None:
            pos = pos - log_q.to(pos)
        pairs, hard = ((query, positive_key),), hardness is not None
        rows = Rows(pos, lse_at(1.0), count, mean, lse_at, lambda: pairs, scale, log_q is not None, hard)
        value = reduced(formula(rows, **constants), "sum" if reduction == "mean" else reduction, weight)
        return value if reduction == "none" else value * _share(sizes, reduction)

    return _both_directions(local)


def push(
    queue: NegativeQueue, keys: Tensor, ids: Tensor | None = None, log_q: Tensor | None = None, group: Group = None
) -> Evicted:
    """`queue.push` of the keys of all ranks, in rank order, so that equal queues stay equal on all ranks (as in MoCo).

    For a different queue on each rank (as in CLRec) call `queue.push` itself, and `keep_local` if the queue is part of
    the model.

    >>> import torch, torch.distributed as dist, fastcl.distributed
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> queue = fastcl.NegativeQueue(capacity=4, dim=2)
    >>> _ = fastcl.distributed.push(queue, torch.eye(2))
    >>> len(queue)
    2
    >>> dist.destroy_process_group()
    """

    def checked() -> tuple[int, object]:
        if not isinstance(queue, NegativeQueue):
            raise TypeError(f"queue: expected a NegativeQueue, got {type(queue).__name__}")
        queue._check(keys, ids, log_q)
        queue._counted()  # raises for buffers that hold no valid queue
        rows, alike = rows_and_facts("keys", keys.detach())
        return rows, ("push", alike, ids is None, log_q is None)

    sizes = agree(checked, group)

    def every(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        return None if t is None else Gather.apply(t.detach().to(dtype), sizes, group)

    everyones = Gather.apply(keys.detach(), sizes, group)
    return queue.push(everyones, every(ids, torch.int64), every(log_q, torch.float32))


def keep_local(model: torch.nn.Module) -> None:
    """Makes DistributedDataParallel leave the model's queues alone; call it before wrapping the model.

    DDP overwrites the buffers of all ranks with those of rank 0 when it is constructed and at every forward pass. That
    changes nothing in queues that `push` keeps equal, but loses a queue that each rank fills itself.

    >>> import torch, fastcl.distributed
    >>> model = torch.nn.ModuleDict({"encoder": torch.nn.Linear(3, 2), "queue": fastcl.NegativeQueue(8, 2)})
    >>> fastcl.distributed.keep_local(model)
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a module, got {type(model).__name__}")
    ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    for path, module in model.named_modules():
        if isinstance(module, NegativeQueue):
            ignored |= {f"{path}.{name}".lstrip(".") for name, _ in module.named_buffers()}
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
