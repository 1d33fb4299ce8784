"""What a kubelet does with a pod, as far as the chart needs it: volumes, arguments, environment.

`Pod` makes the volumes of a rendered pod as folders. Its subclasses run the pod's containers:
`ProcessPod` as processes with the container's user and groups, and container_pod.ContainerPod in
containers.
"""

import http.client
import os
import pathlib
import re
import shutil
import signal
import subprocess

END_S = 30


class Pod:
    def __init__(self, spec, folder, config_maps, secrets):
        """secrets: {Secret: {key: text}}. The folder must not exist."""
        self.spec = spec
        self.folder = folder
        self.secrets = secrets
        folder.mkdir()
        self.volumes = {one["name"]: self.make_volume(one, config_maps)
                        for one in spec.get("volumes", ())}

    def make_volume(self, volume, config_maps):
        """The folder of a volume, as a kubelet makes it."""
        if "hostPath" in volume:
            path = pathlib.Path(volume["hostPath"]["path"])
            if volume["hostPath"]["type"] == "DirectoryOrCreate":
                path.mkdir(mode=0o755, exist_ok=True)
            if not path.is_dir():
                raise AssertionError(f"hostPath type check failed: {path} is not a directory")
            return path
        path = self.folder / volume["name"]
        path.mkdir()
        files, mode = {}, 0o644
        if "configMap" in volume:
            files = config_maps[volume["configMap"]["name"]]
        elif "secret" in volume:
            files = self.secrets[volume["secret"]["secretName"]]
            mode = volume["secret"]["defaultMode"]
        elif "projected" in volume:
            mode = volume["projected"]["defaultMode"]
            files = {item["path"]: self.secrets[source["secret"]["name"]][item["key"]]
                     for source in volume["projected"]["sources"]
                     for item in source["secret"]["items"]}
        elif "emptyDir" in volume:
            path.chmod(0o2777)
        for name, text in files.items():
            (path / name).write_text(text, encoding="utf-8")
            (path / name).chmod(mode)
        if os.geteuid() == 0:
            for entry in (path, *path.iterdir()):
                os.chown(entry, 0, self.spec["securityContext"].get("fsGroup", 0))
        return path

    def container(self, name):
        return next(one for kind in ("initContainers", "containers")
                    for one in self.spec.get(kind, ()) if one["name"] == name)

    def environment(self, part):
        """Name -> value of a container's environment."""
        found = {}
        for one in part.get("env", ()):
            reference = one.get("valueFrom", {}).get("secretKeyRef")
            found[one["name"]] = (one["value"] if reference is None
                                  else self.secrets[reference["name"]][reference["key"]])
        return found

    def arguments(self, part):
        """The arguments with $(NAME) replaced."""
        environment = self.environment(part)
        return [re.sub(r"\$\((\w+)\)", lambda match: environment[match[1]], word)
                for word in part.get("args", ())]

    def identity(self, part):
        """(uid, gid, supplementary groups) of a container."""
        context = {**self.spec["securityContext"], **part["securityContext"]}
        groups = list(context.get("supplementalGroups", ()))
        if "fsGroup" in context:
            groups.append(context["fsGroup"])
        return context["runAsUser"], context["runAsGroup"], groups

    def probe(self, part, kind):
        """Whether a probe succeeds now, and what it said."""
        probe = part[f"{kind}Probe"]
        if "exec" in probe:
            code, said = self.execute(part, probe["exec"]["command"])
            return code == 0, said
        ports = {one["name"]: one["containerPort"] for one in part["ports"]}
        return self.get(ports[probe["httpGet"]["port"]], probe["httpGet"]["path"],
                        probe["timeoutSeconds"])


class ProcessPod(Pod):
    """Containers are processes. Paths of the pod that this machine does not have are replaced."""

    def __init__(self, spec, folder, config_maps, secrets, programs):
        super().__init__(spec, folder, config_maps, secrets)
        self.programs = programs
        self.started = None
        for name, path in self.volumes.items():
            if name == "config":
                file = path / "tesserad.json"
                file.write_text(self.localize(self.container("tesserad"), file.read_text()))

    def localize(self, part, text):
        for mount in part["volumeMounts"]:
            text = text.replace(mount["mountPath"], str(self.volumes[mount["name"]]))
        return text

    def command(self, part, command):
        program = pathlib.Path(command[0]).name if command else "tesserad"
        return [self.programs / program, *(self.localize(part, word) for word in command[1:])]

    def options(self, part):
        """Options of subprocess; only root can run programs as another user."""
        options = {"text": True, "env": {**os.environ, **self.environment(part)}}
        if os.geteuid() == 0:
            uid, gid, groups = self.identity(part)
            options.update(user=uid, group=gid, extra_groups=groups)
        return options

    def run(self, part):
        """Runs a container to its end: (exit code, output)."""
        return self.execute(part, [*part.get("command", ["tesserad"]), *self.arguments(part)])

    def execute(self, part, command):
        done = subprocess.run(self.command(part, command), stdout=subprocess.PIPE, check=False,
                              stderr=subprocess.STDOUT, timeout=END_S, **self.options(part))
        return done.returncode, done.stdout

    def start(self, part):
        with open(self.folder / "log", "w", encoding="utf-8") as log:
            self.started = subprocess.Popen(
                self.command(part, ["tesserad", *self.arguments(part)]), stderr=log,
                **self.options(part))

    def log(self):
        return (self.folder / "log").read_text(encoding="utf-8")

    def is_running(self):
        return self.started.poll() is None

    def get(self, port, path, timeout_s):
        return get("127.0.0.1", port, path, timeout_s)

    def stop(self):
        """Ends the container as a kubelet does; its exit code."""
        self.started.send_signal(signal.SIGTERM)
        return self.started.wait(self.spec["terminationGracePeriodSeconds"])

    def remove(self):
        if self.started is not None:
            self.started.kill()
            self.started.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def get(host, port, path, timeout_s):
    """Whether an HTTP probe succeeds, and what was said."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return 200 <= answer.status < 400, f"{answer.status} {answer.read()[:200]}"
    except OSError as error:
        return False, str(error)
    finally:
        connection.close()
