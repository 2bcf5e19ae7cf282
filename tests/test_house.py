"""How the parts of fastcl may know each other: the packages of fastcl.recsys in one direction, data <- models,
evaluation <- training <- serving <- reporting <- studies <- cli; no module knows itself through others, and none takes
private names of another. Imports for type checkers and inside functions count too."""

import ast
import importlib
import pkgutil
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import fastcl
import fastcl.recsys

FOLDER = Path(fastcl.recsys.__file__).parent
ROOT = Path(fastcl.__file__).parent
# A package may import packages of a lower number and itself; modules beside the packages import none of them.
FLOOR = {
    **{"data": 0, "models": 1, "evaluation": 1, "baselines": 2, "training": 2, "serving": 3, "reporting": 4},
    **{"studies": 5, "cli": 6},
}
DOORS = {"__init__", "__main__"}


def test_arrows_between_the_packages_point_down() -> None:
    files = [file for file in FOLDER.rglob("*.py") if file.parent != FOLDER or file.stem not in DOORS]
    found = {str(file.relative_to(FOLDER)): _known(file) for file in files}
    assert len(found) > 60
    wrong = {
        f"{file} -> {other}"
        for file, known in found.items()
        for other in known
        if other != file.split("/")[0] and FLOOR[other] >= FLOOR.get(file.split("/")[0], 0)
    }
    assert wrong == set()


def test_no_module_imports_itself_through_others() -> None:
    modules = {_module(file): file for file in FOLDER.rglob("*.py")}
    known = {
        name: {other if other in modules else other.rpartition(".")[0] for other in _names(file)}
        & (set(modules) - {name})
        for name, file in modules.items()
    }
    assert "fastcl.recsys.models.losses" in known["fastcl.recsys.models.sasrec"]
    TopologicalSorter(known).prepare()  # raises CycleError, which names the modules


def _module(file: Path) -> str:
    parts = ["fastcl", "recsys", *file.relative_to(FOLDER).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _names(file: Path) -> set[str]:
    """What a file imports, wherever in it: modules, and names in modules."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def _known(file: Path) -> set[str]:
    """The packages of fastcl.recsys that a file imports from."""
    below = [name.split(".")[2] for name in _names(file) if name.startswith("fastcl.recsys.")]
    return {name for name in below if name in FLOOR}


def test_no_name_hides_a_module() -> None:
    """`import fastcl.x as m` gives what the package calls `x`: a function of that name would be given instead."""
    found = [m.name for m in pkgutil.walk_packages(fastcl.__path__, "fastcl.")]
    no_modules = ("_C_cuda", "__main__", "libfastcl_cpu")  # not to be imported, or not everywhere
    names = [name for name in found if not name.endswith(no_modules)]
    assert "fastcl.ops_pairwise" in names
    hidden = []
    for name in names:
        module = importlib.import_module(name)
        package, _, last = name.rpartition(".")
        if getattr(sys.modules[package], last) is not module:
            hidden.append(name)
    assert hidden == []


def test_packages_take_no_private_names_from_each_other() -> None:
    """A name with an underscore in front belongs to its file; modules whose name has one belong to fastcl."""
    private = {str(file.relative_to(ROOT)): _private(file) for file in ROOT.rglob("*.py")}
    assert {file: names for file, names in private.items() if names} == {}


def _private(file: Path) -> set[str]:
    tree = ast.parse(file.read_text())
    modules, taken = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("fastcl"):
            for alias in node.names:
                is_module = (ROOT.parent / f"{node.module}.{alias.name}".replace(".", "/")).with_suffix(".py").is_file()
                if is_module:
                    modules.add(alias.asname or alias.name)
                elif alias.name.startswith("_") and alias.name != "_C_cuda":
                    taken.add(f"{node.module}.{alias.name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr.startswith("_"):
            taken |= {f"{node.value.id}.{node.attr}"} if node.value.id in modules else set()
    return taken
