"""Writes fastcl/__init__.pyi and fastcl/nn.pyi: what type checkers and editors know of names made at run time.

The losses over rows get their signature from a decorator, the modules theirs from the losses, and both enter their
package through the registry. All of that is out of a type checker's sight. `make stubs` runs this file, and
test_typing.py compares what it would write with what is there.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import fastcl
from fastcl.module import signatures
from fastcl.registry import LOSSES, Loss

FOLDER = Path(fastcl.__file__).parent
HEAD = "# Written by tests/stubs.py (make stubs) from the registry of the losses.\n\n"


def function(name: str, signature: inspect.Signature, indent: str = "") -> str:
    lines = [f"{indent}def {name}("]
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    for nth, parameter in enumerate(signature.parameters.values()):
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and parameter.kind not in kinds[:nth]:
            lines.append(f"{indent}    *,")
        default = "..." if callable(parameter.default) or parameter.default is ... else repr(parameter.default)
        after = "" if parameter.default is inspect.Parameter.empty else f" = {default}"
        lines.append(f"{indent}    {parameter.name}{annotation(parameter.annotation)}{after},")
    result = inspect.formatannotation(signature.return_annotation)
    return "\n".join([*lines, f"{indent}) -> {result}: ..."]) + "\n"


def annotation(kind: Any) -> str:
    return "" if kind is inspect.Parameter.empty else f": {inspect.formatannotation(kind)}"


def package() -> str:
    """A loss over rows is written out; all else is typed where it stands and imported from there."""
    parts = []
    for name in fastcl.__all__:
        if name in LOSSES and LOSSES[name].formula is not None:
            parts.append(function(name, inspect.signature(LOSSES[name].function)))
        else:
            parts.append(f"from {getattr(fastcl, name).__module__} import {name} as {name}\n")
    imports = sorted(part for part in parts if part.startswith("from"))
    functions = [part for part in parts if not part.startswith("from")]
    opening = "import collections.abc\n\nimport torch\n\nimport fastcl.segments\nfrom fastcl import nn as nn\n"
    names = "".join(f'    "{name}",\n' for name in fastcl.__all__)
    text = f"{HEAD}{opening}{''.join(imports)}\n__version__: str\n__all__ = [\n{names}]\n\n"
    return text + "\n".join(functions)


def module(loss: Loss) -> str:
    constructor, call = signatures(loss)
    this = next(iter(call.parameters.values()))
    made = constructor.replace(parameters=[this, *constructor.parameters.values()])
    methods = [("__init__", made), ("forward", call), ("__call__", call)]
    return f"class {loss.module}(LossModule):\n" + "".join(function(name, s, "    ") for name, s in methods)


def modules() -> str:
    known = "import fastcl.positives\nimport fastcl.segments\nfrom fastcl.module import LossModule\n\n"
    opening = f"import collections.abc\n\nimport torch\n\n{known}"
    return HEAD + opening + "\n".join(module(loss) for loss in LOSSES.values())


STUBS = {FOLDER / "__init__.pyi": package, FOLDER / "nn.pyi": modules}

if __name__ == "__main__":
    for path, made in STUBS.items():
        path.write_text(made())
