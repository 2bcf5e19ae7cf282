"""Manifests of studies: which runs a study has, what each is called, and the file that holds finished runs.

A manifest is a JSON table. This module needs of it "runs" and what a run's id is made of; what "data", "plan" and
"measured by" mean is up to the function that measures a run (measuring.py has that of `fastcl study`). Nothing here
trains or measures.
"""

import difflib
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastcl.recsys import schema, writing

Run = dict[str, Any]
Manifest = Mapping[str, Any]


def runs(manifest: Manifest) -> Iterator[Run]:
    """One run for each entry, combination of its "vary" and seed. Its id changes with everything that can change the
    result.

    "vary": {"contrast_weight": [0, 0.1]} makes two runs of an entry labelled "A", with these options: "A,
    contrast_weight 0" and "A, contrast_weight 0.1".

    >>> entry = {"label": "A", "data": "d", "model": "mf", "vary": {"dim": [4, 8]}, "seeds": [0, 1]}
    >>> [title(run) for run in runs({"runs": [entry]})]
    ['A, dim 4, d, seed 0', 'A, dim 4, d, seed 1', 'A, dim 8, d, seed 0', 'A, dim 8, d, seed 1']
    """
    for entry in manifest["runs"]:
        for varied in _varied(entry):
            for seed in entry.get("seeds", [0]):
                run = {key: varied.get(key) for key in ("label", "data", "model", "options", "plan")} | {"seed": seed}
                run |= {key: entry[key] for key in ("split", "measured by") if key in entry}  # override the study's
                sources = manifest.get("data", {})
                run |= {"source": sources[entry["data"]]} if entry["data"] in sources else {}
                content = json.dumps({key: run[key] for key in run if key != "label"}, sort_keys=True)
                yield run | {"id": hashlib.sha256(content.encode()).hexdigest()[:12]}


def _varied(entry: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    vary = entry.get("vary", {})
    for values in itertools.product(*vary.values()):
        chosen = dict(zip(vary, values, strict=True))
        label = ", ".join([entry["label"], *(f"{name} {_shown(value)}" for name, value in chosen.items())])
        yield {**entry, "label": label, **({"options": {**(entry.get("options") or {}), **chosen}} if chosen else {})}


def _shown(value: Any) -> str:
    return "+".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def title(run: Mapping[str, Any]) -> str:
    return f"{run['label']}, {run['data']}, seed {run['seed']}"


def chosen(manifest: Manifest, only: Sequence[str]) -> list[Run]:
    """The runs whose title contains a text of `only`, in the order of these texts and of the manifest. ValueError for a
    text that no title contains.
    """
    every = list(runs(manifest))
    found = []
    for text in only:
        of_text = [run for run in every if text in title(run)]
        if not of_text:
            titles = list(dict.fromkeys(map(title, every)))
            alike = difflib.get_close_matches(text, titles, n=3, cutoff=0.3) or titles[:3]
            raise ValueError(f"only: no run's title contains {text!r}; titles are like {', '.join(map(repr, alike))}")
        found += of_text
    return found


def columns_of(manifest: Manifest, data: str) -> list[str]:
    return list(manifest.get("columns of", {}).get(data, manifest["columns"]))


def read(results: Path) -> list[Run]:
    """The finished runs in the file `results`; [] where there is no such file."""
    if not results.is_file():
        return []
    found = schema.parse(results.read_bytes(), str(results))
    schema.fits(found, dict[str, Any], str(results))
    schema.fits(found.get("runs"), list[dict[str, Any]], f"{results}: runs")
    return list(found["runs"])


def work(
    manifest: Manifest,
    results: Path,
    states: Path,
    only: Sequence[str],
    measure: Callable[[Run, Path], Mapping[str, Any]],
    say: Callable[[str], None],
    finished: Callable[[Run], bool] = lambda found: True,
) -> None:
    """Does the missing runs among those that `only` chooses, and writes the results after each.

    measure: (run, folder of its state below `states`) -> what the results file gets beside the run. It goes on with a
    run that the folder holds. say: reports a line. finished: whether a run in the results is to be left as it is.
    """
    for run in chosen(manifest, only):
        if any(found["id"] == run["id"] and finished(found) for found in read(results)):
            continue
        say(f"{title(run)} ({run['id']})")
        found = run | dict(measure(run, states / run["id"]))
        others = [other for other in read(results) if other["id"] != run["id"]]
        writing.write_text(results, json.dumps({"runs": [*others, found]}, indent=1) + "\n")
