"""The verl engine: Ray + FSDP + vLLM through Agent-Lightning, the same code on a CPU, one GPU and several nodes."""
