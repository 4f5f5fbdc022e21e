"""How the ranks of an island share a model and its batch, and what they save memory with.

plan      settings to dimensions, or why not     engine    what the trainer drives
ranks     torch's device mesh                    shard     FSDP2 and HSDP
tensor    cut matrix products                    pipeline  stages of layers
context   cut sequences                          memory    checkpointing, compiling, float8
"""

from island.parallel.engine import Engine, Whole, assemble, clip
from island.parallel.plan import Plan, plan

__all__ = ["Engine", "Plan", "Whole", "assemble", "clip", "plan"]
