"""`moeless serve`: takes its address before anything is loaded, so that clients need not wait for it to appear."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from dataclasses import replace
from importlib.util import find_spec

from moeless.config.serve import ServeConfig
from moeless.errors import MoelessError

log = logging.getLogger("moeless")


def run_serve(config: ServeConfig) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        MoelessError: a package is missing, the port is taken, the model can't be loaded, or all ranks were lost.
    """
    if missing := [name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None]:
        raise MoelessError(f"moeless serve needs {', '.join(missing)}; run: pip install 'moeless[serve]'")
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    logging.getLogger("moeless").setLevel(logging.INFO)
    key = os.environ.get("MOELESS_API_KEY")
    if key:
        config = replace(config, api_key=[*(config.api_key or ()), key])
    listener = _bind(config)
    address = _address(config, listener)
    log.info("listening at %s, loading %s", address, config.model)
    if not config.is_local and not config.api_key:
        log.warning("%s is open to the network and no --api-key is set", config.host)
    from moeless.engine.server.main import serve  # takes seconds

    try:
        asyncio.run(serve(config, listener, address))
    finally:
        listener.close()


def _bind(config: ServeConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
        listener.listen(2_048)
    except (OSError, UnicodeError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise MoelessError(f"cannot listen at {config.host}:{config.port}: {reason}; give another --port") from error
    return listener


def _address(config: ServeConfig, listener: socket.socket) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{listener.getsockname()[1]}"
