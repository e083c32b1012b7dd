"""A handler's result becomes JSON by the codec of the arguments. What it cannot keep is refused, its place named."""

from __future__ import annotations

import dataclasses
import enum
import json
from datetime import UTC, date, datetime
from decimal import Decimal
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import attrs
import msgspec
import psycopg
import pydantic
import pytest
from executor_bench import Bench, made
from workers import Eyes, until, work

from pgqueue.client.middleware import RESULTS
from pgqueue.client.tasks import task
from pgqueue.jobs.codec import UnfitResult, keywords_only, result_json
from pgqueue.jobs.outcomes import Completed, Failed, completed
from pgqueue.jobs.sizes import JSON_MOST

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
NAN, INF = float("nan"), float("inf")


class Safe(str):
    pass


class Mixed(enum.Enum):
    LOW = 1
    NAME = "name"


class Level(enum.IntEnum):
    LOW = 1


class FakeDatetime(datetime):
    pass


class Model(pydantic.BaseModel):
    number: int = pydantic.Field(default=1, serialization_alias="no")
    where: Path = Path("a")


@dataclasses.dataclass
class Row:
    at: datetime
    models: list[Model]


class Item(msgspec.Struct, rename="camel"):
    the_id: UUID


class Point(NamedTuple):
    x: int
    y: float


TAKEN: list[tuple[Any, Any]] = [
    ({1: "a"}, {"1": "a"}),
    ({1: {2: None}}, {"1": {"2": None}}),
    ({date(2026, 3, 1): 1}, {"2026-03-01": 1}),
    ({UUID(int=1): 1}, {str(UUID(int=1)): 1}),
    (Model(), {"no": 1, "where": "a"}),
    ([Model(), None], [{"no": 1, "where": "a"}, None]),
    (Path("a/b"), "a/b"),
    (IPv4Address("10.0.0.1"), "10.0.0.1"),
    (Safe("x"), "x"),
    ({"k": Safe("x")}, {"k": "x"}),
    (Level.LOW, 1),
    (Mixed.NAME, "name"),
    (FakeDatetime(2026, 3, 1, 12, tzinfo=UTC), "2026-03-01T12:00:00Z"),
    (Row(NOON, [Model()]), {"at": "2026-03-01T12:00:00Z", "models": [{"no": 1, "where": "a"}]}),
    (Item(UUID(int=1)), {"theId": str(UUID(int=1))}),
    (Point(1, 2.5), [1, 2.5]),
    ((1, {"a"}), [1, ["a"]]),
    (Decimal("1.50"), "1.50"),
    (2**100, 2**100),
    ("null", "null"),
    ([None, "null", 1.5], [None, "null", 1.5]),
    (b"a", "YQ=="),
]


@pytest.mark.promise("F58")
@pytest.mark.parametrize(("value", "stored"), TAKEN, ids=[str(i) for i in range(len(TAKEN))])
def test_it_is_stored_in_the_form_that_arguments_have(value: Any, stored: Any) -> None:
    assert json.loads(result_json(value)) == stored


def test_keys_are_in_order_and_none_is_null() -> None:
    assert result_json({"b": 1, "a": None}) == '{"a":null,"b":1}'
    assert result_json({"b": 1, "a": 2}) == '{"a":2,"b":1}'


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError("no")


class Unserializable(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
    what: Broken


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)

REFUSED: list[tuple[Any, str]] = [
    (NAN, "given nan (float), needs a finite float"),
    ([1.0, INF], "[1]: given inf (float), needs a finite float"),
    ({"a": [None, {"b": -INF}]}, "['a'][1]['b']: given -inf"),
    (Point(1, NAN), "[1]: given nan"),
    (dataclasses.make_dataclass("D", ["x"])(NAN), "['x']: given nan"),
    ({1: "a", "1": "b"}, "two of its keys are one text"),
    ({"k": {1: "a", "1": "b"}}, "['k']: two of its keys are one text"),
    ({(1, 2): "a"}, "key: given (1, 2) (tuple)"),
    ([object()], "[0]: given <object"),
    ({"a": {"b": complex(1)}}, "['a']['b']: given "),
    ("\ud800", "lone surrogate"),
    (["\ud800"], "[0]: '\\ud800' has a lone surrogate"),
    ("a\0", "has a NUL"),
    ("x" * JSON_MOST, "bytes of JSON, the limit is"),
    (CIRCLE, "nested too deeply"),
]


