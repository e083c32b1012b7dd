"""Types that msgspec does not read: each has one JSON form, at any depth, and constraints are obeyed or refused."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import typing
from collections.abc import Collection, Iterable, Reversible, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Annotated, Any, Literal, NamedTuple, NewType, NotRequired, TypedDict
from uuid import UUID

import annotated_types
import msgspec
import psycopg
import pydantic
import pydantic.dataclasses
import pytest

from pgqueue.client.tasks import task
from pgqueue.errors import InvalidArguments, InvalidOption
from pgqueue.jobs.codec import Codec

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
ID = UUID("12345678-1234-5678-1234-567812345678")


def one(annotation: Any) -> Codec:
    """The codec of a function with one parameter, annotated so."""

    def fn(value: Any) -> None: ...

    fn.__annotations__["value"] = annotation
    return Codec.of(fn, "app.fn")


def there_and_back(annotation: Any, value: Any) -> Any:
    codec = one(annotation)
    (back,), _ = codec.decode(codec.encode((value,), {}))
    return back


class Mixed(enum.Enum):
    LOW = 1
    NAME = "name"
    HALF = 0.5
    NOTHING = None


class Meta(enum.EnumMeta):
    pass


class OwnMeta(enum.Enum, metaclass=Meta):
    A = "a"


class Color(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Parcel:
    """All of them as fields, and itself within."""

    to: str | UUID
    where: Path
    hosts: Sequence[IPv4Address]
    kind: Mixed = Mixed.LOW
    inside: list[Parcel] = dataclasses.field(default_factory=list)


class ParcelStruct(msgspec.Struct, rename="camel"):
    sent_to: str | UUID
    sent_from: Iterable[Path] = ()


class ParcelTuple(NamedTuple):
    to: str | UUID
    kind: Mixed = Mixed.LOW


class ParcelDict(TypedDict):
    to: str | UUID
    kind: NotRequired[Mixed]


@dataclasses.dataclass
class Owner:
    """Has one of them in a field, and needs a stand-in for that alone."""

    parcels: dict[str, Parcel]


UserId = NewType("UserId", UUID)

TAKEN: list[tuple[Any, Any, Any]] = [
    (Path, Path("/a/b c"), "/a/b c"),
    (PurePath, PurePath("a"), "a"),
    (PurePosixPath, PurePosixPath("a/b"), "a/b"),
    (PureWindowsPath, PureWindowsPath(r"c:\a"), r"c:\a"),
    (IPv4Address, IPv4Address("10.0.0.1"), "10.0.0.1"),
    (IPv6Address, IPv6Address("fe80::1%eth0"), "fe80::1%eth0"),
    (IPv4Network, IPv4Network("10.0.0.0/8"), "10.0.0.0/8"),
    (IPv6Network, IPv6Network("fe80::/10"), "fe80::/10"),
    (IPv4Interface, IPv4Interface("10.0.0.1/8"), "10.0.0.1/8"),
    (IPv6Interface, IPv6Interface("fe80::1/10"), "fe80::1/10"),
    (IPv4Address | IPv6Address, IPv6Address("::1"), "::1"),
    (IPv4Address | IPv6Address, IPv4Address("10.0.0.1"), "10.0.0.1"),
    (Path | None, None, None),
    (list[Path], [Path("a")], ["a"]),
    (Sequence[int], [1, 2], [1, 2]),
    (typing.Sequence[int], [1, 2], [1, 2]),
    (Sequence, [1, "a"], [1, "a"]),
    (Iterable[int], [1, 2], [1, 2]),
    (Collection[UUID], [ID], [str(ID)]),
    (Reversible[Path], [Path("a")], ["a"]),
    (collections.abc.Set[int], {1}, [1]),
    (dict[str, Sequence[Path]], {"k": [Path("a")]}, {"k": ["a"]}),
    (str | UUID, ID, str(ID)),
    (str | UUID, "abc", "abc"),
    (str | UUID | None, None, None),
    (UUID | str | int, 7, 7),
    (str | datetime, NOON, "2026-03-01T12:00:00Z"),
    (date | datetime, date(2026, 3, 1), "2026-03-01"),
    (date | datetime, NOON, "2026-03-01T12:00:00Z"),
    (str | Color, Color.RED, "red"),
    (str | Path | int, 3, 3),
    (Literal["a", 7] | UUID, 7, 7),
    (float | int | UUID, 3, 3),
    (list[str | UUID], [ID, "abc"], [str(ID), "abc"]),
    (str | UserId, ID, str(ID)),
    (Mixed, Mixed.LOW, 1),
    (Mixed, Mixed.NAME, "name"),
    (Mixed, Mixed.HALF, 0.5),
    (Mixed, Mixed.NOTHING, None),
    (dict[str, Mixed], {"k": Mixed.NAME}, {"k": "name"}),
    (OwnMeta, OwnMeta.A, "a"),
    (ParcelTuple, ParcelTuple(ID, Mixed.NAME), [str(ID), "name"]),
    (ParcelDict, {"to": ID}, {"to": str(ID)}),
    (ParcelStruct, ParcelStruct(ID, [Path("a")]), {"sentTo": str(ID), "sentFrom": ["a"]}),
]


@pytest.mark.promise("F57")
@pytest.mark.parametrize(("annotation", "value", "stored"), TAKEN, ids=[f"{i}-{t[0]}" for i, t in enumerate(TAKEN)])
def test_it_is_taken_and_comes_back(annotation: Any, value: Any, stored: Any) -> None:
    text = one(annotation).encode((value,), {})
    assert msgspec.json.decode(text) == {"value": stored}
    back = there_and_back(annotation, value)
    assert (back, type(back)) == (value, type(value))


@pytest.mark.promise("F57")
def test_as_fields_of_a_class_that_has_itself_within(conn: psycopg.Connection[Any]) -> None:
    parcel = Parcel(ID, Path("a"), [IPv4Address("10.0.0.1")], Mixed.NAME)
    parcel.inside = [Parcel("x", Path("b"), [], Mixed.HALF)]
    for annotation, value in ((Parcel, parcel), (Owner, Owner({"k": parcel})), (list[Parcel], [parcel])):
        [(stored,)] = conn.execute("SELECT %s::jsonb::text", [one(annotation).encode((value,), {})]).fetchall()
        (back,), _ = one(annotation).decode(stored)
        assert (back, type(back)) == (value, type(value))


@pytest.mark.promise("F57")
def test_a_tuple_and_a_frozenset_are_taken_where_the_abstract_type_says_so() -> None:
    assert there_and_back(Sequence[int], (1, 2)) == [1, 2]
    assert there_and_back(Iterable[Path], (Path("a"),)) == [Path("a")]
    assert there_and_back(collections.abc.Set[int], frozenset((1,))) == {1}
    with pytest.raises(InvalidArguments, match=r"value\.hosts: given .*needs a list$"):
        one(Parcel).encode((Parcel("x", Path("a"), (IPv4Address("10.0.0.1"),)),), {})


@dataclasses.dataclass
class Chain:
    label: str | UUID
    next: Chain | str | None = None


class Cat(msgspec.Struct, tag=True):
    names: Sequence[str]


class Dog(msgspec.Struct, tag=True):
    names: Sequence[str]


@dataclasses.dataclass
class Team:
    names: Sequence[str]


@pytest.mark.promise("F57")
@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (Cat | Dog, Dog(["a"])),
        (Team | int | None, Team(["a"])),
        (Parcel | None, None),
        (Parcel | int, 7),
        (Parcel | str, "a"),
        (Parcel | str, Parcel("a", Path("b"), [])),
        (list[Parcel | None], [None]),
        (Mixed | None, Mixed.LOW),
        (Chain, Chain("a", Chain(ID, "end"))),
    ],
)
def test_classes_with_such_fields_stay_members_of_unions(annotation: Any, value: Any) -> None:
    back = there_and_back(annotation, value)
    assert (back, type(back)) == (value, type(value))


@pytest.mark.promise("F57")
@pytest.mark.parametrize("annotation", [Parcel | ParcelStruct, Parcel | dict[str, int], Parcel | list[int]])
def test_classes_that_cannot_be_told_apart_are_refused_at_declaration(annotation: Any) -> None:
    with pytest.raises(InvalidOption, match="cannot be stored"):
        one(annotation)


REFUSED: list[tuple[Any, Any]] = [
    (Path, "a"),
    (Path, PureWindowsPath("a")),
    (PurePath, Path("a")),
    (IPv4Address, IPv4Interface("10.0.0.1/8")),
    (IPv4Address, "10.0.0.1"),
    (Sequence[int], "12"),
    (Sequence[int], {1}),
    (Sequence[int], ["1"]),
    (Iterable[str], "ab"),
    (Iterable[int], iter([1])),
    (collections.abc.Set[int], [1]),
    (str | UUID, str(ID)),  # would come back as a UUID
    (str | UUID, 7),
    (str | Decimal, "1.50"),
    (Mixed, 1),
    (Mixed, Color.RED),
    (ParcelDict, {}),
    (Parcel, Parcel("x", "a", [])),  # type: ignore[arg-type]  # unfit is the point
]


@pytest.mark.promise("F57")
@pytest.mark.parametrize(("annotation", "value"), REFUSED)
def test_what_would_not_come_back_so_is_refused(annotation: Any, value: Any) -> None:
    with pytest.raises(InvalidArguments, match=r"task 'app.fn'.*parameter value"):
        one(annotation).encode((value,), {})


@pytest.mark.promise("F57")
@pytest.mark.parametrize(
    ("annotation", "stored"),
    [
        (Path, "7"),
        (IPv4Address, '"10.0.0.300"'),
        (Mixed, "2"),
        (str | UUID, "7"),
        (Sequence[int], '["a"]'),
        (Parcel, '{"to":"x"}'),
        (ParcelTuple, '["x","name",3]'),
        (ParcelDict, "{}"),
    ],
)
def test_what_does_not_fit_in_a_row_is_one_clear_error(annotation: Any, stored: str) -> None:
    with pytest.raises(InvalidArguments, match="the stored arguments do not fit"):
        one(annotation).decode(f'{{"value":{stored}}}')


def test_the_message_says_what_it_would_come_back_as() -> None:
    with pytest.raises(InvalidArguments) as raised:
        one(list[str | UUID]).encode((["a", str(ID)],), {})
    assert str(raised.value) == ("task 'app.fn': parameter value[1]: given a str, which would come back as a UUID")


class Coordinates(enum.Enum):
    HOME = (1, 2)


@pydantic.dataclasses.dataclass
class Aliased:
    number: int = pydantic.Field(alias="no")


@pytest.mark.promise("F57")
@pytest.mark.parametrize(
    "annotation",
    [Coordinates, Aliased, list[int] | tuple[int, ...] | UUID | str, Sequence[complex], str | UUID | complex],
)
def test_what_has_no_single_form_is_refused_at_declaration(annotation: Any) -> None:
    with pytest.raises(InvalidOption, match=r"task 'app.fn', parameter value: .* cannot be stored"):
        one(annotation)


# -- Subclasses of times -----------------------------------------------------------------------------------------------


class FakeDate(date):
    """As freezegun's and pendulum's."""


class FakeDatetime(datetime):
    pass


class FakeTime(time):
    pass


class FakeDelta(timedelta):
    pass


@pytest.mark.promise("F57")
@pytest.mark.parametrize(
    ("annotation", "value", "back"),
    [
        (datetime, FakeDatetime(2026, 3, 1, 12, 30, 1, 5, tzinfo=UTC), datetime(2026, 3, 1, 12, 30, 1, 5, tzinfo=UTC)),
        (date, FakeDate(2026, 3, 1), date(2026, 3, 1)),
        (time, FakeTime(12, 30, 1), time(12, 30, 1)),
        (timedelta, FakeDelta(days=1, seconds=2, microseconds=3), timedelta(days=1, seconds=2, microseconds=3)),
        (list[datetime], [FakeDatetime(2026, 3, 1, tzinfo=UTC)], [datetime(2026, 3, 1, tzinfo=UTC)]),
        (date | None, FakeDate(2026, 3, 1), date(2026, 3, 1)),
        (str | datetime, FakeDatetime(2026, 3, 1, tzinfo=UTC), datetime(2026, 3, 1, tzinfo=UTC)),
        (dict[date, int], {FakeDate(2026, 3, 1): 1}, {date(2026, 3, 1): 1}),
    ],
)
def test_subclasses_of_times_are_taken_by_value(annotation: Any, value: Any, back: Any) -> None:
    found = there_and_back(annotation, value)
    assert found == back
    assert type(found) is type(back) and (not isinstance(found, list) or type(found[0]) is datetime)


@pytest.mark.promise("F57")
def test_a_datetime_is_no_date_and_a_naive_one_is_refused_whatever_its_class() -> None:
    for annotation, value in ((date, FakeDatetime(2026, 3, 1, tzinfo=UTC)), (datetime, FakeDatetime(2026, 3, 1))):
        with pytest.raises(InvalidArguments, match="parameter value"):
            one(annotation).encode((value,), {})


@pytest.mark.promise("F57")
def test_a_task_that_is_declared_while_the_clock_is_frozen_takes_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """As freezegun does it: the module's names are other classes, which say that they are of freezegun."""
    frozen = type("FakeDatetime", (datetime,), {"__module__": "freezegun.api"})
    day = type("FakeDate", (date,), {"__module__": "freezegun.api"})
    monkeypatch.setattr("datetime.datetime", frozen)
    monkeypatch.setattr("datetime.date", day)
    for annotation, value, back in (
        (frozen, frozen(2026, 3, 1, tzinfo=UTC), datetime(2026, 3, 1, tzinfo=UTC)),
        (day | None, day(2026, 3, 1), date(2026, 3, 1)),
        (list[frozen], [frozen(2026, 3, 1, tzinfo=UTC)], [datetime(2026, 3, 1, tzinfo=UTC)]),  # type: ignore[valid-type]
        (datetime, frozen(2026, 3, 1, tzinfo=UTC), datetime(2026, 3, 1, tzinfo=UTC)),
    ):
        assert there_and_back(annotation, value) == back
    with pytest.raises(InvalidArguments, match="time zone"):
        one(frozen).encode((frozen(2026, 3, 1),), {})


