"""Whether a VLA can read demonstrations, and in which size it is shown their pictures."""

from collections.abc import Iterable

from rlt_gym.data.sources import DemoSource
from rlt_gym.vla.base import VLASpec


def check_demos(spec: VLASpec, sources: Iterable[DemoSource]) -> None:
    """
    Refuse a VLA that cannot read demonstrations.

    :param spec: Specification of the VLA.
    :param sources: The demonstrations. Those of ``rlt collect`` say how their pictures were drawn.
    :raises ValueError: If it needs other cameras, another state or action, or pictures that were drawn otherwise.
    """
    for source in sources:
        spec.check_robot(source.robot)
        try:
            spec.check_render(source.made.get("render"))
        except ValueError as error:
            raise ValueError(f"{source.name} has other pictures than the VLA needs: {error}") from error


def check_demo_frames(spec: VLASpec, size: int) -> None:
    """
    Refuse frames that have fewer pixels than a VLA reads.

    :param spec: Specification of the VLA.
    :param size: Edge in pixels of the frames that it would be shown.
    :raises ValueError: If they are too small.
    """
    needed = spec.image_size or spec.frame_size or 0
    if size < needed:
        raise ValueError(
            f"The demonstrations would be shown to the VLA {spec.name!r} in frames of {size} pixels, and it reads "
            f"{needed}: collect them with a larger --image_size."
        )


def frame_size(spec: VLASpec, edge: int, wanted: int | None = None) -> int:
    """
    Choose the size of the frames that a VLA is shown.

    :param spec: Specification of the VLA.
    :param edge: Edge in pixels of the frames that there are.
    :param wanted: The user's choice; ``None`` = the size to which the VLA resizes them, if it says so and if that
        divides ``edge``, else ``edge``.
    :return: Edge in pixels.
    :raises ValueError: If it is smaller than what the VLA reads.
    """
    size = wanted or (spec.image_size if spec.image_size and edge % spec.image_size == 0 else edge)
    check_demo_frames(spec, size)
    return size
