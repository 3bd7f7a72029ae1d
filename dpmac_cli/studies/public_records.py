"""Records that are declared public: they must not be those of the private data."""

from dpmac_cli.data.dataset import Data, overlap
from dpmac_cli.errors import InputError

#: Fraction of the public records among the private ones from which they are taken for a copy.
COPIED = 0.1


def check_public(named: str, public: Data, private: Data, harm: str) -> None:
    """Raise InputError for a copy of the private data, or of a part of it, in any order.

    Args:
        named: flag and value that name the public data.
        public, private: both datasets, whatever their units and labels are.
        harm: consequence of using the private data, as the end of a sentence.
    """
    if overlap(public, private) > COPIED:
        flag = named.split(maxsplit=1)[0]
        raise InputError(
            f"{named} has the same records as the private data, or many of them: {harm}. Leave out "
            f"{flag}, or give public data."
        )
