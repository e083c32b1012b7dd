"""What the annotation of a result shows: a part of a class that no value of it would have in its JSON."""

from __future__ import annotations

import dataclasses
import re
import typing
from typing import Any

import attrs
import pydantic
import pytest

from pgqueue.client import tasks
from pgqueue.client.tasks import task
from pgqueue.errors import InvalidOption


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "registry", {})


class Excluded(pydantic.BaseModel):
    shown: int = 0
    hidden: str = pydantic.Field(exclude=True)


class ExcludedDefault(pydantic.BaseModel):
    hidden: str = pydantic.Field("", exclude=True)


class Secret(pydantic.BaseModel):
    token: pydantic.SecretStr


class OptionalSecret(pydantic.BaseModel):
    token: pydantic.SecretBytes | None = None


class Told(pydantic.BaseModel):
    token: pydantic.SecretStr

    @pydantic.field_serializer("token")
    def tell(self, token: pydantic.SecretStr) -> str:
        return token.get_secret_value()


class Annotated(pydantic.BaseModel):
    token: typing.Annotated[pydantic.SecretStr, pydantic.PlainSerializer(lambda token: token.get_secret_value())]


class WritesItself(pydantic.BaseModel):
    token: pydantic.SecretStr

    @pydantic.model_serializer
    def write(self) -> dict[str, str]:
        return {"token": self.token.get_secret_value()}


class Outer(pydantic.BaseModel):
    inner: dict[str, list[Secret]]
    again: Outer | None = None


class Itself(pydantic.BaseModel):
    again: Itself | None = None


@attrs.define
class Private:
    _only: int


@attrs.define
class PrivateDefault:
    _only: int = 3
    _cache: dict[str, int] = attrs.field(init=False, factory=dict)


@dataclasses.dataclass
class Holder:
    private: Private


NEVER = {
    Excluded: "Excluded.hidden: would not be in the JSON",
    Secret: "Secret.token: is hidden",
    OptionalSecret: "OptionalSecret.token: is hidden",
    Outer: "Secret.token: is hidden",
    list[Excluded] | None: "Excluded.hidden: would not",
    Private: "Private._only: would not",
    Holder: "Private._only: would not",
    tuple[int, Private]: "Private._only: would not",
}


@pytest.mark.promise("F224")
@pytest.mark.parametrize("annotation", NEVER, ids=str)
def test_what_no_result_of_an_annotation_can_keep_is_refused_at_the_declaration(annotation: Any) -> None:
    def gives() -> None: ...

    gives.__annotations__["return"] = annotation
    with pytest.raises(InvalidOption, match=f"what it returns: {re.escape(NEVER[annotation])}.*store_result=False"):
        task(name="results.never")(gives)
    assert task(name="results.not_stored", store_result=False)(gives).store_result is False


@pytest.mark.promise("F224")
@pytest.mark.parametrize(
    "annotation", [ExcludedDefault, Told, Annotated, WritesItself, Itself, PrivateDefault, "Nowhere", int], ids=str
)
def test_an_annotation_that_shows_nothing_is_taken(annotation: Any) -> None:
    def gives() -> None: ...

    gives.__annotations__["return"] = annotation
    assert task(name="results.taken")(gives).name == "results.taken"