@pytest.mark.promise("F58")
@pytest.mark.parametrize(("value", "why"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_what_json_cannot_keep_is_refused_and_its_place_is_named(value: Any, why: str) -> None:
    with pytest.raises(UnfitResult) as raised:
        result_json(value)
    assert why in str(raised.value)
    for word in ("msgspec", "Encoding", "supported", "Only dicts"):
        assert word not in str(raised.value)


@pytest.mark.promise("F58")
@pytest.mark.parametrize("value", [NAN, {1: "a", "1": "b"}, [object()], Unserializable(what=Broken())])
async def test_the_job_says_so_in_our_own_words(value: Any) -> None:
    outcome = await Bench(made(lambda: value, "returns")).run("returns")
    assert isinstance(outcome, Failed) and outcome.reason == "error"
    assert (outcome.problem.message or "").startswith("the result cannot be stored")


@pytest.mark.promise("F58")
async def test_results_and_arguments_have_one_form() -> None:
    for value in ([1, "a", None, 1.5], {"k": {"l": [True]}}):
        assert json.loads(keywords_only("any").encode((), {"value": value}))["value"] == json.loads(result_json(value))
    assert await Bench(made(lambda: Path("a"), "returns")).run("returns") == Completed('"a"')


@task(name="results.keys")
async def keys() -> dict[int, Model]:
    return {1: Model()}


@pytest.mark.promise("F58")
async def test_jsonb_takes_it(dsn: str, eyes: Eyes, conn: psycopg.Connection[Any]) -> None:
    keys.enqueue(conn)
    conn.commit()
    async with work(dsn, keys):
        await until(eyes.done(1))
    assert eyes.all("SELECT state, result FROM pgqueue.job") == [("completed", {"1": {"no": 1, "where": "a"}})]


# -- What a class leaves out, hides or changes -------------------------------------------------------------------------


class Base(pydantic.BaseModel):
    a: int = 1


class Wider(Base):
    b: int = 2


class Holder(pydantic.BaseModel):
    part: Base
    parts: list[Base] = []
    anything: Any = None


class Login(pydantic.BaseModel):
    password: pydantic.SecretStr


class Excluded(pydantic.BaseModel):
    a: int = pydantic.Field(0, exclude=True)


class Private(pydantic.BaseModel):
    _tries: int = pydantic.PrivateAttr(0)


class Rounded(pydantic.BaseModel):
    price: float

    @pydantic.field_serializer("price")
    def rounded(self, price: float) -> float:
        return round(price, 1)


class TwoNames(pydantic.BaseModel):
    """For writing only: it cannot read what it writes."""

    at: datetime = pydantic.Field(validation_alias="when", serialization_alias="since")
    price: float = 0

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def double(self) -> float:
        return self.price * 2


@dataclasses.dataclass
class Cart:
    owner: Any
    total: Decimal = Decimal(0)


class Listed(msgspec.Struct, array_like=True, tag="listed"):
    total: Decimal


class Sparse(msgspec.Struct, omit_defaults=True):
    a: int = 0
    b: int | msgspec.UnsetType = msgspec.UNSET


def tried(times: int) -> Private:
    private = Private()
    private._tries = times
    return private


LOST: dict[str, tuple[Any, str]] = {
    "a secret": (Login(password=pydantic.SecretStr("x")), ".password: would not come back"),
    "a secret, deep": ({"k": [Cart(Login(password=pydantic.SecretStr("x")))]}, "['k'][0].owner.password: would"),
    "an excluded field": (Excluded(a=1), ".a: would not be in the JSON"),
    "a subclass": (Holder(part=Wider()), ".part.b: would not be in the JSON"),
    "a subclass in a list": ([Holder(part=Base(), parts=[Base(), Wider()])], "[0].parts[1].b: would not be"),
    "a private attribute": (tried(3), "._tries: would not be in the JSON"),
    "a serializer that rounds": (Rounded(price=1.25), ".price: would not come back"),
    "no number": (Decimal("NaN"), "needs a finite Decimal"),
    "no number that signals": ([Decimal("sNaN")], "[0]: given Decimal('sNaN')"),
    "no end": ({"a": (Decimal("-Infinity"),)}, "['a'][0]: given Decimal('-Infinity')"),
    "as a key": ({Decimal("NaN"): 1}, "key: given Decimal('NaN')"),
    "in a set": ({Decimal("NaN")}, "[0]: given Decimal('NaN')"),
    "in a dataclass": (Cart(None, Decimal("NaN")), ".total: given Decimal('NaN')"),
    "in a Struct": (Listed(Decimal("NaN")), ".total: given Decimal('NaN')"),
    "in a NamedTuple": (Point(1, Decimal("NaN")), "[1]: given Decimal('NaN')"),  # type: ignore[arg-type]
    "in a model": (Holder(part=Base(), anything={"k": Decimal("NaN")}), ".anything['k']: given Decimal('NaN')"),
}


@pytest.mark.promise("F223")
@pytest.mark.parametrize(("value", "why"), LOST.values(), ids=LOST)
async def test_what_a_class_loses_fails_the_job_for_good_and_the_place_is_named(value: Any, why: str) -> None:
    outcome = await Bench(made(lambda: value, "returns", retry=5)).run("returns")
    assert isinstance(outcome, Failed)
    assert why in (outcome.problem.message or "")


@pytest.mark.promise("F223")
@pytest.mark.parametrize("value", [each for each, _ in LOST.values()], ids=LOST)
def test_a_result_that_is_not_kept_is_not_looked_at(value: Any) -> None:
    silent = RESULTS.in_thread(made(lambda: value, "returns", store_result=False), lambda *_: value)
    assert completed(silent(None, (), {})) == Completed(None)


ALL_THERE: dict[str, tuple[Any, Any]] = {
    "a tuple": ((1, (2,)), [1, [2]]),
    "a dataclass of anything": (Cart((1, {2})), {"owner": [1, [2]], "total": "0"}),
    "a naive time": (Cart(datetime(2026, 3, 1)), {"owner": "2026-03-01T00:00:00", "total": "0"}),
    "no secret": (Excluded(a=0), {}),
    "no tries": (Private(), {}),
    "a round price": (Rounded(price=1.5), {"price": 1.5}),
    "two names": (TwoNames(when=NOON), {"since": "2026-03-01T12:00:00Z", "price": 0}),  # type: ignore[call-arg]
    "a Struct with defaults": (Sparse(), {}),
    "a Struct that is a list": (Listed(Decimal("1.50")), ["listed", "1.50"]),
    "anything in a model": (
        Holder(part=Base(), anything={"at": NOON, "row": (1, {2})}),
        {"part": {"a": 1}, "parts": [], "anything": {"at": "2026-03-01T12:00:00Z", "row": [1, [2]]}},
    ),
}


@pytest.mark.promise("F223")
@pytest.mark.parametrize(("value", "stored"), ALL_THERE.values(), ids=ALL_THERE)
def test_a_result_need_not_come_back_as_an_equal_value(value: Any, stored: Any) -> None:
    assert json.loads(result_json(value)) == stored


@pytest.mark.promise("F223")
def test_a_field_that_attrs_leaves_out() -> None:
    hidden = attrs.make_class("Hidden", {"_only": attrs.field(default=0), "a": attrs.field(default=1)})
    made_fresh = attrs.make_class("Fresh", {"_seen": attrs.field(factory=list, init=False)})
    with pytest.raises(UnfitResult, match=r"\._only: would not be in the JSON"):
        result_json([hidden(only=5)])
    assert json.loads(result_json([hidden(), made_fresh()])) == [{"a": 1}, {}]
