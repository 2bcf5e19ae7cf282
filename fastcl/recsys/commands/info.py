"""fastcl info: what this installation is made of."""

import argparse
from typing import Any

import fastcl


def add(commands: Any) -> None:
    parser = commands.add_parser("info", help="version, kernels and threads of this installation")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    fastcl.show_config()
