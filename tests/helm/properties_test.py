"""What the rendered objects must be: one property, one test."""

import copy
import json
import pathlib
import re
import shutil
import tempfile
import unittest

import chart
import cases
from chart import container, rendered, volume

MiB, GiB = 1 << 20, 1 << 30
DRIVER_LABEL = "nvidia.com/gpu-driver-upgrade-state"


def each_pod():
    """(values file, object, pod spec) of every pod of every values file."""
    for name in chart.values_files():
        for one, spec in rendered(name).pod_specs():
            yield name, one, spec


def each_container():
    for name, one, spec in each_pod():
        for kind in ("initContainers", "containers"):
            for part in spec.get(kind, ()):
                yield f"{name}: {one['metadata']['name']}: {part['name']}", part


def quantity(text):
    return int(text[:-2]) * MiB if str(text).endswith("Mi") else int(text)


class Security(unittest.TestCase):
    def test_no_pod_shares_a_namespace_of_the_host(self):
        for name, one, spec in each_pod():
            for key in ("hostIPC", "hostPID", "hostNetwork", "hostUsers", "shareProcessNamespace"):
                self.assertNotIn(key, spec, (name, one["metadata"]["name"]))

    def test_no_container_is_privileged(self):
        for place, part in each_container():
            self.assertNotIn("privileged", part["securityContext"], place)
            self.assertIs(part["securityContext"]["allowPrivilegeEscalation"], False, place)

    def test_every_root_file_system_is_read_only(self):
        for place, part in each_container():
            self.assertIs(part["securityContext"]["readOnlyRootFilesystem"], True, place)

    def test_only_the_init_container_has_capabilities_and_only_two(self):
        for place, part in each_container():
            wanted = {"drop": ["ALL"]}
            if part["name"] == "directory":
                wanted["add"] = ["CHOWN", "FOWNER"]
            self.assertEqual(part["securityContext"]["capabilities"], wanted, place)

    def test_every_pod_is_non_root_with_the_default_seccomp_profile(self):
        for name, one, spec in each_pod():
            context = spec["securityContext"]
            self.assertIs(context["runAsNonRoot"], True, (name, one["metadata"]["name"]))
            self.assertGreater(context["runAsUser"], 0)
            self.assertEqual(context["seccompProfile"], {"type": "RuntimeDefault"})

    def test_only_the_init_container_is_root(self):
        for place, part in each_container():
            self.assertEqual(part["securityContext"].get("runAsUser") == 0,
                             part["name"] == "directory", place)

    def test_no_pod_gets_a_token_of_the_cluster(self):
        for name, one, spec in each_pod():
            self.assertIs(spec["automountServiceAccountToken"], False,
                          (name, one["metadata"]["name"]))

    def test_secrets_are_readable_by_the_daemons_group_only(self):
        spec = rendered("everything").daemons()[0]
        self.assertEqual(volume(spec, "tls")["secret"]["defaultMode"], 0o440)
        self.assertEqual(volume(spec, "tokens")["projected"]["defaultMode"], 0o440)
        self.assertEqual(spec["securityContext"]["fsGroup"], 4712)

    def test_no_object_contains_a_token(self):
        for name in chart.values_files():
            self.assertNotRegex(rendered(name).text, r'"token":')


