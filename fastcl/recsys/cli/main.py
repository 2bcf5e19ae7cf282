"""The frame of the command line: the parser of all commands, errors and exit codes.

`fastcl --use FILE COMMAND` first runs a Python file of the user, which is the only foreign code: run folders hold none.
Options are checked before data is read. An error is one line on stderr; --debug shows the traceback. Exit codes are 2
for an error, 130 for Ctrl-C, 141 where the reader of stdout has ended.
"""

import argparse
import contextlib
import importlib.util
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from fastcl.recsys.cli import COMMANDS
from fastcl.recsys.cli.console import explain, flush_stdout, one_line, streams
from fastcl.recsys.models import MODELS
from fastcl.recsys.training import processes


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {one_line(message)}; see {self.prog} --help\n")


def _note(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    """A warning as one line without its place in the code. Of several processes only the first one prints it."""
    if processes.leads():
        print(f"fastcl: note: {one_line(str(message))}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. argv: its words; None: those of sys.argv, in a process of its own."""
    if argv is not None:
        return _command(list(argv))
    with streams():
        return _command(sys.argv[1:])


def _command(words: list[str]) -> int:
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    args, parser = None, None
    try:
        used = _used(words)
        for file in used:
            _run_file(file)
        parser = build_parser()
        args = _parsed(parser, words)
        _check_values(args)
        with warnings.catch_warnings(), _threads(args):
            warnings.showwarning = _note
            args.run(args)
        sys.stdout.flush()  # an error of this flush is reported; one at the end of the process would not be
    except BrokenPipeError:
        return 128 + int(getattr(signal, "SIGPIPE", 13))  # Windows has no such signal
    except KeyboardInterrupt:
        return 128 + int(signal.SIGINT)
    except Exception as error:
        if debug:
            traceback.print_exc()
        if parser is None:  # the user's own code (--use) was running, which may raise any error
            text = f"--use: {type(error).__name__}: {one_line(str(error))}"
        else:
            text = explain(error, foreign=bool(used))
            # FloatingPointError is about a computed value ("loss"), even where an option has the same name.
            text = _with_options(text, args) if args and not isinstance(error, FloatingPointError) else text
        print(f"{args.parser.prog if args else 'fastcl'}: error: {text}", file=sys.stderr)
        return 2
    finally:
        flush_stdout()
    return 0


@contextlib.contextmanager
def _threads(args: argparse.Namespace) -> Iterator[None]:
    with processes.threads(args.threads) if hasattr(args, "threads") else contextlib.nullcontext():
        yield


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands. Each command sets the defaults `parser`, its own parser, and `run`, its function."""
    parser = _Parser(prog="fastcl", description="Fused contrastive losses, and recommenders trained with them.")
    parser.add_argument("--use", metavar="FILE", action="append", default=[], help="run FILE, which registers models")
    parser.add_argument("--version", action="version", version=f"fastcl {version('fastcl')}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for command in COMMANDS:
        command.add(commands)
    for leaf in leaves(parser):
        leaf.set_defaults(parser=leaf)
    return parser


def _parsed(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """The values of the options. Words that no option takes are an error of the command, whose help lists the options;
    `parse_args` would send the user to the help of `fastcl`, which lists the commands alone.
    """
    args, unknown = parser.parse_known_args(words)
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers of the commands, `data check` among them."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for action in below:
        for choice in action.choices.values():
            yield from leaves(choice)
    if not below:
        yield parser


def _check_values(args: argparse.Namespace) -> None:
    """Refuses values that no option can mean: whole numbers of more than 64 bits, and blank paths. An unset variable of
    the shell gives a blank path, which Python would take for the current folder.
    """
    for action in args.parser._actions:
        value = getattr(args, action.dest, None)
        values = value if isinstance(value, list) else [value]
        is_path = not action.option_strings or action.metavar in ("RUN", "FILE", "FOLDER", "CSV")
        if is_path and any(isinstance(path, str) and not path.strip() for path in values):
            args.parser.error(f"argument {_label(action)}: expected a path, got {value!r}")
        if not is_path and any(isinstance(text, str) and not text.isascii() and _undecoded(text) for text in values):
            args.parser.error(f"argument {_label(action)}: expected text in UTF-8, got {value!r}")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            args.parser.error(f"argument {_label(action)}: expected a whole number of at most 64 bits, got {value}")


def _undecoded(text: str) -> bool:
    """Whether the text has Python's stand-ins for bytes that are no UTF-8. Only paths may have them."""
    return any("\udc80" <= letter <= "\udcff" for letter in text)


def _label(action: argparse.Action) -> str:
    return "/".join(action.option_strings) or str(action.metavar or action.dest)


def _with_options(text: str, args: argparse.Namespace) -> str:
    """The text of an error with options in place of the Python arguments that it begins with.

    `at: expected ...` becomes `--at: expected ...`, and a field of a model's config `--set dim: expected ...`. Names
    that differ from their option's are in the parser's default `names`.
    """
    found = re.match(r"(\w+(, \w+)*)(?=: )", text)
    if found is None:
        return text
    names = found[1].split(", ")
    options = [_option(name, args, several=len(names) > 1) for name in names]
    return text if None in options else ", ".join(map(str, options)) + text[found.end() :]


def _option(name: str, args: argparse.Namespace, several: bool) -> str | None:
    """The option that stands for a Python argument; None where the option has no part in the error."""
    settings = getattr(args, "set", [])
    if any(setting.partition("=")[0] == name for setting in settings):
        return f"--set {name}"
    aliases = getattr(args, "names", {})
    if name in aliases:
        return str(aliases[name])
    for action in args.parser._actions:
        # An option that was not given has no part in an error, unless it is required or the error names several.
        if action.dest == name and (
            several or getattr(args, name) in (None, []) or getattr(args, name) != action.default
        ):
            return action.option_strings[-1] if action.option_strings else _label(action)
    model = MODELS.get(getattr(args, "model", ""))
    return f"--set {name}" if model and settings and name in model.Config.__dataclass_fields__ else None


def _used(argv: Sequence[str]) -> list[str]:
    """The files of --use in front of the command. They run first, since the commands list the models as choices."""
    first = _Parser(prog="fastcl", add_help=False, usage=argparse.SUPPRESS)
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
