"""Asserts of a test, taken apart: calls of the program, which are made inside, and the comparison, made outside.

Theory of operation: `_Splitter` walks through the condition of an assert. What contains no more than a call of the
program and what is taken from its result is sent inside as source; each such expression becomes a placeholder.
Literals, operators and a few functions stay outside, where `_Evaluator` computes them from the values that came back.
So an expected value is never sent inside. Where that cannot be promised (a method or a function of another
module that gets a result and a literal, or a value that no code of the program's makes), the assert is an error.
"""

from __future__ import annotations

import ast
import builtins
import copy
import inspect
import itertools
import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from .comparison import are_equal
from .errors import InvalidRequest
from .literal import MAX_BITS, MAX_PARTS
from .record import dataclass, field

MAX_TEXT_CHARS = 1 << 20
MAX_ITEMS = 5000  # of a set that is made of several results
MAX_DIGITS = 400  # of a number that is read from text, or rounded
_TYPES: Mapping[str, Any] = {
    kind.__name__: kind for kind in (int, float, str, bytes, bool, list, tuple, set, frozenset, dict)
}
_PROGRAM = "program"  # the module that a program is inside
# Classes that tests use without an import of their own, beside Python's own names.
_CLASSES = frozenset(
    ("Counter", "OrderedDict", "defaultdict", "deque", "Decimal", "Fraction", "date", "datetime", "timedelta")
)
_CONSTANTS: Mapping[str, float] = {"math.pi": math.pi, "math.e": math.e, "math.inf": math.inf, "math.nan": math.nan}


