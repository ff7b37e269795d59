"""Filters the output of a program on its way to the terminal, and records the modes that must be reset.

Theory of operation: escape sequences that carry a string for the terminal (OSC, DCS and similar ones, ECMA-48) pass if
their kind draws or queries. Sequences that set the clipboard or the title are dropped, and those that a multiplexer
would forward to the outer terminal. Modes are recorded as they pass; modes that differ from a terminal's defaults are
reset at the end. Only the beginning of an incomplete sequence is buffered.
"""

from __future__ import annotations

import re

_BEGINS = re.compile(rb"\x1b[\]P_^Xk]|\xc2[\x90\x98\x9d\x9e\x9f]")  # also as single characters, C1 in UTF-8
_ENDS = re.compile(rb"[\x07\x18\x1a\x1b]|\xc2\x9c")
_KINDS = {b"\x1b]": "osc", b"\xc2\x9d": "osc", b"\x1bP": "dcs", b"\xc2\x90": "dcs"}
# Colours and the palette, hyperlinks, marks of prompts; of DCS sixel pictures, and questions about settings.
_PASSED = {
    "osc": re.compile(rb"(?:4|8|10|11|12|17|19|104|110|111|112|117|119|133)(?:;|$)"),
    "dcs": re.compile(rb"[0-9;]*(?:[$+]?q)"),
}
# Notifications and progress. Other numbers after `9;` are commands of some terminals on Windows.
_NOTIFIES = re.compile(rb"9;(?:4;|[^0-9])|777;notify;|99;")
_AT_ONCE = 2048  # bytes: each sequence copies the rest of a block, so time grows with the square of its size
MOST_PREFIX = 64  # bytes that suffice to recognise the kind of a sequence
_UNFINISHED = re.compile(rb"(?:\x1b(?:\(|\[[0-9;:?<=>!$ ]{0,64})?|\xc2)\Z")
_SEQUENCE = re.compile(rb"\x1b(?:\[([?<=>]?)([0-9;:]*)([ !$]?)([@-~])|([=>c78]|\([0-9A-B])|[\]P]([^\x07\x1b]*))|\x05")

# Private modes of DEC and xterm that are off, and on, in a terminal as a shell has it.
_USUALLY_OFF = (1, 5, 6, 9, 47, 66, 1000, 1001, 1002, 1003, 1004, 1005, 1006, 1015, 1016, 1047, 1049, 2004, 2026)
_USUALLY_ON = (7, 25)
_ALTERNATE = (47, 1047, 1049)
_KEPT = ("keys", "keyboard", "keypad", "cursor")  # attributes that a program sets once, and expects to stay


class TerminalModes:
    """Record which modes a program sets, and whether it queries the terminal."""

    def __init__(self) -> None:
        self._changed: set[int] = set()
        self._resets: dict[str, bytes] = {}
        self._sets: dict[str, bytes] = {}
        self.has_asked = False

    def note(self, data: bytes) -> None:
        """Record complete sequences."""
        for match in _SEQUENCE.finditer(data):
            kind, numbers, between, final, short, text = match.groups()
            self._sequence = match[0]
            if final is not None:
                self._note_control(kind, numbers, between, final)
            elif short is not None:
                self._note_short(short)
            elif text is None or b"?" in text or text[:2] in (b"$q", b"+q"):
                self.has_asked = True

    def _note_control(self, kind: bytes, numbers: bytes, between: bytes, final: bytes) -> None:
        if kind == b"?" and final in b"hl" and not between:
            for number in (int(digits) for digits in numbers.split(b";") if digits.isdigit() and len(digits) < 6):
                is_usual = number in (_USUALLY_ON if final == b"h" else _USUALLY_OFF)
                if is_usual:
                    self._changed.discard(number)
                elif number in _USUALLY_OFF or number in _USUALLY_ON:
                    self._changed.add(number)
        elif final == b"m" and not kind:
            self._reset("style", b"\x1b[0m", is_needed=numbers not in (b"", b"0"))
        elif final == b"m" and kind == b">":
            self._reset("keys", b"\x1b[>4m", is_needed=True)
        elif final == b"u" and kind in (b">", b"="):
            self._reset("keyboard", b"\x1b[=0u", is_needed=True)
        elif final == b"r" and not kind:
            self._reset("region", b"\x1b7\x1b[r\x1b8", is_needed=bool(numbers))
        elif final == b"q" and between == b" ":
            self._reset("cursor", b"\x1b[0 q", is_needed=numbers not in (b"", b"0"))
        elif final == b"p" and between == b"!":  # a soft reset
            self._changed.intersection_update(_ALTERNATE)
            self._resets.clear()
        elif (
            final in b"cn"
            or (final == b"p" and between == b"$")
            or (final == b"t" and numbers[:1] in (b"1", b"2"))
            or (final == b"u" and kind == b"?")
        ):
            self.has_asked = True

    def _note_short(self, short: bytes) -> None:
        if short in b"=>":
            self._reset("keypad", b"\x1b>", is_needed=short == b"=")
        elif short == b"c":  # a full reset
            self._changed.clear()
            self._resets.clear()
        elif short[:1] == b"(":
            self._reset("characters", b"\x1b(B", is_needed=short != b"(B")

    def _reset(self, attribute: str, sequence: bytes, *, is_needed: bool) -> None:
        if is_needed:
            self._resets[attribute] = sequence
            self._sets[attribute] = self._sequence
        else:
            self._resets.pop(attribute, None)

    def entry(self) -> bytes:
        """Return the sequences that set all changed modes in another terminal, the alternate screen first."""
        modes = sorted(self._changed, key=lambda mode: (mode not in _ALTERNATE, mode))
        sequences = [b"\x1b[?%d%c" % (mode, b"l" if mode in _USUALLY_ON else b"h") for mode in modes]
        kept = (self._sets[attribute] for attribute in _KEPT if attribute in self._resets)
        return b"".join((*sequences, *(sequence for sequence in kept if len(sequence) <= MOST_PREFIX)))

    @property
    def is_alternate(self) -> bool:
        """Tell whether the alternate screen is shown, which a program draws anew after each change of its size."""
        return not self._changed.isdisjoint(_ALTERNATE)

    def reset(self) -> bytes:
        """Return the sequences that reset all changed modes, the alternate screen last; empty without changes."""
        modes = sorted(self._changed, key=lambda mode: (mode in _ALTERNATE, mode))
        sequences = [b"\x1b[?%d%c" % (mode, b"h" if mode in _USUALLY_ON else b"l") for mode in modes]
        return b"".join((*self._resets.values(), *sequences))


