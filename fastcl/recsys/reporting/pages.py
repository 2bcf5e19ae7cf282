"""Pictures of runs: measures what they show, writes the numbers, one PNG each and one self-contained HTML page.

The drawing is pictures.py's, the measuring that of metrics, groups and robustness; nothing here trains.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fastcl.recsys.data import Histories, Scorer, Split
from fastcl.recsys.data.scoring import check_items, frozen
from fastcl.recsys.evaluation.groups import by_group
from fastcl.recsys.evaluation.measures import measure
from fastcl.recsys.evaluation.ranking import rank_cases
from fastcl.recsys.evaluation.robustness import RATIOS, robustness
from fastcl.recsys.models import CLRec, Model, MultiCLRec
from fastcl.recsys.reporting import pictures, tables
from fastcl.recsys.reporting.intents import intents
from fastcl.recsys.reporting.pictures import Line
from fastcl.recsys.writing import check_folder, write_set

K = (10, 40)
METRICS = ("recall", "ndcg", "diversity", "coverage", "popularity", "gini")
GROUPED = "recall@40"  # as in ContrastVAE's analysis
DIAGNOSED = 512  # histories that a model's diagnostics are averaged over
TRAINED = "training data"
FILES = ("numbers.json", "index.html")  # beside the pictures

Numbers = dict[str, dict[str, Any]]


def plot(
    models: Mapping[str, Model],
    split: Split,
    out: str | Path,
    *,
    logs: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    seeds: Mapping[str, int] | None = None,
    seen: str = "mask",
    ratios: Sequence[float] = RATIOS,
    notes: Sequence[str] = (),
    groups: Mapping[str, str] | None = None,
) -> list[Path]:
    """Writes NAME.png for every picture, index.html with all of them, and numbers.json into the folder `out`.

    An earlier index.html goes first and the new one comes last: where it is, the other files belong to it.

    models: name -> model. logs: name -> the lines of its metrics.jsonl. seeds: name -> seed of its training, for the
        replay of CLRec's queue. seen, ratios: as in `ranking.evaluate` and `robustness`. notes: sentences that stand
        above the table of results. groups: name -> what the pictures call the models that differ by their seed alone,
        which are drawn as their mean in a band from the least to the largest; a model that is not in it stands alone.

    Returns the files. Raises ImportError without matplotlib, before anything is measured.

    >>> plot({"sasrec": load("runs/first")}, split, "pictures")  # doctest: +SKIP
    """
    check_folder("out", out)
    pictures.side_by_side(lambda axes: None)
    numbers = measured(models, split, logs or {}, seeds or {}, seen, ratios)
    floors = [name for name in numbers["results"] if name not in models]
    sections = _figures(numbers, _Look(models, floors, groups or {}))
    images = {
        section: {name: pictures.png(pictures.alone(draw)) for name, draw in draws.items()}
        for section, draws in sections.items()
    }
    files = {f"{name}.png": [image] for of_section in images.values() for name, image in of_section.items()}
    files["numbers.json"] = [json.dumps(numbers, indent=1).encode() + b"\n"]
    files["index.html"] = [_page(numbers, images, split, seen, notes).encode()]
    write_set(Path(out), files)
    return [Path(out) / name for name in files]


def measured(
    models: Mapping[str, Model],
    split: Split,
    logs: Mapping[str, Sequence[Mapping[str, Any]]],
    seeds: Mapping[str, int],
    seen: str,
    ratios: Sequence[float],
) -> Numbers:
    """All numbers that the pictures show, by picture and name; of the floors, what does not need a model."""
    numbers: Numbers = {"curves": {name: list(lines) for name, lines in logs.items() if lines}}
    numbers |= {
        key: {} for key in ("results", "groups", "impressions", "robustness", "queue", "intents", "diagnostics")
    }
    numbers["impressions"][TRAINED] = tables.shown_shares(split.counts, split.counts)
    scorers: dict[str, Scorer] = {**models, **tables.floors(split, seen)}
    for name, scorer in scorers.items():
        found = rank_cases(scorer, split.test, k=K, seen=seen)
        numbers["results"][name] = measure(found, METRICS)
        numbers["groups"][name] = by_group(found, split.test)
        if found.shown is not None and name in models:
            numbers["impressions"][name] = tables.shown_shares(found.shown[0], split.counts)
    for name, model in models.items():
        numbers["robustness"][name] = robustness(model, split.test, ratios=ratios, seen=seen)
        if isinstance(model, CLRec) and model.queue is not None:
            numbers["queue"][name] = queue_replay(model, split.train, seeds.get(name, 0))
        if isinstance(model, MultiCLRec):
            numbers["intents"][name] = intents(model, split.test.history, K[0], seen)
        diagnostics = getattr(model, "diagnostics", None)
        if callable(diagnostics):
            few = split.test.history.take(np.arange(min(DIAGNOSED, len(split.test))))
            with frozen(model):
                numbers["diagnostics"][name] = diagnostics(few)
    return numbers


def queue_replay(model: CLRec, train: Histories, seed: int) -> dict[str, list[float]]:
    """What CLRec's queue holds before each step of the first epoch of a training with `seed`, which begins with an
    empty one. No vector is computed. Where several processes trained, the queue of the one that `model.share` names.

    Returns lists of one number a step: "step" from 1; "age", mean steps since an entry was encoded; "oldest"; "hits",
    the share of (row, queue entry) pairs in which the entry is the row's own target.

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


