"""The source of a run's data: what config.json calls "data" and "split", read again whenever a run needs its data.

This module knows which reader serves a path and which paths cannot be read twice. It knows no command line, no models.
"""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fastcl.recsys import schema
from fastcl.recsys.data import Interactions, Items, Split, bundled
from fastcl.recsys.data.features import more_items
from fastcl.recsys.data.interactions import OF_ITEMS
from fastcl.recsys.data.merging import merge
from fastcl.recsys.data.prepared import is_prepared
from fastcl.recsys.data.reading.formats import ItemForm, Options, named_format

BUNDLED = "bundled:"
PIPE = "pipe:"  # marks a path in config.json that was read once and cannot be read again
READ = tuple(field.name for field in fields(Options))
FEATURES = ("item_features", *OF_ITEMS)
STDIN = "/dev/stdin"
CLICKS = ("path", "valid", "test")
FILES = (*CLICKS, "item_features")
PRESPLIT = ("targets", "hold_out")


@dataclass(frozen=True)
class Source:
    """The clicks of a run, how they are read and how they are split.

    data: config.json's "data": "path" (a file, or bundled:NAME), "valid" and "test" (files of a split that was made
        elsewhere), "item_features", and options of `Interactions.read`. Empty where the run names no data.
    how: config.json's "split", the arguments of `Interactions.split`; the method `split` checks them.
    folder: the run's folder, which errors name; None outside of a run.
    """

    data: Mapping[str, Any]
    how: Any = field(default_factory=dict)
    folder: Path | None = field(default=None, compare=False)

    @classmethod
    def recorded(cls, config: Mapping[str, Any], folder: str | Path | None = None) -> "Source":
        """The source that the content of a config.json names; ValueError where its "data" has other types than reading
        expects.
        """
        data = _checked(config["data"]) if config.get("data") else {}
        return cls(data, config.get("split") or {}, None if folder is None else Path(folder))

    @classmethod
    def of_run(cls, folder: Path, config: Mapping[str, Any], path: str | Path | None = None) -> "Source":
        """The source of a run whose data is needed, at `path` or where training found it. ValueError where neither is
        known.
        """
        found = cls.recorded(config, folder)
        if path is None and not found.data:
            raise ValueError(f"{folder}: its config.json names no data; expected --data FILE")
        return found.at(str(path)) if path else found

    def to_json(self) -> dict[str, Any]:
        """ "data" and "split" for a config.json. Pipes are marked, since they cannot be read again."""
        pipes = {name: f"{PIPE}{self.data[name]}" for name in self.files if is_pipe(self.data[name])}
        return {"data": {**self.data, **pipes}, "split": self.how}

    @property
    def files(self) -> dict[str, str]:
        """The paths among `data`, by name."""
        return {name: self.data[name] for name in FILES if self.data.get(name)}

    def at(self, path: str) -> "Source":
        """The same source with its clicks at another path. Where the name of that path tells no format (a pipe's does
        not), the format is that of the first path. The other files that are not where they were (valid, test, item
        features) are looked for beside it.
        """
        if is_prepared(path):
            return replace(self, data=_checked({**{n: v for n, v in self.data.items() if n not in READ}, "path": path}))
        told = self.data.get("format") or self.data.get("delimiter") or named_format(Path(path)) or Path(path).is_dir()
        alike = {} if told else {"format": named_format(Path(self.data.get("path", "")))}
        for name, file in self.files.items():
            if name != "path" and not Path(file).exists():
                beside = Path(path).with_name(Path(file).name)
                alike |= {name: str(beside)} if beside.exists() else {}
        return replace(self, data=_checked({**self.data, "path": path, **alike}))

    def read(self) -> Interactions:
        """The log at `path`, without the files of a split that was made elsewhere.

        Raises ValueError where no path is named, FileNotFoundError for a pipe that is gone, and what
        `Interactions.read` raises.
        """
        self._check_there()
        path = self.data["path"]
        if path.startswith(BUNDLED):
            try:
                return bundled(path.removeprefix(BUNDLED))
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
        return Interactions.read(path, **self._reading)

    def read_clicks(self, *paths: str) -> Interactions:
        """The logs at `paths` as one log; without `paths`, those at `path`, `valid` and `test`.

        The item features are not read: the model holds them, and their file may have moved.
        """
        bare = replace(self, data={name: value for name, value in self.data.items() if name not in FEATURES})
        own = [bare.data[name] for name in CLICKS if bare.data.get(name)]
        return merge(*(bare.at(path).read() for path in paths or own))

    def more_items(self, items: Items, path: str) -> Items:
        """`items` followed by those of the table at `path`, which is written like the item features of the run."""
        of = {**{field.name: field.default for field in fields(Options)}, **OF_ITEMS, **self.data}
        encoding = of["item_encoding"] or of["encoding"]
        form = ItemForm(
            of["item_format"], of["item_delimiter"], of["item_columns"], encoding, of["quote"], of["missing"]
        )
        return more_items(items, path, item=of["item"], separator=of["separator"], title=of["title"], form=form)

    def split(self) -> Split:
        """The data, read and split. Raises what `read` and `Interactions.split` raise."""
        try:
            self._check_there()
            if self.data.get("test"):
                own = {name: self.data[name] for name in PRESPLIT if name in self.data}
                train, valid, test = (self.data.get(name) for name in CLICKS)
                seed = self._how().get("seed", 0)
                return Interactions.presplit(train, valid, test, seed=seed, **own, **self._reading)
            return self.divide(self.read())
        except FileNotFoundError as error:
            if error.filename is None or self.folder is None:
                raise  # the text of the error says what is missing: a pipe, or a bundled set
            where = f"the data of {self.folder} is not there; --data FILE says where it is"
            if error.filename == self.data.get("item_features"):
                where = f"the item features of {self.folder} are not there; they may also lie beside the FILE of --data"
            elif error.filename in (self.data.get("valid"), self.data.get("test")):
                where = f"the data of {self.folder} is not whole; this file may also lie beside the FILE of --data"
            raise FileNotFoundError(f"{error.filename}: {where}") from error

    def divide(self, log: Interactions) -> Split:
        """A log, split as `how` says; ValueError where `how` has other types than splitting expects."""
        return log.split(**self._how())

    def _how(self) -> dict[str, Any]:
        where = "config.json: split"
        schema.fits(self.how, dict[str, Any], where)
        schema.keys_fit(self.how, Interactions.split, where, skip=("self",))
        return dict(self.how)

    @property
    def _reading(self) -> dict[str, Any]:
        return {name: self.data[name] for name in (*READ, *FEATURES) if name in self.data}

    def _check_there(self) -> None:
        if not self.data:
            raise ValueError("data: expected the data of the run, which its config.json does not name, got none")
        for name, path in self.files.items():
            if path.startswith(PIPE):
                what = "data" if name == "path" else name
                hint = "expected a file that holds the same: --data FILE" if name == "path" else "expected a file"
                gone = f"was read from the pipe {path.removeprefix(PIPE)}, which is gone"
                raise FileNotFoundError(f"{what}: {gone}; {hint}")


def is_pipe(path: str) -> bool:
    """Whether `path` is there and neither a file nor a folder, so that it can be read once only."""
    try:
        mode = os.stat(STDIN if path == "-" else path).st_mode
    except OSError:  # bundled:NAME, or a file that has been removed
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _checked(data: Any) -> dict[str, Any]:
    """config.json's "data", with the types that reading expects; ValueError otherwise."""
    where = "config.json: data"
    schema.fits(data, dict[str, Any], where)
    if not data.get("path"):
        raise ValueError(f"{where}: expected a path, got none")
    given = {name: data[name] for name in (*READ, *OF_ITEMS) if name in data}
    schema.keys_fit(given, Interactions.read, where, skip=("cls", "source"))
    for name in FILES:
        schema.fits(data.get(name), str | None, f"{where}: {name}")
    own = {name: data[name] for name in PRESPLIT if name in data}
    schema.keys_fit(own, Interactions.presplit, where, skip=("cls", "train", "valid", "test"))
    return {**data, "path": STDIN if data["path"] == "-" else data["path"]}
