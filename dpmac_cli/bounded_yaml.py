"""YAML whose size is known before it is used: a few nested aliases can stand for endless data."""

from pathlib import Path
from typing import Any

import yaml

#: Most bytes of a file.
MOST_BYTES = 1 << 22
#: Most characters and values of a document once its aliases are written out.
MOST_WRITTEN_OUT = 1 << 22


class _Bounded:
    """Part of a loader that rejects a document that is too large once it is written out."""

    def get_single_node(self) -> Any:
        """Return the nodes of a document. Raises yaml.YAMLError."""
        try:
            node = super().get_single_node()  # type: ignore[misc]
            if node is not None:
                _written_out(node, {})
        except RecursionError:
            raise yaml.YAMLError("its values are nested too deeply") from None
        return node


def _written_out(node: yaml.Node, known: dict[int, int | None]) -> int:
    """Return the number of characters and values of a node, with those that its aliases stand for.

    Args:
        node: part of a document.
        known: sizes of the nodes that were visited by identity, None while they are; new ones are
            added, so that each node is visited once.
    """
    if id(node) in known:
        size = known[id(node)]
        if size is None:
            raise yaml.YAMLError("an alias contains itself")
        return size
    known[id(node)] = None
    size = 1
    if isinstance(node, yaml.ScalarNode):
        size += len(node.value)
    for part in node.value if isinstance(node, yaml.CollectionNode) else ():
        for each in part if isinstance(part, tuple) else (part,):
            size += _written_out(each, known)
            if size > MOST_WRITTEN_OUT:
                raise yaml.YAMLError("its aliases stand for too many values")
    known[id(node)] = size
    return size


class TextLoader(_Bounded, yaml.BaseLoader):
    """Loader for ``yaml.load`` that reads every value as text, within the limits of this module."""


class ValueLoader(_Bounded, yaml.SafeLoader):
    """Loader for ``yaml.load`` that reads numbers, dates and truth values, within these limits."""


def read_text(file: Path) -> str:
    """Return the text of a YAML file of a bounded size.

    Args:
        file: path of the file, in UTF-8.

    Raises:
        OSError: it cannot be read.
        UnicodeDecodeError: it is not UTF-8.
        yaml.YAMLError: it is too large.
    """
    with file.open("rb") as stream:
        content = stream.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise yaml.YAMLError(f"it has more than {MOST_BYTES:,} bytes")
    return content.decode("utf-8")
