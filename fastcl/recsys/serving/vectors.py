"""Item vectors for other programs: a NumPy file or a Faiss index with the item ids, and the recall and the time of the
index against exact search; beside the NumPy file perhaps the user encoder as a graph.

`export` checks that inner products of `query_vectors` with the written vectors rank as the model does, and that a graph
computes these queries. Nothing here trains; callers leave out seen items.
"""

import io
import json
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fastcl.recsys.data import Histories
from fastcl.recsys.data.scoring import check_items, frozen
from fastcl.recsys.evaluation.cutoffs import Cutoffs, cutoff
from fastcl.recsys.models import Model
from fastcl.recsys.models.base import check_model, inner_products
from fastcl.recsys.options import one_of
from fastcl.recsys.serving.graph import Graph, onnx_graph, padded, torch_graph
from fastcl.recsys.training.modelstate import digest
from fastcl.recsys.writing import check_folder, write_set

# An export writes vectors or an index, perhaps an encoder, and the rest.
FILES = ("vectors.npy", "index.faiss", "encoder.pt2", "encoder.onnx", "ids.json", "export.json")
QUERIES = 1000  # the most histories with which recall is measured; at least a tenth of these where items are many
PRODUCTS = 2 * 10**8  # queries times items with which recall is measured: about ten seconds of one core
CHUNK = 100  # the most histories that are searched for at once
SCORES = 2**25  # the most scores that are held at once
TIMED = 100  # the most queries that are timed, one by one
IVF_FROM = 200_000  # items from which on an HNSW graph takes minutes to build, and an inverted file seconds
EF_SEARCH = 128  # candidates that a search of an HNSW index keeps; the default of Faiss, 16, misses too many items
PROBES = 32  # the most cells that a search of an inverted file reads; at most a 16th of the cells
TRAIN = 64, 2**16  # vectors a cell, and at least, with which an index is trained


# (queries float32 [B, D], k) -> (scores [B, k], best first; rows of the vectors, int64 [B, k], -1 for no vector)
Search = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]


class Written(NamedTuple):
    """What one choice of `to` writes: the file of vectors first, and facts for export.json."""

    files: dict[str, bytes | memoryview]
    search: Search | None = None
    facts: dict[str, Any] = {}


def index_for(items: int) -> str:
    """The Faiss index of so many items: a graph, or from 200,000 on an inverted file of about sqrt(items) cells.

    >>> index_for(10_000), index_for(10**6)
    ('HNSW32', 'IVF1024,Flat')
    """
    return "HNSW32" if items < IVF_FROM else f"IVF{2 ** round(math.log2(math.sqrt(items)))},Flat"


