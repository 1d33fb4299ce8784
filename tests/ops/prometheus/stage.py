"""A Prometheus that scrapes a daemon under load and an idle one, and an Alertmanager behind it.

The loaded daemon has three tenants and TLS; its workers decode, share prefixes, compress, are
refused, are killed, and have their sequences offloaded and restored. The idle daemon stands for a
plain set-up: its series have no label `node`.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import time
import unittest

import cases
import sources
from processes import Programs, Prometheus, free_port, get, until

DEBIAN_TEMPLATES = pathlib.Path("/usr/share/prometheus/alertmanager/default.tmpl")
SCRAPE_S = 1
MIB = 1 << 20
POLICY = "chunkkv:budget=0.5+mosaickv"
RECALL = cases.ROOT / "tests/golden/recall"


def with_templates(alertmanager):
    """What to start Debian's Alertmanager with: it reads templates from /usr/share, which a
    package that is only unpacked has elsewhere. Skips the test where mounts are not allowed."""
    if DEBIAN_TEMPLATES.exists():
        return []
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "-r", "--mount"]
    share = pathlib.Path(alertmanager).resolve().parents[1] / "share"
    command = [*unshare, "sh", "-c", 'mount --bind "$0" /usr/share && exec "$@"', str(share)]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode != 0:
        raise unittest.SkipTest("Alertmanager is not installed, and this user cannot mount")
    return command


class Stage:
    """Starts everything; `load` then drives the loaded daemon."""

    def __init__(self, binaries, prometheus, alertmanager=None, webhook=None):
        self.binaries = pathlib.Path(binaries)
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="tessera-stage-"))
        self.programs = Programs(self.folder)
        self.loaded_port, self.idle_port = free_port(), free_port()
        self.address = f"unix:{self.folder}/loaded.sock"
        try:
            self.daemon = self.start_loaded_daemon()
            self.idle_daemon = self.start_daemon("idle", {"pool_bytes": str(256 * MIB)},
                                                 self.idle_port)
            alerts_port = self.start_alertmanager(alertmanager, webhook) if alertmanager else None
            self.prometheus = self.start_prometheus(prometheus, alerts_port)
            # Prometheus begins to scrape five seconds after its start.
            until("Prometheus scrapes both daemons", 30,
                  lambda: len(self.prometheus.instant("up == 1")) == 2)
            self.started = time.time()
        except BaseException:
            self.close()
            raise

    def wait_for(self, name, url):
        """Waits until a program that was started answers."""
        until(f"{name} answers", 20, lambda: get(url) or self.programs.has_ended(name))
        if self.programs.has_ended(name):
            raise AssertionError(f"{name} ended at its start: {self.programs.log(name)}")

    def close(self):
        self.programs.close()
        shutil.rmtree(self.folder)

    def start_daemon(self, name, config, port):
        config = {"listen": [f"unix:{self.folder}/{name}.sock"],
                  "metrics_address": f"127.0.0.1:{port}", "device": "cpu", **config}
        file = self.folder / f"{name}.json"
        file.write_text(json.dumps(config))
        daemon = self.programs.start(name, [self.binaries / "tesserad", f"--config={file}"])
        self.wait_for(name, f"http://127.0.0.1:{port}/metrics")
        return daemon

    def start_loaded_daemon(self):
        config = {
            "pool_bytes": str(256 * MIB), "pool_extent_bytes": str(2 * MIB),
            "staging_bytes": str(8 * MIB), "tail_extent_bytes": str(2 * MIB),
            "host_tier_bytes": str(64 * MIB), "raw_copy_bytes": str(1 * MIB),
            "offload_idle_ms": 200, "kv_events": "127.0.0.1:0",
            "tenants": [{"name": "chat"},
                        {"name": "batch", "token": "batch", "hard_limit_bytes": str(96 * MIB),
                         "soft_limit_bytes": str(64 * MIB)},
                        {"name": "tiny", "token": "tiny", "hard_limit_bytes": str(24 * MIB)}]}
        tls = self.make_certificate()
        self.has_tls = tls is not None
        if tls:
            config["listen"] = [self.address, f"127.0.0.1:{free_port()}"]
            config["tls_certificate_file"], config["tls_key_file"] = tls
        return self.start_daemon("loaded", config, self.loaded_port)

    def make_certificate(self):
        """The files of a certificate and its key; None without openssl."""
        if shutil.which("openssl") is None:
            return None
        files = str(self.folder / "tls.crt"), str(self.folder / "tls.key")
        subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt",
                        "ec_paramgen_curve:prime256v1", "-nodes", "-days", "90", "-subj",
                        "/CN=localhost", "-out", files[0], "-keyout", files[1]],
                       check=True, capture_output=True)
        return files

    def start_prometheus(self, program, alerts_port):
        rules = sources.PROMETHEUS / "tessera-recording-rules.yml"
        # The same alerts, without the wait.
        alerts = re.sub(r"\bfor: \w+", "for: 1s",
                        (sources.PROMETHEUS / "tessera-alerts.yml").read_text(encoding="utf-8"))
        (self.folder / "alerts.yml").write_text(alerts, encoding="utf-8")
        config = {
            "global": {"scrape_interval": f"{SCRAPE_S}s", "scrape_timeout": f"{SCRAPE_S}s",
                       "evaluation_interval": f"{SCRAPE_S}s"},
            "rule_files": [str(rules), str(self.folder / "alerts.yml")],
            "scrape_configs": [
                {"job_name": "tesserad",
                 "static_configs": [{"targets": [f"127.0.0.1:{self.loaded_port}"]}],
                 "relabel_configs": [{"target_label": "node", "replacement": "node-1"}]},
                {"job_name": "tesserad-idle",
                 "static_configs": [{"targets": [f"127.0.0.1:{self.idle_port}"]}]}]}
        if alerts_port is not None:
            config["alerting"] = {"alertmanagers": [
                {"static_configs": [{"targets": [f"127.0.0.1:{alerts_port}"]}]}]}
        (self.folder / "prometheus.yml").write_text(json.dumps(config))
        port = free_port()
        self.programs.start("prometheus", [
            program, f"--config.file={self.folder}/prometheus.yml",
            f"--storage.tsdb.path={self.folder}/tsdb", f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=warn"])
        url = f"http://127.0.0.1:{port}"
        self.wait_for("prometheus", f"{url}/-/ready")
        return Prometheus(url)

    def start_alertmanager(self, program, webhook):
        example = (sources.PROMETHEUS / "alertmanager-example.yml").read_text(encoding="utf-8")
        config = re.sub(r"group_wait: \w+", "group_wait: 0s", example)
        for receiver in ("page", "tickets"):
            config = config.replace(f"https://alerts.example.com/{receiver}",
                                    f"{webhook}/{receiver}")
        (self.folder / "alertmanager.yml").write_text(config, encoding="utf-8")
        port = free_port()
        self.programs.start("alertmanager", [
            *with_templates(program), program, f"--config.file={self.folder}/alertmanager.yml",
            f"--storage.path={self.folder}/alertmanager", "--cluster.listen-address=",
            f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"])
        self.wait_for("alertmanager", f"http://127.0.0.1:{port}/-/ready")
        return port
