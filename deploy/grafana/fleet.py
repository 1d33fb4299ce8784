"""The Fleet dashboard: all daemons at a glance."""

from model import (DAEMON, DAEMONS, GREEN, GREY, RED, YELLOW, Dashboard, Query, bars,
                   daemon_variables, graph, stat, states, table)

NODE = "job, node, instance"


def total(metric, labels=DAEMONS):
    return f"sum({metric}{{{labels}}}) or vector(0)"


def per_daemon(metric):
    return f"sum by (node, instance) ({metric}{{{DAEMONS}}})"


def health():
    return (
        stat("Daemons up", "Daemons that Prometheus can scrape.",
             Query(f"sum(up{{{DAEMONS}}}) or vector(0)")),
        stat("Daemons down", "Targets that do not answer.",
             Query(f"count(up{{{DAEMONS}}} == 0) or vector(0)"), steps=((1, RED),)),
        stat("Not ready", "Daemons that refuse new sessions, draining ones among them.",
             Query(f"count(tessera_ready{{{DAEMONS}}} == 0) or vector(0)"), steps=((1, YELLOW),)),
        stat("Draining", "Daemons that drain.",
             Query(total("tessera_draining")), steps=((1, YELLOW),)),
        stat("Alerts", "Alerts of Tessera that are firing, of any severity.",
             Query('count(ALERTS{alertname=~"Tessera.*", alertstate="firing"}) or vector(0)'),
             steps=((1, RED),)),
        stat("Sessions", "Attached workers.", Query(total("tessera_sessions"))),
        stat("Sequences", "Sequences held, offloaded ones included.",
             Query(total("tessera_sequences"))),
        stat("Tokens per second", "Tokens committed by all workers.",
             Query(f"sum(rate(tessera_tokens_committed_total{{{DAEMONS}}}[$__rate_interval])) "
                   "or vector(0)"), unit="short"),
        states("Readiness", "Whether each daemon accepts new sessions.",
               Query(f"sum by ({NODE}) (tessera_ready{{{DAEMONS}}}) "
                     f"- sum by ({NODE}) (tessera_draining{{{DAEMONS}}})", DAEMON),
               {1: ("ready", GREEN), 0: ("not ready", RED), -1: ("draining", YELLOW)}, width=12),
        table("Daemons", "The newest values of each daemon.", (
            ("Pool used", per_daemon("tessera_tenant_used_bytes"), "bytes"),
            ("Pool limit", per_daemon("tessera_pool_limit_bytes"), "bytes"),
            ("Sessions", per_daemon("tessera_sessions"), "short"),
            ("Sequences", per_daemon("tessera_sequences"), "short"),
            ("Up for", "time() - max by (node, instance) (process_start_time_seconds"
             f"{{{DAEMONS}}})", "dtdurations"),
        ), key=("node", "instance"), width=12),
    )


def capacity():
    return (
        graph("Pool used", "Share of each daemon's pool limit that tenants use; the alert is at "
              "95 %.",
              Query(f"node:tessera_pool_used:ratio{{{DAEMONS}}}", DAEMON),
              unit="percentunit", maximum=1, steps=((0.95, RED),)),
        graph("Pool of all daemons", "Bytes that tenants use, bytes reserved for them in "
              "whole extents, and the limit.",
              Query(total("tessera_tenant_used_bytes"), "used"),
              Query(total("tessera_pool_reserved_bytes"), "reserved"),
              Query(total("tessera_pool_limit_bytes"), "limit"), unit="bytes"),
        graph("Host tier of all daemons", "Bytes of offloaded sequences and the limit.",
              Query(total("tessera_tier_bytes", DAEMONS + ', tier="host"'), "used"),
              Query(total("tessera_host_tier_limit_bytes"), "limit"), unit="bytes"),
        bars("Tenants nearest to their quota", "Used share of the hard limit, the ten largest.",
             Query(f"topk(10, tenant:tessera_quota_used:ratio{{{DAEMONS}}})",
                   "{{tenant}} {{node}} {{instance}}", instant=True),
             unit="percentunit", minimum=0, maximum=1, steps=((0.9, YELLOW), (0.98, RED))),
        graph("Reclaimed under pressure", "Reclaim steps per second: prefixes and sequences "
              "offloaded, prefixes dropped, segments re-encoded.",
              Query(f"sum by (rung) (rate(tessera_pressure_steps_total{{{DAEMONS}}}"
                    "[$__rate_interval]))", "{{rung}}"), unit="ops"),
        graph("Moves to and from the host tier", "Sequences moved per second.",
              Query(f"sum by (direction) (rate(tessera_moves_total{{{DAEMONS}}}"
                    "[$__rate_interval]))", "{{direction}}"), unit="ops"),
    )


