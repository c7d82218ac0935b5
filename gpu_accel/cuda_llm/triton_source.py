"""What a Triton candidate may contain: its kernels in a subset of the language, read from its syntax tree.

The interpreter runs a kernel as ordinary Python, and the compiler reads names from the module around it, so anything
that is not on the lists below is refused. What runs is not the candidate's text either, but text printed from the tree
that was checked (`canonical`).

A refusal names what it found: known ways of cheating are told from plain mistakes by the names that they use. The lists
of such names only choose the word of the verdict; what is let through is decided by the lists of what is allowed.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from .verdict import Kind, Rejected, Verdict

MOST_NODES = 20_000
LARGEST_INTEGER = 2**63

BUILTINS = frozenset({"range", "min", "max", "float", "int", "abs"})
ATTRIBUTES = frozenset({"to", "T", "dtype", "element_ty"})  # of values; `to` alone may be called
TL_TYPES = frozenset({
    "float16", "bfloat16", "float32", "float64", "int1", "int8", "int16", "int32", "int64", "uint8", "uint16",
    "uint32", "uint64", "constexpr",
})  # fmt: skip
TL_FUNCTIONS = frozenset({
    "program_id", "num_programs", "arange", "zeros", "zeros_like", "full", "load", "store", "where", "sum", "max",
    "min", "argmax", "argmin", "xor_sum", "cumsum", "cumprod", "sort", "flip", "exp", "exp2", "log", "log2", "sqrt",
    "sqrt_rn", "rsqrt", "sin", "cos", "erf", "abs", "floor", "ceil", "sigmoid", "softmax", "fma", "maximum",
    "minimum", "clamp", "cdiv", "div_rn", "umulhi", "dot", "trans", "permute", "reshape", "broadcast_to", "expand_dims",
    "ravel", "join", "split", "interleave", "cat", "histogram", "gather", "range", "static_range", "multiple_of",
    "max_contiguous", "max_constancy", "atomic_add", "atomic_max", "atomic_min", "atomic_and", "atomic_or",
    "atomic_xor", "rand", "randint", "make_block_ptr", "advance", "debug_barrier", "make_tensor_descriptor",
    "load_tensor_descriptor", "store_tensor_descriptor",
})  # fmt: skip

# Text that calls take: how products round, what loads do with the cache, what lies beyond a block, order of atomics.
TEXTS = frozenset({
    "", "ieee", "tf32", "tf32x3", "bf16x3", "bf16x6", "evict_first", ".ca", ".cg", ".cs", ".cv", ".wb", ".wt", "zero",
    "nan", "inf", "-inf", "acquire", "release", "acq_rel", "relaxed", "cta", "gpu", "even", "rtne", "rtz",
})  # fmt: skip

_STATEMENTS = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.For, ast.While, ast.If, ast.Pass, ast.Return)
_EXPRESSIONS = (ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Call, ast.Name, ast.Constant,
                ast.Attribute, ast.Subscript, ast.Slice, ast.Tuple, ast.List)  # fmt: skip

# Names that tell what a refused candidate was after. Earlier kinds win where several are found.
_TELLING: tuple[tuple[Kind, frozenset[str]], ...] = (
    (Kind.FORGED_VERDICT, frozenset({"_exit", "exit", "quit", "SystemExit", "atexit", "abort"})),
    (Kind.BACKGROUND_WORK, frozenset({"threading", "_thread", "Thread", "multiprocessing", "asyncio", "concurrent"})),
    (Kind.SIDE_STREAM, frozenset({"Stream", "stream", "ExternalStream", "current_stream"})),
    (Kind.LAZY_OUTPUT, frozenset({"__torch_function__", "__torch_dispatch__", "_make_subclass", "as_subclass"})),
    (Kind.TAMPERING, frozenset({"setattr", "delattr", "elapsed_time", "allclose", "synchronize", "monkeypatch"})),
    (Kind.CLOCK, frozenset({"time", "perf_counter", "perf_counter_ns", "clock", "globaltimer", "clock64", "sleep"})),
    (Kind.STATE, frozenset({"lru_cache", "cache", "data_ptr", "_version", "id", "cache_hook"})),
    (Kind.INTROSPECTION, frozenset({
        "gc", "inspect", "sys", "ctypes", "builtins", "globals", "locals", "vars", "getattr", "eval", "exec",
        "compile", "__import__", "importlib", "f_locals", "f_back", "f_globals", "__globals__", "__code__",
        "__class__", "__subclasses__", "__mro__", "__builtins__", "dir", "type",
    })),
    (Kind.INPUT_OUTPUT, frozenset({
        "open", "os", "io", "subprocess", "socket", "pathlib", "Path", "shutil", "print", "input", "urllib", "tempfile",
        "mmap", "device_print", "pickle", "requests",
    })),
    (Kind.INLINE_CODE, frozenset({"inline_asm_elementwise", "extern_elementwise", "inline_asm", "extra", "call"})),
    (Kind.LIBRARY_CALL, frozenset({"torch", "numpy", "np", "cupy", "jax", "cublas", "aten", "F"})),
)  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    """A kernel that passed: its canonical source, name and parameters."""

    source: str
    name: str
    parameters: tuple[str, ...]
    constants: tuple[str, ...]  # those annotated tl.constexpr
    further: tuple[Kernel, ...] = ()


def canonical(source: str, further: Sequence[str] = ()) -> Kernel:
    """Check a candidate's source and print it anew.

    Args:
        further: names of kernels that are launched after the first, in order; the source holds these and no others.
    Raises:
        Rejected: malformed, compile_error (a name that does not exist) or cheating, with the lines that show it.
    """
    try:
        tree = ast.parse(source)
        count = sum(1 for _ in ast.walk(tree))
    except SyntaxError as error:
        raise Rejected(Verdict.COMPILE_ERROR, None, f"not Python: {error.msg} (line {error.lineno})") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise Rejected(Verdict.MALFORMED, None, f"cannot be parsed: {type(error).__name__}") from error
    if count > MOST_NODES:
        raise Rejected(Verdict.MALFORMED, None, f"{count} syntax nodes; at most {MOST_NODES}")
    try:
        functions = _functions(tree, further)
        signatures = {name: _signature(one) for name, one in functions.items()}
        for name, one in functions.items():
            _Body(tree, one, signatures[name][0]).check()
        printed = "\n\n\n".join(ast.unparse(one) for one in functions.values())
    except RecursionError as error:
        raise Rejected(Verdict.MALFORMED, None, "nested too deeply") from error
    text = f"import triton\nimport triton.language as tl\n\n\n{printed}\n"
    first = next(iter(functions))
    return Kernel(text, first, *signatures[first], tuple(Kernel(text, name, *signatures[name]) for name in further))


def _functions(tree: ast.Module, further: Sequence[str]) -> dict[str, ast.FunctionDef]:
    """The kernels by name, the first one first."""
    functions: list[ast.FunctionDef] = []
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef):
            functions.append(statement)
        elif not (_allowed_import(statement) or _docstring(statement)):
            raise refusal(tree, statement, "beside the kernel")
    others = [one for one in functions if one.name not in further]
    if len(others) != 1:
        if others:
            raise refusal(tree, others[-1], "beside the kernel")
        raise Rejected(Verdict.MALFORMED, None, "no kernel: a candidate has one function with @triton.jit")
    by_name = {one.name: one for one in (others[0], *functions)}
    if lacking := [name for name in further if name not in by_name]:
        raise Rejected(Verdict.MALFORMED, None, f"there is no kernel {lacking[0][:40]}, which [[then]] names")
    if len(by_name) != len(functions):
        raise Rejected(Verdict.MALFORMED, None, "two kernels of one name")
    for kernel in functions:
        decorators = [ast.unparse(one) for one in kernel.decorator_list]
        if decorators != ["triton.jit"]:
            why = f"decorated {', '.join(decorators) or 'by nothing'}, not with @triton.jit alone"
            raise refusal(tree, kernel, why)
    return by_name


def _allowed_import(statement: ast.stmt) -> bool:
    text = ast.unparse(statement) if isinstance(statement, ast.Import | ast.ImportFrom) else ""
    return text in ("import triton", "import triton.language as tl", "from triton import language as tl")


def _docstring(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _signature(kernel: ast.FunctionDef) -> tuple[tuple[str, ...], tuple[str, ...]]:
    given = kernel.args
    if given.vararg or given.kwarg or given.kwonlyargs or given.posonlyargs:
        raise Rejected(Verdict.MALFORMED, None, "a kernel takes plain parameters, without * and **")
    if given.defaults:
        mutable = any(isinstance(node, ast.Dict | ast.List | ast.Set | ast.Call) for node in given.defaults)
        verdict, kind = (Verdict.CHEATING, Kind.STATE) if mutable else (Verdict.MALFORMED, None)
        raise Rejected(verdict, kind, "parameters have no defaults; constants belong into the launch spec")
    names, constants = [], []
    for one in given.args:
        if one.annotation is not None:
            if ast.unparse(one.annotation) != "tl.constexpr":
                raise Rejected(Verdict.MALFORMED, None, f"{one.arg} is annotated other than tl.constexpr")
            constants.append(one.arg)
        names.append(one.arg)
    if getattr(kernel, "type_params", None):  # Python 3.12: def k[T: ...]
        raise Rejected(Verdict.MALFORMED, None, "a kernel has no type parameters")
    if kernel.returns is not None:
        raise Rejected(Verdict.MALFORMED, None, "a kernel returns nothing")
    return tuple(names), tuple(constants)


class _Body:
    """Walks the statements of the kernel and refuses what is not on the lists."""

    def __init__(self, tree: ast.Module, kernel: ast.FunctionDef, parameters: tuple[str, ...]) -> None:
        self.tree, self.kernel = tree, kernel
        stored = {n.id for n in ast.walk(kernel) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        if taken := sorted((stored | set(parameters) | {kernel.name}) & (BUILTINS | {"tl", "triton"})):
            raise refusal(tree, kernel, f"replaces {taken[0]}")
        if hidden := sorted(n for n in stored | set(parameters) | {kernel.name} if n.startswith("_")):
            raise refusal(tree, kernel, f"uses the name {hidden[0]}")
        self.known = stored | set(parameters)

    def check(self) -> None:
        self.block(self.kernel.body)

    def block(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        if not isinstance(node, _STATEMENTS):
            raise refusal(self.tree, node, "in the kernel")
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self.target(target)
            self.expression(node.value)
        elif isinstance(node, ast.AugAssign):
            self.target(node.target)
            self.expression(node.value)
        elif isinstance(node, ast.AnnAssign):
            if ast.unparse(node.annotation) != "tl.constexpr" or node.value is None:
                raise refusal(self.tree, node, "in the kernel")
            self.target(node.target)
            self.expression(node.value)
        elif isinstance(node, ast.Expr):
            if not _docstring(node):
                self.expression(node.value)
        elif isinstance(node, ast.For):
            self.target(node.target)
            ranges = ("range", "tl.range", "tl.static_range")
            if not isinstance(node.iter, ast.Call) or ast.unparse(node.iter.func) not in ranges or node.orelse:
                raise refusal(self.tree, node, "a loop over something else than a range")
            self.expression(node.iter)
            self.block(node.body)
        elif isinstance(node, ast.While | ast.If):
            self.expression(node.test)
            self.block(node.body)
            self.block(node.orelse)
        elif isinstance(node, ast.Return) and node.value is not None:
            raise refusal(self.tree, node, "a kernel returns nothing")

    def target(self, node: ast.expr) -> None:
        names = node.elts if isinstance(node, ast.Tuple) else [node]
        for name in names:
            if not isinstance(name, ast.Name):
                raise refusal(self.tree, node, "assigns to something else than a variable")

    def expression(self, node: ast.expr) -> None:
        if not isinstance(node, _EXPRESSIONS):
            raise refusal(self.tree, node, "in the kernel")
        if isinstance(node, ast.Name):
            if node.id not in self.known | BUILTINS:
                raise refusal(self.tree, node, "an unknown name", Verdict.COMPILE_ERROR)
        elif isinstance(node, ast.Constant):
            self.constant(node)
        elif isinstance(node, ast.Attribute):
            self.attribute(node)
        elif isinstance(node, ast.Call):
            self.call(node)
        else:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    self.expression(child)

    def constant(self, node: ast.Constant) -> None:
        fine = isinstance(node.value, bool | float | None)
        if isinstance(node.value, int):
            fine = abs(node.value) <= LARGEST_INTEGER
        if isinstance(node.value, str):  # here it could be put together with others, or cut
            raise self.text(node, "is text that is no argument of a call")
        if not fine:
            raise refusal(self.tree, node, "in the kernel")

    def argument(self, node: ast.expr) -> None:
        """Of a call: text may stand here, as it is or chosen by a condition."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value not in TEXTS:
                raise self.text(node, "is not among the words that a candidate may pass")
        elif isinstance(node, ast.IfExp):
            self.expression(node.test)
            self.argument(node.body)
            self.argument(node.orelse)
        else:
            self.expression(node)

    def text(self, node: ast.Constant, why: str) -> Rejected:
        """The verdict on text that may not be there."""
        if "evict" in str(node.value) or "last" in str(node.value):
            return Rejected(Verdict.CHEATING, Kind.CACHE_POLICY, "keeps lines in the cache past the flush",
                            (f"line {node.lineno}: {ast.unparse(node)}",))  # fmt: skip
        return refusal(self.tree, node, why)

    def attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name) and node.value.id == "tl":
            if node.attr not in TL_TYPES | TL_FUNCTIONS:
                raise refusal(self.tree, node, "is not among the functions that a candidate may use")
        elif ast.unparse(node.value) == "tl.math" and node.attr in TL_FUNCTIONS:
            return
        elif node.attr in ATTRIBUTES:
            self.expression(node.value)
        else:
            raise refusal(self.tree, node, "is not among the attributes that a candidate may use")

    def call(self, node: ast.Call) -> None:
        function = node.func
        if isinstance(function, ast.Name):
            if function.id not in BUILTINS:
                raise refusal(self.tree, node, "calls an unknown function", Verdict.COMPILE_ERROR)
        elif isinstance(function, ast.Attribute):
            of_tl = ast.unparse(function.value) in ("tl", "tl.math")
            self.attribute(function)
            if not (function.attr in TL_FUNCTIONS | {"constexpr"} if of_tl else function.attr == "to"):
                raise refusal(self.tree, node, "calls something that is no function")
        else:
            raise refusal(self.tree, node, "calls the result of an expression")
        # of what gives its argument back, such as tl.constexpr, text could be put together again
        takes = function.attr != "constexpr" if isinstance(function, ast.Attribute) else function.id == "float"
        read = self.argument if takes else self.expression
        for keyword in node.keywords:
            if keyword.arg is None or keyword.arg.startswith("_"):
                raise refusal(self.tree, node, "passes hidden arguments")
            read(keyword.value)
        for argument in node.args:
            read(argument)


