#!/usr/bin/env python3
"""Runs the daemon's unit under a systemd of its own: start, access, death, hang, reload, stop."""

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

UNITS = cases.ROOT / "deploy/systemd"
WORST_SCORE = 2.5  # of 10, as systemd-analyze counts exposure
BUILD = None

SCENARIO = machine.PRELUDE + r"""
systemd-sysusers; systemd-tmpfiles --create tessera.conf
useradd --groups tessera worker; useradd stranger
configure ', "compactor_cpus": "0"'
mkdir -p /etc/systemd/system/tesserad.service.d
printf '[Service]\nWatchdogSec=4\n' >/etc/systemd/system/tesserad.service.d/test.conf
systemctl daemon-reload
say verify "$(systemd-analyze verify tesserad.service 2>&1 | grep tesserad | tr '\n' ' ')"

begun=$(milliseconds)
systemctl start tesserad.service; say start-code $?
say start-ms $(($(milliseconds) - begun))
say status-at-once "$(tessera status >/dev/null 2>&1; echo $?)"
pid=$(unit MainPID)
say user "$(stat -c %U:%G /proc/$pid)"
for name in CapEff CapBnd Seccomp NoNewPrivs; do
  say "$name" "$(sed -n "s/^$name:\t//p" /proc/$pid/status)"
done
say folder "$(stat -c '%A %U:%G' /run/tessera)"
say socket "$(stat -c '%A %U:%G' /run/tessera/tesserad.sock)"
say worker "$(work worker)"
say stranger "$(work stranger | grep -o 'Permission denied')"

folder=$(stat -c %i /run/tessera)
kill -KILL "$pid"
restarted() { [ "$(unit NRestarts)" -ge "$1" ] && systemctl --quiet is-active tesserad.service; }
begun=$(milliseconds)
within 10 restarted 1; say restarted $?
say restart-ms $(($(milliseconds) - begun))
say same-folder "$([ "$folder" = "$(stat -c %i /run/tessera)" ]; echo $?)"
say worker-after-kill "$(work worker)"

pid=$(unit MainPID)
configure ', "tenants": [{"name": "default"}, {"name": "second", "token": "s3cret"}]'
systemctl reload tesserad.service; say reload-code $?
has_tenant() { tessera status --json 2>&1 | grep -q '"second"'; }
within 5 has_tenant; say reloaded $?
say worker-of-new-tenant "$(work worker --token=s3cret)"
say pid-after-reload "$([ "$pid" = "$(unit MainPID)" ]; echo $?)"

kill -STOP "$pid"
within 20 restarted 2; say restarted-after-hang $?
say hang-in-journal "$(journalctl -u tesserad.service | grep -q 'Watchdog timeout'; echo $?)"
say worker-after-hang "$(work worker)"

begun=$(milliseconds)
systemctl stop tesserad.service; say stop-code $?
say stop-ms $(($(milliseconds) - begun))
say result "$(unit Result) $(unit ExecMainStatus)"

configure ''
for number in 1 2; do
  sed "s|tesserad.sock|{uuid}.sock|
       s|\"device\": \"cpu\"|\"device\": \"CPU-00000000-0000-0000-0000-00000000000$number\"|" \
    /etc/tessera/tesserad.json >/etc/tessera/numa$number.json
done
systemctl start tesserad@numa1.service tesserad@numa2.service; say start-two-code $?
say sockets "$(ls /run/tessera | grep -c '^CPU-.*[12]\.sock$')"
say verify-template "$(systemd-analyze verify tesserad@numa1.service 2>&1 | grep tesserad |
                       tr '\n' ' ')"
systemctl stop tesserad@numa1.service; say stop-one-code $?
say worker-of-the-other "$(work worker --address=unix:/run/tessera/ --device=CPU-00000000)"
systemctl stop tesserad@numa2.service
journalctl --no-pager -u tesserad.service
"""


def score_of(unit):
    """The exposure that systemd-analyze computes from a unit file."""
    shown = subprocess.run(["systemd-analyze", "security", "--offline=true", "--no-pager", unit],
                           check=False, capture_output=True, text=True)
    match = re.search(r"exposure level for \S+: ([\d.]+)", shown.stdout)
    if match is None:
        raise unittest.SkipTest(f"systemd-analyze cannot judge a file: {shown.stderr.strip()}")
    return float(match[1])


@unittest.skipUnless(machine.shutil.which("systemd-analyze"), "systemd-analyze is not installed")
class Exposure(unittest.TestCase):
    def test_unit(self):
        score = score_of(UNITS / "tesserad.service")
        print(f"exposure without CUDA: {score}")
        self.assertLess(score, WORST_SCORE)

    def test_unit_with_cuda(self):
        with tempfile.TemporaryDirectory() as folder:
            unit = pathlib.Path(folder, "tesserad.service")
            unit.write_text((UNITS / "tesserad.service").read_text(encoding="utf-8")
                            + (UNITS / "cuda.conf").read_text(encoding="utf-8"), encoding="utf-8")
            score = score_of(unit)
        print(f"exposure with CUDA: {score}")
        self.assertLess(score, WORST_SCORE)


class Unit(machine.Scenario):
    @classmethod
    def setUpClass(cls):
        machine.skip_unless_possible()
        root = machine.cached_root([BUILD / "bin/tesserad", BUILD / "bin/tessera"])
        with tempfile.TemporaryDirectory(prefix="tessera-unit-") as name:
            folder = pathlib.Path(name)
            for component in ("daemon", "service", "client"):
                subprocess.run(
                    ["cmake", "--install", BUILD, "--prefix", "/usr", "--component", component,
                     "--strip"], check=True, stdout=subprocess.DEVNULL,
                    env={**machine.os.environ, "DESTDIR": folder})
            cls.output = machine.boot(root, SCENARIO, {"/": folder}, timeout_s=90)
        print(" ".join(re.findall(r"^== (\S+-ms: \d+)$", cls.output, re.MULTILINE)))

    def test_unit_file_is_valid(self):
        self.check(verify="")

    def test_start_returns_when_the_daemon_serves(self):
        self.check(start_code="0", status_at_once="0")

    def test_runs_without_privileges(self):
        self.check(user="tessera:tessera", CapEff="0" * 16, CapBnd="0" * 16, Seccomp="2",
                   NoNewPrivs="1")

    def test_only_the_group_may_connect(self):
        self.check(folder="drwxr-x--- tessera:tessera", socket="srw-rw---- tessera:tessera",
                   worker="decoded", stranger="Permission denied")

    def test_a_killed_daemon_is_restarted_in_the_same_folder(self):
        self.check(restarted="0", same_folder="0", worker_after_kill="decoded")

    def test_reload_keeps_the_process(self):
        self.check(reload_code="0", reloaded="0", worker_of_new_tenant="decoded",
                   pid_after_reload="0")

    def test_a_daemon_that_hangs_is_restarted(self):
        self.check(restarted_after_hang="0", hang_in_journal="0", worker_after_hang="decoded")

    def test_two_daemons_share_a_folder(self):
        self.check(start_two_code="0", sockets="2", verify_template="", stop_one_code="0",
                   worker_of_the_other="decoded")

    def test_stop_is_clean(self):
        self.check(stop_code="0", result="success 0")


if __name__ == "__main__":
    BUILD = pathlib.Path(sys.argv.pop(1))
    cases.main()
