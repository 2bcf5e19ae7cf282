"""Models by name for tests that take all of them."""

from __future__ import annotations

from typing import Any

from fastcl.recsys.data import Items
from fastcl.recsys.models import MODELS, Model

LEARNED = [name for name in MODELS if MODELS[name].learns]  # the others count clicks and have no vectors


def made(name: str, items: Items, **options: Any) -> Model:
    """With those of the options that the model has; one with users has none, and takes all as strangers."""
    known = MODELS[name].Config.__dataclass_fields__
    return MODELS[name](items, **{key: value for key, value in options.items() if key in known or key == "seed"})
