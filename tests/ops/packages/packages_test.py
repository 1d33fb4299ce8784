#!/usr/bin/env python3
"""Builds the Debian packages, and installs, upgrades, removes and purges them in a system."""

import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import cases  # noqa: E402
import machine  # noqa: E402

BUILD = None
NAMES = ("libtessera-dev", "libtessera2", "tessera", "tesserad")
NEXT_VERSION = "99.0-1"
PACKAGES = {}  # name -> file; "folder": where they are

SCENARIO = machine.PRELUDE + r"""
dpkg --install /packages/now/*.deb; say install-code $?
say state "$(systemctl is-enabled tesserad.service) $(systemctl is-active tesserad.service)"
say user "$(getent passwd tessera | cut -d: -f1,7)"
say configuration "$(stat -c '%a %U:%G' /etc/tessera/tesserad.json)"
say folder "$(stat -c '%a %U:%G' /run/tessera)"
say loads "$(setpriv --reuid=tessera --regid=tessera --clear-groups \
  tesserad --config=/etc/tessera/tesserad.json --print-config >/dev/null; echo $?)"
say library "$(ldconfig -p | grep -c 'libtessera\.so\.2 ')"

useradd --groups tessera worker
configure ''
systemctl enable --now tesserad.service; say start-code $?
say worker "$(work worker)"
pid=$(unit MainPID)

dpkg --install /packages/next/*.deb </dev/null; say upgrade-code $?
say version "$(dpkg-query --show --showformat='${Version}' tesserad)"
say state-after-upgrade \
  "$(systemctl is-enabled tesserad.service) $(systemctl is-active tesserad.service)"
say new-process "$([ "$pid" != "$(unit MainPID)" ]; echo $?)"
say configuration-kept \
  "$(stat -c '%a %U:%G' /etc/tessera/tesserad.json) $(grep -c 268435456 /etc/tessera/tesserad.json)"
say worker-after-upgrade "$(work worker)"

dpkg --remove tesserad; say remove-code $?
say processes-after-remove "$(cat /proc/[0-9]*/comm | grep -c tesserad)"
say configuration-after-remove "$(grep -c 268435456 /etc/tessera/tesserad.json)"
dpkg --purge tesserad tessera libtessera-dev libtessera2; say purge-code $?
say left "$(find / /run -xdev -name '*tessera*' -not -path '/proc/*' -not -path '/packages/*' |
  tr '\n' ' ')"
"""


def run(*command):
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True)
    if done.returncode != 0:
        raise AssertionError(f"{command}\n{done.stdout}")
    return done.stdout


def make_next(package, folder):
    """The same package with a later version."""
    content = folder / "content"
    run("dpkg-deb", "--raw-extract", package, content)
    control = content / "DEBIAN/control"
    text = re.sub(r"^Version: .*$", f"Version: {NEXT_VERSION}", control.read_text(encoding="utf-8"),
                  flags=re.MULTILINE)
    control.write_text(text, encoding="utf-8")
    (folder / "next").mkdir()
    run("dpkg-deb", "--build", "-Znone", content, folder / "next")
    machine.shutil.rmtree(content)


def setUpModule():
    for tool in ("cpack", "dpkg-deb", "dpkg-shlibdeps"):
        if machine.shutil.which(tool) is None:
            raise unittest.SkipTest(f"{tool} is not installed")
    folder = tempfile.TemporaryDirectory(prefix="tessera-packages-")
    unittest.addModuleCleanup(folder.cleanup)
    PACKAGES["folder"] = pathlib.Path(folder.name)
    shown = run(cases.ROOT / "deploy/packaging/build", "--build", BUILD, "--out",
                PACKAGES["folder"] / "now")
    for path in map(pathlib.Path, shown.splitlines()):
        PACKAGES[path.name.split("_")[0]] = path


class Content(unittest.TestCase):
    def field(self, package, name):
        return run("dpkg-deb", "--field", PACKAGES[package], name).strip()

    def files(self, package):
        rows = [line.split(None, 5)
                for line in run("dpkg-deb", "--contents", PACKAGES[package]).splitlines()]
        self.assertEqual({row[1] for row in rows}, {"root/root"})
        return {row[5].split(" -> ")[0][1:]: row[0] for row in rows if not row[0].startswith("d")}

    def test_names_and_sizes(self):
        self.assertEqual(sorted(name for name in PACKAGES if name != "folder"), sorted(NAMES))
        for name in NAMES:
            print(f"{name}: {PACKAGES[name].stat().st_size / 1e6:.1f} MB, depends on "
                  f"{self.field(name, 'Depends')}")

    def test_dependencies(self):
        for name in ("tesserad", "tessera"):
            self.assertIn("libgrpc++", self.field(name, "Depends"))
        self.assertIn("libc6", self.field("libtessera2", "Depends"))
        self.assertIn("systemd", self.field("tesserad", "Depends"))
        self.assertRegex(self.field("libtessera-dev", "Depends"), r"^libtessera2 \(= \S+\)$")

    def test_every_package_has_its_licence(self):
        for name in NAMES:
            self.assertIn(f"/usr/share/doc/{name}/copyright", self.files(name))

    def test_files_of_the_daemon(self):
        files = self.files("tesserad")
        for path in ("/usr/bin/tesserad", "/usr/lib/systemd/system/tesserad.service",
                     "/usr/lib/systemd/system/tesserad@.service",
                     "/usr/lib/sysusers.d/tessera.conf", "/usr/lib/tmpfiles.d/tessera.conf",
                     "/usr/share/man/man8/tesserad.8", "/etc/tessera/tesserad.json"):
            self.assertIn(path, files)
        self.assertEqual([path for path, mode in files.items() if "s" in mode], [])

    def test_files_of_the_libraries(self):
        names = {pathlib.PurePath(path).name for path in self.files("libtessera2")}
        self.assertIn("libtessera.so.2", names)
        self.assertEqual([name for name in names if not name.startswith("libtessera.so.")],
                         ["copyright"])
        names = {pathlib.PurePath(path).name for path in self.files("libtessera-dev")}
        self.assertLessEqual({"tessera.h", "worker.h", "libtessera.so", "libtessera-client.a",
                              "tessera.pc", "TesseraConfig.cmake"}, names)


class Life(machine.Scenario):
    @classmethod
    def setUpClass(cls):
        machine.skip_unless_possible()
        make_next(PACKAGES["tesserad"], PACKAGES["folder"])
        root = machine.cached_root([BUILD / "bin/tesserad", BUILD / "bin/tessera"])
        cls.output = machine.boot(root, SCENARIO, {"/packages": PACKAGES["folder"]}, timeout_s=90)

    def test_installation_starts_nothing(self):
        self.check(install_code="0", state="disabled inactive")

    def test_installation_prepares_user_folder_and_configuration(self):
        self.check(user="tessera:/usr/sbin/nologin", folder="750 tessera:tessera",
                   configuration="640 root:tessera", loads="0", library="1")

    def test_a_worker_decodes(self):
        self.check(start_code="0", worker="decoded")

    def test_upgrade_restarts_and_keeps_the_configuration(self):
        self.check(upgrade_code="0", version=NEXT_VERSION,
                   state_after_upgrade="enabled active", new_process="0",
                   configuration_kept="640 root:tessera 1", worker_after_upgrade="decoded")

    def test_removal_stops_and_keeps_the_configuration(self):
        self.check(remove_code="0", processes_after_remove="0", configuration_after_remove="1")

    def test_purge_leaves_nothing(self):
        self.check(purge_code="0", left="")


if __name__ == "__main__":
    BUILD = pathlib.Path(sys.argv.pop(1))
    cases.main()
