"""Schema of a table: its columns, their allowed values, and the label.

A schema is public and is written before looking at the records, so no record can change how
another one is read. Imports neither numpy nor torch.
"""

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import (
    Field,
    ValidationError,
    model_validator,
)
from pydantic.functional_validators import AfterValidator, BeforeValidator

from dpmac_cli.bounded_yaml import TextLoader, read_text
from dpmac_cli.config.flags import near
from dpmac_cli.data.column_schema import (
    UTF8,
    CellValues,
    Column,
    Declared,
    Label,
    Text,
    Texts,
    Written,
    distinct,
    is_encoding,
)
from dpmac_cli.errors import InputError, plain
from dpmac_cli.libraries import jinja2

#: Placeholder in a draft for values that the author must fill in.
FILL_IN = "FILL_IN"
#: Names of columns that name records, such as id, patient_id and PatientID.
ID = re.compile(r"(.*[\W_])?(id|Id|ID)|.*[a-z](Id|ID)")


class TestSet(Declared):
    """Records to test on: those with one of some values in a column.

    Attributes:
        column: name in the table's header.
        values: values of records to test on.
    """

    column: Text
    values: Annotated[CellValues, Field(min_length=1)]


def _named(columns: Any) -> Any:
    """Convert a mapping of column names to a list of columns that contain their names."""
    if not isinstance(columns, dict):
        return columns
    named = []
    for name, contents in columns.items():
        named.append({"name": name, **contents} if isinstance(contents, dict) else contents)
    return named


def _known(encoding: str) -> str:
    """Return the name of an encoding.

    Args:
        encoding: a name as Python has it.

    Raises:
        ValueError: a byte that is not text would change how other lines are read.
    """
    if encoding.lower().replace("_", "-").startswith("utf-16"):
        raise ValueError(f"{encoding} is read by its byte order mark; leave encoding out")
    if not is_encoding(encoding):
        raise ValueError(f"'{encoding}' is no encoding with separate lines; use utf-8 or cp1252")
    return encoding


