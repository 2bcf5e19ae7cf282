"""Carries the weights of a trained model into a new one whose items, users or feature values are others: rows by their
names, rows of new items from the features that they share with earlier items. Nothing here trains or reads files.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fastcl.recsys.data import PAD, Histories, Items
from fastcl.recsys.data.growing import alike, begins_with, shared_features
from fastcl.recsys.models.base import Model, NamedRows, UserModel, check_model

# Settings that say how a model is trained; all others say what its weights mean, and must be alike.
MAY_DIFFER = (
    *("lr", "batch", "dropout", "attention_dropout", "item_dropout", "id_dropout", "sigma_dropout", "loss"),
    *("objective", "reconstruction", "samples", "negatives", "negatives_from", "count", "per", "main", "secondary"),
    *("temperature", "positive_temperature", "debias", "log_q", "mask_rate", "last_only", "duplicates", "propensity"),
    *("weight_limit", "lam", "epsilon", "weight", "gamma", "decay", "margin", "init", "polarity", "separation"),
    *("balance", "kl_weight", "kl_steps", "contrast", "contrast_weight", "augment", "served"),
    *("table", "table_rule", "table_rate", "label_smoothing", "sampling", "pretrain", "pretrain_batch"),
)


@dataclass(frozen=True)
class Carried:
    """items, users: rows that were found by their ids. like_others: new items whose rows are the means over earlier
    items that share a feature value. new_items, new_users: those whose rows were drawn anew. gone_items, gone_users:
    those of the earlier model that the new one lacks; None for users of a model without users.
    """

    items: int
    like_others: int
    new_items: int
    gone_items: int
    users: int | None = None
    new_users: int | None = None
    gone_users: int | None = None

    def __str__(self) -> str:
        found = (
            f"{self.items:,} items by id, {self.like_others:,} new ones like others of their features, "
            f"{self.new_items:,} drawn anew, {self.gone_items:,} of the earlier run are gone"
        )
        if self.users is None:
            return found
        return f"{found}; {self.users:,} users by id, {self.new_users:,} drawn anew, {self.gone_users:,} are gone"


def carry(model: Model, earlier: Model, name: str = "init") -> Carried:
    """Sets the weights of `model` to those of `earlier`: rows of items, users and feature values by their names, all
    other tensors as they are. Queues of negatives stay as they are in `model`, which has none pushed.

    The row of an item that `earlier` lacks becomes the mean of the rows of the items that share its feature values,
    taken for each value and averaged over these; without such an item the row stays as it was drawn. Rows of new users
    and new feature values stay as they were drawn, and so do tensors that `earlier` lacks by a setting that may differ.

    Raises ValueError, naming `name`, for another kind of model, for settings that must be alike (all but `MAY_DIFFER`),
    for other features of a model that encodes them, and for tensors of other shapes.
    """
    check_alike(model, earlier, name)
    theirs = {key: tensor.cpu() for key, tensor in earlier.state_dict().items()}
    own = {key: tensor for key, tensor in model.state_dict().items() if not _loads_itself(model, key)}
    rows, before = (dict(each.named_rows()) for each in (model, earlier))
    for key, tensor in own.items():
        # Numbers for each item are a parameter or, in a table of rows, a column.
        for other in (f"{key}.weight", key.removesuffix(".weight")):
            if key not in theirs and other in theirs and theirs[other].numel() == len(theirs[other]):
                theirs[key] = theirs[other].reshape(-1, *tensor.shape[1:])
                if other in before:
                    before[key] = before[other]
    if asdict(model.config) != asdict(earlier.config):
        own = {key: tensor for key, tensor in own.items() if key in theirs}
    rows, before = ({k: v for k, v in each.items() if k in own} for each in (rows, before))
    for key, tensor in own.items():
        found = theirs.get(key)
        if found is None or (key in rows) != (key in before) or found.shape[1:] != tensor.shape[1:]:
            raise ValueError(f"{name}: expected {key} of {list(tensor.shape)}, got {_shape(found)}")
        if key not in rows and found.shape != tensor.shape:
            raise ValueError(f"{name}: expected {key} of {list(tensor.shape)}, got {_shape(found)}")
    number = earlier.items.encode(model.items.ids)
    with torch.no_grad():
        like_others = 0
        for key, tensor in own.items():
            if key not in rows:
                tensor.copy_(theirs[key])
                continue
            place = _places(rows[key], before[key], len(tensor), len(theirs[key]))
            kept = np.flatnonzero(place >= 0)
            tensor[torch.from_numpy(kept)] = theirs[key][torch.from_numpy(place[kept])].to(tensor)
            if rows[key].names is model.items.ids:
                first = rows[key].first
                new = np.flatnonzero(number == PAD) + 1
                found_rows, known = of_features(theirs[key][before[key].first :], earlier.items, model.items, new)
                tensor[torch.from_numpy(new[known] + first - 1)] = found_rows[known].to(tensor)
                like_others = int(known.sum())
    kept_items = int((number != PAD).sum())
    users: tuple[int, ...] = ()
    if isinstance(model, UserModel) and isinstance(earlier, UserModel):
        kept_users = len(set(model.users) & set(earlier.users))
        users = kept_users, len(model.users) - kept_users, len(earlier.users) - kept_users
    drawn = len(model.items) - kept_items - like_others
    return Carried(kept_items, like_others, drawn, len(earlier.items) - kept_items, *users)


def with_items(model: Model, items: Items, counts: np.ndarray | None = None) -> Model:
    """A model of a larger item table that gives the further items vectors made of their features, ready to score.

    items: the items of the model, then items that were not in its training, with values of the same features
        (`fastcl.recsys.grown` puts tables together). An item's id has the mean of the ids' vectors of the trained items
        with its feature values. A value that no trained item has says nothing.
    counts: int64 [I+1], the train clicks of the model's items: those without a click are taken as new items too.

    Raises ValueError for a table that does not begin with the model's items, and for a model that encodes no features:
    CLRec and Multi-CLRec do, where their items have some.

    >>> from fastcl.recsys import CLRec, Feature, Items
    >>> from fastcl.recsys.data.growing import grown
    >>> first = Items(("a", "b"), features={"tag": Feature.from_labels([["red"], ["blue"]])})
    >>> more = grown(first, Items(("c",), features={"tag": Feature.from_labels([["red"]])}))
    >>> model = with_items(CLRec(first, dim=8, seed=0), more)
    >>> model.items.ids, model.item_vectors().shape
    (('a', 'b', 'c'), torch.Size([4, 8]))
    """
    check_model(model)
    if not begins_with(items, model.items):
        raise ValueError(f"items: expected the {len(model.items):,} items of the model first, got others")
    check_encodes(model)
    larger = type(model)(items, model.config)
    with torch.no_grad():
        state = larger.state_dict()
        for name in larger.named_rows():
            state[name].zero_()  # what `carry` does not set, a new value of a feature, adds nothing
        carry(larger, model, "items")
        if counts is not None:
            _unclicked(larger, np.asarray(counts))
    return larger.to(model.device).eval()


def check_encodes(model: Model) -> None:
    """ValueError for a model that has no vector for an item which it was not trained on."""
    if not model.encodes_features:
        what = "trained without any" if not model.items.features else "which encodes none of them"
        raise ValueError(
            f"items: expected a model that encodes item features (clrec, multi_clrec), got {model.name}, {what}"
        )


def _unclicked(model: Model, counts: np.ndarray) -> None:
    clicked = np.zeros(len(model.items) + 1, bool)
    clicked[: len(counts)] = counts > 0
    which = np.flatnonzero(~clicked[: len(counts)])[1:]
    state = model.state_dict()
    for name, rows in model.named_rows().items():
        if rows.names is model.items.ids and len(which):
            found, known = of_features(state[name][rows.first :], model.items, model.items, which, clicked)
            state[name][torch.from_numpy(which + rows.first - 1)] = found * torch.from_numpy(known)[:, None]


class Among:
    """The scores of another scorer for the items that `allowed` marks, bool [I+1]; all others have -inf."""

    def __init__(self, scorer: Any, allowed: np.ndarray) -> None:
        self.scorer, self.allowed = scorer, torch.from_numpy(allowed)

    def scores(self, histories: Histories) -> Tensor:
        """float32 [B, I+1]"""
        scores: Tensor = self.scorer.scores(histories)
        return scores.masked_fill(~self.allowed.to(scores.device), -torch.inf)


def check_alike(model: Model, earlier: Model, name: str) -> None:
    """ValueError where the weights of `earlier` mean something else than those of `model`."""
    if type(model) is not type(earlier):
        raise ValueError(f"{name}: expected a run of {model.name}, got one of {earlier.name}")
    if not model.learns:
        raise ValueError(f"{name}: expected none for {model.name}, which counts the clicks and has no weights to carry")
    theirs = asdict(earlier.config)
    for key, value in asdict(model.config).items():
        if key not in MAY_DIFFER and value != theirs[key]:
            free = ", ".join(field for field in theirs if field in MAY_DIFFER)
            raise ValueError(f"{name}: expected a run with {key}={value}, got {theirs[key]}; these may differ: {free}")
    of_features = {id(feature.values) for feature in model.items.features.values()}
    encodes = any(id(rows.names) in of_features for rows in model.named_rows().values())
    if encodes and tuple(model.items.features) != tuple(earlier.items.features):
        named = [", ".join(each.items.features) or "none" for each in (model, earlier)]
        raise ValueError(f"{name}: expected a run with the item features {named[0]}, got {named[1]}")


def of_features(
    table: Tensor, items: Items, others: Items, which: np.ndarray, known: np.ndarray | None = None
) -> tuple[Tensor, np.ndarray]:
    """Rows for the items `which` (numbers in `others`): for each, the mean over its feature values of the mean row of
    the items that have the value. Returns them, float32 [n, ...], and bool [n], which of them have such a value.

    table: [I, ...], row i - 1 is item i of `items`. known: bool [I+1], the items that means are taken over; None: all.
    """
    rows = table[: len(items)].float()
    total = rows.new_zeros(len(which), *rows.shape[1:])
    count = np.zeros(len(which), np.int64)
    for name in shared_features(others, items):
        feature, theirs = others.features[name], items.features[name]
        item, column = np.nonzero(theirs.codes)
        if known is not None:
            item, column = item[known[item]], column[known[item]]
        code = torch.from_numpy(theirs.codes[item, column])
        size = len(theirs.values) + 1
        sums = rows.new_zeros(size, *rows.shape[1:]).index_add(0, code, rows[torch.from_numpy(item - 1)])
        having = torch.bincount(code, minlength=size)
        means = sums / having.clamp(min=1).reshape(-1, *[1] * (rows.ndim - 1))
        codes = alike(feature, theirs)[feature.codes[which]]
        found = (codes > 0) & (having.numpy()[codes] > 0)
        row, column = np.nonzero(found)
        total.index_add_(0, torch.from_numpy(row), means[torch.from_numpy(codes[row, column])])
        count += found.sum(1)
    shape = (-1, *[1] * (rows.ndim - 1))
    return total / torch.from_numpy(np.maximum(count, 1)).reshape(shape), count > 0


def _places(own: NamedRows, theirs: NamedRows, size: int, their_size: int) -> np.ndarray:
    """int64 [size], the row of the earlier table for each row of the new one; -1 for none. Rows before the first name
    and behind the last (padding, a mask token) correspond by their distance from it.
    """
    number = {name: n for n, name in enumerate(theirs.names, start=theirs.first)}
    place = np.full(size, -1, np.int64)
    place[: own.first] = np.arange(own.first)
    place[own.first : own.first + len(own.names)] = [number.get(name, -1) for name in own.names]
    behind, their_behind = own.first + len(own.names), theirs.first + len(theirs.names)
    place[behind:] = np.arange(their_behind, their_size)
    return place


def _loads_itself(model: Model, key: str) -> bool:
    """Whether a tensor belongs to a module with a form of its own, such as a queue or the graph of the clicks."""
    modules: Mapping[str, Any] = dict(model.named_modules())
    parents = key.split(".")[:-1]
    above = [modules[".".join(parents[: n + 1])] for n in range(len(parents)) if ".".join(parents[: n + 1]) in modules]
    return any(type(module)._load_from_state_dict is not nn.Module._load_from_state_dict for module in above)


def _shape(tensor: Tensor | None) -> str:
    return "none" if tensor is None else str(list(tensor.shape))
