"""dpmac schema: a draft of a table's schema."""

from pathlib import Path

from dpmac_cli.cli import console
from dpmac_cli.cli.failures import explained
from dpmac_cli.cli.options import DEBUG, argument, option, with_options
from dpmac_cli.config.given import near
from dpmac_cli.data.table_schema import draft
from dpmac_cli.errors import InputError


@with_options(
    argument("file", "Table in CSV or Parquet.", "FILE", kind=Path, default=...),
    option("label", "Column to predict."),
    option("drop", "Columns that are not used, with commas between them."),
    DEBUG,
)
@explained
def schema(file: Path, label: str | None, drop: str | None) -> None:
    """Print the draft."""
    from dpmac_cli.data.table_file import numeric_columns  # noqa: PLC0415  (loads an extra)

    kinds = numeric_columns(file)
    dropped = tuple(name.strip() for name in drop.split(",")) if drop else ()
    given = {**dict.fromkeys(dropped, "drop"), **({label: "label"} if label else {})}
    unknown = [
        f"--{flag} {name}: {file} has no such column.{near(name, kinds)}"
        for name, flag in given.items()
        if name not in kinds
    ]
    if unknown:
        raise InputError(unknown)
    console.print_result(draft(file, kinds, label, dropped))