def export(
    model: Model,
    folder: str | Path,
    to: str = "npy",
    *,
    queries: Histories | None = None,
    k: Cutoffs = 10,
    index: str | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Writes the item vectors of a model, perhaps its user encoder too, to `folder`; returns what export.json has.

        vectors.npy   float32 [I, D], row r is the item ids[r]          to="npy", "torch", "onnx"
        index.faiss   the same vectors in the same order, indexed       to="faiss", needs the extra `ann`
        encoder.pt2   the user encoder, for torch.export.load           to="torch"
        encoder.onnx  the user encoder, for onnxruntime                 to="onnx", needs the extra `onnx`
        ids.json      the I external ids
        export.json   model, items, dim, metric, queries_per_history, a digest of the weights; for "faiss" also the
                      index, its recall@k, the queries, and the median milliseconds of a search for one of them
                      (query_ms) and of exact search (exact_ms), each in this process on torch's threads; with an
                      encoder its inputs, and how many clicks it reads

    Files of an earlier export of other weights in the folder are removed, those of the same weights stay.

    The metric is the inner product, and a query is `query_vectors(model, [["id", ...]])`: temperature, normalisation
    and biases are part of the vectors. Where a history has several queries, `nearest` searches for all of them.
    `recommend(..., index=folder)` uses an index that was written here.

    The encoder computes these queries without fastcl, from `items` int64 [B, L], the numbers of the newest clicks with
    the oldest of them first and anything behind the newest; `lengths` int64 [B], 1 to L; and, if the model has time
    buckets, `times` float64 [B, L] in the unit of the training data. Item r of ids.json has the number r + 1. B and L
    are free, L up to the clicks that export.json names. The output `vectors` is float32, NaN in a row whose length is
    not in 1 to L. It is compared with `query_vectors` before anything is written.

    Args:
        queries: histories to measure recall with, a random 1000 of more, and from 200,000 items on fewer, at least 100;
            None: histories of one random item each, which are unlike real histories.
        k: recall@k is the share of the k best items by exact search that the index finds, averaged over the queries.
        index: a Faiss index factory string; None: HNSW32, and from 200,000 items on an inverted file ("IVF1024,Flat"
            for 10^6), which is built in seconds and opened without being read. HNSW has efSearch=128; IVF reads up to
            32 cells, and at most a 16th of them. Training takes 64 random vectors a cell, and at least 65,536.
        seed: seed of the samples of queries and of vectors.

    Files are replaced whole and together: the old export.json is removed first and the new one written last, so that
    export.json never lies beside files of another export, even where writing was cut off. Raises OSError where `folder`
    is a file; ValueError for a bad option, no queries, queries of another item table, vectors that are not finite, a
    model whose scores no inner product ranks or, with an encoder, one that has none (mf, lightgcn and those of
    fastcl.recsys.baselines); ImportError where Faiss or ONNX is missing.

    >>> from fastcl.recsys import SASRec, bundled
    >>> model = SASRec(bundled("purchases").items, seed=0).eval()
    >>> export(model, "index", to="faiss")["recall@10"]  # doctest: +SKIP
    """
    one_of(WRITERS, "to", to)
    check_model(model)
    k = min(cutoff(k), len(model.items))
    check_folder("folder", folder)
    ids = model.items.ids
    rng = np.random.default_rng(seed)
    about = {"queries": "single items"} if queries is None else {"queries": "histories"}
    if queries is None:
        queries = Histories.from_lists(rng.integers(1, len(ids) + 1, (QUERIES, 1)).tolist())
    if not len(queries):
        raise ValueError("queries: expected at least one history, got none")
    check_items(model, queries, "queries")
    wanted = min(QUERIES, max(QUERIES // 10, PRODUCTS // len(ids)))
    queries = queries.take(np.sort(rng.permutation(len(queries))[:wanted]))
    index = index_for(len(ids)) if index is None else index
    with torch.inference_mode(), frozen(model):
        vectors = model.item_vectors()[1:].float().contiguous()
    # A graph is made without the inference mode, whose tensors torch.export does not take.
    with frozen(model):
        written = WRITERS[to](model, vectors.numpy(force=True), queries, index, rng)
    with torch.inference_mode(), frozen(model):
        recall = _recall(model, vectors, queries, k, written.search)
        clock = {} if written.search is None else _clock(model, vectors, queries, k, written.search)
        per_history = len(model.encode(queries.take(np.zeros(1, np.int64))).flatten(0, -2))
    found = {"model": model.name, "items": len(ids), "dim": vectors.shape[1], "metric": "inner product"}
    found |= {"queries_per_history": per_history}
    (file, content), *_ = written.files.items()
    found |= {"file": file, "bytes": len(content), "weights_sha256": (weights := digest(model)), **written.facts}
    if recall is not None:
        found |= {"index": index, f"recall@{k}": recall, "query_count": len(queries), **about, **clock}
    texts = {"ids.json": json.dumps(list(ids), ensure_ascii=False), "export.json": json.dumps(found, indent=2)}
    files: dict[str, list[bytes | memoryview]] = {
        **{name: [content] for name, content in written.files.items()},
        **{name: [f"{text}\n".encode()] for name, text in texts.items()},
    }
    write_set(Path(folder), files, without=_of_others(Path(folder), weights) - files.keys())
    return found


def _of_others(folder: Path, weights: str) -> set[str]:
    """The files of an earlier export of other weights in the folder, which must not lie beside those of `weights`."""
    try:
        about = json.loads((folder / "export.json").read_bytes())
    except (OSError, ValueError):
        return set()
    own = not isinstance(about, dict) or about.get("weights_sha256") in (None, weights)
    return set() if own else {*FILES}


def nearest(search: Search, queries: np.ndarray, k: Cutoffs) -> tuple[np.ndarray, np.ndarray]:
    """The k best vectors for each history of `query_vectors`: (scores [B, k], rows int64 [B, k]), best first.

    search: `index.search` of Faiss, or a function of the same form. queries: float32 [B, D], or [B, K, D] of a model
        with K vectors per history. Then each of the K vectors is searched for, and a result that several of them find
        counts once, with its largest score. The result is as exact as `search`. Where fewer than k are found, the rest
        is row -1 with score -inf.

    >>> table = np.array([[1, 0], [0, 2], [1, 1]], np.float32)
    >>> def search(queries, k):
    ...     scores = queries @ table.T
    ...     rows = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    ...     return np.take_along_axis(scores, rows, axis=1), rows
    >>> scores, rows = nearest(search, np.array([[[1, 0], [1, 1]]], np.float32), k=2)
    >>> scores.tolist(), rows.tolist()
    ([[2.0, 2.0]], [[1, 2]])
    """
    k = cutoff(k)
    if queries.ndim == 2:
        return search(queries, k)
    scores, rows = (found.reshape(len(queries), -1) for found in search(queries.reshape(-1, queries.shape[-1]), k))
    best = np.argsort(-scores, axis=1, kind="stable")
    scores, rows = (np.take_along_axis(found, best, axis=1) for found in (scores, rows))
    # Scores fall, so that a stable sort by row puts an item's best score first.
    order = np.argsort(rows, axis=1, kind="stable")
    by_row = np.take_along_axis(rows, order, axis=1)
    again = np.zeros_like(rows, bool)
    np.put_along_axis(again, order[:, 1:], by_row[:, 1:] == by_row[:, :-1], axis=1)
    scores[again], rows[again] = -np.inf, -1
    kept = np.argsort(again, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, kept, axis=1), np.take_along_axis(rows, kept, axis=1)


def _recall(
    model: Model,
    vectors: torch.Tensor,
    queries: Histories,
    k: int,
    search: Search | None,
) -> float | None:
    """Recall@k of `search`, or None without it; ValueError where exact search does not find the model's k best."""
    hits = 0
    chunk = max(1, min(CHUNK, SCORES // len(vectors)))
    for start in range(0, len(queries), chunk):
        histories = queries.take(np.arange(start, min(start + chunk, len(queries))))
        query = model.encode(histories).float()
        exact = inner_products(query, vectors).topk(k).indices
        scores = model.scores(histories)[:, 1:]
        if not scores.isfinite().all():
            raise ValueError("model: expected vectors of finite numbers, got NaN or infinity")
        best = scores.topk(k).values
        # Scores are compared instead of items, since rounding may swap items with equal scores.
        if not torch.allclose(scores.gather(1, exact), best, rtol=1e-4, atol=1e-4 * float(best.abs().max())):
            raise ValueError(f"model: expected scores that inner products rank, got others from {model.name}")
        if search is not None:
            near = torch.from_numpy(nearest(search, query.numpy(force=True), k)[1]).to(exact.device)
            hits += int((near[:, :, None] == exact[:, None]).sum())
    return None if search is None else hits / (len(queries) * k)


def _clock(model: Model, vectors: torch.Tensor, queries: Histories, k: int, search: Search) -> dict[str, float]:
    """Median milliseconds of a search for the queries of one history."""
    query = model.encode(queries.take(np.arange(min(TIMED, len(queries))))).float()
    one_by_one = query.numpy(force=True)
    runs: dict[str, Callable[[int], Any]] = {
        "query_ms": lambda nth: nearest(search, one_by_one[nth : nth + 1], k),
        "exact_ms": lambda nth: inner_products(query[nth : nth + 1], vectors).topk(k),
    }
    found = {}
    for name, run in runs.items():
        spent = []
        for nth in range(len(query)):
            begun = time.perf_counter()
            run(nth)
            spent.append(1e3 * (time.perf_counter() - begun))
        found[name] = statistics.median(spent)
    return found


def _npy(model: Model, vectors: np.ndarray, queries: Histories, index: str, rng: np.random.Generator) -> Written:
    file = io.BytesIO()
    np.save(file, vectors)
    return Written({"vectors.npy": file.getbuffer()})


def _encoder(
    name: str,
    make: Callable[[Model], Graph],
    model: Model,
    vectors: np.ndarray,
    queries: Histories,
    index: str,
    rng: np.random.Generator,
) -> Written:
    """The NumPy file, and the graph of `make` under `name`; ValueError where the graph computes other queries."""
    graph, reading = make(model), model.reading()
    some = queries.take(np.arange(min(CHUNK, len(queries))))
    inputs = padded(reading, some)
    with torch.inference_mode():
        expected = model.encode(some).float().numpy(force=True)
    computed = graph.run(inputs)
    size = np.abs(expected).max()
    if computed.shape != expected.shape or not np.abs(computed - expected).max() <= 1e-5 * max(1.0, float(size)):
        raise ValueError(f"model: expected a user encoder whose graph computes the same, got {model.name}")
    about = {"encoder": name, "inputs": {name: f"{x.dtype}" for name, x in inputs.items()}, "clicks": reading.clicks}
    return Written({**_npy(model, vectors, queries, index, rng).files, name: graph.content}, facts=about)


def _faiss(model: Model, vectors: np.ndarray, queries: Histories, index: str, rng: np.random.Generator) -> Written:
    faiss = require_faiss()
    try:
        built = faiss.index_factory(vectors.shape[1], index, faiss.METRIC_INNER_PRODUCT)
        ivf = faiss.try_extract_index_ivf(built)
        if not built.is_trained:
            count = max(TRAIN[1], TRAIN[0] * ivf.nlist if ivf else 0)
            some = np.sort(rng.permutation(len(vectors))[:count])
            built.train(vectors if count >= len(vectors) else vectors[some])
        built.add(vectors)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0].rpartition(": ")[2]
        raise ValueError(f"index: expected a Faiss factory string that fits, got {index!r} ({reason})") from error
    if index.startswith("HNSW"):
        built.hnsw.efSearch = EF_SEARCH
    if ivf:
        ivf.nprobe = max(1, min(PROBES, ivf.nlist // 16))
    return Written({"index.faiss": memoryview(faiss.serialize_index(built))}, built.search)


WRITERS: dict[str, Callable[[Model, np.ndarray, Histories, str, np.random.Generator], Written]] = {
    "npy": _npy,
    "faiss": _faiss,
    "torch": partial(_encoder, "encoder.pt2", torch_graph),
    "onnx": partial(_encoder, "encoder.onnx", onnx_graph),
}


def require_faiss() -> Any:
    """The module faiss; ImportError with the remedy where the `ann` extra is missing."""
    try:
        import faiss
    except ImportError as error:
        raise ImportError("a Faiss index needs the package faiss-cpu: pip install 'fastcl[ann]'") from error
    return faiss
