"""What must be true of every wheel, whichever machine built it: its tags, what its library asks of the system and of
torch, what it exports, its size, and that nothing of the building machine is in it. Runs nothing of the wheel.

    python -m building.check dist/*.whl
"""

import json
import re
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

from building.binary import Binary, read
from building.platforms import PLATFORMS, library_name

FOLDER = Path(__file__).resolve().parent
MOST_BYTES = 3_000_000  # without the bundled data
# What every system of the platform has, and torch's library.
ALLOWED = {
    "linux": r"libtorch_cpu\.so|lib(c|m|pthread|dl)\.so\.\d+|ld-linux-\S+\.so\.\d",
    "macos": r"@rpath/libtorch_cpu\.dylib|/usr/lib/libSystem\.B\.dylib",
    "windows": r"torch_cpu\.dll|(?i:kernel32|ntdll|api-ms-win-crt-[a-z0-9-]+)\.dll",
}
# The linker of zig for macOS takes no list of exports. Operators new and delete stay visible, as weak definitions, in
# whose place the loader takes those of the system's C++ library, which torch has loaded before.
UNAVOIDABLE = {"macos": r"_Z(nw|na|dl|da)\w+|_mh_dylib_header|__dso_handle"}
OLDEST = {"linux": (2, 28), "macos": (11, 0)}
LIBRARIES = (".so", ".dylib", ".dll", ".pyd")
# A path of the building machine: three folders or more from the root, or a user's folder.
MACHINE_PATH = re.compile(rb"(?:/[\w.+-]+){4,}|/(?:home|root|Users|tmp)/[\w.+-]+|[A-Z]:\\[\w.+-]+\\[\w.+-]+")


def our_functions() -> set[str]:
    """What csrc/module.cpp exports."""
    return set(re.findall(r"^FASTCL_EXPORT .*?(fastcl_\w+)\(", (FOLDER.parent / "csrc/module.cpp").read_text(), re.M))


def torch_exports(name: str) -> dict[str, set[str]]:
    """Of the functions that csrc/torch_shim.h declares, those that torch's own wheels for a platform export, by the
    version of torch. Read from torch's wheels (torch_exports.py)."""
    found = json.loads((FOLDER / "torch_exports.json").read_text())
    return {version: set(names) for version, names in found.get(name, {}).items()}


def library_problems(binary: Binary, name: str) -> list[str]:
    kind, machine = name.split("-")
    machine = {"arm64": "aarch64"}.get(machine, machine)
    found = []
    if (binary.kind, binary.machine) != (kind, machine):
        found.append(f"expected a library for {kind} {machine}, got {binary.kind} {binary.machine}")
    if extra := sorted(x for x in binary.needed if not re.fullmatch(ALLOWED[kind], x)):
        found.append(f"needs libraries that not every system has: {', '.join(extra)}")
    if not any("torch_cpu" in x for x in binary.needed):
        found.append("does not name torch's library as needed")
    exports = {x for x in binary.exports if not re.fullmatch(UNAVOIDABLE.get(kind, ""), x)}
    if exports != our_functions():
        found.append(f"expected exports {sorted(our_functions())}, got {sorted(exports)}")
    if python := sorted(x for x in binary.imports if re.match(r"_?Py[A-Z_]", x)):
        found.append(f"asks for functions of Python: {', '.join(python)}")
    if binary.system > OLDEST.get(kind, binary.system):
        oldest = ".".join(map(str, OLDEST[kind]))
        found.append(f"expected to run on {kind} {oldest}, needs {'.'.join(map(str, binary.system))}")
    if [path for path in binary.searched if path != "@loader_path/../torch/lib"]:
        found.append(f"looks for libraries in {', '.join(binary.searched)}")
    if kind == "macos" and not binary.signed:
        found.append("has no signature")
    return found + torch_problems(binary, name)


def torch_problems(binary: Binary, name: str) -> list[str]:
    asked = {x for x in binary.imports if re.match(r"(aoti_)?torch_", x)}
    known = torch_exports(name)
    found = [] if asked else ["asks nothing of torch"]
    found += [] if known else [f"torch's exports for {name} are not recorded (building/torch_exports.py)"]
    for version, exports in known.items():
        if missing := sorted(asked - exports):
            found.append(f"torch {version} for {name} does not export {', '.join(missing)}")
    return found


def problems(wheel: Path) -> list[str]:
    """What is wrong with a wheel, in words; empty if nothing is."""
    tag = wheel.stem.split("-", 2)[2]
    name = next((key for key, value in PLATFORMS.items() if tag == f"py3-none-{value.tag}"), "none")
    found = []
    if name == "none" and tag != "py3-none-any":
        found.append(f"expected a tag py3-none-PLATFORM, got {tag}")
    with zipfile.ZipFile(wheel) as archive:
        sizes = {info.filename: info.compress_size for info in archive.infolist()}
        metadata = archive.read(next(x for x in sizes if x.endswith(".dist-info/WHEEL"))).decode()
        if f"Tag: {tag}" not in metadata.splitlines():
            found.append("the tag of its name is not that in its metadata")
        size = sum(bytes_ for x, bytes_ in sizes.items() if "/recsys/data/sets/" not in x)
        if size > MOST_BYTES:
            found.append(f"expected at most {MOST_BYTES} bytes without the bundled data, got {size}")
        compiled = [x for x in sizes if PurePosixPath(x).suffix in LIBRARIES]
        expected = [] if name == "none" else [f"fastcl/{library_name(name)}"]
        if compiled != expected or ("fastcl/without_kernels.txt" in sizes) != (name == "none"):
            found.append(f"expected the libraries {expected}, got {compiled}")
        elif expected:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(archive.extract(expected[0], folder))
                found += library_problems(read(path), name)
                if paths := sorted({x.decode() for x in MACHINE_PATH.findall(path.read_bytes())}):
                    found.append(f"has paths of the building machine: {', '.join(paths[:5])}")
    return found


def main() -> None:
    found = {name: problems(Path(name)) for name in sys.argv[1:]}
    for name, wrong in found.items():
        print(f"{name}: {'; '.join(wrong) or 'good'}")
    if any(found.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
