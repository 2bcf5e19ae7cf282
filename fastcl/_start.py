"""What must happen before torch is loaded: a check of the installation, and the setting of how OpenMP's threads wait.

OpenMP reads its settings once, when torch loads it. By default a thread that waits for work spins, so that two threads
on a busy machine cost several times the CPU time of one. In the `fastcl` command waiting threads sleep instead. In a
user's own program fastcl does not change the setting.
"""

import os
import sys
from collections.abc import Sequence

from fastcl._library import check_compiled


def is_command(words: Sequence[str]) -> bool:
    """Whether an interpreter's command line (`sys.orig_argv`) starts `fastcl` or `python -m fastcl.recsys`.

    >>> is_command(["python", "/usr/bin/fastcl", "info"]), is_command(["python", "train.py", "fastcl"])
    (True, False)
    """
    rest = iter(words[1:])
    for word in rest:
        if not word.startswith("-"):
            return os.path.basename(word) == "fastcl"
        if word in ("-W", "-X"):
            next(rest, "")
        elif word[-1] in "cm":  # the word after -m, -um or -c is what runs
            return word[-1] == "m" and next(rest, "") in ("fastcl.recsys", "fastcl.recsys.cli.main")
    return False


def let_threads_sleep() -> None:
    """Makes waiting threads of OpenMP sleep, unless the environment says how they wait."""
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
        os.environ["OMP_WAIT_POLICY"] = "passive"


check_compiled()
if is_command(sys.orig_argv):
    let_threads_sleep()
