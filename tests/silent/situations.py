"""The situations: small networks and loops, and what is done in the middle of training."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (its usual name)
from torch.nn.utils import parameters_to_vector, parametrizations, prune, vector_to_parameters
from torch.utils.checkpoint import checkpoint
from torch.utils.data import WeightedRandomSampler

from tests.layer_cases import Doubled
from tests.silent.judge import CLASSES, COLUMNS, Run, Situation

HIDDEN = 5


class Net(nn.Module):
    """Two linear layers; variants replace :meth:`hidden` or :meth:`out`."""

    mixes = leaks = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(COLUMNS, HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x))

    def out(self, h: Tensor) -> Tensor:
        logits: Tensor = self.second(h)
        return logits

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.hidden(x.flatten(1)))


def centred(x: Tensor) -> Tensor:
    """Subtract half of the mean over the records, which leaves something of one alone."""
    return x - x.mean(0) / 2


# Networks.


class LoRALayers(Net):
    """A frozen layer with a trained product of two narrow ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.down = nn.Linear(COLUMNS, 2, bias=False)
        self.up = nn.Linear(2, HIDDEN, bias=False)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x) + self.up(self.down(x)))


class LoRAParameters(Net):
    """The same, of raw parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.a = nn.Parameter(torch.zeros(COLUMNS, 2))
        self.b = nn.Parameter(torch.zeros(2, HIDDEN))

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x) + x @ self.a @ self.b)


class InPlace(Net):
    def hidden(self, x: Tensor) -> Tensor:
        return F.relu(self.first(x), inplace=True)


class Square(Net):
    """A layer between the two that :class:`Tied` shares."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(HIDDEN, HIDDEN)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.middle(torch.tanh(self.first(x))))


class Swapped(Square):
    """Two layers of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(HIDDEN, HIDDEN)

    def out(self, h: Tensor) -> Tensor:
        return super().out(torch.tanh(self.other(h)))


class Tied(Square):
    """One Parameter in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(HIDDEN, HIDDEN)
        self.again.weight = self.middle.weight

    def out(self, h: Tensor) -> Tensor:
        return super().out(torch.tanh(self.again(h)))


class CalledTwice(Square):
    def out(self, h: Tensor) -> Tensor:
        return super().out(torch.tanh(self.middle(h)))


