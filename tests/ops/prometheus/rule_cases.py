"""When alerts fire, and what recording rules compute.

A scenario belongs to a daemon of its own (label `instance`), so all scenarios of an alert fit into
one run of promtool. Series have one sample a minute, in promtool's notation: "0x10" is eleven
zeros, "0+6x10" rises by 6 a minute, "_x5" are six missing samples.
"""

from dataclasses import dataclass, field

END = 10_000  # a minute after every scenario's end


@dataclass(frozen=True)
class Firing:
    """An alert fires from one minute to another, both included."""

    first: int
    last: int = END
    labels: dict = field(default_factory=dict)  # besides job, node and instance


@dataclass(frozen=True)
class Scenario:
    what: str
    series: dict  # "name{labels}" -> values; job, node and instance are added where missing
    fires: tuple = ()
    plain: bool = False  # a set-up without the label `node`


def case(what, series, *fires, plain=False):
    return Scenario(what, series, fires, plain)


def jump(minute, size, start=0):
    """A counter that rises once."""
    return f"{start}x{minute - 1} {start + size}x300"


def neighbours(name, values, labels=""):
    """The same series of three other daemons, each of which differs in one label."""
    return {f'{name}{{{other}{labels}}}': values
            for other in ('job="tesserad-b"', 'node="elsewhere"', 'instance="neighbour:9464"')}


TENANT_A, CAUSE = {"tenant": "a"}, 'tenant="a", cause="quota"'
DAYS = 14 * 86400


def burn(refused, calls="0+400x300"):
    return {f"tessera_memory_refusals_total{{{CAUSE}}}": refused,
            "tessera_rpc_requests_total": calls}


def burning_neighbours():
    """Three daemons that refused 15 % of their calls for 20 minutes."""
    return {**neighbours("tessera_memory_refusals_total", "0x40 0+60x20 1200x300", ", " + CAUSE),
            **neighbours("tessera_rpc_requests_total", "0+400x300")}


# Their own alerts.
BURNT = tuple(Firing(48, 65, other) for other in (
    {"job": "tesserad-b"}, {"node": "elsewhere"}, {"instance": "neighbour:9464"}))

