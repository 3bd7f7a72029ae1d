"""Networks with a frozen, public part and a trained part.

If all frozen layers come first, they run once on every record, and the trainer uses their outputs
instead of images. What is published is the trained part, and the name and checksum of a frozen part
that is registered. The features of a record depend on that record alone, so the guarantee is
unchanged.
"""

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from dpmac_cli.config.networks import OwnFeatures
from dpmac_cli.dp.copies import without_memory
from dpmac_cli.dp.torch_errors import code_of_network
from dpmac_cli.errors import ModelError
from dpmac_cli.randomness.layers import forked, seed_all

T = TypeVar("T")
R = TypeVar("R")


class WithHead(nn.Module):
    """A network that maps records to features, and a head that maps these to outputs.

    Outputs are logits of classes, or numbers to predict.

    Args:
        frozen: maps records to features.
        head: maps features to outputs.
    """

    #: Records that a CPU processes at a time if no gradient is needed.
    at_a_time = 256
    #: Names of the linear layers that ``--train lora`` updates; None for all.
    lora_layers: tuple[str, ...] | None = None

    def __init__(self, frozen: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.frozen, self.head = frozen, head

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs for records, shape (records, outputs).

        On a CPU without gradients, at most ``at_a_time`` records are processed at once to limit
        memory.

        Args:
            x: standardised records, shape (records, ...).
        """
        if torch.is_grad_enabled():
            logits: Tensor = self.head(self.frozen(x))
            return logits
        return torch.cat([self.head(self.frozen(part)) for part in self._parts(x)])

    def _parts(self, x: Tensor) -> Sequence[Tensor]:
        return torch.split(x, self.at_a_time) if x.device.type == "cpu" else [x]


class FrozenFeatures(WithHead):
    """A network whose head alone is trained; its frozen part computes features without gradients.

    Args:
        frozen: maps records to features.
        head: maps features to outputs.
        stored: dtype that features are rounded to, in both training and evaluation, so that
            stored features and computed ones are equal.
        published: names of the tensors of the frozen part that a published model has; None for
            all, () for none.
    """

    #: Whether the frozen part is not built in, so that it sees one record at a time.
    user_supplied = False
    #: Whether the frozen part itself keeps records apart, and uses threads.
    separate = False

    def __init__(
        self,
        frozen: nn.Module,
        head: nn.Module,
        stored: torch.dtype,
        published: Collection[str] | None = None,
    ) -> None:
        super().__init__(frozen, head)
        self.stored, self._published = stored, published

    def publishes(self, name: str) -> bool:
        """Return whether a published model has a tensor: all of the head, and what was asked for.

        Others are loaded again, by the name and checksum of public weights.

        Args:
            name: name of the tensor in ``state_dict``, such as "frozen.conv.weight".
        """
        inside = name.removeprefix("frozen.")
        return inside == name or self._published is None or inside in self._published

    @torch.no_grad()
    def features(self, x: Tensor) -> Tensor:
        """Return the features of records, in the dtype in which they are stored, without gradients.

        Args:
            x: standardised records, shape (records, ...).
        """
        features = []
        for part in self._parts(x):
            features.append(self.frozen(part).to(self.stored))
        return torch.cat(features)

    def public_weights(self) -> dict[str, Tensor]:
        """Return all parameters and buffers of the frozen part by name, without those of the head.

        Names have no prefix "frozen.". Tensors are the network's own and not copies.
        """
        trained = {id(p) for p in self.head.parameters()}
        held = (*self.frozen.named_parameters(), *self.frozen.named_buffers())
        return {name: tensor for name, tensor in held if id(tensor) not in trained}

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of the head for records, shape (records, outputs).

        Args:
            x: standardised records, shape (records, ...). Outputs have their dtype.
        """
        logits: Tensor = self.head(self.features(x).to(x.dtype))
        return logits


class OneByOne(nn.Module):
    """A torch module that computes features by a program's function of one record.

    The function sees one record at a time, so it cannot mix them. Its random numbers are the same
    for each record. An object is copied for each record, so that it keeps nothing of one;
    :meth:`check` tries whether a function keeps something elsewhere.

    Args:
        features: the function, and the number of features that it was registered with.
    """

    def __init__(self, features: OwnFeatures) -> None:
        super().__init__()
        self._features = features

    def forward(self, x: Tensor) -> Tensor:
        """Return features, shape (records, width), in the dtype of ``x``.

        Args:
            x: standardised records, shape (records, ...). The function gets copies.

        Raises:
            ModelError: the function raised, or returned something else than ``width`` numbers.
        """
        with forked():
            return torch.stack([self._of(row) for row in x])

    def check(self, x: Tensor) -> None:
        """Raise ModelError if the features of some records depend on those that it saw before.

        Args:
            x: a few records to try it on, shape (records, ...).
        """
        first, again = self(x), self(x.flip(0)).flip(0)
        if not torch.allclose(first, again, equal_nan=True):
            raise ModelError(
                "The function of features keeps something of the records that it sees, such as a "
                "running mean, so one record would change the features of others. Compute it from "
                "public records before, and let the function only read it."
            )

    def _of(self, record: Tensor) -> Tensor:
        seed_all(0)
        function = without_memory(self._features.function, "The function of features")
        with code_of_network(record[None], "The function of features"):
            features = torch.as_tensor(function(record.clone()))
        if features.shape != (self._features.width,):
            raise ModelError(
                f"The function of features returned a tensor of shape {tuple(features.shape)} for "
                f"a record of shape {tuple(record.shape)}, but it was registered with width="
                f"{self._features.width}: it must return that many numbers."
            )
        return features.detach().to(record, copy=True)  # a function may return one tensor again


class Mirrored(nn.Module):
    """Features of images in opponent colours, averaged over each image and its mirror image.

    Args:
        network: maps images, shape (images, channels, height, width), to their features.
    """

    #: Rows: the sum of red, green and blue, and two differences; not yet of unit norm.
    COLOURS = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, -1.0], [1.0, -2.0, 1.0]])

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of images, in the shape that ``network`` returns.

        Args:
            x: images, shape (images, channels, height, width). Those with three channels are turned
                into opponent colours first; others keep theirs.
        """
        if x.shape[1] == len(self.COLOURS):
            x = torch.einsum("oc,nchw->nohw", normalize(self.COLOURS.to(x)), x)
        mean: Tensor = (self.network(x) + self.network(x.flip(3))) / 2
        return mean


def by_threads(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Call a function for each item, and return the results in the order of the items.

    Each call computes on one thread, and torch's threads share the items. Results then do not
    depend on the number of threads, and no thread waits for another. An exception of a call is
    raised here, and torch's number of threads is restored.

    Args:
        function: called once per item, from several threads at a time.
        items: its arguments.

    >>> by_threads(abs, [-2, 3])
    [2, 3]
    """
    count = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(function, items))
    finally:
        torch.set_num_threads(count)


