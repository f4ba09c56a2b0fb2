"""`distopt run --heal`: whether a failure leads to another start of all ranks, and with how many of them."""

from __future__ import annotations

import re

from ..supervise.ranks import Failure
from .node import Node, Nodes

_SIGNALLED = 128  # the exit code of a rank that signal n has ended is 128 + n
_MOST_ATTEMPTS = 5  # attempts of healing without a new step


class Healing:
    """Judges failures. All ranks start again as long as that leads to new steps.

    Args:
        nodes: of the job; a node that starts fewer ranks is changed.
    """

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._failures: list[tuple[int, str]] = []  # since a new step was done: the step before each, and its text
        self._reached = 0  # the newest step that any rank had done when the ranks ended

    def read_steps(self) -> None:
        """Note the newest step, when all ranks have ended; an attempt without a new step changes nothing."""
        self._reached = max(self._reached, self._nodes.newest_step)

    def healed(self, step: int, seconds: float, every: int = 0) -> str:
        """The cost of a healing, in words, once the new ranks have done `step`, their first one.

        Args:
            step: see above.
            seconds: from the failure to that step.
            every: the interval of the copies from which they have resumed; 0 for live states.
        """
        before = step - 1
        lost, self._reached = max(0, self._reached - before), 0
        copied = f"; states were copied every {every} steps" if lost > 1 and every > 1 else ""
        return (
            f"healed: step {step} was done after {seconds:.2f} s (step {before + lost} had been reached, training goes "
            f"on from step {before}: {lost} {'step' if lost == 1 else 'steps'} lost){copied}"
        )

    def can_mend(self, first: Failure) -> bool:
        """Whether another start may succeed where `first` has ended this one."""
        return first.is_of_node or not first.is_final or self._spare(first) is not None

    def judge(self, first: Failure) -> tuple[bool, str]:
        """Whether all ranks are to start again after `first`, and the line that says why, or why not."""
        steps = self._nodes.steps()
        step = max(steps) if first.is_of_node else steps[first.rank]
        if self._failures and step > self._failures[-1][0]:
            self._failures.clear()
            for node in self._nodes:  # ranks that kept failing get another chance
                node.ranks = node.most
        failure = step, re.sub(r" \(pid \d+\)|; flight record in \S+", "", first.text)
        is_repeated = failure in self._failures
        if (short := self._spare(first)) is not None and (first.is_final or is_repeated):
            short.ranks -= 1
            self._failures = [(step, "")]
            return True, f"{first.text}; continuing with {short.ranks} of {short.most} ranks on {short.name}"
        if is_repeated and first.code < _SIGNALLED and not first.is_of_node:
            return False, f"{first.text}; so it did before, after step {step}"
        if len(self._failures) == _MOST_ATTEMPTS:
            return False, f"{first.text}; {_MOST_ATTEMPTS} attempts have led to no step after {step}"
        self._failures.append(failure)
        return True, first.text

    def _spare(self, first: Failure) -> Node | None:
        """The node of a rank that has been killed or cannot be started, if the node may do without it."""
        if first.is_of_node or not (first.code >= _SIGNALLED or first.is_final):
            return None
        node = self._nodes.of_rank(first.rank)
        return node if node.ranks > node.most - node.spare else None
