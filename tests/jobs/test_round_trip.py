"""Arguments come out as they went in, or are refused: what their own classes leave out, hide or change is named."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated, Any, Generic, NamedTuple, TypeVar
from uuid import UUID, uuid4

import msgspec
import pydantic
import pytest
from executor_bench import Bench, made

from pgqueue.errors import InvalidArguments
from pgqueue.jobs import round_trip
from pgqueue.jobs.codec import Codec, UnfitArguments
from pgqueue.jobs.outcomes import Retried

T = TypeVar("T")
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def one(annotation: Any) -> Codec:
    """The codec of a function with one parameter, annotated so."""

    def fn(value: Any) -> None: ...

    fn.__annotations__["value"] = annotation
    return Codec.of(fn, "app.fn")


def there_and_back(annotation: Any, value: Any) -> Any:
    codec = one(annotation)
    (back,), _ = codec.decode(codec.encode((value,), {}))
    return back


# -- What is changed on the way ----------------------------------------------------------------------------------------


class Priced(pydantic.BaseModel):
    price: float = 0


class Login(pydantic.BaseModel):
    user: str
    password: pydantic.SecretStr


class Hidden(pydantic.BaseModel):
    user: str
    password: str = pydantic.Field("", exclude=True)


class Renamed(pydantic.BaseModel):
    number: int = pydantic.Field(0, validation_alias="no", serialization_alias="nr")


class Base(pydantic.BaseModel):
    name: str


class More(Base):
    cents: int = 0


class Holder(pydantic.BaseModel):
    inner: Base
    others: list[Base] = []


class Rounded(pydantic.BaseModel):
    price: Decimal

    @pydantic.field_serializer("price")
    def _price(self, price: Decimal) -> str:
        return str(round(price))


class Private(pydantic.BaseModel):
    name: str
    _tries: int = pydantic.PrivateAttr(default=0)


class Doubled(pydantic.BaseModel):
    number: int

    @pydantic.field_validator("number")
    @classmethod
    def _double(cls, number: int) -> int:
        return 2 * number


class Loose(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    anything: Any = None


class Unlike(pydantic.BaseModel):
    """It says of each of its objects that it is equal to any other."""

    hidden: int = pydantic.Field(0, exclude=True)

    def __eq__(self, other: object) -> bool:
        return True


@dataclasses.dataclass
class Counted:
    number: int

    def __post_init__(self) -> None:
        self.number += 1


@dataclasses.dataclass
class Underscored:
    name: str
    _secret: int = 0


@dataclasses.dataclass
class Cart:
    owner: Login | None
    items: list[Any]


class Bumped(msgspec.Struct):
    number: int

    def __post_init__(self) -> None:
        self.number += 1


def private(name: str, tries: int) -> Private:
    made = Private(name=name)
    made._tries = tries
    return made


CHANGED: dict[str, tuple[Any, Any, str]] = {
    "a secret": (Login, Login(user="a", password=pydantic.SecretStr("x")), "value.password"),
    "an excluded field": (Hidden, Hidden(user="a", password="x"), "value.password"),
    "two aliases": (Renamed, Renamed.model_validate({"no": 7}), "value.number"),
    "a subclass in a field": (Holder, Holder(inner=More(name="a", cents=5)), "value.inner"),
    "a subclass in a list": (Holder, Holder(inner=Base(name="a"), others=[More(name="b")]), "value.others[0]"),
    "a lossy serializer": (Rounded, Rounded(price=Decimal("9.90")), "value.price"),
    "a private attribute": (Private, private("a", 3), "value._tries"),
    "a validator that changes again": (Doubled, Doubled(number=1), "value.number"),
    "a tuple where anything goes": (Loose, Loose(anything=(1, 2)), "value.anything"),
    "an extra": (Loose, Loose.model_validate({"more": NOON}), "value.more"),
    "equal to all": (Unlike, Unlike(hidden=1), "value.hidden"),
    "in a list": (list[Login], [Login(user="a", password=pydantic.SecretStr("x"))], "value[0].password"),
    "in a dataclass": (Cart, Cart(Login(user="a", password=pydantic.SecretStr("x")), []), "value.owner.password"),
    "a dataclass that counts": (Counted, Counted(1), "value.number"),
    "a Struct that counts": (dict[str, Bumped], {"k": Bumped(1)}, "value['k'].number"),
}


@pytest.mark.promise("F55")
@pytest.mark.parametrize("name", CHANGED)
def test_what_would_come_back_changed_is_refused_and_the_field_is_named(name: str) -> None:
    annotation, value, where = CHANGED[name]
    with pytest.raises(InvalidArguments) as raised:
        one(annotation).encode((value,), {})
    text = str(raised.value)
    assert text.startswith("task 'app.fn': ")
    assert f"parameter {where}" in text or (where.rpartition(".")[2] in text and "do not fit" in text)


@pytest.mark.promise("F55")
def test_a_secret_is_not_in_the_message() -> None:
    with pytest.raises(InvalidArguments) as raised:
        one(Hidden).encode((Hidden(user="a", password="swordfish"),), {})
    assert "swordfish" not in str(raised.value)


class Cached(pydantic.BaseModel):
    name: str
    made: UUID = pydantic.Field(default_factory=uuid4)

    @functools.cached_property
    def shout(self) -> str:
        return self.name.upper()


class Color(enum.Enum):
    RED = "red"


class Rich(pydantic.BaseModel):
    """Fields of types that pydantic knows and msgspec does not."""

    color: Color
    link: pydantic.HttpUrl
    when: datetime
    tags: set[str]
    price: Decimal
    nested: dict[str, list[Base]]
    row: tuple[int, str]


@dataclasses.dataclass(eq=False)
class NoEquality:
    at: datetime
    price: Decimal
    floats: tuple[float, ...] = ()


class Point(NamedTuple):
    x: int
    y: float


class Array:
    """Compared with another one it answers for each item, as numpy does."""

    def __init__(self, items: list[int]) -> None:
        self.items = items

    def __eq__(self, other: object) -> Array:  # type: ignore[override]  # it is the point
        return Array([a == b for a, b in zip(self.items, vars(other)["items"], strict=True)])

    __hash__ = None  # type: ignore[assignment]  # as above

    def __bool__(self) -> bool:
        raise ValueError("the truth of an array is ambiguous")

    def all(self) -> bool:
        return all(self.items)


class WithArray(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
    array: Annotated[
        Array,
        pydantic.PlainValidator(lambda given: given if isinstance(given, Array) else Array(given)),
        pydantic.PlainSerializer(lambda array: array.items),
    ]


class Root(pydantic.RootModel[list[int]]):
    pass


def cached() -> Cached:
    made = Cached(name="a")
    assert made.shout == "A"
    return made


SAME: dict[str, tuple[Any, Any]] = {
    "a model": (Holder, Holder(inner=Base(name="a"), others=[Base(name="b")])),
    "a private attribute with its default": (Private, Private(name="a")),
    "a cached property": (Cached, cached()),
    "types of pydantic": (
        Rich,
        Rich(
            color=Color.RED,
            link=pydantic.HttpUrl("https://example.org/x"),
            when=NOON,
            tags={"a", "b"},
            price=Decimal("1.50"),
            nested={"k": [Base(name="a")]},
            row=(1, "a"),
        ),
    ),
    "a default of a model that is an int": (Priced, Priced()),
    "a root model": (Root, Root([1, 2])),
    "an array": (WithArray, WithArray(array=Array([1, 2]))),
    "an extra": (Loose, Loose.model_validate({"more": [1, {"a": None}], "anything": {"k": 1.5}})),
    "a dataclass without equality": (NoEquality, NoEquality(NOON, Decimal("1.50"), (1.0, 2.5))),
    "a dataclass with a field of a private name": (Underscored, Underscored("a", 7)),
    "a NamedTuple": (list[Point], [Point(1, 2.0)]),
}


@pytest.mark.promise("F55")
@pytest.mark.parametrize("name", SAME)
def test_what_comes_back_as_it_was_is_taken(name: str) -> None:
    annotation, value = SAME[name]
    back = there_and_back(annotation, value)
    assert round_trip.difference(value, back) == ""
    assert type(back) is type(value)


@dataclasses.dataclass
class LooksUp:
    number: int

    def __post_init__(self) -> None:
        if self.number in DOWN:
            raise ConnectionError("the catalogue is down")
        if self.number < 0:
            raise ValueError("it is negative")


DOWN: list[int] = []


@pytest.mark.promise("F55")
async def test_an_error_of_a_class_is_of_its_code_and_a_value_that_it_refuses_does_not_fit() -> None:
    def fn(value: LooksUp) -> None: ...

    codec, value = Codec.of(fn, "app.fn"), LooksUp(7)
    text = codec.encode((value,), {})
    with pytest.raises(UnfitArguments, match="it is negative"):
        codec.decode('{"value":{"number":-1}}')
    DOWN.append(7)
    with pytest.raises(InvalidArguments, match="ConnectionError: the catalogue is down"):
        codec.encode((value,), {})
    outcome = await Bench(made(fn, "looks")).run("looks", args=text)
    DOWN.clear()
    assert isinstance(outcome, Retried) and outcome.spent and outcome.problem.error_type == "ConnectionError"


@dataclasses.dataclass
class Nested:
    below: list[Nested]


class NestedModel(pydantic.BaseModel):
    below: list[NestedModel]


def nested(cls: Any, depth: int) -> Any:
    made = cls(below=[])
    for _ in range(depth):
        made = cls(below=[made])
    return made


@pytest.mark.promise("F55")
@pytest.mark.parametrize("cls", [Nested, NestedModel])
def test_deep_values_are_taken_and_too_deep_ones_are_refused(cls: Any) -> None:
    codec = one(cls)
    (back,), _ = codec.decode(codec.encode((nested(cls, 60),), {}))
    for _ in range(60):
        (back,) = back.below
    assert back.below == []
    with pytest.raises(InvalidArguments):
        codec.encode((nested(cls, 5_000),), {})


# -- Parameterised generics --------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Page(Generic[T]):
    items: list[T]
    next: int | None = None


class PageStruct(msgspec.Struct, Generic[T]):
    items: list[T]


class PageTuple(NamedTuple, Generic[T]):
    items: list[T]


class PageModel(pydantic.BaseModel, Generic[T]):
    items: list[T]


GENERICS: dict[str, tuple[Any, Any, Any]] = {
    "dataclass": (Page[int], Page([1, 2]), Page(["a"])),
    "dataclass of dataclasses": (Page[Page[int]], Page([Page([1])]), Page([Page(["a"])])),
    "struct": (PageStruct[int], PageStruct([1]), PageStruct(["a"])),
    "named tuple": (PageTuple[int], PageTuple([1]), PageTuple(["a"])),
    "model": (PageModel[int], PageModel[int](items=[1]), PageModel[str](items=["a"])),
    "in a list": (list[Page[int]], [Page([1])], [Page(["a"])]),
}


@pytest.mark.promise("F56")
@pytest.mark.parametrize("name", GENERICS)
def test_a_generic_class_with_arguments_takes_its_values_and_no_others(name: str) -> None:
    annotation, fits, unfit = GENERICS[name]
    assert there_and_back(annotation, fits) == fits
    with pytest.raises(InvalidArguments, match="parameter value"):
        one(annotation).encode((unfit,), {})


def test_plain_arguments_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """They pay nothing: no check, no second look at the text."""

    def fn(a: int, b: str, c: bool, d: int | None = None) -> None: ...

    codec = Codec.of(fn)
    looks: list[str] = []
    stopped: Callable[..., Any] = lambda *args: looks.append("looked")  # noqa: E731
    monkeypatch.setattr(Codec, "_reread", stopped)
    monkeypatch.setattr(Codec, "_check", stopped)
    assert codec.encode((1, "x", True), {"d": None}) == '{"a":1,"b":"x","c":true,"d":null}'
    assert looks == []
