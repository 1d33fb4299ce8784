"""The admin service: refused on the workers' addresses, served on a socket of its own."""

import stat
import subprocess

import wire
from attack import Attack
from daemon import Daemon
from http2 import ADMIN, PERMISSION_DENIED, UNIMPLEMENTED, Connection
from worker import Session

HOUR_MS = 3_600_000


def requests(sequence):
    """Method -> what follows the session of its request; Drain comes last."""
    of_sequence = wire.fixed64(2, sequence)
    return {
        "ListSessions": b"", "ListSequences": b"", "ListPrefixes": b"", "ListPolicies": b"",
        "NodeStats": b"", "Reload": b"", "Describe": of_sequence, "Compress": of_sequence,
        "Offload": of_sequence, "Restore": of_sequence,
        "SetPolicy": wire.fixed64(1, sequence) + wire.nested(2, "quest"),
        "Evict": wire.fixed64(1, sequence), "Drain": wire.number(1, HOUR_MS)}


class WorkerAddresses(Attack):
    def check(self, name, kind, with_session):
        daemon = self.start()
        session = self.keep(Session(daemon.socket))
        sequence = session.create(session.register())
        address = getattr(daemon, kind)
        connection = session.connection if with_session else self.keep(Connection(address))
        statuses = {method: connection.call(ADMIN + method, message)[0]
                    for method, message in requests(sequence).items()}
        taken = [method for method, status in statuses.items()
                 if status not in (PERMISSION_DENIED, UNIMPLEMENTED)]
        self.judge(name, f"{len(taken)} of {len(statuses)} calls answered", "none answered",
                   not taken)

    def test_unix(self):
        self.check("admin calls on the workers' socket", "socket", False)

    def test_unix_with_a_session(self):
        self.check("admin calls on a session's connection", "socket", True)

    def test_tcp(self):
        self.check("admin calls over TCP", "tcp", False)


class AdminAddress(Attack):
    def check(self, name, daemon, address):
        path = daemon.folder / address.rpartition("/")[2]
        mode = f"{stat.S_IMODE(path.stat().st_mode):04o}" if path.exists() else "missing"
        status = subprocess.run([daemon.build / "bin/tessera", "status", f"--address={address}"],
                                check=False, capture_output=True).returncode
        self.judge(name, f"mode {mode}, tessera status exits with {status}",
                   "mode 0600, exits with 0", mode == "0600" and status == 0)

    def test_default_path(self):
        daemon = self.start()
        self.check("the admin socket", daemon, daemon.admin)

    def test_configured_path(self):
        folder = self.start().folder
        daemon = self.start(admin_listen=f"unix:{folder}/other.sock")
        daemon.folder = folder
        self.check("the admin socket, configured", daemon, f"unix:{folder}/other.sock")

    def test_flag(self):
        address = f"unix:{self.start().folder}/other.sock"
        shown = subprocess.run([Daemon.build / "bin/tesserad", f"--admin-listen={address}",
                                "--print-config"], check=False, capture_output=True, text=True)
        taken = address in shown.stdout
        self.judge("--admin-listen", "taken" if taken else "not known", "taken", taken)
