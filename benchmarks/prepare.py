"""Makes the data files of examples, tests and studies: downloads the originals, checks them and rewrites them.

    python -m benchmarks.prepare                                      lists the data sets, addresses and checksums
    python -m benchmarks.prepare amazon/Beauty images/digits          downloads and makes these
    python -m benchmarks.prepare text/stsb --originals FOLDER         takes original files from FOLDER

Files are written below --data; its default is the folder in FASTCL_DATA, or ~/.cache/fastcl. An original or a result
whose SHA-256 differs from the one noted here is refused, so that the same files are made everywhere.
docs/results/data-sources.md has the terms of each data set.
"""

import argparse
import gzip
import hashlib
import os
import pickle
import urllib.request
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import markdown

GITHUB = "https://raw.githubusercontent.com"
Files = Mapping[str, bytes]
Make = Callable[[Files], list[bytes]]


def as_it_is(originals: Files) -> list[bytes]:
    """The only original as it is, decompressed if need be."""
    (text,) = originals.values()
    return [gzip.decompress(text) if text[:2] == b"\x1f\x8b" else text]


def from_one(originals: Files) -> list[bytes]:
    """A sequence file with users and items renumbered from 1; the original counts from 0, which is padding here."""
    (text,) = originals.values()
    lines = [" ".join(str(int(number) + 1) for number in line.split()) for line in text.decode().splitlines()]
    return [joined(lines)]


def grouped(originals: Files) -> list[bytes]:
    """Lines of one user each, `user item item ...`, from lines of one interaction each, `user item`."""
    (text,) = originals.values()
    users: dict[str, list[str]] = {}
    for line in text.decode().splitlines():
        user, item = line.split()
        users.setdefault(user, [user]).append(item)
    return [joined([" ".join(line) for line in users.values()])]


def sentence_pairs(originals: Files) -> list[bytes]:
    """Four columns of the STS benchmark's tables: genre, score and the two sentences."""
    tables = [[line.split("\t") for line in text.decode().split("\n") if line] for text in originals.values()]
    return [joined(["\t".join((row[0], f"{float(row[4]):.3f}", *row[5:7])) for row in rows]) for rows in tables]


def citations(originals: Files) -> list[bytes]:
    """The pickles of Planetoid as text: `node label word word ...`, undirected edges, the split. Needs SciPy."""
    index = [int(node) for node in originals["ind.cora.test.index"].split()]
    # Loading a pickle can run code. These files are safe: `prepare` has compared their SHA-256.
    pickled = {name[9:]: content for name, content in originals.items() if "index" not in name}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SciPy has renamed modules since these files were made, and warns
        x = {name: pickle.loads(content, encoding="latin1") for name, content in pickled.items()}
    order = [*range(x["allx"].shape[0]), *index]  # the last two tables have the test nodes, in the order of the index
    words = [row.nonzero()[1] for part in ("allx", "tx") for row in x[part]]
    labels = [int(row.argmax()) for part in ("ally", "ty") for row in x[part]]
    rows = zip(order, labels, words, strict=True)
    nodes = {node: " ".join(map(str, (node, label, *sorted(ones)))) for node, label, ones in rows}
    edges = sorted({(min(a, b), max(a, b)) for a, others in x["graph"].items() for b in others if a != b})
    train = len(x["y"])
    split = {"train": range(train), "val": range(train, train + 500), "test": sorted(index)}
    return [
        joined([nodes[node] for node in sorted(nodes)]),
        joined([f"{a} {b}" for a, b in edges]),
        joined([f"{name} {' '.join(map(str, rows))}" for name, rows in split.items()]),
    ]


