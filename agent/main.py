"""The `liver-agent` command: one per node. Reads the settings, runs the agent, prints one line for every error."""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from agent.gpus import gpus_of_node
from agent.notices import aws, gcp
from agent.protocol.plain_rules import rule_in_words
from agent.protocol.sync import Provider
from agent.protocol.values import Url
from agent.settings import (
    DEFAULT_PRELOAD,
    DEFAULT_RANK_ENTRY,
    DEFAULT_STORE_ENTRY,
    AgentSettings,
    SettingsError,
    check_tls_ca,
    default_run_dir,
    job_user,
    read_token,
    relay_ports,
    secret_places,
    socket_dir_for,
)
from liver_core.installation import lacking, release
from liver_core.layout.limits import Identifier, NodeId
from liver_core.systemd_notify import take_service_manager

EXIT_SETTINGS = 2
EXIT_REFUSED = 3
EXIT_BROKEN = 4
EXAMPLE = """\
example:
  liver-agent --service-url http://10.0.0.5:8470 --token-file /etc/liver/join.token --node-id node-1 --slots 8 \\
      --provider aws --pool p4d-us-east-1a --host 10.0.1.17

SIGTERM ends the agent, but not its ranks: they keep training, and the next agent with the same --run-dir adopts them.
Where systemd stops the whole system, ranks first move to other nodes.
`liver-agent --stop-ranks --run-dir DIR` ends the ranks.

environment: LIVER_AGENT_SERVICE_URL, LIVER_AGENT_TOKEN_FILE, LIVER_AGENT_NODE_ID, LIVER_AGENT_SLOTS,
  LIVER_AGENT_PROVIDER, LIVER_AGENT_POOL, LIVER_AGENT_RUN_DIR, LIVER_AGENT_HOST, LIVER_AGENT_PEER_PORT,
  LIVER_AGENT_TLS_CA, LIVER_AGENT_JOB_USER, LIVER_AGENT_JOB_SECRETS_DIR, LIVER_AGENT_JOB_SECRETS_ENV
  set the options of the same names.
  LIVER_AGENT_AWS_IMDS_URL, LIVER_AGENT_GCP_METADATA_URL: another metadata address.
  LIVER_AGENT_GCP_NOTICE_S=120: the instance has preemptionNoticeDuration, which its metadata do not show.
  LIVER_AGENT_SHUTDOWN=off: do not hear of the machine's own shutdown from logind and systemd (on).
  LIVER_AGENT_SHUTDOWN_S: seconds that ranks have to leave once systemd stops the system (25); less than TimeoutStopSec.
  LIVER_AGENT_NOTICE_INTERVAL_S: seconds between two polls of the metadata (1).
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 stopped, 2 settings, 3 rejected by the service, 4 journal broken or disk full."""
    options = _parser(os.environ).parse_args(arguments)
    if lacks := lacking("agent"):
        sys.stderr.write(f"liver-agent {lacks}\n")
        return EXIT_SETTINGS
    logging.basicConfig(
        level=getattr(logging, options.log_level.upper()),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        settings = _settings(options, os.environ)
    except SettingsError as error:
        return _fail(EXIT_SETTINGS, str(error))
    return _run(settings, stop_ranks=options.stop_ranks)


def _run(settings: AgentSettings, *, stop_ranks: bool) -> int:
    from agent.app import Agent, PortInUse
    from agent.journal import JournalError, RunDirectoryError
    from agent.link.identity import KeyFileError
    from agent.link.link import LinkRefused

    async def serve() -> None:
        agent = Agent(settings, take_service_manager(os.environ))
        if stop_ranks:
            await agent.stop_ranks()
            return
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, agent.terminate)
        loop.add_signal_handler(signal.SIGINT, agent.stop)
        await agent.run()

    try:
        asyncio.run(serve())
    except (PortInUse, KeyFileError) as error:
        return _fail(EXIT_SETTINGS, str(error))
    except RunDirectoryError as error:
        return _fail(EXIT_SETTINGS, f"--run-dir: {error}")
    except LinkRefused as error:
        return _fail(EXIT_REFUSED, f"{settings.service_url}: {error}")
    except JournalError as error:
        return _fail(EXIT_BROKEN, str(error))
    return 0


def _settings(options: argparse.Namespace, environ: Mapping[str, str]) -> AgentSettings:
    node_id = options.node_id or ("stop-ranks" if options.stop_ranks else "")
    for name, value in (("--service-url", options.service_url), ("--token-file", options.token_file)):
        if not value and not options.stop_ranks:
            raise SettingsError(f"{name} is required")
    if not node_id:
        raise SettingsError("--node-id is required")
    if options.stop_ranks and not options.run_dir and not options.node_id:
        raise SettingsError("--stop-ranks needs --run-dir or --node-id, to find the ranks")
    _check(NodeId, "--node-id", node_id)
    _check(Identifier, "--pool", options.pool)
    if options.service_url:
        _check(Url, "--service-url", options.service_url)
    run_dir = Path(options.run_dir) if options.run_dir else default_run_dir(node_id, environ)
    run_dir = run_dir.absolute()
    socket_dir = socket_dir_for(run_dir)
    return AgentSettings(
        service_url=options.service_url or "http://127.0.0.1",
        token="" if options.stop_ranks else read_token(options.token_file),
        node_id=node_id,
        slots=_integer("--slots", options.slots, 1, 1_024),
        provider=_provider(options.provider),
        pool=options.pool,
        run_dir=run_dir,
        socket_dir=socket_dir,
        host=options.host,
        secret_places=secret_places(options.job_secrets_dir, options.job_secrets_env),
        tls_ca=check_tls_ca(options.tls_ca),
        job_user=None if options.stop_ranks else job_user(options.job_user, _secret(options, run_dir, socket_dir)),
        peer_port=_integer("--peer-port", options.peer_port, 0, 65_535),
        relay_ports=relay_ports(options.relay_ports),
        device=options.device,
        gpus=() if options.stop_ranks else gpus_of_node(options.device, environ),
        preload=options.preload,
        rank_entry=options.rank_entry,
        store_entry=environ.get("LIVER_AGENT_STORE_ENTRY") or DEFAULT_STORE_ENTRY,
        aws_imds_url=environ.get("LIVER_AGENT_AWS_IMDS_URL") or aws.DEFAULT_URL,
        gcp_metadata_url=environ.get("LIVER_AGENT_GCP_METADATA_URL") or gcp.DEFAULT_URL,
        gcp_notice_s=_integer("LIVER_AGENT_GCP_NOTICE_S", environ.get("LIVER_AGENT_GCP_NOTICE_S", "0"), 0, 3_600),
        notice_interval_s=_seconds(environ, "LIVER_AGENT_NOTICE_INTERVAL_S", aws.INTERVAL_S),
        shutdown_inhibitor=_switch(environ, "LIVER_AGENT_SHUTDOWN"),
        shutdown_s=_seconds(environ, "LIVER_AGENT_SHUTDOWN_S", 25.0),
    )


