"""The recording rules: ratios and quantiles that dashboards and alerts share.

A level names the labels that are left: `node` is one daemon (job, node, instance), `tenant` one
tenant of a daemon. Set-ups without a `node` label work too: the label is then empty everywhere.
"""

from dataclasses import dataclass

NODE = "job, node, instance"
TENANT = f"{NODE}, tenant"
# Attach calls; the caller closes the braces.
ATTACHES = 'tessera_rpc_requests_total{method="Attach"'
# Codes of calls that cannot succeed on any daemon: a wrong token, another protocol version.
WORKERS_FAULT = "INVALID_ARGUMENT|UNAUTHENTICATED|PERMISSION_DENIED|FAILED_PRECONDITION"


@dataclass(frozen=True)
class Recording:
    record: str
    expr: str
    meaning: str


def share(part, whole, floor="1e-9"):
    """part / whole, and 0 instead of NaN where nothing happened."""
    return f"{part}\n/\nclamp_min({whole}, {floor})"


def refused(window):
    """Refused calls per call: what the objective of 99.9 % is about."""
    return share(f"sum by ({NODE}) (rate(tessera_memory_refusals_total[{window}]))",
                 f"sum by ({NODE}) (rate(tessera_rpc_requests_total[{window}]))")


def quantile(share_of_events, histogram, window="5m"):
    """No sample where there was no event: a quantile of nothing is NaN, which `>= 0` drops."""
    return (f"histogram_quantile({share_of_events},\n"
            f"  sum by ({NODE}, le) (rate({histogram}_bucket[{window}]))) >= 0")


RECORDINGS = (
    Recording(
        "node:tessera_pool_used:ratio",
        share(f"sum by ({NODE}) (tessera_tenant_used_bytes)",
              f"sum by ({NODE}) (tessera_pool_limit_bytes)", floor="1"),
        "Share of a daemon's pool limit that its tenants use; what the watermarks act on."),
    Recording(
        "tenant:tessera_quota_used:ratio",
        f"sum by ({TENANT}) (tessera_tenant_used_bytes)\n/\n"
        f"(sum by ({TENANT}) (tessera_tenant_hard_limit_bytes) > 0)",
        "Share of a tenant's hard limit that it uses; tenants without a limit are left out."),
    Recording(
        "node:tessera_packing_saved:ratio",
        share(f"(\n  sum by ({NODE}) (tessera_packed_bytes_total{{side=\"before\"}})\n"
              f"  - sum by ({NODE}) (tessera_packed_bytes_total{{side=\"after\"}})\n)",
              f"sum by ({NODE}) (tessera_packed_bytes_total{{side=\"before\"}})", floor="1"),
        "Share of the packed tiles' bytes that packing saved since the daemon's start."),
    Recording(
        "tenant:tessera_prefix_tokens_found:ratio_rate5m",
        share(f"sum by ({TENANT}) (rate(tessera_prefix_match_tokens_total{{side=\"found\"}}[5m]))",
              f"sum by ({TENANT}) (rate(tessera_prefix_match_tokens_total{{side=\"asked\"}}[5m]))"),
        "Share of the tokens asked for in Match calls that published prefixes had."),
    Recording(
        "node:tessera_attach_success:ratio_rate1h",
        "1 - " + share(
            f"(\n  sum by ({NODE}) (rate({ATTACHES}}}[1h]))\n"
            f"  - sum by ({NODE}) (rate({ATTACHES}, code=~\"OK|{WORKERS_FAULT}\"}}[1h]))\n)",
            f"sum by ({NODE}) (rate({ATTACHES}}}[1h]))"),
        "Share of Attach calls that did not fail through the daemon's fault. Objective: 99.9 %."),
    Recording("node:tessera_calls_refused:ratio_rate5m", refused("5m"),
              "Calls refused for want of memory, per call. Objective: 0.1 %."),
    Recording("node:tessera_calls_refused:ratio_rate1h", refused("1h"),
              "The same over an hour."),
    Recording("node:tessera_decode_wait_seconds:p99_rate5m",
              quantile("0.99", "tessera_decode_wait_seconds"),
              "99th percentile of the time that a decode step waits. Objective: 1 ms."),
    Recording("node:tessera_restore_seconds:p99_rate5m",
              quantile("0.99", "tessera_restore_seconds"),
              "99th percentile of the time that a restore takes. Objective: 100 ms."),
)
