"""The report of one run or several: one page that needs no network, its pictures as PNG files, and its numbers.

This module puts the page together; numbers.py measures and figures.py draws. Nothing here trains.
"""

from __future__ import annotations

import dataclasses
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastcl.recsys.data import Split
from fastcl.recsys.evaluation.groups import GROUPS, check_groups
from fastcl.recsys.evaluation.robustness import RATIOS
from fastcl.recsys.models import Model
from fastcl.recsys.reporting import pictures, tables
from fastcl.recsys.reporting.figures import Look, Picture, figures
from fastcl.recsys.reporting.numbers import K, Numbers, measured
from fastcl.recsys.writing import check_folder, write_set

FILES = ("numbers.json", "index.html")  # the files besides the pictures
STYLE = (Path(__file__).parent / "report.css").read_text()
COLUMNS = ("recall", "ndcg", "diversity", "coverage", "popularity", "gini")
FOR_USERS = {
    "validation": ("While training", "What validation found after each epoch, all items ranked."),
    "impressions": (
        "What is shown",
        "First: how the items of all lists share out over popularity, beside the training clicks (CLRec, Fig. 3, 4). "
        "A model on the line of the training fits what was clicked; one to its left widens what is shown.",
    ),
    "groups": (
        "Who is served",
        f"Recall in groups of the test cases, with 95% intervals. Groups of fewer than {pictures.FEW} cases are pale.",
    ),
    "robustness": (
        "How much noise it stands",
        "Items of the test histories deleted, or replaced at random. What is ranked stays the same.",
    ),
    "intents": (
        "Intents",
        "How the items of each category (the twenty largest) are shared out among the intents, the share of all items "
        "that each intent takes, and of the users that it fits best.",
    ),
}
FOR_DEVELOPERS = {
    "training": ("Loss", "The mean over each epoch, with its parts where the model names them."),
    "queue": (
        "CLRec's queue",
        "Over one epoch from empty: how old its vectors are, and how often a negative is the row's own positive.",
    ),
    "diagnostics": (
        "Latent variables",
        "A KL near 0 is posterior collapse, a variance near 0 a point estimate.",
    ),
}


def report(
    models: Mapping[str, Model],
    split: Split,
    out: str | Path,
    *,
    title: str = "",
    logs: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    epochs: Mapping[str, int] | None = None,
    seeds: Mapping[str, int] | None = None,
    seen: str = "mask",
    ratios: Sequence[float] = RATIOS,
    notes: Sequence[str] = (),
    groups: Mapping[str, str] | None = None,
    by: Sequence[str] = tuple(GROUPS),
) -> list[Path]:
    """Writes index.html, NAME.png for every picture on it, and numbers.json into the folder `out`.

    An earlier index.html is removed first, with the pictures that the new report lacks, and the new one is written
    last, so that index.html never lies beside files of another report.

    models: name -> model. title: the name of the data, for the headline. logs: name -> the lines of its metrics.jsonl.
        epochs: name -> the number of epochs that its training was planned for. seeds: name -> seed of its training, for
        the table and for the replay of CLRec's queue. seen, ratios: as in `evaluate` and `robustness`. notes: sentences
        above everything else. groups: name -> the name of its group, the models that differ in their seed alone. A
        group is shown as its mean, in pictures with a band from the smallest to the largest; a model without a group
        stands alone. by: the groups of test cases, as in `by_group`.

    Returns the files. Raises ImportError without matplotlib, before anything is measured; ValueError for an unknown
    group, or a model with the name of a floor, such as "popularity".

    >>> report({"sasrec": load("runs/first")}, split, "report")  # doctest: +SKIP
    """
    check_folder("out", out)
    check_groups(by, split.items.features)
    pictures.side_by_side(lambda axes: None)
    numbers = measured(models, split, seen=seen, ratios=ratios, by=by, logs=logs, seeds=seeds, groups=groups)
    floors = [name for name in numbers["results"] if name not in models]
    look = Look(list(models), floors, groups or {})
    sections = figures(numbers, look)
    runs = {
        name: _run(name, numbers, model, (epochs or {}).get(name), (seeds or {}).get(name))
        for name, model in models.items()
    }
    files = {
        f"{name}.png": [pictures.png(pictures.alone(picture.draw))]
        for of_section in sections.values()
        for name, picture in of_section.items()
    }
    files["numbers.json"] = [json.dumps(numbers | {"runs": runs}, indent=1).encode() + b"\n"]
    files["index.html"] = [_page(title, numbers, runs, sections, look, notes).encode(errors="backslashreplace")]
    write_set(Path(out), files, without=_pictures_of(Path(out)) - files.keys())
    return [Path(out) / name for name in files]


