"""Every values file renders to objects that Kubernetes accepts."""

import functools
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import chart
import cases
import kubernetes_validate

# Versions without resource.k8s.io/v1, for which the chart refuses gpu.access: dra-admin.
BEFORE_DRA = ("1.28", "1.32")


@functools.cache
def models():
    """(apiVersion, kind) -> model of each custom resource of the chart."""
    from cloudcoil.models.cert_manager import v1 as cert_manager
    from cloudcoil.models.prometheus_operator import v1 as prometheus
    found = {("cert-manager.io/v1", "Certificate"): cert_manager.Certificate}
    for kind in ("PodMonitor", "ServiceMonitor", "PrometheusRule"):
        found["monitoring.coreos.com/v1", kind] = getattr(prometheus, kind)
    return found


def lost(given, kept, path=""):
    """The keys that a model ignored: those that its resource does not have."""
    if isinstance(given, dict):
        for key, value in given.items():
            if not isinstance(kept, dict) or key not in kept:
                yield f"{path}.{key}"
            else:
                yield from lost(value, kept[key], f"{path}.{key}")
    elif isinstance(given, list):
        for index, value in enumerate(given):
            yield from lost(value, kept[index], f"{path}[{index}]")


class Files(unittest.TestCase):
    def test_generated_files_are_up_to_date(self):
        done = subprocess.run([sys.executable, cases.ROOT / "helm/generate", "--check"],
                              capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, "run helm/generate: " + done.stdout + done.stderr)

    def test_the_version_is_the_projects(self):
        text = (cases.ROOT / "CMakeLists.txt").read_text()
        version = re.search(r"project\(\w+ VERSION ([0-9.]+)", text)[1]
        meta = chart.yaml.safe_load((chart.CHART / "Chart.yaml").read_text())
        self.assertEqual((meta["appVersion"], meta["version"]), (version, version))

    def test_lint(self):
        for name in chart.values_files():
            with self.subTest(name):
                done = chart.helm("lint", "--strict", chart.CHART,
                                  f"--values={chart.VALUES / name}.yaml")
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                self.assertNotIn("WARNING", done.stdout)

    def test_a_package_renders_the_same(self):
        with tempfile.TemporaryDirectory() as folder:
            done = chart.helm("package", chart.CHART, f"--destination={folder}")
            self.assertEqual(done.returncode, 0, done.stderr)
            package = next(pathlib.Path(folder).glob("tessera-*.tgz"))
            self.assertEqual(chart.Rendered("everything", chart=package).text,
                             chart.rendered("everything").text)

    def test_there_are_eight_values_files(self):
        self.assertEqual(len(chart.values_files()), 8)


class Schemas(unittest.TestCase):
    def check(self, version):
        checked = 0
        for name in chart.values_files():
            values = chart.load(name)
            if values.get("gpu", {}).get("access") == "dra-admin" and version in BEFORE_DRA:
                values["gpu"]["access"] = "runtimeClass"
            for one in chart.Rendered(values, kube_version=version).objects:
                if (one["apiVersion"], one["kind"]) in models():
                    continue
                with self.subTest(f"{name}: {one['kind']} {one['metadata']['name']}"):
                    kubernetes_validate.validate(one, version, strict=True)
                    checked += 1
        self.assertGreater(checked, 40)

    def test_kubernetes_1_28(self):
        self.check("1.28")

    def test_kubernetes_1_32(self):
        self.check("1.32")

    def test_kubernetes_1_37(self):
        self.check("1.37")

    def test_custom_resources(self):
        seen = set()
        for name in chart.values_files():
            options = {"api_versions": chart.CUSTOM_RESOURCES} if name == "default" else {}
            for one in chart.Rendered(name, **options).objects:
                place = (one["apiVersion"], one["kind"])
                if place not in models():
                    continue
                with self.subTest(f"{name}: {one['kind']}"):
                    model = models()[place].model_validate(one)
                    kept = model.model_dump(by_alias=True, exclude_unset=True, mode="json")
                    self.assertEqual(list(lost(one, kept)), [])
                    seen.add(place)
        self.assertEqual(seen, set(models()))

    def test_the_checks_find_what_is_wrong(self):
        one = chart.Rendered("everything").one("DaemonSet", "kv-gpu0")
        one["spec"]["template"]["spec"]["hostIpc"] = True
        with self.assertRaises(Exception):
            kubernetes_validate.validate(one, "1.37", strict=True)
        self.assertEqual(list(lost({"a": [{"b": 1, "c": 2}]}, {"a": [{"b": 1}]})), [".a[0].c"])


class Notes(unittest.TestCase):
    def notes(self, name):
        done = chart.helm("install", chart.RELEASE, chart.CHART, "--dry-run=client",
                          f"--namespace={chart.NAMESPACE}", f"--values={chart.VALUES / name}.yaml")
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.partition("NOTES:")[2]

    def test_they_name_the_next_commands_and_the_address(self):
        notes = self.notes("cpu")
        for words in ("rollout status daemonset/kv-tessera", "helm test kv -n inference",
                      "tessera status --address=unix:/run/tessera-pod/tesserad.sock",
                      "unix:/run/tessera/kv/tesserad.sock    (daemon, cpu)", "65532"):
            self.assertIn(words, notes)
        self.assertNotIn("gpu_memory_utilization", notes)

    def test_they_name_the_memory_that_the_scheduler_does_not_know(self):
        notes = self.notes("two-gpus")
        self.assertIn("gpu0 takes 16.0 GiB of cuda:0", notes)
        self.assertIn("gpu1 takes 24.0 GiB of cuda:1", notes)
        self.assertIn("unix:/run/tessera/kv/ ", notes)
        self.assertIn("gpu_memory_utilization", notes)

    def test_they_name_the_claim(self):
        self.assertIn("in namespace team-b by the claim kv-sockets", self.notes("everything"))


if __name__ == "__main__":
    cases.main()