class _Look:
    """Which runs are seeds of the same settings, and the one colour that these have in all pictures."""

    def __init__(self, models: Mapping[str, Model], floors: Sequence[str], groups: Mapping[str, str]) -> None:
        self.members: dict[str, list[str]] = {}
        for name in models:
            self.members.setdefault(groups.get(name, name), []).append(name)
        self.colours = {group: f"C{nth % 10}" for nth, group in enumerate(self.members)}
        self.styles = {group: "-" if nth < 10 else ":" for nth, group in enumerate(self.members)}
        for floor, grey in zip(floors, ("dimgray", "darkgray", "silver"), strict=False):
            self.members[floor], self.colours[floor], self.styles[floor] = [floor], grey, "--"

    def lines(
        self, values: Mapping[str, Sequence[float]], x: Sequence[float], style: str = "", more: str = ""
    ) -> list[Line]:
        """One line a group of those names that there are values for, over `x`; `more` follows the group's name."""
        found = {group: [values[name] for name in names if name in values] for group, names in self.members.items()}
        return [
            Line(f"{group}{more}", x, rows, self.colours[group], style or self.styles[group])
            for group, rows in found.items()
            if rows
        ]

    def bars(self, values: Mapping[str, float], title: str, label: str) -> pictures.Draw:
        """The mean of each group, with the least and the largest of its seeds."""
        found = {group: [values[name] for name in names if name in values] for group, names in self.members.items()}
        found = {group: rows for group, rows in found.items() if rows}
        means = {group: sum(rows) / len(rows) for group, rows in found.items()}
        spread = {group: (min(rows), max(rows)) for group, rows in found.items()}
        return partial(pictures.bars, values=means, title=title, label=label, colours=self.colours, spread=spread)


