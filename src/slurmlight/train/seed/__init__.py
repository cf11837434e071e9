"""The seed engine: agentlightning 0.3, verl 0.5 and vLLM 0.10 behind the same contract, for drivers of the 12.x branch."""
