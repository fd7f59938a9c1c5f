"""Everything that can be set from outside: LIVER_SERVICE_*, read once at start and never later."""

from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

PROXIES_MAX = 100
Network = IPv4Network | IPv6Network


def _networks(given: Any) -> Any:
    """A text with commas as networks; a single address is a network of one."""
    if not isinstance(given, str):
        return given
    named = [item.strip() for item in given.split(",")] if given.strip() else []
    if len(named) > PROXIES_MAX:
        raise ValueError(f"must name at most {PROXIES_MAX} addresses and networks, not {len(named)}")
    return tuple(map(_network, named))


def _network(named: str) -> Network:
    try:
        return ip_network(named)
    except ValueError as error:
        rule = "must be IP addresses or networks with commas between them, such as 10.0.0.7,10.1.0.0/16"
        raise ValueError(f"{rule}: {error}"[:400]) from None


def _kept(days: float, what: str) -> Any:
    return Field(default=days, ge=1, le=36_500, allow_inf_nan=False, description=f"days for which are kept: {what}")


class ServiceSettings(BaseSettings):
    """Defaults suit one machine; the times are explained where they are used."""

    model_config = SettingsConfigDict(env_prefix="LIVER_SERVICE_", extra="ignore")

    host: str = "127.0.0.1"
    port: int = Field(default=8470, ge=0, le=65_535)
    tls_certificate: Path | None = Field(default=None, description="PEM file with the chain; absent: plain HTTP")
    tls_key: Path | None = Field(default=None, description="PEM file with its key")
    trusted_proxies: Annotated[tuple[Network, ...], NoDecode, BeforeValidator(_networks)] = Field(
        default=(),
        description="proxies whose X-Forwarded-For and -Proto are believed, with commas between them; absent: none's",
    )
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    data_dir: Path = Path("~/.local/share/liver")
    database_url: SecretStr | None = Field(
        default=None, description="postgresql://...; absent: an embedded PostgreSQL under data_dir"
    )
    database_pool_size: int = Field(
        default=10,
        ge=2,
        le=200,
        description="connections kept for people, and as many for agents, who get twice as many when busy",
    )

    agent_poll_s: float = Field(default=1.0, gt=0, le=60)
    silent_after_s: float = Field(
        default=6.0, gt=0, description="no sync for this long: nothing new is placed on the node"
    )
    gone_after_s: float = Field(default=30.0, gt=0, description="no sync for this long: the node's lease ends")
    stuck_after_s: float = Field(
        default=60.0,
        gt=0,
        description="as gone_after_s, for a node whose machine answers other agents; its own may be stopped or starved",
    )
    propose_after_s: float = Field(default=3.0, ge=0, description="time the agents have to act on a standing plan")
    open_within_s: float = Field(default=15.0, gt=0, description="a proposal that no agent opens is dropped after this")
    propose_again_s: float = Field(
        default=60.0, gt=0, description="a proposal that an agent declined is not made again for this long; another is"
    )
    handoff_quiet_s: float = Field(
        default=240.0,
        gt=0,
        description="an open handoff without a report for this long is dropped; agents report theirs once a minute",
    )
    grow_settle_s: float = Field(default=3.0, ge=0, description="quiet time before a job grows onto new nodes")
    start_within_s: float = Field(
        default=270.0, gt=0, description="a start without a step for this long has failed; longer than agents wait"
    )
    stop_within_s: float = Field(default=60.0, gt=0, description="ranks that still run after this count as gone")
    checkpoint_within_s: float = Field(
        default=120.0, gt=0, description="how much longer ranks may take that write a checkpoint before they end"
    )
    stall_after_s: float = Field(
        default=20.0, gt=0, description="no step for this long while a member is silent: the world is lost"
    )
    stall_steps: int = Field(default=5, ge=1, description="as stall_after_s, in usual steps; the longer one counts")
    first_cause_within_s: float = Field(
        default=1.5, ge=0, description="while ranks only miss a peer, time for the agent of the one that failed"
    )
    crashes_max: int = Field(
        default=3, ge=1, description="the same error after the same step, so often: the job is failed"
    )
    starts_max: int = Field(
        default=3,
        ge=1,
        description="failed starts in a row before the job is failed; one whose nodes were taken is no failure",
    )
    start_guess_s: float = Field(
        default=55.0,
        ge=0,
        description="how long a start is taken to need until its first step while none of the job has been timed",
    )

    reconcile_s: float = Field(default=0.5, gt=0, description="period of the reconcilers; NOTIFY wakes them earlier")
    reconcilers: bool = True
    claim_s: float = Field(default=10.0, gt=0)
    step_rows_max: int = Field(default=20_000, ge=100, description="per job; older ones are dropped")
    log_chars_max: int = Field(default=16 * 1024 * 1024, ge=65_536, description="per job; older ones are dropped")
    metrics_rows_max: int = Field(default=50_000, ge=100, description="steps per job; older ones are dropped")
    logs_kept_days: float = _kept(30, "pieces of logs")
    steps_kept_days: float = _kept(90, "steps, losses and metrics of a job, from when it has ended on")
    notices_kept_days: float = _kept(90, "notices, from when the lease that they are about has ended on")
    hearings_kept_days: float = _kept(30, "what each channel said of notices, as it was received")
    decisions_kept_days: float = _kept(90, "decisions; the newest of a job that has not ended stays")
    handoffs_kept_days: float = _kept(90, "attempts of handoffs that came to nothing")
    requests_kept_days: float = _kept(90, "requests for machines that ended; of a node as long again from its end on")
    audit_kept_days: float = _kept(400, "audit rows")
    intervals_kept_days: float = _kept(90, "intervals of the ledger; their sums by hour stay")
    requests_per_s: float = Field(
        default=100.0, gt=0, description="each token of people and scripts; twice as many at once; then 429"
    )
    agent_requests_per_s: float = Field(
        default=2_000.0, gt=0, description="each token of agents; a join token serves a whole fleet; then 429"
    )
    what_ifs_max: int = Field(default=2, ge=1, le=64, description="replays that run at a time; then 429")
    what_if_within_s: float = Field(default=20.0, gt=0, le=600, description="a replay that takes longer is refused")
    node_token_s: float = Field(default=3_600.0, gt=0, description="how long a token works that an agent fetches")
    session_s: float = Field(default=12 * 3600.0, gt=0, description="how long a browser session lasts")

    aws_queue_url: str | None = Field(
        default=None,
        pattern="^https?://",
        max_length=1_000,
        description="the SQS queue to which EventBridge sends the notices of an AWS account; absent: it is not read",
    )
    aws_region: str | None = Field(default=None, max_length=63, description="of the queue; absent: as boto3 finds it")
    aws_endpoint_url: str | None = Field(
        default=None, pattern="^https?://", max_length=1_000, description="of all of AWS; for emulators"
    )
    aws_workers: int = Field(default=8, ge=1, le=32, description="how many messages are asked for at a time, by tens")
    aws_wait_s: int = Field(default=10, ge=1, le=20, description="how long SQS may wait for a message")
    aws_visibility_s: int = Field(
        default=30, ge=5, le=300, description="how long a message is nobody else's; extended while it is worked on"
    )

    gcp_subscription: str | None = Field(
        default=None,
        pattern="^projects/[A-Za-z0-9:.-]{1,100}/subscriptions/[A-Za-z0-9._~%+-]{3,255}$",
        description="the Pub/Sub subscription of a GCP project's system events; absent: it is not pulled",
    )
    gcp_push_audience: str | None = Field(
        default=None, min_length=1, max_length=1_000, description="of the token that comes with each push of Pub/Sub"
    )
    gcp_push_account: str | None = Field(
        default=None, min_length=3, max_length=320, description="e-mail of the service account of that token"
    )
    gcp_certs_url: str = Field(
        default="https://www.googleapis.com/oauth2/v1/certs",
        pattern="^https?://",
        max_length=1_000,
        description="where Google publishes the keys of such tokens; for emulators",
    )
    gcp_project: str | None = Field(
        default=None,
        pattern="^[A-Za-z0-9:.-]{1,100}$",
        description="the project whose operations are listed; absent: they are not",
    )
    gcp_endpoint_url: str | None = Field(
        default=None, pattern="^https?://", max_length=1_000, description="of all of Google's interfaces; for emulators"
    )
    gcp_workers: int = Field(default=3, ge=1, le=32, description="how many pulls wait for messages at a time")
    gcp_wait_s: float = Field(
        default=100.0, ge=1, le=600, description="how long Pub/Sub may take to say that there is no message"
    )
    gcp_ack_deadline_s: int = Field(
        default=30, ge=10, le=600, description="how long a message is nobody else's; extended while it is worked on"
    )
    gcp_operations_every_s: float = Field(default=5.0, ge=1, le=60, description="how often operations are listed")

    @model_validator(mode="after")
    def _audience_and_account(self) -> Self:
        if (self.gcp_push_audience is None) != (self.gcp_push_account is None):
            raise ValueError("gcp_push_audience and gcp_push_account come together")
        return self

    @model_validator(mode="after")
    def _certificate_and_key(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("--tls-certificate and --tls-key come together")
        return self

    @property
    def lost_after_s(self) -> float:
        """The shortest time after which a job whose members are silent is started elsewhere."""
        return min(self.stall_after_s, self.gone_after_s)

    def resolved_data_dir(self) -> Path:
        """The data directory as an absolute path."""
        return self.data_dir.expanduser().resolve()
