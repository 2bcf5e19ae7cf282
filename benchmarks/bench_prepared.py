"""What a start of training costs: a generated log as text, as a folder of Parquet and as a prepared folder, and what
its preparation costs.

    python -m benchmarks.bench_prepared --rows 10000000

Item frequencies follow a power law. A user has 25 rows on average, which lie in one Parquet file in no order. Each
figure is of a process of its own. A start is `Interactions.read(...)` and `.split()`: from the path to the data that
`fit` takes, without the import of torch and fastcl. The first batch is that of SASRec with its default settings. Own
memory is what the process gained, without the pages of files, which processes share (Anonymous of smaps_rollup); the
peak is that of its life, which includes 200 to 300 MB for the import.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import machine, markdown, write_json

RESULTS = Path(__file__).parent / "results" / "prepared.json"
PARTS = 16
FORMS = ("text", "parquet", "prepared")
_PIECE = 1 << 20


def write(folder: Path, rows: int, text: bool) -> None:
    """log/part-*.parquet and, where asked for, log.csv: rows / 25 users, at most a million items."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    users, items = rows // 25, min(1_000_000, max(rows // 50, 10))
    upto = np.cumsum(np.arange(1, items + 1) ** -0.8)
    schema = pa.schema([("user", pa.string()), ("item", pa.string()), ("time", pa.int64())])
    (folder / "log").mkdir()
    csv = pyarrow.csv.CSVWriter(folder / "log.csv", schema) if text else None
    for part in range(PARTS):
        count = rows // PARTS
        with pq.ParquetWriter(folder / f"log/part-{part:05}.parquet", schema) as writer:
            for begin in range(0, count, _PIECE):
                size = min(_PIECE, count - begin)
                user = rng.integers(users // PARTS, size=size) * PARTS + part
                item = np.searchsorted(upto, rng.random(size) * upto[-1])
                names = [pa.array(codes).cast(pa.string()) for codes in (user, item)]
                clock = pa.array(1_700_000_000 + rng.integers(10_000_000, size=size))
                piece = pa.table([*names, clock], schema=schema)
                writer.write_table(piece)
                if csv is not None:
                    csv.write_table(piece)
    if csv is not None:
        csv.close()


def own() -> float:
    """MiB of the process that are of no file."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1024


def start(path: str) -> dict[str, Any]:
    """The start of a training from `path`, and its first batch."""
    from fastcl.recsys import Interactions
    from fastcl.recsys.models import batching

    warnings.simplefilter("ignore")
    before, wall, cpu = own(), time.perf_counter(), time.process_time()
    split = Interactions.read(path).split()
    found = {
        "start, s": time.perf_counter() - wall,
        "start, CPU-s": time.process_time() - cpu,
        "own memory, MiB": own() - before,
        "rows": split.data_report.rows if split.data_report else 0,
    }
    before, wall = own(), time.perf_counter()
    spans = next(batching.batched(batching.windows(split.train, 50), 128, np.random.default_rng(0)))
    clicks = batching.pack(spans)
    split.train.item[clicks.source]
    return found | {
        "first batch, s": time.perf_counter() - wall,
        "first batch, MiB": own() - before,
        "peak, MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def preparation(path: str, out: str) -> dict[str, Any]:
    from fastcl.recsys import prepare

    warnings.simplefilter("ignore")
    wall, cpu = time.perf_counter(), time.process_time()
    data = prepare(path, out)
    found = {
        "rows": len(data.log.item),
        "s": time.perf_counter() - wall,
        "CPU-s": time.process_time() - cpu,
        "peak, MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    return found | {"files, MiB": sum(file.stat().st_size for file in Path(out).glob("*/*")) / 2**20}


def alone(*arguments: str) -> dict[str, Any]:
    """The figures of a process that does one thing."""
    command = [sys.executable, "-m", "benchmarks.bench_prepared", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--repeats", type=int, default=5, help="starts from the prepared folder (default: %(default)s)")
    parser.add_argument("--start", metavar="PATH", help=argparse.SUPPRESS)
    parser.add_argument("--prepare", nargs=2, metavar="PATH", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.start or args.prepare:
        print(json.dumps(start(args.start) if args.start else preparation(*args.prepare)))
        return
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    kinds = ("starts", "preparations")
    results = {kind: [row for row in known.get(kind, []) if row["asked"] != args.rows] for kind in kinds}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, args.rows, "text" in args.forms)
        paths = {"text": folder / "log.csv", "parquet": folder / "log", "prepared": folder / "prepared"}
        made = alone("--prepare", str(paths["parquet"]), str(paths["prepared"]))
        results["preparations"].append({"asked": args.rows, **made})
        print(markdown(results["preparations"][-1:]), file=sys.stderr, flush=True)
        for form in args.forms:
            repeats = args.repeats if form == "prepared" else 1
            found = [alone("--start", str(paths[form])) for _ in range(repeats)]
            middle = {key: statistics.median(each[key] for each in found) for key in found[0]}
            results["starts"].append({"asked": args.rows, "form": form, "repeats": repeats, **middle})
            print(markdown(results["starts"][-1:]), file=sys.stderr, flush=True)
    by_size = {kind: sorted(rows, key=lambda row: row["asked"]) for kind, rows in results.items()}
    write_json(RESULTS, {"machine": machine(), **by_size})
    print(markdown(results["starts"]))


if __name__ == "__main__":
    main()
