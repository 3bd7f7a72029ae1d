"""dpmac predict: classes of new records."""

from importlib.util import find_spec
from pathlib import Path

from rich.text import Text

from dpmac_cli.cli import console
from dpmac_cli.cli.evaluate import OWN_MODEL
from dpmac_cli.cli.failures import explained
from dpmac_cli.cli.options import DEBUG, argument, option, path_option, switch, with_options
from dpmac_cli.config.given import parse
from dpmac_cli.errors import InputError

DEFAULT_OUT = Path("predictions.csv")


@with_options(
    argument("run", "A run folder, or a model.safetensors.", "RUN", kind=Path, default=...),
    argument("data", "Images, an .npz or a table.", "DATA", kind=Path, default=...),
    option("model", OWN_MODEL, "Task", "FILE.py:FACTORY"),
    option("device", "auto, cpu, cuda or cuda:N. [default: auto]", "Run", "STR", default="auto"),
    path_option("out", f"A .csv or .parquet to write. [default: {DEFAULT_OUT}]", "Output"),
    switch("force", "Replace that file.", "Output"),
    switch("quiet", "Print nothing but errors.", "Output"),
    DEBUG,
)
@explained
def predict(
    run: Path,
    data: Path,
    model: str | None,
    device: str,
    out: Path | None,
    force: bool,
    quiet: bool,
) -> None:
    """Load a model, predict and write a file."""
    out = out or DEFAULT_OUT
    errors = []
    if out.suffix not in (".csv", ".parquet"):
        errors.append(f"--out {out} must end in .csv or .parquet.")
    elif out.suffix == ".parquet" and find_spec("pyarrow") is None:
        errors.append("A .parquet is written by pyarrow: pip install 'dpmac[tables]'")
    if not out.parent.is_dir():
        errors.append(f"The folder {out.parent} of --out does not exist.")
    if out.exists() and not (force and out.is_file()):
        errors.append(f"{out} exists. Add --force to replace it, or name another --out.")
    if errors:
        raise InputError(errors)
    parse({"device": device})
    with console.waiting(quiet, "loading"), console.kept_clear(json=True):
        from dpmac_cli.runs.prediction import predict  # noqa: PLC0415  (loads torch)

        found = predict(run, data, device, model)
    found.write(out)
    if lost := found.unanswered:
        console.print_notes([f"for {lost:,} records the output is not a number: no class"])
    if not quiet:
        console.stdout().print(Text(f"{out}: predictions for {len(found.records):,} records"))