def cut_before_head(network: nn.Module, shape: tuple[int, ...]) -> FrozenFeatures:
    """Split a network into a frozen part and its last linear layer, without copying them.

    The frozen part is in evaluation mode, so its batch norms are public constants.

    Args:
        network: the network, whose mode becomes evaluation. Its parameters are those of the result.
        shape: shape of one record.

    Raises:
        ModelError: the network does not end in a linear layer; see :func:`head_of`.
    """
    name = head_of(network, shape)
    if name is None:
        raise ModelError(
            "{train=}head is not supported for this network: it must end in a linear layer whose "
            "output is the logits, and which is called once, on one row per sample, and shares no "
            "parameter. Use {train=}all."
        )
    shared = {id(t): t for t in (*network.parameters(), *network.buffers())}
    frozen = copy.deepcopy(network.eval(), shared)
    frozen.get_submodule(name).forward = lambda x: x  # return the layer's input
    head = nn.Sequential(nn.Flatten(), network.get_submodule(name))
    return FrozenFeatures(frozen, head, torch.float32)


#: Number of samples used to inspect calls.
SEEN = 2
#: A call of a linear layer: its name, input and output.
RecordedCall = tuple[str, Tensor, Tensor]


@torch.no_grad()
def linear_calls(network: nn.Module, shape: tuple[int, ...]) -> tuple[list[RecordedCall], Tensor]:
    """Run a copy of a network on random samples, and record the calls of its linear layers.

    Args:
        network: the network, which is not changed.
        shape: shape of one record.

    Returns:
        The calls of layers whose type is exactly ``nn.Linear``, in their order: name, input and
        output of each. Then the outputs of the network for all SEEN samples.
    """
    calls: list[RecordedCall] = []

    def note(name: str, _: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        calls.append((name, inputs[0], out))

    network = copy.deepcopy(network).eval()
    for name, module in network.named_modules():
        if type(module) is nn.Linear:
            module.register_forward_hook(partial(note, name))
    weight = next(network.parameters(), torch.empty(0))
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(SEEN, *shape, generator=draws).to(weight)
    return calls, network(x)


def head_of(network: nn.Module, shape: tuple[int, ...]) -> str | None:
    """Return the name of the linear layer whose output is the network's; None if there is none.

    It must be called once, on one row per sample, and share no parameter with another layer.

    Args:
        network: the network, which is not changed.
        shape: shape of one record.

    >>> head_of(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), (2, 2))
    '1'
    """
    calls, logits = linear_calls(network, shape)
    if not calls:
        return None
    head, x, out = calls[-1]
    once = [name for name, *_ in calls].count(head) == 1
    one_row_each = x.ndim == 2 and len(x) == SEEN
    parameters = map(id, network.get_submodule(head).parameters())
    shares_none = shared_parameters(network).isdisjoint(parameters)
    fits = once and one_row_each and torch.equal(out, logits) and shares_none
    return head if fits else None


def shared_parameters(network: nn.Module) -> set[int]:
    """Return the ``id`` of each parameter that has several names; the empty set without any."""
    owners = Counter(id(p) for _, p in network.named_parameters(remove_duplicate=False))
    return {owner for owner, count in owners.items() if count > 1}
