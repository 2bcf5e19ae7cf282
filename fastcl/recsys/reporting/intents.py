"""What MultiCLRec's intents hold after training: the categories of each, and how evenly the intents share items, users
and recommended lists (the analyses of Zhou et al. 2021, appendix C). Nothing here trains or draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fastcl.recsys.data import PAD, Histories
from fastcl.recsys.data.scoring import check_items, frozen
from fastcl.recsys.evaluation.cutoffs import Cutoffs, cutoff
from fastcl.recsys.models import MultiCLRec
from fastcl.recsys.serving.recommend import MAX_CHUNK, rank


@torch.inference_mode()
def intents(model: MultiCLRec, histories: Histories, k: Cutoffs = 10, seen: str = "mask") -> dict[str, Any]:
    """Statistics of a model's intents over its items and some histories.

    Returns:
        "category":     the feature whose values the intents cluster; "" where each item is a category of its own.
        "categories":   one dict per value: "category", "items", and "intents" [H], the mean p_{h|t} of its items.
        "items":        [H], the number of items for which each intent has the largest p_{h|t}.
        "balance":      entropy of the mean p_{h|t} over all items, divided by log H: 1 where all shares are equal.
        "polarity":     mean over the items of the largest p_{h|t}: 1 where each item belongs to a single intent.
        "users":        [H], the share of the histories that each intent fits best.
        "top_intent":   the largest entry of "users".
        "list_share":   the share of the most frequent intent in a top-k list, averaged over the lists.
        "list_intents": the number of distinct intents in a top-k list, averaged over the lists.

    Args:
        histories: one or more histories, none of them empty.
        k, seen: the length of the lists and the treatment of seen items, as in `recommend`.

    Raises TypeError for a model without intents, ValueError for no histories or histories of another item table.

    >>> from fastcl.recsys import Feature, Histories, Items, MultiCLRec
    >>> items = Items(tuple("abc"), None, {"colour": Feature.from_labels([["red"], ["red"], ["blue"]])})
    >>> found = intents(MultiCLRec(items, dim=8, intents=4, seed=0).eval(), Histories.from_lists([[1], [3]]), k=1)
    >>> [(row["category"], row["items"]) for row in found["categories"]], sum(found["items"]), found["list_share"]
    ([('blue', 1), ('red', 2)], 3, 1.0)
    """
    if not isinstance(model, MultiCLRec):
        raise TypeError(f"model: expected one with intents (MultiCLRec), got {type(model).__name__}")
    if not len(histories):
        raise ValueError("histories: expected at least one, got none")
    check_items(model, histories, "histories")
    with frozen(model):
        return _measured(model, histories, cutoff(k), seen)


def _measured(model: MultiCLRec, histories: Histories, k: int, seen: str) -> dict[str, Any]:
    count = model.config.intents
    routed = model.intents(torch.arange(len(model.items) + 1, device=model.device)).cpu()
    of_item = routed.argmax(1).numpy()
    mean = routed[1:].double().mean(0)
    users = np.zeros(count)
    for start in range(0, len(histories), MAX_CHUNK):
        rows = histories.take(np.arange(start, min(start + MAX_CHUNK, len(histories))))
        users += np.bincount(model.users(rows).fit.argmax(1).numpy(force=True), minlength=count)
    users /= len(histories)
    lists = rank(model, histories, k, seen)[0].numpy(force=True)
    row = np.repeat(np.arange(len(lists)), lists.shape[1])[lists.ravel() != PAD]
    held = np.zeros((len(lists), count))
    np.add.at(held, (row, of_item[lists[lists != PAD]]), 1.0)
    held = held[held.any(1)]
    return {
        "category": model.category,
        "categories": _categories(model, routed),
        "items": np.bincount(of_item[1:], minlength=count).tolist(),
        "balance": float(-torch.xlogy(mean, mean).sum() / np.log(count)) if count > 1 else 1.0,
        "polarity": float(routed[1:].amax(1).mean()),
        "users": users.tolist(),
        "top_intent": float(users.max()),
        "list_share": float((held.max(1) / held.sum(1)).mean()) if len(held) else 0.0,
        "list_intents": float((held > 0).sum(1).mean()) if len(held) else 0.0,
    }


def _categories(model: MultiCLRec, routed: torch.Tensor) -> list[dict[str, Any]]:
    if not model.category:
        return []
    feature = model.items.features[model.category]
    found = []
    for code, name in enumerate(feature.values, start=1):
        having = (feature.codes == code).any(1)
        shares = routed[torch.from_numpy(having)].mean(0) if having.any() else routed.new_zeros(routed.shape[1])
        found.append({"category": name, "items": int(having.sum()), "intents": shares.tolist()})
    return found
