"""dpmac schema and dpmac cache: drafts of table schemas, and the cache."""

from pathlib import Path

from rich.filesize import decimal
from rich.text import Text

from dpmac_cli.cli import console
from dpmac_cli.cli.options import argument, with_options
from dpmac_cli.config.given import near
from dpmac_cli.data.table_schema import draft
from dpmac_cli.errors import raise_errors
from dpmac_cli.storage.paths import cache_folder, cache_size


@with_options("schema", argument("file", "Table in CSV or Parquet."))
def schema(file: Path, label: str | None, drop: str | None) -> None:
    """Print the draft."""
    from dpmac_cli.data.table_file import numeric_columns  # noqa: PLC0415  (loads an extra)

    kinds = numeric_columns(file)
    dropped = tuple(name.strip() for name in drop.split(",")) if drop else ()
    given = {**dict.fromkeys(dropped, "drop"), **({label: "label"} if label else {})}
    raise_errors(
        f"--{flag} {name}: {file} has no such column.{near(name, kinds)}"
        for name, flag in given.items()
        if name not in kinds
    )
    console.print_result(draft(file, kinds, label, dropped))


@with_options("cache")
def cache(clear: bool) -> None:
    """Print the size and folder of the cache, or clear it."""
    from dpmac_cli.storage.cache import kept_files, make_room  # noqa: PLC0415  (loads numpy)

    folder, limit = cache_folder(), cache_size()
    removed = make_room(folder, -1) if clear else []
    sizes = [file.stat().st_size for file in kept_files(folder)]
    total, most = decimal(sum(sizes)), decimal(int(limit))
    said = f"{folder}: {len(sizes)} files, {total} of {most}; {len(removed)} removed"
    console.stdout().print(Text(said))
