"""verl's group of workers, started without a process that imports torch, vLLM and verl (15 to 40 s) only to name an address."""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from verl.single_controller.ray import RayWorkerGroup


class Group(RayWorkerGroup):
    """verl asks the first node for the ranks' meeting place by a task of its own module, which costs that import."""

    def _get_master_addr_port(self, pg: Any, bundle_index: int = 0, master_port_range: list[int] | None = None) -> None:
        if self._master_addr is None and master_port_range is None:
            place = PlacementGroupSchedulingStrategy(placement_group=pg, placement_group_bundle_index=bundle_index)
            self._master_addr, self._master_port = ray.get(_meeting_place().options(scheduling_strategy=place).remote())
        super()._get_master_addr_port(pg, bundle_index, master_port_range)


def _meeting_place() -> Any:
    def here() -> tuple[str, str]:  # nested: Ray sends its code, where it would send a module's function as an import
        import socket

        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address().strip("[]"), str(probe.getsockname()[1])

    return ray.remote(here)
