"""Tables of what size costs, from scale.json; and what many workers would do, by arithmetic over these figures."""

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.common import markdown, results
from benchmarks.tables_speed import machine

Row = dict[str, Any]

DIM = 64
ITEMS = 10**8
WORKERS = (8, 64, 140)
TARGETS = 256  # of each worker in a step, as in CLRec's paper
NETWORK = 1_250  # MB a second into and out of a worker: 10 Gbit/s
PAPER = {140: (330_000, 500)}  # CLRec's table 5 without features: targets a second, MB a second of a worker


def found(kind: str, **wanted: Any) -> list[Row]:
    return [row for row in results("scale")[kind] if wanted.items() <= row.items()]


def pivot(kind: str, column: str, digits: int) -> str:
    """A row for each number of items, a column for each kind of table and number of processes."""
    rows = found(kind)
    sizes = sorted({row["items"] for row in rows})
    heads = sorted({(row["processes"], row["table"]) for row in rows})

    def cell(size: int, count: int, table: str) -> str | None:
        of = [row[column] for row in rows if (row["items"], row["processes"], row["table"]) == (size, count, table)]
        return f"{of[0]:,.{digits}f}" if of else None

    many = {1: "1 process", 2: "2 processes"}
    return markdown(
        [
            {"items": f"{size:,}", **{f"{table}, {many[count]}": cell(size, count, table) for count, table in heads}}
            for size in sizes
        ]
    )


def over(size: int, count: int) -> str:
    """How many times faster a step by rows is than a dense one."""
    dense, rows = (found("steps", items=size, processes=count, table=table)[0]["ms"] for table in ("dense", "rows"))
    return f"{dense / rows:.1f}"


def first() -> str:
    return markdown([{"clicks": f"{row['clicks']:,}", "seconds": f"{row['ms'] / 1e3:.2f}"} for row in found("first")])


def lists() -> str:
    return markdown(
        [
            {
                "items": f"{row['items']:,}",
                "index": row["index"],
                "export, s": f"{row['export, s']:.0f}",
                "file, MB": f"{row['file, MB']:,.0f}",
                "opening, ms": f"{row['open, ms']:.1f}",
                "recall@50": f"{row['recall@50']:.3f}",
                "search, ms": f"{row['search, ms']:.2f}",
                "list of 50, ms": f"{row['list, ms']:.1f}",
                "without index, ms": f"{row['exact list, ms']:.1f}",
            }
            for row in found("index")
        ]
    )


def saves() -> str:
    return markdown(
        [
            {
                "items": f"{row['items']:,}",
                "table": row["table"],
                "processes": row["processes"],
                "seconds": f"{row['ms'] / 1e3:.1f}",
                "files, MB": f"{row['files, MB']:,.0f}",
            }
            for row in found("saves")
        ]
    )


def spark() -> str:
    return markdown(
        [
            {
                "events": f"{row['rows']:,}",
                "logs, MB": f"{row['logs, MB']:,.0f}",
                f"Spark on {row['master']}, s": f"{row['clicks, s']:.0f}",
                "Parquet, MB": f"{row['clicks, MB']:,.0f}",
                "clicks": f"{row['rows kept']:,}",
                "prepare, s": f"{row['prepare, s']:.0f}",
                "prepared, MB": f"{row['prepared, MB']:,.0f}",
            }
            for row in found("spark")
        ]
    )


def momentum() -> str:
    return markdown(
        [
            {"items": f"{row['items']:,}", "step, ms": f"{row['ms']:.0f}", "memory, MB": f"{row['memory, MB']:,.0f}"}
            for row in found("momentum")
        ]
    )


def measured() -> Row:
    """A step by rows of one process, at the largest catalogue measured."""
    return max(found("steps", table="rows", processes=1), key=lambda row: int(row["items"]))


