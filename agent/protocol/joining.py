"""How an agent gets a token for its node: it joins once with a join token, and renews with the node's key. Pure.

The agent makes the secret of the key itself and keeps it: a join whose answer was lost is repeated without harm.
"""

from typing import Annotated

from pydantic import Field

from agent.protocol.values import Message, Utc
from liver_core.handoff import PROTOCOL_VERSION
from liver_core.layout.limits import NodeId, ShortText

JOIN_PATH = "/agent/v1/join"
RENEW_PATH = "/agent/v1/token"
SECRET_PATTERN = r"^[A-Za-z0-9_-]{43,128}$"


class JoinRequest(Message):
    """A node that wants to take part."""

    protocol_version: int = PROTOCOL_VERSION
    node_id: NodeId
    secret: Annotated[str, Field(pattern=SECRET_PATTERN, description="At least 256 random bits, base64 for URLs.")]


class NodeToken(Message):
    """A token that speaks for one node. The node's key is `liver_<key_id>_<secret>`."""

    key_id: ShortText
    token: ShortText
    expires_utc: Utc
