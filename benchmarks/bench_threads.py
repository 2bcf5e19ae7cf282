"""The CPU time of `fastcl train` by how its threads wait, while other processes keep every core busy.

    python -m benchmarks.bench_threads

Three settings take turns: one thread; the default number of threads, which `fastcl train` makes sleep while they wait;
the default number with OMP_WAIT_POLICY=active, OpenMP's own behaviour. CPU-seconds are those of the whole process, the
import of torch included.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import RESULTS, machine, markdown, write_json

WAYS = {
    "one thread": (["--threads", "1"], {}),
    "default threads, as the command has them wait": ([], {}),
    "default threads, waiting actively": ([], {"OMP_WAIT_POLICY": "active"}),
}
BUSY = "while True: pass"


def train(folder: Path, number: int, words: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """(CPU-seconds, seconds) of one training in a process of its own."""
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS")
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    options = ["--model", "sasrec", "--epochs", "5", "-o", str(folder / str(number))]
    command = [sys.executable, "-m", "fastcl.recsys", "train", str(folder / "log.csv"), *options, *words]
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, env=inherited | environment, check=True, capture_output=True)
    seconds, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS / "threads.json")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        rows = [f"u{row % 50},i{(row * row) % 60},{row}" for row in range(400)]
        (folder / "log.csv").write_text("user,item,time\n" + "\n".join(rows) + "\n")
        others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(cores)]
        try:
            for repeat in range(options.repeats):
                for number, (name, (words, environment)) in enumerate(WAYS.items()):
                    spent[name].append(train(folder, 10 * repeat + number, words, environment))
        finally:
            for other in others:
                other.kill()
                other.wait()
    one = statistics.median(cpu for cpu, _ in spent["one thread"])
    cells = []
    for name, pairs in spent.items():
        cpu, seconds = (statistics.median(values) for values in zip(*pairs, strict=True))
        cells.append({"threads": name, "CPU-seconds": cpu, "seconds": seconds, "of one thread's CPU": cpu / one})
    print(f"400 rows, 5 epochs of SASRec; {cores} other processes keep the {cores} cores busy")
    print(markdown(cells))
    write_json(options.output, {"machine": machine(), "busy": cores, "repeats": options.repeats, "rows": cells})


if __name__ == "__main__":
    main()
