"""From raw event logs to the Parquet folder that `fastcl data prepare` takes, with Spark on a laptop or a cluster.

    pip install pyspark                                            (and Java 17 or newer)
    python -m examples.spark_clicks make 10000000 logs             events to try it on, as JSON lines
    python -m examples.spark_clicks clicks logs clicks --master 'local[2]'
    fastcl data prepare clicks -o prepared
    fastcl train prepared --model clrec -o run

A line of the logs is {"event": "click", "user": ..., "item": ..., "at": "2026-03-01T12:00:00Z"}. What counts as a
click, and that a click sent twice counts once, stands in `clicks`: change it to your logs.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

FILES = 16
SCHEMA = "event STRING, user STRING, item STRING, at TIMESTAMP"
WHOLE = "event = 'click' AND user IS NOT NULL AND item IS NOT NULL AND at IS NOT NULL"


def make(rows: int, folder: Path) -> None:
    """About `rows` events in files of JSON lines: nine of ten are clicks, one of fifty is sent twice, one of a thousand
    has no user. Users have 25 events on average, in no order; items follow a power law.
    """
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    items = max(rows // 20, 10)
    upto = np.cumsum(np.arange(1, items + 1) ** -0.8)
    for part in range(FILES):
        count = rows // FILES
        user = rng.integers(max(rows // 25, 1), size=count).tolist()
        item = np.searchsorted(upto, rng.random(count) * upto[-1]).tolist()
        second = np.datetime64("2026-01-01") + rng.integers(60 * 86_400, size=count).astype("timedelta64[s]")
        kind = rng.random((3, count))
        with gzip.open(folder / f"events-{part:02}.json.gz", "wt", compresslevel=1) as file:
            for u, i, at, view, none, twice in zip(user, item, second.astype(str), *kind.tolist(), strict=True):
                event = {"event": "view" if view < 0.1 else "click", "user": f"u{u}", "item": f"i{i}", "at": f"{at}Z"}
                if none < 0.001:
                    del event["user"]
                file.write((json.dumps(event) + "\n") * (1 + (twice < 0.02)))


def clicks(spark: Any, logs: str) -> Any:
    """A DataFrame of user, item and time (seconds): each click once, without events that lack a field."""
    events = spark.read.schema(SCHEMA).json(logs)
    once = events.where(WHOLE).dropDuplicates(["user", "item", "at"])
    return once.selectExpr("user", "item", "unix_seconds(at) AS time")


def write(rows: Any, folder: str, files: int) -> None:
    """A Parquet folder in which the rows of a user lie in one file, in their order."""
    rows.repartition(files, "user").sortWithinPartitions("user", "time").write.parquet(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    maker = commands.add_parser("make")
    maker.add_argument("rows", type=int)
    maker.add_argument("folder", type=Path)
    cleaner = commands.add_parser("clicks")
    cleaner.add_argument("logs")
    cleaner.add_argument("out")
    cleaner.add_argument("--master", default="local[*]", help="of Spark (default: %(default)s)")
    cleaner.add_argument("--files", type=int, default=FILES)
    args = parser.parse_args()
    if args.command == "make":
        return make(args.rows, args.folder)
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.master(args.master).config("spark.sql.session.timeZone", "UTC").getOrCreate()
    begun = time.perf_counter()
    write(clicks(spark, args.logs), args.out, args.files)
    print(f"{spark.read.parquet(args.out).count():,} clicks in {time.perf_counter() - begun:.0f} s")
    spark.stop()
    return None


if __name__ == "__main__":
    main()