ALERTS = {
    "TesseraDown": (
        case("does not answer", {"up": "1x4 0x300"}, Firing(7)),
        case("answers again", {"up": "0x10 1x300"}, Firing(2, 10)),
        case("answers", {"up": "1x300"}),
        case("another program's target is down", {'up{job="node-exporter"}': "0x300"}),
        case("without a node label", {"up": "0x300"}, Firing(2), plain=True),
    ),
    "TesseraNotReady": (
        case("not ready", {"tessera_ready": "0x300", "tessera_draining": "0x300"}, Firing(3)),
        case("draining", {"tessera_ready": "0x300", "tessera_draining": "1x300"}),
        case("ready", {"tessera_ready": "1x300", "tessera_draining": "0x300"}),
        case("others drain", {"tessera_ready": "0x300", "tessera_draining": "0x300",
                              **neighbours("tessera_draining", "1x300")}, Firing(3)),
        case("not ready, without a node label",
             {"tessera_ready": "0x300", "tessera_draining": "0x300"}, Firing(3), plain=True),
    ),
    "TesseraDrainStuck": (
        case("drains for long", {"tessera_draining": "0x4 1x20 0x300"}, Firing(15, 25)),
        case("drains shortly", {"tessera_draining": "0x4 1x8 0x300"}),
        case("serves", {"tessera_draining": "0x300"}),
    ),
    "TesseraRestarting": (
        case("four restarts within an hour",
             {"process_start_time_seconds": "1x4 2x14 3x14 4x14 5x300"}, Firing(50, 64)),
        case("three restarts", {"process_start_time_seconds": "1x4 2x4 3x4 4x300"}),
        case("four restarts within two hours",
             {"process_start_time_seconds": "1x9 2x29 3x29 4x29 5x300"}),
        case("another program restarts",
             {'process_start_time_seconds{job="node-exporter"}': "1x1 2x1 3x1 4x1 5x1 6x300"}),
    ),
    "TesseraPoolFull": (
        case("fuller than 95 %", {'tessera_tenant_used_bytes{tenant="a"}': "40x9 46x300",
                                  'tessera_tenant_used_bytes{tenant="b"}': "50x300",
                                  'tessera_pool_limit_bytes{device="cpu"}': "100x300"},
             Firing(20)),
        case("95 %", {'tessera_tenant_used_bytes{tenant="a"}': "95x300",
                      'tessera_pool_limit_bytes{device="cpu"}': "100x300"}),
        case("a peak of ten minutes", {'tessera_tenant_used_bytes{tenant="a"}': "50x9 99x9 50x300",
                                       'tessera_pool_limit_bytes{device="cpu"}': "100x300"}),
        case("fuller than 95 %, without a node label",
             {'tessera_tenant_used_bytes{tenant="a"}': "96x300",
              'tessera_pool_limit_bytes{device="cpu"}': "100x300"}, Firing(10), plain=True),
    ),
    "TesseraTenantAtQuota": (
        case("more than 98 %, in a pool at 95 %",
             {'tessera_tenant_used_bytes{tenant="a"}': "950x300",
              'tessera_tenant_hard_limit_bytes{tenant="a"}': "960x300",
              'tessera_tenant_used_bytes{tenant="b"}': "19x300",
              'tessera_tenant_hard_limit_bytes{tenant="b"}': "1000x300",
              'tessera_pool_limit_bytes{device="cpu"}': "1020x300",
              **neighbours("tessera_tenant_used_bytes", "99x300", ', tenant="a"'),
              **neighbours("tessera_pool_limit_bytes", "100x300", ', device="cpu"')},
             Firing(10, labels=TENANT_A)),
        case("98 %", {'tessera_tenant_used_bytes{tenant="a"}': "980x300",
                      'tessera_tenant_hard_limit_bytes{tenant="a"}': "1000x300",
                      'tessera_pool_limit_bytes{device="cpu"}': "4000x300"}),
        case("no limit", {'tessera_tenant_used_bytes{tenant="a"}': "980x300",
                          'tessera_tenant_hard_limit_bytes{tenant="a"}': "0x300"}),
        case("the pool is full", {'tessera_tenant_used_bytes{tenant="a"}': "990x300",
                                  'tessera_tenant_hard_limit_bytes{tenant="a"}': "1000x300",
                                  'tessera_pool_limit_bytes{device="cpu"}': "1000x300"}),
    ),
    "TesseraCallsRefused": (
        case("one refusal", {f"tessera_memory_refusals_total{{{CAUSE}}}": jump(10, 1),
                             'tessera_memory_refusals_total{tenant="b", cause="node"}': "0x300"},
             Firing(12, 14, TENANT_A)),
        case("refusals long ago", {f"tessera_memory_refusals_total{{{CAUSE}}}": "7x300"}),
    ),
    # With 400 calls a minute, 1.44 % are 28.8 refusals in five minutes and 345.6 in an hour.
    "TesseraRefusalsBurnBudget": (
        case("1.5 % all the time", burn("0+6x300"), Firing(4)),
        case("1.44 % all the time", burn("0+180x300", "0+12500x300")),
        case("1.44 % now, more within the hour",
             burn("0x9 180+360x30 11160+180x300", "0+12500x300"), Firing(22, 44)),
        case("1.4 % now, more within the hour", burn("0x9 0+12x30 365.6+5.6x300"),
             Firing(22, 44)),
        case("more now, 1.44 % within the hour",
             burn("0x99 10800x300", "0+12500x300")),
        case("more now, 1.4 % within the hour", burn(jump(100, 336))),
        case("3 % for half an hour", burn("0x99 0+12x30 360x300"), Firing(131, 132)),
        case("ten of few calls", burn(jump(100, 10), "0+1x300")),
        case("eleven of few calls", burn(jump(100, 11), "0+1x300"), Firing(102, 104)),
        case("ten of few calls within the hour, as many before it",
             burn("0x39 10x60 20x300", "0+1x300")),
        case("eleven of few calls, spread over the hour",
             burn("0x39 9x39 11x300", "0+1x300"), Firing(82, 84)),
        case("other daemons refused more within the hour",
             {**burn(jump(100, 336)), **burning_neighbours()}, *BURNT),
        case("other daemons refused more than ten",
             {**burn(jump(100, 10), "0+1x300"), **burning_neighbours()}, *BURNT),
    ),
    "TesseraSequencesFailed": (
        case("one failed", {'tessera_sequences_failed_total{tenant="a"}': jump(10, 1)},
             Firing(10, 19, TENANT_A)),
        case("failed long ago", {'tessera_sequences_failed_total{tenant="a"}': "3x300"}),
    ),
    "TesseraPinsRevoked": (
        case("more than one in ten seconds",
             {'tessera_pins_revoked_total{tenant="a"}': "0x9 6.3+6.3x300"},
             Firing(19, END, TENANT_A)),
        case("one in ten seconds", {'tessera_pins_revoked_total{tenant="a"}': "0+6x300"}),
        case("many at once", {'tessera_pins_revoked_total{tenant="a"}': jump(10, 500)}),
    ),
    "TesseraSessionsLost": (
        case("four lost", {'tessera_session_ends_total{reason="lost"}': jump(10, 4)},
             Firing(10, 19)),
        case("three lost", {'tessera_session_ends_total{reason="lost"}': jump(10, 3)}),
        case("many closed", {'tessera_session_ends_total{reason="closed"}': "0+10x300",
                             'tessera_session_ends_total{reason="lost"}': "0x300"}),
    ),
    "TesseraCompactionBehind": (
        case("31 s behind",
             {'tessera_background_oldest_job_seconds{priority="seals"}': "0x9 30.5x9 0x300",
              'tessera_background_oldest_job_seconds{priority="tails"}': "0x300"},
             Firing(15, 19, {"priority": "seals"})),
        case("30 s behind", {'tessera_background_oldest_job_seconds{priority="seals"}': "30x300"}),
        case("behind for four minutes",
             {'tessera_background_oldest_job_seconds{priority="seals"}': "0x9 90x4 0x300"}),
    ),
    "TesseraDecodeWaits": (
        case("more than one a second", {"tessera_tail_full_waits_total": "0x9 61+61x300"},
             Firing(19)),
        case("one a second", {"tessera_tail_full_waits_total": "0+60x300"}),
        case("many at once", {"tessera_tail_full_waits_total": jump(10, 5000)}),
    ),
    "TesseraRawCopyBudgetSpent": (
        case("rows lose their strategy", {"tessera_raw_rows_dropped_total": "0x9 1+1x30 31x300"},
             Firing(20, 49)),
        case("once", {"tessera_raw_rows_dropped_total": jump(10, 500)}),
        case("long ago", {"tessera_raw_rows_dropped_total": "900x300"}),
    ),
    "TesseraTierErrors": (
        case("errors go on", {'tessera_tier_errors_total{tier="host"}': "0x9 1+1x9 10x300"},
             Firing(15, 23, {"tier": "host"})),
        case("one error", {'tessera_tier_errors_total{tier="host"}': jump(10, 1)}),
        case("long ago", {'tessera_tier_errors_total{tier="host"}': "5x300"}),
    ),
    "TesseraDeviceRetired": (
        case("retired", {'tessera_device_healthy{device="cuda:0"}': "1x4 0x300",
                         'tessera_device_healthy{device="cuda:1"}': "1x300"},
             Firing(5, labels={"device": "cuda:0"})),
    ),
    "TesseraCertificateExpires": (
        # The clock of a scenario starts at 0; below 14 days from minute 61 on.
        case("14 days and an hour",
             {"tessera_tls_certificate_expiry_timestamp_seconds": f"{DAYS + 3600}x300"},
             Firing(121)),
        case("a little less",
             {"tessera_tls_certificate_expiry_timestamp_seconds": f"{DAYS + 3590}x300"},
             Firing(120)),
        case("far away", {"tessera_tls_certificate_expiry_timestamp_seconds": f"{5 * DAYS}x300"}),
        case("renewed", {"tessera_tls_certificate_expiry_timestamp_seconds":
                         f"{DAYS}x30 {9 * DAYS}x300"}),
    ),
    "TesseraReloadFailed": (
        case("refused", {"tessera_config_last_reload_successful": "1x4 0x5 1x300"}, Firing(6, 10)),
        case("accepted", {"tessera_config_last_reload_successful": "1x300"}),
    ),
    "TesseraTooManySeries": (
        case("8,001", {"scrape_samples_post_metric_relabeling": "8001x30 400x300"},
             Firing(15, 30)),
        case("8,000", {"scrape_samples_post_metric_relabeling": "8000x300"}),
        case("another program has many",
             {'scrape_samples_post_metric_relabeling{job="node-exporter"}': "90000x300"}),
    ),
}