def _figures(numbers: Numbers, look: _Look) -> dict[str, dict[str, pictures.Draw]]:
    """name of a section -> name of a picture -> what draws it; only those that there are numbers for."""
    found: dict[str, dict[str, pictures.Draw]] = {}
    if numbers["curves"]:
        found["curves"] = {"training": _curves(numbers["curves"], look, _is_loss, "Training", "loss")}
        found["curves"]["validation"] = _curves(numbers["curves"], look, _is_gain, "Validation", "full ranking")
    found["impressions"] = {"impressions": partial(_impressions, shares=numbers["impressions"], look=look)}
    results = numbers["results"]
    shown = {"diversity@10": "distinct items in all lists", "popularity@10": "mean train clicks of a shown item"}
    found["diversity"] = {
        key.partition("@")[0]: look.bars({name: result[key] for name, result in results.items()}, key, label)
        for key, label in shown.items()
    }
    labels = {
        "popularity": "train clicks of the target (cases)",
        "frequency": "cases with the same target (cases)",
        "length": "items in the history (cases)",
    }
    found["groups"] = {
        f"groups-{by}": partial(
            pictures.grouped,
            drawn=look.lines({n: [row[GROUPED] for row in of[by]] for n, of in numbers["groups"].items()}, ()),
            reports={name: of[by] for name, of in numbers["groups"].items()},
            title=f"{GROUPED} by {by}",
            label=label,
        )
        for by, label in labels.items()
    }
    found["robustness"] = {
        f"robustness-{kind}": partial(_robustness, reports=numbers["robustness"], kind=kind, look=look)
        for kind in ("delete", "replace")
    }
    if numbers["queue"]:
        of_queue = {"age": ("Age of the queue", "mean steps"), "hits": ("Accidental hits", "share of the queue")}
        steps = max((replay["step"] for replay in numbers["queue"].values()), key=len)
        found["queue"] = {
            f"queue-{key}": partial(
                pictures.lines,
                drawn=look.lines({name: replay[key] for name, replay in numbers["queue"].items()}, steps),
                title=title,
                x="step of the first epoch",
                y=label,
            )
            for key, (title, label) in of_queue.items()
        }
    if numbers["intents"]:
        found["intents"] = {
            f"intents-{nth}": partial(
                pictures.intents, found=of, title=f"{name}: {of['category'] or 'items'} by intent"
            )
            for nth, (name, of) in enumerate(numbers["intents"].items(), start=1)
        }
    diagnosed = numbers["diagnostics"]
    keys = list(dict.fromkeys(key for values in diagnosed.values() for key in values))
    if keys:
        found["diagnostics"] = {
            f"diagnostics-{nth}": look.bars({n: v[key] for n, v in diagnosed.items() if key in v}, key, key)
            for nth, key in enumerate(keys, start=1)
        }
    return found


def _curves(logs: Mapping[str, Any], look: _Look, wanted: Any, title: str, label: str) -> pictures.Draw:
    """Every wanted column of the logs, one style each; a column of parts ({"name": number}) as one line a part."""
    columns: dict[str, dict[str, list[float]]] = {}
    for name, log in logs.items():
        for key in filter(wanted, log[0]):
            if isinstance(log[0][key], Mapping):
                for part in log[0][key]:
                    columns.setdefault(part, {})[name] = [row[key][part] for row in log]
            else:
                columns.setdefault(key, {})[name] = [row[key] for row in log]
    epochs = range(1, 1 + max(map(len, logs.values())))
    drawn = [
        line
        for nth, (key, values) in enumerate(columns.items())
        for line in look.lines(values, epochs, STYLES[nth % len(STYLES)], f" {key}")
    ]
    return partial(pictures.lines, drawn=drawn, title=title, x="epoch", y=label)


def _impressions(axes: Any, shares: Mapping[str, Sequence[float]], look: _Look) -> None:
    buckets = max(map(len, shares.values()))
    trained = Line(TRAINED, range(buckets), [shares[TRAINED]], "black", ":")
    drawn = [trained, *look.lines({n: s for n, s in shares.items() if n != TRAINED}, range(buckets))]
    pictures.lines(axes, drawn, "Impressions in the top 10", "clicks in train, from", "share")
    axes.set_xticks(range(buckets), ["0", *(str(2**b) for b in range(buckets - 1))], rotation=45)


