"""A Debian system with a systemd of its own: systemd-nspawn boots a copy of a cached root.

Needs root, mmdebstrap and systemd-nspawn; asking for a machine skips the test where one is missing.
"""

import fcntl
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "deploy/container"))

import debian  # noqa: E402

CGROUP2_MAGIC = "cgroup2fs"
# append: each command of the unit opens the file again; what the last one says must not lie over
# the first lines.
SCENARIO = """[Unit]
Description=the scenario of a test
[Service]
Type=oneshot
TimeoutStartSec={timeout_s}
ExecStart=/bin/bash /test/scenario
StandardOutput=append:/test/output
StandardError=append:/test/output
ExecStopPost=/bin/systemctl --no-block poweroff
[Install]
WantedBy=multi-user.target
"""


def skip_unless_possible():
    if os.geteuid() != 0:
        raise unittest.SkipTest("a system of its own needs root")
    for tool in ("mmdebstrap", "systemd-nspawn", "dpkg-query", "unshare"):
        if shutil.which(tool) is None:
            raise unittest.SkipTest(f"{tool} is not installed: "
                                    "deploy/install-packages --operations")


def cached_root(programs):
    """A root with systemd and the libraries of `programs`, made once for this distribution."""
    owners = debian.owners_of(debian.libraries_of(programs)).values()
    packages = sorted({"systemd", "systemd-sysv", "dbus", "procps",
                       *(owner.name for owner in owners)})
    release = debian.distribution()
    key = hashlib.sha256(repr((release["VERSION_ID"], packages)).encode()).hexdigest()[:12]
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    cache = pathlib.Path(base, "tessera-tools")
    cache.mkdir(parents=True, exist_ok=True)
    root = cache / f"root-{release['VERSION_CODENAME']}-{key}"
    with open(f"{root}.lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.exists():
            make_root(root, release["VERSION_CODENAME"], packages)
    return root


def make_root(root, suite, packages):
    unfinished = pathlib.Path(f"{root}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    done = subprocess.run(
        ["mmdebstrap", "--variant=minbase", "--quiet", f"--include={','.join(packages)}",
         "--dpkgopt=force-unsafe-io", "--dpkgopt=path-exclude=/usr/share/man/*",
         "--dpkgopt=path-exclude=/usr/share/locale/*", "--dpkgopt=path-exclude=/usr/share/doc/*",
         suite, unfinished],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise unittest.SkipTest("mmdebstrap failed, perhaps there is no network:\n"
                                + "\n".join(done.stdout.splitlines()[-5:]))
    unfinished.rename(root)


def boot(root, scenario, files, timeout_s):
    """Boots a copy of `root` that runs the bash script `scenario`, and returns its output.

    files: {folder in the system: folder here}. A scenario that takes longer than `timeout_s` is
    stopped; its output until then is returned. Nothing of the copy remains.
    """
    with tempfile.TemporaryDirectory(prefix="tessera-machine-") as folder:
        folder = pathlib.Path(folder)
        for name in ("scenario.service", "scenario"):
            text = (SCENARIO.format(timeout_s=timeout_s) if name.endswith(".service")
                    else scenario)
            (folder / name).write_text(text, encoding="utf-8")
        for here in files.values():
            here.chmod(0o755)
        copies = "".join(f'mkdir -p "$root{there}"; cp -a "{here}"/. "$root{there}"\n'
                         for there, here in files.items())
        done = subprocess.run(
            # The process namespace takes the system with it if this is given up.
            ["unshare", "--mount", "--propagation=private", "--pid", "--fork", "--mount-proc",
             "--kill-child", "bash", "-euc", BOOT.replace("COPIES", copies), "boot", folder, root],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=2 * timeout_s, check=False, env={**os.environ, **hierarchy()})
        output = folder / "output"
        if not output.exists():
            raise AssertionError(f"the system did not boot: {done.returncode}\n{done.stdout}")
        return output.read_text(encoding="utf-8", errors="replace")


# The copy is an overlay whose upper half is in memory, so that it goes with the mount namespace.
BOOT = r"""
mkdir "$1/memory"
mount -t tmpfs tessera "$1/memory"
mkdir "$1/memory/upper" "$1/memory/work" "$1/memory/root"
root=$1/memory/root
mount -t overlay tessera -o "lowerdir=$2,upperdir=$1/memory/upper,workdir=$1/memory/work" "$root"
COPIES
mkdir -p "$root/test" "$root/etc/systemd/system/multi-user.target.wants"
cp "$1/scenario" "$root/test/"
cp "$1/scenario.service" "$root/etc/systemd/system/"
ln -s ../scenario.service "$root/etc/systemd/system/multi-user.target.wants/"
systemd-nspawn --quiet --register=no --keep-unit --private-network --console=pipe \
  --directory="$root" --boot
cp "$root/test/output" "$1/output"
"""


class Scenario(unittest.TestCase):
    """Checks what a scenario said in lines of "== NAME: VALUE"."""

    output = ""

    def check(self, **expected):
        said = dict(re.findall(r"^== ([\w-]+): (.*)$", self.output, re.MULTILINE))
        got = {name: said.get(name.replace("_", "-")) for name in expected}
        self.assertEqual(got, expected, self.output)


# What scenarios start with.
PRELUDE = r"""
set -u
say() { printf '== %s: %s\n' "$1" "$2"; }
unit() { systemctl show tesserad.service --property="$1" --value; }
within() {  # within SECONDS COMMAND...: repeats the command until it succeeds
  local end=$((SECONDS + $1)); shift
  until "$@"; do [ $SECONDS -lt $end ] || return 1; sleep 0.05; done
}
milliseconds() { echo $(($(date +%s%N) / 1000000)); }
configure() {  # configure MORE-FIELDS: a small daemon
  cat >/etc/tessera/tesserad.json <<JSON
{"listen": ["unix:/run/tessera/tesserad.sock"], "metrics_address": "", "device": "cpu",
 "pool_bytes": "268435456", "host_tier_bytes": "0", "drain_limit_ms": 2000$1}
JSON
}
as() {  # as USER COMMAND...
  local user=$1; shift
  setpriv --reuid="$user" --regid="$user" --init-groups "$@" 2>&1
}
work() {  # work USER [FLAGS...]: "decoded", or what the worker said
  local user=$1 said; shift
  if said=$(as "$user" tessera worker --steps=32 "$@"); then echo decoded
  else echo "$said" | tail -n 1; fi
}
"""


def hierarchy():
    """systemd-nspawn has to be told where the machine has control groups of version 1."""
    shown = subprocess.run(["stat", "--file-system", "--format=%T", "/sys/fs/cgroup"], check=False,
                           capture_output=True, text=True).stdout.strip()
    return {} if shown == CGROUP2_MAGIC else {"SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "0"}