class TerminalFilter:
    """Pass on a program's output without sequences that set the clipboard or the title; with `is_raw` all of it.

    With `notifies` it may show notifications and its progress (OSC 9, 99, 777).
    """

    def __init__(self, *, is_raw: bool = False, notifies: bool = False):
        self._is_raw, self._notifies = is_raw, notifies
        self.modes = TerminalModes()
        self._held = b""  # the beginning of a sequence
        self._inside = ""  # the kind of the current sequence
        self._is_passed = False

    def feed(self, data: bytes) -> bytes:
        """Return the part of the data that can be passed on now."""
        return b"".join(self._feed(data[offset : offset + _AT_ONCE]) for offset in range(0, len(data), _AT_ONCE))

    def _feed(self, data: bytes) -> bytes:
        data, self._held = self._held + data, b""
        passed = bytearray()
        while data:
            data = self._leave(data, passed) if self._inside else self._enter(data, passed)
        if self._is_raw:
            self.modes.note(bytes(passed))
        return bytes(passed)

    def _enter(self, data: bytes, passed: bytearray) -> bytes:
        """Pass on everything before the next string sequence, and return the data after its introducer."""
        start = None if self._is_raw else _BEGINS.search(data)
        plain = data if start is None else data[: start.start()]
        if start is None and (unfinished := _UNFINISHED.search(plain)):
            plain, self._held = plain[: unfinished.start()], plain[unfinished.start() :]
        if not self._is_raw:
            self.modes.note(plain)
        passed += plain
        if start is None:
            return b""
        kind, remainder = _KINDS.get(start[0], "other"), data[start.end() :]
        end = _ENDS.search(remainder)
        prefix = remainder[: MOST_PREFIX if end is None else end.start()]
        if end is None and len(remainder) < MOST_PREFIX and kind != "other":  # too short to recognise its kind
            self._held = data[start.start() :]
            return b""
        self._inside = kind
        self._is_passed = kind in _PASSED and _PASSED[kind].match(prefix) is not None
        self._is_passed |= self._notifies and kind == "osc" and _NOTIFIES.match(prefix) is not None
        if self._is_passed:
            passed += start[0]
            self.modes.note(start[0].replace(b"\xc2\x9d", b"\x1b]").replace(b"\xc2\x90", b"\x1bP") + prefix)
        return remainder

    def _leave(self, data: bytes, passed: bytearray) -> bytes:
        """Continue inside a string sequence up to its end, and return the data after it."""
        end = _ENDS.search(data)
        text = data if end is None else data[: end.start()]
        if end is None and text.endswith(b"\xc2"):
            text, self._held = text[:-1], text[-1:]
        elif end is not None and end[0] == b"\x1b" and end.end() == len(data):
            self._held = data[end.start() :]  # the next byte decides whether this is ST (ESC \)
            end = None
        if self._is_passed:
            passed += text
        if end is None:
            return b""
        remainder = data[end.end() :]
        if end[0] == b"\x07" and self._inside != "osc":  # BEL ends an OSC only (xterm)
            if self._is_passed:
                passed += end[0]
            return remainder
        if end[0] == b"\x1b" and remainder[:1] != b"\\":  # another escape sequence cuts it off
            ending, remainder = b"\x1b\\", data[end.start() :]
        else:
            ending, remainder = (b"\x1b\\", remainder[1:]) if end[0] == b"\x1b" else (end[0], remainder)
        if self._is_passed:
            passed += ending
        self._inside = ""
        return remainder
