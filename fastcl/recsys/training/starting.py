"""The start of a run, new or resumed: a free and locked folder, what all processes must agree on, the first files.

Nothing here trains or scores.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from fastcl.recsys import schema, writing
from fastcl.recsys.data import Split, fingerprints
from fastcl.recsys.models import Model
from fastcl.recsys.training import checkpoint, lock, loop, parts, processes, state, tensorfile
from fastcl.recsys.training.modelstate import distinct
from fastcl.recsys.training.state import Settings


def reserve(stack: ExitStack, folder: Path, force: bool) -> None:
    """Locks the folder of a new run until `stack` ends; OSError where a run may not be written to it."""
    if processes.leads():
        checkpoint.check_free(folder, force)
        stack.enter_context(lock.held(folder))
        checkpoint.check_free(folder, force)


def alike_facts(model: Model, split: Split, settings: Settings) -> dict[str, str]:
    """The facts that must be equal in all processes that train one model. Threads may differ between machines."""
    shapes = [(name, list(tensor.shape)) for name, tensor in distinct(model).items()]
    facts = {"model": f"{model.name} {asdict(model.config)}", "shapes of the model": str(shapes)}
    chosen = {name: str(value) for name, value in vars(settings).items() if name not in ("threads", "save_every")}
    return {**facts, **chosen, "data": fingerprints.fingerprint(split)}


def begin(
    model: Model,
    split: Split,
    settings: Settings,
    folder: Path,
    force: bool = False,
    record: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """Writes a run whose training has not begun to a locked folder (`reserve`), so that `resume` can train it.

    A run that the folder holds is removed once the new one is written. Returns the facts of the run's tensor files.
    """
    with processes.together():
        data = fingerprints.fingerprint(split)
        digests = {"data_sha256": data, "test_sha256": fingerprints.cases_fingerprint(split)}
        taken = sorted((record or {}).keys() & {*vars(settings), *digests})
        if taken:
            raise ValueError(f"record: expected other names than {', '.join(taken)}, which config.json has already")
        text = checkpoint.describe(model, {**asdict(settings), **digests, **(record or {})})
        facts = state.facts_of(settings, data, text.identity)
    with own_random_state(model.device):
        run = loop.new_run(model, split, settings)
        found = state.content(model, run.optimizer, run.progress, facts)
    with processes.together():
        if processes.leads():
            checkpoint.check_free(folder, force)
            whole = tensorfile.tensor_parts(found.tensors, found.facts)  # tables are not yet shared out
            files = {state.LAST: whole, **checkpoint.text_files(text)}
            earlier = ["model.safetensors", "metrics.jsonl", *(part.name for part in parts.found_in(folder))]
            # Where there is no run, a file of that name is the user's.
            earlier += [checkpoint.LOG] if (folder / "config.json").exists() else []
            writing.write_set(folder, files, without=earlier)
    return facts


def extend(run: loop.Run, config: dict[str, Any], epochs: int) -> dict[str, Any]:
    """Sets the number of epochs of a restored run, in its settings and in both files that hold them. Every process
    calls this function and the first one writes. Returns the new content of config.json.
    """
    assert run.folder is not None, "a run that goes on has a folder"
    before, done = run.settings, len(run.progress.history)
    run.settings = replace(before, epochs=epochs)
    loop.check(run.model, run.split, run.settings)
    config = {**config, "epochs": epochs}
    if before.schedule == "linear" and (done or run.progress.step):
        config["extended"] = [*config.get("extended", []), {"from": before.epochs, "to": epochs, "after": done}]
        if processes.leads():
            other = f"the result is not that of {epochs} epochs from the start"
            rates = f"the first {done} epochs had the learning rates of a run of {before.epochs}, so that {other}"
            print(f"{run.folder}: extended to {epochs} epochs; {rates}", file=sys.stderr)
    facts = json.loads(run.facts["settings"])
    run.facts = state.facts_of(run.settings, facts["data_sha256"], run.facts["belongs"])
    # Each write replaces a whole file. After a kill between the two the same command comes here and repeats both.
    state.save(run.folder, run.model, run.optimizer, run.progress, run.facts)
    with processes.together():
        if processes.leads():
            writing.write_text(run.folder / "config.json", json.dumps(config, indent=2) + "\n")
    return config


@contextmanager
def own_random_state(device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


@contextmanager
def enough_memory() -> Iterator[None]:
    """A block in which lack of memory, which torch reports by errors of many types, is a MemoryError with advice."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = str(error).partition("\n")[0]
        full = isinstance(error, MemoryError) or re.search(
            r"can't allocate memory|not enough memory|out of memory|overflowed", text
        )
        if not full or text.startswith("not enough memory"):
            raise
        asked = re.search(r"allocate ([\d.]+ \w+)", text)
        wanted = f" to allocate {asked[1]} at once" if asked else ""
        advice = "smaller settings of the model (dim, batch, max_len), or fewer items"
        raise MemoryError(f"not enough memory{wanted}: expected a machine with more, or {advice}") from error


def check_unchanged(folder: Path, now: Mapping[str, str], epochs: int | None) -> None:
    """ValueError where config.json and last.safetensors hold different settings that change the result.

    epochs: the number to which the run is about to be extended; last.safetensors may hold it already (`extend`).
    """
    facts = tensorfile.read_facts(folder / state.LAST)
    if "settings" not in facts:
        return  # runs of version 1 hold no settings there
    where = f"{folder / state.LAST}: settings"
    then = schema.parse(facts["settings"], where)
    schema.fits(then, dict[str, Any], where)
    for name, value in json.loads(now["settings"]).items():
        if name in then and then[name] != value and (name, then[name]) != ("epochs", epochs):
            text = (
                f"{name} was {schema.short(then[name])} when the run was begun, config.json says {schema.short(value)}"
            )
            if name not in state.FREE:
                raise ValueError(f"{folder}: {text}; begin a new run for other settings")
            print(f"{folder}: {text}: the result may differ in its last bits", file=sys.stderr)
