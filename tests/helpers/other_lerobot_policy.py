"""A policy as another package would bring it: LeRobot finds the class by the name of its configuration."""

from dataclasses import dataclass, field

import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.configs.types import NormalizationMode
from lerobot.policies.pretrained import PreTrainedPolicy


@PreTrainedConfig.register_subclass("other")
@dataclass
class OtherConfig(PreTrainedConfig):
    noise: float = 0.1
    normalization_mapping: dict = field(
        default_factory=lambda: {name: NormalizationMode.MEAN_STD for name in ("VISUAL", "STATE", "ACTION")}
    )
    observation_delta_indices = action_delta_indices = reward_delta_indices = None

    def get_optimizer_preset(self):
        return None

    def get_scheduler_preset(self):
        return None

    def validate_features(self):
        pass


class OtherPolicy(PreTrainedPolicy):
    config_class, name = OtherConfig, "other"

    def __init__(self, config, **kwargs):
        super().__init__(config)
        self.eyes = torch.nn.Conv2d(3, 16, 16, stride=16)
        self.idle = torch.nn.Linear(1, 1)
        self.head = torch.nn.Linear(32 + 8, 4 * 7)

    def predict_action_chunk(self, batch, **kwargs):
        seen = [self.eyes(batch[key]).mean((2, 3)) for key in self.config.image_features]
        actions = self.head(torch.cat([*seen, batch["observation.state"]], dim=1)).unflatten(1, (4, 7))
        return actions + self.config.noise * torch.randn_like(actions)

    def get_optim_params(self):
        return self.parameters()

    def reset(self):
        pass

    def forward(self, batch):
        raise NotImplementedError

    def select_action(self, batch, **kwargs):
        raise NotImplementedError
