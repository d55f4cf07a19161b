"""How many devices a tenant has, and how fast they send together."""

from orchestrator.edge.tenants import TenantDevices


def test_a_tenant_has_as_many_devices_as_it_may_and_no_more() -> None:
    tenants = TenantDevices(most=2, nodes_per_s=10)
    assert [tenants.enter("us", 0.0) for _ in range(3)] == [True, True, False]
    assert tenants.enter("them", 0.0), "another tenant has its own"
    tenants.leave("us")
    assert tenants.enter("us", 1.0)


def test_the_devices_of_a_tenant_share_its_rate() -> None:
    tenants = TenantDevices(most=2, nodes_per_s=1)
    tenants.enter("us", 0.0)
    tenants.enter("us", 0.0)
    tenants.enter("them", 0.0)
    sent = sum(tenants.may_send("us", 10, 0.0) for _ in range(100)) * 10
    assert 0 < sent <= 70
    assert tenants.may_send("them", 10, 0.0)
    assert not tenants.may_send("us", 10, 0.5)
    assert tenants.may_send("us", 10, 60.0)


def test_a_tenant_without_devices_costs_no_memory() -> None:
    tenants = TenantDevices(most=2, nodes_per_s=1)
    for number in range(100):
        tenants.enter(str(number), 0.0)
        tenants.leave(str(number))
    assert not tenants._tenants