def test_the_key_of_a_lock_shows_what_the_json_shows() -> None:
    @task(name="stand_ins.locked", lock="{where}:{at}")
    def locked(where: Path, at: date) -> None: ...

    assert locked.new(Path("a/b"), FakeDate(2026, 3, 1)).lock_key == "a/b:2026-03-01"


# -- Constraints -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Limited:
    number: Annotated[int, pydantic.Field(gt=0)]


@pydantic.dataclasses.dataclass
class Validated:
    number: pydantic.PositiveInt = pydantic.Field(le=10)


class Query(pydantic.fields.FieldInfo):  # type: ignore[misc]  # it is final, and libraries derive from it all the same
    """As a web framework's."""


OBEYED: list[tuple[Any, Any, Any]] = [
    (Annotated[int, pydantic.Field(gt=0)], 1, 0),
    (Annotated[int, pydantic.Field(gt=0, description="how many")], 1, 0),
    (pydantic.PositiveInt, 1, 0),
    (pydantic.NonNegativeFloat, 0.0, -1.0),
    (Annotated[int, annotated_types.Ge(3)], 3, 2),
    (Annotated[int, annotated_types.Interval(gt=0, le=10)], 10, 11),
    (Annotated[str, annotated_types.Len(1, 3)], "abc", ""),
    (Annotated[int, Query(gt=0)], 1, 0),
    (Annotated[list[int], annotated_types.MinLen(1)], [1], []),
    (Annotated[str, pydantic.Field(pattern="^a")], "ab", "b"),
    (Annotated[str, pydantic.StringConstraints(max_length=2)], "ab", "abc"),
    (Annotated[Sequence[int], pydantic.Field(max_length=1)], [1], [1, 2]),
    (list[Annotated[int, pydantic.Field(gt=0)]], [1], [1, 0]),
    (dict[str, pydantic.PositiveInt], {"k": 1}, {"k": 0}),
    (pydantic.PositiveInt | None, 1, 0),
    (Limited, Limited(1), Limited(0)),
    (pydantic.conint(multiple_of=5), 10, 11),
    (Annotated[int, annotated_types.Gt(0), msgspec.Meta(lt=10)], 9, 10),
]


