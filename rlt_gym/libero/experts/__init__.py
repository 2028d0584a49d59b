"""Scripted experts that solve LIBERO tasks from the simulator's state."""

from rlt_gym.libero.experts.scripted import NoSkillError, ScriptedExpert

__all__ = ["NoSkillError", "ScriptedExpert"]
