"""Short conversations out of the standard library's documentation: real text for a first fine-tuning, on every machine.

One conversation per documented function, method or class: the user asks about its signature, the assistant answers with
its docstring. A class's methods follow as further turns, so that packing, several turns and masking are exercised.
"""

from __future__ import annotations

import ast
import inspect
import warnings
from collections.abc import Iterable, Iterator

# A turn of a class's conversation; longer classes would only repeat the form.
MAX_TURNS = 4


def stdlib_conversations(sources: Iterable[str]) -> Iterator[dict]:
    """Conversations of Python sources, in order; sources that do not parse give none."""
    for source in sources:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # old test files hold invalid escapes
                module = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        for node in module.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                turns = [turn for turn in [_turn(node)] if turn]
            elif isinstance(node, ast.ClassDef):
                methods = [_turn(m, of=node.name) for m in node.body if isinstance(m, (ast.FunctionDef, ast.AsyncFunctionDef))]
                turns = [turn for turn in [_turn(node), *methods] if turn][:MAX_TURNS]
            else:
                continue
            if turns:
                yield {"messages": [message for turn in turns for message in turn]}


def _turn(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, of: str = "") -> list[dict] | None:
    documentation = inspect.cleandoc(ast.get_docstring(node, clean=False) or "").strip()
    if not documentation:
        return None
    name = f"{of}.{node.name}" if of else node.name
    if isinstance(node, ast.ClassDef):
        question = f"What is the class `{name}` for?"
    else:
        question = f"What does `{name}({ast.unparse(node.args)})` do?"
    return [{"role": "user", "content": question}, {"role": "assistant", "content": documentation}]
