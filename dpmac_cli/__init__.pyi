"""Public Python API; each name is imported on first use."""

from .accounting.accountants import total_epsilon as total_epsilon
from .accounting.calibration import calibrate_noise as calibrate_noise
from .accounting.calibration import longest_run as longest_run
from .accounting.events import TrainingEvent as TrainingEvent
from .accounting.risk import assess_risk as assess_risk
from .accounting.risk import trade_off as trade_off
from .accounting.statements import format_epsilon as format_epsilon
from .accounting.statements import statement as statement
from .config.settings import Settings as Settings
from .data.in_memory import ArrayData as ArrayData
from .data.in_memory import from_dataframe as from_dataframe
from .dp.geometry import AdaClipEllipsoid as AdaClipEllipsoid
from .dp.geometry import Ball as Ball
from .dp.geometry import Geometry as Geometry
from .dp.geometry import MacAdamEllipsoid as MacAdamEllipsoid
from .dp.mechanism import Ellipsoid as Ellipsoid
from .dp.mechanism import GaussianMechanism as GaussianMechanism
from .dp.mechanism import PrivateMean as PrivateMean
from .dp.mechanism import SecureMechanism as SecureMechanism
from .dp.mechanism import ball as ball
from .dp.mechanism import ellipsoid as ellipsoid
from .dp.moments import Moments as Moments
from .errors import BudgetError as BudgetError
from .errors import DivergedError as DivergedError
from .errors import DpmacError as DpmacError
from .errors import InputError as InputError
from .errors import ModelError as ModelError
from .errors import RunError as RunError
from .optim import Optimizer as Optimizer
from .optim import register_optimizer as register_optimizer
from .randomness.noise import Noise as Noise
from .randomness.sampling import Poisson as Poisson
from .randomness.sampling import RandomAllocation as RandomAllocation
from .release.model_file import load_model as load_model
from .release.prediction import predict as predict
from .release.prediction import score as score
from .release.private import make_private as make_private
from .release.publish import Finished as Finished
from .release.run import finish as finish
from .release.run import resume as resume
from .release.run import train as train
from .runs.resolve import resolve as resolve
from .runs.session import Evaluated as Evaluated
from .runs.session import Started as Started
from .runs.session import Update as Update
from .studies.grid import plan as plan
from .studies.results import collect as collect
from .studies.tune import tune as tune
from .training.clipped_grad import clipped_grad as clipped_grad
from .training.private_step import PrivateStep as PrivateStep
from .training.torch_datasets import from_torch as from_torch

__all__: list[str]
__version__: str
