"""How ContrastVAE's test cases are ranked and which epoch is kept: by the paper's protocol or by the authors' program.

Only for figures that are compared with the paper's; all other figures are ranked by fastcl.recsys.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch

from fastcl.recsys import ContrastVAE, evaluate, frozen
from fastcl.recsys.data import Cases, Histories, Scorer
from fastcl.recsys.data.scoring import check_items


class PaperRanking(NamedTuple):
    """evaluate: (model, cases, counts=, k=) -> metrics. better: (new, kept) -> whether the new validation is better."""

    evaluate: Callable[..., dict[str, float]]
    better: Callable[[Mapping[str, float], Mapping[str, float]], bool]


def full_ranking(model: Scorer, cases: Cases, counts: np.ndarray, k: tuple[int, ...]) -> dict[str, float]:
    """recall@k and ndcg@k, ranked among all items outside the history: the paper's protocol."""
    found = evaluate(model, cases, counts=counts, k=k)
    return {name: value for name, value in found.items() if name.startswith(("recall", "ndcg"))}


def logits(model: ContrastVAE, histories: Histories) -> torch.Tensor:
    """float32 [B, I+2]: inner products with every row of the table, which are padding, items and the mask token."""
    return model.encode(histories) @ model.item.weight.T


def seen_at_zero(model: ContrastVAE, cases: Cases, counts: np.ndarray, k: tuple[int, ...]) -> dict[str, float]:
    """recall@k and ndcg@k as the authors' program ranks: among all rows of the embedding table, padding and mask token
    included. Items of the history get score 0, which puts them above every candidate with a negative score.
    """
    gains: dict[str, float] = {f"{name}@{cutoff}": 0.0 for name in ("recall", "ndcg") for cutoff in k}
    check_items(model, cases.history, "cases")
    with torch.inference_mode(), frozen(model):
        for start in range(0, len(cases), 256):
            rows = np.arange(start, min(start + 256, len(cases)))
            history = cases.history.take(rows)
            scores = logits(model, history)
            scores[np.repeat(np.arange(len(rows)), history.lengths), history.item] = 0.0
            target = scores.gather(1, torch.from_numpy(cases.target[rows])[:, None])
            rank = 1.0 + (scores > target).sum(1).double() + 0.5 * ((scores == target).sum(1) - 1)
            for cutoff in k:
                hit = rank <= cutoff
                gains[f"recall@{cutoff}"] += float(hit.sum()) / len(cases)
                gains[f"ndcg@{cutoff}"] += float((hit / torch.log2(rank + 1.0)).sum()) / len(cases)
    return gains


def by_ndcg(new: Mapping[str, float], kept: Mapping[str, float]) -> bool:
    return new["ndcg@20"] > kept["ndcg@20"]


def by_either(new: Mapping[str, float], kept: Mapping[str, float]) -> bool:
    """Whether recall@10 or ndcg@10 is higher, even if the other one is lower."""
    return new["recall@10"] > kept["recall@10"] or new["ndcg@10"] > kept["ndcg@10"]


# ContrastVAE's setting `compat` -> how its results are ranked.
RANKINGS = {
    "none": PaperRanking(full_ranking, by_ndcg),
    "paper-code": PaperRanking(seen_at_zero, by_either),
}
