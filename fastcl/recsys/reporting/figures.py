"""The pictures of a report: which pictures there are, what each shows, and its alternative text. pictures.py draws them
from the numbers of numbers.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from fastcl.recsys.evaluation.groups import interval
from fastcl.recsys.reporting import pictures
from fastcl.recsys.reporting.numbers import TRAINED, Numbers
from fastcl.recsys.reporting.pictures import Line

# The colours of Okabe and Ito that are visible on black and on white. Colour-blind readers can tell them apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
GREYS = ("dimgray", "darkgray", "silver")  # colours of the floors
STYLES = ("-", "--", ":", "-.")
GROUPED = "recall@40"  # as in ContrastVAE's analysis
LABELS = {
    "popularity": "train clicks of the target",
    "frequency": "cases with the same target",
    "length": "items in the history",
}


class Picture(NamedTuple):
    """alt: the result in words, for readers who do not see the picture."""

    draw: pictures.Draw
    alt: str


class Look:
    """The groups of runs that differ in their seed alone, and the colour of each group in all pictures."""

    def __init__(self, models: Sequence[str], floors: Sequence[str], groups: Mapping[str, str]) -> None:
        self.members: dict[str, list[str]] = {}
        for name in models:
            self.members.setdefault(groups.get(name, name), []).append(name)
        self.floors = list(floors)
        self.colours = {group: COLOURS[nth % len(COLOURS)] for nth, group in enumerate(self.members)}
        self.styles = {group: STYLES[nth // len(COLOURS) % len(STYLES)] for nth, group in enumerate(self.members)}
        for floor, grey in zip(floors, GREYS, strict=False):
            self.members[floor], self.colours[floor], self.styles[floor] = [floor], grey, "--"

    def lines(
        self, values: Mapping[str, Sequence[float]], x: Sequence[float], style: str = "", more: str = ""
    ) -> list[Line]:
        """One line over `x` for each group with values. more: text after the group's name in the legend."""
        found = {group: [values[name] for name in names if name in values] for group, names in self.members.items()}
        return [
            Line(f"{group}{more}", x, rows, self.colours[group], style or self.styles[group])
            for group, rows in found.items()
            if rows
        ]

    def mean(self, values: Mapping[str, float]) -> dict[str, list[float]]:
        """The values of each group that has any."""
        found = {group: [values[name] for name in names if name in values] for group, names in self.members.items()}
        return {group: rows for group, rows in found.items() if rows}

    def bars(self, values: Mapping[str, float], title: str, label: str) -> Picture:
        """The mean of each group, with the least and the largest of its seeds."""
        found = self.mean(values)
        means = {group: sum(rows) / len(rows) for group, rows in found.items()}
        spread = {group: (min(rows), max(rows)) for group, rows in found.items()}
        draw = partial(pictures.bars, values=means, title=title, label=label, colours=self.colours, spread=spread)
        return Picture(draw, f"{title}: " + ", ".join(f"{group} {mean:.4g}" for group, mean in means.items()))


def figures(numbers: Numbers, look: Look) -> dict[str, dict[str, Picture]]:
    """Name of a section -> name of a picture -> the picture, for all pictures whose numbers are there."""
    found: dict[str, dict[str, Picture]] = {"validation": {}, "training": {}}
    if numbers["curves"]:
        for key in ("ndcg@10", "recall@10"):
            picture = _curves(numbers["curves"], look, key.__eq__, f"Validation {key}", key)
            found["validation"] |= {f"validation-{key.partition('@')[0]}": picture} if picture else {}
        picture = _curves(numbers["curves"], look, lambda name: name.startswith("loss"), "Training", "loss")
        found["training"] |= {"training": picture} if picture else {}
    results = numbers["results"]
    shown = {"diversity@10": "distinct items in all lists", "popularity@10": "mean train clicks of a shown item"}
    found["impressions"] = {"impressions": _impressions(numbers["impressions"], look)} | {
        key.partition("@")[0]: look.bars({name: result[key] for name, result in results.items()}, key, label)
        for key, label in shown.items()
    }
    first = next(iter(numbers["groups"].values()))
    found["groups"] = {f"groups-{nth}": _grouped(numbers["groups"], by, look) for nth, by in enumerate(first, start=1)}
    found["robustness"] = {
        f"robustness-{kind}": _robustness(numbers["robustness"], kind, look) for kind in ("delete", "replace")
    }
    found["intents"] = {
        f"intents-{nth}": _intents(name, of) for nth, (name, of) in enumerate(numbers["intents"].items(), start=1)
    }
    found["queue"] = _queue(numbers["queue"], look) if numbers["queue"] else {}
    diagnosed = numbers["diagnostics"]
    keys = list(dict.fromkeys(key for values in diagnosed.values() for key in values))
    found["diagnostics"] = {
        f"diagnostics-{nth}": look.bars({n: v[key] for n, v in diagnosed.items() if key in v}, key, key)
        for nth, key in enumerate(keys, start=1)
    }
    return {section: of for section, of in found.items() if of}


