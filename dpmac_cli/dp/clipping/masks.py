"""Attention masks of transformers under vmap, which refuses to decide by them.

transformers leaves out a mask that hides nothing: it asks ``mask.all()``, unless it is traced.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dpmac_cli.dp.clipping.projections import replaced

MODULE = "transformers.masking_utils"


@contextmanager
def masks_kept() -> Iterator[None]:
    """Make transformers keep every mask, as when it is traced, if it was imported."""
    utilities: Any = sys.modules.get(MODULE)
    if hasattr(utilities, "is_tracing"):
        with replaced(utilities, "is_tracing", lambda *_, **__: True):
            yield
    else:
        yield
