"""Which groups of geoms touch: robosuite's ``check_contact``, which LIBERO's goal predicates ask, in whole arrays.

robosuite makes an object in Python of each contact and looks the names of its two geoms up in lists: half a millisecond
in a scene of 80 contacts, for one question.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from robosuite.models.base import MujocoModel


class ContactCheck:
    """
    Takes the place of a problem's ``check_contact``, with the same answers.

    :param problem: LIBERO's environment. It must keep its model.
    :raises NotImplementedError: This MuJoCo does not give the geoms of all contacts as one array.
    """

    def __init__(self, problem: Any):
        model, self._data = problem.sim.model, problem.sim.data._data
        if not hasattr(self._data.contact, "geom"):
            raise NotImplementedError("MjData.contact.geom is missing")
        self._names = [model.geom_id2name(geom) for geom in range(model._model.ngeom)]
        self._masks: dict[Any, np.ndarray] = {}

    def _mask(self, geoms: Any) -> np.ndarray:
        """Tell of each geom whether it belongs to a group, bool (ngeom,)."""
        key = geoms if isinstance(geoms, (str, MujocoModel)) else tuple(geoms)
        if key not in self._masks:
            if isinstance(geoms, str):
                geoms = [geoms]
            group = set(geoms.contact_geoms if isinstance(geoms, MujocoModel) else geoms)
            self._masks[key] = np.array([name in group for name in self._names])
        return self._masks[key]

    def __call__(self, geoms_1: Any, geoms_2: Any = None) -> bool:
        """
        Tell whether any geom of one group touches any of another.

        :param geoms_1: Name of a geom, names, or a model of robosuite.
        :param geoms_2: As ``geoms_1``; ``None`` stands for all geoms.
        :return: Whether there is such a contact.
        """
        first, second = self._data.contact.geom.T
        one = self._mask(geoms_1)
        if geoms_2 is None:
            return bool((one[first] | one[second]).any())
        other = self._mask(geoms_2)
        return bool(((one[first] & other[second]) | (one[second] & other[first])).any())
