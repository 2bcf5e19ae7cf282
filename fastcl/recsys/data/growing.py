"""Item tables with further items behind their own, which keep their numbers. Nothing here knows models or logs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastcl.recsys.data.containers import Feature, Items


def grown(items: Items, more: Items) -> Items:
    """`items` followed by the items of `more` that it lacks. Features are those of `items`; an item of `more` has its
    values of the features that have the same name there, and values that `items` lacks are added behind the others.

    >>> first = Items(("a",), features={"tag": Feature.from_labels([["red"]])})
    >>> both = grown(first, Items(("a", "b"), features={"tag": Feature.from_labels([["new"], ["blue", "red"]])}))
    >>> both.ids, both.features["tag"].values, both.features["tag"].codes.tolist()
    (('a', 'b'), ('red', 'blue', 'new'), [[0, 0], [1, 0], [2, 1]])
    """
    rows = np.flatnonzero(items.encode(more.ids) == 0)
    if not len(rows):
        return items
    new = rows.tolist()
    ids = (*items.ids, *(more.ids[row] for row in new))
    titles = None
    if items.titles is not None or more.titles is not None:
        theirs = [""] * len(more) if more.titles is None else more.titles
        titles = (*(items.titles or [""] * len(items)), *(theirs[row] for row in new))
    features = {
        name: _grown(feature, more.features.get(name), 1 + rows, len(ids)) for name, feature in items.features.items()
    }
    return Items(ids, titles, features)


def begins_with(items: Items, first: Items) -> bool:
    """Whether the items of `first` have the same numbers in `items`."""
    return len(first) <= len(items) and all(a == b for a, b in zip(first.ids, items.ids, strict=False))


def _grown(own: Feature, more: Feature | None, rows: np.ndarray, count: int) -> Feature:
    if more is None:
        more = Feature((), np.zeros((1 + int(rows.max()), 0), np.int64))
    values = tuple(dict.fromkeys((*own.values, *more.values)))
    number = {value: code for code, value in enumerate(values, start=1)}
    translated = np.array([0, *(number[value] for value in more.values)], np.int64)[more.codes[rows]]
    codes = np.zeros((count + 1, max(own.codes.shape[1], translated.shape[1])), np.int64)
    codes[: len(own.codes), : own.codes.shape[1]] = own.codes
    codes[len(own.codes) :, : translated.shape[1]] = translated
    return Feature(values, codes)


def alike(feature: Feature, other: Feature) -> np.ndarray:
    """int64, the code in `other` of each code of `feature`; 0 where `other` lacks the value."""
    number = {value: code for code, value in enumerate(other.values, start=1)}
    return np.array([0, *(number.get(value, 0) for value in feature.values)], np.int64)


def shared_features(items: Items, others: Items) -> Sequence[str]:
    """The features by which an item of `items` can be likened to items of `others`."""
    return [name for name, feature in items.features.items() if name in others.features and feature.groups]
