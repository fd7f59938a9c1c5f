"""The wire contract between agent and service, agent and agent, agent and rank. Torch-free, pydantic only."""

from liver_core.handoff import PROTOCOL_VERSION

__all__ = ["PROTOCOL_VERSION"]
