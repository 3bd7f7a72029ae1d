"""The named data sets and models: their public facts and the settings a run starts from.

Loading nothing, so that help, validation and pricing stay fast. A data set joins with one entry
here and one loader in :mod:`dpmac_cli.data`; a model likewise, with one builder in
:mod:`dpmac_cli.models`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

#: Learning rates of the DP-MacAdam paper: 0.1 for DP-SGD and 0.001 for the rest.
PAPER_RATES: Mapping[str, float] = {
    "dp-sgd": 0.1,
    "adaclip": 1e-3,
    "dp-adam": 1e-3,
    "dp-adambc": 1e-3,
    "dp-macadam": 1e-3,
    "dp-macadambc": 1e-3,
}


@dataclass(frozen=True)
class Defaults:
    """The settings of a data set where none are given.

    Attributes:
        model: a name of :data:`MODELS`.
        sigma: noise multiplier.
        batch_size: B, the expected batch.
        epochs: passes of ceil(n/B) steps.
        lr: learning rate per optimizer.
        clip_norm: C of the fixed ball.
        h1, h2: bounds of the estimated variance.
        physical_batch: samples worked on at a time.
    """

    model: str
    sigma: float
    batch_size: int
    epochs: int
    lr: Mapping[str, float]
    clip_norm: float
    h1: float
    h2: float
    physical_batch: int


@dataclass(frozen=True)
class Dataset:
    """A public data set.

    Attributes:
        train_size, test_size: numbers of records.
        shape: (channels, height, width) of an image.
        classes: class names, in the order of the labels.
        levels: the largest pixel value; pixels are divided by it.
        mean, std: per channel, of pixels in [0, 1]; images are standardised with them.
        sha256: of the loaded contents, both splits; the data are public, so this gives nothing
            away, and it tells altered files.
        defaults: settings where none are given.
        about: one line for help and reports.
    """

    train_size: int
    test_size: int
    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    levels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    sha256: str
    defaults: Defaults
    about: str


DIGIT_NAMES = tuple("0123456789")

DATASETS: Mapping[str, Dataset] = {
    "digits": Dataset(
        train_size=1437,
        test_size=360,
        shape=(1, 8, 8),
        classes=DIGIT_NAMES,
        levels=16,
        mean=(0.305,),
        std=(0.376,),
        sha256="cdb4dac94fb0b69864bed8c06ec1a3c76ef0c75ab6b67176b07a28f83d2f2280",
        defaults=Defaults(
            model="mlp-small",
            sigma=1.5,
            batch_size=128,
            epochs=20,
            lr={
                "dp-sgd": 0.5,
                "adaclip": 0.5,
                "dp-adam": 0.005,
                "dp-adambc": 0.001,
                "dp-macadam": 0.005,
                "dp-macadambc": 0.0005,
            },
            clip_norm=1.0,
            h1=5e-5,
            h2=1.0,
            physical_batch=1024,
        ),
        about="scikit-learn's 8x8 handwritten digits, shipped with it: no download",
    ),
    "mnist": Dataset(
        train_size=60_000,
        test_size=10_000,
        shape=(1, 28, 28),
        classes=DIGIT_NAMES,
        levels=255,
        mean=(0.1307,),
        std=(0.3081,),
        sha256="3ee7f568b8fdc8915ba79f8c2e5cfce6e08e6def379bae044b8ec31ae87c0afb",
        defaults=Defaults(
            model="mlp",
            sigma=0.8,
            batch_size=256,
            epochs=5,
            lr=PAPER_RATES,
            clip_norm=1.0,
            h1=1e-9,
            h2=1e-6,
            physical_batch=1024,
        ),
        about="28x28 handwritten digits; torchvision downloads and checks them",
    ),
}

#: Model names and what they are. Builders: :data:`dpmac_cli.models.BUILDERS`.
MODELS: Mapping[str, str] = {
    "mlp": "one hidden layer of 1000 ReLU units, the paper's MNIST network",
    "mlp-small": "one hidden layer of 64 ReLU units",
}