def bytes_a_row() -> float:
    """Of weights and optimiser: what the memory of one process grows by from one size to the next."""
    large, small = sorted(found("steps", table="rows", processes=1), key=lambda row: -int(row["items"]))[:2]
    return float(1e6 * (large["memory, MB"] - small["memory, MB"]) / (large["items"] - small["items"]))


def traffic(workers: int) -> float:
    """MB that a worker sends in a step: ids and gradients to the owners of rows, and rows to those who ask."""
    return float(measured()["distinct rows"]) * (8 + 8 * DIM) * (workers - 1) / workers / 1e6


def workers() -> str:
    rows = []
    for count in WORKERS:
        compute, network = measured()["CPU ms"], 1e3 * traffic(count) / NETWORK
        a_second = 1e3 / (compute + network)
        theirs = PAPER.get(count)
        rows.append(
            {
                "workers": count,
                "table of a worker, GB": f"{ITEMS * bytes_a_row() / count / 1e9:.1f}",
                "sent in a step, MB": f"{traffic(count):.1f}",
                "step, ms": f"{compute + network:.0f}",
                "of these network": f"{network:.1f}",
                "targets a second, all": f"{count * TARGETS * a_second:,.0f}",
                "MB a second": f"{traffic(count) * a_second:,.0f}",
                "paper: targets a second": f"{theirs[0]:,}" if theirs else None,
                "paper: MB a second": theirs[1] if theirs else None,
            }
        )
    return markdown(rows)


def small_pages() -> str:
    """CPU time of a step by rows of one process."""
    return markdown(
        [
            {
                "items": f"{row['items']:,}",
                "pages of 2 MiB, CPU ms": f"{large['CPU ms']:.0f}",
                "pages of 4 KiB, CPU ms": f"{row['CPU ms']:.0f}",
            }
            for row in found("pages")
            for large in found("steps", items=row["items"], table="rows", processes=1)
        ]
    )


def curves() -> str:
    """NDCG@10 after each epoch, and the largest difference between the two kinds of table in any of the epochs."""
    kinds: dict[str, list[Row]] = {"dense": [], "rows": []}
    for row in results("curves")["rows"]:
        kinds[row["table"]].append(row)
    lines = []
    for dense in kinds["dense"]:
        asked = ("data", "model", "options", "epochs", "seed")
        (rows,) = [row for row in kinds["rows"] if all(row[name] == dense[name] for name in asked)]
        of_each = [[f"{value:.4f}" for value in row["ndcg@10"]] for row in (dense, rows)]
        apart = max(abs(one - other) for one, other in zip(dense["ndcg@10"], rows["ndcg@10"], strict=True))
        settings = ", ".join(f"{name}={value}" for name, value in dense["options"].items())
        lines.append(
            {
                "data": dense["data"].partition("/")[2],
                "model": f"{dense['model']} ({settings})" if settings else dense["model"],
                "seed": dense["seed"],
                "dense": ", ".join(of_each[0]),
                "rows": ", ".join(of_each[1]),
                "largest difference": f"{apart:.6f}",
                "popularity": f"{dense['popularity']:.4f}",
            }
        )
    return markdown(lines)


def largest() -> str:
    return f"{measured()['items']:,}"


TABLES: dict[str, Callable[[], str]] = {
    "scale machine": partial(machine, "scale"),
    "scale steps": partial(pivot, "steps", "ms", 0),
    "scale CPU": partial(pivot, "steps", "CPU ms", 0),
    "scale memory": partial(pivot, "steps", "memory, MB", 0),
    "scale validation": partial(pivot, "validations", "ms", 1),
    "scale workers": workers,
    "scale saves": saves,
    "scale first": first,
    "scale lists": lists,
    "scale spark": spark,
    "scale momentum": momentum,
    "scale pages": small_pages,
    "scale curves": curves,
    "scale largest": largest,
    "scale rows": lambda: f"{measured()['distinct rows']:,.0f}",
    "scale million": partial(over, 10**6, 1),
    "scale million on two": partial(over, 10**6, 2),
    "scale 400,000 on two": partial(over, 400_000, 2),
}
