"""The values of the chart: name, default, type and meaning of each, in the order of values.yaml.

`generate` makes values.yaml, values.schema.json and the table in the chart's README from it. The
values below `config` come from config.proto, so that they are always the daemon's own.
"""

from dataclasses import dataclass, field

import types_of_values as t

# Fields of the daemon's configuration that are not below `config`, and what sets them.
SET_BY_CHART = {
    "listen": "socketDirectory, tcp",
    "admin_listen": "nothing: it is in a volume of the pod",
    "metrics_address": "metrics",
    "device": "device",
    "pool_bytes": "poolBytes",
    "host_tier_bytes": "hostTierBytes",
    "raw_copy_bytes": "rawCopyBytes",
    "tls_certificate_file": "tcp.tls",
    "tls_key_file": "tcp.tls",
    "tls_client_ca_file": "tcp.tls.clientCa",
    "tenants": "tenants",
    "books": "nothing: the chart mounts no book files",
}


@dataclass
class Value:
    path: str
    default: object
    type: dict
    text: str


@dataclass
class Section:
    title: str
    values: list = field(default_factory=list)


PLACEMENT = {
    "nodeSelector": t.text_map(),
    "tolerations": t.fragments(),
    "affinity": t.fragment(),
}


def instance_type(config_type):
    """One daemon of several: what it does not say is as in the values of the same name."""
    return t.record(
        required=("name",),
        name=t.text("[a-z0-9]([a-z0-9-]{0,18}[a-z0-9])?"),
        device=t.device(),
        poolBytes=t.size(),
        hostTierBytes=t.size(),
        rawCopyBytes=t.size(),
        config=config_type,
        **PLACEMENT,
    )


TENANT = t.record(
    required=("name",),
    name=t.text("[a-z0-9][a-z0-9._-]{0,62}"),
    token=t.record(required=("secretName", "key"), secretName=t.name(), key=t.secret_key()),
    softLimitBytes=t.size(),
    hardLimitBytes=t.size(),
    reservedBytes=t.size(),
    maxSessions=t.integer(0, 4096),
)

GPU_TOLERATION = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
MONITORING = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}


