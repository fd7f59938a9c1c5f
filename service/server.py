"""Runs the service until a signal ends it. The `liver serve` command is a thin layer over `serve`."""

import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from ipaddress import IPv6Network
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from liver_core.installation import release
from liver_core.systemd_notify import take_service_manager
from service.app import create_app
from service.db.engine import StartError, check_data_dir
from service.edge.timed_http import TimedHttpProtocol
from service.settings import Network, ServiceSettings

_log = logging.getLogger(__name__)
STOP_S = 5
"""How long open streams have to end."""
KEEP_ALIVE_S = 30
TURN_S = 0.001
"""How long a thread computes while others wait for the interpreter, at most. An answer is handed over between threads
several times; by default each of these turns takes 5 ms while a reconciler computes."""
COLLECTS_AFTER = 10_000, 20, 50
"""Objects more than there were until the young ones are looked through; how often that is done until those that it has
left are, and how often that until all are. By default (700, 10, 10) requests alone cause a full collection every few
seconds: nobody is answered for 30 ms beside 48 agents, and for longer beside more."""


def serve(settings: ServiceSettings, *, say: Callable[[str], None] = _log.info) -> None:
    """Serve until SIGINT or SIGTERM. Raises StartError: port in use, data directory not writable or full, database
    unreachable; then nothing is left running. `say` is called with the address and the token files at the start."""
    check_data_dir(settings.resolved_data_dir())
    _check_tls(settings)
    # The port comes first, so that a second service on the same port starts and writes nothing.
    listener = bind(settings.host, settings.port)
    with listener, _in_short_turns():
        manager = take_service_manager(os.environ)
        app = create_app(settings, manager=manager)
        host, port = listener.getsockname()[:2]
        config = config_of(app, settings)
        config.load()
        server = uvicorn.Server(config)
        app.state.context.hub.end_streams_with(lambda: server.should_exit)
        with _ended_by_signals(server), without_looking_for_garbage_in_what_is_loaded():
            url = f"{'https' if settings.tls_certificate else 'http'}://{host}:{port}"
            for line in announcement(url, settings.resolved_data_dir()):
                say(line)
            _log.info("liver %s serves %s", release(), url)
            server.run(sockets=[listener])


@contextlib.contextmanager
def _in_short_turns() -> Iterator[None]:
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(TURN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(usual_s)


@contextlib.contextmanager
def without_looking_for_garbage_in_what_is_loaded() -> Iterator[None]:
    """Modules, models, routes and mappings stay as long as the process. Each full collection would look through all of
    them, and nobody is answered meanwhile."""
    usual = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTS_AFTER)
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*usual)


def config_of(app: FastAPI, settings: ServiceSettings) -> uvicorn.Config:
    """How the application is served. A caller's address is that of the connection, unless a trusted proxy opened it:
    by default uvicorn would believe whoever connects from loopback."""
    return uvicorn.Config(
        app,
        http=TimedHttpProtocol,
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=[str(item) for network in settings.trusted_proxies for item in _as_seen(network)],
        timeout_graceful_shutdown=STOP_S,
        timeout_keep_alive=KEEP_ALIVE_S,
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
    )


def _as_seen(network: Network) -> tuple[Network, ...]:
    """The network, and how a socket that listens on `::` names those of it that connect over IPv4."""
    if network.version == 6:
        return (network,)
    return network, IPv6Network(f"::ffff:{network.network_address}/{96 + network.prefixlen}")


@contextlib.contextmanager
def _ended_by_signals(server: uvicorn.Server) -> Iterator[None]:
    """SIGTERM and SIGINT end the server, also before it runs. uvicorn sends such a signal again once it has ended; by
    default that would kill the process, as if it had failed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        server.should_exit = True

    kept = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises StartError naming address and port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1_024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise StartError(
                f"port {port} on {host} is in use: stop what listens there or choose another --port"
            ) from error
        raise StartError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    return listener


def _check_tls(settings: ServiceSettings) -> None:
    """Raises StartError for a certificate that cannot be served."""
    if settings.tls_certificate is None or settings.tls_key is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_certificate, settings.tls_key)
    except OSError as error:
        raise StartError(
            f"--tls-certificate {settings.tls_certificate} with --tls-key {settings.tls_key} cannot be used: "
            f"{error.strerror or error}"
        ) from error


def announcement(url: str, data_dir: Path) -> tuple[str, ...]:
    """What a person needs to know once the service is up. Token files are named if they are there: another service on
    the same database may have made the tokens, or somebody has put the files away. Their content is never shown."""
    files = {
        "token for people and scripts:": data_dir / "tokens" / "operator.token",
        "token for nodes that join:   ": data_dir / "tokens" / "join.token",
        "token for admins:            ": data_dir / "tokens" / "admin.token",
    }
    return (f"service: {url}", *(f"{what} {path}" for what, path in files.items() if path.exists()))