class Workers(unittest.TestCase):
    def test_the_directory_is_mounted_and_not_the_socket(self):
        for name in chart.values_files():
            for spec in rendered(name).daemons():
                path = volume(spec, "sockets")["hostPath"]["path"]
                mount = next(one for one in container(spec)["volumeMounts"]
                             if one["name"] == "sockets")
                self.assertEqual(mount["mountPath"], path)
                self.assertNotIn(".sock", path)
                self.assertNotIn("subPath", mount)

    def test_the_directory_contains_the_releases_name(self):
        other = chart.Rendered("cpu", release="other")
        paths = {volume(one.daemons()[0], "sockets")["hostPath"]["path"]
                 for one in (rendered("cpu"), other)}
        self.assertEqual(paths, {"/run/tessera/kv", "/run/tessera/other"})

    def test_the_init_container_prepares_the_directory_for_the_daemons_user(self):
        spec = rendered("everything").daemons()[0]
        first = spec["initContainers"][0]
        self.assertEqual(first["args"], ["--prepare-directory=/run/kv", "--owner=4711:4712",
                                         "--mode=2750"])
        self.assertEqual((spec["securityContext"]["runAsUser"],
                          spec["securityContext"]["runAsGroup"]), (4711, 4712))
        self.assertEqual(volume(spec, "sockets")["hostPath"]["type"], "DirectoryOrCreate")

    def test_without_the_init_container_the_directory_must_exist(self):
        spec = chart.Rendered({"socketDirectory": {"prepare": "none"}}).daemons()[0]
        self.assertNotIn("initContainers", spec)
        self.assertEqual(volume(spec, "sockets")["hostPath"]["type"], "Directory")

    def test_workers_mount_the_directory_read_only_with_the_daemons_group(self):
        everything = rendered("everything")
        workers = [spec for one, spec in everything.pod_specs() if one["kind"] != "DaemonSet"]
        self.assertEqual(len(workers), 4)
        for spec in workers:
            mount = container(spec, "worker")["volumeMounts"][0]
            self.assertEqual((mount["mountPath"], mount["readOnly"]), ("/run/kv", True))
            self.assertEqual(spec["securityContext"]["supplementalGroups"], [4712])
            self.assertNotIn(spec["securityContext"]["runAsUser"], (0, 4711))

    def test_workers_of_gpus_get_the_directory_as_address(self):
        args = container(rendered("two-gpus").one("Pod", "kv-tessera-gpu1-test")["spec"],
                         "worker")["args"]
        self.assertIn("--address=unix:/run/tessera/kv/", args)
        for text in rendered("two-gpus").configurations().values():
            self.assertEqual(json.loads(text)["listen"][0], "unix:/run/tessera/kv/{uuid}.sock")

    def test_a_restricted_namespace_gets_a_claim_without_host_path(self):
        everything = rendered("everything")
        for namespace in ("team-a", "team-b"):
            disk = everything.one("PersistentVolume", f"inference-kv-{namespace}")["spec"]
            claim = next(one for one in everything.all("PersistentVolumeClaim")
                         if one["metadata"]["namespace"] == namespace)
            self.assertEqual(disk["claimRef"], {"namespace": namespace,
                                                "name": claim["metadata"]["name"]})
            self.assertEqual(claim["spec"]["volumeName"], f"inference-kv-{namespace}")
            self.assertEqual(disk["storageClassName"], "")
            self.assertEqual(claim["spec"]["storageClassName"], "")
            self.assertEqual(disk["accessModes"], ["ReadOnlyMany"])
            self.assertEqual(disk["hostPath"], {"path": "/run/kv", "type": "Directory"})
            self.assertNotIn("nodeAffinity", disk)
        worker = everything.one("Deployment")
        self.assertEqual(worker["metadata"]["namespace"], "team-a")
        self.assertEqual(volume(worker["spec"]["template"]["spec"], "tessera"),
                         {"name": "tessera", "persistentVolumeClaim": {"claimName": "kv-sockets",
                                                                       "readOnly": True}})

    def test_a_chart_that_depends_on_this_one_can_use_its_templates(self):
        with tempfile.TemporaryDirectory() as folder:
            parent = pathlib.Path(folder) / "engine"
            shutil.copytree(chart.CHART, parent / "charts/tessera")
            (parent / "Chart.yaml").write_text("apiVersion: v2\nname: engine\nversion: 1.0.0\n")
            (parent / "templates").mkdir()
            (parent / "templates/pod.yaml").write_text(
                "apiVersion: v1\nkind: Pod\nmetadata: {name: engine}\nspec:\n"
                "  securityContext:\n"
                '    {{- include "tessera.workerSecurityContext" .Subcharts.tessera '
                "| nindent 4 }}\n"
                "  containers:\n  - name: engine\n    env:\n"
                '    {{- include "tessera.workerEnv" .Subcharts.tessera | nindent 4 }}\n'
                "    volumeMounts:\n"
                '    {{- include "tessera.workerVolumeMount" .Subcharts.tessera | nindent 4 }}\n'
                "  volumes:\n"
                '  {{- include "tessera.workerVolume" .Subcharts.tessera | nindent 2 }}\n')
            spec = chart.Rendered({"tessera": {"device": "cpu"}}, chart=parent).one(
                "Pod", "engine")["spec"]
        self.assertEqual(spec["volumes"][0]["hostPath"]["path"], "/run/tessera/kv")
        self.assertEqual(spec["containers"][0]["env"][0]["value"],
                         "unix:/run/tessera/kv/tesserad.sock")