def service_levels():
    return (
        graph("Calls refused", "Calls refused for want of memory, per call, over an hour. "
              "Objective: at most 0.1 %.",
              Query(f"node:tessera_calls_refused:ratio_rate1h{{{DAEMONS}}}", DAEMON),
              unit="percentunit", steps=((0.001, RED),), width=6),
        graph("Attach success", "Attach calls that did not fail through the daemon's fault, over "
              "an hour. Objective: at least 99.9 %.",
              Query(f"node:tessera_attach_success:ratio_rate1h{{{DAEMONS}}}", DAEMON),
              unit="percentunit", minimum=None, maximum=1, width=6),
        graph("Decode wait, p99", "Time that a decode step waits for the daemon. No line: no step "
              "waited. Objective: at most 1 ms.",
              Query(f"node:tessera_decode_wait_seconds:p99_rate5m{{{DAEMONS}}}", DAEMON),
              unit="s", steps=((0.001, RED),), width=6),
        graph("Restore, p99", "Time to bring an offloaded sequence back. No line: nothing was "
              "restored. Objective: at most 100 ms.",
              Query(f"node:tessera_restore_seconds:p99_rate5m{{{DAEMONS}}}", DAEMON),
              unit="s", steps=((0.1, RED),), width=6),
        graph("Refusals by tenant", "Calls refused per second, the ten worst tenants.",
              Query("topk(10, sum by (tenant) (rate(tessera_memory_refusals_total"
                    f"{{{DAEMONS}}}[$__rate_interval])))", "{{tenant}}"), unit="ops", width=12),
        graph("Sessions lost, sequences failed", "Events within five minutes.",
              Query("sum(increase(tessera_session_ends_total"
                    f"{{{DAEMONS}, reason=\"lost\"}}[5m])) or vector(0)", "sessions lost"),
              Query(f"sum(increase(tessera_sequences_failed_total{{{DAEMONS}}}[5m])) or vector(0)",
                    "sequences failed"), width=12),
    )


def effect():
    return (
        graph("Prompt tokens found", "Share of the tokens asked for that published prefixes had.",
              Query("avg by (node, instance) (tenant:tessera_prefix_tokens_found:ratio_rate5m"
                    f"{{{DAEMONS}}})", DAEMON), unit="percentunit", maximum=1),
        graph("Saved by packing", "Share of the packed tiles' bytes that packing saved, since each "
              "daemon's start.",
              Query(f"node:tessera_packing_saved:ratio{{{DAEMONS}}}", DAEMON),
              unit="percentunit", maximum=1),
        graph("Compression backlog", "Age of the oldest background job.",
              Query("max by (node, instance) (tessera_background_oldest_job_seconds"
                    f"{{{DAEMONS}}})", DAEMON), unit="s", steps=((30, RED),)),
    )


def dashboard():
    board = Dashboard("tessera-fleet", "Tessera / Fleet",
                      "All daemons: health, capacity, service levels.", daemon_variables())
    board.row("Health", *health())
    board.row("Capacity", *capacity())
    board.row("Service levels", *service_levels())
    board.row("What sharing and compression save", *effect())
    return board
