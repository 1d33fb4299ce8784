"""The Node dashboard: one daemon, or a few side by side."""

from model import (DAEMONS, RED, YELLOW, Dashboard, Query, daemon_variables, graph, heatmap, stat)

BEFORE, AFTER = ', side="before"', ', side="after"'


def rate(metric, by="", labels=DAEMONS):
    """Events per second of all chosen daemons, by some labels."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({metric}{{{labels}}}[$__rate_interval]))"


def value(metric, by="", labels=DAEMONS):
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} ({metric}{{{labels}}})"


def quantile(share, metric, by=""):
    """No line where nothing happened: the quantile of no event is NaN."""
    grouped = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, {rate(metric + '_bucket', grouped)}) >= 0"


def overview():
    return (
        stat("Ready", "1: the daemon accepts new sessions.",
             Query(f"min(tessera_ready{{{DAEMONS}}}) or vector(0)")),
        stat("Devices", "1: all devices are healthy.",
             Query(f"min(tessera_device_healthy{{{DAEMONS}}}) or vector(0)")),
        stat("Up for", "Time since the newest start.",
             Query(f"time() - max(process_start_time_seconds{{{DAEMONS}}})"), unit="dtdurations"),
        stat("Attached", "Workers that have a session now.", Query(value("tessera_sessions"))),
        stat("Held", "Sequences held now, offloaded ones included.",
             Query(value("tessera_sequences"))),
        stat("Decoding", "Sequences that decode now.",
             Query(value("tessera_sequences", labels=DAEMONS + ', state="decoding"'))),
        stat("Pool used", "Share of the pool limit that tenants use.",
             Query(f"max(node:tessera_pool_used:ratio{{{DAEMONS}}})"), unit="percentunit",
             steps=((0.9, YELLOW), (0.95, RED))),
        stat("Backlog", "How far compression is behind.",
             Query(f"max(tessera_background_oldest_job_seconds{{{DAEMONS}}})"), unit="s",
             steps=((5, YELLOW), (30, RED))),
    )


def memory():
    return (
        graph("Pool", "Bytes that tenants use, bytes reserved for them in whole extents, and the "
              "limit.",
              Query(value("tessera_tenant_used_bytes"), "used"),
              Query(value("tessera_pool_reserved_bytes", "device"), "reserved {{device}}"),
              Query(value("tessera_pool_limit_bytes", "device"), "limit {{device}}"),
              unit="bytes"),
        graph("Pool by content", "What the tenants' pool bytes hold.",
              Query(value("tessera_tenant_memory_bytes", "tag"), "{{tag}}"),
              unit="bytes", stack=True),
        graph("Pool by tenant", "Bytes of each tenant's account, the ten largest.",
              Query(f"topk(10, {value('tessera_tenant_used_bytes', 'tenant')})", "{{tenant}}"),
              unit="bytes", stack=True),
        graph("Host memory for compression", "Raw copies and observations share one budget.",
              Query(value("tessera_raw_copy_bytes"), "raw copies"),
              Query(value("tessera_observation_bytes"), "observations"),
              Query(value("tessera_raw_copy_limit_bytes"), "limit"), unit="bytes"),
        graph("Retired memory", "Bytes that wait for readers before they are freed.",
              Query(value("tessera_epoch_retired_bytes"), "retired"), unit="bytes"),
        graph("Extents", "Extents that the tenants' pools hold.",
              Query(value("tessera_pool_extents", "device"), "{{device}}")),
        graph("Reclaim", "Reclaim steps per second, by rung of the ladder.",
              Query(rate("tessera_pressure_steps_total", "rung"), "{{rung}}"), unit="ops",
              width=12),
        graph("Reclaim attempts", "Attempts per second, by rung and by what came of them.",
              Query(rate("tessera_pressure_climbs_total", "rung, outcome"),
                    "{{rung}}: {{outcome}}"), unit="ops", width=12),
    )


def decoding():
    return (
        graph("Tokens committed", "Tokens per second, by transport.",
              Query(rate("tessera_tokens_committed_total", "transport"), "{{transport}}"),
              unit="short", stack=True),
        heatmap("Decode waits", "How long decode steps waited for a tail ring, in events per "
                "second and bucket.", rate("tessera_decode_wait_seconds_bucket", "le")),
        graph("Waits and revoked pins", "Steps that found a full tail ring, and pins that the "
              "daemon revoked, per second.",
              Query(rate("tessera_tail_full_waits_total"), "ring full"),
              Query(rate("tessera_pins_revoked_total"), "pins revoked"), unit="ops"),
        graph("Sequences", "By state.",
              Query(value("tessera_sequences", "state"), "{{state}}"), stack=True),
        graph("Sessions", "Attached now; begun within five minutes, and ended, by reason.",
              Query(value("tessera_sessions"), "attached"),
              Query(f"sum(increase(tessera_sessions_total{{{DAEMONS}}}[5m]))", "begun"),
              Query(f"sum by (reason) (increase(tessera_session_ends_total{{{DAEMONS}}}[5m]))",
                    "ended: {{reason}}")),
        graph("Attention by the daemon", "Attend and Select calls computed per second.",
              Query(rate("tessera_attend_requests_total"), "attend"),
              Query(rate("tessera_select_requests_total"), "select"), unit="ops"),
    )


def compression():
    return (
        graph("Background jobs waiting", "Queued jobs by priority.",
              Query(value("tessera_background_jobs", "priority", DAEMONS + ', state="queued"'),
                    "{{priority}}")),
        graph("Oldest job", "Age of the oldest queued job; the alert is at 30 s.",
              Query(f"max by (priority) (tessera_background_oldest_job_seconds{{{DAEMONS}}})",
                    "{{priority}}"), unit="s", steps=((30, RED),)),
        graph("Background jobs done", "Jobs per second by priority.",
              Query(rate("tessera_background_jobs_total", "priority"), "{{priority}}"),
              unit="ops"),
        graph("Packed bytes", "Bytes per second before and after packing.",
              Query(rate("tessera_packed_bytes_total", "side"), "{{side}}"), unit="Bps"),
        graph("Saved by policy", "Share of its bytes that each policy saved, since the start.",
              Query(f"({value('tessera_policy_bytes_total', 'policy', DAEMONS + BEFORE)} "
                    f"- {value('tessera_policy_bytes_total', 'policy', DAEMONS + AFTER)}) "
                    "/ clamp_min("
                    f"{value('tessera_policy_bytes_total', 'policy', DAEMONS + BEFORE)}, 1)",
                    "{{policy}}"), unit="percentunit", maximum=1),
        graph("Segments left dense", "Attempts per second that left rows dense, by reason.",
              Query(rate("tessera_segments_left_dense_total", "reason"), "{{reason}}"),
              unit="ops"),
        graph("Tiles", "Tiles written, tiles packed provisionally, snapshots "
              "published, per second.",
              Query(rate("tessera_tiles_encoded_total"), "tiles"),
              Query(rate("tessera_provisional_tiles_total"), "provisional tiles"),
              Query(rate("tessera_snapshots_published_total"), "snapshots"), unit="ops"),
        graph("Segments", "Segments sealed, segments stored dense, strategies computed, per "
              "second.",
              Query(rate("tessera_segments_sealed_total"), "sealed"),
              Query(rate("tessera_segments_stored_dense_total"), "stored dense"),
              Query(rate("tessera_strategies_total"), "strategies"), unit="ops"),
        graph("Entries", "Entries per second that were packed, or dropped by token policies.",
              Query(rate("tessera_entries_packed_total"), "packed"),
              Query(rate("tessera_entries_dropped_total"), "dropped"), unit="ops"),
        graph("Observations", "Bytes per second that workers send for token policies.",
              Query(rate("tessera_observed_bytes_total"), "observed"), unit="Bps"),
        graph("Decisions of token policies", "Per second, counted per layer.",
              Query(rate("tessera_token_choices_total"), "decisions"), unit="ops"),
        graph("Time of token policies", "Cores busy with decisions of token policies.",
              Query(rate("tessera_token_choice_seconds_total"), "cores"), unit="short"),
    )


def tiers():
    return (
        graph("Bytes in tiers", "Bytes of offloaded sequences, by tier.",
              Query(value("tessera_tier_bytes", "tier"), "{{tier}}"),
              Query(value("tessera_host_tier_limit_bytes"), "host limit"), unit="bytes"),
        graph("Moved bytes", "Bytes per second between pool and tiers.",
              Query(rate("tessera_moved_bytes_total", "direction"), "{{direction}}"), unit="Bps"),
        graph("Restores", "Time to bring a sequence back. No line: nothing was restored.",
              Query(quantile("0.5", "tessera_restore_seconds"), "p50"),
              Query(quantile("0.99", "tessera_restore_seconds"), "p99"), unit="s"),
        graph("Tier operations, p99", "Time of reads and writes of a tier. No line: there were "
              "none.",
              Query(quantile("0.99", "tessera_tier_seconds", "tier"), "{{tier}}"), unit="s",
              width=12),
        graph("Tier errors", "Errors per second, by tier; a full tier counts as an error.",
              Query(rate("tessera_tier_errors_total", "tier"), "{{tier}}"), unit="ops", width=12),
    )


def prefixes():
    return (
        graph("Match calls", "Per second, by how much of the prompt was found.",
              Query(rate("tessera_prefix_matches_total", "outcome"), "{{outcome}}"), unit="ops",
              stack=True),
        graph("Published and dropped", "Prefixes per second.",
              Query(rate("tessera_prefixes_published_total", "outcome"), "published: {{outcome}}"),
              Query(rate("tessera_prefixes_dropped_total", "reason"), "dropped: {{reason}}"),
              unit="ops"),
        graph("Waiting for a prefix", "Match calls that wait until another session has computed "
              "the prefix.", Query(value("tessera_prefix_waits"), "waiting now"), width=4),
        graph("Wait for a prefix, p99", "No line: no call waited.",
              Query(quantile("0.99", "tessera_match_wait_seconds"), "p99"), unit="s", width=4),
    )


def calls():
    return (
        graph("Calls", "Calls per second, the twelve busiest methods.",
              Query(f"topk(12, {rate('tessera_rpc_requests_total', 'service, method')})",
                    "{{service}} {{method}}"), unit="ops", width=6),
        graph("Failed calls", "Calls per second that did not end with OK. No line: all did.",
              Query(rate("tessera_rpc_requests_total", "code", DAEMONS + ', code!="OK"'),
                    "{{code}}"), unit="ops", width=6),
        graph("Mean duration", "Mean over the calls of a method, the twelve slowest.",
              Query(f"topk(12, {rate('tessera_rpc_seconds_total', 'service, method')} "
                    "/ clamp_min("
                    f"{rate('tessera_rpc_requests_total', 'service, method')}, 1e-9))",
                    "{{service}} {{method}}"), unit="s", width=6),
        graph("Duration, p99", "By class: hot calls belong to a decode step, bulk calls move data, "
              "admin calls are an operator's. No line: there were none.",
              Query(quantile("0.99", "tessera_rpc_duration_seconds", "class"), "{{class}}"),
              unit="s", width=6),
    )


def process():
    return (
        graph("CPU", "Cores that the daemon uses.",
              Query(rate("process_cpu_seconds_total", "node, instance"), "{{node}} {{instance}}"),
              width=6),
        graph("Resident memory", "Includes the pool on a CPU node. Left: up to the limit of the "
              "machine or its cgroups.",
              Query(value("process_resident_memory_bytes", "node, instance"),
                    "{{node}} {{instance}}"),
              Query(value("tessera_memory_headroom_bytes", "node, instance"),
                    "left {{node}} {{instance}}"), unit="bytes", width=6),
        graph("File descriptors", "Open, and the limit.",
              Query(value("process_open_fds"), "open"),
              Query(value("process_max_fds"), "limit"), width=6),
        graph("Series", "Samples of a scrape; the alert is at 8,000.",
              Query(value("scrape_samples_post_metric_relabeling", "node, instance"),
                    "{{node}} {{instance}}"), width=6),
        stat("Certificate expires in", "No line: TLS is not configured.",
             Query(f"min(tessera_tls_certificate_expiry_timestamp_seconds{{{DAEMONS}}}) - time()"),
             unit="dtdurations", width=6),
        stat("Last reload", "1: the daemon accepted its newest configuration.",
             Query(f"min(tessera_config_last_reload_successful{{{DAEMONS}}})"), width=6),
        stat("Time since the last reload", "Since the newest configuration that was accepted.",
             Query("time() - max(tessera_config_last_reload_success_timestamp_seconds"
                   f"{{{DAEMONS}}})"), unit="dtdurations", width=6),
        stat("Build", "Version, device and kernels.",
             Query(f"tessera_build_info{{{DAEMONS}}}", "{{version}} {{device}} {{isa}}"),
             text="name", width=6),
    )


def dashboard():
    board = Dashboard("tessera-node", "Tessera / Node",
                      "One daemon: memory, decoding, compression, tiers, calls, process.",
                      daemon_variables())
    board.row("Overview", *overview())
    board.row("Memory", *memory())
    board.row("Decoding", *decoding())
    board.row("Compression", *compression())
    board.row("Tiers", *tiers())
    board.row("Prefixes", *prefixes())
    board.row("Calls", *calls())
    board.row("Process", *process())
    return board
