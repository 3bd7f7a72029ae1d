"""Public Python API; each name is imported on first use."""

from .accounting.account import Account as Account
from .accounting.accountants import total_epsilon as total_epsilon
from .accounting.calibration import calibrate_noise as calibrate_noise
from .accounting.calibration import longest_run as longest_run
from .accounting.events import TrainingEvent as TrainingEvent
from .accounting.risk import assess_risk as assess_risk
from .config.networks import register_features as register_features
from .config.settings import Settings as Settings
from .data.in_memory import ArrayData as ArrayData
from .data.in_memory import from_dataframe as from_dataframe
from .data.reader import register_reader as register_reader
from .errors import BudgetError as BudgetError
from .errors import DpmacError as DpmacError
from .errors import InputError as InputError
from .estimators.budget import Budget as Budget
from .estimators.estimators import PrivateClassifier as PrivateClassifier
from .estimators.estimators import PrivateRegressor as PrivateRegressor
from .estimators.pipeline import private_pipeline as private_pipeline
from .optim import Optimizer as Optimizer
from .optim import register_optimizer as register_optimizer
from .randomness.sampling import Poisson as Poisson
from .randomness.sampling import RandomAllocation as RandomAllocation
from .release.private import make_private as make_private
from .release.run import Run as Run
from .release.run import load as load
from .release.train import resume as resume
from .release.train import train as train
from .silo.claims import federation as federation
from .silo.silo import Silo as Silo
from .studies.compare import compare as compare
from .studies.tune import tune as tune
from .tasks.task import register_task as register_task
from .training.clipped_grad import clipped_grad as clipped_grad
from .training.private_step import PrivateStep as PrivateStep
from .training.torch_datasets import from_torch as from_torch

__all__: list[str]
__version__: str