def refusal(tree: ast.Module, node: ast.AST, why: str, plain: Verdict = Verdict.MALFORMED) -> Rejected:
    """The verdict for a candidate that has `node` where it may not be."""
    shown = " ".join(ast.unparse(node).split())[:80] if isinstance(node, ast.stmt | ast.expr) else type(node).__name__
    detail = f"{why}: {shown}"
    found = _telling(tree)
    if found:
        kind = min(found, key=lambda one: _PRIORITY.index(one))
        return Rejected(Verdict.CHEATING, kind, detail, tuple(found[kind][:5]))
    host = plain is Verdict.MALFORMED and why == "beside the kernel"
    return Rejected(plain, Kind.HOST_CODE if host else None, detail, (f"line {getattr(node, 'lineno', 0)}: {shown}",))


_PRIORITY = [Kind.FALLBACK, *(kind for kind, _ in _TELLING)]


def _telling(tree: ast.Module) -> dict[Kind, list[str]]:
    """Everything in a refused candidate that is known from cheats: kind -> lines."""
    found: dict[Kind, list[str]] = {}

    def add(kind: Kind, node: ast.AST, text: str) -> None:
        found.setdefault(kind, []).append(f"line {getattr(node, 'lineno', 0)}: {text[:80]}")

    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict | ast.List):
            add(Kind.STATE, statement, ast.unparse(statement))
    for node in ast.walk(tree):
        words: set[str] = set()
        if isinstance(node, ast.Import | ast.ImportFrom) and not _allowed_import(node):
            module = getattr(node, "module", None) or ""
            words = {part for alias in node.names for part in (*module.split("."), *alias.name.split("."))}
        elif isinstance(node, ast.Name):
            words = {node.id}
        elif isinstance(node, ast.Attribute):
            words = {node.attr}
            if isinstance(node.ctx, ast.Store):
                add(Kind.TAMPERING, node, f"assigns to {ast.unparse(node)}")
        elif isinstance(node, ast.ClassDef):
            add(Kind.LAZY_OUTPUT, node, f"class {node.name}")
        elif isinstance(node, ast.Try | ast.With):
            add(Kind.FALLBACK, node, ast.unparse(node).splitlines()[0])
        elif isinstance(node, ast.Global | ast.Nonlocal):
            add(Kind.STATE, node, ast.unparse(node))
        elif isinstance(node, ast.Raise):
            words = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
        for kind, names in _TELLING:
            if hit := sorted(words & names):
                add(kind, node, hit[0])
    return found
