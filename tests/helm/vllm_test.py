"""deploy/examples/vllm.yaml: a Deployment of vLLM that fits what the chart renders."""

import ast
import json
import unittest

import chart
import cases
import kubernetes_validate
from chart import container, volume

FILE = cases.ROOT / "deploy/examples/vllm.yaml"
PACKAGE = cases.ROOT / "client/python/tessera_kv/vllm"


def constant(file, name):
    """A constant of the package, read without its library."""
    for node in ast.parse((PACKAGE / file).read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == name:
            return ast.literal_eval(node.value)
    raise LookupError(name)


def options():
    """The names that `kv_connector_extra_config` may have."""
    (settings,) = [node for node in ast.parse((PACKAGE / "settings.py").read_text()).body
                   if isinstance(node, ast.ClassDef) and node.name == "Settings"]
    return {node.target.id for node in settings.body if isinstance(node, ast.AnnAssign)}


class Vllm(unittest.TestCase):
    def setUp(self):
        self.text = FILE.read_text()
        self.objects = list(chart.yaml.safe_load_all(self.text))
        self.deployment, self.service = self.objects
        self.pod = self.deployment["spec"]["template"]["spec"]
        self.vllm = container(self.pod, "vllm")
        self.environment = {one["name"]: one.get("value") for one in self.vllm["env"]}

    def option(self, name):
        (value,) = [one.partition("=")[2] for one in self.vllm["args"]
                    if one.startswith(f"--{name}=")]
        return value

    def transfer(self):
        return json.loads(self.option("kv-transfer-config"))

    def test_kubernetes_accepts_it(self):
        for version in ("1.28", "1.32", "1.37"):
            for one in self.objects:
                kubernetes_validate.validate(one, version, strict=True)

    def test_it_reaches_the_daemon_as_the_charts_own_worker_does(self):
        (command,) = [line.lstrip("# ") for line in self.text.splitlines()
                      if "helm install" in line]
        given = dict(part.split("=") for part in command.split() if "=" in part)
        self.assertEqual(given, {"device": "cpu", "poolBytes": "8GiB"})
        self.assertEqual(command.split()[:6], ["helm", "install", chart.RELEASE, "helm/tessera",
                                               "-n", chart.NAMESPACE])
        rendered = chart.Rendered({**given, "exampleWorker": {"enabled": True}})
        worker = rendered.one("Deployment")["spec"]["template"]["spec"]
        self.assertEqual(volume(self.pod, "tessera"), volume(worker, "tessera"))
        (mount,) = container(worker, "worker")["volumeMounts"]
        self.assertIn(mount, self.vllm["volumeMounts"])
        self.assertEqual(self.pod["securityContext"]["supplementalGroups"],
                         worker["securityContext"]["supplementalGroups"])
        (address,) = container(worker, "worker")["env"]
        self.assertEqual(self.transfer()["kv_connector_extra_config"]["address"], address["value"])
        self.assertEqual(self.deployment["metadata"]["namespace"], chart.NAMESPACE)

    def test_it_uses_what_the_package_serves(self):
        transfer = self.transfer()
        self.assertEqual(transfer["kv_connector"], constant("settings.py", "CONNECTOR"))
        package, _, module = transfer["kv_connector_module_path"].rpartition(".")
        self.assertEqual(package, "tessera_kv.vllm")
        self.assertTrue((PACKAGE / f"{module}.py").exists())
        self.assertLessEqual(set(transfer["kv_connector_extra_config"]), options())
        self.assertEqual(self.environment[constant("__init__.py", "SWITCH")], "1")
        for flag in ("--enforce-eager", "--no-enable-prefix-caching"):
            self.assertIn(flag, self.vllm["args"])

    def test_pods_are_as_restricted_as_the_charts(self):
        worker = chart.Rendered({"device": "cpu", "exampleWorker": {"enabled": True}}).one(
            "Deployment")["spec"]["template"]["spec"]
        self.assertEqual(self.vllm["securityContext"],
                         container(worker, "worker")["securityContext"])
        for key in ("runAsNonRoot", "runAsUser", "runAsGroup", "seccompProfile"):
            self.assertEqual(self.pod["securityContext"][key], worker["securityContext"][key])
        self.assertFalse(self.pod["automountServiceAccountToken"])

    def test_the_service_finds_the_pods(self):
        labels = self.deployment["spec"]["template"]["metadata"]["labels"]
        self.assertEqual(self.service["spec"]["selector"], labels)
        self.assertEqual(self.deployment["spec"]["selector"]["matchLabels"], labels)
        self.assertEqual(self.option("port"), str(self.vllm["ports"][0]["containerPort"]))


if __name__ == "__main__":
    cases.main()
