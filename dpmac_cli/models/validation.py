"""Model validation: reject networks that cannot be trained on each record alone, or published.

A network in training sees one record at a time (:mod:`dpmac_cli.dp.clipping.per_sample`), so it
cannot mix records. One that computes something else for a batch than for one record is trained on
other values than its author meant, so it is rejected, as are networks that store information about
records.
"""

import contextlib
import copy
import itertools
from collections.abc import Iterator
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._python_dispatch import TorchDispatchMode

from dpmac_cli.dp.clipping.batches import Batch, map_rows, parts_by_name, tensors_in
from dpmac_cli.dp.clipping.one_sample import SINGLE
from dpmac_cli.dp.clipping.vmap_support import constant_draws
from dpmac_cli.dp.torch_errors import (
    DIFFERENTIATED,
    HELD_DTYPE,
    differentiates,
    mixes_dtypes,
    what_failed,
)
from dpmac_cli.errors import DpmacError, ModelError
from dpmac_cli.models.fingerprint import Fingerprint
from dpmac_cli.models.modes import evaluating
from dpmac_cli.models.trial_samples import NAMED, Trial, device_of, dtype_of

# Layers that compute statistics over the batch, so that one sample changes another's output.
MIXING_LAYERS = (nn.modules.batchnorm._BatchNorm,)

#: Layers whose random draws are handled in training and do not depend on samples.
DROPOUT = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)
#: Remedy for a network that a forward pass changes.
STORED = (
    "It would store information about private records without noise. Turn this off (for "
    "normalisation layers, track_running_stats=False) and keep nothing from one batch to the next."
)
#: Why at least 32 bits are needed.
ROUNDING = (
    "With fewer than 32 bits, rounding changes the clipped sum by more than the noise allows for."
)
#: Namespaces of torch's operations between processes.
COLLECTIVE = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional")
#: Number of samples in a trial.
FEW = 5
#: Words of torch's and Python's messages on shapes.
OF_SHAPES = ("size", "shape", "imension", "channels", "to unpack")
#: Remedies for failures on made-up samples.
OWN_TENSORS = "Tensors that it creates must use the dtype and device of its inputs (x.new_zeros)."
WRITE_SHAPE = (
    "A network gets records in the shape of their array, images with channels first: in its "
    "forward, write x.flatten(1) for rows of numbers, or x[:, None] to add a dimension of channels."
)
TARGETS = (
    "For one output per record, outputs have shape (records, 1) and targets (records,): write "
    "model(x).squeeze(1). "
)
RANGES = (
    "If its numbers must be in a range, pass example= with rows that are public: its numbers are "
    "used where random ones fail. "
)


def check_model(
    model: nn.Module,
    shape: tuple[int, ...],
    classes: int,
    *,
    frozen: bool = False,
    isolated: bool = False,
    built_in: bool = False,
    example: Tensor | None = None,
) -> None:
    """Reject a classifier that mixes or stores samples, or cannot be trained.

    Args:
        model: maps (samples, *shape) to logits, (samples, classes). It is not changed.
        shape, classes: shape of one sample, number of classes.
        frozen: only the last layer, a linear one, is trained. The rest is checked in evaluation
            mode, in which it is also run: batch norm is a public constant there.
        isolated: the network may compute something else for a batch than for each sample alone.
        built_in: the network is built in, so only its output is checked.
        example: made-up samples to try it on, shape (rows, *shape); None for random numbers.

    Raises ModelError, which names the layer and the remedy.
    """
    trial = Trial.of(model, shape, classes, example)
    check_trial(model, trial, frozen=frozen, isolated=isolated, built_in=built_in)


def check_trial(
    model: nn.Module,
    trial: Trial,
    *,
    frozen: bool = False,
    isolated: bool = False,
    built_in: bool = False,
) -> None:
    """Reject a model on any samples; it may return its own losses. See :func:`check_model`."""
    _check_parts(model, frozen)
    try:
        probe = copy.deepcopy(model)
    except (Exception, SystemExit) as failure:
        name = _computed_tensor(model)
        why = f"{name} was computed from parameters: compute it in forward." if name else ""
        raise ModelError(
            f"The model cannot be copied, and validation works on a copy. "
            f"{why or what_failed(failure)}"
        ) from failure
    with explained(trial, model):
        with torch.no_grad():
            probe = probe if trial.inputs.keep_dtype else probe.double()
            with evaluating(probe):
                _check_output(probe, trial, FEW, scored=True)
            prepared(probe, frozen)
            for count in (1,) if isolated else (FEW, 1):
                _check_output(probe, trial, count)
        if built_in:
            return
        if not frozen:
            check_precision(model, trial)
        randomise_zeros(probe)
        _check_forward(probe, trial)
        if not isolated:
            _check_alone(probe, trial)


