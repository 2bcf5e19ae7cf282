"""The data of a recommender, in one place to import from: containers, the log of interactions, bundled data sets.

containers.py holds the containers, interactions.py reads and splits logs; this module only opens the bundled sets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastcl.recsys.data.containers import PAD, Cases, Feature, Histories, Items, Scorer, Split, with_origin
from fastcl.recsys.data.interactions import Interactions
from fastcl.recsys.data.reading.textfiles import read_columns
from fastcl.recsys.data.reports import DataReport, SplitReport
from fastcl.recsys.data.splits import LeakageWarning

__all__ = [
    "PAD",
    "Cases",
    "DataReport",
    "Feature",
    "Histories",
    "Interactions",
    "Items",
    "LeakageWarning",
    "Scorer",
    "Split",
    "SplitReport",
    "bundled",
]


def bundled(name: str) -> Interactions:
    """A real data set as an `Interactions`. A README beside its files states their source and terms.

    "purchases": Complete Journey, the product of highest value in each basket; 48% of the rows repeat an item of their
        user; features department and category. The data is in the public domain and comes with the package.
    "movies":    MovieLens ml-latest-small (2016), every rating an interaction; titles, features genres and decade. Its
        terms forbid commercial use, so it lies in the repository (`data/movielens-small/`) and in no package.

    Raises ValueError for another name, FileNotFoundError for "movies" where fastcl does not run from its repository.

    >>> len(bundled("purchases").users)
    2345
    """
    if name not in _BUNDLED:
        raise ValueError(f"name: expected one of {', '.join(map(repr, _BUNDLED))}, got {name!r}")
    folder, log_file, item_file, columns, describe = _BUNDLED[name]
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{name}: {folder.name} is not in the package, since its terms forbid commercial use; it is in fastcl's "
            f"repository, for which `pip install -e .` makes bundled:{name} known. bundled:purchases is here"
        )
    data = Interactions.read(folder / log_file, **columns)
    table = read_columns(folder / item_file)
    row = {item: k for k, item in enumerate(next(iter(table.values())))}
    order = [row[item] for item in data.items.ids]
    titles, features = describe({column: [cells[k] for k in order] for column, cells in table.items()})
    made = Interactions(Items(data.items.ids, titles, features), data.users, data.log, data.report)
    return with_origin(made, {"path": f"bundled:{name}"})


_Columns = dict[str, list[str]]


def _movies(table: _Columns) -> tuple[tuple[str, ...] | None, dict[str, Feature]]:
    titles = [f"{title} ({year})" if title else "" for title, year in zip(table["title"], table["year"], strict=True)]
    genres = [[] if cell == "(no genres listed)" else cell.split("|") for cell in table["genres"]]
    decades = [[f"{year[:3]}0s"] if year else [] for year in table["year"]]
    return tuple(titles), {"genres": Feature.from_labels(genres), "decade": Feature.from_labels(decades)}


def _purchases(table: _Columns) -> tuple[tuple[str, ...] | None, dict[str, Feature]]:
    names = ("department", "category")
    return None, {name: Feature.from_labels([[cell] for cell in table[name]]) for name in names}


_HERE = Path(__file__).resolve().parent
_BUNDLED: dict[str, tuple[Path, str, str, dict[str, str], Any]] = {
    "movies": (
        _HERE.parents[2] / "data" / "movielens-small",
        "ratings.csv.xz",
        "movies.csv.xz",
        {"user": "userId", "item": "movieId", "time": "timestamp"},
        _movies,
    ),
    "purchases": (
        _HERE / "sets" / "completejourney",
        "purchases.csv.xz",
        "products.csv.xz",
        {"user": "household", "item": "product", "time": "time"},
        _purchases,
    ),
}