def joined(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


class Source(NamedTuple):
    """make: turns the originals into the texts of the files in `made`, in their order. where: address of the folder of
    the originals. originals: name -> SHA-256. made: name -> SHA-256 of the text, which is written to NAME.gz.
    """

    make: Make
    where: str
    originals: Mapping[str, str]
    made: Mapping[str, str]


def sequences(make: Make, name: str, address: str, original: str, made: str) -> Source:
    where, _, file = address.rpartition("/")
    return Source(make, f"{GITHUB}/{where}", {file: original}, {f"{name}.txt": made})


CONTRASTVAE = "YuWang-1024/ContrastVAE/089602579ffbf7c684e1887c28d39a63e3ad20c2/data"
SASREC = "kang205/SASRec/e3738967fddab206d6eeb4fda433e7a7034dd8b1/data"
BERT4REC = "FeiSun/BERT4Rec/615eaf2004abecda487a38d5b0c72f3dcfcae5b3/data"
STSB = "zhangzhenhu/Semantic-Texual-Similarity-Toolkits/c55a72f51bd15a8bd75114247c06984b432050f9/data/stsbenchmark"
GCN = "tkipf/gcn/39a4089fe72ad9f055ed6fdb9746abdcfebc4d81/gcn/data"
SKLEARN = "scikit-learn/scikit-learn/5f920ef810b73e0f475a93450f11a791b4c0fc44/sklearn/datasets/data"

SOURCES: dict[str, Source] = {
    "amazon/Beauty": sequences(
        as_it_is,
        "amazon/Beauty",
        f"{CONTRASTVAE}/Beauty.txt",
        "226cce9c3105299ca0db9615d7d3fb32b3175e90da43100ae352599f0f0107b8",
        "226cce9c3105299ca0db9615d7d3fb32b3175e90da43100ae352599f0f0107b8",
    ),
    "amazon/Toys_and_Games": sequences(
        as_it_is,
        "amazon/Toys_and_Games",
        f"{CONTRASTVAE}/Toys_and_Games.txt",
        "176c680c688d497598c4a89a03b402c0fe78d795e5db335c2e78dd5f2d778a3f",
        "176c680c688d497598c4a89a03b402c0fe78d795e5db335c2e78dd5f2d778a3f",
    ),
    "amazon/Tools_and_Home_Improvement": sequences(
        from_one,
        "amazon/Tools_and_Home_Improvement",
        f"{CONTRASTVAE}/Tools_and_Home_Improvement.txt",
        "16eebac18159504fe32d42bb650d157fb535d04b20e2bb43b452b33450d2677b",
        "da9823825eb73e2093e85946a935e5f4818420a89b07b63e04414ce720056f9c",
    ),
    "amazon/Office_Products": sequences(
        from_one,
        "amazon/Office_Products",
        f"{CONTRASTVAE}/Office_Products.txt",
        "adc4056de39e8bf939ddc9fd059e555b5f940fbdce33f9aaf4bcbb6dd4aa36e2",
        "c83c66b0ffa34e5d942ea4dbf3481c9effb0c099099a0ebc02345cd67a7d81a5",
    ),
    "amazon/Beauty_bert4rec": sequences(
        grouped,
        "amazon/Beauty_bert4rec",
        f"{BERT4REC}/beauty.txt",
        "f480b7a7403852342ffd8f9809bb30697dd669be31813d0e204b698fec86ef49",
        "98047c99c3b1229c625a33bf556b24d71ef4b41939b916ad47ace1f93d47b801",
    ),
    "movielens/ml-1m": sequences(
        grouped,
        "movielens/ml-1m",
        f"{SASREC}/ml-1m.txt",
        "b725f3acb3986fe3130bffd1e77a74d182a1f51799567a236dbd60270f95b0a2",
        "f939258a859d16e43055e80bf8f7d66aeae3805fa21cb1b999fbafa9c6c5694b",
    ),
    "images/digits": Source(
        as_it_is,
        f"{GITHUB}/{SKLEARN}",
        {"digits.csv.gz": "09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22"},
        {"images/digits.csv": "6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8"},
    ),
    "text/stsb": Source(
        sentence_pairs,
        f"{GITHUB}/{STSB}",
        {
            "sts-train.csv": "0f71910b59aa1ad973c5897f0791f3b0965a92b8f82b1a95f3eea9f4162fda82",
            "sts-dev.csv": "5d7e944d8b02734b07bfdb5df67db3420c64bed153fcaa1ba47ad03480cf4234",
            "sts-test.csv": "affe45928a66ee5a708531233c95b7dacbbdc57f974f002a3d32ea0180cf816a",
        },
        {
            "text/stsb-train.tsv": "12514bd902c09bdab1db7d99165d460cd045167543259787afc7d84638c4c42d",
            "text/stsb-dev.tsv": "62b099195b3729895227df0f586d9d23dfa25f67326aadd6a8b0bfaf999135be",
            "text/stsb-test.tsv": "01de4493ff03d222be4ace5d84a78df9078679bc0f4041934d9f0b8bb1a0a48b",
        },
    ),
    "graph/cora": Source(
        citations,
        f"{GITHUB}/{GCN}",
        {
            "ind.cora.y": "94465c14eb53e04ca262198dcbb2521ee8af60fb3f3d546cd6ca24a511b0e7d1",
            "ind.cora.tx": "b9afbaa4a400df991f6f02ef677e1e44da55ffc04801fd02f9e673987829226a",
            "ind.cora.ty": "41f5ac76596a1699cc33f53084a2419e92961c42bb75f36fc38e616d348532ad",
            "ind.cora.allx": "9419ba2f26f5c35243db64aba110e0f35a04851609e0dc5433450676ca6b8543",
            "ind.cora.ally": "2b998f5cc7fedc86e7f97ca2498f47a1ffc1462c29e2d578b23bf3f62b6e7d71",
            "ind.cora.graph": "58f13302f39dde8852dad6fe6d15b89b077b6d7f837626bce671ef80344b383d",
            "ind.cora.test.index": "297ce89af2b51a6a194181c7dbe1796c6a1cf9cd9349a88383b1b1e227867875",
        },
        {
            "graph/cora.nodes.txt": "d4542e8c65bb7fd6cce19a2581bb5aa14d424e72aaba62fe0d78b73db2fee225",
            "graph/cora.edges.txt": "75e53a6dd7ff2ead7b2fcc3e31e6319debdb33f5537eeb24054e16535cfa277e",
            "graph/cora.split.txt": "c49118bcfa27da5a1570765e3daff58442ad419d62e5c4afc7eb7917da2d0a36",
        },
    ),
}


def data_folder() -> Path:
    """The folder in FASTCL_DATA, or fastcl in the user's cache folder."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("FASTCL_DATA") or caches / "fastcl")


def ready(name: str, folder: Path | None = None) -> Path:
    """The folder with the files of `name`. If a file is missing, all are downloaded and made."""
    folder = data_folder() if folder is None else folder
    if not all((folder / f"{file}.gz").is_file() for file in SOURCES[name].made):
        prepare(name, folder, partial(fetched, SOURCES[name].where))
    return folder


def prepare(name: str, folder: Path, original: Callable[[str], bytes]) -> list[Path]:
    """Makes the files of `name` below `folder`; ValueError if the SHA-256 of an original or a result is wrong."""
    source = SOURCES[name]
    originals = {file: checked(file, original(file), expected) for file, expected in source.originals.items()}
    paths = []
    for (file, expected), text in zip(source.made.items(), source.make(originals), strict=True):
        checked(file, text, expected)
        path = folder / f"{file}.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_bytes(gzip.compress(text, mtime=0))
        part.replace(path)
        paths.append(path)
    return paths


def checked(name: str, content: bytes, expected: str) -> bytes:
    found = hashlib.sha256(content).hexdigest()
    if found != expected:
        raise ValueError(f"{name}: expected SHA-256 {expected}, got {found}")
    return content


def fetched(where: str, file: str) -> bytes:
    with urllib.request.urlopen(f"{where}/{file}") as answer:
        return answer.read()


def lying(folder: Path, file: str) -> bytes:
    return (folder / file).read_bytes()


def listing() -> str:
    return markdown(
        [
            {"name": name, "from": f"{source.where}/{original}", "SHA-256 of the original": expected}
            for name, source in SOURCES.items()
            for original, expected in source.originals.items()
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="data sets to make; without any, all are listed")
    parser.add_argument("--data", type=Path, default=data_folder(), metavar="FOLDER", help="(default: %(default)s)")
    parser.add_argument("--originals", type=Path, metavar="FOLDER", help="take originals from here, download nothing")
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in SOURCES]
    if unknown:
        parser.error(f"NAME: expected some of {', '.join(SOURCES)}, got {', '.join(unknown)}")
    if not args.names:
        print(listing())
    for name in args.names:
        get = partial(fetched, SOURCES[name].where) if args.originals is None else partial(lying, args.originals)
        for path in prepare(name, args.data, get):
            print(path)


if __name__ == "__main__":
    main()
