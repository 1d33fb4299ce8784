"""Runs the rendered pods as a kubelet would: init container, daemon, probes, test pod, the end."""

import argparse
import os
import pathlib
import shutil
import socket
import sys
import tempfile
import time
import unittest

import chart
import cases
import certificates
import kubelet

DEADLINE_S = 30
DAEMON = 65532  # uid and gid; only root can run programs as another user
SMALL = {"device": "cpu", "poolBytes": "256MiB", "hostTierBytes": "64MiB", "rawCopyBytes": "64MiB"}
TENANTS = [{"name": "chat", "token": {"secretName": "tokens", "key": "chat"}},
           {"name": "batch", "token": {"secretName": "tokens", "key": "batch"}}]
UUIDS = [{"name": f"numa{n}", "device": f"CPU-00000000-0000-0000-0000-00000000000{n}"}
         for n in (0, 1)]
SECRETS = {"tokens": {"chat": "a-token\n", "batch": "another-token"}}

programs = None  # where tesserad and tessera are


def free_ports():
    """Two ports that are free now."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(
            ("127.0.0.1", 0)) as other:
        return one.getsockname()[1], other.getsockname()[1]


def volume_of_config(spec):
    return chart.volume(spec, "config")["configMap"]["name"]


class Pods(unittest.TestCase):
    """Pods as processes, which needs neither containers nor root."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="tessera-pod-", dir="/var/tmp")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.folder.chmod(0o755)

    def make_pod(self, spec, name, config_maps, secrets):
        # Other users must reach the programs, wherever the build folder is.
        copies = self.folder / "programs"
        if not copies.exists():
            copies.mkdir(mode=0o755)
            for program in ("tesserad", "tessera"):
                shutil.copy(programs / program, copies / program)
        return kubelet.ProcessPod(spec, self.folder / name, config_maps, secrets, copies)

    def render(self, values):
        is_root = os.geteuid() == 0
        metrics, tcp = free_ports()
        return chart.Rendered({
            **SMALL, "bindAddress": "127.0.0.1", **values,
            "metrics": {"port": metrics, **values.get("metrics", {})},
            "tcp": {"port": tcp, **values.get("tcp", {})},
            "socketDirectory": {"path": str(self.folder / "sockets"),
                                "uid": DAEMON if is_root else os.getuid(),
                                "gid": DAEMON if is_root else os.getgid()}})

    def wait_for(self, pod, part, kind):
        deadline = time.monotonic() + DEADLINE_S
        while True:  # every try is a connection or a process, so this does not spin
            succeeded, said = pod.probe(part, kind)
            if succeeded:
                return
            self.assertTrue(pod.is_running(), pod.log())
            self.assertLess(time.monotonic(), deadline, said + pod.log())

    def start(self, spec, config_maps, secrets):
        """A pod of the daemon that is ready."""
        pod = self.make_pod(spec, volume_of_config(spec), config_maps, secrets)
        self.addCleanup(pod.remove)
        for part in spec["initContainers"]:
            code, said = pod.run(part)
            self.assertEqual(code, 0, said)
        daemon = pod.container("tesserad")
        pod.start(daemon)
        for kind in ("startup", "readiness", "liveness"):
            self.wait_for(pod, daemon, kind)
        address = pod.environment(daemon)["TESSERA_ADDRESS"]  # as by kubectl exec
        code, said = pod.execute(daemon, ["/usr/bin/tessera", "status", f"--address={address}"])
        self.assertEqual(code, 0, said)
        return pod

    def live(self, values, secrets):
        made = self.render(values)
        config_maps = {one["metadata"]["name"]: one["data"] for one in made.all("ConfigMap")}
        pods = [self.start(spec, config_maps, secrets) for spec in made.daemons()]
        for one in made.all("Pod"):
            test = self.make_pod(one["spec"], one["metadata"]["name"], config_maps, secrets)
            self.addCleanup(test.remove)
            code, said = test.run(test.container("worker"))
            self.assertEqual(code, 0, said)
            self.assertIn("mapped", said)
        for pod in pods:
            self.assertEqual(pod.stop(), 0, pod.log())
            self.assertFalse(pod.probe(pod.container("tesserad"), "readiness")[0])

    def test_with_metrics(self):
        self.live({}, {})

    def test_without_metrics(self):
        self.live({"metrics": {"enabled": False}}, {})

    def test_with_tls_and_tokens(self):
        certificate = certificates.make(self.folder)
        self.live({"tenants": TENANTS, "tcp": {"enabled": True, "tls": {"secretName": "tls"}}},
                  {**SECRETS, "tls": certificate})

    def test_two_daemons_in_one_directory(self):
        self.live({"instances": UUIDS, "metrics": {"enabled": False}}, {})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--programs", type=pathlib.Path, required=True)
    options, sys.argv[1:] = parser.parse_known_args()
    programs = options.programs.resolve()
    cases.main()
