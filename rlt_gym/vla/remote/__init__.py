"""
VLAs in another process, on another machine or in another Python environment: policy servers and their clients.

Importing this package registers the schemes ``rlt://host:port`` and ``openpi://host:port``; it needs neither PyTorch
nor the extra ``serve``.
"""

from rlt_gym.vla.registry import register_vla

register_vla("rlt:", "rlt_gym.vla.remote.client:RemoteVLA.at", "rlt://host:port, a VLA behind `rlt serve`")
register_vla("openpi:", "rlt_gym.vla.remote.client:OpenPIVLA.at", "openpi://host:port, a policy behind openpi's server")
