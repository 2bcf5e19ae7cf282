"""Tensor files of several processes: of tables that are cut by rows each process writes its own rows to a part, a file
of its own, and the first process then the file that names all parts.

    last.safetensors                                   what all processes have alike; names and checksums of the parts
    last-0-of-2-1f0c2ab97d3e4f56.safetensors           rows 0, 2, 4, ... of the cut tensors
    last-1-of-2-93ab0d6c2e7f1840.safetensors           rows 1, 3, 5, ...

Parts have new names at each save, and the file that names them is replaced at once: a process that is killed at any
moment leaves a file whose parts are whole. Parts that no file names are removed after that. Any number of processes
reads them. Which tensors there are is the caller's affair.
"""

import json
import math
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from fastcl.recsys import schema
from fastcl.recsys.training import processes, tensorfile

_PART = re.compile(r"(?P<file>[a-z]+)-\d+-of-\d+-[0-9a-f]{16}\.safetensors")
FACT = "parts"  # in the header of the file that names them


class Share(NamedTuple):
    """Rows rank, rank + of, ... of each cut tensor."""

    rank: int
    of: int


ALL = Share(0, 1)


def own_share() -> Share:
    return Share(processes.rank(), processes.count())


def found_in(folder: Path) -> list[Path]:
    """The parts in a folder, whether a file names them or not."""
    return sorted(path for path in folder.glob("*.safetensors") if is_part(path.name))


def is_part(name: str) -> bool:
    return _PART.fullmatch(name) is not None


def write(path: Path, tensors: Mapping[str, Tensor], cut: Mapping[str, Tensor], facts: Mapping[str, str]) -> None:
    """Replaces the file at `path`. Every process calls this function; no tensor is copied.

    tensors: alike in all processes; cut: this process's rows of the others.
    """
    if processes.count() > 1 and cut:
        rank, of = own_share()
        part = path.with_name(f"{path.stem}-{rank}-of-{of}-{secrets.token_hex(8)}.safetensors")
        try:
            with processes.together():
                checksum = tensorfile.write_tensors(part, cut, facts)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        told = [json.loads(data) for data in processes.collect(json.dumps([part.name, checksum]).encode())]
        facts = {**facts, FACT: json.dumps(told)}
    else:
        tensors = {**tensors, **cut}
    with processes.together():
        if processes.leads():
            tensorfile.write_tensors(path, tensors, facts)
            sweep(path)


def sweep(path: Path) -> None:
    """Removes the parts that the file at `path` does not name: those of earlier saves, and of saves that were killed.
    """
    named = {part.name for part, _ in _named(path, tensorfile.read_facts(path))} if path.is_file() else set()
    for part in found_in(path.parent):
        if part.name not in named and part.name.startswith(f"{path.stem}-"):
            part.unlink(missing_ok=True)


def read(
    path: Path, cut: Collection[str] = (), share: Share = ALL, every: bool = False
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors on the CPU, facts) of a file that `write` wrote: of the tensors named in `cut` the rows of `share`, of
    others all rows. ValueError for any other or damaged file.

    Of a share's processes each checks other parts, unless `every` asks for all; a part that is not checked may be
    damaged.
    """
    while True:
        tensors, facts = tensorfile.read_tensors(path)
        try:
            parts = _opened(path, facts, ALL if every else share)
            break
        except FileNotFoundError as error:
            if tensorfile.read_facts(path).get(FACT) == facts.get(FACT):  # else a training has replaced it meanwhile
                raise ValueError(f"{path}: damaged, one of its parts is missing ({error})") from error
    facts.pop(FACT, None)
    if not parts:
        rank, of = share
        return {name: tensor[rank::of] if name in cut else tensor for name, tensor in tensors.items()}, facts
    names = parts[0].keys()
    if any(part.keys() != names for part in parts) or names & tensors.keys():
        raise ValueError(f"{path}: damaged, its parts do not hold the rows of the same tensors")
    for name in names:
        rows = joined([part[name] for part in parts], share if name in cut else ALL)
        if rows is None:
            raise ValueError(f"{path}: damaged, its parts do not hold all rows of {name}")
        tensors[name] = rows
    return tensors, facts


def joined(parts: Sequence[Tensor], share: Share) -> Tensor | None:
    """The rows of `share` of a tensor [rows, ...] that is cut into `parts`; None where these do not fit together."""
    count, total = len(parts), sum(len(part) if part.ndim else 0 for part in parts)
    rank, of = share
    like = (parts[0].dtype, parts[0].shape[1:])
    for number, part in enumerate(parts):
        if part.ndim == 0 or len(part) != len(range(number, total, count)) or (part.dtype, part.shape[1:]) != like:
            return None
    if count == of:
        return parts[rank]
    found = parts[0].new_empty(len(range(rank, total, of)), *parts[0].shape[1:])
    step = math.lcm(count, of)
    for first in range(rank, min(step, total), of):  # of the rows first, first + step, ... one part has all
        found[first // of :: step // of] = parts[first % count][first // count :: step // count]
    return found


def _opened(path: Path, facts: Mapping[str, str], share: Share) -> list[dict[str, Tensor]]:
    """The tensors of all parts, of which those of `share` are checked."""
    found = []
    for number, (part, checksum) in enumerate(_named(path, facts)):
        tensors, about = tensorfile.mapped(part)
        if about["sha256"] != checksum:
            raise ValueError(f"{part}: damaged, or not the part that {path.name} names")
        if number % share.of == share.rank:
            tensorfile.verify(part, tensors, about)
        found.append(tensors)
    return found


def _named(path: Path, facts: Mapping[str, str]) -> list[tuple[Path, str]]:
    where = f"{path}: {FACT}"
    told = schema.parse(facts.get(FACT, "[]"), where)
    schema.fits(told, list[list[str]], where)
    for entry in told:
        match = _PART.fullmatch(entry[0]) if len(entry) == 2 else None
        if match is None or match["file"] != path.stem:
            raise ValueError(f"{where}: expected names and checksums of files of it, got {schema.short(entry)}")
    return [(path.with_name(name), checksum) for name, checksum in told]
