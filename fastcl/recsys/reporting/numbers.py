"""The numbers of a report: metrics with intervals, the verdict against the floors, groups, examples, and diagnostics
for developers of a model. Nothing here draws, writes or trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import numpy as np

from fastcl.recsys.data import Histories, Scorer, Split
from fastcl.recsys.data.scoring import check_items, frozen
from fastcl.recsys.evaluation.groups import GROUPS, by_group
from fastcl.recsys.evaluation.measures import measure, users_gains
from fastcl.recsys.evaluation.paired import paired_test
from fastcl.recsys.evaluation.ranking import rank_cases
from fastcl.recsys.evaluation.robustness import robustness
from fastcl.recsys.models import CLRec, Model, MultiCLRec
from fastcl.recsys.reporting import tables
from fastcl.recsys.reporting.intents import intents
from fastcl.recsys.serving.recommend import rank

K = (10, 40)
METRICS = ("recall", "ndcg", "diversity", "coverage", "popularity", "gini")
JUDGED = "ndcg@10"  # the metric of the verdict
DIAGNOSED = 512  # the number of histories over which a model's diagnostics are averaged
TRAINED = "training data"
USERS, NEWEST, SHOWN = 3, 5, 5  # numbers of example users, of clicks shown for each, and of items in a list
SECONDS = (10**8, 10**10)  # times in this range are taken as Unix seconds: 1973 to 2286

Numbers = dict[str, Any]


def measured(
    models: Mapping[str, Model],
    split: Split,
    *,
    seen: str,
    ratios: Sequence[float],
    by: Sequence[str] = tuple(GROUPS),
    logs: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    seeds: Mapping[str, int] | None = None,
    groups: Mapping[str, str] | None = None,
) -> Numbers:
    """All numbers of a report: for each part a dict by the names of models and floors; arguments as in `report`.

    "settings": every setting of each model. "curves": the lines of its log. "results": the metrics of each model and
    floor. "intervals": the 95% intervals [low, high] of the metrics that are means over cases; models that differ in
    their seed alone have one interval of the mean over the seeds, under their group's name. "verdicts": the comparison
    of each group with the best floor.
    """
    named = {name: (groups or {}).get(name, name) for name in models}
    found_floors = tables.floors(split, seen)
    if taken := sorted(models.keys() & found_floors.keys()):
        raise ValueError(f"models: expected other names than those of the floors, got {', '.join(taken)}")
    scorers: dict[str, Scorer] = {**models, **found_floors}
    numbers: Numbers = {
        "split": _of_split(split, seen),
        "settings": {name: dataclasses.asdict(model.config) for name, model in models.items()},
        "curves": {name: list(lines) for name, lines in (logs or {}).items() if lines},
    }
    parts = ("results", "groups", "impressions", "robustness", "queue", "intents", "diagnostics")
    numbers |= {part: {} for part in parts}
    numbers["impressions"][TRAINED] = tables.shown_shares(split.counts, split.counts)
    gains: dict[str, list[dict[str, np.ndarray]]] = {}
    for name, scorer in scorers.items():
        found = rank_cases(scorer, split.test, k=K, seen=seen)
        gains.setdefault(named.get(name, name), []).append(users_gains(found, METRICS))
        numbers["results"][name] = measure(found, METRICS)
        numbers["groups"][name] = by_group(found, split.test, by)
        if found.shown is not None and name in models:
            numbers["impressions"][name] = tables.shown_shares(found.shown[0], split.counts)
    means = {name: {key: np.mean([g[key] for g in of], axis=0) for key in of[0]} for name, of in gains.items()}
    numbers["intervals"] = {
        name: {key: _interval(v) for key, v in of.items() if len(v) > 1} for name, of in means.items()
    }
    numbers["verdicts"] = _verdicts({name: of[JUDGED] for name, of in means.items()}, list(found_floors))
    best = numbers["verdicts"][0]["floor"]
    first = {group: models[name] for name, group in reversed(named.items())}  # the first seed of each group
    numbers["examples"] = _examples({**dict(reversed(first.items())), best: found_floors[best]}, split, seen)
    for name, model in models.items():
        numbers["robustness"][name] = robustness(model, split.test, ratios=ratios, seen=seen)
        if isinstance(model, CLRec) and model.queue is not None:
            numbers["queue"][name] = queue_replay(model, split.train, (seeds or {}).get(name, 0))
        if isinstance(model, MultiCLRec):
            numbers["intents"][name] = intents(model, split.test.history, K[0], seen)
        diagnostics = getattr(model, "diagnostics", None)
        if callable(diagnostics):
            few = split.test.history.take(np.arange(min(DIAGNOSED, len(split.test))))
            with frozen(model):
                numbers["diagnostics"][name] = diagnostics(few)
    return numbers


def queue_replay(model: CLRec, train: Histories, seed: int) -> dict[str, list[float]]:
    """Statistics of CLRec's queue before each step of the first epoch of a training with `seed`, in which the queue
    begins empty. No vector is computed. Where several processes trained, the queue is that of process `model.share`.

    Returns lists of one number per step: "step" from 1; "age", the mean number of steps since an entry was encoded;
    "oldest", the largest such number; "hits", the share of pairs (row, queue entry) whose entry is the row's target.

    >>> from fastcl.recsys import CLRec, Histories, Items
    >>> model = CLRec(Items(("a", "b")), dim=8, batch=2, negatives=4)
    >>> queue_replay(model, Histories.from_lists([[1, 2], [1, 2], [1, 2], [1, 2]]), seed=0)
    {'step': [1, 2], 'age': [0.0, 1.0], 'oldest': [0.0, 1.0], 'hits': [0.0, 1.0]}
    """
    if model.queue is None:
        options = f"objective {model.config.objective!r}, negatives_from {model.config.negatives_from!r}"
        raise ValueError(f"model: expected one with a queue, got {options}")
    check_items(model, train, "train")
    capacity = model.queue.capacity
    queued, pushed = np.zeros(0, np.int64), np.zeros(0, np.int64)
    replay: dict[str, list[float]] = {"step": [], "age": [], "oldest": [], "hits": []}
    for step, batch in enumerate(model.batches(train, np.random.default_rng((seed, 1))), start=1):
        target = batch.target.numpy(force=True)
        held = np.bincount(queued, minlength=len(model.items) + 1)
        age = step - pushed
        replay["step"].append(step)
        replay["age"].append(float(age.mean()) if len(age) else 0.0)
        replay["oldest"].append(float(age.max(initial=0)))
        replay["hits"].append(float(held[target].mean() / max(len(queued), 1)))
        queued = np.concatenate([queued, target])[-capacity:]
        pushed = np.concatenate([pushed, np.full(len(target), step)])[-capacity:]
    return replay


def _of_split(split: Split, seen: str) -> dict[str, Any]:
    return {
        "users": len(split.users),
        "items": len(split.items),
        "train_clicks": int(split.counts.sum()),
        "period": period(split),
        "cases": len(split.test),
        "unseen_targets": int((split.counts[split.test.target] == 0).sum()),
        "repeated_targets": int(split.test.repeated.sum()),
        "seen": seen,
    }


def period(split: Split) -> list[str] | None:
    """The dates (UTC) of the first and last click that a model may read; None where times are no Unix seconds."""
    times = [part.time for part in (split.train, split.test.history) if part.time is not None and len(part.time)]
    if not times:
        return None
    ends = [float(min(part.min() for part in times)), float(max(part.max() for part in times))]
    if not all(SECONDS[0] <= end <= SECONDS[1] for end in ends):
        return None
    return [datetime.fromtimestamp(end, timezone.utc).date().isoformat() for end in ends]


def _interval(gains: np.ndarray) -> list[float]:
    """The 95% interval of the mean over cases, of which there are two at least, by the normal approximation."""
    half = 1.96 * float(gains.std(ddof=1)) / np.sqrt(len(gains))
    return [float(gains.mean()) - half, float(gains.mean()) + half]


def _verdicts(gains: Mapping[str, np.ndarray], floors: Sequence[str]) -> list[dict[str, Any]]:
    """For each model, its difference to the best floor and the paired test of the difference over users."""
    best = max(floors, key=lambda name: float(gains[name].mean()))
    return [
        {"name": name, "metric": JUDGED, "value": float(of.mean()), "floor": best}
        | {"of_floor": float(gains[best].mean()), **paired_test(of, gains[best])}
        for name, of in gains.items()
        if name not in floors
    ]


def _examples(scorers: Mapping[str, Scorer], split: Split, seen: str) -> list[dict[str, Any]]:
    """Users at even distances in the test cases: their newest clicks, their targets, and each scorer's list."""
    count = len(split.test)
    cases = np.unique([count * (2 * nth + 1) // (2 * USERS) for nth in range(USERS)])
    history = split.test.history.take(cases)
    lists = {name: rank(scorer, history, SHOWN, seen)[0].tolist() for name, scorer in scorers.items()}
    newest = history.last(NEWEST)
    label = split.items.label
    return [
        {
            "user": split.users[split.test.user[case]],
            "newest": [label(item) for item in newest.take(np.array([nth])).item.tolist()],
            "next": [label(item) for item in split.test.take(np.array([case])).target.tolist()],
            "shown": {name: [label(item) for item in rows[nth] if item] for name, rows in lists.items()},
        }
        for nth, case in enumerate(cases)
    ]