class UsedOutside(Net):
    """Also multiplies by the transposed weight of its first layer."""

    def hidden(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return torch.tanh(self.first(x + h @ self.first.weight))


class UsedOutsideLater(Net):
    """Does so once a flag is set."""

    def hidden(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return torch.tanh(h @ self.first.weight @ self.first.weight.T) if self.leaks else h


class MixesInTraining(Net):
    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        return centred(h) if self.training else h


class MixesLater(Net):
    """Mixes records once a flag is set."""

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        return centred(h) if self.mixes else h


class CentredBackward(torch.autograd.Function):
    """The identity, whose gradients are centred over the records."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return centred(gradients[0])


def applying(function: Any) -> type[Net]:
    """Return a network with an autograd function between its layers."""

    class Applying(Net):
        def hidden(self, x: Tensor) -> Tensor:
            h: Tensor = function.apply(super().hidden(x))
            return h

    return Applying


class TensorHook(Net):
    """Centres a gradient by a hook on a tensor."""

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        if h.requires_grad:
            h.register_hook(centred)  # type: ignore[no-untyped-call]
        return h


class AutocastInside(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = super().forward(x)
        return out.to(x.dtype)


class RunningMean(Net):
    """Subtracts a running mean of its inputs, which it keeps in a buffer."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(HIDDEN))

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(h.mean(0), 0.5)
        return h - self.mean


class LinearCell(nn.Module):
    """The cell of a GRU, of two linear layers."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.of_input, self.of_state = (nn.Linear(n, 3 * hidden) for n in (inputs, hidden))

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        pairs = zip(self.of_input(x).chunk(3, 1), self.of_state(h).chunk(3, 1), strict=True)
        (reset, reset_h), (update, update_h), (new, new_h) = pairs
        z = torch.sigmoid(update + update_h)
        return (1 - z) * torch.tanh(new + torch.sigmoid(reset + reset_h) * new_h) + z * h


class Cells(nn.Module):
    """A GRU over pairs of columns, written with one cell that every step shares."""

    def __init__(self, cell: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.cell, self.second = cell(2, HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), HIDDEN)
        for pair in x.flatten(1).view(len(x), -1, 2).unbind(1):
            h = self.cell(pair, h)
        out: Tensor = self.second(h)
        return out


class Recurrent(nn.Module):
    """torch's GRU over pairs of columns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.GRU(2, HIDDEN, batch_first=True), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.first(x.flatten(1).view(len(x), -1, 2))
        out: Tensor = self.second(h[:, -1])
        return out


class Divides(Net):
    """Divides the one record of the smallest values, which no other is like, by zero."""

    def hidden(self, x: Tensor) -> Tensor:
        small = x.abs().amax(1, keepdim=True) < 0.1
        return super().hidden(x) / torch.where(small, 0.0, 1.0)


class Logarithm(Net):
    """Takes logarithms, of which that record's is NaN."""

    def hidden(self, x: Tensor) -> Tensor:
        small = x.abs().amax(1, keepdim=True) < 0.1
        return super().hidden(x) * torch.where(small, -1.0, 1.0).log().exp()


class Checkpointed(Net):
    def hidden(self, x: Tensor) -> Tensor:
        h: Tensor = checkpoint(super().hidden, x, use_reentrant=False)
        return h


class Normed(Net):
    """Normalises what is between its layers."""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm = norm()

    def hidden(self, x: Tensor) -> Tensor:
        h: Tensor = self.norm(super().hidden(x))
        return h


class Temperature(Net):
    """Has a number as a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.log_temperature = nn.Parameter(torch.zeros(()))

    def out(self, h: Tensor) -> Tensor:
        return super().out(h) * self.log_temperature.exp()


class Convolution(Net):
    """A convolution over the columns as an image."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, HIDDEN, (1, 3))  # type: ignore[assignment]

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x.view(len(x), 2, 1, 3))).flatten(1)


class Skipping(Net):
    """A layer that a flag leaves out."""

    skips = False

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(HIDDEN, HIDDEN)

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        return h if self.skips else torch.tanh(self.middle(h))


class Switches:
    """Where flags are that are no attribute of a network."""

    mixes = False


class MixesByGlobal(Net):
    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        return centred(h) if Switches.mixes else h


class MixesByClass(MixesLater):
    """Reads a flag of its class."""


class MixesByList(Net):
    """Has a part in a list, which torch does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [Switches()]

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        return centred(h) if self.parts[0].mixes else h


class Scaled(Net):
    """Multiplies by a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(HIDDEN)

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) * self.scale.to(x)


class ScaledByBuffer(Net):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(HIDDEN))

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) * self.scale


def frozen() -> nn.Module:
    net = Net()
    net.first.requires_grad_(False)
    return net


