"""Score and mask modifiers: users' Triton device functions, and the names by which custom ops know them.

    import triton, triton.language as tl                               # both beside the functions, used or not

    @triton.jit
    def by_distance(score, b, h, q_idx, kv_idx, slopes):               # FlexAttention's score_mod, on tiles
        return score - tl.load(slopes + h) * tl.abs(q_idx - kv_idx)

    @triton.jit
    def same_document(b, h, q_idx, kv_idx, document):                  # FlexAttention's mask_mod
        return tl.load(document + q_idx) == tl.load(document + kv_idx)

Both get tiles: `score` is float32 of shape (rows, keys) or (keys, rows), `q_idx` and `kv_idx` are int32 and broadcast
to it, `b` and `h` are int32 scalars; pointers to the `aux_tensors` follow. They must work element by element. Indices
always lie inside the sequences (padding is clamped), so loads by index need no mask; a table of more than 2^31 elements
wants `.to(tl.int64)`. A score is natural: scaled, capped
and biased where asked; -inf hides the key.

    @triton.jit
    def by_distance_grad(grad, score, b, h, q_idx, kv_idx, slopes):    # gradient of what score_mod was given
        return grad

The gradient is linear in `grad`, as derivatives are: kernels may hand it probabilities and multiply later.

A custom op takes no functions, so it is handed a key, made of the name and source of the function. torch.compile
can not look inside a device function on every machine: `modifier` makes the key outside, once.
"""

from __future__ import annotations

import hashlib
import inspect
from typing import Any

import torch
import triton.language as tl

from gpu_accel.errors import InvalidInputError, UnsupportedError, shown

_functions: dict[str, Any] = {}
_keys: dict[int, str] = {}  # by identity: the functions above stay alive


class Modifier:
    """A device function with its key; made by :func:`modifier`."""

    def __init__(self, function: Any, key: str) -> None:
        self.function, self.key = function, key

    def __repr__(self) -> str:
        return f"modifier({self.key})"


def _is_device_function(function: object) -> bool:
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    return isinstance(function, (JITFunction, InterpretedFunction))


def _key(function: Any) -> str:
    inner = function.fn
    name = f"{inner.__module__}.{inner.__qualname__}"
    try:
        source = inspect.getsource(inner)
    except (OSError, TypeError):  # typed at a prompt
        source = ""
    base = f"{name}#{hashlib.sha256(source.encode()).hexdigest()[:12]}"
    key, again = base, 1
    while key in _functions:  # the same text twice, with other globals perhaps
        again += 1
        key = f"{base}.{again}"
    return key


def _check_interpretable(function: Any, seen: tuple[Any, ...] = ()) -> None:
    """Triton's interpreter calls device functions, and those that they call, only beside a triton.language."""
    from triton.runtime.interpreter import InterpretedFunction

    if not isinstance(function, InterpretedFunction) or function in seen:
        return
    inner = function.fn
    known = inner.__globals__
    if not any(x is tl or x is tl.core for x in known.values()):
        raise InvalidInputError(
            f"Triton's interpreter cannot call {inner.__qualname__}: it wants triton.language beside every device "
            f"function, used or not. Add `import triton.language as tl` to the module {inner.__module__}"
        )
    for name in inner.__code__.co_names:
        _check_interpretable(known.get(name), (*seen, function))


def modifier(function: Any) -> Modifier:
    """Wrap a `@triton.jit` function for use as `score_mod`, `score_mod_grad` or `mask_mod` inside torch.compile.

    It is kept as long as the process lives. Outside torch.compile the bare function will do.

    Raises:
        InvalidInputError: not a `@triton.jit` function, or in the interpreter one whose module lacks triton.language.
    """
    if isinstance(function, Modifier):
        return function
    known = _keys.get(id(function))
    if known is not None:
        return Modifier(function, known)
    if not _is_device_function(function):
        raise InvalidInputError(
            f"score_mod, score_mod_grad and mask_mod are Triton device functions: decorate the function with "
            f"@triton.jit; got {type(function).__name__} {shown(function)}"
        )
    _check_interpretable(function)
    key = _key(function)
    _functions[key] = function
    _keys[id(function)] = key
    return Modifier(function, key)


def key_of(name: str, function: Any) -> str:
    """The key of a modifier given as the argument `name`; "" for None."""
    if function is None:
        return ""
    if isinstance(function, Modifier):
        return function.key
    if torch.compiler.is_compiling():
        raise UnsupportedError(
            f"inside torch.compile {name} must be wrapped outside, once: "
            f"{name} = gpu_accel.flash_attention3.modifier(function)"
        )
    return modifier(function).key


def device_function(key: str) -> Any:
    """The function behind a key, or None for ""."""
    if not key:
        return None
    try:
        return _functions[key]
    except KeyError:
        raise UnsupportedError(
            f"the modifier {key} is not known in this process: pass its function to modifier() first"
        ) from None
