"""How the packages of fastcl.recsys may know each other: data <- models, evaluation <- training <- serving <- reporting
<- cli. Imports for type checkers count too."""

import ast
from pathlib import Path

import fastcl.recsys

FOLDER = Path(fastcl.recsys.__file__).parent
# A package may import those of a lower number, and itself; what lies beside the packages imports none of them.
FLOOR = {"data": 0, "models": 1, "evaluation": 1, "training": 2, "serving": 3, "reporting": 4, "cli": 5}
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


def _known(file: Path) -> set[str]:
    """The packages of fastcl.recsys that a file imports from, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    below = [name.split(".")[2] for name in names if name.startswith("fastcl.recsys.")]
    return {name for name in below if name in FLOOR}
