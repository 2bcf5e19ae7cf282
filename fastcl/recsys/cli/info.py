"""fastcl info: version, kernels and threads of this installation."""

import argparse
import json
from typing import Any

import fastcl
from fastcl.recsys.models import MODELS


def add(commands: Any) -> None:
    parser = commands.add_parser("info", help="version, kernels and threads of this installation")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    if args.json:
        print(json.dumps(fastcl.config() | {"models": list(MODELS)}))
    else:
        fastcl.show_config()
        print(f"{'models':15}{', '.join(MODELS)}")
