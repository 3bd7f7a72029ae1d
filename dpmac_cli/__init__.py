"""dpmac: train models under differential privacy, and compute privacy costs.

Everything the command line does is available from Python with the names in ``__init__.pyi``, which
are stable; docs/library.md shows how to use them. Each name is imported on first use, so programs
that only compute privacy costs do not import torch.
"""

import lazy_loader

__version__ = "0.3.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
