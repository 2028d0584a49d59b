"""Copies rows in which someone took over to slots that the ring of the replay buffer does not use."""

from rlt_sb3.common.replay.storage import TransitionStorage


def copy_row(
    source: TransitionStorage, slot: int, target: TransitionStorage, copies: dict[int, int], overwrite: bool
) -> None:
    """
    Copy a complete row with both of its observations.

    Where its observation is there already, as the next one of the row before, that one is used, so that returns over
    several chunks run through rows that follow each other.

    :param source: where the row is
    :param slot: its slot there
    :param target: where it goes; at least two slots that are used in turn
    :param copies: observations of the same episode that were copied before: slot in ``source`` -> how many were written
        to ``target`` before it; gets this row's
    :param overwrite: replace ``vla_ref`` by the executed action where someone else chose it
    """
    following = int(source.next_slot[slot])
    start = copies.get(slot)
    if start is None or not target.living(start, room=1):  # the next observation is still to be written
        start = copies[slot] = _copy_observation(source, slot, target)
    end = copies.get(following)
    # a next observation must be younger than its row, see TransitionStorage
    if end is None or end < start or not target.living(end):
        end = copies[following] = _copy_observation(source, following, target)
    place, taken_over = target.slot_of(start), source.intervention[slot]
    target.put_chunk(
        place,
        source.actions[slot],
        source.step_rewards[slot],
        int(source.chunk_steps[slot]),
        target.slot_of(end),
        bool(source.terminated[slot]),
        bool(source.truncated[slot]),
        int(source.task_ids[slot]),
        taken_over,
    )
    if overwrite and "vla_ref" in target.obs:
        target.obs["vla_ref"][place][taken_over] = source.actions[slot][taken_over]


def _copy_observation(source: TransitionStorage, slot: int, target: TransitionStorage) -> int:
    number = target.written
    target.put_observation({key: array[slot] for key, array in source.obs.items()}, None)
    return number