class Gpus(unittest.TestCase):
    def test_the_daemon_claims_no_gpu(self):
        for name in chart.values_files():
            for spec in rendered(name).daemons():
                self.assertNotIn("nvidia.com/gpu", container(spec)["resources"]["limits"])

    def test_a_runtime_class_shows_the_gpus(self):
        spec = rendered("default").daemons()[0]
        self.assertEqual(spec["runtimeClassName"], "nvidia")
        self.assertEqual(container(spec)["env"][1:], [
            {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
            {"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "compute,utility"}])

    def test_cdi_needs_an_annotation_and_no_runtime_class(self):
        pod = rendered("no-crds").one("DaemonSet")["spec"]["template"]
        self.assertEqual(pod["metadata"]["annotations"]["cdi.k8s.io/tessera"], "nvidia.com/gpu=all")
        self.assertNotIn("runtimeClassName", pod["spec"])

    def test_dra_claims_all_gpus_for_administration(self):
        everything = rendered("everything")
        request = everything.one("ResourceClaimTemplate")["spec"]["spec"]["devices"]["requests"][0]
        self.assertIs(request["exactly"]["adminAccess"], True)
        spec = everything.one("DaemonSet", "kv-gpu0")["spec"]["template"]["spec"]
        self.assertEqual(spec["resourceClaims"][0]["resourceClaimTemplateName"], "kv-gpus")
        self.assertEqual(container(spec)["resources"]["claims"], [{"name": "gpus"}])

    def test_a_daemon_on_the_cpu_needs_nothing_of_a_gpu(self):
        spec = rendered("everything").one("DaemonSet", "kv-host")["spec"]["template"]["spec"]
        self.assertNotRegex(json.dumps(spec), "(?i)nvidia|resourceClaims|-cuda")

    def test_it_leaves_nodes_whose_driver_is_upgraded(self):
        for spec in rendered("two-gpus").daemons():
            terms = spec["affinity"]["nodeAffinity"][
                "requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
            self.assertEqual(len(terms), 2)
            for term in terms:  # they are alternatives: each must have it, and its own rule
                keys = [one["key"] for one in term["matchExpressions"]]
                self.assertEqual(keys, ["zone", DRIVER_LABEL])
        off = chart.Rendered({"gpu": {"leaveForDriverUpgrade": False}}).daemons()[0]
        self.assertNotIn("affinity", off)

    def test_it_runs_on_gpu_nodes_in_spite_of_their_taint(self):
        spec = rendered("everything").one("DaemonSet", "kv-gpu0")["spec"]["template"]["spec"]
        self.assertEqual(spec["nodeSelector"], {"pool": "gpu", "nvidia.com/gpu.present": "true"})
        self.assertEqual([one["key"] for one in spec["tolerations"]],
                         ["inference", "nvidia.com/gpu"])

    def test_the_test_pod_finds_its_daemon(self):
        uuid = "GPU-6a2f4a4e-9d6c-4b35-8f0e-0a1b2c3d4e5f"
        for name, device, address in (("gpu0", "0", "unix:/run/kv/"),
                                      ("gpu1", uuid, f"unix:/run/kv/{uuid}.sock"),
                                      ("host", None, "unix:/run/kv/host.sock")):
            part = container(rendered("everything").one("Pod", f"kv-{name}-test")["spec"], "worker")
            self.assertIn(f"--address={address}", part["args"])
            seen = {one["name"]: one.get("value") for one in part["env"]}
            self.assertEqual(seen.get("CUDA_VISIBLE_DEVICES"), device)


class Lifecycle(unittest.TestCase):
    def test_time_to_end_covers_the_drain(self):
        for name in chart.values_files():
            for spec, text in zip(rendered(name).daemons(),
                                  rendered(name).configurations().values()):
                drain = json.loads(text)["drain_limit_ms"] / 1000
                self.assertGreaterEqual(spec["terminationGracePeriodSeconds"], drain + 6, name)
        self.assertEqual(rendered("tenants").daemons()[0]["terminationGracePeriodSeconds"], 66)

    def test_probes_ask_the_metrics_port(self):
        for spec in rendered("everything").daemons():
            part = container(spec)
            ports = {one["name"]: one["containerPort"] for one in part["ports"]}
            self.assertIn("metrics", ports)
            self.assertEqual([part[f"{kind}Probe"]["httpGet"] for kind in
                              ("startup", "liveness", "readiness")],
                             [{"path": "/healthz", "port": "metrics"}] * 2
                             + [{"path": "/readyz", "port": "metrics"}])

    def test_the_pod_has_a_socket_of_its_own_for_commands(self):
        for name in chart.values_files():
            for spec, text in zip(rendered(name).daemons(),
                                  rendered(name).configurations().values()):
                part = container(spec)
                address = next(one["value"] for one in part["env"]
                               if one["name"] == "TESSERA_ADDRESS")
                self.assertIn(address, json.loads(text)["listen"])
                mount = next(one for one in part["volumeMounts"]
                             if address.startswith(f"unix:{one['mountPath']}/"))
                self.assertIn("emptyDir", volume(spec, mount["name"]))

    def test_probes_without_a_port_ask_that_socket(self):
        spec = rendered("cpu").daemons()[0]
        part = container(spec)
        self.assertNotIn("ports", part)
        command = part["readinessProbe"]["exec"]["command"]
        self.assertEqual(command[:3], ["/usr/bin/tessera", "health", "--ready"])
        address = command[3].removeprefix("--address=")
        config = json.loads(rendered("cpu").configurations()["kv-tessera"])
        self.assertIn(address, config["listen"])
        self.assertEqual(config["metrics_address"], "")

    def test_a_second_daemon_never_starts_beside_the_first(self):
        for name in chart.values_files():
            for one in rendered(name).all("DaemonSet"):
                strategy = one["spec"]["updateStrategy"]["rollingUpdate"]
                self.assertEqual(strategy["maxSurge"], 0)
                self.assertNotEqual(strategy["maxUnavailable"], 0)

    def test_a_changed_configuration_rolls_its_own_daemon_only(self):
        def sums(values):
            return {one["metadata"]["name"]:
                    one["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
                    for one in chart.Rendered(values).all("DaemonSet")}

        values = {"instances": [{"name": "a", "device": "cuda:0"},
                                {"name": "b", "device": "cuda:1"}]}
        before = sums(values)
        changed = copy.deepcopy(values)
        changed["instances"][1]["config"] = {"logLevel": "debug"}
        after = sums(changed)
        self.assertEqual(before["kv-tessera-a"], after["kv-tessera-a"])
        self.assertNotEqual(before["kv-tessera-b"], after["kv-tessera-b"])

    def test_priority_can_be_given_and_taken(self):
        self.assertEqual(rendered("default").daemons()[0]["priorityClassName"],
                         "system-node-critical")
        self.assertNotIn("priorityClassName", rendered("no-crds").daemons()[0])


class Instances(unittest.TestCase):
    def test_each_has_its_own_daemon_set_configuration_and_port(self):
        everything = rendered("everything")
        names = [one["metadata"]["name"] for one in everything.all("DaemonSet")]
        self.assertEqual(names, ["kv-gpu0", "kv-gpu1", "kv-host"])
        self.assertEqual(list(everything.configurations()), names)
        for name, spec, port in zip(names, everything.daemons(), (9464, 9465, 9466)):
            self.assertEqual(volume(spec, "config")["configMap"]["name"], name)
            self.assertEqual(json.loads(everything.configurations()[name])["metrics_address"],
                             f"0.0.0.0:{port}")
            self.assertIn({"name": "metrics", "containerPort": port}, container(spec)["ports"])

    def test_selectors_tell_all_pods_apart(self):
        everything = rendered("everything")
        labels = [one["spec"]["template"]["metadata"]["labels"] if "template" in one["spec"]
                  else one["metadata"]["labels"] for one, _ in everything.pod_specs()]
        for one in everything.all("DaemonSet") + everything.all("Deployment"):
            wanted = one["spec"]["selector"]["matchLabels"].items()
            self.assertEqual(sum(wanted <= label.items() for label in labels), 1)

    def test_what_an_instance_does_not_say_it_inherits(self):
        texts = rendered("two-gpus").configurations()
        first, second = (json.loads(texts[f"kv-tessera-gpu{n}"]) for n in (0, 1))
        self.assertEqual((first["pool_bytes"], second["pool_bytes"]),
                         (str(16 * GiB), str(24 * GiB)))
        self.assertEqual((first["compactor_threads"], second["compactor_threads"]), (2, 4))
        self.assertEqual((first["device"], second["device"]), ("cuda:0", "cuda:1"))

    def test_memory_is_what_the_daemon_may_use(self):
        for name in chart.values_files():
            made = rendered(name)
            overhead = GiB if name == "everything" else 512 * MiB
            for spec, text in zip(made.daemons(), made.configurations().values()):
                config = json.loads(text)
                wanted = overhead + sum(int(config[key]) for key in
                                        ("host_tier_bytes", "raw_copy_bytes"))
                if config["device"] == "cpu":
                    wanted += int(config["pool_bytes"])
                resources = container(spec)["resources"]
                self.assertEqual(quantity(resources["limits"]["memory"]), wanted, name)
                self.assertEqual(quantity(resources["requests"]["memory"]), wanted, name)

    def test_large_numbers_are_written_in_full(self):
        text = chart.Rendered({"device": "cpu", "poolBytes": "4TiB"}).text
        self.assertIn(f'"pool_bytes": "{4 << 40}"', text)
        for name in chart.values_files():
            self.assertNotRegex(rendered(name).text, r"[0-9]e\+[0-9]")


class Network(unittest.TestCase):
    def test_only_prometheus_reaches_the_metrics_port(self):
        spec = rendered("two-gpus").one("NetworkPolicy")["spec"]
        self.assertEqual(len(spec["ingress"]), 1)
        self.assertEqual([one["port"] for one in spec["ingress"][0]["ports"]], [9464, 9465])
        self.assertEqual(spec["ingress"][0]["from"][0]["namespaceSelector"]["matchLabels"],
                         {"kubernetes.io/metadata.name": "monitoring"})

    def test_the_daemon_opens_no_connection(self):
        for name in chart.values_files():
            for one in rendered(name).all("NetworkPolicy"):
                self.assertEqual(one["spec"]["egress"], [])
                self.assertIn("Egress", one["spec"]["policyTypes"])

    def test_nothing_comes_in_without_tcp_and_metrics(self):
        self.assertEqual(rendered("cpu").one("NetworkPolicy")["spec"]["ingress"], [])

    def test_the_policy_selects_the_daemons_only(self):
        spec = rendered("everything").one("NetworkPolicy")["spec"]["podSelector"]
        self.assertEqual(spec["matchExpressions"][0]["values"], ["gpu0", "gpu1", "host"])

    def test_tcp_has_tls_and_its_own_peers(self):
        made = rendered("tls-secret")
        config = json.loads(made.configurations()["kv-tessera"])
        spec = made.daemons()[0]
        self.assertIn("0.0.0.0:7400", config["listen"])
        self.assertEqual(volume(spec, "tls")["secret"]["secretName"], "tessera-certificate")
        mount = next(one for one in container(spec)["volumeMounts"] if one["name"] == "tls")
        for key in ("tls_certificate_file", "tls_key_file", "tls_client_ca_file"):
            self.assertTrue(config[key].startswith(mount["mountPath"] + "/"), key)
        rule = made.one("NetworkPolicy")["spec"]["ingress"][1]
        self.assertEqual(rule["from"],
                         [{"namespaceSelector": {"matchLabels": {"team": "inference"}}}])

    def test_tcp_is_closed_by_default(self):
        for name in ("default", "cpu", "two-gpus", "tenants"):
            made = rendered(name)
            self.assertEqual(made.all("Service"), [])
            for text in made.configurations().values():
                self.assertTrue(all(one.startswith("unix:") for one in json.loads(text)["listen"]))

    def test_the_certificate_names_the_services(self):
        made = rendered("tls-certmanager")
        spec = made.one("Certificate")["spec"]
        self.assertEqual(spec["secretName"],
                         volume(made.daemons()[0], "tls")["secret"]["secretName"])
        self.assertEqual(spec["dnsNames"], ["kv-tessera", "kv-tessera.inference",
                                            "kv-tessera.inference.svc", "kv.example.org"])
        self.assertEqual(made.one("Service")["metadata"]["name"], "kv-tessera")


class Tenants(unittest.TestCase):
    def test_tokens_are_files_from_secrets(self):
        made = rendered("tenants")
        config = json.loads(made.configurations()["kv-tessera"])
        spec = made.daemons()[0]
        mount = next(one for one in container(spec)["volumeMounts"] if one["name"] == "tokens")
        files = {f"{mount['mountPath']}/{item['path']}": source["secret"]["name"]
                 for source in volume(spec, "tokens")["projected"]["sources"]
                 for item in source["secret"]["items"]}
        self.assertEqual({one["token_file"]: "tessera-tokens" for one in config["tenants"]}, files)

    def test_limits_are_bytes(self):
        config = json.loads(rendered("tenants").configurations()["kv-tessera"])
        self.assertEqual(config["tenants"][0]["soft_limit_bytes"], str(256 * MiB))
        self.assertEqual(config["tenants"][1]["hard_limit_bytes"], str(128 * MiB))

    def test_the_test_pod_has_the_first_tenants_token(self):
        spec = rendered("tenants").one("Pod")["spec"]
        part = container(spec, "worker")
        self.assertEqual(part["env"], [{"name": "TESSERA_TOKEN", "valueFrom": {
            "secretKeyRef": {"name": "tessera-tokens", "key": "chat"}}}])
        # Arguments can be read by every user of the node.
        self.assertNotIn("TOKEN", " ".join(part["args"]))


class Monitoring(unittest.TestCase):
    def test_nothing_custom_where_the_cluster_has_it_not(self):
        for name in ("default", "no-crds"):
            kinds = {one["kind"] for one in rendered(name).objects}
            self.assertFalse(kinds & {"PodMonitor", "ServiceMonitor", "PrometheusRule"})

    def test_a_pod_monitor_and_rules_where_it_has(self):
        made = chart.Rendered("default", api_versions=chart.CUSTOM_RESOURCES)
        endpoint = made.one("PodMonitor")["spec"]["podMetricsEndpoints"][0]
        self.assertEqual((endpoint["port"], endpoint["path"]), ("metrics", "/metrics"))
        labels = {one["targetLabel"] for one in endpoint["relabelings"]}
        self.assertEqual(labels, {"job", "node"})
        self.assertEqual(made.all("ServiceMonitor"), [])

    def test_a_service_monitor_finds_its_services(self):
        made = rendered("everything")
        wanted = made.one("ServiceMonitor")["spec"]["selector"]["matchLabels"].items()
        found = [one["metadata"]["name"] for one in made.all("Service")
                 if wanted <= one["metadata"]["labels"].items()]
        self.assertEqual(found, ["kv-gpu0-metrics", "kv-gpu1-metrics", "kv-host-metrics"])

    def test_rules_and_dashboards_are_those_of_deploy(self):
        made = rendered("everything")
        files = sorted((cases.ROOT / "deploy/prometheus").glob("tessera-*.yml"))
        groups = [group for file in files
                  for group in chart.yaml.safe_load(file.read_text())["groups"]]
        self.assertEqual(made.one("PrometheusRule")["spec"]["groups"], groups)
        self.assertGreater(len(groups), 0)
        boards = {key: json.loads(text) for one in made.all("ConfigMap")
                  if "grafana_dashboard" in one["metadata"]["labels"]
                  for key, text in one["data"].items()}
        files = sorted((cases.ROOT / "deploy/grafana").glob("*.json"))
        self.assertEqual(boards, {f"tessera-{file.name}": json.loads(file.read_text())
                                  for file in files})
        self.assertGreater(len(boards), 0)


class Images(unittest.TestCase):
    def test_the_tag_follows_the_device(self):
        made = chart.Rendered({"instances": [{"name": "a"}, {"name": "b", "device": "cpu"}]})
        images = [container(spec)["image"] for spec in made.daemons()]
        self.assertRegex(images[0], r"^localhost/tessera:[0-9.]+-cuda$")
        self.assertRegex(images[1], r"^localhost/tessera:[0-9.]+-cpu$")

    def test_a_digest_pins_every_container(self):
        for one, spec in rendered("everything").pod_specs():
            for part in spec.get("initContainers", []) + spec["containers"]:
                self.assertRegex(part["image"], r"^registry\.example\.org/tessera@sha256:",
                                 one["metadata"]["name"])


class Configuration(unittest.TestCase):
    def test_every_field_of_the_daemon_has_a_value(self):
        proto = (cases.ROOT / "proto/tessera/v1/config.proto").read_text()
        message = proto.partition("message DaemonConfig {")[2].partition("\n}")[0]
        fields = set(re.findall(r"^  (?:optional|repeated) \w+ (\w+) =", message, re.MULTILINE))
        self.assertGreater(len(fields), 30)
        fields.remove("books")  # the chart mounts no book files
        # With TLS, client certificates and tenants on, every other field is there.
        config = json.loads(chart.Rendered({
            "tcp": {"enabled": True, "tls": {"secretName": "s", "clientCa": True}},
            "tenants": [{"name": "a"}]}).configurations()["kv-tessera"])
        self.assertEqual(set(config), fields)


if __name__ == "__main__":
    cases.main()
