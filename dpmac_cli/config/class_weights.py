"""Public weights of the classes and their mean, as functions of the settings of a run."""

from dpmac_cli.config.settings import BALANCED, Settings


def shares_of(settings: Settings) -> tuple[float, ...]:
    """Return the declared public shares of the classes; () if none are declared.

    They are what is known of the classes without these records, so they cost no epsilon.
    """
    return _numbers(settings.shares)


def class_weights(settings: Settings) -> tuple[float, ...]:
    """Return the public class weights, balanced ones as numbers; () for equal weights.

    They are also () for balanced weights if the shares are none.

    Example:
        >>> class_weights(Settings(class_weights="balanced", shares="0.8,0.2"))
        (1.25, 5.0)
    """
    if settings.class_weights != BALANCED:
        return _numbers(settings.class_weights)
    shares = shares_of(settings)
    if min(shares, default=0.0) <= 0:
        return ()
    return tuple(1 / share for share in shares)


def mean_weight(settings: Settings) -> float:
    """Return the mean weight of a record, relative to the largest; a public number.

    Where an update is proportional to the gradient, a step divides the learning rate by it, so that
    weights change what is learnt and not how fast. Of class weights it is the mean over the
    declared shares, or else over the classes. Of a quantile's weights it is that where the
    predictions are right.

    Example:
        >>> mean_weight(Settings(class_weights="1,3"))
        0.6666666666666666

    Args:
        settings: completed settings.
    """
    kind, _, parameter = settings.loss.partition(":")
    if kind == "quantile":
        level = float(parameter)
        return 2 * level * (1 - level) / max(level, 1 - level)
    weights = class_weights(settings)
    if not weights:
        return 1.0
    shares = shares_of(settings) or (1 / len(weights),) * len(weights)
    total = sum(share * weight for share, weight in zip(shares, weights, strict=True))
    return total / (sum(shares) * max(weights))


def _numbers(text: str | None) -> tuple[float, ...]:
    """Return the numbers of a text such as "1,15"."""
    return tuple(map(float, text.split(","))) if text else ()
