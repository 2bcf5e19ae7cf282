"""Item vectors for other programs: a NumPy file or a Faiss index with the item ids, and the recall of the index against
exact search.

`export` checks that inner products of `query_vectors` with the written vectors rank as the model does. Nothing here
trains; callers leave out seen items.
"""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fastcl.recsys.data import Histories
from fastcl.recsys.data.scoring import check_items, frozen
from fastcl.recsys.evaluation.cutoffs import Cutoffs, cutoff
from fastcl.recsys.models import Model
from fastcl.recsys.models.base import inner_products
from fastcl.recsys.options import one_of
from fastcl.recsys.writing import check_folder, write_set

FILES = ("vectors.npy", "index.faiss", "ids.json", "export.json")  # an export writes one of the first two, and the rest
QUERIES = 1000  # the most histories with which recall is measured
CHUNK = 100  # the most histories that are searched for at once
INDEX = "HNSW32"
EF_SEARCH = 128  # candidates that a search of an HNSW index keeps; the default of Faiss, 16, misses too many items


# (queries float32 [B, D], k) -> (scores [B, k], best first; rows of the vectors, int64 [B, k], -1 for no vector)
Search = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]


class Written(NamedTuple):
    file: str
    content: bytes
    search: Search | None


def export(
    model: Model,
    folder: str | Path,
    to: str = "npy",
    *,
    queries: Histories | None = None,
    k: Cutoffs = 10,
    index: str = INDEX,
    seed: int = 0,
) -> dict[str, Any]:
    """Writes the item vectors of a model to `folder` and returns the content of export.json.

        vectors.npy   float32 [I, D], row r is the item ids[r]          to="npy"
        index.faiss   the same vectors in the same order, indexed       to="faiss", needs the extra `ann`
        ids.json      the I external ids
        export.json   model, items, dim, metric, queries_per_history; for "faiss" also the index, its recall@k and the
                      queries

    The metric is the inner product, and a query is `query_vectors(model, [["id", ...]])`: temperature, normalisation
    and biases are part of the vectors. Where a history has several queries, `nearest` searches for all of them.

    Args:
        queries: histories to measure recall with, a random 1000 of more; None: histories of one random item each, which
            are unlike real histories.
        k: recall@k is the share of the k best items by exact search that the index finds, averaged over the queries.
        index: a Faiss index factory string. The index is trained where it needs training; HNSW has efSearch=128.
        seed: seed of the sample of queries.

    Files are replaced whole and together: the old export.json is removed first and the new one written last, so that
    export.json never lies beside files of another export, even where writing was cut off. Raises OSError where `folder`
    is a file; ValueError for a bad option, no queries, queries of another item table, vectors that are not finite, or a
    model whose scores no inner product ranks; ImportError where Faiss is missing.

    >>> from fastcl.recsys import SASRec, bundled
    >>> model = SASRec(bundled("purchases").items, seed=0).eval()
    >>> export(model, "index", to="faiss")["recall@10"]  # doctest: +SKIP
    """
    one_of(WRITERS, "to", to)
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
    queries = queries.take(np.sort(rng.permutation(len(queries))[:QUERIES]))
    with torch.inference_mode(), frozen(model):
        vectors = model.item_vectors()[1:].float().contiguous()
        written = WRITERS[to](vectors.numpy(force=True), index)
        recall = _recall(model, vectors, queries, k, written.search)
        per_history = len(model.encode(queries.take(np.zeros(1, np.int64))).flatten(0, -2))
    found = {"model": model.name, "items": len(ids), "dim": vectors.shape[1], "metric": "inner product"}
    found |= {"queries_per_history": per_history}
    found |= {"file": written.file}
    if recall is not None:
        found |= {"index": index, f"recall@{k}": recall, "query_count": len(queries), **about}
    texts = {"ids.json": json.dumps(ids, ensure_ascii=False), "export.json": json.dumps(found, indent=2)}
    write_set(
        Path(folder),
        {written.file: [written.content], **{name: [f"{text}\n".encode()] for name, text in texts.items()}},
    )
    return found


def nearest(search: Search, queries: np.ndarray, k: Cutoffs) -> tuple[np.ndarray, np.ndarray]:
    """The k best vectors for each history of `query_vectors`: (scores [B, k], rows int64 [B, k]), best first.

    search: `index.search` of Faiss, or a function of the same form. queries: float32 [B, D], or [B, K, D] of a model
        with K vectors per history. Then each of the K vectors is searched for, and a result that several of them find
        counts once, with its largest score. The result is as exact as `search`.

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
    for start in range(0, len(queries), CHUNK):
        histories = queries.take(np.arange(start, min(start + CHUNK, len(queries))))
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


def _npy(vectors: np.ndarray, index: str) -> Written:
    file = io.BytesIO()
    np.save(file, vectors)
    return Written("vectors.npy", file.getvalue(), None)


def _faiss(vectors: np.ndarray, index: str) -> Written:
    faiss = require_faiss()
    try:
        built = faiss.index_factory(vectors.shape[1], index, faiss.METRIC_INNER_PRODUCT)
        if not built.is_trained:
            built.train(vectors)
        built.add(vectors)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0].rpartition(": ")[2]
        raise ValueError(f"index: expected a Faiss factory string that fits, got {index!r} ({reason})") from error
    if index.startswith("HNSW"):
        built.hnsw.efSearch = EF_SEARCH
    return Written("index.faiss", faiss.serialize_index(built).tobytes(), built.search)


WRITERS: dict[str, Callable[[np.ndarray, str], Written]] = {"npy": _npy, "faiss": _faiss}


def require_faiss() -> Any:
    """The module faiss; ImportError with the remedy where the `ann` extra is missing."""
    try:
        import faiss
    except ImportError as error:
        raise ImportError("a Faiss index needs the package faiss-cpu: pip install 'fastcl[ann]'") from error
    return faiss
