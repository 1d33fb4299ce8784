"""Wrong values are refused with a message that names the key."""

import unittest

import chart
import cases

TCP = {"enabled": True, "tls": {"secretName": "s"}}
TENANT = {"name": "a", "token": {"secretName": "s", "key": "k"}}

# What the schema refuses: name -> (values, words of the message).
BY_SCHEMA = {
    "unknown key": ({"poolByte": "8GiB"}, ["poolByte"]),
    "unknown key below": ({"gpu": {"acess": "cdi"}}, ["/gpu", "acess"]),
    "unknown field of the configuration": (
        {"config": {"drainLimit": 1}}, ["/config", "drainLimit"]),
    "field of the configuration that the chart sets": (
        {"config": {"listen": ["unix:/x"]}}, ["/config", "listen"]),
    "decimal unit": ({"poolBytes": "8GB"}, ["/poolBytes"]),
    "unit of Kubernetes": ({"poolBytes": "8Gi"}, ["/poolBytes"]),
    "number without unit": ({"poolBytes": 8589934592}, ["/poolBytes", "string"]),
    "text without unit": ({"hostTierBytes": "4096"}, ["/hostTierBytes"]),
    "negative size": ({"rawCopyBytes": "-1GiB"}, ["/rawCopyBytes"]),
    "size below config": ({"config": {"stagingBytes": "64M"}}, ["/config/stagingBytes"]),
    "seconds for milliseconds": ({"config": {"drainLimitMs": "10s"}}, ["/config/drainLimitMs"]),
    "beyond the limit": (
        {"config": {"compactorThreads": 257}}, ["/config/compactorThreads", "256"]),
    "below the limit": ({"config": {"pinLimitMs": 1}}, ["/config/pinLimitMs", "10"]),
    "level of the log": ({"config": {"logLevel": "verbose"}}, ["/config/logLevel", "debug"]),
    "mode as a number": ({"config": {"unixSocketMode": 432}}, ["/config/unixSocketMode"]),
    "peers by name": ({"config": {"unixPeers": "user:bob"}}, ["/config/unixPeers"]),
    "device": ({"device": "gpu"}, ["/device"]),
    "way to the GPU": ({"gpu": {"access": "privileged"}}, ["/gpu/access", "runtimeClass"]),
    "who prepares the directory": (
        {"socketDirectory": {"prepare": "chown"}}, ["/socketDirectory/prepare", "initContainer"]),
    "root as the daemon's user": ({"socketDirectory": {"uid": 0}}, ["/socketDirectory/uid", "1"]),
    "relative directory": ({"socketDirectory": {"path": "run/x"}}, ["/socketDirectory/path"]),
    "mode of the directory": ({"socketDirectory": {"mode": "rwx"}}, ["/socketDirectory/mode"]),
    "instance without a name": ({"instances": [{"device": "cpu"}]}, ["/instances/0", "name"]),
    "unknown key of an instance": (
        {"instances": [{"name": "a", "pool": "1GiB"}]}, ["/instances/0", "pool"]),
    "wrong configuration of an instance": (
        {"instances": [{"name": "a", "config": {"maxSessions": 0}}]},
        ["/instances/0/config/maxSessions"]),
    "token in the values": ({"tenants": [{"name": "a", "token": "secret"}]}, ["/tenants/0/token"]),
    "token without a key": (
        {"tenants": [{"name": "a", "token": {"secretName": "s"}}]}, ["/tenants/0/token", "key"]),
    "name of a tenant": ({"tenants": [{"name": "Chat"}]}, ["/tenants/0/name"]),
    "port": ({"tcp": {"port": 70000}}, ["/tcp/port", "65,535"]),
    "yes for true": ({"metrics": {"podMonitor": "yes"}}, ["/metrics/podMonitor"]),
    "interval": ({"metrics": {"interval": 30}}, ["/metrics/interval"]),
    "digest": ({"image": {"digest": "latest"}}, ["/image/digest"]),
    "pull policy": ({"image": {"pullPolicy": "Sometimes"}}, ["/image/pullPolicy"]),
    "no pods may be missing": (
        {"updateStrategy": {"maxUnavailable": 0}}, ["/updateStrategy/maxUnavailable"]),
    "name of a namespace": ({"workerNamespaces": ["Team A"]}, ["/workerNamespaces/0"]),
    "a value taken away": ({"poolBytes": None}, ["poolBytes"]),
}

