"""The protocols of the studies: what is measured on validation after an epoch, which result is better, what on test.

Nothing is trained here (study.py does) and no results are stored or shown (quality.py does).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from benchmarks.paper_ranking import RANKINGS
from fastcl.recsys.data import Cases, Scorer
from fastcl.recsys.evaluation.measures import measure
from fastcl.recsys.evaluation.ranking import evaluate, rank_cases
from fastcl.recsys.models import ContrastVAE
from fastcl.recsys.reporting import tables

K = (10, 20, 40)
_OF_DRAWN, _OF_ALL = ("hr", "ndcg", "mrr"), ("recall", "ndcg", "mrr", "diversity", "popularity", "gini")


class Protocol(NamedTuple):
    """validate: the metrics on validation. better: (new, kept) -> whether the new validation result is better. watched:
    the metric that a run prints after each epoch. test: "test" -> the metrics; other names -> lists of numbers.
    """

    validate: Callable[[Scorer, Cases], dict[str, float]]
    better: Callable[[Mapping[str, float], Mapping[str, float]], bool]
    watched: str
    test: Callable[[Scorer, Cases], dict[str, Any]]


def ranking(scorer: Scorer) -> Protocol:
    """For ContrastVAE's tables: all items are ranked, by the authors' rules if the model is trained by them."""
    rules = RANKINGS[scorer.config.compat if isinstance(scorer, ContrastVAE) else "none"]

    def run(scorer: Scorer, cases: Cases) -> dict[str, float]:
        assert cases.counts is not None, "the cases of a split carry the train clicks"
        return rules.evaluate(scorer, cases, counts=cases.counts, k=K)

    return Protocol(run, rules.better, "ndcg@20", lambda scorer, cases: {"test": run(scorer, cases)})


def ranking_and_drawn(scorer: Scorer) -> Protocol:
    """The same, and on test the target among 100 uniform negatives too, as S3-Rec's program ranks it (among 99)."""
    whole = ranking(scorer)

    def test(scorer: Scorer, cases: Cases) -> dict[str, Any]:
        drawn = evaluate(scorer, cases, k=(10,), protocol="uniform100", metrics=("hr", "ndcg"))
        named = {f"uniform100 {name}": value for name, value in drawn.items() if "@" in name}
        return {"test": whole.test(scorer, cases)["test"] | named}

    return whole._replace(test=test)


def debiasing(scorer: Scorer) -> Protocol:
    """For CLRec's tables 8 and 10 and figure 4: ranks the target among 100 negatives, drawn by popularity from outside
    the user's history and the same for every model. Also ranks all items, and counts how often lists of ten show each.
    """
    return Protocol(_both, lambda new, kept: new["pop100 ndcg@10"] > kept["pop100 ndcg@10"], "pop100 ndcg@10", _shown)


def _both(scorer: Scorer, cases: Cases) -> dict[str, float]:
    full = evaluate(scorer, cases, k=(10,), metrics=("recall", "ndcg"))
    return _drawn(scorer, cases) | {name: full[name] for name in ("recall@10", "ndcg@10")}


def _drawn(scorer: Scorer, cases: Cases) -> dict[str, float]:
    found = evaluate(scorer, cases, k=(1, 5, 10), protocol="pop100", metrics=_OF_DRAWN)
    return {f"pop100 {name}": value for name, value in found.items() if "@" in name}


def _shown(scorer: Scorer, cases: Cases) -> dict[str, Any]:
    found = rank_cases(scorer, cases, k=(1, 5, 10, 20))
    assert found.shown is not None, "full ranking keeps what it showed"
    test = _drawn(scorer, cases) | measure(found, _OF_ALL)
    test["target diversity"] = float(len(np.unique(cases.target)))
    shares = {
        "impressions": tables.shown_shares(found.shown[found.k.index(10)], found.counts),
        "train clicks": tables.shown_shares(found.counts, found.counts),
    }
    return {"test": test} | {name: [round(share, 5) for share in values] for name, values in shares.items()}


def repeats(scorer: Scorer) -> Protocol:
    """For logs with repeated purchases: all items are ranked, those of the history included."""

    def run(scorer: Scorer, cases: Cases) -> dict[str, float]:
        return evaluate(scorer, cases, k=(10, 50), seen="keep", metrics=("recall", "ndcg", "diversity", "popularity"))

    return Protocol(
        run,
        lambda new, kept: new["ndcg@10"] > kept["ndcg@10"],
        "ndcg@10",
        lambda scorer, cases: {"test": run(scorer, cases)},
    )


def several(scorer: Scorer) -> Protocol:
    """For collaborative filtering on splits with several test items a user: all items are ranked but those of train."""

    def run(scorer: Scorer, cases: Cases) -> dict[str, float]:
        found = evaluate(scorer, cases, metrics=("recall@20", "ndcg@20"))
        return {name: value for name, value in found.items() if "@" in name}

    return Protocol(
        run,
        lambda new, kept: new["ndcg@20"] > kept["ndcg@20"],
        "ndcg@20",
        lambda scorer, cases: {"test": run(scorer, cases)},
    )


PROTOCOLS: dict[str, Callable[[Scorer], Protocol]] = {
    "ranking": ranking,
    "ranking and drawn": ranking_and_drawn,
    "debiasing": debiasing,
    "repeats": repeats,
    "several": several,
}
# Protocol -> whether items of the history are masked or kept in the ranking; the floors need to know.
SEEN = {"ranking": "mask", "ranking and drawn": "mask", "debiasing": "mask", "repeats": "keep", "several": "mask"}


def some(cases: Cases, count: int) -> Cases:
    """At most `count` random cases, the same ones at every call; all cases if `count` is 0."""
    if not 0 < count < len(cases):
        return cases
    return cases.take(np.sort(np.random.default_rng(0).permutation(len(cases))[:count]))
