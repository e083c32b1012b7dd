"""The argument codec: what fits comes back as it was, what does not is refused before it reaches the database."""

from __future__ import annotations

import dataclasses
import enum
import json
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, NotRequired, TypedDict
from uuid import UUID

import msgspec
import psycopg
import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pgqueue.errors import InvalidArguments, InvalidOption, PayloadTooLarge
from pgqueue.jobs.codec import Codec, UnfitArguments, json_object, keywords_only
from pgqueue.jobs.sizes import JSON_MOST

if TYPE_CHECKING:
    from fractions import Fraction

    from pgqueue.jobs.job import Job

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclasses.dataclass
class Node:
    name: str
    at: datetime | None = None
    below: list[Node] = dataclasses.field(default_factory=list)


class Child(Node):
    pass


class Point(NamedTuple):
    x: int
    y: float


class Options(TypedDict):
    retries: int
    note: NotRequired[str]


class Item(msgspec.Struct):
    sku: str
    price: Decimal
    tag: str | msgspec.UnsetType = msgspec.UNSET


class Order(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="forbid")
    number: int = pydantic.Field(alias="no")
    placed: datetime
    total: Decimal = Decimal(0)
    weight: float = 0.0
    note: str = ""


def one(annotation: Any) -> Codec:
    """The codec of a function with one parameter, annotated so."""

    def fn(value: Any) -> None: ...

    fn.__annotations__["value"] = annotation
    return Codec.of(fn, "app.fn")


def there_and_back(annotation: Any, value: Any) -> Any:
    codec = one(annotation)
    (back,), rest = codec.decode(codec.encode((value,), {}))
    assert rest == {}
    return back


# -- Values ----------------------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
ZONES = st.builds(timezone, st.integers(-1439, 1439).map(lambda minutes: timedelta(minutes=minutes)))
MOMENTS = st.datetimes(timezones=st.one_of(ZONES, st.timezones())).filter(
    lambda moment: (moment.utcoffset() or timedelta()) % timedelta(minutes=1) == timedelta()
)
DECIMALS = st.decimals(allow_nan=False, allow_infinity=False)
SCALARS: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (bool, st.booleans()),
    (int, st.integers()),
    (str, TEXT),
    (Decimal, DECIMALS),
    (UUID, st.uuids()),
    (date, st.dates()),
    (time, st.times()),
    (timedelta, st.timedeltas()),
    (bytes, st.binary()),
    (Color, st.sampled_from(Color)),
    (Level, st.sampled_from(Level)),
    (Literal["a", 7], st.sampled_from(["a", 7])),
    (Point, st.builds(Point, st.integers(), FLOATS)),
]
NODES = st.recursive(
    st.builds(Node, TEXT, st.none() | MOMENTS), lambda below: st.builds(Node, TEXT, st.none(), st.lists(below))
)
OTHERS: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (float, FLOATS),
    (datetime, MOMENTS),
    (Node, NODES),
    (Options, st.fixed_dictionaries({"retries": st.integers()}, optional={"note": TEXT})),
    (Item, st.builds(Item, TEXT, DECIMALS, TEXT | st.just(msgspec.UNSET))),
    (Order, st.builds(Order, no=st.integers(), placed=MOMENTS, total=DECIMALS, weight=FLOATS, note=TEXT)),
    (Any, st.recursive(st.none() | st.booleans() | st.integers() | FLOATS | TEXT, lambda each: st.lists(each))),
    (dict[str, Any], st.dictionaries(TEXT, st.none() | st.integers() | TEXT | st.lists(TEXT))),
]


@st.composite
def typed(draw: st.DrawFn) -> tuple[Any, Any]:
    """An annotation, up to two containers deep, and a value that fits it."""
    annotation, values = draw(st.sampled_from(SCALARS + OTHERS))
    hashable = any(annotation is each for each, _ in SCALARS)
    for _ in range(draw(st.integers(0, 2))):
        wrap: Callable[[], tuple[Any, st.SearchStrategy[Any]]]
        wrap = draw(st.sampled_from(wrappers(annotation, values, hashable)))
        annotation, values = wrap()
        hashable = False
    return annotation, draw(values)


