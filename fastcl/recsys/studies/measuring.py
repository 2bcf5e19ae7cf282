"""One run of `fastcl study`: what a manifest of that command may hold, and training and testing a run by it.

A run is trained by `fit` in a folder of its own, which is an ordinary run folder, and goes on by `resume`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastcl.recsys import schema
from fastcl.recsys.data import Split, fingerprints
from fastcl.recsys.data.source import BUNDLED, Source
from fastcl.recsys.data.splits import WAYS
from fastcl.recsys.evaluation.cutoffs import at_cutoffs
from fastcl.recsys.evaluation.measures import COUNTS, WITHOUT_K
from fastcl.recsys.evaluation.ranking import PROTOCOLS, SEEN, evaluate, metric_names
from fastcl.recsys.models import MODELS
from fastcl.recsys.models.base import make
from fastcl.recsys.options import at_least, near, one_of
from fastcl.recsys.studies.manifest import Manifest, Run, columns_of, runs, title
from fastcl.recsys.training import checkpoint
from fastcl.recsys.training.fit import fit, resume
from fastcl.recsys.training.state import Settings, planned, validation_metric

# Arguments of `fit` that a plan may have.
PLAN = ("epochs", "lr", "patience", "schedule", "precision", "accumulate", "metric", "save_every")


@dataclass
class Entry:
    """An entry of a manifest's "runs". options: settings of the model. vary: option -> values, each of which makes a
    run. plan: arguments of `fit`; a model that only counts clicks needs none.
    """

    label: str
    data: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=lambda: [0])
    vary: dict[str, list[Any]] = field(default_factory=dict)


@dataclass
class Content:
    """A manifest. data: name -> "path" (a file, from the manifest's folder, or bundled:NAME) with the options of
    `Interactions.read`, "split" (the arguments of `Interactions.split`), "seen" and "protocol". columns: metrics.
    columns of: those of a data set with others. paper: given figures, data -> row -> column -> figure. notes: data ->
    text below its table.
    """

    data: dict[str, dict[str, Any]]
    columns: list[str]
    runs: list[Entry]
    paper: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


def read_manifest(path: Path) -> Manifest:
    """The manifest at `path`, checked so far that every run of it can be begun; ValueError that names the place."""
    manifest = schema.parse(path.read_bytes(), str(path))
    schema.fits(manifest, Content, str(path))
    schema.fits(manifest.get("columns of", {}), dict[str, list[str]], f"{path}: columns of")
    known = {*(one.name for one in dataclasses.fields(Content)), "columns of", "about"}
    for name in manifest:
        if name not in known:
            raise ValueError(f"{path}: expected no field {name!r}; {near(name, sorted(known))}")
    if not manifest["runs"]:
        raise ValueError(f"{path}: runs: expected at least one entry, got none")
    for nth, entry in enumerate(manifest["runs"], start=1):
        where = f"{path}: runs: entry {nth}"
        schema.keys_fit(entry, Entry, where)
        if entry["data"] not in manifest["data"]:
            raise ValueError(f"{where}: data: {near(entry['data'], list(manifest['data']))}, got {entry['data']!r}")
        if any(not values for values in entry.get("vary", {}).values()) or not entry.get("seeds", [0]):
            raise ValueError(f"{where}: expected at least one value of each setting to vary, and one seed, got none")
    for name, source in manifest["data"].items():
        _check_source(manifest, name, source, f"{path}: data: {name}")
    ids: dict[str, str] = {}
    for run in runs(manifest):
        _check_run(run, f"{path}: {title(run)}")
        if title(run) in ids.values():
            raise ValueError(
                f"{path}: {title(run)}: expected one run of this title, got two; their label may tell more"
            )
        if run["id"] in ids:
            raise ValueError(f"{path}: {title(run)}: expected other settings than those of {ids[run['id']]}")
        ids[run["id"]] = title(run)
    return _with_cutoffs(manifest)


def _with_cutoffs(manifest: Manifest) -> Manifest:
    """The manifest whose columns have their cut-offs, as the measured metrics have: recall@10 for recall."""

    def of(names: list[str]) -> list[str]:
        return list(at_cutoffs(names, 10, tuple(WITHOUT_K)))

    def of_row(figures: Mapping[str, float]) -> dict[str, float]:
        return {renamed.get(name, name): value for name, value in figures.items()}

    own = {data: of(names) for data, names in manifest.get("columns of", {}).items()}
    renamed = {name: of([name])[0] for data in manifest["data"] for name in columns_of(manifest, data)}
    paper = manifest.get("paper", {})
    given = {data: {row: of_row(figures) for row, figures in rows.items()} for data, rows in paper.items()}
    return {**manifest, "columns": of(manifest["columns"]), "columns of": own, "paper": given}


def files_of(manifest: Manifest, beside: Path) -> dict[str, Path]:
    """The files that the runs read, by a description for messages. beside: the manifest's folder."""
    return {
        f"the {key} of {name}": beside / path
        for name, named in manifest["data"].items()
        if not named["path"].startswith(BUNDLED)
        for key, path in Source(_log_of(named)).files.items()
    }


def _log_of(named: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in named.items() if key not in ("split", "seen", "protocol")}


def _check_source(manifest: Manifest, name: str, source: Mapping[str, Any], where: str) -> None:
    schema.fits(source.get("path"), str, f"{where}: path")
    one_of(SEEN, f"{where}: seen", source.get("seen", "mask"))
    one_of(PROTOCOLS, f"{where}: protocol", source.get("protocol", "full"))
    how = source.get("split", {})
    schema.fits(how, dict[str, Any], f"{where}: split")
    named = how.get("how", "last-one")
    one_of([way for way in WAYS if way != "none"], f"{where}: split: how", named)  # whose runs cannot be tested
    try:
        columns = metric_names(columns_of(manifest, name), 10, source.get("protocol", "full"), False)
    except ValueError as error:
        raise ValueError(f"{where}: columns: {str(error).removeprefix('metrics: ')}") from error
    if source.get("targets") == "all" and (without := [name for name in columns if name in WITHOUT_K]):
        raise ValueError(f"{where}: columns: expected none without a cut-off beside several targets, got {without[0]}")


def _check_run(run: Run, where: str) -> None:
    one_of(MODELS, f"{where}: model", run["model"])
    at_least(0, f"{where}: seeds", run["seed"])
    plan = _plan(run)
    if "epochs" not in plan:
        raise ValueError(f"{where}: plan: expected a number of epochs, got none")
    for name in plan:
        one_of(PLAN, f"{where}: plan", name)
    try:
        model = MODELS[run["model"]]
        lr = model.learning_rate(model.Config(**_settings(run)), plan.get("lr"))
        asked = planned(plan["epochs"], plan.get("patience"), plan.get("schedule"), learns=model.learns)
        Settings(**{**plan, **asked, "lr": lr, "metric": validation_metric(plan.get("metric", "ndcg@10"))})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error


def _plan(run: Run) -> dict[str, Any]:
    return {**({} if MODELS[run["model"]].learns else {"epochs": 1}), **(run["plan"] or {})}


def _settings(run: Run) -> dict[str, Any]:
    return {name: tuple(x) if isinstance(x, list) else x for name, x in (run["options"] or {}).items()}


class Measure:
    """Called with a run and its folder: trains the run, or goes on with it, and tests it once. Data that several runs
    share is read once.
    """

    def __init__(
        self, manifest: Manifest, beside: Path, progress: bool, measured: Callable[[], Sequence[Run]]
    ) -> None:
        """beside: the folder from which paths of the manifest are taken. measured: the runs that have been measured, on
        whose data others of the same name are to be.
        """
        self._manifest, self._beside, self._progress, self._measured = manifest, beside, progress, measured
        self._splits: dict[str, tuple[Source, Split]] = {}

    def __call__(self, run: Run, folder: Path) -> dict[str, Any]:
        source, split = self._read(run["data"])
        print_of = fingerprints.fingerprint(split)
        for other in self._measured():
            if other["source"] == run["source"] and other["data_sha256"] != print_of:
                raise ValueError(
                    f"data: {run['data']}: expected what {title(other)} was trained on, got other clicks; "
                    "give the new data a name of its own in the manifest, or move the file of results away"
                )
        named = run["source"]
        seen, protocol = named.get("seen", "mask"), named.get("protocol", "full")
        if (folder / "config.json").exists():
            history = resume(folder, split, self._progress)
        else:
            model = make(MODELS[run["model"]], split, seed=run["seed"], **_settings(run))
            more = {"seed": run["seed"], "seen": seen, "record": source.to_json(), "progress": self._progress}
            history = fit(model, split, out=folder, **_plan(run), **more)
        best = next(line for line in reversed(history) if line["best"])
        seconds = sum(line["seconds"] for line in history)
        found = {"epochs": len(history), "best_epoch": best["epoch"], "seconds": seconds, "valid": best}
        columns = columns_of(self._manifest, run["data"])
        test = evaluate(checkpoint.load(folder), split.test, seen=seen, protocol=protocol, metrics=columns)
        found["test"] = {name: value for name, value in test.items() if name not in COUNTS}
        return found | {"data_sha256": print_of, "versions": checkpoint.versions()}

    def _read(self, name: str) -> tuple[Source, Split]:
        if name not in self._splits:
            named = self._manifest["data"][name]
            data = _log_of(named)
            if not data["path"].startswith(BUNDLED):
                files = Source(data).files
                data |= {key: str((self._beside / path).resolve()) for key, path in files.items()}
            source = Source.recorded({"data": data, "split": named.get("split", {})})
            self._splits[name] = source, source.split()
        return self._splits[name]
