"""Does a folder of assets carry a task? Builds it in LIBERO's unmodified code and tries what the task needs of it.

For each task: the model builds and LIBERO's initial states fit; everything comes to rest where it was put, neither
thrown nor sunk; each predicate of the goal can be made false and true. ``rlt assets verify`` runs it for whole suites.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlt_gym.libero.assets.shapes import turn
from rlt_gym.libero.suites.tasks import LiberoTask, get_task, load_init_states

#: Limits of the joints of LIBERO's fixtures, in meters or radians, by the end of their name.
JOINT_RANGES = {
    "_top_level": (-0.16, 0.01),
    "_middle_level": (-0.16, 0.01),
    "_bottom_level": (-0.16, 0.01),
    "_microjoint": (-2.094, 0.0),
    "_button": (-0.005, 2.1),
}
#: Joint positions that make the unary predicates true, by the end of the joint's name.
_OPEN = {"_level": -0.158, "_microjoint": -2.0}
_CLOSED = {"_level": 0.003, "_microjoint": -0.001}
_KNOB = {"turnon": 1.2, "turnoff": -0.003}
_SECONDS_TO_REST = 1.0
#: Height of the surface, in meters, by LIBERO's kind of arena: nothing may sink below it.
_SURFACE = {"table": 0.9, "kitchen": 0.9, "floor": 0.0, "living_room": 0.4365, "study": 0.885}


@dataclass
class TaskReport:
    """
    What the check of one task has found.

    :param task: The task.
    :param problems: What is wrong, in words; empty if the assets carry the task.
    :param rest: Where each object comes to rest, (position, quaternion) by name, per tried initial state.
    """

    task: LiberoTask
    problems: list[str] = field(default_factory=list)
    rest: list[dict[str, np.ndarray]] = field(default_factory=list)


class Bench:
    """
    One task in LIBERO's own environment, with an arm that holds still and things that can be put anywhere.

    Call :func:`rlt_gym.libero.worker.libero_import.prepare_libero` with the assets first.

    :param suite: Name of the suite.
    :param task_id: Index of the task in it.
    """

    def __init__(self, suite: str, task_id: int):
        from libero.libero.envs.env_wrapper import ControlEnv

        self.task = get_task(suite, task_id)
        np.random.seed(0)  # LIBERO places its fixtures with numpy's global generator
        self.env = ControlEnv(
            bddl_file_name=str(self.task.bddl_file),
            has_offscreen_renderer=False,
            use_camera_obs=False,
            hard_reset=False,
        )
        np.random.seed(0)
        self.env.reset()
        self.problem = self.env.env
        self.model, self.data = self.problem.sim.model._model, self.problem.sim.data._data
        names = [self.model.joint(i).name for i in range(self.model.njnt)]
        robot = [i for i, name in enumerate(names) if name.startswith(("robot0_", "gripper0_"))]
        self._robot = np.array([self.model.jnt_dofadr[i] for i in robot])
        self.joints = {name: i for i, name in enumerate(names) if i not in robot}

    def start(self, state: np.ndarray) -> None:
        """
        Set one of LIBERO's initial states.

        :param state: The state (1 + nq + nv,): MuJoCo time, qpos, qvel.
        """
        self.env.set_init_state(state)

    def settle(self, seconds: float = _SECONDS_TO_REST) -> None:
        """
        Let things fall; the arm is held by exactly the forces that keep it where it is.

        :param seconds: Simulated time.
        """
        import mujoco

        for _ in range(round(seconds / self.model.opt.timestep)):
            mujoco.mj_step1(self.model, self.data)
            self.data.qvel[self._robot] = 0.0
            self.data.qfrc_applied[self._robot] = self.data.qfrc_bias[self._robot]
            self.data.ctrl[:] = 0.0
            mujoco.mj_step2(self.model, self.data)
        self.data.qvel[self._robot] = 0.0
        mujoco.mj_forward(self.model, self.data)

    @property
    def objects(self) -> list[str]:
        """Names of what can be moved."""
        return list(self.problem.objects_dict)

    @property
    def fixtures(self) -> list[str]:
        """Names of what stands on the table and cannot be moved."""
        return [name for name, model in self.problem.fixtures_dict.items() if hasattr(model, "root_body")]

    def pose(self, name: str) -> np.ndarray:
        """
        Where an object is.

        :param name: Name of an object or fixture in the task's BDDL file.
        :return: Position (m) and quaternion (7,).
        """
        address = self.model.jnt_qposadr[self.joints[f"{name}_joint0"]]
        return np.array(self.data.qpos[address : address + 7])

    def put(self, name: str, pose: np.ndarray) -> None:
        """
        Put an object somewhere, at rest.

        :param name: Name of an object or fixture in the task's BDDL file.
        :param pose: Position (m) and quaternion (7,).
        """
        import mujoco

        joint = self.joints[f"{name}_joint0"]
        address, dof = self.model.jnt_qposadr[joint], self.model.jnt_dofadr[joint]
        self.data.qpos[address : address + 7] = pose
        self.data.qvel[dof : dof + 6] = 0.0
        mujoco.mj_forward(self.model, self.data)

    def turn_joint(self, joint: str, position: float) -> None:
        """
        Move a fixture's joint to a position, at rest.

        :param joint: Name of the joint.
        :param position: Radians or meters.
        """
        import mujoco

        self.data.qpos[self.model.jnt_qposadr[self.joints[joint]]] = position
        self.data.qvel[self.model.jnt_dofadr[self.joints[joint]]] = 0.0
        mujoco.mj_forward(self.model, self.data)

    def bodies(self, name: str) -> set[int]:
        """
        All bodies of an object or fixture.

        :param name: Name of an object or fixture in the task's BDDL file.
        :return: Their ids.
        """
        top = self.model.body(self.problem.get_object(name).root_body).id
        found = {top}
        for body in range(top + 1, self.model.nbody):
            if int(self.model.body_parentid[body]) in found:
                found.add(body)
        return found

    def lowest(self, name: str) -> float:
        """
        How low an object reaches.

        :param name: Name of an object or fixture in the task's BDDL file.
        :return: z (m) of the lowest point of the boxes around its solid geoms.
        """
        bodies, low = self.bodies(name), math.inf
        for geom in range(self.model.ngeom):
            if int(self.model.geom_bodyid[geom]) in bodies and self.model.geom_contype[geom]:
                center, half = self.model.geom_aabb[geom][:3], self.model.geom_aabb[geom][3:]
                row = self.data.geom_xmat[geom].reshape(3, 3)[2]
                low = min(low, float(self.data.geom_xpos[geom][2] + row @ center - np.abs(row) @ half))
        return low

    def depth(self, name: str, room: bool = True) -> float:
        """
        Measure how deep an object sits in others.

        :param name: An object.
        :param room: Whether the table and the floor count, too, and not only objects and fixtures.
        :return: How deep it sits in others, meters; 0 if it only touches.
        """
        bodies, deepest = self.bodies(name), 0.0
        things = {body for thing in (*self.problem.objects_dict, *self.fixtures) for body in self.bodies(thing)}
        for contact in self.data.contact[: self.data.ncon]:
            pair = {int(self.model.geom_bodyid[geom]) for geom in (contact.geom1, contact.geom2)}
            other = pair - bodies
            if len(pair) == 2 and len(other) == 1 and (room or other <= things):
                deepest = max(deepest, -float(contact.dist))
        return deepest

    def holds(self, predicate: Sequence[str]) -> bool:
        """
        Ask LIBERO whether a predicate holds.

        :param predicate: For example ``["on", "plate_1", "flat_stove_1_cook_region"]``.
        :return: Whether it holds.
        """
        return bool(self.problem._eval_predicate(list(predicate)))

    def goal(self) -> list[list[str]]:
        """Return the predicates of the goal, all of which must hold."""
        return [list(predicate) for predicate in self.problem.parsed_problem["goal_state"]]

    def close(self) -> None:
        """Free the simulator."""
        self.env.close()

    # ------------------------------------------------------------------ predicates

    def _joints_of(self, name: str) -> list[str]:
        """Return the joints that a predicate on a fixture, or on a region of it, reads."""
        if name in self.problem.object_sites_dict:
            return list(self.problem.object_sites_dict[name].joints)
        return list(self.problem.get_object(name).joints)

    def _target(self, name: str) -> np.ndarray:
        if name in self.problem.object_sites_dict:
            return np.array(self.problem.sim.data.get_site_xpos(name))
        return np.array(self.data.xpos[self.problem.obj_body_id[name]])

    def _orientation(self, name: str) -> np.ndarray:
        """Return quaternion of the body of an object, of a fixture or of a region's owner."""
        if name in self.problem.object_sites_dict:
            parent = self.problem.object_sites_dict[name].parent_name
            if self.problem.get_object(parent) is None:  # a region of the table
                return np.array([1.0, 0.0, 0.0, 0.0])
            name = parent
        return np.array(self.data.xquat[self.problem.obj_body_id[name]])

    def _columns(self, name: str, target: str) -> Iterator[list[np.ndarray]]:
        """Poses worth trying: columns of rising height, as the object lies now and then as it may fit the target."""
        import mujoco

        place, frame = self._target(target), self._orientation(target)
        turns = [self.pose(name)[3:]]
        for axis, degrees in (
            ("z", 0),
            ("z", 90),
            ("z", 180),
            ("z", 270),
            ("x", 90),
            ("x", -90),
            ("y", 90),
            ("y", -90),
        ):
            result = np.zeros(4)
            mujoco.mju_mulQuat(result, frame, np.array(turn(**{axis: degrees})))
            turns.append(result)
        for quat in turns:
            for x, y in ((0, 0), (0, 0.012), (0, -0.012), (0.02, 0), (-0.02, 0), (0, 0.03), (0, -0.03), (0, 0.05)):
                heights = np.arange(-0.06, 0.14, 0.005)
                yield [np.array([*(place + np.array([x, y, height])), *quat]) for height in heights]

    def make_true(self, predicate: Sequence[str], tries: int = 80) -> bool:
        """
        Bring about a state in which a predicate holds, and lets go.

        :param predicate: One of :meth:`goal`.
        :param tries: How many poses may be tried.
        :return: Whether it holds after everything has come to rest.
        """
        verb = predicate[0]
        if verb in ("open", "close", "turnon", "turnoff"):
            table = {"open": _OPEN, "close": _CLOSED}.get(verb)
            for joint in self._joints_of(predicate[1]):
                position = (
                    _KNOB[verb] if table is None else next(value for end, value in table.items() if joint.endswith(end))
                )
                self.turn_joint(joint, position)
            self.settle(0.2)
            return self.holds(predicate)
        name, target = predicate[1], predicate[2]
        before = np.array(self.data.qpos), np.array(self.data.qvel)
        for column in self._columns(name, target):
            blocked = True
            for pose in column:
                self.put(name, pose)
                was, blocked = blocked, self.depth(name) > 0.001
                if blocked or not was:
                    continue  # only the lowest place above something: nothing falls far
                if tries <= 0:
                    break
                tries -= 1
                self.settle(0.6)
                if self.holds(predicate):
                    self.settle(0.4)
                    if self.holds(predicate):
                        return True
                self.data.qpos[:], self.data.qvel[:] = before
        self.data.qpos[:], self.data.qvel[:] = before
        return False


