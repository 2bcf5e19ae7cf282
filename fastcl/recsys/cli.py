"""The command line's frame: one parser from the commands in commands/, faults and exit codes.

Options are checked before data is read; a fault of the user's is one line on stderr and exit code 2, never a traceback.
"""

import argparse
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from fastcl.recsys.commands import COMMANDS


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def _note(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    """A warning as one line, without the place in the code that raised it."""
    print(f"fastcl: note: {message}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns 0, or 2 where the user's input is at fault."""
    parser = _Parser(prog="fastcl", description="Fused contrastive losses, and recommenders trained with them.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for command in COMMANDS:
        command.add(commands)
    args = parser.parse_args(argv)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _note
            args.run(args)
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        print(f"fastcl {args.command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