@dataclass(frozen=True, slots=True, kw_only=True)
class Approximation:
    """Stand for a number within a tolerance, as `pytest.approx` does."""

    number: Any
    rel: float = 1e-6
    abs: float = 1e-12

    def matches(self, value: object) -> bool:
        """Tell whether a value is this number, nearly; of lists, tuples and dictionaries each number is."""
        return self._is_near(value, self.number)

    def _is_near(self, value: Any, expected: Any) -> bool:  # noqa: ANN401 - plain values
        if isinstance(expected, list | tuple):
            is_alike = type(value) is type(expected) and len(value) == len(expected)
            return is_alike and all(map(self._is_near, value, expected))
        if isinstance(expected, dict):
            is_alike = isinstance(value, dict) and value.keys() == expected.keys()
            return is_alike and all(self._is_near(value[key], number) for key, number in expected.items())
        if isinstance(value, bool) or not isinstance(value, int | float) or not isinstance(expected, int | float):
            return are_equal(value, expected)
        return math.isclose(value, expected, rel_tol=self.rel, abs_tol=self.abs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assertion:
    """Hold one assert: its text, what is evaluated inside, and the condition on the values."""

    text: str
    imports: str = ""
    calls: tuple[str, ...]
    condition: ast.expr = field(repr=False, compare=False)

    def holds(self, values: Sequence[Any]) -> bool:
        """Tell whether the condition is true for these values. Raises WrongValue where it cannot be computed."""
        return bool(_Evaluator(values).value(self.condition))


class WrongValue(ValueError):
    """Report that a condition cannot be computed from an answer, a number in it is too large, say."""


def read_asserts(text: str, entry_point: str | None = None) -> tuple[Assertion, ...]:
    """Take the asserts of a test apart. Raises InvalidRequest for a statement that cannot be.

    The text may have imports, assignments of names, and HumanEval's `def check(candidate)`, for which `entry_point`
    names the function.
    """
    return tuple(_Reader(parse_test(text), entry_point).read())


def parse_test(text: str) -> ast.Module:
    """Parse a test. Raises InvalidRequest."""
    if len(text) > MAX_TEXT_CHARS:
        raise InvalidRequest(f"a text of asserts has more than {MAX_TEXT_CHARS} characters")
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidRequest(f"a text of asserts is no Python: {error}") from None


def whole_test(text: str, entry_point: str | None = None) -> str:
    """Return a test that is run as it is, with HumanEval's call of `check` if it lacks it. Raises InvalidRequest."""
    module = parse_test(text)
    has_check = any(isinstance(statement, ast.FunctionDef) and _is_check(statement) for statement in module.body)
    if not has_check or _called_by_check(module) is not None:
        return text
    if entry_point is None:
        raise InvalidRequest("entry_point does not name the function that the test's `check` is called with")
    return f"{text}\n\ncheck({entry_point})\n"


class _Reader:
    """Read the statements of a test in their order."""

    def __init__(self, module: ast.Module, entry_point: str | None) -> None:
        self._module, self._names = module, dict[str, ast.expr]()
        self._imports: list[str] = []
        self._imported: set[str] = set()
        self._entry_point = entry_point or _called_by_check(module)
        self._assertions: list[Assertion] = []

    def read(self) -> list[Assertion]:
        self._read_all(self._module.body)
        return self._assertions

    def _read_all(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            if isinstance(statement, ast.Assert):
                self._read_condition(self._substituted(statement.test), statement)
            elif isinstance(statement, ast.Import | ast.ImportFrom):
                self._read_import(statement)
            elif isinstance(statement, ast.Assign) and _is_name(statement.targets):
                self._names[ast.unparse(statement.targets[0])] = self._substituted(statement.value)
            elif isinstance(statement, ast.FunctionDef) and _is_check(statement):
                self._names[statement.args.args[0].arg] = self._candidate(statement)
                self._read_all(statement.body)
            elif not _does_nothing(statement):
                raise _not_taken_apart(statement, "it is neither an assert, nor an import or the assignment of a name")

    def _candidate(self, statement: ast.FunctionDef) -> ast.expr:
        if self._entry_point is None:
            raise _not_taken_apart(statement, "entry_point does not name the function that it is called with")
        return parse_test(self._entry_point).body[0].value  # type: ignore[attr-defined,no-any-return]

    def _read_import(self, statement: ast.Import | ast.ImportFrom) -> None:
        self._imports.append(ast.unparse(statement))
        module = statement.module if isinstance(statement, ast.ImportFrom) else None
        for name in statement.names:
            if (module or name.name) != _PROGRAM:
                self._imported.add((name.asname or name.name).split(".")[0])

    def _substituted(self, node: ast.expr) -> ast.expr:
        names = self._names

        class Substitution(ast.NodeTransformer):
            def visit_Name(self, node: ast.Name) -> ast.expr:
                return copy.deepcopy(names.get(node.id, node))

        return Substitution().visit(node)  # type: ignore[no-any-return]

    def _read_condition(self, test: ast.expr, statement: ast.stmt) -> None:
        if isinstance(test, ast.Constant) and test.value:
            return
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            for part in test.values:
                self._read_condition(part, statement)
            return
        splitter = _Splitter(statement, self._imported)
        condition = splitter.split_truth(test)
        if not splitter.calls:
            raise _not_taken_apart(statement, "it calls nothing of the program")
        splitter.refuse_value_made_inside()
        _check_literals(condition, statement)
        self._assertions.append(
            Assertion(
                text=ast.unparse(test),
                imports="\n".join(self._imports),
                calls=tuple(splitter.calls),
                condition=condition,
            )
        )


def _check_literals(node: ast.expr, statement: ast.stmt) -> None:
    """Refuse what cannot be computed from the test alone: no answer would be right."""
    if any(isinstance(part, ast.Name) and part.id.startswith("#") for part in ast.walk(node)):
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, ast.expr) and not (isinstance(node, ast.Call) and inner is node.func):
                _check_literals(inner, statement)
        return
    try:
        _Evaluator(()).value(node)
    except Exception as error:
        why = f"{ast.unparse(node)[:40]!r} cannot be computed: {type(error).__name__}: {error}"
        raise _not_taken_apart(statement, why[:200]) from None


def _is_name(targets: Sequence[ast.expr]) -> bool:
    return len(targets) == 1 and isinstance(targets[0], ast.Name)


def _is_check(statement: ast.FunctionDef) -> bool:
    return statement.name == "check" and len(statement.args.args) == 1 and not statement.decorator_list


def _called_by_check(module: ast.Module) -> str | None:
    """Return the name in a call `check(name)` of the test, if there is one."""
    for statement in module.body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            call = statement.value
            if isinstance(call.func, ast.Name) and call.func.id == "check" and len(call.args) == 1:
                return ast.unparse(call.args[0])
    return None


def _does_nothing(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Pass):
        return True
    if not isinstance(statement, ast.Expr):
        return False
    value = statement.value
    is_check = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "check"
    return is_check or isinstance(value, ast.Constant)


def _not_taken_apart(node: ast.AST, why: str) -> InvalidRequest:
    line = ast.unparse(node).splitlines()[0][:80]
    return InvalidRequest(
        f"line {getattr(node, 'lineno', 0)}: {line!r} cannot be taken apart: {why}; write "
        "`assert f(...) == value`, or let it run beside the program with in_program=True, which a program can cheat"
    )


class _Splitter:
    """Replace what is evaluated inside by placeholders; `calls` are these expressions."""

    def __init__(self, statement: ast.stmt, imported: set[str]) -> None:
        self.calls: list[str] = []
        self._sent: list[ast.expr] = []
        self._statement, self._imported = statement, imported

    def split_truth(self, test: ast.expr) -> ast.expr:
        """Split a condition. Where it calls no function but known ones, the program's has such a name."""
        self._refuse_comparing_call(test)
        condition = self.split(test)
        if not self.calls:
            condition = _OutermostCall(self, self._named_as_known(test)).visit(test)
        return condition

    def _named_as_known(self, test: ast.expr) -> ast.Call | None:
        """Return the one call of a known function that may be the program's, None where only types are called."""
        calls = [part for part in ast.walk(test) if isinstance(part, ast.Call) and _dotted(part.func) not in _MAKERS]
        if len(calls) > 1:
            names = " and ".join(_dotted(call.func) for call in calls[:2])
            raise _not_taken_apart(self._statement, f"which of {names} is the program's cannot be told")
        return calls[0] if calls else None

    def refuse_value_made_inside(self) -> None:
        """Refuse `assert f(2) == math.sqrt(2)`: what a result is compared with would be made inside."""
        if len(self._sent) < 2:
            return
        for node in self._sent:
            if "*" in self._imported or not self._has_own_name(node):
                raise _not_taken_apart(
                    self._statement, f"{ast.unparse(node)[:40]!r} would be computed inside; write its value"
                )

    def _has_own_name(self, node: ast.expr) -> bool:
        """Tell whether an expression has a name that is the program's: neither imported, nor Python's, nor bound there.

        With a star import no name is known.
        """
        parts = list(ast.walk(node))
        bound = {part.arg for part in parts if isinstance(part, ast.arg)}
        bound |= {part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
        modules = {
            part.value.id for part in parts if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name)
        } & sys.stdlib_module_names
        others = self._imported | bound | modules | _CLASSES
        names = {part.id for part in parts if isinstance(part, ast.Name)}
        return any(name not in others and not hasattr(builtins, name) for name in names)

    def split(self, node: ast.expr) -> ast.expr:
        if self._is_inside(node):
            return self._send(node)
        if isinstance(node, ast.Call):
            return self._split_call(node)
        if isinstance(node, ast.Name | ast.Attribute) and _dotted(node) in (*_CONSTANTS, *_TYPES):
            return node
        if isinstance(node, ast.Name):
            return self._send(node)
        if not isinstance(node, _SPLIT_NODES) or (isinstance(node, ast.Dict) and None in node.keys):
            raise self._unknown(node)
        if isinstance(node, ast.BinOp) and type(node.op) not in _OPERATORS:
            raise self._unknown(node)
        if isinstance(node, ast.BoolOp) and any(map(self._has_call, node.values[1:])):
            raise _not_taken_apart(self._statement, "what stands behind `or` may not be evaluated")
        return self._with_split_operands(node)

    def _with_split_operands(self, node: ast.expr) -> ast.expr:
        changed = type(node)(**{name: self._split_field(value) for name, value in ast.iter_fields(node)})
        return ast.copy_location(changed, node)

    def _split_field(self, value: Any) -> Any:  # noqa: ANN401 - a field of a node
        if isinstance(value, list):
            return [self._split_field(item) for item in value]
        return self.split(value) if isinstance(value, ast.expr) else value

    def _send(self, node: ast.expr) -> ast.expr:
        self._check_sent(node)
        self._sent.append(node)
        self.calls.append(ast.unparse(node))
        return ast.copy_location(ast.Name(id=f"#{len(self.calls) - 1}", ctx=ast.Load()), node)

    def _unknown(self, node: ast.expr) -> InvalidRequest:
        return _not_taken_apart(self._statement, f"{ast.unparse(node)[:40]!r} is computed neither inside nor outside")

    def send_outermost(self, node: ast.Call) -> ast.expr:
        """Send a call of a known function's name: it is the program's own."""
        return self._send(node)

    def _is_inside(self, node: ast.expr) -> bool:
        """Tell whether an expression is a call of the program, or what is taken from its result without a literal."""
        if isinstance(node, ast.Call):
            name = _dotted(node.func)
            if name in _CONVERSIONS:
                return len(node.args) == 1 and not node.keywords and self._is_inside(node.args[0])
            return name not in _FUNCTIONS
        if isinstance(node, ast.Attribute | ast.Subscript):
            return self._is_inside(node.value)
        return False

    def _has_call(self, node: ast.AST) -> bool:
        return any(isinstance(part, ast.expr) and self._is_inside(part) for part in ast.walk(node))

    def _split_call(self, node: ast.Call) -> ast.expr:
        """Split the arguments of a function that is called outside; without a call of the program it is a literal."""
        is_starred = any(isinstance(argument, ast.Starred) for argument in node.args)
        if is_starred or _dotted(node.func) not in _FUNCTIONS or None in [word.arg for word in node.keywords]:
            raise self._unknown(node)
        if not _takes(_FUNCTIONS[_dotted(node.func)], node):
            raise _not_taken_apart(self._statement, f"{ast.unparse(node)[:40]!r} has arguments that are not known")
        keywords = [ast.keyword(arg=word.arg, value=self.split(word.value)) for word in node.keywords]
        arguments = [self.split(argument) for argument in node.args]
        return ast.copy_location(ast.Call(func=node.func, args=arguments, keywords=keywords), node)

    def _check_sent(self, node: ast.expr) -> None:
        """Refuse what would send an expected value inside beside a result."""
        for part in ast.walk(node):
            computes = isinstance(part, ast.BinOp | ast.BoolOp | ast.Compare) and self._has_call(part)
            if computes or (isinstance(part, ast.Call) and self._may_compare(part)):
                raise _not_taken_apart(self._statement, f"{ast.unparse(part)[:40]!r} would compare inside")

    def _may_compare(self, call: ast.Call) -> bool:
        """Tell whether a call is a method of a result or a literal, or of another module, that gets both."""
        arguments = [*call.args, *(word.value for word in call.keywords)]
        gets_result = any(map(self._has_call, arguments))
        if not isinstance(call.func, ast.Name | ast.Attribute | ast.Call):
            return True
        if isinstance(call.func, ast.Attribute) and arguments:
            receiver, name = call.func.value, call.func.attr
            if name.startswith("__") or (self._has_call(receiver) and not _is_new_object(receiver)):
                return True
            if gets_result and not _dotted(receiver) and not _is_new_object(receiver) and name != "join":
                return True
        is_foreign = any(isinstance(part, ast.Name) and part.id in self._imported for part in ast.walk(call.func))
        return is_foreign and self._gets_result_and_more(call)

    def _gets_result_and_more(self, call: ast.Call) -> bool:
        """Tell whether a call gets a result and something beside it, also as items of a list or the like."""
        arguments = list(_items_of([*call.args, *(word.value for word in call.keywords)]))
        return len(arguments) > 1 and any(map(self._has_call, arguments))

    def _refuse_comparing_call(self, test: ast.expr) -> None:
        """Refuse `assert same(f(1), 2)`: the one that compares would be inside."""
        for call in _calls_for_truth(test):
            if self._is_inside(call) and self._gets_result_and_more(call):
                raise _not_taken_apart(self._statement, "the function that compares would be the program's own")


def _items_of(nodes: Iterable[ast.expr]) -> Iterator[ast.expr]:
    """Yield expressions, and in place of displays their items."""
    for node in nodes:
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            yield from _items_of(node.elts)
        elif isinstance(node, ast.Dict):
            yield from _items_of(node.values)
        else:
            yield node


def _calls_for_truth(test: ast.expr) -> Iterator[ast.Call]:
    """Yield the calls of whose result an assert asks the truth alone."""
    if isinstance(test, ast.UnaryOp):
        yield from _calls_for_truth(test.operand)
    elif isinstance(test, ast.BoolOp):
        for part in test.values:
            yield from _calls_for_truth(part)
    elif isinstance(test, ast.Compare) and len(test.comparators) == 1:
        sides = (test.left, test.comparators[0])
        if any(isinstance(side, ast.Constant) and isinstance(side.value, bool) for side in sides):
            for side in sides:
                yield from _calls_for_truth(side)
    elif isinstance(test, ast.Call) and _dotted(test.func) in _TRUTHS:
        for part in _items_of(test.args):
            yield from _calls_for_truth(part)
    elif isinstance(test, ast.Call):
        yield test


class _OutermostCall(ast.NodeTransformer):
    """Send the program's call inside; where it is not known, the outermost ones."""

    def __init__(self, splitter: _Splitter, own: ast.Call | None) -> None:
        self._splitter, self._own = splitter, own

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        """Look at the left side alone, unless the call is known: what it is compared with stays outside."""
        if self._own is not None:
            return self.generic_visit(node)  # type: ignore[return-value]
        left = self.visit(node.left)
        return ast.copy_location(ast.Compare(left=left, ops=node.ops, comparators=node.comparators), node)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Send this call."""
        if self._own not in (None, node):
            return self.generic_visit(node)  # type: ignore[return-value]
        return self._splitter.send_outermost(node)


def _is_new_object(node: ast.expr) -> bool:
    """Tell whether an expression makes an object, by the name of its class: `Solution()`."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id[:1].isupper()


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return ""


def _takes(function: Callable[..., Any], call: ast.Call) -> bool:
    """Tell whether a function takes that many arguments and those keywords, as far as it has a signature."""
    try:
        inspect.signature(function).bind(*call.args, **{word.arg or "": word.value for word in call.keywords})
    except (TypeError, ValueError) as error:
        return isinstance(error, ValueError)  # it has no signature
    return True


_SPLIT_NODES = (
    ast.Constant, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.List, ast.Tuple, ast.Set, ast.Dict,
)  # fmt: skip


def _number(value: Any) -> Any:  # noqa: ANN401 - a plain value
    if not isinstance(value, int | float):
        raise WrongValue(f"a value of type {type(value).__name__} is no number")
    return value


def _bounded(value: Any) -> Any:  # noqa: ANN401 - a plain value
    if isinstance(value, int) and value.bit_length() > 2 * MAX_BITS:
        raise WrongValue(f"an integer has more than {2 * MAX_BITS} bits")
    return value


def _multiply(left: Any, right: Any) -> Any:  # noqa: ANN401 - plain values
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, str | bytes | list | tuple) and isinstance(count, int):
            if len(sequence) * count > MAX_PARTS:
                raise WrongValue(f"a product has more than {MAX_PARTS} items")
            return left * right
    return _bounded(_number(left) * _number(right))


