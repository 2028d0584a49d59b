"""Gymnasium environments in which a frozen VLA and an RL token turn LIBERO into a small continuous control task."""

from gymnasium.envs.registration import register, registry

__version__ = "0.1.0"


def register_envs() -> None:
    """
    Register ``LIBERO-v0``, ``RLToken-LIBERO-v0``, ``MetaWorld-v0`` and ``RLToken-MetaWorld-v0``.

    Importing this package does it, and so does ``gymnasium.make("rlt_gym:ID")``. Once installed, the package is also
    imported right after Gymnasium (``_rlt_autoload.py``), so that the plain ids are known without an import of ours.
    Nothing heavy is imported here.
    """
    if "LIBERO-v0" in registry:
        return
    register(
        "LIBERO-v0",
        entry_point="rlt_gym.libero.make:make_libero",
        vector_entry_point="rlt_gym.libero.vector_env:LiberoVectorEnv",
    )
    register(
        "RLToken-LIBERO-v0",
        entry_point="rlt_gym.libero.make:make_rl_token_libero",
        vector_entry_point="rlt_gym.libero.make:make_rl_token_libero_vec",
    )
    register(
        "MetaWorld-v0",
        entry_point="rlt_gym.metaworld.make:make_metaworld",
        vector_entry_point="rlt_gym.metaworld.make:MetaWorldVectorEnv",
    )
    register(
        "RLToken-MetaWorld-v0",
        entry_point="rlt_gym.metaworld.make:make_rl_token_metaworld",
        vector_entry_point="rlt_gym.metaworld.make:make_rl_token_metaworld_vec",
    )


register_envs()
