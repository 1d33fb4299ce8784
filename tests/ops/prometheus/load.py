"""Drives the loaded daemon of a Stage so that every panel has something to show."""

import json
import signal
import subprocess

from processes import get, until
from stage import POLICY, RECALL

# Words that the recall model knows.
WORDS = "what is the special number for lobster ? answer : 0 4 .".split()


FOR_EVER = "--steps=100000"


class Load:
    """Workers of three tenants. One of them decodes by RPC until the stage closes."""

    def __init__(self, stage):
        self.stage = stage
        self.address = f"--address={stage.address}"
        self.round = 0
        self.rpc_worker = self.worker("rpc", "--token=batch", "--transport=rpc", "--sequences=2",
                                      "--prompt=128", FOR_EVER)

    def tessera(self, *arguments):
        return [self.stage.binaries / "tessera", *arguments, self.address]

    def worker(self, name, *flags):
        return self.stage.programs.start(name, self.tessera("worker", f"--name={name}", *flags))

    def metric(self, name, labels=""):
        """The sum over the series of a metric whose labels contain `labels`."""
        total = 0.0
        text = get(f"http://127.0.0.1:{self.stage.loaded_port}/metrics") or ""
        for line in text.splitlines():
            if line.startswith((name + "{", name + " ")) and labels in line:
                total += float(line.rpartition(" ")[2])
        return total

    def rises(self, name, labels=""):
        """Returns what waits until a metric is greater than it is now."""
        before = self.metric(name, labels)
        return lambda: until(f"{name} rises", 30, lambda: self.metric(name, labels) > before)

    def run_round(self):
        """About five seconds of mixed work."""
        self.round += 1
        mapped = self.decode()
        self.refuse()
        self.share()
        self.compress()
        self.move()
        self.refuse()
        self.lose(mapped)

    def decode(self):
        """Starts a worker with mapped memory, which decodes until it is killed."""
        attached = self.rises("tessera_sessions_total")
        worker = self.worker("mapped", "--sequences=4", "--prompt=128", FOR_EVER)
        attached()
        return worker

    def refuse(self):
        """Two sequences of the small tenant move to the host tier, then a call is refused."""
        refused = self.rises("tessera_memory_refusals_total")
        self.stage.programs.run("refused", self.tessera(
            "worker", "--token=tiny", "--sequences=8", "--prompt=2048", "--steps=10"), code=1)
        refused()

    def share(self):
        """Workers that ask for one prefix at the same time: one computes it, the others wait."""
        self.run_example("prefix_sharing")
        words = WORDS[self.round % len(WORDS):] + WORDS[:self.round % len(WORDS)]
        prompt = " ".join(words * 24)
        waiting = [self.stage.programs.start("generate", self.tessera(
            "generate", f"--model={RECALL}", f"--policy={POLICY}", "--share=280", "--tokens=24",
            prompt)) for _ in range(3)]
        for process in waiting:
            self.stage.programs.check("generate", process)

    def compress(self):
        self.run_example("compression")
        self.stage.programs.run("eval", self.tessera(
            "eval", f"--model={RECALL}", "--quick", "--samples=1", "--lengths=512",
            "--tasks=niah_multikey", "--depths=0.5", "--question=blind", "--workers=1",
            POLICY, "mosaickv", "snapkv:budget=0.3"))

    def move(self):
        """Offloads the sequences of a worker that stands still; its next calls restore them."""
        restored = self.rises("tessera_moves_total", 'direction="restore"')
        self.rpc_worker.send_signal(signal.SIGSTOP)
        until("the sequences are offloaded", 30, self.offload)
        until("Prometheus sees an offloaded sequence", 30, lambda: self.stage.prometheus.instant(
            'tessera_sequences{tenant="batch", state="offloaded"} > 0'))
        self.rpc_worker.send_signal(signal.SIGCONT)
        restored()

    def offload(self):
        """Fails while a call of the stopped worker is still running in the daemon."""
        done = subprocess.run(self.tessera("status", "--json"), capture_output=True, check=True)
        ids = [sequence["id"] for sequence in json.loads(done.stdout)["sequences"]["sequences"]
               if sequence["tenant"] == "batch" and sequence["state"] != "offloaded"]
        return all([subprocess.run(self.tessera("offload", sequence), capture_output=True,
                                   check=False).returncode == 0 for sequence in ids])

    def lose(self, worker):
        """Kills a worker in the middle of its work."""
        lost = self.rises("tessera_session_ends_total", 'reason="lost"')
        worker.kill()
        worker.wait()
        lost()

    def run_example(self, name):
        self.stage.programs.run(name, [self.stage.binaries / name, self.stage.address])
