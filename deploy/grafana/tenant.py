"""The Tenant and policy dashboard: quotas, prefixes and what compression does, by tenant."""

from model import (DAEMONS, RED, TENANTS, YELLOW, Dashboard, Query, bars, graph, stat,
                   tenant_variables)


def rate(metric, by, labels=TENANTS):
    return f"sum by ({by}) (rate({metric}{{{labels}}}[$__rate_interval]))"


def value(metric, by, labels=TENANTS):
    return f"sum by ({by}) ({metric}{{{labels}}})"


def total(metric, labels=TENANTS):
    return f"sum({metric}{{{labels}}}) or vector(0)"


def within_an_hour(metric):
    return f"round(sum(increase({metric}{{{TENANTS}}}[1h]))) or vector(0)"


def per(part, whole, floor):
    return f"{part} / clamp_min({whole}, {floor})"


def overview():
    return (
        stat("Used", "Bytes of the chosen tenants in pools.",
             Query(total("tessera_tenant_used_bytes")), unit="bytes"),
        stat("Fullest quota", "The largest share of a hard limit that is used.",
             Query(f"max(tenant:tessera_quota_used:ratio{{{TENANTS}}}) or vector(0)"),
             unit="percentunit", steps=((0.9, YELLOW), (0.98, RED))),
        stat("Held", "Sequences held now, offloaded ones included.",
             Query(total("tessera_sequences"))),
        stat("Decoding", "Sequences that decode now.",
             Query(total("tessera_sequences", TENANTS + ', state="decoding"'))),
        stat("Offloaded", "Sequences in the host tier.",
             Query(total("tessera_sequences", TENANTS + ', state="offloaded"'))),
        stat("Published", "Prefixes published now.", Query(total("tessera_prefixes"))),
        stat("Refused", "Calls refused for want of memory within an hour.",
             Query(within_an_hour("tessera_memory_refusals_total")),
             steps=((1, YELLOW),)),
        stat("Failed", "Sequences that failed within an hour.",
             Query(within_an_hour("tessera_sequences_failed_total")),
             steps=((1, YELLOW),)),
    )


def quota():
    return (
        bars("Quota used", "Share of the hard limit; the alert is at 98 %.",
             Query(f"max by (tenant) (tenant:tessera_quota_used:ratio{{{TENANTS}}})",
                   "{{tenant}}", instant=True),
             unit="percentunit", minimum=0, maximum=1, steps=((0.9, YELLOW), (0.98, RED))),
        graph("Used and limits", "Bytes used, and the soft and hard limits. Above its soft limit a "
              "tenant's idle memory is reclaimed first.",
              Query(value("tessera_tenant_used_bytes", "tenant"), "{{tenant}} used"),
              Query(value("tessera_tenant_soft_limit_bytes", "tenant"), "{{tenant}} soft limit"),
              Query(value("tessera_tenant_hard_limit_bytes", "tenant"), "{{tenant}} hard limit"),
              unit="bytes"),
        graph("Memory by content", "What the bytes hold.",
              Query(value("tessera_tenant_memory_bytes", "tag"), "{{tag}}"), unit="bytes",
              stack=True),
        graph("Bytes per token", "Tile bytes of a tenant per token of its sequences: what policies "
              "and sharing save. No line: there is no sequence.",
              Query(value("tessera_tenant_memory_bytes", "tenant", TENANTS + ', tag="tiles"')
                    + " / (" + value("tessera_sequence_tokens", "tenant") + " > 0)",
                    "{{tenant}}"), unit="bytes"),
        graph("Sequences", "By state: held, decoding or offloaded.",
              Query(value("tessera_sequences", "tenant, state"), "{{tenant}} {{state}}")),
        graph("Refusals", "Calls refused per second: by the tenant's quota, or because the node "
              "has no room.",
              Query(rate("tessera_memory_refusals_total", "tenant, cause"),
                    "{{tenant}} {{cause}}"), unit="ops"),
    )


def prefixes():
    return (
        graph("Tokens found", "Share of the tokens asked for that published prefixes had.",
              Query("avg by (tenant) (tenant:tessera_prefix_tokens_found:ratio_rate5m"
                    f"{{{TENANTS}}})", "{{tenant}}"), unit="percentunit", maximum=1),
        graph("Prefixes", "Published prefixes.",
              Query(value("tessera_prefixes", "tenant"), "{{tenant}}")),
        graph("Prefix bytes", "Bytes of tiles that prefixes hold; shared tiles count twice.",
              Query(value("tessera_prefix_bytes", "tenant"), "{{tenant}}"), unit="bytes"),
        graph("Tokens asked for", "Prompt tokens per second of Match calls: asked for, and found.",
              Query(rate("tessera_prefix_match_tokens_total", "side"), "{{side}}"), unit="short",
              width=12),
        graph("Failed sequences, revoked pins", "Per second.",
              Query(rate("tessera_sequences_failed_total", "tenant"), "{{tenant}} failed"),
              Query(rate("tessera_pins_revoked_total", "tenant"), "{{tenant}} pins revoked"),
              unit="ops", width=12),
    )


def policies():
    before = value("tessera_policy_bytes_total", "policy", DAEMONS + ', side="before"')
    after = value("tessera_policy_bytes_total", "policy", DAEMONS + ', side="after"')
    return (
        bars("Saved by policy", "Share of its bytes that each policy saved since the daemons' "
             "start.", Query(per(f"({before} - {after})", before, 1), "{{policy}}", instant=True),
             unit="percentunit", minimum=0, maximum=1),
        graph("Bytes by policy", "Bytes per second that each policy took in.",
              Query(rate("tessera_policy_bytes_total", "policy", DAEMONS + ', side="before"'),
                    "{{policy}}"), unit="Bps"),
        graph("Why rows stayed dense", "Attempts per second, by reason.",
              Query(rate("tessera_segments_left_dense_total", "reason", DAEMONS), "{{reason}}"),
              unit="ops"),
        graph("Entries dropped", "Entries per second that token policies dropped or merged.",
              Query(f"sum(rate(tessera_entries_dropped_total{{{DAEMONS}}}[$__rate_interval]))",
                    "dropped"), unit="short", width=12),
        graph("Strategies lost to the budget", "Entries per second that kept the previous "
              "strategy, because the raw-copy budget was spent.",
              Query(f"sum(rate(tessera_raw_rows_dropped_total{{{DAEMONS}}}[$__rate_interval]))",
                    "entries"), unit="short", width=12),
    )


def dashboard():
    board = Dashboard("tessera-tenant", "Tessera / Tenant and policy",
                      "Quotas, prefixes and compression of tenants and policies. Policy panels "
                      "show all tenants.", tenant_variables())
    board.row("Overview", *overview())
    board.row("Quota", *quota())
    board.row("Prefixes and failures", *prefixes())
    board.row("Policies, all tenants", *policies())
    return board