def _pictures_of(out: Path) -> set[str]:
    """The names of the pictures of an earlier report in the folder."""
    kinds = {*FOR_USERS, *FOR_DEVELOPERS, "diversity", "popularity"}
    found = {path.name for path in out.glob("*.png") if path.stem.partition("-")[0] in kinds}
    return found if all((out / name).is_file() for name in FILES) else set()


def _run(name: str, numbers: Numbers, model: Model, epochs: int | None, seed: int | None) -> dict[str, Any]:
    """The facts about one training: its seed, epochs, seconds, and the settings that are not defaults. Where a default
    is "auto", the model has chosen the value that its config holds.
    """
    log = numbers["curves"].get(name, ())
    best = [line["epoch"] for line in log if line.get("best")]
    defaults = {field.name: field.default for field in dataclasses.fields(model.config)}
    settings = numbers["settings"][name].items()
    changed = {key: value for key, value in settings if defaults.get(key) not in (value, "auto")}
    return {
        "seed": seed,
        "epochs": len(log) or None,
        "planned": epochs,
        "best": best[-1] if best else None,
        "seconds": sum(line.get("seconds", 0.0) for line in log) or None,
        "changed": changed,
    }


def _page(
    title: str,
    numbers: Numbers,
    runs: Mapping[str, Mapping[str, Any]],
    sections: Mapping[str, Mapping[str, Picture]],
    look: Look,
    notes: Sequence[str],
) -> str:
    groups = [group for group in look.members if group not in look.floors]
    headline = ", ".join(groups) + (f" on {title}" if title else "")
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            f"<title>{html.escape(headline)}</title><style>{STYLE}</style></head>\n<body>",
            f"<header><h1>{html.escape(headline)}</h1><p>{html.escape(_facts(numbers['split']))}</p></header>",
            *(f'<p class="note" role="note">{html.escape(note)}</p>' for note in notes),
            *(f'<p class="verdict">{_verdict(found, look)}</p>' for found in numbers["verdicts"]),
            "<h2>Results</h2>",
            _results(numbers, look),
            _trainings(runs),
            *(_section(sections, key, *texts) for key, texts in FOR_USERS.items() if key in sections),
            _examples(numbers["examples"], look),
            "<details><summary>For developers</summary>",
            *(_section(sections, key, *texts) for key, texts in FOR_DEVELOPERS.items() if key in sections),
            "<h2>All settings</h2>",
            *(_settings(name, settings) for name, settings in numbers["settings"].items()),
            "</details>\n</body></html>\n",
        ]
    )


def _facts(split: Mapping[str, Any]) -> str:
    told = [f"{split['users']:,} users", f"{split['items']:,} items", f"{split['train_clicks']:,} train clicks"]
    if split["period"]:
        told.append(" to ".join(split["period"]))
    cases = f"{split['cases']:,} test cases"
    parts = [f"{split['unseen_targets']:,} targets never seen in train"] if split["unseen_targets"] else []
    parts += [f"{split['repeated_targets']:,} in their own history"] if split["repeated_targets"] else []
    told.append(f"{cases} ({', '.join(parts)})" if parts else cases)
    told.append(f"items of the history are {'ranked too' if split['seen'] == 'keep' else 'not ranked'}")
    return " · ".join(told)


def _verdict(found: Mapping[str, Any], look: Look) -> str:
    """One sentence: a model against the best floor, and whether the test cases can tell them apart."""
    name, floor = _named(found["name"], look), _named(found["floor"], look)
    values = f"{found['value']:.4f} against {found['of_floor']:.4f}"
    if "low" not in found or found["low"] <= 0.0 <= found["high"]:
        told = f"cannot be told apart from {floor}, the best floor, in {found['metric']} ({values})"
        why = "there is one test case"
        if "low" in found:
            why = f"the difference is between {found['low']:+.4f} and {found['high']:+.4f}"
        return f"{name} {told}: {why}."
    low, high = sorted((abs(found["low"]), abs(found["high"])))
    side = "above" if found["difference"] > 0 else "below"
    share = f"{abs(found['difference']) / found['of_floor']:.0%} " if found["of_floor"] else ""
    told = f"is {share}<strong>{side}</strong> {floor}, the best floor, in {found['metric']} ({values})"
    return f"{name} {told}: 95% interval of the difference {low:.4f} to {high:.4f}."


