"""Tensors and a few facts about them in one safetensors file, with a checksum over both.

This module writes files itself, a piece of a tensor at a time and with the header in a fixed order, so that equal
tensors and facts make equal bytes. It reads with the safetensors library and never uses pickle.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastcl.recsys.writing import write_parts

PIECE = 2**22  # bytes
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def tensor_parts(tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file of the tensors (on any device, of any strides). Its metadata holds `facts` and
    the checksum.
    """
    return _content(tensors, facts, digest(tensors, facts))


def _content(
    tensors: Mapping[str, Tensor], facts: Mapping[str, str], checksum: str
) -> Iterator[bytes | memoryview]:
    # The order of safetensors: tensors of the largest elements first, so that all tensors are aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(sorted({**facts, "sha256": checksum}.items()))}
    end = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise TypeError(f"{name}: expected a tensor of {', '.join(_NAMES.values())}, got {tensor.dtype}")
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield from _pieces(tensors[name])


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> str:
    """Replaces the file at `path`, without a second copy of the tensors in memory. Returns the checksum."""
    checksum = digest(tensors, facts)
    write_parts(path, _content(tensors, facts, checksum))
    return checksum


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors on the CPU, facts) of a file that `write_tensors` wrote; ValueError for any other or damaged file."""
    tensors, facts = mapped(path)
    verify(path, tensors, facts)
    facts.pop("sha256")
    return tensors, facts


def mapped(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The same with the checksum among the facts, unchecked. The tensors are the file's own bytes, in no memory until
    they are used.
    """
    with _open(path) as file:
        facts = _facts(path, file)
        try:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except Exception as error:  # SafetensorError shares no base class with the other errors of the library
            raise _damaged(path, error) from error
    return tensors, facts


def verify(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> None:
    """ValueError where the checksum of what `mapped` gave is not that of the file's content."""
    about = {name: value for name, value in facts.items() if name != "sha256"}
    if facts["sha256"] != digest(tensors, about):
        raise ValueError(f"{path}: damaged, its content does not match its checksum")


def read_facts(path: Path) -> dict[str, str]:
    """The facts alone; neither the tensors nor the checksum are read."""
    with _open(path) as file:
        facts = _facts(path, file)
    facts.pop("sha256")
    return facts


def digest(tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> str:
    found = hashlib.sha256()
    for name in sorted(facts.keys() - {"format", "model"}):  # `checkpoint.expect` compares these two directly
        found.update(f"{name} {facts[name]}\n".encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        for piece in _pieces(tensor):
            found.update(piece)
    return found.hexdigest()


def require_safetensors() -> Any:
    """The module safetensors; ImportError with the remedy where the `recsys` extra is missing."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("run folders need the package safetensors: pip install 'fastcl[recsys]'") from error
    return safetensors


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    """The elements in order, as bytes. Where memory holds them in another order, a piece at a time is copied."""
    tensor = tensor.detach().reshape(1) if tensor.ndim == 0 else tensor.detach()
    if tensor.numel() == 0:
        return
    rows = max(1, PIECE // (tensor[0].numel() * tensor.element_size()))
    for piece in tensor.split(rows):
        yield memoryview(piece.cpu().contiguous().view(torch.uint8).numpy()).cast("B")


def _open(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent}: not a whole run folder (no {path.name})")
    path.open("rb").close()  # raises what the system says; safetensors calls a file absent that it may not read
    try:
        return require_safetensors().safe_open(path, "pt")
    except Exception as error:
        if isinstance(error, ImportError | OSError):
            raise
        raise _damaged(path, error) from error


def _facts(path: Path, file: Any) -> dict[str, str]:
    facts = file.metadata() or {}
    if "sha256" not in facts:
        raise ValueError(f"{path}: damaged, or not a file that fastcl saved (it has no checksum)")
    return dict(facts)


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path}: damaged, or not a file that fastcl saved ({error})")
