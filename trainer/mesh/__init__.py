"""Strategies that divide a model over a mesh: FSDP2, tensor, context and pipeline parallel."""
