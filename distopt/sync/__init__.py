"""The engine: where rank, transport and codec meet the gradients of named parameters."""