def _secret(options: argparse.Namespace, run_dir: Path, socket_dir: Path) -> list[Path]:
    """What a job's code must not read."""
    return [Path(options.token_file).absolute(), run_dir, socket_dir]


def _parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    def env(name: str, default: str = "") -> str:
        return environ.get(f"LIVER_AGENT_{name}", default)

    parser = argparse.ArgumentParser(
        prog="liver-agent",
        description="Runs the ranks of this node, watches for spot notices, and moves jobs to other layouts.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"liver-agent {release()}")
    parser.add_argument("--service-url", default=env("SERVICE_URL"), help="where `liver serve` listens")
    parser.add_argument("--token-file", default=env("TOKEN_FILE"), help="file that contains a join token")
    parser.add_argument(
        "--node-id", default=env("NODE_ID"), help="name of this node; unique, and the same at each start"
    )
    parser.add_argument("--slots", default=env("SLOTS", "1"), help="rank processes at a time, one per GPU")
    parser.add_argument(
        "--provider", default=env("PROVIDER", "none"), help="aws, gcp or none: whose notices to watch for"
    )
    parser.add_argument("--pool", default=env("POOL", "default"), help="price and capacity pool of the node")
    parser.add_argument("--run-dir", default=env("RUN_DIR"), help="journal, logs and sockets; one agent per directory")
    parser.add_argument("--host", default=env("HOST", "127.0.0.1"), help="private address for peers, ranks and stores")
    parser.add_argument(
        "--relay-ports",
        default=env("RELAY_PORTS", "0"),
        help="where other machines read state, a port for each open handoff, such as 7400-7415; 0: any free one",
    )
    parser.add_argument("--peer-port", default=env("PEER_PORT", "0"), help="0: a free port, the same at each start")
    parser.add_argument(
        "--device", default=env("DEVICE", "cpu"), help="kind of device of the slots: cpu, or a name of its GPUs"
    )
    parser.add_argument(
        "--preload", default=env("PRELOAD", DEFAULT_PRELOAD), help="modules to import once for all ranks"
    )
    parser.add_argument("--rank-entry", default=env("RANK_ENTRY", DEFAULT_RANK_ENTRY), help=argparse.SUPPRESS)
    parser.add_argument(
        "--job-user", default=env("JOB_USER"), help="user that the code of jobs runs as; needs an agent that is root"
    )
    parser.add_argument(
        "--job-secrets-dir",
        default=env("JOB_SECRETS_DIR"),
        help="folders whose files job files may refer to, by commas",
    )
    parser.add_argument(
        "--job-secrets-env",
        default=env("JOB_SECRETS_ENV"),
        help="variables of the agent that job files may refer to, by commas; HF_* is all that begin so",
    )
    parser.add_argument(
        "--tls-ca", default=env("TLS_CA"), help="certificates (PEM) that an https service is checked against"
    )
    parser.add_argument("--log-level", default=env("LOG_LEVEL", "info"), choices=["debug", "info", "warning", "error"])
    parser.add_argument("--stop-ranks", action="store_true", help="end the ranks of --run-dir and exit")
    return parser


def _check(kind: Any, name: str, value: str) -> None:
    try:
        TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise SettingsError(f"{name} {value!r} {rule_in_words(error.errors()[0])}") from None


def _provider(text: str) -> Provider:
    try:
        return Provider(text)
    except ValueError:
        raise SettingsError(f"--provider must be one of {', '.join(Provider)}, is {text!r}") from None


def _integer(name: str, text: str, least: int, most: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise SettingsError(f"{name} must be a whole number, is {text!r}") from None
    if not least <= value <= most:
        raise SettingsError(f"{name} must be in {least}..{most}, is {value}")
    return value


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        raise SettingsError(f"{name} must be a number of seconds, is {text!r}") from None
    if not 0.05 <= value <= 60.0:
        raise SettingsError(f"{name} must be in 0.05..60, is {value:g}")
    return value


def _switch(environ: Mapping[str, str], name: str) -> bool:
    text = environ.get(name) or "on"
    if text not in ("on", "off"):
        raise SettingsError(f"{name} must be on or off, is {text!r}")
    return text == "on"


def _fail(status: int, text: str) -> int:
    sys.stderr.write(f"liver-agent: {text}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
