"""Pods in containers: what a kubelet and a container runtime make of a rendered pod, by podman."""

import subprocess
import sys

import cases
import kubelet
import podman

# What crun needs on machines whose limits are lower than podman's own, and without control groups.
MACHINE = ("--cgroups=disabled", "--ulimit=nofile=20000:20000", "--ulimit=nproc=30000:30000",
           "--log-driver=k8s-file", "--network=none")
GET = ("import sys; sys.path[:0] = {path!r}; import kubelet\n"
       "succeeded, said = kubelet.get('127.0.0.1', {port}, {place!r}, {timeout})\n"
       "print(said); sys.exit(0 if succeeded else 1)")


class ContainerPod(kubelet.Pod):
    def __init__(self, spec, folder, config_maps, secrets, containers):
        super().__init__(spec, folder, config_maps, secrets)
        self.containers = containers  # podman.Containers
        self.names = []

    def options(self, part):
        """Options of podman run for what the pod says, and nothing that it does not say."""
        context = part["securityContext"]
        uid, gid, groups = self.identity(part)
        yield from (f"--user={uid}:{gid}", *(f"--group-add={group}" for group in groups))
        if context["readOnlyRootFilesystem"]:
            yield from ("--read-only", "--read-only-tmpfs=false")
        if not context["allowPrivilegeEscalation"]:
            yield "--security-opt=no-new-privileges"
        yield from (f"--cap-drop={one}" for one in context["capabilities"].get("drop", ()))
        yield from (f"--cap-add={one}" for one in context["capabilities"].get("add", ()))
        yield from (f"--env={name}={value}" for name, value in self.environment(part).items())
        for mount in part["volumeMounts"]:
            mode = ":ro" if mount.get("readOnly") else ""
            yield f"--volume={self.volumes[mount['name']]}:{mount['mountPath']}{mode}"
        if "command" in part:
            yield f"--entrypoint={part['command'][0]}"

    def start(self, part):
        name = f"{self.folder.parent.name}-{self.folder.name}-{part['name']}"
        self.names.append(name)
        self.containers.podman("run", "--detach", "--name", name, *MACHINE, *self.options(part),
                               part["image"], *part.get("command", [])[1:], *self.arguments(part))

    def run(self, part):
        """Runs a container to its end: (exit code, output)."""
        self.start(part)
        return self.containers.wait(self.names[-1])

    def execute(self, part, command):
        done = self.containers.podman("exec", self.names[-1], *command, check=False)
        return done.returncode, done.stdout

    def log(self):
        return self.containers.podman("logs", self.names[-1]).stdout

    def is_running(self):
        return self.containers.podman("inspect", "--format={{.State.Running}}",
                                      self.names[-1]).stdout.strip() == "true"

    def get(self, port, path, timeout_s):
        """An HTTP probe from within the network of the pod."""
        pid = self.containers.pid(self.names[-1])
        if pid == 0:
            return False, "the container has ended"
        script = GET.format(path=[str(cases.ROOT / "tests/helm")], port=port, place=path,
                            timeout=timeout_s)
        done = subprocess.run(
            ["nsenter", f"--net=/proc/{pid}/ns/net", sys.executable, "-c", script],
            capture_output=True, text=True, check=False)
        return done.returncode == 0, done.stdout + done.stderr

    def stop(self):
        """Ends the container as a kubelet does; its exit code."""
        seconds = self.spec["terminationGracePeriodSeconds"]
        self.containers.podman("stop", f"--time={seconds}", self.names[-1])
        return self.containers.wait(self.names[-1])[0]

    def remove(self):
        for name in self.names:
            self.containers.podman("rm", "--force", "--time=0", name, check=False)
