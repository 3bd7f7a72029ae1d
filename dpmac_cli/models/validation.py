"""Model validation: reject networks that cannot be trained on each record alone, or published.

A network in training sees one record at a time (:mod:`dpmac_cli.dp.clipping.per_sample`), so it
cannot mix records. One that computes something else for a batch than for one record is trained on
other values than its author meant, so it is rejected, as are networks that store information about
records. All checks run on made-up samples and on copies of the network. They find mistakes; they
prove nothing about a network that means to cheat.
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
#: Message for a loss that returns a number for a batch that no step can train on.
NOT_THE_MEAN = (
    "The loss returns one number for a batch, which is not the mean of the losses that its samples "
    "have alone, and dpmac trains on each sample alone. Return one real loss per sample, a tensor "
    "of shape (samples,): cross_entropy(output, target, reduction='none'), or for tokens, "
    "(losses * mask).sum(1). If the loss of each sample alone is what you mean, add {isolate}."
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

    Raises:
        ModelError: names the layer and the remedy.
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
    """Reject a model on any samples; it may return its own losses.

    Checked are, in this order: layers and tensors; the output for several samples and for one;
    precision and other processes; that a pass changes nothing and can be repeated; and that a
    batch gives what its samples give alone.

    Args:
        model: maps a batch to logits, shape (samples, classes), or to one loss per sample, shape
            (samples,), or to the mean loss of the batch, shape (). It is not changed, except as in
            :func:`keep_constants`.
        trial: made-up samples, and the number of classes; None for a model that returns losses.
        frozen, isolated, built_in: see :func:`check_model`.

    Raises:
        ModelError: names the layer and the remedy.
    """
    _check_parts(model, frozen)
    if trial.classes is None:
        keep_constants(model, trial)
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


def keep_constants(model: nn.Module, trial: Trial) -> None:
    """Write the constants that a network makes when it first runs into its attributes, in place.

    A network that changes itself in training is refused, because it could carry a record to the
    next step. Networks of transformers change once: they write the kind of their loss, a text, to
    ``config.problem_type``. So a value that is None becomes what it is after a pass on a made-up
    sample, if it is a number or a text, and the same after a pass on zeros. Neither is a record, so
    the value depends on none. Every other change is left for :class:`.Fingerprint` to notice.

    Args:
        model: the network with its loss. Two copies of it run, on one sample each.
        trial: made-up samples.
    """
    try:
        sample = trial.samples(1)
        first = _constants_after(model, sample, trial)
        second = _constants_after(model, map_rows(torch.zeros_like, sample), trial)
    except (Exception, SystemExit):  # noqa: BLE001  (of any kind: validation says why)
        return
    for path, holder in list(_holders(model)):
        values = vars(holder)
        unset = [name for name, value in values.items() if value is None]
        for name in unset:
            constant, other = first.get((*path, name)), second.get((*path, name))
            if constant is not None and type(other) is type(constant) and other == constant:
                values[name] = constant


def _constants_after(model: nn.Module, x: Batch, trial: Trial) -> dict[tuple[str, ...], Any]:
    """Return the numbers and texts that a copy of a network holds after a pass, by path."""
    network = copy.deepcopy(model)
    network = network if trial.inputs.keep_dtype else network.double()
    with torch.no_grad(), same_draws():
        network(x)
    constants = dict[tuple[str, ...], Any]()
    for path, holder in _holders(network):
        for name, value in vars(holder).items():
            if isinstance(value, bool | int | float | str):
                constants[*path, name] = value
    return constants


def _holders(network: nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield the modules of a network, and objects in their attributes such as a config, by path."""
    for name, module in network.named_modules():
        yield (name, ""), module
        for attribute, value in vars(module).items():
            if hasattr(value, "__dict__") and not isinstance(value, nn.Module | Tensor | type):
                yield (name, attribute), value


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

    Args:
        model: network with its loss, on the device to train on. A copy of it runs.
        trial: made-up samples.

    Raises:
        ModelError: names the operation.
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
    """Convert exceptions of user code on random samples, which are not private, to ModelError.

    Args:
        trial: made-up samples on which it runs.
        model: network with its loss, for the remedy.

    Raises:
        ModelError: in place of any other exception of the block.
    """
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
    if differentiates(reason):
        return DIFFERENTIATED
    if mixes_dtypes(reason):
        return _other_dtypes(trial, model)
    message = str(reason)
    of_shapes = any(word in message for word in OF_SHAPES)
    if trial.classes is not None:
        remedy = WRITE_SHAPE if of_shapes else OWN_TENSORS
    else:
        remedy = (TARGETS if of_shapes else RANGES) + OWN_TENSORS
    return f"It must accept any number of such samples, including one. {remedy}"


