"""Index of the rows that can be drawn, by task."""

import numpy as np


class TaskIndex:
    """
    Slots that may be drawn, a dense list per task: adding, removing and drawing cost the same at any size.

    Drawing a share of marked slots is the exception: it looks at all slots.

    :param size: number of slots
    """

    def __init__(self, size: int):
        self.where = np.full(size, -1, dtype=np.int32)  # place of a slot in the list of its task
        self.lists: dict[int, np.ndarray] = {}
        self.counts: dict[int, int] = {}

    def add(self, slot: int, task: int) -> None:
        """
        Add a slot to those that may be drawn.

        :param slot: a slot that cannot be drawn yet
        :param task: its task
        """
        rows = self.lists.get(task)
        count = self.counts.get(task, 0)
        if rows is None or count == len(rows):
            grown = np.empty(max(64, 2 * count), dtype=np.int32)
            if rows is not None:
                grown[:count] = rows
            self.lists[task] = rows = grown
        rows[count] = slot
        self.where[slot] = count
        self.counts[task] = count + 1

    def remove(self, slot: int, task: int) -> None:
        """
        Remove a slot from those that may be drawn.

        :param slot: a slot that can be drawn
        :param task: its task
        """
        rows, place, last = self.lists[task], self.where[slot], self.counts[task] - 1
        moved = rows[last]
        rows[place] = moved
        self.where[moved] = place
        self.where[slot] = -1
        self.counts[task] = last

    def draw(
        self, count: int, stratified: bool, marked: np.ndarray | None = None, share: float | None = None
    ) -> np.ndarray:
        """
        Draw slots at random.

        :param count: how many slots, with replacement
        :param stratified: as many of each task, instead of uniformly
        :param marked: bool (size,), which slots have a mark
        :param share: of the slots drawn, marked ones, wherever there are both kinds; None: marks do not count
        :return: slots (count,)
        """
        tasks = [task for task, rows in self.counts.items() if rows > 0]
        if share is not None:
            assert marked is not None
            return self._draw_marked(tasks, count, stratified, marked, share)
        if len(tasks) == 1:
            return self.lists[tasks[0]][np.random.randint(0, self.counts[tasks[0]], size=count)]
        if stratified:
            parts = [
                self.lists[task][np.random.randint(0, self.counts[task], size=size)]
                for task, size in zip(tasks, _equal_shares(count, len(tasks)), strict=True)
            ]
            return np.concatenate(parts)
        ends = np.cumsum([self.counts[task] for task in tasks])
        places = np.random.randint(0, ends[-1], size=count)
        chosen = np.empty(count, dtype=np.int32)
        which = np.searchsorted(ends, places, side="right")
        for index, task in enumerate(tasks):
            mine = which == index
            chosen[mine] = self.lists[task][places[mine] - (ends[index] - self.counts[task])]
        return chosen

    def _draw_marked(
        self, tasks: list[int], count: int, stratified: bool, marked: np.ndarray, share: float
    ) -> np.ndarray:
        groups = [self.lists[task][: self.counts[task]] for task in tasks]
        if not stratified:
            groups = [np.concatenate(groups)]
        parts = []
        for rows, size in zip(groups, _equal_shares(count, len(groups)), strict=True):
            has_mark = marked[rows]
            with_mark, without = rows[has_mark], rows[~has_mark]
            n_marked = round(size * share)
            if not (len(with_mark) and len(without)):
                n_marked = size if len(with_mark) else 0
            for kind, number in ((with_mark, n_marked), (without, size - n_marked)):
                if number:
                    parts.append(kind[np.random.randint(0, len(kind), size=number)])
        return np.concatenate(parts)


def _equal_shares(count: int, parts: int) -> np.ndarray:
    """Split a number into equal parts, which take turns at random for what cannot be divided, (parts,)."""
    shares = np.full(parts, count // parts)
    shares[np.random.permutation(parts)[: count % parts]] += 1
    return shares
