"""Records which of the functions that csrc/torch_shim.h declares torch's own wheels export, in torch_exports.json.

    pip download torch==2.13.0 --no-deps --only-binary=:all: --platform macosx_14_0_arm64 --python-version 3.11 -d DIR
    python -m building.torch_exports DIR/*.whl

The check of our wheels reads the record, so that it needs no wheel of torch.
"""

import json
import re
import sys
import tempfile
import zipfile
from pathlib import Path

from building.binary import read
from building.platforms import torch_functions

RECORD = Path(__file__).resolve().parent / "torch_exports.json"


def exported(wheel: Path) -> tuple[str, str, list[str]]:
    """(platform, version of torch, functions)"""
    found = re.fullmatch(r"torch-([\d.]+)(?:\+\w+)?-cp\w+-cp\w+-(\w+)", wheel.stem)
    if not found:
        raise SystemExit(f"{wheel}: expected a wheel of torch")
    version, tag = found.groups()
    system = {"man": "linux", "mac": "macos", "win": "windows"}[tag[:3]]
    machine = "x86_64" if tag.endswith(("x86_64", "amd64")) else "aarch64" if system == "linux" else "arm64"
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        (name,) = (x for x in archive.namelist() if re.fullmatch(r"torch/lib/(lib)?torch_cpu\.(so|dylib|dll)", x))
        exports = read(Path(archive.extract(name, folder))).exports
    return f"{system}-{machine}", version, sorted(set(torch_functions()) & exports)


def main() -> None:
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for wheel in sys.argv[1:]:
        platform, version, functions = exported(Path(wheel))
        record.setdefault(platform, {})[version] = functions
        print(platform, version, len(functions), "missing:", sorted(set(torch_functions()) - set(functions)))
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
