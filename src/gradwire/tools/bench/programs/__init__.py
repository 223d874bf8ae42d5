"""What users do, as small whole programs: the same text for torch's RPC and for Gradwire."""

from __future__ import annotations

from ..program import Program
from . import actors, nested, paced, pipeline, residual, serving, training

PROGRAMS: list[Program] = [
    *training.PROGRAMS,
    *pipeline.PROGRAMS,
    *actors.PROGRAMS,
    *serving.PROGRAMS,
    *nested.PROGRAMS,
    *residual.PROGRAMS,
    *paced.PROGRAMS,
]
