"""Draws every picture: turns numbers into matplotlib figures, and figures into PNG bytes or SVG text. Nothing here
measures or reads, and matplotlib is imported only when something is drawn."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

Draw = Callable[[Any], None]  # draws into matplotlib Axes
FEW = 30  # means over fewer cases are drawn pale
WIDE = 24  # a picture of more bars is twice as wide


class Line(NamedTuple):
    """values: those of each seed. Several seeds are drawn as their mean in a band from the smallest to the largest."""

    label: str
    x: Sequence[float]
    values: Sequence[Sequence[float]]
    colour: str | None = None
    style: str = "-"


def alone(draw: Draw) -> Any:
    """A figure of one panel that is readable on a phone. The legend does not cover the data."""
    figure = side_by_side(draw)
    (axes,) = figure.axes
    figure.set_size_inches(9.2 if len(axes.patches) > WIDE else 4.6, 4.0)
    if axes.get_legend() is not None:
        old = axes.get_legend()
        labels = [text.get_text() for text in old.get_texts()]
        figure.legend(old.legend_handles, labels, loc="outside lower center", ncols=2, fontsize=9, frameon=False)
        old.remove()
    return figure


def side_by_side(*draws: Draw) -> Any:
    """A figure of one panel per function, in rows of two; ImportError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need the package matplotlib: pip install 'fastcl[recsys]'") from error
    columns = min(len(draws), 2)
    rows = -(-len(draws) // columns)
    figure = Figure(figsize=(5.2 * columns, 3.8 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, draw in zip(panels, draws, strict=False):
        draw(axes)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    for axes in panels[len(draws) :]:
        axes.remove()
    return figure


def png(figure: Any) -> bytes:
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=150)
    return data.getvalue()


def svg(figure: Any, name: str, alt: str) -> str:
    """The figure as an <svg> element for a page. Black becomes the page's text colour, so that the page may be dark.

    name: makes the ids inside the element differ from those of the page's other pictures. alt: the text for readers who
    do not see the picture. Letters stay text, and equal figures give equal characters.
    """
    import matplotlib

    data = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(data, format="svg", transparent=True, metadata=nothing)
    text = data.getvalue()
    text = text[text.index("<svg") :].replace("#000000", "currentColor")
    (box,) = re.findall(r'viewBox="[^"]*"', text)
    text = re.sub(r"<svg[^>]*>", f'<svg {box} role="img" aria-label="{html.escape(alt)}">', text, count=1)
    named = re.compile(r' id="([^"]*)"')
    used = {name for name in named.findall(text) if f"#{name}" in text}  # unused ids could occur twice on a page
    text = named.sub(lambda found: found[0] if found[1] in used else "", text)
    return re.sub(r"\n\s*", "\n", text)


def _marker(nth: int) -> str:
    """The marker of the nth line. It changes every ten lines, since there are ten colours."""
    return "osvD"[nth // 10 % 4]


def curves(
    axes: Any, values: Mapping[str, Sequence[float]], title: str, label: str, x: str = "epoch", first: int = 1
) -> None:
    """One line per name, over epochs (or `x`) from `first`."""
    for name, line in values.items():
        axes.plot(range(first, len(line) + first), line, marker="o", markersize=3, label=name)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(title=title, xlabel=x, ylabel=label)
    axes.legend(fontsize=8)


def impressions(axes: Any, shares: Mapping[str, Sequence[float]], title: str) -> None:
    """CLRec's Fig. 3 and 4: the share of impressions per log2 bucket of train clicks, one line per name. The first line
    is the reference and is grey."""
    first, *others = shares  # a grey reference leaves each other name the colour that it has in all pictures
    axes.plot(shares[first], color="gray", linestyle="--", marker="o", markersize=3, label=first)
    for nth, name in enumerate(others):
        axes.plot(shares[name], marker=_marker(nth), markersize=3, label=name)
    buckets = max(map(len, shares.values()))
    axes.set_xticks(range(buckets), ["0", *(str(2**b) for b in range(buckets - 1))], rotation=45)
    axes.set(title=title, xlabel="clicks in train, from", ylabel="share")
    axes.legend(fontsize=8)


def lines(axes: Any, drawn: Sequence[Line], title: str, x: str, y: str) -> None:
    """The lines, with a legend."""
    for line in drawn:
        at = [[value for value in values if value is not None] for values in zip_longest(*line.values)]
        x_of, mean = line.x[: len(at)], [sum(values) / len(values) for values in at]
        look = {"color": line.colour, "linestyle": line.style, "markersize": 3}
        look["marker"] = "o" if len(at) <= 50 else ""  # markers would hide a line of many points
        (solid,) = axes.plot(x_of, mean, label=line.label, **look)
        if len(line.values) > 1:
            axes.fill_between(x_of, list(map(min, at)), list(map(max, at)), color=solid.get_color(), alpha=0.2, lw=0)
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.legend(fontsize=8)


def bars(
    axes: Any,
    values: Mapping[str, float],
    title: str,
    label: str,
    colours: Mapping[str, str] | None = None,
    spread: Mapping[str, tuple[float, float]] | None = None,
) -> None:
    """One bar per name, with its value. spread: the smallest and largest of several seeds, drawn as a whisker."""
    colour = [f"C{n}" if colours is None else colours[name] for n, name in enumerate(values)]
    axes.bar(range(len(values)), list(values.values()), color=colour)
    for place, (name, value) in enumerate(values.items()):
        low, high = spread[name] if spread else (value, value)
        if low < high:
            axes.plot([place, place], [low, high], color="black", linewidth=1)
        axes.annotate(
            f"{value:.4g}", (place, max(high, 0)), (0, 2), textcoords="offset points", ha="center", fontsize=8
        )
    turn = {"rotation": 20, "ha": "right"} if len(values) > 3 else {}
    axes.set_xticks(range(len(values)), list(values), fontsize=8, **turn)
    axes.margins(y=0.12)
    axes.set(title=title, ylabel=label)


def points(axes: Any, values: Mapping[str, tuple[float, float]], title: str, x: str, y: str) -> None:
    """One labelled point per name, at its pair of numbers."""
    for nth, (name, (left, up)) in enumerate(values.items()):
        axes.plot(left, up, _marker(nth), label=name)
    axes.margins(0.1)
    axes.locator_params(axis="x", nbins=5)
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def groups(axes: Any, reports: Mapping[str, Sequence[Mapping[str, Any]]], metric: str, title: str, label: str) -> None:
    """One bar per name in each group of `by_group`; all names have the same groups."""
    first = next(iter(reports.values()))
    group_bars(
        axes,
        {name: [row[metric] for row in rows] for name, rows in reports.items()},
        {},
        {name: f"C{nth % 10}" for nth, name in enumerate(reports)},
        [row["group"] for row in first],
        [row["cases"] for row in first],
        title,
        label,
    )
    axes.set_ylabel(metric)


def group_bars(
    axes: Any,
    values: Mapping[str, Sequence[float]],
    spread: Mapping[str, Sequence[tuple[float, float]]],
    colours: Mapping[str, str],
    groups: Sequence[str],
    cases: Sequence[int],
    title: str,
    label: str,
) -> None:
    """One bar per name in each group, with its interval where `spread` has it. The number of cases stands below each
    group; bars of fewer than FEW cases are pale."""
    width = 0.85 / len(values)
    firm = [count >= FEW for count in cases]
    for nth, (name, of) in enumerate(values.items()):
        at = [place + (nth - (len(values) - 1) / 2) * width for place in range(len(of))]
        bars = axes.bar(at, of, width * 0.92, color=colours[name], label=name)
        for bar, trusted in zip(bars, firm, strict=True):
            bar.set_alpha(1.0 if trusted else 0.3)
        for x, (low, high), trusted in zip(at, spread.get(name, ()), firm, strict=False):
            axes.plot([x, x], [low, high], color="black", linewidth=0.8, alpha=0.9 if trusted else 0.3)
    many = len(groups) > 6
    axes.set_xticks(
        range(len(groups)),
        [f"{group} ({n:,})" if many else f"{group}\n({n:,})" for group, n in zip(groups, cases, strict=True)],
        fontsize=8,
        **({"rotation": 40, "ha": "right"} if many else {}),
    )
    for text, trusted in zip(axes.get_xticklabels(), firm, strict=True):
        text.set_alpha(1.0 if trusted else 0.5)
    axes.set(title=title, xlabel=f"{label} (cases)")
    axes.set_ylim(bottom=0)
    for handle in axes.legend(fontsize=8).legend_handles:
        handle.set_alpha(1.0)  # the first group may be pale


def corruption(axes: Any, reports: Mapping[str, Sequence[Mapping[str, Any]]], kind: str, metric: str) -> None:
    """One line per name over the ratios of `robustness`."""
    for name, rows in reports.items():
        of_kind = [row for row in rows if row["kind"] == kind]
        axes.plot([row["ratio"] for row in of_kind], [row[metric] for row in of_kind], marker="o", markersize=3,
                  label=name)  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.set(title=f"Robustness: random {kind}", xlabel="share of the history's items", ylabel=metric)
    axes.legend(fontsize=8)


def intents(axes: Any, found: Mapping[str, Any], title: str) -> None:
    """The map of `intents`: a row for each of the twenty largest categories, and two rows for the shares of items and
    users."""
    largest = sorted(found["categories"], key=lambda row: -row["items"])[:20]
    rows = {row["category"]: row["intents"] for row in largest}
    count = sum(found["items"])
    rows |= {"all items": [items / count for items in found["items"]], "users": found["users"]}
    axes.imshow(list(rows.values()), aspect="auto", cmap="Blues", vmin=0.0, vmax=1.0, zorder=1)
    axes.set_axisbelow(True)
    axes.set_yticks(range(len(rows)), list(rows), fontsize=7)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(title=title, xlabel="intent")
