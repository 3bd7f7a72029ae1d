"""Dataset registry: public facts of each, its default settings, and how it is loaded.

Imports nothing heavy, so that help, validation and privacy costs stay fast. A new data set is one
entry of :data:`DATASETS`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Defaults:
    """The settings of a data set where none are given.

    Attributes:
        model: a name of :data:`MODELS`.
        batch_size: B, the expected batch.
        sigma: noise multiplier.
        epochs: passes of ceil(n/B) steps.
        clip_norm: C of the fixed ball.
        h1, h2: bounds of the estimated variance.
        physical_batch: samples worked on at a time.
    """

    model: str
    batch_size: int
    sigma: float = 0.8
    epochs: int = 5
    clip_norm: float = 1.0
    h1: float = 5e-5
    h2: float = 1.0
    physical_batch: int = 1024


@dataclass(frozen=True)
class Torchvision:
    """A data set that torchvision downloads, checks and reads.

    Attributes:
        name: of the class in ``torchvision.datasets``.
        by_split: whether it takes ``split="train"`` instead of ``train=True``.
    """

    name: str
    by_split: bool = False


@dataclass(frozen=True)
class Bundled:
    """A data set inside an installed package.

    Attributes:
        loader: a key of :data:`dpmac_cli.data.loaders.BUNDLED`.
    """

    loader: str


@dataclass(frozen=True)
class OwnFiles:
    """Your own dataset, which a :class:`~dpmac_cli.data.schema.Source` describes."""


@dataclass(frozen=True)
class Dataset:
    """Public facts of a data set.

    Attributes:
        train_size, test_size: numbers of records.
        shape: (channels, height, width) of an image.
        classes: class names, in the order of the labels.
        mean, std: per channel, of pixels in [0, 1]; images are standardised with them.
        defaults: settings where none are given.
        about: one line for help and reports.
        levels: the largest pixel value; pixels are divided by it.
        sha256: what :func:`dpmac_cli.data.dataset.fingerprint` gives for the published files; None
            where torchvision's own checks must do.
        augment: how augmented views may be drawn; digits and letters must not be mirrored.
        is_table: whether records are rows of numbers, of shape (columns, 1, 1), instead of images.
        origin: how it is loaded.
    """

    train_size: int
    test_size: int
    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    defaults: Defaults
    about: str
    levels: int = 255
    sha256: str | None = None
    augment: str = "crop+flip"
    is_table: bool = False
    origin: Torchvision | Bundled | OwnFiles = OwnFiles()


_DIGIT_NAMES = tuple("0123456789")

_MNIST = Dataset(
    train_size=60_000,
    test_size=10_000,
    shape=(1, 28, 28),
    classes=_DIGIT_NAMES,
    mean=(0.1307,),
    std=(0.3081,),
    sha256="3ee7f568b8fdc8915ba79f8c2e5cfce6e08e6def379bae044b8ec31ae87c0afb",
    defaults=Defaults(model="mlp", batch_size=256, h1=1e-9, h2=1e-6),
    about="28x28 handwritten digits",
    augment="crop",
    origin=Torchvision("MNIST"),
)

_CIFAR10 = Dataset(
    train_size=50_000,
    test_size=10_000,
    shape=(3, 32, 32),
    classes=(
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    ),
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    sha256="cb85cdd084bdd7718e8e746014bbc16f32cbe9ab4e0757d9f59e641b39f8f958",
    defaults=Defaults(model="cnn", batch_size=512, physical_batch=32),
    about="32x32 colour photographs",
    origin=Torchvision("CIFAR10"),
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
        origin=Bundled("digits"),
    ),
    "mnist": _MNIST,
    "fashion-mnist": replace(
        _MNIST,
        classes=(
            *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
            *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        ),
        mean=(0.2860,),
        std=(0.3530,),
        sha256=None,
        about="28x28 clothes",
        origin=Torchvision("FashionMNIST"),
        augment="crop+flip",
    ),
    "kmnist": replace(
        _MNIST,
        classes=("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"),
        mean=(0.1918,),
        std=(0.3483,),
        sha256=None,
        about="28x28 cursive Japanese",
        origin=Torchvision("KMNIST"),
    ),
    "cifar10": _CIFAR10,
    "cifar100": replace(
        _CIFAR10,
        classes=tuple(_CIFAR100_NAMES.split()),
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        sha256=None,
        about="32x32 colour photographs, 100 classes",
        origin=Torchvision("CIFAR100"),
    ),
    "svhn": replace(
        _CIFAR10,
        train_size=73_257,
        test_size=26_032,
        classes=_DIGIT_NAMES,
        mean=(0.4377, 0.4438, 0.4728),
        std=(0.1980, 0.2010, 0.1970),
        sha256=None,
        about="32x32 house numbers",
        origin=Torchvision("SVHN", by_split=True),
        augment="crop",
    ),
}
