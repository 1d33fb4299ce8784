#!/usr/bin/env python3
"""Builds the image twice, and runs daemon and workers in containers that share one folder only."""

import json
import os
import pathlib
import stat
import subprocess
import sys
import tempfile
import time
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import cases  # noqa: E402
import podman  # noqa: E402
from podman import SOCKET_FOLDER, USER, run  # noqa: E402

BUILD = None
SCRIPT = cases.ROOT / "deploy/container/build"
WORKER = 1000  # any user; the socket's group is what lets it in
MOST_MB = {"cpu": 80, "cuda": 120}
NAMESPACES = ("pid", "ipc", "net", "mnt", "uts")
CONTAINERS = None
IMAGES = {}


def setUpModule():
    global CONTAINERS
    podman.skip_unless_possible()
    folder = tempfile.TemporaryDirectory(prefix="tessera-images-", dir="/var/tmp")
    unittest.addModuleCleanup(folder.cleanup)
    CONTAINERS = podman.Containers(pathlib.Path(folder.name))
    unittest.addModuleCleanup(CONTAINERS.remove_all)
    cuda = json.loads((BUILD / "facts.json").read_text(encoding="utf-8"))["cuda"]
    for target in ("cpu", "cuda") if cuda else ("cpu",):
        out = CONTAINERS.folder / target
        IMAGES[target] = (*CONTAINERS.build(SCRIPT, BUILD, target, out), out)
    CONTAINERS.image = IMAGES["cpu"][0]


class Image(unittest.TestCase):
    def test_size(self):
        for target, (name, identity, megabytes, _) in IMAGES.items():
            print(f"{name} {identity[:12]}: {megabytes} MB")
            self.assertLessEqual(megabytes, MOST_MB[target])

    def test_built_twice_it_is_the_same(self):
        _, identity, _, _ = IMAGES["cpu"]
        again = CONTAINERS.build(SCRIPT, BUILD, "cpu", CONTAINERS.folder / "again")
        self.assertEqual(again[1], identity)

    def test_configuration(self):
        for target, (name, *_) in IMAGES.items():
            shown = json.loads(CONTAINERS.podman("image", "inspect", name).stdout)[0]["Config"]
            self.assertEqual(shown["User"], f"{USER}:{USER}")
            self.assertEqual(shown["Entrypoint"], ["/usr/bin/tesserad"])
            self.assertEqual(shown["Labels"]["org.opencontainers.image.licenses"], "Apache-2.0")
            self.assertEqual("NVIDIA_VISIBLE_DEVICES=all" in shown.get("Env", []),
                             target == "cuda")

    def test_has_no_shell_and_nothing_that_gains_privileges(self):
        programs = []
        for folder, _, names in os.walk(IMAGES["cpu"][3] / "root"):
            for name in names:
                mode = os.lstat(os.path.join(folder, name)).st_mode
                self.assertFalse(mode & (stat.S_ISUID | stat.S_ISGID | stat.S_IWOTH)
                                 and not stat.S_ISLNK(mode), name)
                if stat.S_ISREG(mode) and mode & stat.S_IXUSR:
                    programs.append(name.split("-linux")[0])
        self.assertEqual(sorted(programs), ["ld", "tessera", "tesserad"])


class Bill(unittest.TestCase):
    def setUp(self):
        self.out = IMAGES["cpu"][3]
        self.bill = json.loads((self.out / "sbom.spdx.json").read_text(encoding="utf-8"))

    def test_is_in_the_image_too(self):
        inside = self.out / "root/usr/share/doc/tessera/sbom.spdx.json"
        self.assertEqual(inside.read_bytes(), (self.out / "sbom.spdx.json").read_bytes())

    def test_names_every_file(self):
        root = self.out / "root"
        files = {f"./{path.relative_to(root)}" for path in root.rglob("*")
                 if path.is_file() and not path.parent.is_symlink()}
        files = {name for name in files if not name.startswith(("./lib/", "./lib64/"))}
        listed = {file["fileName"] for file in self.bill["files"]}
        self.assertEqual(files - listed, {"./usr/share/doc/tessera/sbom.spdx.json"})
        self.assertEqual(listed - files, set())

    def test_names_the_package_of_every_library(self):
        packages = {package["SPDXID"]: package for package in self.bill["packages"]}
        origin = {relation["spdxElementId"]: packages[relation["relatedSpdxElement"]]
                  for relation in self.bill["relationships"]
                  if relation["relationshipType"] == "OTHER"}
        libraries = [file for file in self.bill["files"] if ".so" in file["fileName"]
                     and not file["fileName"].startswith("./etc")]
        self.assertGreater(len(libraries), 40)
        for file in libraries:
            package = origin[file["SPDXID"]]
            version = run("dpkg-query", "--show", "--showformat=${Version}",
                          package["name"]).stdout
            self.assertEqual(package["versionInfo"], version, file["fileName"])

    def test_is_valid(self):
        checker = cases.tool("python-spdx").parent / "pyspdxtools"
        done = run(checker, "--infile", self.out / "sbom.spdx.json", check=False)
        self.assertEqual(done.returncode, 0, done.stdout)


