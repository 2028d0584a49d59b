"""What a scripted expert reads from a LIBERO simulation: hand, fingers, objects, supports and contacts."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlt_gym.libero.experts.geometry import Array, shape_points, surface_heights


class Scene:
    """
    Read-only view of a LIBERO problem.

    Every name is resolved once, here: a soft reset keeps the compiled model, so ids stay valid. Poses are read from the
    simulator at each call, fixtures included, because LIBERO moves those at every reset.

    :param env: LIBERO's robosuite environment (``ControlEnv.env``)
    """

    def __init__(self, env: Any):
        self.env = env
        self.model = env.sim.model._model
        robot = env.robots[0]
        self.hand_site = int(robot.eef_site_id)
        self._finger_joints = list(robot._ref_gripper_joint_pos_indexes)
        parts = robot.gripper.important_geoms
        # pads and finger bodies: a wall may be pinched by the body of a finger alone
        self._fingers = tuple(
            frozenset(self._geom_id(name) for name in parts[side]) for side in ("left_finger", "right_finger")
        )
        self._points: dict[int, Array] = {}
        model = self.model
        roots = {int(model.body_rootid[model.site_bodyid[self.hand_site]])}
        solid = (model.geom_contype != 0) | (model.geom_conaffinity != 0)
        # planes have no box, and the robot is no obstacle to itself
        solid &= (model.geom_type != 0) & ~np.isin(model.body_rootid[model.geom_bodyid], list(roots))
        self._solid = np.flatnonzero(solid)
        self._object_geoms: dict[str, list[int]] = {}
        left, right = (self.data.geom_xpos[min(finger)] for finger in self._fingers)
        local = self.hand_rotation.T @ (left - right)
        local[2] = 0.0
        #: Direction between the fingers in the hand's frame, signed so that it points to the robot's left at home.
        self.local_finger_axis: Array = local / np.linalg.norm(local) * np.sign(local[0])

    def _geom_id(self, name: str) -> int:
        return int(self.env.sim.model.geom_name2id(name))

    @property
    def data(self) -> Any:
        """MuJoCo's ``mjData``."""
        return self.env.sim.data._data

    # the hand

    @property
    def hand_position(self) -> Array:
        """(3,) point between the finger tips, meters."""
        return np.array(self.data.site_xpos[self.hand_site])

    @property
    def hand_rotation(self) -> Array:
        """(3, 3) orientation of the hand; its z axis points out of the palm."""
        return np.array(self.data.site_xmat[self.hand_site]).reshape(3, 3)

    @property
    def base_position(self) -> Array:
        """(3,) position of the robot's base, meters."""
        return np.array(self.env.robots[0].base_pos)

    @property
    def opening(self) -> float:
        """Gap between the fingers, meters (0 to 0.08)."""
        return float(np.abs(self.data.qpos[self._finger_joints]).sum())

    # objects

    def body_id(self, name: str) -> int:
        """
        Root body of an object or fixture.

        :param name: BDDL name, such as ``plate_1`` or ``main_table``
        :return: MuJoCo's id
        """
        if name in self.env.obj_body_id:
            return int(self.env.obj_body_id[name])
        # the scene's own table or floor: LIBERO names its body differently from scene to scene
        names = self.env.sim.model.body_names
        bodies = [body for body in (name, str(self.env.workspace_name), "table", "floor") if body in names]
        return int(self.env.sim.model.body_name2id(bodies[0]))

    def geoms(self, name: str) -> list[int]:
        """
        Collision geoms of an object or fixture.

        :param name: BDDL name
        :return: MuJoCo's ids
        """
        if name not in self._object_geoms:
            model = self.model
            root = model.body_rootid[self.body_id(name)]
            mine = model.body_rootid[model.geom_bodyid] == root
            solid = (model.geom_contype != 0) | (model.geom_conaffinity != 0)
            self._object_geoms[name] = [int(g) for g in np.flatnonzero(mine & solid)]
        return self._object_geoms[name]

    def geom_points(self, geom: int) -> Array:
        """
        Points that span a geom, in the world.

        :param geom: geom id
        :return: (n, 3), meters
        """
        if geom not in self._points:
            box = self.model.geom_aabb[geom]
            self._points[geom] = shape_points(int(self.model.geom_type[geom]), box[:3], box[3:])
        rotation = self.data.geom_xmat[geom].reshape(3, 3)
        return self._points[geom] @ rotation.T + self.data.geom_xpos[geom]

    def points(self, name: str) -> Array:
        """
        Points that span an object or fixture, in the world.

        :param name: BDDL name
        :return: (n, 3), meters
        """
        return np.concatenate([self.geom_points(geom) for geom in self.geoms(name)])

    def position(self, name: str) -> Array:
        """
        Position of an object's or fixture's root body, or of a named site.

        :param name: BDDL name
        :return: (3,), meters
        """
        if name in self.env.object_sites_dict:
            return np.array(self.env.sim.data.get_site_xpos(name))
        return np.array(self.data.xpos[self.body_id(name)])

    def rotation(self, name: str) -> Array:
        """
        Orientation of an object's or fixture's root body.

        :param name: BDDL name
        :return: (3, 3) rotation matrix
        """
        return np.array(self.data.xmat[self.body_id(name)]).reshape(3, 3)

    def owner(self, target: str) -> str:
        """
        Find the object or fixture that a goal refers to.

        :param target: object, fixture or site name
        :return: the site's parent, or ``target`` itself
        """
        if target in self.env.object_sites_dict:
            parent = self.env.object_sites_dict[target].parent_name
            return str(parent) if parent else "main_table"
        return target

    def has_joint(self, region: str) -> bool:
        """
        Whether a region belongs to a part that moves on a joint, such as a drawer.

        :param region: site name
        :return: whether it does
        """
        site = self.env.object_sites_dict.get(region)
        return bool(site is not None and site.joints)

    def joint_of(self, region: str) -> tuple[int, int]:
        """
        Find the joint of the part that a region belongs to.

        :param region: site name
        :return: (joint id, id of the body that moves on it)
        """
        joint = int(self.env.sim.model.joint_name2id(self.env.object_sites_dict[region].joints[0]))
        return joint, int(self.model.jnt_bodyid[joint])

    def hinge_of(self, fixture: str) -> tuple[int, int]:
        """
        Find the joint of a fixture that has one, such as a stove's knob.

        :param fixture: BDDL name
        :return: (joint id, id of the body that moves on it)
        """
        joint = int(self.env.sim.model.joint_name2id(self.env.get_object(fixture).joints[0]))
        return joint, int(self.model.jnt_bodyid[joint])

    # regions and obstacles

    def region_half(self, target: str) -> Array:
        """
        Half size of the box of a region.

        :param target: object, fixture or site name
        :return: (3,), meters, along the world's axes; zeros for anything but a site
        """
        if target not in self.env.object_sites_dict:
            return np.zeros(3)
        matrix = np.array(self.env.sim.data.get_site_xmat(target)).reshape(3, 3)
        return np.abs(matrix @ np.array(self.env.object_sites_dict[target].size, dtype=np.float64)[:3])

    def region_geoms(self, target: str) -> list[int]:
        """
        Geoms that bear or surround what is put on a target: those of the moving part where the target is one's region.

        :param target: object, fixture or site name
        :return: MuJoCo's ids
        """
        geoms = self.geoms(self.owner(target))
        if self.has_joint(target):
            body = self.joint_of(target)[1]
            geoms = [geom for geom in geoms if self.model.geom_bodyid[geom] == body]
        if target not in self.env.object_sites_dict:
            return geoms
        center, half = self.position(target), self.region_half(target)
        low, high = self.boxes(geoms)
        near = np.all((low[:, :2] < (center + half)[:2] + 0.02) & (high[:, :2] > (center - half)[:2] - 0.02), axis=1)
        return [geoms[i] for i in np.flatnonzero(near)]

    def covered(self, target: str) -> bool:
        """
        Whether a region that does not move lies under a roof, where nothing can be put from above.

        :param target: object, fixture or site name
        :return: whether it does
        """
        if target not in self.env.object_sites_dict or self.has_joint(target):
            return False
        geoms = np.array(self.geoms(self.owner(target)), dtype=int)
        center = self.position(target)
        top = float(self.heights(geoms, center[None, :2])[0]) if len(geoms) else -np.inf
        return top > center[2] + self.region_half(target)[2] + 0.03

    def support(self, target: str, xy: Array) -> float:
        """
        Height of the surface of a target under a point.

        :param target: object, fixture or site name
        :param xy: (2,) point, meters
        :return: z, meters
        """
        geoms = self.region_geoms(target)
        height = float(surface_heights(*self.turned_boxes(geoms), xy[None])[0]) if geoms else -np.inf
        return height if np.isfinite(height) else float(self.position(target)[2])

    def turned_boxes(self, geoms: Any) -> tuple[Array, Array, Array]:
        """
        Boxes around geoms along their own axes.

        :param geoms: geom ids
        :return: (centers (n, 3), rotations (n, 3, 3) to the world, half sizes (n, 3)), meters
        """
        rotations = self.data.geom_xmat[geoms].reshape(-1, 3, 3)
        aabb = self.model.geom_aabb[geoms]
        return self.data.geom_xpos[geoms] + np.einsum("nij,nj->ni", rotations, aabb[:, :3]), rotations, aabb[:, 3:]

    def boxes(self, geoms: Any) -> tuple[Array, Array]:
        """
        Boxes around geoms along the world's axes.

        :param geoms: geom ids
        :return: (lowest corners (n, 3), highest corners (n, 3)), meters
        """
        centers, rotations, local = self.turned_boxes(geoms)
        halves = np.einsum("nij,nj->ni", np.abs(rotations), local)
        return centers - halves, centers + halves

    def obstacles(self, *without: str) -> Array:
        """
        Everything solid that is neither floor nor robot.

        :param without: objects to leave out
        :return: (n,) geom ids
        """
        skipped = [geom for name in without for geom in self.geoms(name)]
        return np.asarray(self._solid[~np.isin(self._solid, skipped)])

    def heights(self, geoms: Array, points: Array) -> Array:
        """
        Height of the highest surface at some points.

        :param geoms: (n,) geom ids that count
        :param points: (m, 2), meters
        :return: (m,) meters, ``-inf`` where there is nothing
        """
        low, high = self.boxes(geoms)
        near = np.all((high[:, :2] > points.min(axis=0)) & (low[:, :2] < points.max(axis=0)), axis=1)
        return surface_heights(*self.turned_boxes(geoms[near]), points)

    # contacts

    def _contact_pairs(self) -> Array:
        data = self.data
        return np.array([data.contact[i].geom for i in range(data.ncon)]).reshape(-1, 2)

    def touches(self, first: frozenset[int], second: frozenset[int]) -> bool:
        """
        Whether any geom of one set touches one of another.

        :param first: geom ids
        :param second: geom ids
        :return: whether one does
        """
        return any((a in first and b in second) or (a in second and b in first) for a, b in self._contact_pairs())

    def holds(self, name: str) -> bool:
        """
        Whether both fingers press on an object.

        :param name: BDDL name
        :return: whether they do
        """
        geoms = frozenset(self.geoms(name))
        return all(self.touches(finger, geoms) for finger in self._fingers)

    def satisfied(self, predicate: list[str]) -> bool:
        """
        LIBERO's own verdict on one predicate.

        :param predicate: such as ``["on", "plate_1", "flat_stove_1_cook_region"]``
        :return: whether it holds
        """
        return bool(self.env._eval_predicate(predicate))

    @property
    def success(self) -> bool:
        """LIBERO's own success predicate."""
        return bool(self.env._check_success())
