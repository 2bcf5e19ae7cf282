"""The user encoder of a model as a graph, for programs without fastcl: padded item numbers, lengths and times to a
vector, as a program of torch.export or in ONNX.

vectors.py writes the files and compares what a graph computes with the model. Nothing here ranks.
"""

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fastcl.recsys.data import PAD, Histories
from fastcl.recsys.models import Model
from fastcl.recsys.models.base import Reading
from fastcl.recsys.models.batching import Padded, newest

LARGEST = 2**31 - 2**20  # bytes of an ONNX file, less the graph's own
Run = Callable[[Mapping[str, np.ndarray]], np.ndarray]


class Graph(NamedTuple):
    """content: the bytes of the file. run: computes vectors from the file's inputs by name, with what was written."""

    content: bytes
    run: Run


class Encoder(nn.Module):
    """items int64 [B, L], lengths int64 [B], times float64 [B, L] where the model reads times -> vectors [B, D] or
    [B, K, D]. Clicks stand in front, oldest first, and padding behind them, whose numbers and times mean nothing. A row
    whose length is not in 1..L becomes NaN.
    """

    def __init__(self, model: Model, tables: tuple[Tensor, ...], reading: Reading) -> None:
        super().__init__()
        self.model, self.reading, self.count = model, reading, len(tables)
        for nth, table in enumerate(tables):
            self.register_buffer(f"table_{nth}", table)
        self.register_buffer("cuts", torch.tensor(reading.cuts, dtype=torch.float64, device="cpu"))

    def forward(self, items: Tensor, lengths: Tensor, times: Tensor | None = None) -> Tensor:
        width = items.shape[1]
        inside = (lengths >= 1) & (lengths <= width)
        length = lengths.clamp(min=1).minimum(torch.full_like(lengths, width))
        real = torch.arange(width, device=items.device) < length[:, None]
        items = torch.where(real, items, PAD)
        bucket = torch.zeros_like(items)
        if times is not None:
            age = times.gather(1, length[:, None] - 1) - times
            bucket = (age[:, :, None] >= self.get_buffer("cuts")).sum(2)
        if self.reading.token is not None:
            at = torch.arange(width + 1, device=items.device) == length[:, None]
            items = torch.where(at, self.reading.token, nn.functional.pad(items, (0, 1)))
            length, width = length + 1, width + 1
        item = items.flatten()
        about = [nn.functional.embedding(item, self.get_buffer(f"table_{nth}")) for nth in range(self.count)]
        vectors = self.model.user_vectors(about, bucket.flatten(), Padded.of(length, width)).float()
        return torch.where(inside.view(-1, *[1] * (vectors.dim() - 1)), vectors, torch.nan)


class _Read(TorchFunctionMode):
    """Notes the tensors that torch's functions are given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= {id(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        return func(*args, **(kwargs or {}))


def program_of(model: Model) -> torch.export.ExportedProgram:
    """The encoder as a program whose numbers of rows and of clicks are free. ValueError for a model without one."""
    reading = model.reading()
    if model.device.type != "cpu":
        model = copy.deepcopy(model, {id(model.items): model.items}).cpu()
    rows, clicks = 3, min(2, reading.clicks)  # not 1, which torch.export would take for a number that is meant
    given = {"items": torch.ones(rows, clicks, dtype=torch.int64, device="cpu")}
    given["lengths"] = torch.ones(rows, dtype=torch.int64, device="cpu")
    if reading.cuts:
        given["times"] = torch.zeros(rows, clicks, dtype=torch.float64, device="cpu")
    free: dict[int, Any] = {0: torch.export.Dim("rows")}
    if reading.clicks > 1:
        free[1] = torch.export.Dim("clicks", max=reading.clicks)
    shapes = {name: {at: free[at] for at in range(x.dim()) if at in free} for name, x in given.items()}
    with torch.no_grad():
        tables = tuple(_whole(table.detach().float()) for table in model.click_tables())
        with _Read() as read:
            Encoder(model, tables, reading)(**given)
        # A program holds all weights of its module: those that the encoder does not read stay away, and none is copied.
        weights = [*model.parameters(), *model.buffers()]
        shared: dict[int, Any] = {id(x): x if id(x) in read.seen else None for x in weights}
        alone = copy.deepcopy(model, {**shared, id(model.items): model.items})
        encoder = Encoder(alone, tables, reading).eval()
        program = torch.export.export(encoder, (), given, dynamic_shapes=shapes, strict=False)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine
    return program


def _whole(table: Tensor) -> Tensor:
    """The table in memory of its own: a program would be saved with all that a part of a table belongs to."""
    return table if table.untyped_storage().nbytes() == table.nbytes else table.clone()


def torch_graph(model: Model) -> Graph:
    """A program of torch.export, as `torch.export.save` writes it."""
    program = program_of(model)
    file = io.BytesIO()
    torch.export.save(program, file)
    module = torch.export.load(io.BytesIO(file.getvalue())).module()

    def run(inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        with torch.no_grad():
            found: Tensor = module(**{name: torch.from_numpy(array) for name, array in inputs.items()})
        return found.numpy(force=True)

    return Graph(file.getvalue(), run)


def onnx_graph(model: Model) -> Graph:
    """The same program in ONNX."""
    onnxruntime = require_onnx()
    program = program_of(model)
    size = sum(x.numel() * x.element_size() for x in program.state_dict.values())
    if size > LARGEST:
        what = f"at most {LARGEST:,} bytes of weights, which an ONNX file may have, got {size:,}"
        raise ValueError(f"model: expected {what}; to='torch' has no limit")
    with warnings.catch_warnings(), _quiet("torch.onnx"):
        warnings.simplefilter("ignore")  # of the converter about itself
        made: Any = torch.onnx.export(program, dynamo=True, output_names=["vectors"], verbose=False)
    content = made.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def run(inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        found: np.ndarray = session.run(["vectors"], dict(inputs))[0]
        return found

    return Graph(content, run)


@contextlib.contextmanager
def _quiet(logger: str) -> Iterator[None]:
    """A block in which the logger tells errors alone: the converter warns of packages that a model does not need."""
    log = logging.getLogger(logger)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def padded(reading: Reading, histories: Histories) -> dict[str, np.ndarray]:
    """The inputs of a graph: the newest clicks of each history, as wide as the longest of them."""
    spans = newest(histories, reading.clicks)
    lengths = spans.stop - spans.start
    at = np.arange(lengths.max(initial=1))
    real = at < lengths[:, None]
    source = np.where(real, spans.start[:, None] + at, 0)
    inputs = {"items": np.where(real, histories.item[source], PAD), "lengths": lengths}
    if reading.cuts:
        time = np.zeros(len(histories.item)) if histories.time is None else histories.time.astype(np.float64)
        inputs["times"] = np.where(real, time[source], 0.0)
    return inputs


def require_onnx() -> Any:
    """The module onnxruntime; ImportError with the remedy where a package of the `onnx` extra is missing."""
    try:
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        what = "onnx needs the packages onnx, onnxscript and onnxruntime"
        raise ImportError(f"to: {what}: pip install 'fastcl[onnx]'") from error
    return onnxruntime
