"""How many devices a tenant has connected, and how fast they may send together.

Pure: the caller passes the time. Tenants with nothing connected cost no memory.
"""

from dataclasses import dataclass

from orchestrator.front.quota import MINUTE_S, Bucket


@dataclass(slots=True)
class _Tenant:
    devices: int
    nodes: Bucket


class TenantDevices:
    """The devices of all tenants.

    Args:
        most: the most devices of one tenant at once.
        nodes_per_s: nodes per second that one tenant's devices may send together, as a mean over a minute.
    """

    def __init__(self, most: int, nodes_per_s: int) -> None:
        self._most = most
        self._per_minute = int(nodes_per_s * MINUTE_S)
        self._tenants: dict[str, _Tenant] = {}

    def enter(self, tenant: str, now: float) -> bool:
        """Counts a further device until `leave`; False: the tenant already has as many devices as it may."""
        known = self._tenants.get(tenant)
        if known is None:
            self._tenants[tenant] = _Tenant(1, Bucket(self._per_minute, now))
            return True
        if known.devices >= self._most:
            return False
        known.devices += 1
        return True

    def leave(self, tenant: str) -> None:
        """Counts one device less."""
        known = self._tenants[tenant]
        known.devices -= 1
        if not known.devices:
            del self._tenants[tenant]

    def may_send(self, tenant: str, nodes: int, now: float) -> bool:
        """Whether the tenant's devices may send these nodes now; allowed nodes count against the tenant's
        rate."""
        bucket = self._tenants[tenant].nodes
        if bucket.wait_s(nodes, now) > 0:
            return False
        bucket.take(nodes, now)
        return True
