"""Pages whose content is the program itself: the command line, the models' settings, the conventions of the losses.

A page holds a line `<!-- generated: NAME -->`; what it stands for is written when the site is built.
"""

import argparse
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

import fastcl
from fastcl.recsys import MODELS
from fastcl.recsys.cli.main import build_parser
from fastcl.recsys.settings import settings_of, shortened
from fastcl.registry import LOSSES

MARK = re.compile(r"^<!-- generated: (\w+) -->$", re.M)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def commands() -> str:
    return command_page(build_parser(), 1).partition("\n\n")[2]  # the page has a title of its own


def command_page(parser: argparse.ArgumentParser, level: int) -> str:
    """A heading, what the command does, and its arguments; below it the commands of a command."""
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    helps = {choice.dest: choice.help for action in inner for choice in action._choices_actions}
    parts = [f"{'#' * level} `{parser.prog}`"]
    if parser.description:
        parts.append(plain(parser.description[0].upper() + parser.description[1:].removesuffix(".")) + ".")
    shown = [a for a in parser._actions if a not in inner and a.help != argparse.SUPPRESS and a.dest != "help"]
    if not inner:
        usage = " ".join(parser.format_usage().split()).removeprefix("usage: ").replace("[-h] ", "")
        parts.append(f"```text\n{textwrapped(usage)}\n```")
    if shown:
        parts.append(table(["argument", "meaning"], [argument(action, parser) for action in shown]))
    if parser.epilog:
        parts.append(plain(parser.epilog))
    for action in inner:
        for inner_name, inner_parser in action.choices.items():
            if helps.get(inner_name):
                inner_parser.description = inner_parser.description or helps[inner_name]
            parts.append(command_page(inner_parser, level + 1))
    return "\n\n".join(parts)


def textwrapped(usage: str, width: int = 76) -> str:
    lines = [""]
    for word in re.findall(r"\[[^\]]*\]+|\([^)]*\)|\S+", usage):
        if len(lines[-1]) + len(word) >= width:
            lines.append("   ")
        lines[-1] += ("" if not lines[-1] else " ") + word
    return "\n".join(lines)


def argument(action: argparse.Action, parser: argparse.ArgumentParser) -> list[str]:
    value = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
    if isinstance(value, tuple):
        value = " ".join(value)
    if action.choices is not None and not action.metavar:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    names = ", ".join(action.option_strings) or action.dest
    shown = f"`{names} {value}`" if action.option_strings and value else f"`{action.metavar or names}`"
    return [shown, plain(parser._get_formatter()._expand_help(action)) if action.help else ""]


def plain(text: str) -> str:
    """Text without anything that Markdown would take for markup."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(part if part.startswith("`") else re.sub(r"([*_<>\[\]])", r"\\\1", part) for part in parts)


def configs() -> str:
    parts = []
    for model_name, model in MODELS.items():
        rows = [
            [f"`{one.name}`", f"`{one.type}`", f"`{shortened(one.default)}`", plain(one.meaning)]
            for one in settings_of(model.Config)
        ]
        name = model.Config.__name__
        home = "fastcl.recsys" if hasattr(fastcl.recsys, name) else model.Config.__module__.rpartition(".")[0]
        parts += [f"## `{model_name}`", f"`{home}.{name}`. {plain(model.Config.__doc__ or '')}"]
        parts.append(table(["setting", "type", "default", "meaning"], rows))
    return "\n\n".join(parts)


# One argument of each name, for calling any loss. Rows of different lengths: a loss that normalises cannot see them.
GIVEN: dict[str, torch.Tensor] = {
    **dict.fromkeys(("query", "view1", "anchor", "features", "x", "input"), torch.tensor([[3.0, 1.0], [0.5, 2.0]])),
    **dict.fromkeys(
        ("positive_key", "view2", "positive", "positives", "document", "key", "y"),
        torch.tensor([[1.0, 0.2], [0.1, 0.7]]),
    ),
    **dict.fromkeys(("negative_keys", "negative", "linear_weight"), torch.tensor([[2.0, -1.0], [0.3, 0.4]])),
    **dict.fromkeys(("labels", "target", "owner"), torch.tensor([0, 1])),
    **dict.fromkeys(("logit_scale", "logit_bias"), torch.tensor(1.0)),
}
# What a loss calls by a name that means something else to the others.
OWN: dict[str, dict[str, Any]] = {
    "soft_cross_entropy": {"target": torch.tensor([[0.7, 0.3], [0.2, 0.8]])},
    "distill_kl": {"teacher": torch.tensor([[1.0, 0.3], [0.2, 0.8]])},
    "gbce": {"catalogue": 10},
    "sogclr": {"index": torch.tensor([0, 1]), "denominators": fastcl.Denominators(2).eval()},
    "margin_mse": {"negative": torch.tensor([[[2.0, -1.0]], [[0.3, 0.4]]]), "teacher_margin": torch.ones(2, 1)},
}


def normalises(loss: Callable[..., torch.Tensor]) -> str:
    """Found out by calling: does it matter how long the vectors are?"""
    all_given = GIVEN | OWN.get(loss.__name__, {})
    given = {name: all_given[name] for name in inspect.signature(loss).parameters if name in all_given}
    longer = {name: x * 2 if isinstance(x, torch.Tensor) and x.dim() == 2 else x for name, x in given.items()}
    torch.manual_seed(0)  # sce draws
    first = loss(**given)
    torch.manual_seed(0)
    same = torch.allclose(first, loss(**longer))
    if "normalize" in inspect.signature(loss).parameters:
        return "yes; not with `normalize=False`" if same else "with `normalize=True`"
    return "always" if same else "no: vectors are used as they are"


def conventions() -> str:
    rows = []
    for name, loss in LOSSES.items():
        parameters = inspect.signature(loss.function).parameters
        default = [f"`{parameters[key].default}`" if key in parameters else "" for key in ("temperature", "reduction")]
        rows.append([f"`{name}`", f"`nn.{loss.module}`", normalises(loss.function), *default])
    return table(["loss", "module", "normalises its vectors", "temperature", "reduction"], rows)


def family() -> str:
    """The documentation of the losses over `pos` and `lse`."""
    names = [name for name, loss in LOSSES.items() if loss.formula is not None]
    lines = "\n".join(f".. autofunction:: fastcl.{name}" for name in names)
    return f"```{{eval-rst}}\n{lines}\n.. autofunction:: fastcl.mises_fisher_weights\n```"


MADE: dict[str, Callable[[], str]] = {
    "commands": commands,
    "configs": configs,
    "conventions": conventions,
    "family": family,
}


def read(app: Any, docname: str, source: list[str]) -> None:
    source[0] = MARK.sub(lambda found: MADE[found[1]](), source[0])


def setup(app: Any) -> dict[str, Any]:
    app.connect("source-read", read)
    return {"parallel_read_safe": True}