def _other_dtypes(trial: Trial, model: nn.Module) -> str:
    """Return which parts of a batch or a network have another dtype, and a remedy.

    Args:
        trial: made-up samples in the shapes and dtypes of the records.
        model: network with its loss.
    """
    wanted, in_float64 = dtype_of(model), list[str]()
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if tensor.dtype == torch.float64:
            in_float64.append(name.removeprefix("network."))
    dtypes = dict[str, torch.dtype]()
    for name, part in parts_by_name(trial.inputs.template).items():
        if isinstance(part, Tensor) and part.is_floating_point() and part.dtype != wanted:
            dtypes[name] = part.dtype
    if in_float64 and (wanted != torch.float64 or dtypes):
        if len(in_float64) > NAMED:
            in_float64 = [*in_float64[:NAMED], "..."]
        return (
            f"These parts of the network are torch.float64, and others or the records are not: "
            f"{', '.join(in_float64)}. Add this line before training: network.float()"
        )
    if dtypes:
        parts = ", ".join(f"{name} is {dtype}" for name, dtype in dtypes.items())
        first, *_ = dtypes
        return f"{parts}, and the network {wanted}. Write {first}.to({wanted}) in the loss."
    return f"{HELD_DTYPE} {OWN_TENSORS}"


def _check_parts(model: nn.Module, frozen: bool) -> None:
    """Reject layers that mix samples, and tensors that cannot be trained or published."""
    for name, module in model.named_modules():
        _check_layer(name, module, frozen)
    for name, value in itertools.chain(model.named_parameters(), model.named_buffers()):
        _check_tensor(name, value, frozen)


def _check_layer(name: str, module: nn.Module, frozen: bool) -> None:
    """Reject a layer that mixes samples, or whose gradients depend on the batch.

    Args:
        name: name of the layer in the network.
        module: the layer.
        frozen: whether it is run in evaluation mode, in which batch norm is a constant.

    Raises:
        ModelError: names the layer, and the one to use instead.
    """
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
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                return f"{name}.{key}".lstrip(".")
    return ""


