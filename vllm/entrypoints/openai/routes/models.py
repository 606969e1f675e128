# SPDX-License-Identifier: Apache-2.0
"""The served model: its names, the placement of a supernet, what its experts do."""

from http import HTTPStatus
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel

from vllm.entrypoints.openai.errors import APIError
from vllm.entrypoints.openai.protocol.base import RequestModel
from vllm.entrypoints.openai.routes.common import body_schema, parse_body
from vllm.entrypoints.openai.serving_models import ModelCard, ModelList
from vllm.entrypoints.openai.state import server_of
from vllm.v1.metrics.expert_metrics import imbalance, mean_balancedness, total_counts

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> ModelList:
    """Every served name."""
    return server_of(request).models.list()


@router.get("/v1/models/{name:path}")
async def show_model(request: Request, name: str) -> ModelCard:
    """One served name."""
    return server_of(request).models.card(name)


class PlacementRequest(RequestModel):
    """A name for every layer, or a short form; `mode` as in `AsyncLLM.change_placement`."""

    placement: str | list[str]
    mode: Literal["wait", "refuse", "overlap"] = "wait"


@router.get("/placements")
async def get_placements(request: Request) -> dict[str, Any]:
    """The mixer of each layer that has several, and the names there are; 400 for no supernet."""
    engine = server_of(request).engine
    (placed, *_) = await engine.collective_rpc("get_layer_placements")
    (mixers, *_) = await engine.collective_rpc("get_mixer_names")
    return {"placements": placed, "mixers": list(mixers)}


@router.post("/placements", openapi_extra=body_schema(PlacementRequest))
async def set_placements(request: Request) -> dict[str, Any]:
    """Use other mixers; replies once they are in use. Running requests end with the old ones, new
    ones wait, or start beside them. 400, and nothing changed, for mixers that the model has not, or
    that do not fit; 500, and nothing changed, if weights or memory find no room on the way."""
    body = await parse_body(request, PlacementRequest)
    await server_of(request).siblings.change_placement(body.placement, body.mode)
    return await get_placements(request)


class ExpertLoad(BaseModel):
    """One layer since the start of the engine.

    `tokens [experts]`: how many each routed expert got, those of warm-up and padding left out.
    `imbalance`: the most over the mean, 1 where all got as many; null before the first token.
    """

    layer: str
    tokens: list[int]
    imbalance: float | None


class Balancedness(BaseModel):
    """The mean load of a rank over the largest, the mean of all layers, with the tokens that
    decided the last rearrangement of experts, before and after it."""

    before: float
    after: float


class ExpertLoads(BaseModel):
    """In the order of the layers. `balancedness`: null before experts are rearranged."""

    layers: list[ExpertLoad]
    balancedness: Balancedness | None


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
    balancedness = None
    if engine.vllm_config.parallel_config.enable_eplb:
        found = mean_balancedness(await engine.collective_rpc("expert_balancedness"))
        if found is not None:
            balancedness = Balancedness(before=found[0], after=found[1])
    return ExpertLoads(
        layers=[
            ExpertLoad(layer=layer, tokens=tokens, imbalance=imbalance(tokens))
            for layer, tokens in counts.items()
        ],
        balancedness=balancedness,
    )
