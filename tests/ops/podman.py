"""Containers for tests, with images and state in a folder of their own.

A script that uses them calls `enter_own_mounts()` first. It needs root, buildah, podman and crun;
`skip_unless_possible()` skips its tests where one is missing.
"""

import os
import shutil
import subprocess
import sys
import unittest

USER = 65532  # of the image
SOCKET_FOLDER = "/run/tessera"
HYBRID = "/sys/fs/cgroup/unified"
INSIDE = "--in-own-mounts"
# What a restricted pod gets. crun refuses to start without the two limits where the caller's own
# are lower than podman's defaults.
CONFINED = ("--read-only", "--cap-drop=all", "--security-opt=no-new-privileges", "--network=none",
            "--cgroups=disabled", "--ulimit=nofile=20000:20000", "--ulimit=nproc=30000:30000",
            "--log-driver=k8s-file")


def enter_own_mounts():
    """Runs the script again in a mount namespace of its own, and so that crun accepts the machine.

    crun refuses machines with control groups of both versions, even if a container uses none.
    """
    if INSIDE in sys.argv:
        sys.argv.remove(INSIDE)
        if os.path.ismount(HYBRID):
            subprocess.run(["umount", HYBRID], check=True)
    elif os.geteuid() == 0 and shutil.which("unshare"):
        os.execvp("unshare", ["unshare", "--mount", "--propagation=private", sys.executable,
                              *sys.argv, INSIDE])


def skip_unless_possible():
    if os.geteuid() != 0:
        raise unittest.SkipTest("containers with a storage of their own need root")
    for tool in ("unshare", "buildah", "podman", "crun"):
        if shutil.which(tool) is None:
            raise unittest.SkipTest(f"{tool} is not installed: "
                                    "deploy/install-packages --operations")


def run(*command, check=True):
    done = subprocess.run([str(word) for word in command], check=False, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if check and done.returncode != 0:
        raise AssertionError(f"{' '.join(map(str, command))}\n{done.returncode}: {done.stdout}")
    return done


def driver_for(folder):
    """overlay where the kernel mounts it on this folder, as in no container; else vfs, slower."""
    for name in ("lower", "upper", "work", "merged"):
        (folder / "try" / name).mkdir(parents=True)
    merged = folder / "try/merged"
    options = ",".join(f"{key}={folder}/try/{name}" for key, name in
                       (("lowerdir", "lower"), ("upperdir", "upper"), ("workdir", "work")))
    mounted = run("mount", "-t", "overlay", "overlay", "-o", options, merged, check=False)
    if mounted.returncode == 0:
        run("umount", merged)
    return "overlay" if mounted.returncode == 0 else "vfs"


class Containers:
    def __init__(self, folder):
        self.folder = folder
        self.driver = driver_for(folder)
        self.image = None  # what containers are made of
        self.count = 0

    def build(self, script, build, target, out):
        """Builds an image with deploy/container/build; (name, id, megabytes)."""
        name, identity, megabytes, _ = run(
            script, "--build", build, "--target", target, "--out", out, "--storage", self.folder,
            "--driver", self.driver).stdout.split()
        return name, identity, float(megabytes)

    def podman(self, *command, check=True):
        return run("podman", "--root", self.folder / "root", "--runroot", self.folder / "run",
                   f"--storage-driver={self.driver}", "--runtime=crun",
                   "--cgroup-manager=cgroupfs", "--events-backend=none", *command, check=check)

    def start(self, volume, *command, options=()):
        """Starts a confined container; its name."""
        self.count += 1
        name = f"tessera-test-{self.count}"
        self.podman("run", "--detach", "--name", name, *CONFINED, "--volume", volume, *options,
                    self.image, *command)
        return name

    def start_worker(self, folder, *flags, user, options=(f"--group-add={USER}",)):
        return self.start(f"{folder}:{SOCKET_FOLDER}:ro", "worker", *flags,
                          options=(f"--user={user}:{user}", "--entrypoint=/usr/bin/tessera",
                                   *options))

    def pid(self, name):
        return int(self.podman("inspect", "--format={{.State.Pid}}", name).stdout)

    def wait(self, name):
        """The exit code of a container, and what it wrote."""
        code = int(self.podman("wait", name).stdout)
        return code, self.podman("logs", name).stdout

    def remove_all(self):
        self.podman("rm", "--all", "--force", "--time=0", check=False)
        self.podman("rmi", "--all", "--force", check=False)
