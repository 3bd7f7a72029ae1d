"""dpmac: train models under differential privacy, and compute privacy costs.

Everything the command line does is available from Python with the names in ``__init__.pyi``, which
are stable; docs/library.md shows how to use them. Each name is imported on first use, so programs
that only compute privacy costs do not import torch.
"""

from typing import Any

import lazy_loader

from dpmac_cli import before_0_4

__version__ = "0.4.0"

_import_name, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    """Import a public name on first use, or say what has become of one of version 0.3.

    Raises:
        ImportError: the name was public in version 0.3; the message has the new one.
        AttributeError: there is no such name.
    """
    instead = before_0_4.NAMES.get(name)
    if instead is not None:
        # An AttributeError would be replaced by a message without this line.
        raise ImportError(f"dpmac_cli.{name} of version 0.3 is no longer public. Use: {instead}")
    return _import_name(name)
