"""Modules on other workers, and models spread over several."""

from .remote_module import RemoteModule
from .spread_model import named_remote_parameters, remote_parameters

__all__ = ["RemoteModule", "named_remote_parameters", "remote_parameters"]