def _check_rest(bench: Bench, report: TaskReport, number: int) -> None:
    start = {name: bench.pose(name) for name in bench.objects}
    # Some of LIBERO's states put two things into each other, and whatever the assets, they leave each other.
    overlapping = {name for name in bench.objects if bench.depth(name, room=False) > 0.001}
    false_at_first = not all(bench.holds(predicate) for predicate in bench.goal())
    bench.settle()
    ground = _SURFACE[bench.problem._arena_type]
    where = f"initial state {number}"
    for name in bench.objects:
        moved = float(np.linalg.norm(bench.pose(name)[:2] - start[name][:2]))
        if moved > 0.03 and name not in overlapping:
            report.problems.append(f"{where}: {name} moved sideways by {1000 * moved:.0f} mm")
        if bench.lowest(name) < ground - 0.004:
            report.problems.append(f"{where}: {name} sank {1000 * (ground - bench.lowest(name)):.0f} mm")
        joint = bench.joints[f"{name}_joint0"]
        speed = float(np.abs(bench.data.qvel[bench.model.jnt_dofadr[joint] :][:3]).max())
        if speed > 0.02:
            report.problems.append(f"{where}: {name} still moves at {1000 * speed:.0f} mm/s")
    if not false_at_first or all(bench.holds(predicate) for predicate in bench.goal()):
        report.problems.append(f"{where}: the goal is reached without doing anything")
    report.rest.append({name: bench.pose(name) for name in bench.objects})


