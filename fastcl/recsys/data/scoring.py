"""Scoring without surprises: for as long as a block lasts a model is in eval mode and encodes its items once.

Nothing scores here; every function that scores opens such a block around what it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
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


# Beside the models, not in them: a copy of a model that is being served is not.
_open: WeakKeyDictionary[nn.Module, _Block] = WeakKeyDictionary()
_lock = Lock()


@contextmanager
def frozen(scorer: object) -> Iterator[None]:
    """A block in which the modules of `scorer` are in eval mode and `Model.scores` encodes the items once.

    `evaluate`, `recommend` and all else that scores open one for the call. A service that scores one history at a time
    opens one around all of its calls, so that each does not encode every item again: weights must not change inside.
    Blocks may be nested, and held by several threads; at the end of the last one each module goes back to the mode that
    it had before the first, and the item vectors are dropped. A scorer that is no torch.nn.Module is left as it is.

    >>> from fastcl.recsys import Items, SASRec, frozen, recommend
    >>> model = SASRec(Items(("a", "b", "c")), dim=8, seed=0)
    >>> with frozen(model):
    ...     model.training, [len(recommend(model, [[item]], k=2)[0]) for item in "abc"]
    (False, [2, 2, 2])
    >>> model.training
    True
    """
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
    """ValueError in a `frozen` block of `model`, in which training would be validated with item vectors of before."""
    if model in _open:
        raise ValueError("model: expected one whose weights may change, got one in a `frozen` block")


def item_table(model: Any) -> Tensor:
    """model.item_vectors(), [I+1, D], computed once in a `frozen` block."""
    return kept(model, "item vectors", model.item_vectors)


def kept(model: Any, name: str, make: Callable[[], T]) -> T:
    """make(), which is called once in a `frozen` block of `model`: what it makes is of the weights alone."""
    block = _open.get(model)
    # A graph would be kept with what is made and could be walked back once only.
    if block is None or torch.is_grad_enabled():
        return make()
    if name not in block.kept:
        block.kept[name] = make()
    made: T = block.kept[name]
    return made


def check_items(scorer: object, histories: Histories, name: str) -> None:
    """ValueError where `scorer` has an item table and the numbers in `histories` are not those of its items.

    Histories of a split or a log know their items; of others the numbers alone are looked at. name: of the argument.
    """
    own = getattr(scorer, "items", None)
    if not isinstance(own, Items):
        return
    theirs = histories.items
    if theirs is None:
        top = int(histories.item.max(initial=0))
        if top > len(own):
            raise ValueError(f"{name}: expected items 1..{len(own)}, those of the model, got {top}")
    elif theirs is not own and theirs.digest != own.digest:
        raise ValueError(f"{name}: expected the items of the model, {_difference(own, theirs)}")


def _difference(own: Items, theirs: Items) -> str:
    if len(own) != len(theirs):
        return f"{len(own):,} of them, got {len(theirs):,}"
    at = next(k for k, pair in enumerate(zip(own.ids, theirs.ids, strict=True)) if pair[0] != pair[1])
    alike = "the same in another order" if set(own.ids) == set(theirs.ids) else "others"
    return f"got {alike}: item {at + 1} is {theirs.ids[at]!r}, not {own.ids[at]!r}"
