"""The schema of a table: which columns there are, what each may hold, and what is the label.

A schema is public and is written down before the records are looked at, so that no record can
change how any other is read. Loads neither numpy nor torch.
"""

from collections import Counter
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.functional_validators import AfterValidator, BeforeValidator

from dpmac_cli.errors import InputError

#: What a draft has in place of everything that only a person can know.
FILL_IN = "FILL_IN"


def _distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"{name} is declared {count} times")
    return names


Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[tuple[Text, ...], AfterValidator(_distinct)]


class _Declared(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Column(_Declared):
    """A column that the network is given: numbers in a range, or one of several categories.

    Attributes:
        name: as in the table's header.
        range: lowest and highest number. Others are clipped to it.
        categories: each becomes an input that is 0 or 1, and so does "other", for all that is not
            declared.
        missing: "input" adds an input that is 1 where there is no value.
        outside: "refuse" rejects records beyond the range, or of other categories.
    """

    name: Text
    range: tuple[float, float] | None = None
    categories: Annotated[Texts, Field(max_length=10_000)] = ()
    missing: Literal["refuse", "input"] = "refuse"
    outside: Literal["accept", "refuse"] = "accept"

    @model_validator(mode="after")
    def _check(self) -> "Column":
        if (self.range is None) == (not self.categories):
            raise ValueError("needs either a range or categories")
        if self.range is not None and self.range[0] >= self.range[1]:
            raise ValueError("the first number of a range must be the smaller")
        return self


class Label(_Declared):
    """The column that is predicted, and the names of its classes."""

    column: Text
    classes: Annotated[Texts, Field(min_length=2)]


class TestSet(_Declared):
    """Records to test on: those that have one of some values in a column."""

    column: Text
    values: Annotated[Texts, Field(min_length=1)]


def _named(columns: Any) -> Any:
    """Take columns by their names, as they are written, each with its name inside."""
    if not isinstance(columns, dict):
        return columns
    return [{"name": n, **of} if isinstance(of, dict) else of for n, of in columns.items()]


class TableSchema(_Declared):
    """All that is known of a table without its records."""

    label: Label
    columns: Annotated[tuple[Column, ...], BeforeValidator(_named), Field(min_length=1)]
    drop: Texts = ()
    test: TestSet | None = None

    @model_validator(mode="after")
    def _check(self) -> "TableSchema":
        _distinct(self.declared)
        return self

    @property
    def declared(self) -> tuple[str, ...]:
        """Names of all columns of the table."""
        test = () if self.test is None else (self.test.column,)
        return (self.label.column, *(column.name for column in self.columns), *self.drop, *test)


class _Once(yaml.BaseLoader):
    """YAML whose values are all text, with no key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Reject keys that are given twice."""
        _distinct(tuple(str(key.value) for key, _ in node.value))
        return super().construct_mapping(node, deep=True)


def read_schema(file: Path) -> TableSchema:
    """Read a schema. Raises InputError with every fault found."""
    try:
        text = file.read_text(encoding="utf-8")
        lines = [line.partition("#")[0] for line in text.splitlines()]
        if left := [str(n) for n, line in enumerate(lines, 1) if FILL_IN in line]:
            where = f"line{'s' * (len(left) > 1)} {', '.join(left)}"
            raise ValueError(f"replace {FILL_IN} by what the columns mean, in {where}")
        given = _Once(text).get_single_data()
    except (OSError, yaml.YAMLError, RecursionError, ValueError) as failure:
        fault = " ".join(str(failure).split())
        if isinstance(failure, OSError):
            fault = f"cannot be read ({failure.strerror or failure})"
        raise InputError(f"--schema {file}: {fault}.") from failure
    return schema_of(given, f"--schema {file}")


def schema_of(given: Any, origin: str) -> TableSchema:
    """Validate what a schema file holds. Raises InputError with every fault found."""
    try:
        return TableSchema.model_validate(given)
    except ValidationError as failure:
        faults = []
        for error in failure.errors():
            where = list(error["loc"])
            if where[:1] == ["columns"] and len(where) > 1:  # a column's name, not its number
                where[1] = list(given["columns"])[int(where[1])]
            place = ".".join(map(str, where)) or "it"
            faults.append(f"{origin}: {place}: {error['msg'].removeprefix('Value error, ')}.")
        raise InputError(faults) from failure


def draft(
    file: Path, numeric: Mapping[str, bool | None], label: str | None, drop: tuple[str, ...]
) -> str:
    """Return a schema to fill in for a table.

    ``numeric`` says for each column whether it holds numbers; None where the file does not say.
    """
    from jinja2 import Template  # noqa: PLC0415  (only drafts need it)

    text = Path(__file__).with_name("schema.yaml.jinja").read_text("utf-8")
    template: Template = Template(text, trim_blocks=True)
    used = {_quoted(name): n for name, n in numeric.items() if name not in (label, *drop)}
    return template.render(
        file=file.name, label=label and _quoted(label), columns=used, drop=map(_quoted, drop)
    )


def _quoted(name: str) -> str:
    """Return a name as YAML text, whatever is in it."""
    style = None if name.isidentifier() else '"'
    return yaml.safe_dump(name, default_style=style, width=10**6).partition("\n")[0]
