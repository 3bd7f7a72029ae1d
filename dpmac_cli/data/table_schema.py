"""Schema of a table: its columns, their allowed values, and the label.

A schema is public and is written before looking at the records, so no record can change how
another one is read. Imports neither numpy nor torch.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.functional_validators import AfterValidator, BeforeValidator

from dpmac_cli.errors import InputError

#: Placeholder in a draft for values that the author must fill in.
FILL_IN = "FILL_IN"
#: Default and limits of the number of tokens of a text, which has a first and a last.
TOKENS, MIN_TOKENS, MAX_TOKENS = 128, 3, 8192


def _distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"{name} is declared {count} times")
    return names


Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[tuple[Text, ...], AfterValidator(_distinct)]


class _Declared(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _two(ends: Any) -> Any:
    if isinstance(ends, list | tuple) and len(ends) == 2:
        return ends
    raise ValueError(f"needs two numbers, the lowest and the highest, such as [0, 100], not {ends}")


#: Largest absolute value of a target's range, and smallest width relative to its ends.
FARTHEST, NARROWEST = 1e30, 1e-5
Range = Annotated[tuple[float, float], BeforeValidator(_two)]


class Column(_Declared):
    """A column that is an input of the network: numbers in a range, categories, or text.

    Attributes:
        name: name in the table's header.
        range: lowest and highest number. Other numbers are clipped to it.
        categories: each becomes an input that is 0 or 1. One more input, "other", stands for all
            undeclared values.
        text: largest number of tokens of a text. Longer texts are truncated.
        missing: "input" adds an input that is 1 where the value is missing.
        outside: "refuse" rejects records outside the range, or with other categories.
    """

    name: Text
    range: Range | None = None
    categories: Annotated[Texts, Field(max_length=10_000)] = ()
    text: Annotated[int, Field(ge=MIN_TOKENS, le=MAX_TOKENS)] | None = None
    missing: Literal["refuse", "input"] = "refuse"
    outside: Literal["accept", "refuse"] = "accept"

    @model_validator(mode="after")
    def _check(self) -> "Column":
        if (self.range is not None) + bool(self.categories) + (self.text is not None) != 1:
            raise ValueError("needs either a range or categories or text")
        if self.text is not None and self.outside == "refuse":
            raise ValueError("a text has no values to refuse: leave out outside")
        if self.range is not None and self.range[0] >= self.range[1]:
            raise ValueError("the first number of a range must be smaller than the second")
        return self

    @property
    def inputs(self) -> int:
        """Return the number of inputs that the column becomes."""
        values = self.text or len(self.categories) + (self.outside == "accept")
        return (1 if self.range is not None else values) + (self.missing == "input")


class Label(_Declared):
    """The column to predict: classes, or numbers in a public range.

    Attributes:
        column: name in the table's header.
        classes: names of its classes.
        range: lowest and highest number. Other numbers are clipped to it.
        transform: "log1p" predicts log(1 + y), for numbers of very different sizes.
        kind: "count" predicts counts, with a range that begins at 0.
        outside: "refuse" rejects records outside the range.
    """

    column: Text
    classes: Texts = ()
    range: Range | None = None
    transform: Literal["none", "log1p"] = "none"
    kind: Literal["number", "count"] = "number"
    outside: Literal["accept", "refuse"] = "accept"

    @model_validator(mode="after")
    def _check(self) -> "Label":
        if (self.range is None) == (not self.classes):
            raise ValueError(
                "needs either the names of its classes, such as classes: [no, yes], or for numbers "
                "to predict their public range, such as range: [0, 100]"
            )
        if self.range is None:
            if len(self.classes) < 2:
                raise ValueError("classes: needs at least two names")
            # A schema in a report has all fields.
            if (self.transform, self.kind, self.outside) != ("none", "number", "accept"):
                raise ValueError("transform, kind and outside are for numbers, not for classes")
            return self
        for fault in faults_of_range(*self.range, self.transform, self.kind):
            raise ValueError(fault)
        return self


def faults_of_range(low: float, high: float, transform: str, kind: str) -> Iterator[str]:
    """Yield faults of the declared range of numbers to predict."""
    if not -FARTHEST <= low < high <= FARTHEST or high - low < NARROWEST * max(-low, high):
        order = " Swap them." if low > high else ""
        yield (
            f"the range of the target is {low:g} to {high:g}, but the first number must be smaller "
            f"than the second, both between -{FARTHEST:g} and {FARTHEST:g}.{order}"
        )
    elif kind == "count" and (low != 0 or transform != "none"):
        yield "a count needs a range that begins at 0, such as range: [0, 30], and no transform"
    elif transform == "log1p" and low <= -1:
        yield f"transform: log1p needs a range above -1, because it takes the log of 1 + {low:g}"
    elif transform not in ("none", "log1p") or kind not in ("number", "count"):
        yield f"transform {transform} must be none or log1p, and kind {kind} number or count"


class TestSet(_Declared):
    """Records to test on: those with one of the given values in a column."""

    column: Text
    values: Annotated[Texts, Field(min_length=1)]


def _named(columns: Any) -> Any:
    """Convert a mapping of column names to a list of columns that contain their names."""
    if not isinstance(columns, dict):
        return columns
    return [{"name": n, **of} if isinstance(of, dict) else of for n, of in columns.items()]


class TableSchema(_Declared):
    """Public description of a table."""

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
        """Return the names of all columns of the table."""
        test = () if self.test is None else (self.test.column,)
        return (self.label.column, *(column.name for column in self.columns), *self.drop, *test)


class _Once(yaml.BaseLoader):
    """YAML loader that reads all values as text and rejects duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Reject duplicate keys."""
        _distinct(tuple(str(key.value) for key, _ in node.value))
        return super().construct_mapping(node, deep=True)


def read_schema(file: Path) -> TableSchema:
    """Read a schema. Raises InputError with every fault found."""
    try:
        text = file.read_text(encoding="utf-8")
        lines = [line.partition("#")[0] for line in text.splitlines()]
        if left := [str(n) for n, line in enumerate(lines, 1) if FILL_IN in line]:
            where = f"line{'s' * (len(left) > 1)} {', '.join(left)}"
            raise ValueError(f"fill in the columns' values in place of {FILL_IN} in {where}")
        given = _Once(text).get_single_data()
    except (OSError, yaml.YAMLError, RecursionError, ValueError) as failure:
        fault = " ".join(str(failure).split())
        if isinstance(failure, OSError):
            fault = f"cannot be read ({failure.strerror or failure})"
        raise InputError(f"--schema {file}: {fault}.") from failure
    return schema_of(given, f"--schema {file}")


def schema_of(given: Any, origin: str) -> TableSchema:
    """Validate the contents of a schema file. Raises InputError with every fault found."""
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
    file: Path,
    numeric: Mapping[str, bool | None],
    label: str | None,
    drop: tuple[str, ...] = (),
    texts: tuple[str, ...] = (),
) -> str:
    """Return a draft of a schema for a table.

    Args:
        file: the table.
        numeric: whether each column holds numbers; None if the file does not declare it.
        label: column to predict.
        drop: columns to leave out.
        texts: columns of texts.
    """
    from jinja2 import Template  # noqa: PLC0415  (only drafts need it)

    text = Path(__file__).with_name("schema.yaml.jinja").read_text("utf-8")
    template: Template = Template(text, trim_blocks=True)
    used = {_quoted(name): n for name, n in numeric.items() if name not in (label, *drop)}
    return template.render(
        file=file.name,
        label=label and _quoted(label),
        columns=used,
        drop=map(_quoted, drop),
        texts=[_quoted(name) for name in texts],
    )


def _quoted(name: str) -> str:
    """Return a name as YAML text, quoted if necessary."""
    style = None if name.isidentifier() else '"'
    return yaml.safe_dump(name, default_style=style, width=10**6).partition("\n")[0]
