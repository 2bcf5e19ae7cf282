"""The commands of the command line, one file each: `add(commands)` declares the options, `run(args)` does the work.

A command parses its options, calls the Python function of the same name and prints the result.
"""

from fastcl.recsys.cli import (
    bench,
    compare,
    data,
    demo,
    evaluate,
    export,
    info,
    intents,
    models,
    recommend,
    report,
    resume,
    similar,
    study,
    train,
    tune,
)

COMMANDS = (
    demo,
    data,
    models,
    train,
    resume,
    tune,
    study,
    evaluate,
    compare,
    report,
    intents,
    recommend,
    similar,
    export,
    bench,
    info,
)
