"""The command line's frame: one parser from the commands in commands/, faults and exit codes.

`fastcl --use FILE COMMAND` runs a Python file of the user's first, the only code from outside: run folders hold none.
Options are checked before data is read; a fault of the user's is one line on stderr and exit code 2, never a traceback.
"""

import argparse
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from fastcl.recsys import launch
from fastcl.recsys.commands import COMMANDS


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def _note(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    """A warning as one line, without the place in the code that raised it; of several processes, the first one's."""
    if launch.leads():
        print(f"fastcl: note: {message}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns 0, or 2 where the user's input is at fault."""
    parser = _Parser(prog="fastcl", description="Fused contrastive losses, and recommenders trained with them.")
    parser.add_argument("--use", metavar="FILE", action="append", default=[], help="run FILE, which registers models")
    argv = sys.argv[1:] if argv is None else argv
    try:
        for file in _used(argv):
            _run_file(file)
    except Exception as error:  # the user's own code may raise anything
        print(f"fastcl: error: --use: {' '.join(f'{type(error).__name__}: {error}'.split())}", file=sys.stderr)
        return 2
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for command in COMMANDS:
        command.add(commands)
    args = parser.parse_args(argv)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _note
            args.run(args)
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        # The system's own errors begin with a number.
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        print(f"fastcl {args.command}: error: {' '.join(text.split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _used(argv: Sequence[str]) -> list[str]:
    """The files of --use in front of the command: their models must be known before the commands list theirs."""
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--use", action="append", default=[])
    first.add_argument("rest", nargs=argparse.REMAINDER)
    return list(first.parse_known_args(argv)[0].use)


def _run_file(path: str) -> None:
    name = f"fastcl_used_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"expected a Python file, got {path!r}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)


if __name__ == "__main__":
    sys.exit(main())
