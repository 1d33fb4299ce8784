"""Renders the chart with Helm, and finds things in what it rendered."""

import functools
import pathlib
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "ops"))

import cases  # noqa: E402

cases.use_environment("python-kubernetes")

import yaml  # noqa: E402

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast where it was built

CHART = cases.ROOT / "helm/tessera"
VALUES = pathlib.Path(__file__).resolve().parent / "values"
RELEASE, NAMESPACE = "kv", "inference"
CUSTOM_RESOURCES = tuple(
    f"monitoring.coreos.com/v1/{kind}" for kind in ("PodMonitor", "ServiceMonitor",
                                                    "PrometheusRule"))


def helm(*arguments):
    """The ended process; whether it succeeded is the caller's question."""
    return subprocess.run([cases.tool("helm"), *map(str, arguments)], capture_output=True,
                          text=True, check=False)


def template(values, chart=CHART, release=RELEASE, api_versions=(), kube_version=None):
    """Runs `helm template` with a file of tests/helm/values by its stem, or with a dict."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as scratch:
        file = VALUES / f"{values}.yaml"
        if isinstance(values, dict):
            yaml.safe_dump(values, scratch)
            scratch.flush()
            file = scratch.name
        options = [f"--api-versions={','.join(api_versions)}"] if api_versions else []
        if kube_version is not None:
            options.append(f"--kube-version={kube_version}")
        return helm("template", release, chart, f"--namespace={NAMESPACE}", f"--values={file}",
                    *options)


class Rendered:
    """The objects of one rendering."""

    def __init__(self, values, **options):
        done = template(values, **options)
        if done.returncode != 0:
            raise AssertionError(done.stderr)
        self.text = done.stdout
        self.objects = [one for one in yaml.load_all(done.stdout, LOADER) if one]

    def all(self, kind):
        return [one for one in self.objects if one["kind"] == kind]

    def one(self, kind, name=None):
        found = [one for one in self.all(kind) if name in (None, one["metadata"]["name"])]
        if len(found) != 1:
            raise AssertionError(f"{len(found)} of {kind} {name or ''}")
        return found[0]

    def pod_specs(self):
        """(object, pod spec) of everything that becomes a pod."""
        for one in self.objects:
            if one["kind"] == "Pod":
                yield one, one["spec"]
            elif one["kind"] in ("DaemonSet", "Deployment"):
                yield one, one["spec"]["template"]["spec"]

    def daemons(self):
        return [one["spec"]["template"]["spec"] for one in self.all("DaemonSet")]

    def configurations(self):
        """Name -> text of each daemon's configuration."""
        return {one["metadata"]["name"]: one["data"]["tesserad.json"]
                for one in self.all("ConfigMap") if "tesserad.json" in one["data"]}


@functools.cache
def rendered(name):
    """The rendering of a values file, made once."""
    return Rendered(name)


def load(name):
    """A values file as a dict."""
    return yaml.safe_load((VALUES / f"{name}.yaml").read_text())


def values_files():
    return sorted(file.stem for file in VALUES.glob("*.yaml"))


def container(spec, name="tesserad"):
    return next(one for one in spec["containers"] if one["name"] == name)


def volume(spec, name):
    return next(one for one in spec["volumes"] if one["name"] == name)
