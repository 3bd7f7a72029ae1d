"""dpmac: train classifiers under differential privacy, and price that privacy.

Everything the command line does can be done from Python with the names listed in ``__init__.pyi``.
They are kept stable; docs/library.md shows how to use them. Each is imported on first use, so
programs that only compute privacy costs do not load torch.
"""

import lazy_loader

__version__ = "0.2.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
