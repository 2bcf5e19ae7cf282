"""fastcl resume: goes on with an interrupted run or extends a run; or does so with all runs in a folder."""

import argparse
from typing import Any

from fastcl.recsys.cli.runs import run_folders
from fastcl.recsys.cli.train import print_result
from fastcl.recsys.data.source import is_pipe
from fastcl.recsys.training import checkpoint, hooks, processes, trackers
from fastcl.recsys.training.fit import resume
from fastcl.recsys.training.state import Progress, Settings


def add(commands: Any) -> None:
    parser = commands.add_parser("resume", help="go on with a run that was interrupted, or extend one")
    option = parser.add_argument
    option("folder", metavar="RUN", help="run folder, or the folder of several runs (train --seed 1,2,3)")
    option("--data", metavar="FILE", help="where the data is now (default: where it was in training)")
    extended = "extend the run to N epochs in all; with --schedule linear the result is not that of N from the start"
    option("--epochs", type=int, metavar="N", help=extended)
    option("--json", action="store_true", help="print the result as JSON, one document a run")
    parser.set_defaults(run=run, names={"format": "--data", "columns": "--data"})


def run(args: argparse.Namespace) -> None:
    checkpoint.require_safetensors()
    folders = run_folders(args.folder)
    if len(folders) > 1 and args.data is not None and is_pipe(args.data):
        raise ValueError(f"--data: expected a file that several runs can read, got the pipe {args.data}")
    with processes.processes(Settings.recorded(checkpoint.read_config(folders[0])).device):
        for folder in folders:
            logs = trackers.all_of(checkpoint.read_config(folder).get("log", []), folder)
            history = resume(folder, data=args.data, epochs=args.epochs, on_epoch=logs)
            # A process that is killed after its last epoch may not have sent that one.
            hooks.stops(logs, Progress(history), Settings.recorded(checkpoint.read_config(folder)))
            print_result(folder, history, args.json)