def _named(group: str, look: Look) -> str:
    return f'<span class="dot" style="background:{look.colours[group]}"></span>{html.escape(group)}'


def _results(numbers: Numbers, look: Look) -> str:
    """The table of results: a row for each group and floor; the best recall and NDCG are bold."""
    columns = [f"{metric}@{K[0]}" for metric in COLUMNS]
    means = {column: look.mean({n: r[column] for n, r in numbers["results"].items()}) for column in columns}
    rows = []
    for group, members in look.members.items():
        cells = []
        for column in columns:
            of = {name: sum(values) / len(values) for name, values in means[column].items()}
            cell = tables.number(column, of[group])
            if column in numbers["intervals"][group]:
                low, high = numbers["intervals"][group][column]
                cell = f"<strong>{cell}</strong>" if of[group] == max(of.values()) else cell
                cell += f" <small>± {(high - low) / 2:.4f}</small>"
            cells.append(cell)
        seeds = f" <small>{len(members)} seeds</small>" if len(members) > 1 else ""
        rows.append([_named(group, look) + seeds, *cells])
    text = "Models, then floors, which need no training. The best recall and NDCG are bold; ± is half the 95% interval."
    return f"<p>{text}</p>\n{_table(['', *columns], rows)}"


def _trainings(runs: Mapping[str, Mapping[str, Any]]) -> str:
    header = ["training", "seed", "epochs", "best epoch", "seconds", "settings that are not the defaults"]
    rows = []
    for name, run in runs.items():
        planned = f" of {run['planned']}" if run["planned"] else ""
        epochs = "" if run["epochs"] is None else f"{run['epochs']}{planned}"
        changed = ", ".join(f"{key} {value}" for key, value in run["changed"].items()) or "none"
        seconds = "" if run["seconds"] is None else f"{run['seconds']:.0f}"
        seed = "" if run["seed"] is None else str(run["seed"])
        cells = [name, seed, epochs, str(run["best"] or ""), seconds, changed]
        rows.append([html.escape(cell) for cell in cells])
    return _table(header, rows, "trainings")


def _section(sections: Mapping[str, Mapping[str, Picture]], key: str, heading: str, text: str) -> str:
    shown = ""
    for name, picture in sections[key].items():
        figure = pictures.alone(picture.draw)
        wide = ' class="wide"' if figure.get_figwidth() > 2 * figure.get_figheight() else ""
        shown += f"<figure{wide}>{pictures.svg(figure, name, picture.alt)}</figure>\n"
    return f'<h2>{heading}</h2>\n<p>{html.escape(text)}</p>\n<div class="pictures">{shown}</div>'


def _examples(examples: Iterable[Mapping[str, Any]], look: Look) -> str:
    """One card per user. Where a list holds an item that came next, it is marked."""
    cards = []
    for user in examples:
        came = user["next"]
        lists = [
            f"<dt>{_named(group, look)} shows</dt><dd>"
            + " · ".join(f"<mark>{html.escape(item)}</mark>" if item in came else html.escape(item) for item in shown)
            + "</dd>"
            for group, shown in user["shown"].items()
        ]
        newest = " · ".join(map(html.escape, user["newest"]))
        cards.append(
            f"<article><h3>User {html.escape(user['user'])}</h3><dl>"
            f"<dt>newest clicks, the newest last</dt><dd>{newest}</dd>"
            f"<dt>what came next</dt><dd>{' · '.join(map(html.escape, came))}</dd>{''.join(lists)}</dl></article>"
        )
    text = "Users spread evenly over the test cases, not chosen. What really came next is marked."
    return f'<h2>Examples</h2>\n<p>{text}</p>\n<div class="cards">{"".join(cards)}</div>'


def _settings(name: str, settings: Mapping[str, Any]) -> str:
    return f"<h3>{html.escape(name)}</h3>\n<pre>{html.escape(json.dumps(settings, indent=1))}</pre>"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    head = "".join(f'<th scope="col">{cell}</th>' for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f'<div class="table {kind}"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'
