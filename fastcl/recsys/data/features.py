"""Item features: a table with one row per item, whose cells hold one value or several values between separators.

Every column but the item's becomes a categorical feature; a number is a value like any other text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastcl.recsys.data.containers import Feature, Items
from fastcl.recsys.data.growing import grown
from fastcl.recsys.data.reading import columns, parquet
from fastcl.recsys.data.reading.formats import Form, dialect_of, is_parquet
from fastcl.recsys.data.reading.header import column_of, say
from fastcl.recsys.data.reading.names import recognised
from fastcl.recsys.data.reading.textfiles import read_columns

Cell = str | list[str]  # the cell of a feature; a list holds several values


def join(
    items: Items,
    source: Any,
    *,
    item: str,
    columns_of: Sequence[str] | None,
    separator: str,
    title: str | None,
    form: Form,
) -> tuple[Items, int]:
    """The items with the titles and features of `source`, and how many items of `source` the log lacks.

    source: a table file or table in memory with a column `item`. columns_of: the columns that become features; None:
    every other column. form: how the file is written. Items without a row have no values. Raises ValueError where an
    item has two rows.
    """  # fmt: skip
    table, where, item = _table(source, item, form)
    ids = [str(cell) for cell in table[list(table)[column_of(where, list(table), "item_features", item, form.prefix)]]]
    row = dict(zip(ids, range(len(ids)), strict=True))
    if len(row) < len(ids):
        twice = next(name for k, name in enumerate(ids) if row[name] != k)
        raise ValueError(f"{where}: expected one row per item, got several of {twice!r}")
    names = [name for name in table if name not in (item, title)] if columns_of is None else list(columns_of)
    for option, name in (*(("item_features", name) for name in names), *([("title", title)] if title else [])):
        column_of(where, list(table), option, name, form.prefix)
    at = [row.get(name) for name in items.ids]

    def cells(name: str) -> list[Cell]:
        return ["" if k is None else table[name][k] for k in at]

    made = {
        name: Feature.from_labels([_values(cell, separator, form.missing_words) for cell in cells(name)])
        for name in names
    }
    titles = tuple(map(str, cells(title))) if title else items.titles
    return Items(items.ids, titles, {**items.features, **made}), len(row.keys() - set(items.ids))


def more_items(items: Items, source: Any, *, item: str, separator: str, title: str | None, form: Form) -> Items:
    """`items` followed by the items of the table `source` that they lack; arguments as in `join`. The table has a
    column for each feature of `items`. Raises ValueError where it has no further item.
    """
    table, where, column = _table(source, item, form)
    rows = [str(cell) for cell in table[list(table)[column_of(where, list(table), "items", column, form.prefix)]]]
    for name in (*items.features, *([title] if title else [])):
        column_of(where, list(table), "items", name, form.prefix)
    known = set(items.ids)
    new = tuple(dict.fromkeys(name for name in rows if name not in known))
    if not new:
        raise ValueError(f"{where}: expected an item that the model lacks, got {len(rows):,} that it knows")
    columns_of = list(items.features)
    found, _ = join(
        Items(new), source, item=item, columns_of=columns_of, separator=separator, title=title, form=form
    )
    return grown(items, found)


def _values(cell: Cell, separator: str, missing: frozenset[str]) -> list[str]:
    values = cell if isinstance(cell, list) else cell.split(separator) if separator else [cell]
    return list(dict.fromkeys(value for value in map(str.strip, values) if value and value not in missing))


def _table(source: Any, item: str, form: Form) -> tuple[Mapping[str, Sequence[Cell]], str, str]:
    """The columns, the name of the table for messages, and the name of the item column."""
    where = "item_features"
    if isinstance(source, str | Path) and is_parquet(Path(source), form):
        where, source = str(source), parquet.read_table(Path(source))
    if isinstance(source, str | Path):
        path = Path(source)
        if dialect_of(path, form).delimiter is None:
            hint = f"name its format, such as {say(form.prefix + 'format', 'csv')}"
            raise ValueError(f"item_features: expected a table, got {source} (a sequence file): {hint}")
        table = read_columns(path, form)
        return table, str(path), recognised(path, list(table), {"item": item})["item"]
    source = columns.collected(source)
    names = [str(name) for name in columns.names(source)]
    item = recognised(where, names, {"item": item})["item"]
    found: dict[str, Sequence[Cell]] = {}
    for name in names:
        column = columns.column(source, "item_features", name)
        found[name] = columns.ids(column, "item_features") if name == item else list(map(columns.cell_of, column))
    if not names or len({len(column) for column in found.values()}) > 1:
        raise ValueError("item_features: expected a table file or columns of one length")
    return found, where, item
