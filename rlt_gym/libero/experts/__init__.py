"""Scripted experts that solve LIBERO tasks from the simulator's state."""

from rlt_gym.libero.experts.scripted import NoSkillError, ScriptedExpert, check_motion
from rlt_gym.libero.experts.supported import SOLVED_TASKS, check_expert, make_expert

__all__ = ["SOLVED_TASKS", "NoSkillError", "ScriptedExpert", "check_expert", "check_motion", "make_expert"]