def _lines(drawn: Sequence[Line], title: str, x: str, y: str, more: Callable[[Any], None] | None = None) -> Picture:
    """A picture of lines. more: a further function of the axes, called after drawing."""

    def draw(axes: Any) -> None:
        pictures.lines(axes, drawn, title, x, y)
        if more is not None:
            more(axes)

    told = "; ".join(f"{line.label} from {_end(line, 0):.3g} to {_end(line, -1):.3g}" for line in drawn)
    return Picture(draw, f"{title}: {told}")


def _end(line: Line, place: int) -> float:
    values = [row[place] for row in line.values]
    return sum(values) / len(values)


def _curves(
    logs: Mapping[str, Any], look: Look, wanted: Callable[[str], bool], title: str, label: str
) -> Picture | None:
    """Every wanted column of the logs in a style of its own. A column of parts ({"name": number}) is one line per part.
    """
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
        for line in look.lines(
            values, epochs, STYLES[nth % len(STYLES)] if len(columns) > 1 else "", f" {key}" if len(columns) > 1 else ""
        )
    ]

    def whole(axes: Any) -> None:
        axes.xaxis.get_major_locator().set_params(integer=True)

    return _lines(drawn, title, "epoch", label, whole) if drawn else None


def _impressions(shares: Mapping[str, Sequence[float]], look: Look) -> Picture:
    buckets = max(map(len, shares.values()))
    trained = Line(TRAINED, range(buckets), [shares[TRAINED]], "black", ":")
    drawn = [trained, *look.lines({n: s for n, s in shares.items() if n != TRAINED}, range(buckets))]
    edges = ["0", *(str(2**b) for b in range(buckets - 1))]

    def ticks(axes: Any) -> None:
        axes.set_xticks(range(buckets), edges, rotation=45)

    draw = _lines(drawn, "Impressions in the top 10", "clicks in train, from", "share", ticks).draw
    most = {line.label: line.values[0].index(max(line.values[0])) for line in drawn}
    told = "; ".join(f"{name}: most often items with {edges[bucket]} clicks or more" for name, bucket in most.items())
    return Picture(draw, f"Impressions in the top 10 by train clicks. {told}")


def _grouped(reports: Mapping[str, Mapping[str, Any]], by: str, look: Look) -> Picture:
    rows = next(iter(reports.values()))[by]
    drawn = look.lines({name: [row[GROUPED] for row in of[by]] for name, of in reports.items()}, range(len(rows)))
    cases = [row["cases"] for row in rows]
    means = [[sum(values) / len(values) for values in zip(*line.values, strict=True)] for line in drawn]
    spread = [[interval(mean, n) for mean, n in zip(of, cases, strict=True)] for of in means]
    title = f"{GROUPED} by {by}"
    draw = partial(
        pictures.group_bars,
        values={line.label: of for line, of in zip(drawn, means, strict=True)},
        spread={line.label: of for line, of in zip(drawn, spread, strict=True)},
        colours=look.colours,
        groups=[row["group"] for row in rows],
        cases=cases,
        title=title,
        label=LABELS.get(by, f"{by} of the target"),
    )
    told = [
        f"{row['group']} ({row['cases']:,} cases): "
        + ", ".join(f"{line.label} {of[nth]:.3g}" for line, of in zip(drawn, means, strict=True))
        for nth, row in enumerate(rows)
    ]
    return Picture(draw, f"{title}. " + "; ".join(told))


def _robustness(reports: Mapping[str, Sequence[Mapping[str, Any]]], kind: str, look: Look) -> Picture:
    of_kind = {name: [row for row in rows if row["kind"] == kind] for name, rows in reports.items()}
    ratios = [row["ratio"] for row in next(iter(of_kind.values()))]
    drawn = look.lines({name: [row["recall@10"] for row in rows] for name, rows in of_kind.items()}, ratios)

    def from_zero(axes: Any) -> None:
        axes.set_ylim(bottom=0)

    return _lines(drawn, f"Random {kind}", "share of the history's items", "recall@10", from_zero)


def _queue(replays: Mapping[str, Mapping[str, Sequence[float]]], look: Look) -> dict[str, Picture]:
    told = {"age": ("Age of the queue", "mean steps"), "hits": ("Accidental hits", "share of the queue")}
    steps = max((replay["step"] for replay in replays.values()), key=len)
    drawn = {key: look.lines({name: replay[key] for name, replay in replays.items()}, steps) for key in told}
    return {
        f"queue-{key}": _lines(drawn[key], title, "step of the first epoch", y) for key, (title, y) in told.items()
    }


def _intents(name: str, found: Mapping[str, Any]) -> Picture:
    title = f"{name}: {found['category'] or 'items'} by intent"
    users = ", ".join(f"{share:.0%}" for share in found["users"])
    return Picture(partial(pictures.intents, found=found, title=title), f"{title}; users by their best intent: {users}")
