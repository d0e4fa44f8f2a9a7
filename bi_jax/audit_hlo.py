"""Reads the optimised program and looks for floats that are computed outside our ops.

The jaxpr has been audited before; here it is seen what the compiler made of it: collectives that a
partitioner added, products that it rewrote to library calls, arithmetic that it moved or made.

An instruction is taken for ours if its recorded name holds the scope of one of our ops, or if it
has no name and either stands in a loop, branch or fusion that is ours or is used by ours alone (a
product that the compiler wrote anew: its name is left on the reshape behind it). Names in a
compiled program are notes that any code can write, so this part trusts them only because every
float operation outside a marked primitive, whatever its name, has been refused in the jaxpr
already.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from . import audit_rules as rules
from .audit_report import Finding

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\(")
_FLOAT = re.compile(r"\b(?:bf16|f\d+\w*|c64|c128)\[")
_CALLED = re.compile(
    r"(?:calls|body|condition|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
    r"|(?:branch_computations|called_computations)=\{([^}]*)\}"
)
_NAME = re.compile(r'op_name="([^"]*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_IN_PLACE = "output_to_operand_aliasing={{"  # in the braces, at least one pair
_OLD_SOURCE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
_APPLYING = (
    *("reduce", "reduce-window", "scatter", "select-and-scatter", "sort"),
    *("all-reduce", "all-reduce-start", "reduce-scatter", "reduce-scatter-start"),
)
_CALLING = frozenset((*_APPLYING, *rules.CONTROL_HLO, "async-start", "custom-call"))
_COLLECTIVES = (
    *("all-gather", "all-to-all", "ragged-all-to-all", "collective-permute"),
    *("collective-broadcast", "all-reduce", "reduce-scatter"),
)
_ASYNC = re.compile(r"(?P<base>.+)-(?P<part>start|update|done)")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of the program.

    Attributes:
      computation: where it stands.
      result: its own name in there, without "%".
      opcode, shape: what it does, and the type of its result.
      name: the path of scopes that JAX recorded; empty for what the compiler made itself.
      line: the whole.
      is_root: whether its result is the computation's.
    """

    computation: str
    result: str
    opcode: str
    shape: str
    name: str
    line: str
    is_root: bool

    @property
    def called(self) -> list[str]:
        found = []
        for one, many in _CALLED.findall(self.line):
            found += [one] if one else [part.strip(" %") for part in many.split(",")]
        return found