def _power(base: Any, exponent: Any) -> Any:  # noqa: ANN401 - plain values
    are_whole = isinstance(_number(base), int) and isinstance(_number(exponent), int)
    if are_whole and exponent > 0 and base.bit_length() * exponent > 2 * MAX_BITS:
        raise WrongValue(f"a power has more than {2 * MAX_BITS} bits")
    return base**exponent


def _shift(number: Any, count: Any) -> Any:  # noqa: ANN401 - plain values
    if not isinstance(count, int) or count > MAX_BITS:
        raise WrongValue(f"a number is shifted by more than {MAX_BITS} bits")
    return _bounded(number << count)


def _numeric(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda left, right: _bounded(function(_number(left), _number(right)))


def _add(left: Any, right: Any) -> Any:  # noqa: ANN401 - plain values
    return _bounded(left + right)


def _equal(left: Any, right: Any) -> bool:  # noqa: ANN401 - plain values
    if isinstance(right, Approximation):
        return right.matches(left)
    return left.matches(right) if isinstance(left, Approximation) else are_equal(left, right)


def _is(left: Any, right: Any) -> bool:  # noqa: ANN401 - plain values
    is_constant = left is None or isinstance(left, bool | type)
    return left is right if is_constant else type(left) is type(right) and left == right


def _contains(item: Any, container: Any) -> bool:  # noqa: ANN401 - plain values
    return item in container


_COMPARISONS: Mapping[type, Callable[[Any, Any], bool]] = {
    ast.Eq: _equal, ast.NotEq: lambda left, right: not _equal(left, right),
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Is: _is, ast.IsNot: lambda left, right: not _is(left, right),
    ast.In: _contains, ast.NotIn: lambda left, right: not _contains(left, right),
}  # fmt: skip
_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: _add, ast.Sub: lambda left, right: _bounded(left - right), ast.Mult: _multiply, ast.Pow: _power,
    ast.Div: _numeric(operator.truediv), ast.FloorDiv: _numeric(operator.floordiv), ast.Mod: _numeric(operator.mod),
    ast.LShift: _shift, ast.RShift: operator.rshift, ast.BitAnd: operator.and_, ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}  # fmt: skip
