"""Triton's interpreter, quicker: it prepares `triton.language` once a launch, not at every call of a device function.

For a launch the interpreter replaces a few hundred members of the language by its own, and searches for them each time;
then it does both again whenever the kernel calls another `@triton.jit` function, when nothing is left to replace. That
is a third of the time of a small kernel; a tenth is a table of dtypes, built for every array. Seen in Triton 3.6.0 to
3.9.0.

The language is the process's, so launches of several threads wait for one another: where one ended while another was
under way, that one found the language as it was before.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

_NEEDED = ("_patch_lang", "_LangPatchScope", "_get_np_dtype", "InterpretedFunction", "InterpreterError")


def quicken() -> bool:
    """Make it so in this process; False where this Triton's interpreter is not the one that is known here."""
    import triton.language as tl
    from triton.runtime import interpreter

    if not all(hasattr(interpreter, name) for name in _NEEDED):
        return False
    if not hasattr(interpreter._LangPatchScope(), "_changes"):
        return False
    prepare, function = interpreter._patch_lang, interpreter.InterpretedFunction
    if prepare.__module__ == __name__:  # done before
        return True
    under_way: list[Any] = []  # launches
    members: dict[tuple[Any, str], Any] = {}  # (module or class, name) -> what takes its place
    language = threading.RLock()  # held by the thread that launches

    class Launch(interpreter._LangPatchScope):
        def restore(self) -> None:
            super().restore()
            if self in under_way:
                under_way.remove(self)
                language.release()

    def prepare_once(fn: Any) -> Launch:
        language.acquire()
        scope = Launch()
        under_way.append(scope)
        if len(under_way) == 1:
            if not members:
                found = prepare(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
                members.update({(where, name): getattr(where, name) for where, name, _ in found._changes})
                found.restore()
                if (tl.tensor, "__index__") in members:  # NumPy 2.4 makes no int of an array, as Triton 3.6.0 asks
                    members[tl.tensor, "__index__"] = lambda one: int(one.handle.data.squeeze())
            for (where, name), own in members.items():
                scope.set_attr(where, name, own)
        return scope

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not under_way:
            prepare(self.fn)
        rewritten = self.rewrite()
        try:
            return rewritten(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    find, known = interpreter._get_np_dtype, {}

    def numpy_dtype(dtype: Any) -> Any:
        scalar = dtype.element_ty if type(dtype) is tl.block_type else dtype
        if type(scalar) is not tl.dtype:
            return find(dtype)
        if scalar.name not in known:
            known[scalar.name] = find(scalar)
        return known[scalar.name]

    interpreter._patch_lang, function.__call__, interpreter._get_np_dtype = prepare_once, call, numpy_dtype
    return True
