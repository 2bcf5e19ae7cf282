"""A block in which a model is in eval mode and encodes its items once. Every function that scores opens such a block.

Nothing here scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock, RLock
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fastcl.recsys.data.containers import Histories, Items

T = TypeVar("T")


@dataclass
class _Block:
    depth: int = 0
    training: list[nn.Module] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)
    making: Any = field(default_factory=RLock)  # held while a result is made, which may ask for another one


# The open blocks are kept outside the models, so that a copy of a frozen model is not frozen.
_open: WeakKeyDictionary[nn.Module, _Block] = WeakKeyDictionary()
_lock = Lock()


@contextmanager
def frozen(scorer: object) -> Iterator[None]:
    """A block in which the modules of `scorer` are in eval mode and `Model.scores` encodes the items once.

    `evaluate`, `recommend` and every other function that scores opens a block for the call. A service that scores one
    history at a time opens one around all of its calls, so that no call encodes every item again. Weights must not
    change inside a block. Blocks may be nested and held by several threads; when the last one ends, each module returns
    to the mode it had before the first one, and the item vectors are dropped. Threads that ask for the item vectors at
    the same time wait for the one that encodes them. A scorer that is no torch.nn.Module is left as it is, but for one
    that passes on the scores of another, its attribute `scorer`: then the block is of that.

    >>> from fastcl.recsys import Items, SASRec, frozen, recommend
    >>> model = SASRec(Items(("a", "b", "c")), dim=8, seed=0)
    >>> with frozen(model):
    ...     model.training, [len(recommend(model, [[item]], k=2)[0]) for item in "abc"]
    (False, [2, 2, 2])
    >>> model.training
    True
    """
    while not isinstance(scorer, nn.Module) and hasattr(scorer, "scorer"):
        scorer = scorer.scorer
    if not isinstance(scorer, nn.Module):
        yield
        return
    with _lock:
        block = _open.setdefault(scorer, _Block())
        block.depth += 1
        fresh = [module for module in scorer.modules() if module.training]
        block.training += fresh
        for module in fresh:
            module.training = False
    try:
        yield
    finally:
        with _lock:
            block.depth -= 1
            if not block.depth:
                del _open[scorer]
                for module in block.training:
                    module.training = True


def check_not_frozen(model: nn.Module) -> None:
    """ValueError inside a `frozen` block of `model`: training there would be validated with outdated item vectors."""
    if model in _open:
        raise ValueError("model: expected one whose weights may change, got one in a `frozen` block")


def item_table(model: Any) -> Tensor:
    """model.item_vectors(), [I+1, D], computed once in a `frozen` block."""
    return kept(model, "item vectors", model.item_vectors)


def kept(model: Any, name: str, make: Callable[[], T]) -> T:
    """make(), called once in a `frozen` block of `model`, by one thread for all; its result must depend on the weights
    alone.
    """
    block = _open.get(model)
    # With gradients a kept result would hold its autograd graph, which backward can walk only once.
    if block is None or torch.is_grad_enabled():
        return make()
    if name not in block.kept:
        with block.making:
            if name not in block.kept:
                block.kept[name] = make()
    made: T = block.kept[name]
    return made


def check_items(scorer: object, histories: Histories, name: str) -> None:
    """ValueError where `scorer` has an item table and `histories` number other items.

    Histories of a split or a log know their item table; of other histories only the largest number is checked.
    name: the argument that the error names.
    """
    own = getattr(scorer, "items", None)
    if not isinstance(own, Items):
        return
    theirs = histories.items
    if theirs is None:
        top = int(histories.item.max(initial=0))
        if top > len(own):
            raise ValueError(f"{name}: expected items 1..{len(own)} of the model, got {top}")
    elif theirs is not own and theirs.digest != own.digest:
        raise ValueError(f"{name}: expected the items of the model, {_difference(own, theirs)}")


def _difference(own: Items, theirs: Items) -> str:
    if len(own) != len(theirs):
        return f"{len(own):,} of them, got {len(theirs):,}"
    at = next(k for k, pair in enumerate(zip(own.ids, theirs.ids, strict=True)) if pair[0] != pair[1])
    alike = "the same in another order" if set(own.ids) == set(theirs.ids) else "others"
    return f"got {alike}: item {at + 1} is {theirs.ids[at]!r}, not {own.ids[at]!r}"