@pytest.mark.promise("F56")
@pytest.mark.parametrize(("annotation", "fits", "unfit"), OBEYED, ids=[str(i) for i in range(len(OBEYED))])
def test_constraints_are_obeyed(annotation: Any, fits: Any, unfit: Any) -> None:
    assert there_and_back(annotation, fits) == fits
    with pytest.raises(InvalidArguments, match="value"):
        one(annotation).encode((unfit,), {})
    with pytest.raises(InvalidArguments, match="do not fit"):
        one(annotation).decode(msgspec.json.encode({"value": unfit}))


@pytest.mark.promise("F56")
def test_a_dataclass_of_pydantic_is_read_by_its_own_validator() -> None:
    assert there_and_back(Validated, Validated(7)) == Validated(7)
    with pytest.raises(InvalidArguments, match="do not fit"):
        one(Validated).decode('{"value":{"number":11}}')


@pytest.mark.promise("F56")
@pytest.mark.parametrize(
    "annotation",
    [
        Annotated[int, annotated_types.Predicate(lambda number: number > 0)],
        Annotated[str, pydantic.StringConstraints(strip_whitespace=True)],
        Annotated[int, pydantic.AfterValidator(abs)],
        Annotated[int, pydantic.Field(default=3)],
        Annotated[Decimal, pydantic.Field(max_digits=3)],
        Annotated[Decimal, annotated_types.Gt(0)],
        pydantic.FilePath,
        pydantic.UUID4,
        list[Annotated[int, pydantic.AfterValidator(abs)]],
    ],
)
def test_constraints_that_cannot_be_obeyed_are_refused_at_declaration(annotation: Any) -> None:
    with pytest.raises(InvalidOption, match=r"parameter value: .* cannot be stored"):
        one(annotation)


@pytest.mark.promise("F56")
def test_what_says_nothing_about_values_is_no_constraint() -> None:
    for annotation in (
        Annotated[int, "how many"],
        Annotated[int, annotated_types.doc("how many")],
        Annotated[int, pydantic.Field(description="how many")],
        pydantic.StrictInt,
    ):
        assert there_and_back(annotation, 7) == 7


@pytest.mark.promise("F57")
def test_names_that_cannot_be_kept_are_refused_at_declaration() -> None:
    def underscored(_id: int, __x: int = 2) -> None: ...

    with pytest.raises(InvalidOption, match="'__x'"):
        Codec.of(underscored, "app.fn")
