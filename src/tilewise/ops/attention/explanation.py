"""What `why` answers: the implementation of a call, and what is printed of the others."""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.core.dispatch import NAMED, Row
from tilewise.ops.attention.problem import Call
from tilewise.ops.attention.rows.needs import CPU, GPU, HOPPER, SCHEME

# how verdicts begin: on a row that can run the call and was not chosen, and on one for calls with or without quantize=
CAN = ("can run this", "available ")
OF_OTHER_CALLS = (f"needs {SCHEME.says};", f"takes no {SCHEME.says};")


@dataclass(frozen=True)
class Explanation:
    """Which implementation runs a call, and why the others do not.

    Attributes:
        chosen: the name of the implementation; None if none can run the call.
        rows: (name, summary, verdict) of every implementation, in order of preference.
        waits: what each call reads on the host before it launches, which waits for the GPU, and how to avoid that.
        elsewhere: names of the implementations for another device.
        device: the type of the call's device, such as "cpu" or "cuda".
        impl: the implementation that was asked for by name, if any.
        all: whether `str` prints every row.

    Example:
        >>> tw.why(q, k, v, impl="reference").chosen
        'reference'
    """

    chosen: str | None
    rows: tuple[tuple[str, str, str], ...]
    waits: tuple[str, ...] = ()
    elsewhere: frozenset[str] = frozenset()
    device: str = ""
    impl: str | None = None
    all: bool = False

    def shown(self) -> tuple[tuple[str, str, str], ...]:
        """The rows that `str` prints: every row with `all`.

        Otherwise the chosen one and the one asked for by name; those that can run the call and were not preferred; and,
        unless one was asked for by name, those of this device that are preferred and cannot run the call.

        Returns:
            (name, summary, verdict) of each.
        """
        names = [name for name, _, _ in self.rows]
        last = 0 if self.impl is not None else len(names) if self.chosen is None else names.index(self.chosen)
        return tuple(
            (name, summary, verdict)
            for n, (name, summary, verdict) in enumerate(self.rows)
            if self.all
            or name in (self.chosen, self.impl)
            or verdict.startswith(CAN)
            or (n < last and name not in self.elsewhere and not verdict.startswith(OF_OTHER_CALLS))
        )

    def rest(self) -> str | None:
        """The rows that `str` does not print, counted.

        Returns:
            Text such as "8 need a CUDA GPU"; None if it prints all.
        """
        hidden = {name for name, _, _ in self.rows} - {name for name, _, _ in self.shown()}
        away = len(hidden & self.elsewhere)
        here = len(hidden) - away
        device = "a CUDA GPU" if self.device == "cpu" else "another device"
        parts = [f"{away} need{'s' * (away == 1)} {device}"] if away else []
        parts += [f"{here} cannot run this call"] if here else []
        return " and ".join(parts) or None

    def __str__(self) -> str:
        rows, rest = self.shown(), self.rest()
        width = max(len(name) for name, _, _ in rows) if rows else 0
        lines = [f"{'>' if name == self.chosen else ' '} {name:<{width}}  {verdict}" for name, _, verdict in rows]
        if rest is not None:
            lines.append(f"  not listed: {rest} (all=True lists every implementation)")
        return "\n".join([*lines, *(f"each call waits for the GPU and reads {what}" for what in self.waits)])


def of_another_device(row: Row[Call], call: Call) -> bool:
    """Whether the call's device is not one that the row runs on."""
    return any(need in (CPU, GPU, HOPPER) and need.unmet(call) is not None for need in row.needs)


def refused(unmet: str) -> str:
    """The verdict on a row that cannot run a call: "takes no dropout", as "needs no dropout" may mean that it can."""
    return f"takes {unmet.removeprefix('needs ')}" if unmet.startswith("needs no ") else unmet


def not_preferred(row: Row[Call], deferred: str) -> str:
    """The verdict on a row that can run a call and does not take it unless asked for by name."""
    if NAMED in row.prefers:
        return f"available only with impl={row.name!r}"
    return f"available with impl={row.name!r}; {deferred}"