def _robustness(axes: Any, reports: Mapping[str, Sequence[Mapping[str, Any]]], kind: str, look: _Look) -> None:
    of_kind = {name: [row for row in rows if row["kind"] == kind] for name, rows in reports.items()}
    ratios = [row["ratio"] for row in next(iter(of_kind.values()))]
    drawn = look.lines({name: [row["recall@10"] for row in rows] for name, rows in of_kind.items()}, ratios)
    pictures.lines(axes, drawn, f"Random {kind}", "share of the history's items", "recall@10")
    axes.set_ylim(bottom=0)


def _is_loss(key: str) -> bool:
    return key.startswith("loss")


def _is_gain(key: str) -> bool:
    return key.partition("@")[0] in ("ndcg", "recall")


STYLES = ("-", "--", ":", "-.")
TEXTS = {
    "curves": "Loss (with its parts where the model names them) and validation metrics after each epoch.",
    "impressions": "Share of impressions per popularity bucket against the training data (CLRec, Fig. 3 and 4). "
    "A model that follows the training line fits what was clicked; one to its left widens what is shown.",
    "diversity": "Distinct items over all top-10 lists, and how often a recommended item was clicked in train.",
    "groups": "Recall for rare and popular targets, and for short and long histories, all items ranked. Below each is "
    f"its number of cases; what rests on fewer than {pictures.FEW} is pale.",
    "robustness": "Items of the test histories deleted or replaced at random; candidates stay the same.",
    "queue": "CLRec's queue over one epoch from empty: how old its vectors are, and how often a negative is the row's "
    "own positive.",
    "intents": "MultiCLRec: how the items of each category (the twenty largest) are shared out among the intents, the "
    "share of all items that each intent takes and of the users that it fits best.",
    "diagnostics": "What the model says of its latent variables: a KL near 0 is posterior collapse, a variance near 0 "
    "a point estimate.",
}
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:68rem;margin:2rem auto;padding:0 1rem;color:#222}"
    ".pictures{display:flex;flex-wrap:wrap;gap:1rem}img{width:30rem;max-width:100%;height:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
    "td,th{padding:.2rem .7rem;text-align:right;border-bottom:1px solid #ddd}td:first-child,th:first-child"
    "{text-align:left;white-space:nowrap}.table{overflow-x:auto}p{color:#555}"
)


def _page(
    numbers: Numbers, images: Mapping[str, Mapping[str, bytes]], split: Split, seen: str, notes: Sequence[str]
) -> str:
    results = numbers["results"]
    columns = [key for key in next(iter(results.values())) if key.endswith(f"@{K[0]}")]
    head = "".join(f"<th>{html.escape(column)}</th>" for column in ["", *columns])
    body = "".join(
        f"<tr><td>{html.escape(name)}</td>"
        + "".join(f"<td>{tables.number(column, result[column])}</td>" for column in columns)
        + "</tr>\n"
        for name, result in results.items()
    )
    counted = f"{len(split.users):,} users, {len(split.items):,} items, {int(split.counts.sum()):,} train clicks"
    cases = next(iter(results.values()))
    cases_text = (
        f"{cases['cases']:,} test cases, {cases['unseen_targets']:,} of them with a target never seen in train, "
        f"{cases['repeated_targets']:,} with one in their own history"
    )
    parts = [
        f'<h2>{section.capitalize()}</h2>\n<p>{html.escape(TEXTS[section])}</p>\n<div class="pictures">\n'
        + "".join(
            f'<img alt="{name}" src="data:image/png;base64,{base64.b64encode(image).decode()}">\n'
            for name, image in of_section.items()
        )
        + "</div>\n"
        for section, of_section in images.items()
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>fastcl runs</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{STYLE}</style></head>\n<body>\n<h1>Runs</h1>\n<p>{counted}; {cases_text}; seen items: {seen}.</p>\n"
        + "".join(f"<p>{html.escape(note)}.</p>\n" for note in notes)
        + f'<div class="table"><table><tr>{head}</tr>\n{body}</table></div>\n{"".join(parts)}</body></html>\n'
    )
