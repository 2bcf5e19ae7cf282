"""The time and memory to read a large log of interactions: a generated file in each format, read in its own process.

    python -m benchmarks.bench_read --rows 10000000

Item frequencies follow a power law. Users are in random order, so that reading includes sorting. Seconds are those of
`Interactions.read` alone. Memory is the peak of the whole process, which includes 200-300 MB for the import of torch.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.common import machine, markdown, write_json

FORMS = ("csv", "quoted csv", "dates csv", "gz csv", "sequence")
RESULTS = Path(__file__).parent / "results" / "read.json"
_SUFFIX = {"gz csv": ".csv.gz", "sequence": ".txt"}
_PIECE = 1 << 18


def write(path: Path, form: str, rows: int) -> None:
    """Writes a log of `rows` rows with rows / 20 users and at most 100,000 items."""
    import gzip

    rng = np.random.default_rng(0)
    users, items = max(rows // 20, 1), min(rows, 100_000)
    with gzip.open(path, "wt", compresslevel=1) if form == "gz csv" else open(path, "w") as file:
        if form != "sequence":
            file.write("user,item,time\n")
        for begin in range(0, rows, _PIECE):
            size = min(_PIECE, rows - begin)
            user = rng.integers(users, size=size)
            item = (items ** rng.random(size)).astype(np.int64)
            clock = 1_400_000_000 + rng.integers(200_000_000, size=size)
            if form == "sequence":
                twenty = item[: size - size % 20].reshape(-1, 20).tolist()
                file.writelines(f"u{u} {' '.join(map(str, line))}\n" for u, line in zip(user, twenty, strict=False))
                continue
            texts = np.datetime_as_string(clock.astype("datetime64[s]")) if form == "dates csv" else clock
            around = '"' if form == "quoted csv" else ""
            triples = zip(user.tolist(), item.tolist(), texts.tolist(), strict=True)
            file.writelines(f"{around}u{u}{around},{around}{i}{around},{t}\n" for u, i, t in triples)


def measure(path: str) -> None:
    """Reads one file and prints the figures as JSON; must run in a process of its own."""
    from fastcl.recsys import Interactions

    wall, cpu = time.perf_counter(), time.process_time()
    report = Interactions.read(path).report
    assert report is not None
    figures = {
        "rows": report.rows,
        "users": report.users,
        "items": report.items,
        "seconds": time.perf_counter() - wall,
        "cpu seconds": time.process_time() - cpu,
        "peak RSS MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    print(json.dumps(figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--measure", metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.measure)
        return
    rows = []
    for form in args.forms:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"log{_SUFFIX.get(form, '.csv')}"
            write(path, form, args.rows)
            megabytes = path.stat().st_size / 2**20
            command = [sys.executable, "-m", "benchmarks.bench_read", "--measure", str(path)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
        rows.append({"form": form, "file MiB": megabytes, **json.loads(done.stdout)})
        print(markdown(rows[-1:]).splitlines()[-1], file=sys.stderr)
        write_json(RESULTS, {"machine": machine(), "results": rows})
    print(markdown(rows))


if __name__ == "__main__":
    main()
