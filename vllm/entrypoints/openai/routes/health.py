# SPDX-License-Identifier: Apache-2.0
"""Is the server alive, which release is it, how busy is it, and what did it decide by itself."""

from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from vllm.entrypoints.openai.state import server_of
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.expert_metrics import expert_metrics_text, mean_balancedness, total_counts
from vllm.version import __version__

router = APIRouter()


@router.get("/health")
@router.get("/ping")
@router.post("/ping")
async def health(request: Request) -> Response:
    """200 while the engine lives, 503 after its death."""
    try:
        await server_of(request).engine.check_health()
    except EngineDeadError:
        return Response(status_code=HTTPStatus.SERVICE_UNAVAILABLE)
    return Response(status_code=HTTPStatus.OK)


@router.get("/version")
async def version() -> dict[str, str]:
    """The package's version."""
    return {"version": __version__}


@router.get("/load")
async def load(request: Request) -> dict[str, int]:
    """Requests in progress."""
    return {"server_load": server_of(request).load.running}


@router.get("/decisions")
async def list_decisions(request: Request) -> list[dict[str, Any]]:
    """Every automatic choice made since the start, and why."""
    engine = server_of(request).engine
    await engine.learn_decisions()
    return engine.vllm_config.decisions.as_dicts()


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus text."""
    server = server_of(request)
    text = await server.siblings.metrics_text()
    config = server.engine.vllm_config
    if config.observability_config.expert_counts:
        counted = await server.engine.collective_rpc("expert_counts")
        counts = total_counts(counted, config.parallel_config.world_size)
        balancedness = None
        if config.parallel_config.enable_eplb:
            found = await server.engine.collective_rpc("expert_balancedness")
            balancedness = mean_balancedness(found)
        text += expert_metrics_text(counts, config.model_config.served_names[0], balancedness)
    return Response(text, media_type=CONTENT_TYPE_LATEST)
