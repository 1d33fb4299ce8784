"""The alerts. Each has a section in deploy/docs/runbook.md whose anchor is its name in lower case.

Severities: `critical` wakes somebody, `warning` is for working hours, `info` is for a dashboard.
"""

from dataclasses import dataclass

from recording import NODE

TESSERA_JOBS = '{job=~".*tessera.*"}'
WHERE = "{{ $labels.instance }}{{ with $labels.node }} on node {{ . }}{{ end }}"
TENANT = "tenant {{ $labels.tenant }}"


@dataclass(frozen=True)
class Alert:
    name: str
    severity: str
    wait: str  # Prometheus's "for"
    expr: str
    summary: str
    description: str


ALERTS = (
    Alert("TesseraDown", "critical", "2m",
          f"up{TESSERA_JOBS} == 0",
          f"Prometheus cannot scrape tesserad at {WHERE}.",
          "The daemon has ended, hangs, or its metrics port cannot be reached. Workers of a dead "
          "daemon have lost their caches."),
    Alert("TesseraAbsent", "critical", "5m",
          "absent(tessera_build_info)",
          "No tesserad is scraped at all.",
          "Prometheus has no target that reports tessera_build_info: all daemons are gone, or "
          "their scrape configuration is."),
    Alert("TesseraNotReady", "critical", "3m",
          "tessera_ready == 0\n"
          f"unless on ({NODE}) tessera_draining == 1",
          f"The daemon at {WHERE} is not ready.",
          "The daemon runs, but refuses new sessions although nobody drains it. /readyz says why."),
    Alert("TesseraDrainStuck", "warning", "10m",
          "tessera_draining == 1",
          f"The daemon at {WHERE} has been draining for 10 minutes.",
          "Sessions do not end. The daemon ends them itself after --drain-limit-ms."),
    Alert("TesseraRestarting", "warning", "0m",
          f"changes(process_start_time_seconds{TESSERA_JOBS}[1h]) > 3",
          f"The daemon at {WHERE} restarted {{{{ $value }}}} times within an hour.",
          "Each restart ends all sequences of the node. Its last log lines say why it ended."),
    Alert("TesseraPoolFull", "warning", "10m",
          "node:tessera_pool_used:ratio > 0.95",
          f"The pool of {WHERE} is {{{{ $value | humanizePercentage }}}} full.",
          "Reclaiming does not get below its high watermark. New tokens will be refused soon."),
    Alert("TesseraTenantAtQuota", "warning", "10m",
          # Tenants without a limit of their own are limited by the pool: see TesseraPoolFull.
          "tenant:tessera_quota_used:ratio > 0.98\n"
          f"unless on ({NODE}) node:tessera_pool_used:ratio > 0.95",
          "Tenant {{ $labels.tenant }} uses {{ $value | humanizePercentage }} of its quota "
          f"at {WHERE}.",
          "Further allocations of this tenant are refused, whatever room the node has."),
    Alert("TesseraCallsRefused", "warning", "2m",
          f"sum by ({NODE}, tenant) (increase(tessera_memory_refusals_total[5m])) > 0",
          f"{WHERE} refuses memory to {TENANT}.",
          "Calls failed with RESOURCE_EXHAUSTED within the last five minutes, after all that may "
          "be reclaimed was reclaimed."),
    Alert("TesseraRefusalsBurnBudget", "critical", "2m",
          "node:tessera_calls_refused:ratio_rate5m > 0.0144\n"
          f"and on ({NODE}) node:tessera_calls_refused:ratio_rate1h > 0.0144\n"
          f"and on ({NODE}) sum by ({NODE}) (increase(tessera_memory_refusals_total[1h])) > 10",
          f"{WHERE} refuses {{{{ $value | humanizePercentage }}}} of its calls.",
          "Two days at this rate (14.4 times 0.1 %) use up the refusals that a month is allowed."),
    Alert("TesseraSequencesFailed", "warning", "0m",
          f"sum by ({NODE}, tenant) (increase(tessera_sequences_failed_total[10m])) > 0",
          f"Sequences of {TENANT} failed at {WHERE}.",
          "A worker wrote values that cannot be stored (NaN or infinity). Its results are wrong."),
    Alert("TesseraPinsRevoked", "warning", "5m",
          f"sum by ({NODE}, tenant) (rate(tessera_pins_revoked_total[5m])) > 0.1",
          f"{WHERE} revokes pins of {TENANT}: {{{{ $value | humanize }}}} per second.",
          "Workers hold pins for longer than --pin-limit-ms. Their attention steps fail and are "
          "repeated."),
    Alert("TesseraSessionsLost", "warning", "0m",
          f"sum by ({NODE}) (increase(tessera_session_ends_total{{reason=\"lost\"}}[10m])) > 3",
          f"{WHERE} lost {{{{ $value | humanize }}}} sessions within 10 minutes.",
          "Worker processes die, or their connection breaks. Their sequences are gone."),
    Alert("TesseraCompactionBehind", "warning", "5m",
          f"max by ({NODE}, priority) (tessera_background_oldest_job_seconds) > 30",
          f"Compression at {WHERE} is {{{{ $value | humanizeDuration }}}} behind "
          "({{ $labels.priority }}).",
          "Background threads cannot keep up with the workers; memory use grows meanwhile."),
    Alert("TesseraDecodeWaits", "warning", "5m",
          f"sum by ({NODE}) (rate(tessera_tail_full_waits_total[5m])) > 1",
          f"Decode steps wait at {WHERE}: {{{{ $value | humanize }}}} per second.",
          "Tail rings are full, because the daemon does not absorb tiles fast enough."),
    Alert("TesseraRawCopyBudgetSpent", "info", "10m",
          f"sum by ({NODE}) (rate(tessera_raw_rows_dropped_total[10m])) > 0",
          f"The raw-copy budget of {WHERE} is spent.",
          "Entries keep the strategy of the previous segment, which costs some accuracy. "
          "--raw-copy-bytes is too small for this load."),
    Alert("TesseraTierErrors", "warning", "5m",
          f"sum by ({NODE}, tier) (rate(tessera_tier_errors_total[5m])) > 0",
          f"The {{{{ $labels.tier }}}} tier of {WHERE} reports errors.",
          "Offloads or restores fail. Sequences that cannot be offloaded fill the pool."),
    Alert("TesseraDeviceRetired", "critical", "0m",
          "tessera_device_healthy == 0",
          f"Device {{{{ $labels.device }}}} of {WHERE} is out of service.",
          "The device reported an error that it cannot recover from. The daemon must be restarted "
          "after the device is repaired."),
    Alert("TesseraCertificateExpires", "warning", "1h",
          "tessera_tls_certificate_expiry_timestamp_seconds - time() < 14 * 86400",
          f"The TLS certificate of {WHERE} expires in {{{{ $value | humanizeDuration }}}}.",
          "Workers on other machines cannot connect once it has expired. The daemon reads a "
          "renewed file by itself."),
    Alert("TesseraReloadFailed", "warning", "1m",
          "tessera_config_last_reload_successful == 0",
          f"The daemon at {WHERE} refused its new configuration.",
          "The daemon works with the configuration that it had before. Its log names the field."),
    Alert("TesseraTooManySeries", "info", "15m",
          f"scrape_samples_post_metric_relabeling{TESSERA_JOBS} > 8000",
          f"A scrape of {WHERE} has {{{{ $value }}}} samples.",
          "Each tenant adds about 20 series. Look for tenants that nobody uses."),
)
