"""A frozen VLA that sees one observation at a time, so that its numbers do not depend on how many there are."""

from dataclasses import replace

from rlt_gym.vla.registry import load_vla


class OneRow:
    """The shipped VLA with a largest batch of 1."""

    def __init__(self, device="cpu"):
        self._vla = load_vla("mini", device)
        self.device = self._vla.device
        self.spec = replace(self._vla.spec, max_batch=1)

    def forward(self, obs, tasks, seed=None):
        return self._vla.forward(obs, tasks, seed=seed)

    def to(self, device):
        return self

    def fingerprint(self):
        return self._vla.fingerprint()
