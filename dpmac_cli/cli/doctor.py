"""dpmac doctor."""

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from dpmac_cli.cli import console
from dpmac_cli.cli.checkup import ABSENT, BUILT_IN, HERE, PARTLY, Checkup, Place, examine
from dpmac_cli.cli.failures import explained
from dpmac_cli.cli.options import DEBUG, JSON, option, with_options
from dpmac_cli.config.extras import EXTRAS
from dpmac_cli.config.resolve import parse
from dpmac_cli.storage.files import to_json

HELP = """Say what this machine has for dpmac to work with, and what is missing and what for.

Made to be pasted into a report of a bug: it names no user and no host, and the home folder is ~.
Nothing is downloaded, verified or written.

Exit codes: 0 done, whatever is missing, 1 a bug in dpmac, 2 usage or input.
"""

#: Each 1024 times the one before.
SIZES = ("bytes", "KiB", "MiB", "GiB", "TiB")
MISSING = console.ATTENTION
STATES = {
    BUILT_IN: "come with packages",
    HERE: "there",
    PARTLY: "not whole, would be downloaded",
    ABSENT: "not there, would be downloaded",
}


@with_options(
    option("data_dir", "Where data sets lie (or DPMAC_DATA_DIR).", metavar="PATH"), JSON, DEBUG
)
@explained
def doctor(data_dir: str | None, json: bool) -> None:
    """Look, and print what was found."""
    found = examine(parse({"data_dir": data_dir}).get("data_dir"))
    if json:
        console.print_result(to_json(found.as_json()))
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, text in _lines(found):
        table.add_row(name, text)
    console.stdout().print(table)


def _lines(found: Checkup) -> Iterator[tuple[str, Text]]:
    """What a line is about, and what it says; what is missing in another colour."""
    there = [f"{name} {version}" for name, version in found.versions.items() if version]
    missing = [f"{name} is missing" for name, version in found.versions.items() if not version]
    yield "versions", Text(", ".join(there))
    if missing:
        yield "", Text(f"{', '.join(missing)}: pip install dpmac", style=MISSING)
    yield from _machine(found)
    yield from _data(found)
    if found.cipher:
        yield "secure noise", Text("AES-256 gives its published test vector: --secure is possible")
    else:
        yield "secure noise", Text("AES-256 of cryptography fails: no run is possible", MISSING)
    if found.compiler:
        yield "compiler", Text(f"{found.compiler}: --compile is possible")
    else:
        yield "compiler", Text("no C++ compiler works, which --compile needs", MISSING)
    for extra, (package, use) in EXTRAS.items():
        version = found.extras[package]
        if version:
            yield package, Text(f"{version}, for {use}")
        else:
            yield package, Text(f"not installed: {use} needs pip install 'dpmac[{extra}]'", MISSING)
    yield "runs", _place(found.runs)
    held = f"{size(found.features.size or 0)} in "
    yield "features", Text.assemble(held, _place(found.features))


def _machine(found: Checkup) -> Iterator[tuple[str, Text]]:
    devices = found.devices
    memory = "" if devices.memory is None else f", {size(devices.memory)} of memory"
    yield "system", Text(found.system)
    yield "processor", Text(f"{found.processor}, cores to use: {devices.cores}{memory}")
    for fault in devices.faults:
        yield "fault", Text(fault, MISSING)
    if devices.threads is None:
        yield "torch", Text("cannot be loaded, and nothing can be trained", MISSING)
        return
    built = f"CUDA {devices.cuda_build}" if devices.cuda_build else "the CPU alone"
    yield (
        "torch",
        Text(f"threads: {devices.threads}, with {devices.instructions}; built for {built}"),
    )
    for number, (name, bytes_) in enumerate(devices.cuda):
        yield f"cuda:{number}", Text(f"{name}, {size(bytes_)}")
    if not devices.cuda:
        yield "cuda", Text("no device: runs are trained on the CPU", MISSING)


def _data(found: Checkup) -> Iterator[tuple[str, Text]]:
    yield "data sets", _place(found.data)
    for kind, words in STATES.items():
        names = [name for name, state in found.datasets.items() if state == kind]
        if names:
            yield "", Text(f"{words}: {', '.join(names)}", MISSING if kind == PARTLY else "")


def _place(place: Place) -> Text:
    free = "" if place.free is None else f", {size(place.free)} free"
    text = Text(f"{place.folder}{free}")
    return text if place.writable else text.append(", cannot be written to", style=MISSING)


def size(count: int) -> str:
    """A number of bytes in the unit that suits it."""
    power = min(max(count.bit_length() - 1, 0) // 10, len(SIZES) - 1)
    amount = f"{count / 1024**power:,.1f}" if power else str(count)
    return f"{amount} {SIZES[power]}"