def wrappers(
    annotation: Any, values: st.SearchStrategy[Any], hashable: bool
) -> list[Callable[[], tuple[Any, st.SearchStrategy[Any]]]]:
    few = st.lists(values, max_size=3)
    found: list[Callable[[], tuple[Any, st.SearchStrategy[Any]]]] = [
        lambda: (list.__class_getitem__(annotation), few),
        lambda: (tuple.__class_getitem__((annotation, ...)), few.map(tuple)),
        lambda: (tuple.__class_getitem__((int, annotation)), st.tuples(st.integers(), values)),
        lambda: (dict.__class_getitem__((str, annotation)), st.dictionaries(TEXT, values, max_size=3)),
        lambda: (annotation | None if annotation is not Any else Any, st.none() | values),
    ]
    if hashable:
        found += [
            lambda: (set.__class_getitem__(annotation), few.map(set)),
            lambda: (frozenset.__class_getitem__(annotation), few.map(frozenset)),
        ]
    return found


def same(left: Any, right: Any) -> bool:
    """Equal and of one type, all the way down: 1 is not True, and a Decimal keeps its zeros."""
    if isinstance(left, datetime):  # across zones `==` says no in the hour a clock is set back
        return isinstance(right, datetime) and left.isoformat() == right.isoformat()
    if isinstance(left, Decimal):
        return repr(left) == repr(right)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if dataclasses.is_dataclass(left):
        return type(left) is type(right) and same(vars(left), vars(right))
    if isinstance(left, pydantic.BaseModel):
        return type(left) is type(right) and same(left.__dict__, right.__dict__)
    return type(left) is type(right) and bool(left == right)


@pytest.mark.second
@given(typed())
@settings(deadline=None, max_examples=300)
def test_every_supported_type_comes_back_as_it_was(pair: tuple[Any, Any]) -> None:
    annotation, value = pair
    assert same(there_and_back(annotation, value), value)


@given(typed())
@settings(deadline=None, max_examples=60)
def test_a_call_that_is_written_as_json_makes_the_same_job(pair: tuple[Any, Any]) -> None:
    annotation, value = pair
    codec = one(annotation)
    text = codec.encode((value,), {})
    again = codec.encode(*codec.call_of(json.dumps(json.loads(text))))
    assert same(codec.decode(again)[0][0], codec.decode(text)[0][0])


@given(typed().filter(lambda pair: "Any" not in str(pair[0])))
@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
def test_jsonb_takes_it_and_gives_it_back(conn: psycopg.Connection, pair: tuple[Any, Any]) -> None:
    annotation, value = pair
    codec = one(annotation)
    [(stored,)] = conn.execute("SELECT %s::text::jsonb::text", [codec.encode((value,), {})]).fetchall()
    (back,), _ = codec.decode(stored)
    assert same(back, value)


def test_a_large_float_without_annotation_comes_back_as_the_int_jsonb_makes_of_it(conn: psycopg.Connection) -> None:
    value = 70441826236294450.0
    for annotation, kind in ((float, float), (Any, int)):
        text = one(annotation).encode((value,), {})
        [(stored,)] = conn.execute("SELECT %s::text::jsonb::text", [text]).fetchall()
        (back,), _ = one(annotation).decode(stored)
        assert type(back) is kind and float(back) == value


@pytest.mark.parametrize("value", [10**4000, 2**64, -(2**63) - 1])
def test_an_int_of_any_size_is_kept(conn: psycopg.Connection, value: int) -> None:
    text = one(int).encode((value,), {})
    [(stored,)] = conn.execute("SELECT %s::text::jsonb::text", [text]).fetchall()
    assert one(int).decode(stored) == ((value,), {})


class Safe(str):
    pass


@pytest.mark.parametrize(
    ("annotation", "value", "back"),
    [(float, 3, 3.0), (str, Safe("x"), "x"), (int, Level.HIGH, 2), (dict[int, str], {1: "a"}, {1: "a"})],
)
def test_what_fits_by_the_rules_of_python_is_taken(annotation: Any, value: Any, back: Any) -> None:
    found = there_and_back(annotation, value)
    assert (found, type(found)) == (back, type(back))


