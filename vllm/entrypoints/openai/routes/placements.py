# SPDX-License-Identifier: Apache-2.0
"""`/placements`: which mixers a supernet's layers use."""

from typing import Any, Literal

from fastapi import APIRouter, Request

from vllm.entrypoints.openai.protocol.base import RequestModel
from vllm.entrypoints.openai.routes.common import body_schema, parse_body
from vllm.entrypoints.openai.state import server_of

router = APIRouter()


class PlacementRequest(RequestModel):
    """A name for every layer, or a short form; `mode` as in `AsyncLLM.change_placement`."""

    placement: str | list[str]
    mode: Literal["wait", "refuse"] = "wait"


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
    ones wait. 400, and nothing changed, for mixers that the model has not, or that do not fit."""
    body = await parse_body(request, PlacementRequest)
    await server_of(request).engine.change_placement(body.placement, body.mode)
    return await get_placements(request)
