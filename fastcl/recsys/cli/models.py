"""fastcl models: the models, and every setting of one with its type, default and meaning."""

import argparse
import inspect
import json
import re
from typing import Any

from fastcl.recsys.models import MODELS
from fastcl.recsys.settings import described, settings_of


def add(commands: Any) -> None:
    parser = commands.add_parser("models", help="the models, or every setting of one with its default and meaning")
    parser.add_argument("name", nargs="?", metavar="NAME", help="a model, such as sasrec (default: a line for each)")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout: a list of settings each")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    if args.name is not None and args.name not in MODELS:
        raise ValueError(f"NAME: expected one of {', '.join(MODELS)}, got {args.name!r}")
    chosen = MODELS if args.name is None else {args.name: MODELS[args.name]}
    if args.json:
        found = {name: [one._asdict() for one in settings_of(model.Config)] for name, model in chosen.items()}
        print(json.dumps(found, indent=1))
    elif args.name is None:
        width = max(map(len, chosen))
        for name, model in chosen.items():
            print(f"{name:{width}}  {_first_sentence(model)}")
        print("\nfastcl models NAME lists the settings of one, which --set gives to fastcl train.")
    else:
        model = chosen[args.name]
        print(f"{args.name}: {_first_sentence(model)}\n\n{described(model.Config)}")


def _first_sentence(model: type) -> str:
    text = " ".join((inspect.getdoc(model) or "").split("\n\n")[0].split())
    return re.split(r"[.;:] ", text)[0].rstrip(".:") + "."
