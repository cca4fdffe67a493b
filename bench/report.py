"""Figures with their gates, printed as they come."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Gate", "Report"]


@dataclass(frozen=True, slots=True)
class Gate:
    """value and bound share a unit; the bound is the least that is asked for, or the most."""

    name: str
    value: float
    bound: float
    unit: str
    detail: str = ""
    at_most: bool = False

    @property
    def passed(self) -> bool:
        return self.value <= self.bound if self.at_most else self.value >= self.bound


@dataclass(slots=True)
class Report:
    gates: list[Gate] = field(default_factory=list)

    def add(self, gate: Gate) -> None:
        self.gates.append(gate)
        sign = "<=" if gate.at_most else ">="
        mark = "ok    " if gate.passed else "MISSED"
        detail = f"   ({gate.detail})" if gate.detail else ""
        print(
            f"{mark} {gate.name}: {gate.value:,.2f} {gate.unit}  (asked {sign} {gate.bound:g}){detail}", flush=True
        )

    def summary(self) -> str:
        missed = [gate.name for gate in self.gates if not gate.passed]
        return f"{len(self.gates) - len(missed)} of {len(self.gates)} gates met" + (
            f"; missed: {'; '.join(missed)}" if missed else ""
        )
