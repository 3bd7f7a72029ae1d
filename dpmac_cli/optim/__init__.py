"""Optimizers: one file each, in the order of help and tables.

Importing a module of this package registers its optimizer. To add one, write a file with a class
under :func:`~dpmac_cli.optim.optimizer.register_optimizer`, and add a line below. Help, completion,
reports, comparisons and tests read :data:`~dpmac_cli.optim.optimizer.OPTIMIZERS`.

Settings and help read the classes, so they name torch's types without loading torch.
"""

# isort: off
from dpmac_cli.optim import dp_sgd as dp_sgd
from dpmac_cli.optim import adaclip as adaclip
from dpmac_cli.optim import dp_adam as dp_adam
from dpmac_cli.optim import dp_adambc as dp_adambc
from dpmac_cli.optim import dp_macadam as dp_macadam
from dpmac_cli.optim import dp_macadambc as dp_macadambc
from dpmac_cli.optim.optimizer import OPTIMIZERS as OPTIMIZERS
from dpmac_cli.optim.optimizer import Optimizer as Optimizer
from dpmac_cli.optim.optimizer import defaults_of as defaults_of
from dpmac_cli.optim.optimizer import register_optimizer as register_optimizer
