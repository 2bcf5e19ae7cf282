"""The cost of a call itself, in microseconds: at 8 x 16 x 16, where the arithmetic takes less than one microsecond.

    python -m benchmarks.bench_overhead [--threads 1,2] [--repeats 15] [--output benchmarks/results/overhead]

`fastcl.contrast` has targets in microseconds. `fastcl.infonce`, with rows normalised and 16 shared negatives, has a
target as a share of the time of "eager", the leanest eager form by hand. "reference" is `fastcl.reference`, the
textbook form.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import fastcl
from benchmarks.common import (
    all_thread_counts,
    alternate,
    hardware,
    median_ratio,
    numbers,
    publish,
    report,
    step,
)
from fastcl import reference

N, M, D, TEMPERATURE = 8, 16, 16, 0.1
MICROSECONDS = {"forward": 10.0, "forward+backward": 45.0}
OF_EAGER = 0.7


def eager(query: Tensor, positive: Tensor, keys: Tensor) -> Tensor:
    query, positive, keys = F.normalize(query, dim=1), F.normalize(positive, dim=1), F.normalize(keys, dim=1)
    logits = query @ keys.T / TEMPERATURE
    pos = (query * positive).sum(1) / TEMPERATURE
    return (torch.logaddexp(torch.logsumexp(logits, 1), pos) - pos).mean()


def candidates(backward: bool) -> dict[str, Callable[[], None]]:
    torch.manual_seed(0)
    rows = [torch.randn(count, D).requires_grad_() for count in (N, N, M)]
    query, positive, keys = rows

    def contrast() -> Tensor:
        pos, lse = fastcl.contrast(query, keys, positive, scale=1 / TEMPERATURE)
        # With backward, the cheapest loss on top, so that the time is the op's; without, the op alone.
        return torch.dot(lse, pos) if backward and pos is not None else lse

    return {
        "contrast": step(contrast, rows, backward),
        "infonce": step(lambda: fastcl.infonce(query, positive, keys, TEMPERATURE), rows, backward),
        "eager": step(lambda: eager(query, positive, keys), rows, backward),
        "reference": step(lambda: reference.infonce(query, positive, keys, TEMPERATURE), rows, backward),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=numbers, default=all_thread_counts()[:2])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path, help="path without suffix")
    args = parser.parse_args()

    rows = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        for which, limit in MICROSECONDS.items():
            seconds = alternate(candidates(which != "forward"), args.repeats)
            us = {name: statistics.median(values) * 1e6 for name, values in seconds.items()}
            share = median_ratio(seconds, "infonce", "eager")
            failed = [
                name for name, bad in (("contrast", us["contrast"] > limit), ("infonce", share > OF_EAGER)) if bad
            ]
            rows.append(
                {
                    "threads": threads,
                    "pass": which,
                    "contrast us": us["contrast"],
                    "us at most": limit,
                    "infonce us": us["infonce"],
                    "eager us": us["eager"],
                    "infonce / eager": share,
                    "share at most": OF_EAGER,
                    "infonce / reference": median_ratio(seconds, "infonce", "reference"),
                    "target": f"not met: {', '.join(failed)}" if failed else "met",
                }
            )
    page = report(rows, f"{N} x {M} x {D}, medians of {args.repeats} alternating repetitions")
    publish(page, {"machine": hardware(), "repeats": args.repeats, "rows": rows}, args.output)


if __name__ == "__main__":
    main()
