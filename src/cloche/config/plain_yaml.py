"""Read YAML safely: plain data only, no duplicate keys, no document that expands when it is read."""

from __future__ import annotations

import yaml

from cloche.core.errors import InvalidRequest

MAX_ENTRIES = 10_000
MAX_DEPTH = 50  # libyaml composes recursively: about ten thousand levels overflow the C stack
MAX_INT_BITS = 1024
MAX_NUMBER_CHARS = 400  # parsing a sexagesimal number (1:59:59) takes quadratic time
MAX_VALUES = 40_000  # scalars, lists and mappings of a document: each takes about a hundred times its size in memory
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
# Exceptions that PyYAML's constructors do not convert, for malformed dates, numbers and deep nesting.
_SLIPS = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError)


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # libyaml's is ten times as fast
    """Load plain data. PyYAML's `flatten_mapping` resolves merge keys, which can double a mapping at every level."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._checked: set[int] = set()  # ids of checked nodes: a merged node is visited again, with its parents' keys

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        """Report the position of an invalid date or number, and of a number that Python would refuse to print."""
        if not isinstance(node, yaml.ScalarNode):
            return super().construct_object(node, deep)
        if len(node.value) > MAX_NUMBER_CHARS and node.tag in _NUMBERS:
            raise yaml.MarkedYAMLError(None, None, "the number is too long", node.start_mark)
        try:
            value = super().construct_object(node, deep)
        except (ValueError, OverflowError):
            problem = "the value cannot be read; put it in quotes if it is to be text"
            raise yaml.MarkedYAMLError(None, None, problem, node.start_mark) from None
        if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise yaml.MarkedYAMLError(None, None, "the number is too long", node.start_mark)
        return value

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        if id(node) not in self._checked:
            self._checked.add(id(node))
            self._refuse_doubles(node)
        super().flatten_mapping(node)
        if len(node.value) > MAX_ENTRIES:
            raise yaml.MarkedYAMLError(None, None, "the mapping has too many entries", node.start_mark)

    def _refuse_doubles(self, node: yaml.MappingNode) -> None:
        keys: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if (key.tag, key.value) in keys:
                raise yaml.MarkedYAMLError(None, None, f"the key {key.value!r} is given twice", key.start_mark)
            keys.add((key.tag, key.value))


def parse_yaml(text: str, file: str, *, most_depth: int = MAX_DEPTH, takes_anchors: bool = True) -> object:
    """Return the one document of `text`, None when it is empty. Raises InvalidRequest naming file and line."""
    try:
        _check_events(text, most_depth, takes_anchors)
        return yaml.load(text, Loader=_Loader)  # noqa: S506  # the loader is a safe one
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise InvalidRequest(f"{file}{line}: {error.problem or 'not YAML'}") from None
    except yaml.YAMLError as error:
        raise InvalidRequest(f"{file}: not YAML: {str(error).splitlines()[0]}") from None
    except _SLIPS as error:
        raise InvalidRequest(f"{file}: a value in it cannot be read: {type(error).__name__}") from None


def _check_events(text: str, most_depth: int, takes_anchors: bool) -> None:
    """Check the document event by event, without recursion, and stop if it is nested too deeply.

    Anchors that are referenced many times can turn a small file into a huge document.
    """
    depth = 0
    for count, event in enumerate(yaml.parse(text, Loader=_Loader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        problem = ""
        if count > MAX_VALUES:
            problem = f"it has more than {MAX_VALUES} values"
        elif depth > most_depth:
            problem = f"it is nested deeper than {most_depth} levels"
        elif not takes_anchors and (isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None):
            problem = "anchors (&) and aliases (*) are not allowed; repeat the value"
        if problem:
            raise yaml.MarkedYAMLError(None, None, problem, event.start_mark)  # type: ignore[arg-type]  # libyaml's own
