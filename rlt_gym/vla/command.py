"""``rlt vla``: what a VLA says of itself, whether it keeps the contract, how fast it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rlt_gym.vla.conformance import CheckResult


@dataclass
class VLAConfig:
    """
    Settings of ``rlt vla``.

    :param action: ``check`` runs the VLA on made-up observations and prints what it keeps and breaks of the contract,
        exit status 1 if it breaks anything; ``show`` prints its specification.
    :param name: The VLA: a name or scheme of ``rlt list``, the path of a file, or "package.module:Class" of an allowed
        package (``RLT_ALLOWED_IMPORTS``).
    :param vla_kwargs: Further arguments of whoever makes this VLA.
    :param device: Where it runs.
    :param tolerance: Largest difference between a row in a batch and the same row alone; ``None`` = 0.0001, and 0.05
        for tokens in half precision.
    """

    action: Literal["check", "show"]
    name: str
    vla_kwargs: dict[str, Any] | None = None
    device: str = "cpu"
    tolerance: float | None = None


def vla_command(config: VLAConfig) -> int:
    """
    ``rlt vla``.

    :param config: What to do.
    :return: Exit status: 1 if a check failed.
    :raises ValueError: If the VLA cannot be loaded.
    """
    from rlt_gym.vla.conformance import examine_vla
    from rlt_gym.vla.registry import load_vla

    vla = load_vla(config.name, config.device, config.vla_kwargs)
    if config.action == "show":
        print("\n".join(f"  {field.name:<17}  {getattr(vla.spec, field.name)}" for field in fields(vla.spec)))
        return 0
    half = vla.spec.dtype in ("float16", "bfloat16")
    tolerance = config.tolerance if config.tolerance is not None else (0.05 if half else 1e-4)
    results = examine_vla(vla, tolerance=tolerance)
    print(f"{config.name} on {config.device}")
    print(table(results))
    failed = [result.name for result in results if result.status == "FAIL"]
    print(f"{len(failed)} checks failed: {', '.join(failed)}" if failed else "It keeps the contract.")
    return int(bool(failed))


def table(results: Sequence[CheckResult]) -> str:
    """
    Lay results out.

    :param results: Of :func:`~rlt_gym.vla.conformance.examine_vla`.
    :return: One line per check.
    """
    width = max(len(result.name) for result in results)
    return "\n".join(f"  {result.status:<4}  {result.name:<{width}}  {result.detail}" for result in results)
