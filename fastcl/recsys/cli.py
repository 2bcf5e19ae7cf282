"""The command line's frame: one parser from the commands in commands/, faults and exit codes.

Options are checked before data is read; a fault of the user's is one line on stderr and exit code 2, never a traceback.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from fastcl.recsys.commands import COMMANDS


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns 0, or 2 where the user's input is at fault."""
    parser = _Parser(prog="fastcl", description="Fused contrastive losses, and recommenders trained with them.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for command in COMMANDS:
        command.add(commands)
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        print(f"fastcl {args.command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
