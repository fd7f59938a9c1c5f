"""Declarative base, constraint names, column shorthands and the claim columns every reconciled table has."""

from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    BindParameter,
    CheckConstraint,
    ColumnElement,
    DateTime,
    MetaData,
    Sequence,
    Text,
    Uuid,
    any_,
    bindparam,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

Json = dict[str, Any]
JsonList = list[Any]


class Base(DeclarativeBase):
    """Base of all tables; constraint names are fixed so that schema revisions can name them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads it as it is.
        str: Text(),
        int: BigInteger(),
        datetime: DateTime(timezone=True),
        UUID: Uuid(),
        Json: JSONB(none_as_null=True),
        JsonList: JSONB(none_as_null=True),
    }


class Claimed:
    """A reconciler's short claim on a row: the claim's token, and when the claim expires."""

    claim_token: Mapped[UUID | None] = mapped_column(default=None)
    claim_expires_at: Mapped[datetime | None] = mapped_column(default=None)


ORDERS_SEQUENCE = Sequence("orders_seq", metadata=Base.metadata)
"""One number per change of any agent's orders."""


def among(column: Any, name: str) -> ColumnElement[bool]:
    """Whether `column`, a text, is in the list given as parameter `name`. Unlike IN it is one statement for any length,
    which is compiled and prepared once."""
    texts: BindParameter[Any] = bindparam(name, type_=ARRAY(Text()))
    return column == any_(texts)


def one_of(column: str, choices: type[StrEnum]) -> CheckConstraint:
    """CHECK that `column` is one of an enum's values (null passes)."""
    values = ", ".join(f"'{choice.value}'" for choice in choices)
    return CheckConstraint(f"{column} IN ({values})", name=f"{column}_known")
