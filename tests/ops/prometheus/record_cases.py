"""What recording rules compute: a busy daemon, and one where nothing happened."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RecordCase:
    what: str
    series: dict  # "name{labels}" -> values; job, node and instance are added where missing
    minute: int
    samples: tuple  # (labels besides job, node and instance, value)


def busy_and_idle(busy, minute, value, idle_value, labels=None):
    """`busy` gives `value`; the same series without a change give `idle_value` (None: nothing)."""
    idle = {name: "0x300" for name in busy}
    return (RecordCase("busy", busy, minute, ((labels or {}, value),)),
            RecordCase("idle", idle, minute,
                       () if idle_value is None else ((labels or {}, idle_value),)))


FIVE_MINUTES, HOUR = 20, 120  # when the windows below are full


def once(size, window):
    """A counter that rises once, in the newer half of the window, but not in its newest quarter."""
    before = 16 if window == FIVE_MINUTES else 99
    return f"0x{before} {size}x300"


def histogram(name):
    """300 events of at most 1 s within the last five minutes; others of 2 s were earlier."""
    return {f'{name}_bucket{{le="1"}}': "0x16 300x300",
            f'{name}_bucket{{le="2"}}': "0x10 300x5 600x300",
            f'{name}_bucket{{le="+Inf"}}': "0x10 300x5 600x300"}


RECORDS = {
    "node:tessera_pool_used:ratio": (
        RecordCase("two tenants", {'tessera_tenant_used_bytes{tenant="a"}': "30x300",
                                   'tessera_tenant_used_bytes{tenant="b"}': "45x300",
                                   'tessera_pool_limit_bytes{device="cpu"}': "100x300"},
                   5, (({}, 0.75),)),
        RecordCase("two devices", {'tessera_tenant_used_bytes{tenant="a"}': "30x300",
                                   'tessera_pool_limit_bytes{device="cuda:0"}': "60x300",
                                   'tessera_pool_limit_bytes{device="cuda:1"}': "60x300"},
                   5, (({}, 0.25),)),
        RecordCase("no limit known", {'tessera_tenant_used_bytes{tenant="a"}': "0x300",
                                      'tessera_pool_limit_bytes{device="cpu"}': "0x300"},
                   5, (({}, 0),)),
    ),
    "tenant:tessera_quota_used:ratio": (
        RecordCase("one with a limit, one without",
                   {'tessera_tenant_used_bytes{tenant="a"}': "30x300",
                    'tessera_tenant_used_bytes{tenant="b"}': "45x300",
                    'tessera_tenant_hard_limit_bytes{tenant="a"}': "40x300",
                    'tessera_tenant_hard_limit_bytes{tenant="b"}': "0x300"},
                   5, (({"tenant": "a"}, 0.75),)),
        RecordCase("the smallest limit", {'tessera_tenant_used_bytes{tenant="a"}': "1x300",
                                          'tessera_tenant_hard_limit_bytes{tenant="a"}': "1x300"},
                   5, (({"tenant": "a"}, 1),)),
    ),
    "node:tessera_packing_saved:ratio": busy_and_idle(
        {'tessera_packed_bytes_total{side="before"}': "400x300",
         'tessera_packed_bytes_total{side="after"}': "100x300"}, 5, 0.75, 0),
    "tenant:tessera_prefix_tokens_found:ratio_rate5m": busy_and_idle(
        {'tessera_prefix_match_tokens_total{tenant="a", side="asked"}': once(1200, FIVE_MINUTES),
         'tessera_prefix_match_tokens_total{tenant="a", side="found"}': once(300, FIVE_MINUTES)},
        FIVE_MINUTES, 0.25, 0, {"tenant": "a"}),
    "node:tessera_attach_success:ratio_rate1h": busy_and_idle(
        {'tessera_rpc_requests_total{method="Attach", code="OK"}': once(1800, HOUR),
         'tessera_rpc_requests_total{method="Attach", code="UNAUTHENTICATED"}': once(900, HOUR),
         'tessera_rpc_requests_total{method="Attach", code="INTERNAL"}': once(900, HOUR),
         'tessera_rpc_requests_total{method="Append", code="OK"}': "0+600x300"},
        HOUR, 0.75, 1),
    "node:tessera_calls_refused:ratio_rate5m": busy_and_idle(
        {'tessera_memory_refusals_total{tenant="a", cause="quota"}': once(150, FIVE_MINUTES),
         'tessera_memory_refusals_total{tenant="b", cause="node"}': once(150, FIVE_MINUTES),
         "tessera_rpc_requests_total": once(1200, FIVE_MINUTES)}, FIVE_MINUTES, 0.25, 0),
    "node:tessera_calls_refused:ratio_rate1h": busy_and_idle(
        {'tessera_memory_refusals_total{tenant="a", cause="quota"}': once(3600, HOUR),
         "tessera_rpc_requests_total": once(14400, HOUR)}, HOUR, 0.25, 0),
    "node:tessera_decode_wait_seconds:p99_rate5m": busy_and_idle(
        histogram("tessera_decode_wait_seconds"), FIVE_MINUTES, 0.99, None),
    "node:tessera_restore_seconds:p99_rate5m": busy_and_idle(
        histogram("tessera_restore_seconds"), FIVE_MINUTES, 0.99, None),
}