# What the templates refuse.
BY_TEMPLATE = {
    "all GPUs in one daemon": ({"device": "cuda:all"}, ["device", "cuda:all", "instances"]),
    "pool that is no multiple of its extent": (
        {"poolBytes": "100MiB"}, ["poolBytes", "104857600", "64MiB"]),
    "no pool": ({"poolBytes": "0"}, ["poolBytes", "positive"]),
    "raw copies beyond the limit": ({"rawCopyBytes": "2TiB"}, ["rawCopyBytes", "1099511627776"]),
    "extent below the limit": (
        {"config": {"tailExtentBytes": "1KiB"}}, ["tailExtentBytes", "2097152"]),
    "two instances of one name": (
        {"instances": [{"name": "a"}, {"name": "a", "device": "cpu"}]}, ["instances", '"a"']),
    "two instances on one GPU": (
        {"instances": [{"name": "a"}, {"name": "b"}]}, ["instances", "cuda:0"]),
    "instance with the name of other pods": ({"instances": [{"name": "test"}]}, ["instances"]),
    "time to end below the drain": (
        {"config": {"drainLimitMs": 30000}, "terminationGracePeriodSeconds": 30},
        ["terminationGracePeriodSeconds", "drainLimitMs", "36"]),
    "pressure that never ends": (
        {"config": {"pressureLowPercent": 95}}, ["pressureLowPercent", "pressureHighPercent"]),
    "TCP without TLS": ({"tcp": {"enabled": True}}, ["tcp.enabled", "tcp.tls.secretName"]),
    "TLS without TCP": ({"tcp": {"tls": {"secretName": "s"}}}, ["tcp.tls", "tcp.enabled"]),
    "certificate without an issuer": (
        {"tcp": {"enabled": True, "tls": {"certManager": {"enabled": True}}}}, ["issuerRef.name"]),
    "ports that overlap": (
        {"tcp": {**TCP, "port": 9465}, "instances": [{"name": "a", "device": "cpu"},
                                                     {"name": "b", "device": "cpu"}]},
        ["tcp.port", "metrics.port"]),
    "ports beyond the last": (
        {"metrics": {"port": 65535}, "instances": [{"name": "a", "device": "cpu"},
                                                   {"name": "b", "device": "cpu"}]},
        ["metrics.port", "65536"]),
    "two tenants of one name": ({"tenants": [TENANT, {"name": "a"}]}, ["tenants", '"a"']),
    "two tenants with one token": (
        {"tenants": [TENANT, {**TENANT, "name": "b"}]}, ["tenants", '"b"']),
    "soft limit above the hard limit": (
        {"tenants": [{"name": "a", "softLimitBytes": "2GiB", "hardLimitBytes": "1GiB"}]},
        ["softLimitBytes", "hardLimitBytes"]),
    "limit beyond the pool": (
        {"tenants": [{"name": "a", "hardLimitBytes": "9GiB"}]}, ["tenants", "poolBytes"]),
    "directory of the system": ({"socketDirectory": {"path": "/run"}}, ["socketDirectory.path"]),
    "directory that leads elsewhere": (
        {"socketDirectory": {"path": "/run/../etc"}}, ["socketDirectory.path", ".."]),
    "directory that workers cannot search": (
        {"socketDirectory": {"mode": "0710"}}, ["socketDirectory.mode", "0750"]),
    "path that is too long": (
        {"socketDirectory": {"path": "/run/" + "x" * 70}}, ["socketDirectory.path", "101"]),
    "scraped twice": (
        {"metrics": {"podMonitor": True, "serviceMonitor": True}},
        ["metrics.podMonitor", "metrics.serviceMonitor"]),
    "scraped without metrics": (
        {"metrics": {"enabled": False, "podMonitor": True}}, ["metrics.enabled"]),
    "example in a namespace that is not there": (
        {"exampleWorker": {"enabled": True, "volume": "claim"}}, ["workerNamespaces"]),
    "claim in the daemon's namespace": (
        {"workerNamespaces": [chart.NAMESPACE]}, ["workerNamespaces", chart.NAMESPACE]),
    "label that the chart sets": (
        {"podLabels": {"app.kubernetes.io/name": "x"}}, ["podLabels", "app.kubernetes.io/name"]),
}


class Refused(unittest.TestCase):
    def check(self, values, words, options=None):
        done = chart.template(values, **(options or {}))
        self.assertNotEqual(done.returncode, 0, done.stdout[:200])
        for word in words:
            self.assertIn(word, done.stderr)
        return done.stderr

    def test_dra_on_a_version_without_it(self):
        self.check({"gpu": {"access": "dra-admin"}}, ["gpu.access", "1.34"],
                   {"kube_version": "1.32"})

    def test_kubernetes_before_the_oldest(self):
        self.check({}, ["1.28"], {"kube_version": "1.27"})


def add_cases(table, mark):
    for name, (values, words) in table.items():
        def case(self, values=values, words=words):
            self.assertIn(mark, self.check(values, words))
        setattr(Refused, "test_" + "".join(c if c.isalnum() else "_" for c in name), case)


add_cases(BY_SCHEMA, "values don't meet the specifications of the schema")
add_cases(BY_TEMPLATE, "execution error at ")

if __name__ == "__main__":
    cases.main()
