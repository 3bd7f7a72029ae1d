"""Dataset registry: public facts of each, its default settings, and how it is loaded.

Imports nothing heavy, so that help, validation and privacy costs stay fast. A new data set is one
entry of :data:`DATASETS`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

#: Steps an epoch, and epochs, of training on data that nobody has tuned for: see docs/recipes.md.
STEPS_PER_EPOCH, EPOCHS = 12, 20


@dataclass(frozen=True)
class Defaults:
    """Default settings of a data set."""

    model: str  # a name of MODELS
    batch_size: int  # B, the expected batch
    sigma: float = 0.8  # noise multiplier
    epochs: int = 5  # passes of ceil(n/B) steps
    clip_norm: float = 1.0  # C of the fixed ball
    h1: float = 5e-5  # bounds of the estimated variance
    h2: float = 1.0
    physical_batch: int = 1024  # samples worked on at a time


@dataclass(frozen=True)
class Dataset:
    """Public facts of a data set."""

    train_size: int
    test_size: int
    shape: tuple[int, int, int]  # (channels, height, width) of an image
    classes: tuple[str, ...]  # names, in the order of the labels
    mean: tuple[float, ...]  # per channel, of pixels in [0, 1]; images are standardised with them
    std: tuple[float, ...]
    defaults: Defaults
    about: str  # one line for help and reports
    levels: int = 255  # the largest pixel value; pixels are divided by it
    sha256: str | None = None  # fingerprint of the files; None where torchvision's checks must do
    augment: str = "crop+flip"  # digits and letters must not be mirrored
    is_table: bool = False  # records are rows of numbers, of shape (columns, 1, 1), not images
    torchvision: str = ""  # class of torchvision.datasets that reads it; "" for all others


_DIGIT_NAMES = tuple("0123456789")

_MNIST = Dataset(
    train_size=60_000,
    test_size=10_000,
    shape=(1, 28, 28),
    classes=_DIGIT_NAMES,
    mean=(0.1307,),
    std=(0.3081,),
    defaults=Defaults(model="mlp", batch_size=256, h1=1e-9, h2=1e-6),
    about="28x28 handwritten digits",
    augment="crop",
    torchvision="MNIST",
)

_CIFAR10_NAMES = "airplane automobile bird cat deer dog frog horse ship truck"

_CIFAR10 = Dataset(
    train_size=50_000,
    test_size=10_000,
    shape=(3, 32, 32),
    classes=tuple(_CIFAR10_NAMES.split()),
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    defaults=Defaults(model="cnn", batch_size=512, physical_batch=32),
    about="32x32 colour photographs",
    torchvision="CIFAR10",
)

# Fine labels, in the order of the labels.
_CIFAR100_NAMES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus
butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab
crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo
keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse
mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy
porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper
snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television
tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""

_FASHION_NAMES = (
    "T-shirt/top, Trouser, Pullover, Dress, Coat, Sandal, Shirt, Sneaker, Bag, Ankle boot"
)

DATASETS: Mapping[str, Dataset] = {
    "digits": Dataset(
        train_size=1437,
        test_size=360,
        shape=(1, 8, 8),
        classes=_DIGIT_NAMES,
        levels=16,
        mean=(0.305,),
        std=(0.376,),
        sha256="cdb4dac94fb0b69864bed8c06ec1a3c76ef0c75ab6b67176b07a28f83d2f2280",
        defaults=Defaults(model="mlp-small", batch_size=128, sigma=1.5, epochs=20),
        about="8x8 handwritten digits, shipped with scikit-learn: no download",
        augment="crop",
    ),
    "mnist": replace(
        _MNIST, sha256="3ee7f568b8fdc8915ba79f8c2e5cfce6e08e6def379bae044b8ec31ae87c0afb"
    ),
    "fashion-mnist": replace(
        _MNIST,
        classes=tuple(_FASHION_NAMES.split(", ")),
        mean=(0.2860,),
        std=(0.3530,),
        about="28x28 clothes",
        torchvision="FashionMNIST",
        augment="crop+flip",
    ),
    "kmnist": replace(
        _MNIST,
        classes=("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"),
        mean=(0.1918,),
        std=(0.3483,),
        about="28x28 cursive Japanese",
        torchvision="KMNIST",
    ),
    "cifar10": replace(
        _CIFAR10, sha256="cb85cdd084bdd7718e8e746014bbc16f32cbe9ab4e0757d9f59e641b39f8f958"
    ),
    "cifar100": replace(
        _CIFAR10,
        classes=tuple(_CIFAR100_NAMES.split()),
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        about="32x32 colour photographs, 100 classes",
        torchvision="CIFAR100",
    ),
    "svhn": replace(
        _CIFAR10,
        train_size=73_257,
        test_size=26_032,
        classes=_DIGIT_NAMES,
        mean=(0.4377, 0.4438, 0.4728),
        std=(0.1980, 0.2010, 0.1970),
        about="32x32 house numbers",
        torchvision="SVHN",
        augment="crop",
    ),
}
