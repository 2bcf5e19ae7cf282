"""`study`: works through a manifest of runs, and returns its tables."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from fastcl.recsys.studies.manifest import Run, chosen, columns_of, read, work
from fastcl.recsys.studies.measuring import Measure, read_manifest
from fastcl.recsys.studies.summary import Study


def study(
    file: str | Path,
    *,
    run: bool = False,
    only: Sequence[str] = ("",),
    results: str | Path | None = None,
    states: str | Path | None = None,
    progress: bool = True,
) -> Study:
    """The study of the manifest `file`: runs with several settings and seeds on one data set or several.

    The manifest is a JSON table like this one:

        {"data": {"purchases": {"path": "bundled:purchases", "seen": "keep"}},
         "columns": ["recall@10", "ndcg@10"],
         "runs": [{"label": "popularity", "data": "purchases", "model": "popular"},
                  {"label": "SASRec", "data": "purchases", "model": "sasrec", "options": {"dim": 16},
                   "vary": {"lr": [0.001, 0.003]}, "plan": {"epochs": 5}, "seeds": [0, 1]}]}

    "data" names logs by their path (from the manifest's folder) with the options of `Interactions.read`, "split" (the
    arguments of `Interactions.split`, or "valid" and "test" files), "seen" and "protocol". Each value of "vary" makes a
    run of its own. "plan" has arguments of `fit`. "paper" may give figures of others, data -> row -> column -> figure:
    what is above all of them is bold. "notes" has a text for below a table.

    Args:
        run: do the missing runs. A finished run is never done again: its id is made of its settings and data's path. An
            interrupted one goes on in its folder, and one whose folder is there is only tested where the manifest has
            new columns. Data that has changed since other runs is refused.
        only: with `run`, only the runs whose title contains one of these texts, in their order.
        results: the file of finished runs; None: NAME.results.json beside NAME.json.
        states: the folder of the run folders, which are named by id; None: NAME.runs beside NAME.json.
        progress: whether to report on stderr.

    Raises ValueError for a manifest with a run that cannot be begun, and for a text of `only` in no title.

    >>> print(study("study.json", run=True).to_markdown())  # doctest: +SKIP
    """
    file = Path(file)
    manifest = read_manifest(file)
    results = results_of(file, results)
    states = Path(states) if states is not None else file.with_suffix(".runs")
    chosen(manifest, only)  # raises before anything is trained

    def finished(found: Run) -> bool:
        """Whether a run was tested by all columns, to which some may have been added since."""
        return found["test"].keys() >= set(columns_of(manifest, found["data"]))

    if run:
        measure = Measure(manifest, file.parent, progress, partial(read, results))
        work(manifest, results, states, only, measure, _say if progress else _nothing, finished)
    return Study(manifest, read(results), finished)


def results_of(file: Path, results: str | Path | None) -> Path:
    """The file of the finished runs of the manifest `file`: `results`, or for None NAME.results.json beside it."""
    return file.with_suffix(".results.json") if results is None else Path(results)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _nothing(line: str) -> None:
    pass
