"""A generation engine: continuous batching over pages, the same tokens whatever shares the batch."""

from tilewise.engine.config import EngineConfig
from tilewise.engine.decoding.methods import Speculation
from tilewise.engine.engine import Engine
from tilewise.engine.llm import LLM
from tilewise.engine.params import SamplingParams
from tilewise.engine.request import Completion, Logprob, RequestOutput

__all__ = ["LLM", "Completion", "Engine", "EngineConfig", "Logprob", "RequestOutput", "SamplingParams", "Speculation"]