class HloAudit:
    """Counts and findings of one optimised program.

    Args:
      text: what `compiled.as_text()` gives.
      ours: names of the marked ops that the jaxpr holds.
      allow: as in the jaxpr; recorded names end with the primitive's name.
      kernels: those of ours that are kernels: what XLA computes inside their scopes, around the
        custom call, is held to the same rules as what it computes outside.
    """

    def __init__(
        self,
        text: str,
        ours: Collection[str],
        allow: Mapping[str, str],
        kernels: Collection[str] = (),
    ) -> None:
        self.instructions, self._entries = _parse(text)
        self._frames = _source_lines(text)
        self._scopes = frozenset(ours)
        self._allow = allow
        self._kernels = frozenset(kernels)
        self.kernels: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()
        self.findings: list[Finding] = []
        self._owned = self._owned_computations()
        fusions = (i for i in self.instructions if i.opcode == "fusion")
        self._fused = frozenset(called for fusion in fusions for called in fusion.called)
        self.ours = sum(self._is_ours(i) for i in self.instructions)
        # The addition inside a reduction is part of it and no finding of its own.
        parts = {c for i in self.instructions if i.opcode in _APPLYING for c in i.called}
        for instruction in self.instructions:
            if instruction.computation not in parts:
                self._classify(instruction)

    def _owned_computations(self) -> frozenset[str]:
        """Computations that are called from our ops only."""
        callers: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            if instruction.opcode in _CALLING:
                for called in instruction.called:
                    callers.setdefault(called, []).append(instruction)
        owned: dict[str, bool] = dict.fromkeys(self._entries, False)

        def is_owned(computation: str) -> bool:
            if computation not in owned:
                owned[computation] = False  # a circle would be no program
                calls = callers.get(computation, [])
                owned[computation] = bool(calls) and all(
                    self._named_ours(call)
                    or (not self._named_foreign(call) and is_owned(call.computation))
                    for call in calls
                )
            return owned[computation]

        return frozenset(c for c in callers if is_owned(c))

    def _named_ours(self, instruction: Instruction) -> bool:
        return not self._scopes.isdisjoint(instruction.name.split("/"))

    def _named_foreign(self, instruction: Instruction) -> bool:
        # A name without any operation in it, such as "jit(step)", is left over from a constant.
        return "/" in instruction.name and not self._named_ours(instruction)

    def _is_ours(self, instruction: Instruction) -> bool:
        if self._named_ours(instruction):
            return True
        return instruction.computation in self._owned and not self._named_foreign(instruction)

    def _classify(self, instruction: Instruction) -> None:
        opcode, waits = _synchronous(instruction.opcode)
        mine = self._is_ours(instruction)
        if waits:
            return  # its start has been looked at
        if opcode in _COLLECTIVES:
            self.collectives[opcode] += 1
        if opcode == "custom-call":
            if _IN_PLACE in instruction.line and instruction.computation in self._fused:
                self._refuse(instruction, "alias")
            target = _TARGET.search(instruction.line)
            kernel = target.group(1) if target else "?"
            if mine:
                self.kernels[kernel] += 1
            elif kernel not in rules.EXACT_CUSTOM_CALLS:
                self._refuse(instruction, "kernel", f"(custom call {kernel})")
            return
        # No op of ours adds across devices on its own: whoever cut it up did that, a partitioner.
        across = rules.FORBIDDEN_HLO.get(opcode) == "collective"
        mine = mine and not across and self._kernels.isdisjoint(instruction.name.split("/"))
        if mine or not _FLOAT.search(instruction.shape):
            return
        if opcode in rules.EXACT_HLO or opcode in rules.CONTROL_HLO or opcode == "convert":
            return
        if self._is_allowed(instruction) or (not across and self._serves_ours(instruction)):
            return
        if opcode == "scatter":
            if "unique_indices=true" not in instruction.line:
                self._refuse(instruction, "scatter", "(it does not state unique_indices)")
            return
        self._refuse(instruction, _kind(opcode))

    def _serves_ours(self, instruction: Instruction) -> bool:
        """Whether it has no name and everything that uses it is ours, and no kernel's scope."""
        if instruction.name or instruction.is_root:
            return False
        used = re.compile(rf"%{re.escape(instruction.result)}(?![\w.\-])")
        users = [
            other
            for other in self.instructions
            if other.computation == instruction.computation
            and other is not instruction
            and used.search(other.line)
        ]
        return bool(users) and all(
            self._named_ours(user) and self._kernels.isdisjoint(user.name.split("/"))
            for user in users
        )

    def _is_allowed(self, instruction: Instruction) -> bool:
        """Whether it comes from a primitive that the caller allows, and is of its kind.

        An all-reduce that a partitioner made of an allowed product bears the product's name.
        """
        primitive = instruction.name.rpartition("/")[2]
        if primitive == rules.COTANGENT_SUM and instruction.opcode == "add":
            return True  # its dtype was looked at in the jaxpr
        kind = _kind(_synchronous(instruction.opcode)[0])
        origin = rules.FORBIDDEN_PRIMITIVES.get(primitive)
        return primitive in self._allow and (kind != "collective" or origin == "collective")

    def _refuse(self, instruction: Instruction, kind: str, detail: str = "") -> None:
        name = instruction.name
        self.findings.append(
            Finding(
                kind=kind,
                operation=instruction.opcode,
                shape=re.sub(r"\{[^}]*\}", "", instruction.shape),
                where=self._where(instruction),
                level="optimised program",
                detail=" ".join(filter(None, [detail, f"(recorded as {name})" if name else ""])),
            )
        )

    def _where(self, instruction: Instruction) -> str:
        frame = _FRAME.search(instruction.line)
        if frame and int(frame.group(1)) in self._frames:
            return self._frames[int(frame.group(1))]
        source = _OLD_SOURCE.search(instruction.line)
        if source:
            return f"{source.group(1)}:{source.group(2)}"
        return "no source line (the compiler made it)"


def _kind(opcode: str) -> str:
    return rules.FORBIDDEN_HLO.get(opcode, "arithmetic")


def _synchronous(opcode: str) -> tuple[str, bool]:
    """What an opcode such as "all-gather-start" does, and whether it is only the wait for it."""
    match = _ASYNC.fullmatch(opcode)
    known = {"custom-call", *rules.EXACT_HLO, *rules.CONTROL_HLO, *rules.FORBIDDEN_HLO}
    if match is None or match["base"] not in known or match["base"] == "copy":
        return opcode, False
    return match["base"], match["part"] != "start"


def _parse(text: str) -> tuple[list[Instruction], list[str]]:
    instructions, entries, computation = [], [], ""
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head:
            computation = head.group(2)
            if head.group(1):
                entries.append(computation)
            continue
        match = _INSTRUCTION.match(line)
        if match and computation:
            root, result, shape, opcode = match.groups()
            named = _NAME.search(line)
            name = named.group(1) if named else ""
            found = Instruction(computation, result, opcode, shape, name, line, bool(root))
            instructions.append(found)
    return instructions, entries


def _source_lines(text: str) -> dict[int, str]:
    """Stack frame to file and line, from the tables at the program's head."""

    def table(title: str, row: str) -> dict[int, tuple[str, ...]]:
        part = re.search(rf"^{title}\n((?:\d+ .*\n)+)", text, re.MULTILINE)
        rows = part.group(1).splitlines() if part else []
        found = (re.match(r"(\d+) " + row, line) for line in rows)
        return {int(m.group(1)): m.groups()[1:] for m in found if m}

    files = table("FileNames", r'"(.*)"')
    places = table("FileLocations", r"\{file_name_id=(\d+) .*?\bline=(\d+)")
    frames = table("StackFrames", r"\{file_location_id=(\d+)")
    lines = {}
    for frame, (place,) in frames.items():
        if int(place) in places:
            file, line = places[int(place)]
            lines[frame] = f"{files.get(int(file), ('?',))[0]}:{line}"
    return lines
