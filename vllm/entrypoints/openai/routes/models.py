# SPDX-License-Identifier: Apache-2.0
"""`/v1/models`."""

from fastapi import APIRouter, Request

from vllm.entrypoints.openai.protocol.models import ModelCard, ModelList
from vllm.entrypoints.openai.state import server_of

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> ModelList:
    """Every served name."""
    return server_of(request).models.list()


@router.get("/v1/models/{name:path}")
async def show_model(request: Request, name: str) -> ModelCard:
    """One served name."""
    return server_of(request).models.card(name)