# -- Values that do not fit ------------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")
NAIVE = datetime(2026, 3, 1, 12)  # naive is the point
LMT = timezone(timedelta(seconds=3208))  # Berlin before 1893
CYCLE: list[Any] = []
CYCLE.append(CYCLE)
UNFIT: list[tuple[Any, Any]] = [
    (int, "5"),
    (int, True),
    (int, 5.0),
    (int, None),
    (float, "1"),
    (float, True),
    (float, NAN),
    (float, INF),
    (float, -INF),
    (float, 10**400),
    (float, 2**53 + 1),
    (bool, 1),
    (str, 5),
    (str, b"x"),
    (str, "a\0b"),
    (str, "\ud800"),
    (bytes, "x"),
    (datetime, NAIVE),
    (datetime, "2026-03-01T12:00:00Z"),
    (datetime, datetime(1880, 1, 1, tzinfo=LMT)),
    (date, NOON),
    (time, "12:00:00"),
    (timedelta, 5),
    (UUID, str(UUID(int=1))),
    (Decimal, 1.5),
    (Decimal, "1.5"),
    (Decimal, Decimal("NaN")),
    (Decimal, Decimal("-Infinity")),
    (Color, "red"),
    (Level, 1),
    (Literal["a", 1], "b"),
    (Literal["a", 1], True),
    (Annotated[int, msgspec.Meta(ge=0)], -1),
    (int | None, "5"),
    (int | str, 1.5),
    (list[int], (1, 2)),
    (tuple[int, ...], [1, 2]),
    (tuple[int, str], (1,)),
    (set[int], [1]),
    (dict[str, int], {1: 1}),
    (dict[str, int], {"a\0": 1}),
    (dict[str, int], {"\ud800": 1}),
    (dict[datetime, int], {NAIVE: 1}),
    (dict[float, int], {NAN: 1}),
    (Node, {"name": "x"}),
    (Node, Child("x")),
    (Node, Node(5)),  # type: ignore[arg-type]  # unfit is the point
    (Node, Node("a", None, [Node("b", NAIVE)])),
    (Node, Node("a\0")),
    (Point, (1, 2.0)),
    (Point, Point(1, NAN)),
    (Options, {}),
    (Options, {"retries": "1"}),
    (Options, {"retries": 1, "more": 2}),
    (Item, Item("x", Decimal("NaN"))),
    (Order, {"no": 1, "placed": NOON}),
    (Order, Order(no=1, placed=NOON, weight=NAN)),
    (Order, Order(no=1, placed=NOON, note="\0")),
    (Order, 5),
    (Any, NOON),
    (Any, (1, 2)),
    (Any, {1}),
    (Any, object()),
    (Any, {1: "a"}),
    (Any, NAN),
    (Any, CYCLE),
]
WRAPPERS: list[tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = [
    ("bare", lambda annotation: annotation, lambda value: value),
    ("list", lambda annotation: list.__class_getitem__(annotation), lambda value: [value]),
    ("tuple", lambda annotation: tuple.__class_getitem__((int, annotation)), lambda value: (1, value)),
    ("dict", lambda annotation: dict.__class_getitem__((str, annotation)), lambda value: {"k": value}),
]


@pytest.mark.promise("F17")
@pytest.mark.parametrize(("annotation", "value"), UNFIT, ids=[f"{i}-{each[0]}" for i, each in enumerate(UNFIT)])
@given(st.lists(st.sampled_from(WRAPPERS), max_size=3))
@settings(deadline=None, max_examples=12)
def test_an_unfit_value_is_refused_at_any_depth(annotation: Any, value: Any, depth: list[Any]) -> None:
    for _, type_of, value_of in depth:
        annotation, value = type_of(annotation), value_of(value)
    with pytest.raises(InvalidArguments, match=r"task 'app\.fn'.*parameter value"):
        one(annotation).encode((value,), {})


@pytest.mark.promise("F17")
@given(
    st.recursive(
        st.sampled_from([NAN, INF, "\0", "x\0y", "\udfff", b"x", NOON, object()]),
        lambda bad: st.one_of(
            st.builds(lambda each, other: [other, each], bad, st.integers()),
            st.builds(lambda each: {"k": each, "z": 1}, bad),
        ),
        max_leaves=1,
    )
)
@settings(deadline=None)
def test_an_unannotated_parameter_takes_plain_json_values_only(bad: Any) -> None:
    def fn(value): ...  # type: ignore[no-untyped-def]  # unannotated is the point

    with pytest.raises(InvalidArguments):
        Codec.of(fn).encode((bad,), {})


@pytest.mark.parametrize("text", [r"\u0000", r"\\u0000", "\\", "null", "NaN"])
def test_text_that_only_looks_bad_is_kept(text: str) -> None:
    assert there_and_back(str, text) == text


def test_the_message_names_task_parameter_place_given_and_needed() -> None:
    with pytest.raises(InvalidArguments) as raised:
        one(dict[str, list[Node]]).encode(({"k": [Node("a"), Node("b", below=[Node(5)])]},), {})  # type: ignore[arg-type]
    assert str(raised.value) == ("task 'app.fn': parameter value['k'][1].below[0].name: given 5 (int), needs str")


@pytest.mark.promise("F17")
def test_the_limit_is_one_mebibyte_of_utf8() -> None:
    envelope = len('{"value":""}')
    assert len(one(str).encode(("x" * (JSON_MOST - envelope),), {})) == JSON_MOST
    with pytest.raises(PayloadTooLarge, match=r"1,048,577 bytes.*1,048,576"):
        one(str).encode(("x" * (JSON_MOST - envelope + 1),), {})
    with pytest.raises(PayloadTooLarge):  # counted in bytes, not in characters
        one(str).encode(("é" * (JSON_MOST // 2),), {})


# -- Binding ---------------------------------------------------------------------------------------------------------


def plain(a: int, b: str = "b", *, c: int = 3) -> None: ...
def open_ended(a: int, /, *args: int, k: str = "", **kwargs: int) -> None: ...


@pytest.mark.parametrize(
    ("fn", "args", "kwargs", "text", "back"),
    [
        (plain, (1,), {}, '{"a":1}', ((1, "b"), {"c": 3})),
        (plain, (), {"a": 1, "c": 4}, '{"a":1,"c":4}', ((1, "b"), {"c": 4})),
        (open_ended, (1,), {}, '{"a":1}', ((1,), {"k": ""})),
        (
            open_ended,
            (1, 2, 3),
            {"k": "x", "m": 4},
            '{"a":1,"args":[2,3],"k":"x","m":4}',
            ((1, 2, 3), {"k": "x", "m": 4}),
        ),
    ],
)
def test_defaults_are_not_stored_but_given(
    fn: Callable[..., None], args: Any, kwargs: Any, text: str, back: Any
) -> None:
    codec = Codec.of(fn)
    assert codec.encode(args, kwargs) == text
    assert codec.decode(text) == codec.decode(text.encode()) == back
    assert codec.encode(*codec.call_of(text)) == text, "also of a call that a person has written as JSON"
    fn(*back[0], **back[1])


@pytest.mark.promise("F17")
@pytest.mark.parametrize(
    ("fn", "args", "kwargs", "why"),
    [
        (plain, (), {}, r"missing 'a'; it takes \(a, b='b', c=3\)"),
        (plain, (1,), {"x": 1}, r"no keyword parameter 'x'; it takes \(a, b='b', c=3\)$"),
        (plain, (1,), {"delay": 1}, r"no keyword parameter 'delay'; .* For the option write task\.using\(delay=…\)"),
        (plain, (1,), {"countdown": 1}, r"For the option write task\.using\(delay=…\)\.enqueue\(conn, …\)"),
        (
            lambda job, x: None,
            (1,),
            {},
            r"missing 'x'; it takes \(job, x\)\. If `job` .* annotate it: job: pgqueue\.Job",
        ),
        (plain, (1,), {"a": 1}, "parameter 'a' is given twice"),
        (plain, (1, "b", 3), {}, "given 3 positional arguments"),
        (open_ended, (), {"a": 1}, "no keyword parameter 'a'"),
        (open_ended, (1,), {"args": 1}, "no keyword parameter 'args'"),
        (open_ended, (1, "2"), {}, r"parameter args\[0\]: given '2'"),
        (open_ended, (1,), {"m": "2"}, "parameter m: given '2'"),
    ],
)
def test_a_call_that_does_not_fit_is_refused(fn: Any, args: Any, kwargs: Any, why: str) -> None:
    with pytest.raises(InvalidArguments, match=why):
        Codec.of(fn, "app.fn").encode(args, kwargs)


def test_a_mutable_default_is_the_functions_own() -> None:
    def fn(found: list[int] = []) -> None: ...  # noqa: B006  # the same object must come back

    assert Codec.of(fn).decode("{}")[0][0] is fn.__defaults__[0]  # type: ignore[index]


def test_no_parameters() -> None:
    def fn() -> None: ...

    codec = Codec.of(fn)
    assert codec.encode((), {}) == "{}"
    assert codec.decode("{}") == codec.decode(b"{}") == codec.decode(" { } ") == ((), {})


@pytest.mark.promise("F18")
@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        '{"a":1',
        '{"a":"1"}',
        '{"a":1,"z":2}',
        '{"b":"x"}',
        b"\xff",
        "\ud800",
        '{"a":1e400}',
        "[" * 5000,
    ],
)
def test_what_does_not_fit_the_function_as_it_is_now_is_one_clear_error(text: str | bytes) -> None:
    with pytest.raises(InvalidArguments, match=r"task 'app\.plain': the stored arguments do not fit"):
        Codec.of(plain, "app.plain").decode(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{}", "missing 'a'; it takes (a, b='b', c=3)"),
        ('{"a":1,"z":2}', "there is no 'z'; it takes (a, b='b', c=3)"),
        ('{"a":"1"}', "parameter a: needs `int`, found `str`"),
        ("[1]", "needs `object`, found `array`"),
    ],
)
def test_what_does_not_fit_is_said_in_our_words(text: str, why: str) -> None:
    with pytest.raises(UnfitArguments) as raised:
        Codec.of(plain, "app.plain").decode(text)
    assert str(raised.value).endswith(why)


@pytest.mark.parametrize("annotation", [datetime, list[datetime], Node | None, dict[str, Node]])
def test_a_naive_datetime_in_a_row_is_refused_too(annotation: Any) -> None:
    naive = {
        datetime: '"2026-03-01T12:00:00"',
        list[datetime]: '["2026-03-01T12:00:00"]',
        Node | None: '{"name":"x","at":"2026-03-01T12:00:00"}',
        dict[str, Node]: '{"k":{"name":"x","at":"2026-03-01T12:00:00"}}',
    }[annotation]
    with pytest.raises(InvalidArguments, match="time zone"):
        one(annotation).decode(f'{{"value":{naive}}}')


def test_keywords_only_and_json_objects() -> None:
    codec = keywords_only("far.away")
    assert codec.encode((), {"a": [1, None], "b": "x"}) == '{"a":[1,null],"b":"x"}'
    for args, kwargs in (((1,), {}), ((), {"a": NOON}), ((), {"\ud800": 1})):
        with pytest.raises(InvalidArguments, match=r"far\.away"):
            codec.encode(args, kwargs)
    assert json_object({"a": {"b": 1}}, "headers") == '{"a":{"b":1}}'
    for bad in ({1: 1}, {"a": "\0"}, {"a": NAN}, {"a": CYCLE}, [1], {"a": "x" * JSON_MOST}):
        with pytest.raises(InvalidArguments, match="headers"):
            json_object(bad, "headers")  # type: ignore[arg-type]  # unfit is the point


# -- Declaration -----------------------------------------------------------------------------------------------------


def hidden(value: Fraction) -> None: ...
def hidden_deep(value: list[Fraction]) -> None: ...
def job_by_name(job: Job, a: int) -> None: ...
def job_second(a: int, job: Job) -> None: ...


@pytest.mark.parametrize("fn", [hidden, hidden_deep, job_second])
def test_a_name_for_type_checkers_only_is_refused_at_declaration(fn: Any) -> None:
    with pytest.raises(InvalidOption, match=r"cannot be resolved.*TYPE_CHECKING"):
        Codec.of(fn)


@pytest.mark.parametrize(
    "annotation",
    [
        object,
        complex,
        type,
        complex | None,
        list[complex],
        Callable[[], int],
        msgspec.Raw,
        memoryview,
        dict[tuple[int, int], str],
        dict[bool, int],
        list[int] | tuple[int, ...],
    ],
)
def test_a_type_without_codec_is_refused_at_declaration(annotation: Any) -> None:
    with pytest.raises(InvalidOption, match=r"task 'app.fn', parameter value: .* cannot be stored"):
        one(annotation)


NotOurs = type("Job", (), {})
Ours = type("Job", (), {"__module__": "pgqueue.jobs.job"})


@pytest.mark.parametrize(
    ("annotation", "wants"), [(Ours, True), ("Job", True), ("pgqueue.Job", True), (int, False), ("int", False)]
)
def test_the_job_is_no_argument(annotation: Any, wants: bool) -> None:
    def fn(job: Any, a: int) -> None: ...

    fn.__annotations__["job"] = annotation
    codec = Codec.of(fn)
    assert codec.wants_job is wants
    if wants:
        assert codec.encode((1,), {}) == '{"a":1}'
        assert codec.decode('{"a":1}') == ((1,), {})


def test_a_class_named_job_of_somebody_else_is_not_ours() -> None:
    with pytest.raises(InvalidOption, match="cannot be stored"):
        one(NotOurs)
    assert Codec.of(job_by_name).wants_job


def test_pydantic_is_not_imported_for_tasks_without_its_models() -> None:
    program = (
        "import sys; from pgqueue.jobs.codec import Codec\n"
        "def fn(a: int, b: list[str]): ...\n"
        "codec = Codec.of(fn); codec.decode(codec.encode((1, ['x']), {}))\n"
        "sys.exit('pydantic' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
