"""A small GRPO engine for one CPU machine: policy server, gateway, warm runners, a readable loss. Scale is verl's."""
