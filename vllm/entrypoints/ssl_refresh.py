# SPDX-License-Identifier: Apache-2.0
"""Renewed certificates without a restart."""

import asyncio
import os
import ssl

import uvicorn

from vllm.logger import init_logger

logger = init_logger(__name__)

_INTERVAL_S = 5.0


async def refresh_certificates(config: uvicorn.Config, interval_s: float = _INTERVAL_S) -> None:
    """Load key and certificate again whenever a file changes; a bad pair keeps the old one."""
    certificate, key = str(config.ssl_certfile), str(config.ssl_keyfile)
    seen = _stamp(certificate, key)
    while True:
        await asyncio.sleep(interval_s)
        stamp = _stamp(certificate, key)
        if stamp == seen or config.ssl is None:
            continue
        try:
            config.ssl.load_cert_chain(certificate, key, config.ssl_keyfile_password)
        except (OSError, ssl.SSLError) as error:
            logger.warning("the changed certificate cannot be loaded yet: %s", error)
            continue
        seen = stamp
        logger.info("loaded the changed certificate %s", certificate)


def _stamp(*paths: str) -> tuple[float | None, ...]:
    """Modification times; None for a file that is just being replaced."""
    return tuple(os.stat(p).st_mtime if os.path.exists(p) else None for p in paths)
