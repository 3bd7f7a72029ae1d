"""Prediction tasks: one file each, with outputs, targets, losses, metrics and covered scores.

Settings and help read them, so they load neither NumPy nor torch nor scikit-learn.
"""

# isort: off
from dpmac_cli.tasks import classification as classification
from dpmac_cli.tasks import regression as regression
from dpmac_cli.tasks import language_model as language_model