def sections(config_values, config_type):
    return [
        Section("Names and image", [
            Value("nameOverride", "", t.name(empty=True), "Replaces the chart's name in names."),
            Value("fullnameOverride", "", t.name(empty=True),
                  "Replaces the whole name of the chart's objects."),
            Value("image.repository", "localhost/tessera", t.text(".+"),
                  "Where the image is. There is no public one: build it with "
                  "deploy/container/build and push it to your registry."),
            Value("image.tag", "", t.text("[A-Za-z0-9_.-]*"),
                  "Empty: the chart's appVersion followed by -cuda or -cpu, as the device needs."),
            Value("image.digest", "", t.text("(sha256:[0-9a-f]{64})?"),
                  "Pins the image. It takes precedence over the tag."),
            Value("image.pullPolicy", "IfNotPresent", t.choice("Always", "IfNotPresent", "Never"),
                  "When nodes pull the image."),
            Value("imagePullSecrets", [], t.fragments(), "Secrets for the registry."),
        ]),
        Section("The daemon", [
            Value("device", "cuda:0", t.device(),
                  "Where KV is kept: `cpu`, `cuda:N`, or a UUID: a GPU's as nvidia-smi -L prints "
                  "it, or CPU-... of your choice, to have several daemons in the memory of a node. "
                  "One daemon serves one device; for several use `instances`."),
            Value("poolBytes", "8GiB", t.size(),
                  "Memory of the pool, on the device. A multiple of config.poolExtentBytes."),
            Value("hostTierBytes", "4GiB", t.size(),
                  "Host memory for offloaded sequences. \"0\": no offloading."),
            Value("rawCopyBytes", "1GiB", t.size(),
                  "Host memory for rows that wait for compression."),
            Value("instances", [], t.list_of(instance_type(config_type)),
                  "Several daemons, each with its own DaemonSet, socket and metrics port. An item "
                  "has a name and may override device, poolBytes, hostTierBytes, rawCopyBytes, "
                  "config, nodeSelector, tolerations and affinity. Empty: one daemon."),
            Value("tenants", [], t.list_of(TENANT),
                  "Who may attach. An item has a name and may have token.secretName, token.key, "
                  "softLimitBytes, hardLimitBytes, reservedBytes and maxSessions. Empty: the "
                  "tenant \"default\" without a token."),
        ]),
        Section("The daemon's configuration: the fields of DaemonConfig", config_values),
        Section("How workers reach it", [
            Value("socketDirectory.path", "", t.text("(/[A-Za-z0-9._-]+)*"),
                  "Directory on the node for the sockets. Empty: /run/tessera/RELEASE. Two "
                  "releases must not share one."),
            Value("socketDirectory.prepare", "initContainer", t.choice("initContainer", "none"),
                  "initContainer: an init container makes the directory and gives it to the "
                  "daemon's user; it runs as root with CHOWN and FOWNER only. none: you do it on "
                  "each node, for example with tmpfiles.d."),
            Value("socketDirectory.uid", 65532, t.integer(1, 2147483647), "The daemon's user."),
            Value("socketDirectory.gid", 65532, t.integer(1, 2147483647),
                  "The daemon's group. Workers need it in supplementalGroups."),
            Value("socketDirectory.mode", "0750", t.text("0?[0-7]{3,4}"),
                  "Mode of the directory, octal."),
            Value("workerNamespaces", [], t.list_of(t.name()),
                  "Namespaces that forbid hostPath: each gets a read-only PersistentVolumeClaim "
                  "for the directory. They must exist."),
            Value("tcp.enabled", False, t.boolean(),
                  "Also serve workers over TCP. Needs TLS."),
            Value("tcp.port", 7400, t.integer(1, 65535), "Port of the first instance."),
            Value("tcp.from", [], t.fragments(),
                  "NetworkPolicy peers that may connect. Empty: pods of the release's namespace."),
            Value("tcp.tls.secretName", "", t.name(empty=True),
                  "Secret with tls.crt and tls.key, and ca.crt for clientCa."),
            Value("tcp.tls.clientCa", False, t.boolean(),
                  "Require a client certificate that ca.crt signed."),
            Value("tcp.tls.certManager.enabled", False, t.boolean(),
                  "Let cert-manager make the Secret."),
            Value("tcp.tls.certManager.issuerRef", {}, t.record(
                name=t.name(), kind=t.choice("Issuer", "ClusterIssuer"), group=t.text(".+")),
                  "The issuer: name, kind, and group."),
            Value("tcp.tls.certManager.dnsNames", [], t.list_of(t.text(".+")),
                  "Names in the certificate, besides those of the Services."),
        ]),
        Section("GPU", [
            Value("gpu.access", "runtimeClass",
                  t.choice("runtimeClass", "cdi", "dra-admin", "none"),
                  "How the daemon sees the GPUs without claiming one; the chart's README compares "
                  "the ways."),
            Value("gpu.runtimeClassName", "nvidia", t.name(), "For runtimeClass."),
            Value("gpu.visibleDevices", "all", t.text(".+"),
                  "NVIDIA_VISIBLE_DEVICES, for runtimeClass."),
            Value("gpu.cdiDevice", "nvidia.com/gpu=all", t.text("[^=/]+/[^=/]+=.+"),
                  "Name of the CDI device, for cdi."),
            Value("gpu.deviceClassName", "gpu.nvidia.com", t.name(), "For dra-admin."),
            Value("gpu.leaveForDriverUpgrade", True, t.boolean(),
                  "Leave a node while the GPU Operator upgrades its driver."),
            Value("gpu.nodeSelector", {"nvidia.com/gpu.present": "true"}, t.text_map(),
                  "Added to nodeSelector for daemons on a GPU."),
            Value("gpu.tolerations", [GPU_TOLERATION], t.fragments(),
                  "Added to tolerations for daemons on a GPU."),
        ]),
        Section("Monitoring. auto: if the cluster has the custom resource", [
            Value("metrics.enabled", True, t.boolean(),
                  "Serve /metrics, /healthz and /readyz. Without it, probes run `tessera health`."),
            Value("metrics.port", 9464, t.integer(1, 65535),
                  "Port of the first instance; the next has the next port."),
            Value("metrics.from", [MONITORING], t.fragments(),
                  "NetworkPolicy peers that may scrape."),
            Value("metrics.interval", "30s", t.text("[1-9][0-9]*(s|m)"), "Time between scrapes."),
            Value("metrics.labels", {}, t.text_map(),
                  "Labels of the monitor and the rules, as your Prometheus selects them."),
            Value("metrics.podMonitor", "auto", t.switch(), "Make a PodMonitor."),
            Value("metrics.serviceMonitor", False, t.switch(),
                  "Make a ServiceMonitor and a headless Service instead of a PodMonitor."),
            Value("metrics.prometheusRule", "auto", t.switch(),
                  "Make a PrometheusRule with recording rules and alerts."),
            Value("metrics.dashboards.enabled", False, t.boolean(),
                  "Make a ConfigMap for each Grafana dashboard."),
            Value("metrics.dashboards.labels", {"grafana_dashboard": "1"}, t.text_map(),
                  "Labels by which Grafana's sidecar finds them."),
            Value("metrics.dashboards.annotations", {}, t.text_map(),
                  "For example the sidecar's folder annotation."),
        ]),
        Section("Pods", [
            Value("networkPolicy.enabled", True, t.boolean(),
                  "Admit only metrics.from and tcp.from, and no outgoing connection."),
            Value("bindAddress", "0.0.0.0", t.text("[0-9.]+|\\[[0-9a-fA-F:]+\\]"),
                  "Address in the pod on which the metrics and TCP ports listen; \"[::]\" in "
                  "clusters with IPv6."),
            Value("nodeSelector", {}, t.text_map(), "Nodes that get a daemon."),
            Value("tolerations", [], t.fragments(), "Taints that the daemon tolerates."),
            Value("affinity", {}, t.fragment(), "Affinity of the daemon."),
            Value("priorityClassName", "system-node-critical", t.name(empty=True),
                  "Empty: none, for clusters that restrict this class to kube-system."),
            Value("serviceAccountName", "", t.name(empty=True),
                  "Empty: the namespace's default. Its token is never mounted."),
            Value("podAnnotations", {}, t.text_map(), "Added to the daemon's pods."),
            Value("podLabels", {}, t.text_map(), "Added to the daemon's pods."),
            Value("resources.cpuRequest", "1", t.quantity(), "CPU that is reserved."),
            Value("resources.cpuLimit", "", t.quantity(empty=True), "Empty: no limit."),
            Value("resources.memoryOverheadBytes", "512MiB", t.size(),
                  "Memory besides the pool and tiers: the daemon wants 256 MiB for messages and "
                  "256 MiB for the heap. The request and the limit for memory are hostTierBytes + "
                  "rawCopyBytes + this, and poolBytes on a CPU."),
            Value("updateStrategy.maxUnavailable", 1, t.count_or_percent(),
                  "Nodes that are updated at a time. A restart ends the sequences of a node."),
            Value("terminationGracePeriodSeconds", 0, t.integer(0, 7200),
                  "At least config.drainLimitMs and 6 seconds. 0: exactly that."),
            Value("probes.startupSeconds", 120, t.integer(1, 3600),
                  "Time for a daemon to start before it is restarted."),
            Value("probes.livenessSeconds", 30, t.integer(3, 3600),
                  "Time that a daemon may hang before it is restarted."),
            Value("probes.readinessSeconds", 5, t.integer(1, 300),
                  "Time between two checks of readiness."),
        ]),
        Section("Tests and examples", [
            Value("helmTest.enabled", True, t.boolean(),
                  "Make the pods of `helm test`: a worker for each instance."),
            Value("exampleWorker.enabled", False, t.boolean(),
                  "Deploy a synthetic worker, to copy from."),
            Value("exampleWorker.volume", "hostPath", t.choice("hostPath", "claim"),
                  "How it gets the directory. claim: in the first of workerNamespaces, which then "
                  "needs the Secrets of imagePullSecrets and of the first tenant's token, too."),
        ]),
    ]