class _Permitted(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    """Reject operations that read other processes, or whose results have fewer than 32 bits.

    The latter is so under autocast.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in COLLECTIVE:
            raise ModelError(
                f"The model or its loss calls torch.distributed ({func.overloadpacket.__name__}), "
                "by which a record changes what other processes compute of their records. Remove "
                "that: dpmac adds up the gradients of several processes itself."
            )
        result = func(*args, **(kwargs or {}))
        for value in () if func.is_view else tensors_in(result):  # a record may be in float16
            if value.is_floating_point() and value.itemsize < 4:
                raise ModelError(
                    f"The model computes {func.overloadpacket.__name__} in {value.dtype}, as under "
                    f"torch.autocast. {ROUNDING} Remove autocast and casts to half precision."
                )
        return result


@torch.enable_grad()
def check_precision(model: nn.Module, trial: Trial) -> None:
    """Reject a network that reads other processes, or computes in fewer than 32 bits on its device.

    Raises ModelError.
    """
    x = trial.inputs.to(device_of(model)).made_up(1)
    network = copy.deepcopy(model)
    trained = [p for p in network.parameters() if p.requires_grad]
    with torch.random.fork_rng(), _Permitted():  # type: ignore[no-untyped-call]
        loss = trial.losses(network(x)).sum()
        if loss.requires_grad and trained:
            torch.autograd.grad(loss, trained, allow_unused=True)


@contextlib.contextmanager
def explained(trial: Trial, model: nn.Module) -> Iterator[None]:
    """Convert exceptions of user code on random samples, which are not private, to ModelError."""
    try:
        yield
    except (Exception, SystemExit) as failure:
        reason = failure.__cause__ if isinstance(failure, DpmacError) else failure
        if reason is None:
            raise
        raise ModelError(
            f"The model failed on samples of shape {trial.inputs}"
            f"{'' if trial.inputs.keep_dtype else ' in float64'}: "
            f"{what_failed(reason)} {_remedy(reason, trial, model)}"
        ) from failure


def _remedy(reason: BaseException, trial: Trial, model: nn.Module) -> str:
    """Return what to do about a failure on made-up samples."""
    said = str(reason)
    if differentiates(reason):
        return DIFFERENTIATED
    if mixes_dtypes(reason):
        return _other_dtypes(trial, model)
    said_shapes = any(word in said for word in OF_SHAPES)
    if trial.classes is not None:
        more = WRITE_SHAPE if said_shapes else OWN_TENSORS
    else:
        more = (TARGETS if said_shapes else RANGES) + OWN_TENSORS
    return f"It must accept any number of such samples, including one. {more}"


def _other_dtypes(trial: Trial, model: nn.Module) -> str:
    """Return which parts of a batch or a network have another dtype, and a remedy."""
    wanted, kinds = dtype_of(model), list[str]()
    for name, t in itertools.chain(model.named_parameters(), model.named_buffers()):
        if t.dtype == torch.float64:
            kinds.append(name.removeprefix("network."))
    parts = {
        name: part.dtype
        for name, part in parts_by_name(trial.inputs.template).items()
        if isinstance(part, Tensor) and part.is_floating_point() and part.dtype != wanted
    }
    if kinds and (wanted != torch.float64 or parts):
        few = ", ".join([*kinds[:NAMED], "..."] if len(kinds) > NAMED else kinds)
        return (
            f"These parts of the network are torch.float64, and others or the records are not: "
            f"{few}. Add this line before training: network.float()"
        )
    if parts:
        named = ", ".join(f"{name} is {dtype}" for name, dtype in parts.items())
        remedy = f"{next(iter(parts))}.to({wanted})"
        return f"{named}, and the network {wanted}. Write {remedy} in the loss."
    return f"{HELD_DTYPE} {OWN_TENSORS}"


def _check_parts(model: nn.Module, frozen: bool) -> None:
    """Reject layers that mix samples, and tensors that cannot be trained or published."""
    for name, module in model.named_modules():
        _check_layer(name, module, frozen)
    for name, value in itertools.chain(model.named_parameters(), model.named_buffers()):
        _check_tensor(name, value, frozen)


def _check_layer(name: str, module: nn.Module, frozen: bool) -> None:
    """Reject a layer that mixes samples, or whose gradients depend on the batch."""
    if isinstance(module, MIXING_LAYERS) and not frozen and not _is_constant(module):
        raise ModelError(
            f"The layer {name} is a {type(module).__name__}, which mixes the samples of a "
            "batch and keeps statistics of them without noise. Use "
            "nn.GroupNorm(groups, channels) instead, or add {fix_norm} to replace it."
        )
    if any(isinstance(hook, WeightNorm) for hook in module._forward_pre_hooks.values()):
        raise ModelError(
            f"The layer {name} has torch.nn.utils.weight_norm, which replaces its weight in every "
            "forward pass. Use torch.nn.utils.parametrizations.weight_norm(layer) instead."
        )
    bounded = getattr(module, "max_norm", None) is not None
    if bounded or getattr(module, "scale_grad_by_freq", False):
        raise ModelError(
            f"The layer {name} changes its weights or gradients depending on the batch. "
            "Leave out max_norm and scale_grad_by_freq."
        )


def _is_constant(norm: Any) -> bool:
    """Return whether a batch norm is in evaluation mode, in which its statistics are constants."""
    return not norm.training and norm.running_mean is not None and not is_lazy(norm.running_mean)


def _computed_tensor(model: nn.Module) -> str:
    """Return the name of an attribute that autograd has computed; "" if there is none."""
    computed = (
        f"{name}.{key}".lstrip(".")
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, Tensor) and value.grad_fn is not None
    )
    return next(computed, "")


def _check_tensor(name: str, value: Tensor, frozen: bool) -> None:
    """Reject a parameter or buffer that cannot be trained or published."""
    if is_lazy(value):
        raise ModelError(
            f"The shape of {name} is unknown until the network is used. Specify the layer's "
            "sizes, or call the network once on zeros in its factory."
        )
    if value.is_inference():
        raise ModelError(
            f"{name} was created in torch.inference_mode, so it cannot be trained. Create the "
            "network outside of it."
        )
    exact = value.is_floating_point() and value.itemsize >= 4
    if value.requires_grad and not exact and not frozen:
        raise ModelError(
            f"The parameter {name} is {value.dtype}. {ROUNDING} Add this line "
            "to the network's factory, or before make_private: network.float()"
        )
    if value.requires_grad and _hooks_of(value):
        raise ModelError(
            f"The parameter {name} has a hook, which would have no effect: gradients of a "
            "batch are never computed. Remove it. To train a part of a tensor, split it into "
            "two parameters, and freeze one with requires_grad_(False)."
        )
    if value.layout != torch.strided or value.is_meta or value.is_quantized:
        raise ModelError(f"{name} is a sparse, quantized or meta tensor. Use a dense tensor.")
    if value.is_floating_point() and not bool(value.double().isfinite().all()):
        raise ModelError(f"{name} contains NaN or infinity. Initialise it with finite numbers.")


def _hooks_of(parameter: Tensor) -> bool:
    """Return whether a parameter has hooks on its gradient."""
    hooks = parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)
    return any(hooks)


def _check_output(model: nn.Module, trial: Trial, count: int, *, scored: bool = False) -> None:
    """Reject a model whose output is of another shape; reject NaN only if ``scored``."""
    logits: Any = model(trial.samples(count))
    if not isinstance(logits, Tensor):
        found = f"a {type(logits).__name__}"
    elif logits.shape != ((count,) if trial.classes is None else (count, trial.classes)):
        found = f"{tuple(logits.shape)}"
    elif not logits.is_floating_point() and not scored:
        found = f"{logits.dtype} numbers"
    elif not bool(logits.isfinite().any()) and not scored:
        found = "only NaN or infinity"
    else:
        return
    if trial.classes is None:
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else ()
        raise ModelError(
            f"The loss returns {found} for a batch of {count} samples. Return one real loss per "
            "sample, a tensor of shape (samples,): cross_entropy(output, target, reduction='none'),"
            f" or for tokens, (losses * mask).sum(1).{_on_shape(shape, count)}"
        )
    several = isinstance(logits, Tensor) and logits.ndim > 2
    flat = (
        " For one row of numbers per sample, write x.flatten(1) in its forward." if several else ""
    )
    raise ModelError(
        f"The model returns {found} for {count} samples of shape {trial.inputs}. Return one tensor "
        f"of real logits of shape (samples, {trial.classes}), with one column per class.{flat}"
    )


def _on_shape(shape: tuple[int, ...], count: int) -> str:
    """Return what a shape of losses tells of the shapes of outputs and targets, as a sentence."""
    if count > 1 and shape == (count, count):
        return (
            f" Outputs of shape ({count}, 1) and targets of shape ({count},) give a loss for every "
            "pair of samples: write model(x).squeeze(1)."
        )
    if shape == (count, 1):
        return (
            f" Outputs of shape ({count}, 1) give losses of that shape: write model(x).squeeze(1)."
        )
    return ""


def prepared(model: nn.Module, frozen: bool) -> nn.Module:
    """Turn dropout into the identity, and set a ``frozen`` model to evaluation mode."""
    if frozen:
        model.eval()
    for module in model.modules():
        if type(module) in DROPOUT:
            module.forward = lambda x: x  # still in its mode, which other code may check
        if isinstance(module, nn.RNNBase):
            module.dropout = 0.0
    return model


@torch.no_grad()
def randomise_zeros(model: nn.Module) -> None:
    """Randomise zero parameters, which would hide the effects of earlier layers."""
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        if p.is_floating_point() and not p.any():
            drawn = torch.empty(p.shape, dtype=p.dtype).normal_(std=0.1, generator=generator)
            p.data = drawn.to(p.device)


@contextlib.contextmanager
def same_draws() -> Iterator[None]:
    """Seed torch's global generator, whose seed is secret in training, and restore it after."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@torch.no_grad()
def _check_forward(model: nn.Module, trial: Trial) -> None:
    """Reject a model that changes itself, or whose outputs differ for the same sample.

    The model is in float64 and :func:`prepared`. Raises ModelError.
    """
    x = trial.samples(1)
    trained = [p for p in model.parameters() if p.requires_grad]
    before, outputs = Fingerprint(model, [*map(id, trained)]), list[Tensor]()
    for _ in range(2):
        with same_draws():
            outputs.append(model(x))
        if said := before.changed(STORED):
            raise ModelError(f"A forward pass changes the network: {said}")
    first, again = outputs
    if not torch.allclose(again, first, rtol=1e-6, atol=1e-9, equal_nan=True):
        raise ModelError(
            "The model returns different outputs for the same sample. Use only torch for random "
            "numbers (nn.Dropout, torch.rand, torch.bernoulli), because its seed is secret. If the "
            "model stores information about its inputs, remove that: inputs are private records."
        )


@torch.no_grad()
def _check_alone(model: nn.Module, trial: Trial) -> None:
    """Reject a model that computes something else for a batch than for one sample at a time.

    In training it would see one at a time. The model is in float64 and :func:`prepared`. Raises
    ModelError, which names the part that differs.
    """
    x, own = trial.samples(FEW), trial.inputs.keep_dtype
    whole = _values_by_part(model, x)
    for row in range(FEW):
        alone = _values_by_part(model, map_rows(itemgetter(slice(row, row + 1)), x))
        if _differ(whole[-1][1], alone[-1][1], row, own=own):
            pairs = zip(whole, alone, strict=False)
            first = next(name for (name, of), (_, one) in pairs if _differ(of, one, row, own=own))
            raise _mixed(model, first)


def _values_by_part(model: nn.Module, x: Batch) -> list[tuple[str, Any]]:
    """Return what modules compute in order: the inputs of a part are computed by its parent."""
    found: list[tuple[str, Any]] = []

    def entered(name: str, _: nn.Module, given: Any, named: Any) -> None:
        found.append((name.rpartition(".")[0], (given, named)))

    def left(name: str, _: nn.Module, __: Any, out: Any) -> None:
        found.append((name, out))

    with contextlib.ExitStack() as hooks, constant_draws():
        for name, module in model.named_modules():
            for hook in (
                module.register_forward_pre_hook(partial(entered, name), with_kwargs=True),
                module.register_forward_hook(partial(left, name)),
            ):
                hooks.callback(hook.remove)
        model(x)
    return found


def _differ(batch: Any, one: Any, row: int, *, own: bool) -> bool:
    """Return whether values of a row of a batch are others alone, by more than rounding.

    ``own``: whether they are not computed in float64.
    """
    pairs = zip(tensors_in(batch), tensors_in(one), strict=False)
    return any(
        of.shape[:1] == (FEW,)
        and of[row : row + 1].shape == alone.shape
        and not torch.allclose(
            of[row : row + 1].double(), alone.double(), *_rounding(of, own), equal_nan=True
        )
        for of, alone in pairs
    )


def _rounding(values: Tensor, own: bool) -> tuple[float, float]:
    """Return how much rounding may change values, relative to each, and in all."""
    if not own:
        return 1e-6, 1e-9
    largest = values.double().abs().nan_to_num(posinf=0).max() if values.numel() else 0.0
    return SINGLE, SINGLE * float(largest)


def _mixed(model: nn.Module, name: str) -> ModelError:
    """Return why a model is rejected whose results for one sample depend on others."""
    part = model.get_submodule(name)
    where = f"The {type(part).__name__} {name}".rstrip() if name else "The network or its loss"
    layer = isinstance(part, nn.RNNBase | nn.MultiheadAttention)
    remedy = (
        "Use batch_first=True, so that samples are in the first dimension"
        if layer
        else "Remove operations across samples, such as x.mean(0), F.batch_norm or a loss of pairs"
    )
    return ModelError(
        f"{where} computes something else for a batch than for one sample at a time, and "
        "dpmac trains on each sample alone, which bounds its influence. So it would be trained on "
        f"other values than you meant. {remedy}. If you mean it, add {{isolate}}."
    )
