"""The limits below which an RL token is refused: all of them are here."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Gate:
    """
    A limit.

    :param number: Name of the number, as in the report.
    :param limit: The limit.
    :param above: Whether the number must be at least the limit; otherwise at most.
    :param means: What it means if the number does not keep it.
    """

    number: str
    limit: float
    above: bool
    means: str

    def keeps(self, value: float) -> bool:
        """
        Compare a number.

        :param value: The number.
        :return: Whether it keeps the limit; one that is not a number does not.
        """
        return value >= self.limit if self.above else value <= self.limit


#: ``L_ro_z_only`` etc. are those of stage 1's report.
GATES = (
    Gate("explained_by_z_only", 0.5, True, "less than half of the tokens' variance can be reconstructed from z_rl"),
    Gate("shuffled_gap", 2.0, True, "another observation's z_rl does nearly as well: the decoder does not use it"),
    Gate("effective_rank", 3.0, True, "z_rl has collapsed to a few directions"),
    Gate("jump", 0.8, False, "z_rl jumps from one observation to the next as between observations at random"),
    Gate("phase_over_shuffled", 0.1, True, "not even the phase of an episode can be read from z_rl"),
)


def failures(numbers: Mapping[str, float]) -> list[str]:
    """
    Find the limits that a token does not keep.

    :param numbers: Of a report; limits of numbers that it lacks are not asked.
    :return: One sentence per limit.
    """
    return [
        f"{gate.number} is {numbers[gate.number]:.3g}, and must be at {'least' if gate.above else 'most'} "
        f"{gate.limit:g}: {gate.means}"
        for gate in GATES
        if gate.number in numbers and not gate.keeps(numbers[gate.number])
    ]
