"""Settings of a model: `--set key=value` of every type that a field may have, what `help` tells of them, and a config
beside keywords.
"""

import enum
import pydoc
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Optional

import pytest
import torch
from made import LEARNED

from fastcl.recsys import CLRecConfig, Items
from fastcl.recsys.models import MODELS
from fastcl.recsys.models.clrec.encoders import ENCODERS, FEATURES
from fastcl.recsys.models.clrec.objectives import DUPLICATES, OBJECTIVES
from fastcl.recsys.models.clrec.propensities import PROPENSITIES
from fastcl.recsys.models.clrec.queues import SOURCES
from fastcl.recsys.options import parse_settings
from fastcl.recsys.settings import settings_of, shortened


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass
class Config:
    number: int = 1
    rate: float = 1.0
    name: str = ""
    flag: bool = True
    limit: int | None = None
    old: Optional[float] = None  # noqa: UP045
    text: str | None = None
    either: str | int = 0
    kind: Literal["a", "b", 3, True] = "a"
    maybe: Literal["a"] | None = None
    colour: Colour = Colour.RED
    sizes: tuple[int, ...] = ()
    pair: tuple[int, str] = (1, "a")
    flags: tuple[bool, ...] = ()
    table: dict[str, int] = field(default_factory=dict)
    anything: Any = None
    mixed: int | list[int] = 0
    hidden: int = field(default=0, init=False)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("number=-3", -3),
        ("rate=1e-3", 1e-3),
        ("name=", ""),
        ("name=a=b,c", "a=b,c"),
        *((f"flag={word}", True) for word in ("true", "True", "yes", "on", "1")),
        *((f"flag={word}", False) for word in ("false", "False", "FALSE", "no", "off", "0")),
        ("limit=5", 5),
        ("limit=none", None),
        ("limit=None", None),
        ("old=0.5", 0.5),
        ("old=none", None),
        ("text=none", None),
        ("text=some", "some"),
        ("either=7", 7),
        ("either=seven", "seven"),
        ("kind=b", "b"),
        ("kind=3", 3),
        ("kind=True", True),
        ("maybe=a", "a"),
        ("maybe=none", None),
        ("colour=BLUE", Colour.BLUE),
        ("sizes=", ()),
        ("sizes=1,2,3", (1, 2, 3)),
        ("pair=2,b", (2, "b")),
        ("flags=false,true", (False, True)),
    ],
)
def test_every_type_of_a_field_is_parsed(text: str, value: object) -> None:
    (found,) = parse_settings(Config, [text]).values()
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("number=1.5", "--set number: expected a whole number, got '1.5'"),
        ("flag=maybe", "--set flag: expected true or false, got 'maybe'"),
        ("flag=", "--set flag: expected true or false, got ''"),
        ("limit=x", "--set limit: expected a whole number or none, got 'x'"),
        ("kind=c", "--set kind: expected one of a, b, 3, True, got 'c'"),
        ("maybe=b", "--set maybe: expected one of a or none, got 'b'"),
        ("colour=GREEN", "--set colour: expected one of RED, BLUE, got 'GREEN'"),
        ("sizes=1,x", "--set sizes: expected values separated by commas, each a whole number, got '1,x'"),
        ("pair=1", "--set pair: expected a whole number, a text, with commas, got '1'"),
        ("table=x", r"--set table: Config declares it as dict\[str, int\], which no text stands for"),
        ("anything=x", r"--set anything: Config declares it as (typing.)?Any, which no text stands for"),
        ("mixed=x", r"--set mixed: Config declares it as list\[int\], which no text stands for"),
        ("hidden=1", "--set: Config has no field 'hidden'"),
    ],
)
def test_what_no_text_stands_for_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_settings(Config, [text])


@pytest.mark.parametrize("model", MODELS)
def test_defaults_of_every_model_can_be_set(model: str) -> None:
    defaults = vars(MODELS[model].Config())
    texts = {k: ",".join(map(str, v)) if isinstance(v, tuple) else str(v) for k, v in defaults.items()}
    assert parse_settings(MODELS[model].Config, [f"{key}={text}" for key, text in texts.items()]) == defaults


@pytest.mark.parametrize("model", MODELS)
def test_help_tells_every_setting_with_its_type_default_and_meaning(model: str) -> None:
    settings = settings_of(MODELS[model].Config)
    assert [one.name for one in settings] == [field.name for field in fields(MODELS[model].Config)]
    text = " ".join(pydoc.plain(pydoc.render_doc(MODELS[model])).replace("|", " ").split())
    for one in settings:
        assert one.meaning.endswith("."), one.name
        assert f"{one.name}: {one.type} = {shortened(one.default)} {one.meaning}" in text


ITEMS = Items(("a", "b", "c"))


@pytest.mark.parametrize("model", LEARNED)
def test_a_config_and_keywords_make_the_same_model(model: str) -> None:
    kind = MODELS[model]
    one, other = kind(ITEMS, kind.Config(dim=8), seed=3), kind(ITEMS, dim=8, seed=3)
    assert one.config == other.config
    assert all(torch.equal(x, other.state_dict()[name]) for name, x in one.state_dict().items())
    with pytest.raises(
        TypeError, match=rf"config: expected a {kind.Config.__name__} or keywords, got both \(dim, lr\)"
    ):
        kind(ITEMS, kind.Config(), dim=8, lr=0.1)
    with pytest.raises(TypeError, match=f"config: expected {kind.Config.__name__}, got dict"):
        kind(ITEMS, {"dim": 8})
    with pytest.raises(TypeError, match=f"dmi: {kind.Config.__name__} has no such setting; did you mean dim"):
        kind(ITEMS, dmi=8)


def test_names_of_settings_are_those_of_the_tables() -> None:
    named = {field.name: field.metadata["choices"] for field in fields(CLRecConfig)}
    tables = {"encoder": ENCODERS, "objective": OBJECTIVES, "negatives_from": SOURCES, "features": FEATURES}
    tables |= {"propensity": PROPENSITIES, "duplicates": DUPLICATES}
    assert {name: list(table) for name, table in tables.items()} == {name: list(named[name]) for name in tables}
    # What decides how many negatives a batch needs.
    assert [name for name, objective in OBJECTIVES.items() if objective.queue] == ["clrec"]