def normed(norm: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Normed(norm)


def with_weight_norm() -> nn.Module:
    net = Net()
    parametrizations.weight_norm(net.first)
    return net


# Hooks.


def scaling(_: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return 3 * output


def mixing(_: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return centred(output)


def scaling_backward(_: nn.Module, inputs: Any, outputs: Any) -> tuple[Tensor | None, ...]:
    return tuple(None if g is None else 3 * g for g in inputs)


def hook_forward(run: Run) -> None:
    run.net.first.register_forward_hook(scaling)


def hook_mixing(run: Run) -> None:
    run.net.first.register_forward_hook(mixing)


def mixing_backward(_: nn.Module, inputs: Any, outputs: Any) -> tuple[Tensor | None, ...]:
    return tuple(None if g is None else centred(g) for g in inputs)


def mixing_inputs(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(map(centred, inputs))


def hook_inputs(run: Run) -> None:
    run.net.second.register_forward_pre_hook(mixing_inputs)


def hook_backward(run: Run) -> None:
    run.net.second.register_full_backward_hook(scaling_backward)


def hook_mixing_backward(run: Run) -> None:
    run.net.second.register_full_backward_hook(mixing_backward)


def hook_parameter(run: Run) -> None:
    run.net.first.weight.register_hook(lambda g: 2 * g)


def hooked(hook: Callable[[Any], None]) -> Callable[[], nn.Module]:
    """Return what makes a network that has a hook from the start."""

    class Holder:
        def __init__(self) -> None:
            self.net = Net()

    def build() -> nn.Module:
        holder = Holder()
        hook(holder)
        return holder.net

    return build


@contextmanager
def global_hook(step: int) -> Iterator[None]:
    """Mix records by a hook on all modules, from the second step on."""

    def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
        return centred(output) if type(module) is nn.Linear and output.shape[-1] == HIDDEN else None

    handle = None if step == 1 else nn.modules.module.register_module_forward_hook(hook)
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


@contextmanager
def global_backward_hook(step: int) -> Iterator[None]:
    """Mix gradients by a hook on all modules, from the second step on."""

    def hook(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        mixes = type(module) is nn.Linear and inputs[0] is not None
        return (centred(inputs[0]), *inputs[1:]) if mixes else None

    register = nn.modules.module.register_module_full_backward_hook
    handle = None if step == 1 else register(hook)
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


def setting(holder: Any, name: str, value: Any) -> Callable[[int], AbstractContextManager[Any]]:
    """Return the context of steps from the second of which on an attribute is another."""

    @contextmanager
    def around(step: int) -> Iterator[None]:
        own, before = name in vars(holder), getattr(holder, name)
        if step > 1:
            setattr(holder, name, value)
        try:
            yield
        finally:
            if own:
                setattr(holder, name, before)
            elif step > 1:
                delattr(holder, name)

    return around


# What is done in the middle.


def assign_data(run: Run) -> None:
    for p in run.net.parameters():
        p.data = p.data * 0.5


def assign_vector(run: Run) -> None:
    vector = parameters_to_vector(run.net.parameters())
    vector_to_parameters(vector.detach() * 0.5, run.net.parameters())


def write_in_place(run: Run) -> None:
    with torch.no_grad():
        for p in run.net.parameters():
            p.mul_(0.5)


def replace_parameter(run: Run) -> None:
    run.net.first.weight = nn.Parameter(run.net.first.weight.detach() * 0.5)


def replace_layer(run: Run) -> None:
    run.net.second = nn.Linear(HIDDEN, CLASSES)


def load(run: Run, *, assign: bool = False) -> None:
    state = {name: 0.5 * value for name, value in run.net.state_dict().items()}
    run.net.load_state_dict(state, assign=assign)


def assign_state(run: Run) -> None:
    load(run, assign=True)


def add_layer(run: Run) -> None:
    """Put a layer between the two."""
    run.add("added", nn.Linear(HIDDEN, HIDDEN))
    with torch.no_grad():
        run.net.added.weight.copy_(torch.eye(HIDDEN) * 2)
    before = run.net.hidden
    run.net.hidden = lambda x: torch.tanh(run.net.added(before(x)))


class BatchNorm(nn.BatchNorm1d):
    """A batch norm that leaves a record alone as it is, so that the oracle has an answer."""

    def forward(self, input: Tensor) -> Tensor:
        return input if len(input) == 1 else super().forward(input)


def put_in_batch_norm(run: Run) -> None:
    first, norm = run.net.first, BatchNorm(HIDDEN, affine=False, track_running_stats=False)
    run.net.hidden = lambda x: norm(first(x))
    run.net.norm = norm


def replace_forward(run: Run) -> None:
    old = run.net.forward
    run.net.forward = lambda x: centred(old(x))


def set_part(run: Run) -> None:
    run.net.parts[0].mixes = True


def replace_tensor(run: Run) -> None:
    run.net.scale = torch.full((HIDDEN,), 2.0)


def larger_epsilon(run: Run) -> None:
    run.net.norm.eps = 10.0


def swap(run: Run) -> None:
    net = run.net
    net.middle.weight, net.other.weight = net.other.weight, net.middle.weight


def harmless(run: Run) -> None:
    """Do what programs do between steps, and what changes nothing."""
    net = run.net
    net.cpu().float().zero_grad()
    net.eval()
    with torch.no_grad():
        net(torch.zeros(3, COLUMNS, 1, 1))
    net.train()
    copy.deepcopy(net.state_dict())
    repr(net)
    sum(p.numel() for p in net.parameters())


def switch(name: str) -> Callable[[Run], None]:
    """Return what sets a flag of the network."""

    def change(run: Run) -> None:
        setattr(run.net, name, True)

    return change


def prune_first(run: Run) -> None:
    prune.l1_unstructured(run.net.first, "weight", 0.5)  # type: ignore[no-untyped-call]


def weight_norm_later(run: Run) -> None:
    parametrizations.weight_norm(run.net.first)


# Losses.


def ignoring(output: Tensor, target: Tensor) -> Tensor:
    """One record's cross-entropy without class 2, where alone: 0 for it."""
    return F.cross_entropy(output, target, ignore_index=2, reduction="sum")


CLASS_WEIGHTS = (0.2, 1.0, 3.0)


def weighted(output: Tensor, target: Tensor) -> Tensor:
    weight = output.new_tensor(CLASS_WEIGHTS)
    return F.cross_entropy(output, target, weight, reduction="sum")


class MixedLoss(nn.Module):
    """Cross-entropy of outputs that are centred over the batch."""

    reduction = "mean"

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(centred(output), target, reduction=self.reduction)


def mixed_alone(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(centred(output), target)


# Contexts.


@contextmanager
def half_products(step: int) -> Iterator[None]:
    """Allow products in bfloat16, on processors that have them."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if step > 1 else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def double_by_default(step: int) -> Iterator[None]:
    torch.set_default_dtype(torch.float64 if step > 1 else torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def compiled(net: nn.Module) -> nn.Module:
    made: Any = torch.compile(net, backend="eager")
    return made  # type: ignore[no-any-return]


S = Situation
SITUATIONS = (
    # The network, from the start.
    S("LoRA, of layers", LoRALayers),
    S("LoRA, of raw parameters", LoRAParameters),
    S("in-place ReLU", InPlace),
    S("one Parameter in two layers", Tied),
    S("one Parameter in two layers, isolated", Tied, isolate=True),
    S("one module called twice", CalledTwice),
    S("a weight also used outside its layer", UsedOutside),
    S("a weight also used outside its layer, isolated", UsedOutside, isolate=True),
    S(
        "records mixed by hand in training mode",
        MixesInTraining,
        refused="The network or its loss computes something else for a batch.*isolate",
    ),
    S(
        "records mixed by nn.BatchNorm1d",
        normed(lambda: nn.BatchNorm1d(HIDDEN)),
        refused="norm is a BatchNorm1d, .*GroupNorm",
    ),
    S("nn.GroupNorm", normed(lambda: nn.GroupNorm(1, HIDDEN))),
    S("custom autograd.Function", applying(Doubled)),
    S("custom autograd.Function that mixes in backward", applying(CentredBackward)),
    S("hook on a tensor that mixes in backward", TensorHook),
    S("nn.DataParallel", Net, wrap=nn.DataParallel),
    S("torch.compile", Net, wrap=compiled, long=True),
    S("forward hook that scales", hooked(hook_forward)),
    S("forward hook that scales, isolated", hooked(hook_forward), isolate=True),
    S(
        "forward hook that mixes",
        hooked(hook_mixing),
        refused="The Linear first computes something else for a batch.*isolate",
    ),
    S("forward hook that mixes, isolated", hooked(hook_mixing), isolate=True),
    S("full backward hook that scales", hooked(hook_backward)),
    S("full backward hook that mixes", hooked(hook_mixing_backward)),
    S("hook on a parameter, g -> 2 g", hooked(hook_parameter), refused="first.weight has a hook"),
    S("autocast inside forward", AutocastInside, refused="under torch.autocast.*Remove"),
    S(
        "running statistics in a buffer",
        RunningMean,
        refused="changes the network: mean was written to.*keep nothing",
    ),
    S(
        "running statistics in a buffer, isolated",
        RunningMean,
        isolate=True,
        refused="changes the network: mean was written to.*keep nothing",
    ),
    S("GRU written with linear layers that its steps share", lambda: Cells(LinearCell)),
    S("nn.GRUCell in a loop", lambda: Cells(nn.GRUCell)),
    S("nn.GRU", Recurrent),
    S("nn.GRU, isolated", Recurrent, isolate=True),
    S("a record that gives infinity", Divides),
    S("a record that gives NaN", Logarithm),
    S("torch.utils.checkpoint", Checkpointed),
    S("weight_norm", with_weight_norm),
    S("a scalar parameter", Temperature),
    S("a layer frozen from the start", frozen),
    # The loss.
    S(
        "ignore_index, mean",
        Net,
        loss=nn.CrossEntropyLoss(ignore_index=2),
        alone=ignoring,
        refused="With ignore_index use reduction='sum'",
    ),
    S(
        "ignore_index, sum",
        Net,
        loss=nn.CrossEntropyLoss(ignore_index=2, reduction="sum"),
        alone=ignoring,
    ),
    S(
        "class weights, mean",
        Net,
        loss=nn.CrossEntropyLoss(torch.tensor(CLASS_WEIGHTS)),
        alone=weighted,
        weights=CLASS_WEIGHTS,
    ),
    S(
        "class weights, sum",
        Net,
        loss=nn.CrossEntropyLoss(torch.tensor(CLASS_WEIGHTS), reduction="sum"),
        alone=weighted,
        weights=CLASS_WEIGHTS,
    ),
    S(
        "a loss that mixes records",
        Net,
        loss=MixedLoss(),
        alone=mixed_alone,
        refused="The loss computes something else for a batch",
    ),
    # After the first step.
    S("p.data = ...", Net, assign_data, refused="first.weight is in other memory .*p.copy_"),
    S(
        "vector_to_parameters",
        Net,
        assign_vector,
        refused="first.weight is in other memory .*p.copy_",
    ),
    S("weights written in place", Net, write_in_place),
    S(
        "net.double().float()",
        Net,
        lambda run: run.net.double().float(),
        refused="first.weight is in other memory .*before make_private",
    ),
    S(
        "net.to(memory_format=channels_last)",
        Convolution,
        lambda run: run.net.to(memory_format=torch.channels_last),
        refused="first.weight is in other memory .*before make_private",
    ),
    S(
        "a layer's Parameter replaced",
        Net,
        replace_parameter,
        refused="first.weight was replaced .*make_private again",
    ),
    S(
        "a layer replaced",
        Net,
        replace_layer,
        refused="second.weight was replaced .*make_private again",
    ),
    S("load_state_dict", Net, load),
    S(
        "load_state_dict(assign=True)",
        Net,
        assign_state,
        refused="first.weight was replaced .*make_private again",
    ),
    S(
        "a layer frozen",
        Net,
        lambda run: run.net.first.requires_grad_(False),
        refused="first.weight was frozen .*make_private again",
    ),
    S(
        "a layer unfrozen",
        frozen,
        lambda run: run.net.first.requires_grad_(True),
        refused="first.weight was unfrozen .*make_private again",
    ),
    S("a layer added", Net, add_layer, refused="added was added.*make_private again"),
    S("a batch norm put in", Net, put_in_batch_norm, refused="norm was added.*make_private again"),
    S(
        "forward replaced by one that mixes",
        Net,
        replace_forward,
        refused="forward was added.*make_private again",
    ),
    S("model.eval()", Net, lambda run: run.net.eval()),
    S(
        "a weight used outside its layer by a flag",
        UsedOutsideLater,
        switch("leaks"),
        refused="leaks was added.*make_private again",
    ),
    S(
        "records mixed by a flag",
        MixesLater,
        switch("mixes"),
        refused="mixes was added.*make_private again",
    ),
    S(
        "a layer skipped by a flag",
        Skipping,
        switch("skips"),
        refused="skips was added.*make_private again",
    ),
    S("clip norm set by attribute", Net, lambda run: run.set_clip_norm(0.5), refused="clip_norm"),
    S("forward hook that scales, put in", Net, hook_forward, refused="hooks of first changed"),
    S("forward hook that mixes, put in", Net, hook_mixing, refused="hooks of first changed"),
    S(
        "hook on all modules that mixes, put in",
        Net,
        around=global_hook,
        refused="hooks of all modules changed",
    ),
    S(
        "full backward hook that scales, put in",
        Net,
        hook_backward,
        refused="hooks of second changed",
    ),
    S(
        "full backward hook that mixes, put in",
        Net,
        hook_mixing_backward,
        refused="hooks of second changed",
    ),
    S("hook on a parameter, put in", Net, hook_parameter, refused="hooks of first.weight changed"),
    S("prune.l1_unstructured", Net, prune_first, refused="first.weight was replaced"),
    S("weight_norm, put in", Net, weight_norm_later, refused="first changed"),
    S("forward pre-hook that mixes, put in", Net, hook_inputs, refused="hooks of second changed"),
    S(
        "full backward hook on all modules that mixes",
        Net,
        around=global_backward_hook,
        refused="hooks of all modules changed",
    ),
    S(
        "records mixed by a flag of the class",
        MixesByClass,
        around=setting(MixesByClass, "mixes", True),
        meant=True,
    ),
    S(
        "records mixed by a flag elsewhere",
        MixesByGlobal,
        around=setting(Switches, "mixes", True),
        meant=True,
    ),
    S("records mixed by a flag of an object in a list", MixesByList, set_part),
    S(
        "a method of the class replaced",
        MixesByClass,
        around=setting(MixesByClass, "out", lambda net, h: net.second(centred(h))),
        meant=True,
    ),
    S("the weights of two layers exchanged", Swapped, swap, refused="middle.weight was replaced"),
    S(
        "a tensor replaced that is an attribute",
        Scaled,
        replace_tensor,
        refused="scale was replaced",
    ),
    S("a tensor written that is an attribute", Scaled, lambda run: run.net.scale.fill_(2.0)),
    S(
        "a buffer written",
        ScaledByBuffer,
        lambda run: run.net.scale.fill_(2.0),
        refused="scale was written to",
    ),
    S(
        "eps of a norm set",
        normed(lambda: nn.GroupNorm(1, HIDDEN)),
        larger_epsilon,
        refused="norm.eps changed",
    ),
    S("scoring, copying, moving to where it is", Net, harmless),
    # Around the steps.
    S("autocast around the loop", Net, around=lambda _: torch.autocast("cpu", torch.bfloat16)),
    S("torch.no_grad() around the loop", Net, around=lambda _: torch.no_grad()),
    S("torch.inference_mode() around the loop", Net, around=lambda _: torch.inference_mode()),
    S("torch.set_float32_matmul_precision('medium')", Net, around=half_products),
    S("float64 by default", Net, around=double_by_default),
    S(
        "a sampler with weights",
        Net,
        settings={"sampler": WeightedRandomSampler([1, 1, 1, 1, 1, 9], 6)},
        refused="InputError: (--)?sampler: Input should be a valid string, not a WeightedRandom",
    ),
)
