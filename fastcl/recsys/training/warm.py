"""The start of a training from the weights of an earlier run. Nothing here trains or writes."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastcl.recsys.models import Model
from fastcl.recsys.models.carrying import Carried, carry
from fastcl.recsys.training import checkpoint


def start(model: Model, folder: str | Path) -> dict[str, Any]:
    """Sets the weights of a new model to those of the run in `folder`, as `models.carrying.carry` says; returns what
    config.json records of it under "init": the run, the SHA-256 of its model.safetensors, and what was carried.

    Queues of negatives and the optimiser's moments begin empty: queues hold vectors or numbers of the earlier item
    table and are full again after a few steps, and moments are of gradients on the earlier clicks.
    """
    folder = Path(folder)
    earlier = checkpoint.load(folder)
    digest = hashlib.sha256(checkpoint.read(folder / "model.safetensors")).hexdigest()
    carried = carry(model, earlier)
    counts = {name: count for name, count in asdict(carried).items() if count is not None}
    return {"run": str(folder), "sha256": digest, **counts}


def told(record: Mapping[str, Any]) -> str:
    """What `start` returned, as a sentence."""
    counts = Carried(**{name: record[name] for name in Carried.__dataclass_fields__ if name in record})
    return f"begins with {record['run']}: {counts}; queues and the optimiser's moments begin empty"