def _check_predicates(bench: Bench, report: TaskReport, state: np.ndarray) -> None:
    """Each predicate of the goal alone, then all together."""
    for predicate in bench.goal():
        bench.start(state)
        bench.settle()
        text = " ".join(predicate)
        if bench.holds(predicate):
            opposite = {"close": "open", "open": "close", "turnoff": "turnon", "turnon": "turnoff"}.get(predicate[0])
            if opposite is None or not bench.make_true([opposite, *predicate[1:]]) or bench.holds(predicate):
                report.problems.append(f"({text}) cannot be made false")
        if not bench.make_true(predicate):
            report.problems.append(f"({text}) cannot be made true")


def verify_task(suite: str, task_id: int, states: Sequence[int] = (0,), predicates: bool = True) -> TaskReport:
    """
    Check one task with the assets that :func:`rlt_gym.libero.worker.libero_import.prepare_libero` was given.

    :param suite: Name of the suite.
    :param task_id: Index of the task in it.
    :param states: Which of LIBERO's 50 initial states to let come to rest.
    :param predicates: Also bring about each predicate of the goal.
    :return: What was found.
    """
    bench = Bench(suite, task_id)
    report = TaskReport(bench.task)
    try:
        fixed = load_init_states(bench.task)
        width = 1 + bench.model.nq + bench.model.nv
        if fixed.shape[1] != width:
            report.problems.append(f"initial states have {fixed.shape[1]} numbers, the model needs {width}")
            return report
        for name, joint in bench.joints.items():
            if name.endswith("_joint0"):
                continue
            wanted = next((limits for end, limits in JOINT_RANGES.items() if name.endswith(end)), None)
            found: Any = tuple(bench.model.jnt_range[joint])
            if wanted is None or not np.allclose(found, wanted, atol=1e-6):
                report.problems.append(f"joint {name} has the range {found}, LIBERO's is {wanted}")
        for number in states:
            bench.start(fixed[number])
            _check_rest(bench, report, number)
        if predicates:
            _check_predicates(bench, report, fixed[states[0]])
    finally:
        bench.close()
    return report