_SIGNS: Mapping[type, Callable[[Any], Any]] = {
    ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert,
}  # fmt: skip


def _approximation(number: object, rel: float = 1e-6, abs: float = 1e-12) -> Approximation:  # noqa: A002 - pytest's own
    return Approximation(number=number, rel=rel, abs=abs)


def _int(value: Any = 0, base: int | None = None) -> int:  # noqa: ANN401 - a plain value
    return int(_short(value)) if base is None else int(_short(value), base)


def _short(value: Any) -> Any:  # noqa: ANN401 - a plain value
    if isinstance(value, str | bytes) and len(value) > MAX_DIGITS:
        raise WrongValue("a text is too long to be read as a number")
    return value


def _range(*bounds: int) -> range:
    numbers = range(*bounds)
    if len(numbers) > MAX_PARTS:
        raise WrongValue(f"a range has more than {MAX_PARTS} numbers")
    return numbers


def _round(number: Any, ndigits: int | None = None) -> Any:  # noqa: ANN401 - plain values
    if ndigits is not None and abs(ndigits) > MAX_DIGITS:
        raise WrongValue(f"a number is rounded to more than {MAX_DIGITS} digits")
    return round(_number(number), ndigits)


def _items(kind: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes a set, of so few items that equal hashes cost little."""

    def make(values: Any = (), **named: Any) -> Any:  # noqa: ANN401 - plain values
        if len(values) + len(named) > MAX_ITEMS:
            raise WrongValue(f"a set that is made outside would have more than {MAX_ITEMS} items")
        return kind(values, **named)

    return make


def _sum(values: Any, start: Any = 0) -> Any:  # noqa: ANN401 - plain values
    if isinstance(start, list) and all(isinstance(value, list) for value in values):
        return [*start, *itertools.chain.from_iterable(values)]  # sum() would copy the list each time
    return _bounded(sum(map(_number, values), _number(start)))


# What is called outside, on the literals of a test and on values that came back. With one argument, a call of the
# program, a conversion is made inside: it may be a generator.
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "abs": abs, "round": _round, "len": len, "sum": _sum, "min": min, "max": max, "sorted": sorted, "all": all,
    "any": any, "isinstance": isinstance, "type": type, "bool": bool, "int": _int,
    "float": lambda value=0: float(_short(value)), "list": list, "tuple": tuple, "set": _items(set),
    "frozenset": _items(frozenset), "dict": _items(dict), "range": _range,
    "math.isclose": math.isclose, "isclose": math.isclose, "pytest.approx": _approximation, "approx": _approximation,
}  # fmt: skip
_CONVERSIONS = frozenset(
    ("abs", "round", "len", "sum", "min", "max", "sorted", "all", "any", "bool", "int", "float", "list", "tuple", "set",
     "frozenset", "dict", "str", "repr", "next", "iter")
)  # fmt: skip
_MAKERS = frozenset((*_TYPES, "range", "isinstance", "type", "pytest.approx", "approx"))  # of expected values
_TRUTHS = frozenset(("all", "any", "bool"))


class _Evaluator:
    """Compute a condition from literals and values, without `eval`."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = values

    def value(self, node: ast.expr) -> Any:  # noqa: ANN401 - a plain value
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name | ast.Attribute):
            return self._named(_dotted(node))
        if isinstance(node, ast.Compare):
            return self._compare(node)
        if isinstance(node, ast.BoolOp):
            return self._either(node)
        if isinstance(node, ast.UnaryOp):
            return _SIGNS[type(node.op)](self.value(node.operand))
        if isinstance(node, ast.BinOp):
            return self._computed(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        return self._display(node)

    def _named(self, name: str) -> Any:  # noqa: ANN401 - a plain value
        if name.startswith("#"):
            return self._values[int(name[1:])]
        return _CONSTANTS[name] if name in _CONSTANTS else _TYPES[name]

    def _compare(self, node: ast.Compare) -> bool:
        left = self.value(node.left)
        for operation, comparator in zip(node.ops, node.comparators, strict=True):
            right = self.value(comparator)
            if not _COMPARISONS[type(operation)](left, right):
                return False
            left = right
        return True

    def _either(self, node: ast.BoolOp) -> bool:
        truths = (bool(self.value(part)) for part in node.values)
        return all(truths) if isinstance(node.op, ast.And) else any(truths)

    def _computed(self, node: ast.BinOp) -> Any:  # noqa: ANN401 - a plain value
        return _OPERATORS[type(node.op)](self.value(node.left), self.value(node.right))

    def _call(self, node: ast.Call) -> Any:  # noqa: ANN401 - a plain value
        name = _dotted(node.func)
        arguments = [self.value(argument) for argument in node.args]
        return _FUNCTIONS[name](*arguments, **{word.arg or "": self.value(word.value) for word in node.keywords})

    def _display(self, node: ast.expr) -> Any:  # noqa: ANN401 - a plain container
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            return {self.value(key): self.value(item) for key, item in pairs if key is not None}  # none is, as split
        items = [self.value(item) for item in node.elts]  # type: ignore[attr-defined]
        return tuple(items) if isinstance(node, ast.Tuple) else set(items) if isinstance(node, ast.Set) else items