class TableSchema(Written):
    """Public description of a table.

    Attributes:
        encoding: encoding of a CSV, as Python names it.
        delimiter: character that separates the columns of a CSV; by default the most frequent of
            comma, semicolon, tab and bar in its header.
        decimal, thousands: how all numbers are written whose columns do not declare it.
        missing_words: words for a missing value in all columns that do not list them as values.
        from_records: whether kinds and classes were read from the records, as in a draft that
            nobody has checked. Report and card then name them as facts of the records.
        label: the column to predict. None for a language model.
        columns: the inputs of the network.
        drop: columns that are not used.
        test: records to test on; None to hold some out.
    """

    encoding: Annotated[str, AfterValidator(_known)] = UTF8
    delimiter: Annotated[str, Field(pattern=r"^[^\w\s\"]$|^[ \t]$")] | None = None
    missing_words: CellValues = ()
    from_records: bool = False
    label: Label | None = None
    columns: Annotated[tuple[Column, ...], BeforeValidator(_named), Field(min_length=1)]
    drop: Texts = ()
    test: TestSet | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Complete columns and the label with how the table is written.

        Raises ValueError if a column is declared twice.
        """
        distinct(self.declared)
        label = self.label
        if label is not None:
            label = label.model_copy(update=self._as_table(label))
        columns = []
        for column in self.columns:
            columns.append(column.model_copy(update=self._as_table(column)))
        return self.model_copy(update={"label": label, "columns": tuple(columns)})

    def _as_table(self, column: Column | Label) -> dict[str, Any]:
        """Return how a column is written that does not declare it: as the table is.

        Args:
            column: a column, or the label. Its own words for a missing value stay, and words of the
                table that are among its values are none.

        Returns:
            fields to update.
        """
        declared = (*column.missing_words, *column.values)
        words = [word for word in self.missing_words if word not in declared]
        update: dict[str, Any] = {"missing_words": (*column.missing_words, *words)}
        if column.type == "number" and not (column.decimal or column.thousands):
            update["decimal"] = self.decimal
            update["thousands"] = self.thousands
        return update

    def words_in(self, name: str) -> tuple[str, ...]:
        """Return the words for a missing value in a column, which need not be an input.

        Args:
            name: name of the column, such as that of the unit.
        """
        for column in self.columns:
            if column.name == name:
                return column.missing_words
        if self.label is not None and self.label.column == name:
            return self.label.missing_words
        return self.missing_words

    @property
    def inferred(self) -> tuple[str, ...]:
        """Return the parts that were read from the records; () if all were declared."""
        if not self.from_records:
            return ()
        has_classes = self.label is not None and bool(self.label.classes)
        return ("kinds of columns", "classes") if has_classes else ("kinds of columns",)

    @property
    def declared(self) -> tuple[str, ...]:
        """Return the names of all columns of the table: the label, inputs, and others.

        Dropped columns and the one that tells test records are among them.
        """
        names = [] if self.label is None else [self.label.column]
        names += [column.name for column in self.columns]
        names += self.drop
        if self.test is not None:
            names.append(self.test.column)
        return tuple(names)


class _Once(TextLoader):
    """YAML loader that reads all values as text and rejects duplicate keys."""

    def construct_mapping(
        self,
        node: yaml.MappingNode,
        deep: bool = False,
    ) -> dict[Hashable, Any]:
        """Return the values of a mapping. Raises ValueError for duplicate keys."""
        counts = Counter(str(key.value) for key, _ in node.value)
        seen = set[str]()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                line = key.start_mark.line + 1
                raise ValueError(f"line {line}: {name} is declared {counts[name]} times")
            seen.add(name)
        return super().construct_mapping(node, deep=True)


def read_schema(file: Path) -> TableSchema:
    """Read a schema.

    Args:
        file: a schema in YAML, in UTF-8. All values are read as text, so that 007 is not 7.

    Raises:
        InputError: with every fault found, and its line.
    """
    try:
        text = read_text(file)
        _check_filled_in(text)
        loader = _Once(text)
        loader.name = str(file)  # for its messages
        root = loader.get_single_node()
        contents = None if root is None else loader.construct_document(root)
    except UnicodeDecodeError as failure:
        raise InputError(f"{{schema=}}{file} is not in UTF-8. Save it as UTF-8.") from failure
    except (OSError, yaml.YAMLError, RecursionError, ValueError) as failure:
        fault = " ".join(str(failure).split())
        if isinstance(failure, OSError):
            fault = f"cannot be read ({failure.strerror or failure})"
        raise InputError(f"{{schema=}}{file}: {fault}.") from failure
    return schema_of(contents, f"{{schema=}}{file}", root)


def _check_filled_in(text: str) -> None:
    """Raise ValueError for a draft with placeholders.

    Args:
        text: contents of a schema. Placeholders in comments do not count.
    """
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        if FILL_IN in line.partition("#")[0]:
            lines.append(str(number))
    if lines:
        where = f"line{'s' * (len(lines) > 1)} {', '.join(lines)}"
        raise ValueError(f"fill in the columns' values in place of {FILL_IN} in {where}")


#: Models of the parts of a schema that have keys of their own, by the keys of the parts.
PARTS: Mapping[str, type[Declared]] = {"columns": Column, "label": Label, "test": TestSet}


def schema_of(
    contents: Any,
    origin: str,
    root: yaml.Node | None = None,
) -> TableSchema:
    """Validate the contents of a schema file.

    Args:
        contents: the contents.
        origin: what messages call the schema.
        root: the contents as nodes of a file, whose lines messages name; None without a file.

    Raises:
        InputError: with every fault found.
    """
    try:
        return TableSchema.model_validate(contents)
    except ValidationError as failure:
        faults = []
        for error in failure.errors():
            where = list(error["loc"])
            if where[:1] == ["columns"] and len(where) > 1:  # a column's name, not its number
                where[1] = list(contents["columns"])[int(where[1])]
            place = ".".join(map(str, where)) or "it"
            if error["type"] == "extra_forbidden":
                model = PARTS[str(where[0])] if len(where) > 1 else TableSchema
                why = f"there is no such key.{near(str(where[-1]), model.model_fields)}"
            else:
                why = f"{plain(error['msg'].removeprefix('Value error, '))}."
            faults.append(f"{origin}{_line_of(where, root)}: {place}: {why}")
        raise InputError(faults) from failure


def _line_of(
    where: Sequence[str | int],
    root: yaml.Node | None,
) -> str:
    """Return the line of a part of a schema, such as ", line 3"; "" if it is not from a file.

    Of a part that is missing, it is that of the part around it.

    Args:
        where: keys that lead to the part.
        root: the contents of the file as nodes; None without a file.
    """
    if root is None:
        return ""
    node, line = root, root.start_mark.line
    for step in where:
        parts = node.value if isinstance(node, yaml.MappingNode) else []
        named = [pair for pair in parts if pair[0].value == str(step)]
        if not named:
            break
        key, node = named[0]
        line = key.start_mark.line
    return f", line {line + 1}"


def draft(
    file: Path,
    kinds: Mapping[str, str | None],
    label: str | None = None,
    drop: Sequence[str] = (),
    escaped: bool = False,
    encoding: str = UTF8,
) -> str:
    """Return a draft of a schema for a table.

    Args:
        file: the table.
        kinds: type of each column, as in :class:`Column`; None if it is not declared.
        label: column to predict.
        drop: columns to leave out.
        escaped: whether to write letters beyond ASCII as escapes.
        encoding: encoding of a CSV.
    """
    text = Path(__file__).with_name("schema.yaml.jinja").read_text("utf-8")
    template: jinja2.Template = jinja2.Template(text, trim_blocks=True, keep_trailing_newline=True)
    names = {name: quoted(name, escaped) for name in kinds}
    columns = dict[str, str | None]()
    identifiers = list[str]()
    for name, kind in kinds.items():
        if name in (label, *drop):
            continue
        columns[names[name]] = kind
        if is_named_as_id(name):
            identifiers.append(names[name])
    return template.render(
        file=file.name,
        csv=file.suffix != ".parquet",
        encoding=None if encoding == UTF8 else encoding,
        label=None if label is None else names[label],
        label_kind=None if label is None else kinds[label],
        columns=columns,
        drop=[names[name] for name in drop],
        identifiers=identifiers,
    )


def is_named_as_id(name: str) -> bool:
    """Return whether the name of a column ends in the word id.

    Example:
        >>> is_named_as_id("patient_id"), is_named_as_id("humid")
        (True, False)
    """
    return ID.fullmatch(name) is not None


def as_list(names: Iterable[str]) -> str:
    """Return names of columns for a message; those with blanks or without letters are quoted.

    Example:
        >>> as_list(["age", "", " sex"])
        "age, '', ' sex'"
    """
    shown = list[str]()
    for name in names:
        shown.append(name if len(name.split()) == 1 and name == name.strip() else repr(name))
    return ", ".join(shown)


def quoted(name: str, escaped: bool) -> str:
    """Return a name as YAML text, quoted if necessary.

    Args:
        name: name of a column.
        escaped: whether to write letters beyond ASCII as escapes.

    Example:
        >>> quoted("age", escaped=False), quoted("age: years", escaped=False)
        ('age', '"age: years"')
    """
    style = None if name.isidentifier() else '"'
    text = yaml.safe_dump(name, default_style=style, width=10**6, allow_unicode=not escaped)
    return text.partition("\n")[0]
