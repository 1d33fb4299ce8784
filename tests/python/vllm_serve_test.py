"""Two HTTP servers of vLLM, as users start them, on one daemon: what they share and survive.

The cases run in the order of their names, with the same servers.
"""

import concurrent.futures
import os
import signal

from vllm_support import HEAD, POOL, Daemon, Server, Shared, restart, support

# Room for 41 blocks of 32 tokens: the prompts of "crowded" fill 42, and each grows into one more.
SMALL = ("--block-size=32", "--num-gpu-blocks-override=42", "--max-model-len=1280")


class Servers(Shared):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.tesserad = Daemon(POOL)
        cls.addClassCleanup(cls.tesserad.close)
        cls.first, cls.small = cls.server(), cls.server(*SMALL)
        cls.first.wait_until_ready()
        cls.small.wait_until_ready()

    @classmethod
    def server(cls, *flags):
        flags = flags or ("--max-model-len=2048",)
        server = Server(cls.folder, cls.model, {"address": cls.tesserad.address}, *flags)
        cls.addClassCleanup(server.close)
        return server

    def sessions(self):
        """Of engines: this one asks by one, too."""
        return self.tenant(self.tesserad)["sessions"] - 1

    def hits(self):
        """Tokens that each engine has found in the daemon."""
        return [server.counter("vllm:external_prefix_cache_hits_total")
                for server in (self.first, self.small)]

    def check(self, server, *names):
        """Each set of prompts is a request; the engine gets all of them at once."""
        with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
            found = pool.map(lambda name: server.generate(self.prompts[name], self.TOKENS), names)
            for name, got in zip(names, found):
                self.assertEqual(got, self.wanted[name], name)

    def test_1_answers_are_those_of_vllm(self):
        """Prompts in chunks, rows that decode, and preemption, in two engines at once."""
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            both = [pool.submit(self.check, self.first, "long", "short", "crowded"),
                    pool.submit(self.check, self.small, "long", "crowded", "short")]
            for one in both:
                one.result()
        self.assertEqual(self.sessions(), 4)  # a scheduler and a worker each
        self.assertEqual(self.first.counter("vllm:num_preemptions_total"), 0)
        self.assertGreater(self.small.counter("vllm:num_preemptions_total"), 0)

    def test_2_a_shared_head_is_computed_once(self):
        before, hits = self.appended(self.tesserad), self.hits()
        self.check(self.first, "shared")
        self.check(self.small, "shared")
        # Both have computed the tails and the answers, and only the first one the head.
        tails = 2 * sum(len(prompt) - HEAD + self.TOKENS for prompt in self.prompts["shared"])
        self.assertLess(self.appended(self.tesserad) - before, HEAD + tails)
        found = [after - before for after, before in zip(self.hits(), hits)]
        self.assertEqual(found, [3 * HEAD, 4 * HEAD])

    def test_3_a_killed_engine_is_started_again(self):
        idle = self.tenant(self.tesserad)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(self.first.generate, self.prompts["long"], 900)
            self.wait_until(
                lambda: self.tenant(self.tesserad)["sequences"] >= idle["sequences"] + 4)
            self.first.kill()
        self.check(self.small, "short")
        self.wait_until(lambda: self.sessions() == 2)
        self.assertLessEqual(self.tenant(self.tesserad)["sequences"], idle["sequences"])

        # Without its worker a server ends by itself.
        type(self).first = self.server()
        self.first.wait_until_ready()
        before = self.appended(self.tesserad)
        self.check(self.first, "shared")  # with the head that the killed engine had published
        self.assertLess(self.appended(self.tesserad) - before, HEAD)
        os.kill(self.first.process_id("VLLM::Worker"), signal.SIGKILL)
        self.first.process.wait(120)
        type(self).first = self.server()
        self.first.wait_until_ready()
        self.check(self.first, "long", "short", "shared")

    def test_4_the_daemon_is_restarted_under_both(self):
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            both = [pool.submit(self.check, self.first, "long", "short"),
                    pool.submit(self.check, self.small, "crowded", "short")]
            self.wait_until(lambda: self.tenant(self.tesserad)["decoding_sequences"] > 0)
            restart(self.tesserad)
            for one in both:
                one.result()
        for server in (self.first, self.small):
            self.check(server, "shared", "short")


if __name__ == "__main__":
    support.main()