class Isolated(unittest.TestCase):
    """A daemon in a container, and workers in others that share nothing but its folder."""

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="tessera-run-")
        cls.addClassCleanup(folder.cleanup)
        cls.addClassCleanup(CONTAINERS.podman, "rm", "--all", "--force", "--time=0")
        cls.folder = pathlib.Path(folder.name)
        cls.folder.chmod(0o755)
        # What an init container does to a folder that belongs to root.
        code, said = CONTAINERS.wait(CONTAINERS.start(
            f"{cls.folder}:{SOCKET_FOLDER}", f"--prepare-directory={SOCKET_FOLDER}",
            f"--owner={USER}:{USER}", "--mode=0750",
            options=("--user=0:0", "--cap-add=CHOWN", "--cap-add=FOWNER")))
        if code != 0:
            raise AssertionError(said)
        cls.daemon = None

    def setUp(self):
        if self.status() is None:
            type(self).daemon = self.start_daemon()
            self.until(lambda: self.status() is not None, "the daemon does not serve")

    def start_daemon(self, folder=None):
        return CONTAINERS.start(f"{folder or self.folder}:{SOCKET_FOLDER}", "--metrics=",
                                "--device=cpu", "--pool-bytes=1GiB", "--host-tier-bytes=0")

    def status(self):
        done = run(BUILD / "bin/tessera", "status", "--json",
                   f"--address=unix:{self.folder}/tesserad.sock", check=False)
        return json.loads(done.stdout)["stats"] if done.returncode == 0 else None

    def used_bytes(self):
        return sum(int(tenant["used_bytes"]) for tenant in self.status()["tenants"])

    def until(self, condition, complaint, seconds=15):
        """Seconds until the condition held; every try is a process, so this does not spin."""
        begun = time.monotonic()
        while not condition():
            self.assertLess(time.monotonic() - begun, seconds, complaint)
        return time.monotonic() - begun

    def long_worker(self):
        """A worker that decodes for longer than the test lasts."""
        name = CONTAINERS.start_worker(self.folder, "--steps=100000", user=WORKER)
        self.until(lambda: sum(tenant["decoding_sequences"]
                               for tenant in self.status()["tenants"]) > 0,
                   "the worker does not decode")
        return name

    def test_two_workers_decode(self):
        workers = [CONTAINERS.start_worker(self.folder, f"--seed={seed}", user=WORKER)
                   for seed in (1, 2)]
        for worker in workers:
            code, said = CONTAINERS.wait(worker)
            self.assertEqual(code, 0, said)
            self.assertIn("mapped memory", said)
            self.assertRegex(said, r"checked .* worst error \S+e-0[4-9], limit 0.02")

    def test_processes_share_no_namespace_and_have_no_privileges(self):
        worker = self.long_worker()
        pids = [os.getpid(), CONTAINERS.pid(self.daemon), CONTAINERS.pid(worker)]
        for namespace in NAMESPACES:
            with self.subTest(namespace):
                seen = {os.readlink(f"/proc/{pid}/ns/{namespace}") for pid in pids}
                self.assertEqual(len(seen), len(pids))
        for pid, user in zip(pids[1:], (USER, WORKER)):
            status = dict(line.split(":\t", 1) for line in pathlib.Path(
                f"/proc/{pid}/status").read_text(encoding="ascii").splitlines())
            self.assertEqual(status["Uid"].split(), [str(user)] * 4)
            self.assertEqual(int(status["CapEff"], 16), 0)
            self.assertEqual((status["Seccomp"], status["NoNewPrivs"]), ("2", "1"))
        CONTAINERS.podman("kill", "--signal=KILL", worker)

    def test_a_folder_of_root_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            code, said = CONTAINERS.wait(self.start_daemon(folder))
        self.assertNotEqual(code, 0)
        self.assertIn("Permission denied", said)

    def test_without_the_group_a_worker_is_refused(self):
        code, said = CONTAINERS.wait(CONTAINERS.start_worker(self.folder, user=WORKER, options=()))
        self.assertNotEqual(code, 0)
        self.assertIn("Permission denied", said)

    def test_a_killed_worker_leaves_nothing(self):
        self.until(lambda: self.status()["sessions"] == 0, "another session remains")
        before = self.used_bytes()
        worker = self.long_worker()
        held = self.used_bytes()
        CONTAINERS.podman("kill", "--signal=KILL", worker)
        seconds = self.until(lambda: self.status()["sessions"] == 0
                             and self.used_bytes() == before, "session or memory remain", 5)
        print(f"{(held - before) / 2**20:.0f} MiB and the session were gone after {seconds:.2f} s")

    def test_a_killed_daemon_is_noticed_and_its_files_are_no_obstacle(self):
        worker = self.long_worker()
        CONTAINERS.podman("kill", "--signal=KILL", self.daemon)
        begun = time.monotonic()
        code, said = CONTAINERS.wait(worker)
        print(f"the worker ended after {time.monotonic() - begun:.2f} s: {said.strip()}")
        self.assertEqual(code, 1, said)
        self.assertRegex(said, "lost|closed")
        self.assertIn("tesserad.sock", {path.name for path in self.folder.iterdir()})
        self.setUp()
        worker = CONTAINERS.start_worker(self.folder, "--steps=16", user=WORKER)
        code, said = CONTAINERS.wait(worker)
        self.assertEqual(code, 0, said)

    def test_a_second_daemon_is_refused(self):
        code, said = CONTAINERS.wait(self.start_daemon())
        self.assertNotEqual(code, 0)
        self.assertIn("tesserad.sock", said)
        self.assertIsNotNone(self.status())

    def test_stop_drains(self):
        CONTAINERS.podman("stop", "--time=20", self.daemon)
        code, said = CONTAINERS.wait(self.daemon)
        self.assertEqual(code, 0, said)
        self.assertIn("draining", said)


if __name__ == "__main__":
    podman.enter_own_mounts()
    BUILD = pathlib.Path(sys.argv.pop(1)).resolve()
    cases.main()
