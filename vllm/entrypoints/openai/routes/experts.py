# SPDX-License-Identifier: Apache-2.0
"""How a mixture's tokens are spread over its experts."""

from http import HTTPStatus

from fastapi import APIRouter, Request
from pydantic import BaseModel

from vllm.entrypoints.openai.errors import APIError
from vllm.entrypoints.openai.state import server_of
from vllm.v1.metrics.expert_metrics import imbalance, total_counts

router = APIRouter()


class ExpertLoad(BaseModel):
    """One layer since the start of the engine.

    `tokens [experts]`: how many each routed expert got, those of warm-up and padding left out.
    `imbalance`: the most over the mean, 1 where all got as many; null before the first token.
    """

    layer: str
    tokens: list[int]
    imbalance: float | None


class ExpertLoads(BaseModel):
    """In the order of the layers."""

    layers: list[ExpertLoad]


@router.get("/experts")
async def experts(request: Request) -> ExpertLoads:
    """Tokens per expert and layer; 404 where nothing is counted."""
    engine = server_of(request).engine
    counts: dict[str, list[int]] = {}
    if engine.vllm_config.observability_config.expert_counts:
        counted = await engine.collective_rpc("expert_counts")
        counts = total_counts(counted, engine.vllm_config.parallel_config.world_size)
    if not counts:
        raise APIError(
            HTTPStatus.NOT_FOUND,
            "NotFoundError",
            "no experts are counted: serve a mixture of experts with --expert-counts",
        )
    return ExpertLoads(
        layers=[
            ExpertLoad(layer=layer, tokens=tokens, imbalance=imbalance(tokens))
            for layer, tokens in counts.items()
        ]
    )
