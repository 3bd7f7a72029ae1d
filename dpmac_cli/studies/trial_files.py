"""Files that every trial of a search reads: code of a network, and public weights.

If one changed in between, later trials would not be distributed like earlier ones, which the
epsilon of a search rests on. Imports no torch.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from dpmac_cli.config.plan import NetworkPlan, TrainPlan
from dpmac_cli.errors import InputError
from dpmac_cli.models.encoders import FILES, TextEncoder
from dpmac_cli.models.registry import UserModel


def file_sums(plans: Iterable[TrainPlan]) -> dict[str, str]:
    """Return the SHA-256 of each file that trials with these plans read, by its path.

    A file that does not exist is left out; training reports it. Raises OSError.
    """
    found = {file for plan in plans for file in _files_of(plan.network) if file.is_file()}
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(found)}


def check_files(plans: Iterable[TrainPlan], before: Mapping[str, str]) -> None:
    """Raise InputError if a file is not what it was when the search started."""
    now = file_sums(plans)
    changed = sorted(file for file in {*now, *before} if now.get(file) != before.get(file))
    if changed:
        raise InputError(
            f"{' and '.join(changed)} changed since the search started, but its epsilon is for "
            "trials that are alike. Restore the original and repeat the command, or start a new "
            "search with another --out."
        )


def _files_of(network: NetworkPlan) -> Iterator[Path]:
    """Yield files of the user that a network is built from; not those with a known checksum."""
    if isinstance(network.model, UserModel):
        yield from _code_of(network.model.place)
    if network.pretrained is not None:
        yield network.pretrained
    encoder = network.features
    if isinstance(encoder, TextEncoder) and encoder.registered is None and encoder.folder:
        yield from (encoder.folder / name for name in FILES)


def _code_of(place: str) -> Iterator[Path]:
    """Yield the file of a network's code, given as a file or as a module."""
    if place.endswith(".py"):
        yield Path(place)
        return
    with suppress(ImportError, ValueError):  # no such module, or one without a file
        spec = find_spec(place)
        if spec is not None and spec.origin is not None:
            yield Path(spec.origin)