def _check_tensor(name: str, value: Tensor, frozen: bool) -> None:
    """Reject a parameter or buffer that cannot be trained or published.

    Args:
        name: name of the tensor in the network.
        value: the tensor.
        frozen: whether it is not trained, so that it may have fewer than 32 bits.

    Raises:
        ModelError: names the tensor, and what to do.
    """
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
    """Reject a model whose output is of another shape, or no real numbers.

    Args:
        model: the model or a copy of it.
        trial: made-up samples; its number of classes, or None, tells what the output should be.
        count: number of samples in the batch.
        scored: whether the model is in evaluation mode, in which outputs may be integers or NaN.

    Raises:
        ModelError: tells the shape that was returned, and the one to return.
    """
    logits: Any = model(trial.samples(count))
    if trial.classes is None and isinstance(logits, Tensor) and logits.ndim == 0:
        logits = logits.expand(count)  # the mean loss of the batch: see _check_alone
    if not isinstance(logits, Tensor):
        returned = f"a {type(logits).__name__}"
    elif logits.shape != ((count,) if trial.classes is None else (count, trial.classes)):
        returned = f"{tuple(logits.shape)}"
    elif not logits.is_floating_point() and not scored:
        returned = f"{logits.dtype} numbers"
    elif not bool(logits.isfinite().any()) and not scored:
        returned = "only NaN or infinity"
    else:
        return
    if trial.classes is None:
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else ()
        raise ModelError(
            f"The loss returns {returned} for a batch of {count} samples. Return one real loss per "
            "sample, a tensor of shape (samples,): cross_entropy(output, target, reduction='none'),"
            f" or for tokens, (losses * mask).sum(1).{_on_shape(shape, count)}"
        )
    flat = ""
    if isinstance(logits, Tensor) and logits.ndim > 2:
        flat = " For one row of numbers per sample, write x.flatten(1) in its forward."
    raise ModelError(
        f"The model returns {returned} for {count} samples of shape {trial.inputs}. Return one "
        f"tensor of real logits of shape (samples, {trial.classes}), with one column per class."
        f"{flat}"
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
    """Turn dropout into the identity, and set a ``frozen`` model to evaluation mode.

    So what a sample changes in another's outputs is not hidden by random draws.

    Args:
        model: network, which is changed in place.
        frozen: see :func:`check_model`.
    """
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
    """Randomise zero parameters, which would hide the effects of earlier layers, in place."""
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        if p.is_floating_point() and not p.any():
            values = torch.empty(p.shape, dtype=p.dtype)
            values.normal_(std=0.1, generator=generator)
            p.data = values.to(p.device)


@contextlib.contextmanager
def same_draws() -> Iterator[None]:
    """Seed torch's global generator, whose seed is secret in training, and restore it after."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@torch.no_grad()
def _check_forward(model: nn.Module, trial: Trial) -> None:
    """Reject a model that changes itself, or whose outputs differ for the same sample.

    It runs twice on one sample, with the same seed of torch's generator. A model that keeps
    something of the first pass, or draws from another generator, gives another output.

    Args:
        model: a copy, :func:`prepared`, in float64 where that is possible.
        trial: made-up samples.

    Raises:
        ModelError: tells what has changed.
    """
    x = trial.samples(1)
    trained = [p for p in model.parameters() if p.requires_grad]
    before = Fingerprint(model, [id(p) for p in trained])
    outputs = list[Tensor]()
    for _ in range(2):
        with same_draws():
            outputs.append(model(x))
        changes = before.changed(STORED)
        if changes:
            raise ModelError(f"A forward pass changes the network: {changes}")
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

    In training it would see one at a time. Outputs are compared by row. A loss that returns one
    number for a batch has no rows, so it is compared with the mean of the losses alone.

    Args:
        model: a copy, :func:`prepared`, in float64 where that is possible.
        trial: made-up samples.

    Raises:
        ModelError: names the first part whose values differ, if there is one.
    """
    in_float32 = trial.inputs.keep_dtype
    batch = trial.samples(FEW)
    values_of_batch = _values_by_part(model, batch)
    _, outputs_of_batch = values_of_batch[-1]
    reduced = isinstance(outputs_of_batch, Tensor) and outputs_of_batch.ndim == 0
    losses = list[Tensor]()
    mixing_part: str | None = None
    for row in range(FEW):
        values = _values_by_part(model, map_rows(itemgetter(slice(row, row + 1)), batch))
        _, outputs = values[-1]
        if reduced:
            losses.append(outputs.reshape(()).double())
        elif not _differ(outputs_of_batch, outputs, row, in_float32):
            continue
        if mixing_part is None:
            mixing_part = _first_difference(values_of_batch, values, row, in_float32)
        if not reduced:
            raise _mixed(model, mixing_part or "")
    if reduced and not _is_mean(outputs_of_batch.double(), torch.stack(losses), in_float32):
        raise ModelError(NOT_THE_MEAN) if mixing_part is None else _mixed(model, mixing_part)


def _is_mean(of_batch: Tensor, losses: Tensor, in_float32: bool) -> bool:
    """Return whether the loss of a batch is the mean of the losses of its samples.

    A step averages the gradients of such losses, so it trains on what the loss of a batch means.

    Args:
        of_batch: one loss for a batch, shape ().
        losses: loss of each of its samples alone, shape (samples,).
        in_float32: whether they are not computed in float64.
    """
    relative, absolute = _rounding(losses, in_float32)
    return torch.allclose(of_batch, losses.mean(), relative, absolute, equal_nan=True)


def _first_difference(
    of_batch: list[tuple[str, Any]], alone: list[tuple[str, Any]], row: int, in_float32: bool
) -> str | None:
    """Return the name of the first part that computes something else for a row of a batch.

    Args:
        of_batch, alone: values of the batch and of the row alone, see :func:`_values_by_part`.
        row: number of the row.
        in_float32: whether they are not computed in float64.

    Returns:
        "" for the model itself; None if no values of the same shape differ.
    """
    for (name, values), (_, values_alone) in zip(of_batch, alone, strict=False):
        if _differ(values, values_alone, row, in_float32):
            return name
    return None


def _values_by_part(model: nn.Module, x: Batch) -> list[tuple[str, Any]]:
    """Return what modules compute in order: the inputs of a part are computed by its parent.

    Args:
        model: the model.
        x: a batch of samples.

    Returns:
        Names of modules and values: inputs as (arguments, keywords) by the name of the parent, and
        outputs by the name of the module. The last one is the output of the model.
    """
    values: list[tuple[str, Any]] = []

    def entered(name: str, _: nn.Module, arguments: Any, keywords: Any) -> None:
        parent = name.rpartition(".")[0]
        values.append((parent, (arguments, keywords)))

    def ended(name: str, _: nn.Module, __: Any, outputs: Any) -> None:
        values.append((name, outputs))

    with contextlib.ExitStack() as hooks, constant_draws():
        for name, module in model.named_modules():
            for hook in (
                module.register_forward_pre_hook(partial(entered, name), with_kwargs=True),
                module.register_forward_hook(partial(ended, name)),
            ):
                hooks.callback(hook.remove)
        model(x)
    return values


def _differ(batch: Any, one: Any, row: int, in_float32: bool) -> bool:
    """Return whether values of a row of a batch are others alone, by more than rounding.

    Args:
        batch: any nesting of tensors. Those without one row per sample are not compared.
        one: the same of the row alone.
        row: number of the row.
        in_float32: whether they are not computed in float64.
    """
    for of_batch, alone in zip(tensors_in(batch), tensors_in(one), strict=False):
        if of_batch.shape[:1] != (FEW,):
            continue
        of_row = of_batch[row : row + 1]
        if of_row.shape != alone.shape:
            continue
        relative, absolute = _rounding(of_batch, in_float32)
        if not torch.allclose(of_row.double(), alone.double(), relative, absolute, equal_nan=True):
            return True
    return False


def _rounding(values: Tensor, in_float32: bool) -> tuple[float, float]:
    """Return how much rounding may change values, relative to each, and in all."""
    if not in_float32:
        return 1e-6, 1e-9
    if not values.numel():
        return SINGLE, 0.0
    largest = values.double().abs().nan_to_num(posinf=0).max()
    return SINGLE, SINGLE * float(largest)


def _mixed(model: nn.Module, name: str) -> ModelError:
    """Return why a model is rejected whose results for one sample depend on others.

    Args:
        model: the model.
        name: name of the part that computes something else; "" for the model itself.
    """
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
