"""Finding and replacing code by its syntax: comments, formatting and place change nothing."""

import ast
import builtins
import difflib
import functools
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

#: An expression, or statements that follow one another.
Code = ast.expr | list[ast.stmt]
_CONTEXT = re.compile(r"(, )?ctx=(Load|Store|Del)\(\)")
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Definition:
    """A function, method, class or constant of the package.

    Attributes:
        name: qualified, such as `Class.method`.
        file: that it is in.
        node: its syntax.
    """

    name: str
    file: Path
    node: ast.stmt


def parse(text: str) -> Code:
    """Return the syntax of an expression or of statements.

    Raises:
        ValueError: it is not Python.
    """
    try:
        return ast.parse(f"({text}\n)", mode="eval").body if text.strip() else []
    except SyntaxError:
        pass
    try:
        return ast.parse(textwrap.dedent(text).strip()).body
    except SyntaxError as failure:
        raise ValueError(f"not Python ({failure.msg}): {text.strip()}") from failure


def parse_pair(old: str, new: str) -> tuple[Code, Code]:
    """Return the syntax of both, as expressions only if both are."""
    before, after = parse(old), parse(new)
    if isinstance(before, list) or isinstance(after, list):
        before, after = as_statements(before), as_statements(after)
    return before, after


def as_statements(code: Code) -> list[ast.stmt]:
    """Return code as statements."""
    return code if isinstance(code, list) else [ast.Expr(code)]


def key(code: Code) -> str:
    """Return a string that is equal for equal syntax."""
    nodes = code if isinstance(code, list) else [code]
    return "\n".join(map(_dump, nodes))


@functools.cache
def _dump(node: ast.AST) -> str:
    return _CONTEXT.sub("", ast.dump(node))


def show(code: Code) -> str:
    """Return code as text, formatted in one way."""
    nodes = code if isinstance(code, list) else [code]
    return "\n".join(ast.unparse(node) for node in nodes)


def definitions(package: Path) -> Iterator[Definition]:
    """Yield every function, method, class and constant of a package."""
    for file in sorted(package.rglob("*.py")):
        yield from _within(ast.parse(file.read_text(encoding="utf-8")), "", file)


def _within(scope: ast.AST, prefix: str, file: Path) -> Iterator[Definition]:
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, _SCOPES):
            yield Definition(prefix + node.name, file, node)
            yield from _within(node, f"{prefix}{node.name}.", file)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not isinstance(
            scope, ast.FunctionDef | ast.AsyncFunctionDef
        ):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    yield Definition(prefix + target.id, file, node)
        elif isinstance(node, ast.stmt | ast.ExceptHandler):
            yield from _within(node, prefix, file)


def parts(root: ast.AST, like: Code) -> Iterator[Code]:
    """Yield every part of a definition of the kind and length of some code."""
    for node in ast.walk(root):
        if isinstance(like, ast.expr):
            if isinstance(node, ast.expr):
                yield node
            continue
        for _, body in ast.iter_fields(node):
            if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                yield from (body[i : i + len(like)] for i in range(len(body) - len(like) + 1))


def occurrences(definition: Definition, code: Code) -> int:
    """Count how often code occurs in a definition."""
    wanted = key(code)
    if wanted.partition("\n")[0] not in _dump(definition.node):
        return 0
    return sum(key(part) == wanted for part in parts(definition.node, code))


def nearest(candidates: list[Definition], code: Code) -> tuple[Definition, Code] | None:
    """Return the part of these definitions that is most like some code."""
    matcher = difflib.SequenceMatcher(b=show(code), autojunk=False)
    best, found = 0.5, None
    for definition in candidates:
        for part in parts(definition.node, code):
            matcher.set_seq1(show(part))
            if matcher.quick_ratio() > best and (ratio := matcher.ratio()) > best:
                best, found = ratio, (definition, part)
    return found


class _Replacement(ast.NodeTransformer):
    """Replaces one piece of code, an expression or statements, by another."""

    def __init__(self, old: Code, new: Code) -> None:
        self._key, self._old, self._new = key(old), old, new

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(self._old, ast.expr):
            if isinstance(node, ast.expr) and key(node) == self._key:
                assert isinstance(self._new, ast.expr)
                return self._new
            return self.generic_visit(node)
        assert isinstance(self._new, list)
        for _, body in ast.iter_fields(node):
            if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                for i in range(len(body) - len(self._old) + 1):
                    if key(body[i : i + len(self._old)]) == self._key:
                        body[i : i + len(self._old)] = self._new or [ast.Pass()]
                        return node
        return self.generic_visit(node)


def replaced(definition: Definition, old: Code, new: Code) -> ast.Module:
    """Return the syntax of the definition's file with new code in place of old.

    Raises:
        ValueError: the result is not Python, or uses a name that the file does not bind.
    """
    tree = ast.parse(definition.file.read_text(encoding="utf-8"))
    here = (definition.node.lineno, definition.node.col_offset)
    body, i = next(
        (body, i)
        for scope in ast.walk(tree)
        for _, body in ast.iter_fields(scope)
        if isinstance(body, list)
        for i, node in enumerate(body)
        if isinstance(node, ast.stmt) and (node.lineno, node.col_offset) == here
    )
    body[i] = mutated = ast.fix_missing_locations(_Replacement(old, new).visit(body[i]))
    try:
        compile(tree, definition.file.name, "exec")
    except SyntaxError as failure:
        raise ValueError(f"{definition.name} would not compile ({failure.msg})") from failure
    # Most names are bound there, or at the top level: to look everywhere takes as long as the rest.
    near = chain(ast.walk(mutated), _top_level(tree))
    unbound = _loaded(mutated) - _bound(near) - set(dir(builtins))
    if unbound and (unbound := unbound - _bound(ast.walk(tree))):
        names = ", ".join(sorted(unbound))
        raise ValueError(f"its new code uses {names}, which the file does not define")
    return tree


def _top_level(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes of a file outside functions and classes, and those of these themselves."""
    for statement in tree.body:
        if isinstance(statement, _SCOPES):
            yield statement
        else:
            yield from ast.walk(statement)


def _loaded(tree: ast.AST) -> set[str]:
    return {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }


def _bound(nodes: Iterable[ast.AST]) -> set[str]:
    """Return every name that some nodes bind, and those that every file has."""
    names: set[str] = {"__file__", "__name__", "__doc__", "__path__"}
    for node in nodes:
        if isinstance(node, _SCOPES):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            names.add(node.name)
    return names
