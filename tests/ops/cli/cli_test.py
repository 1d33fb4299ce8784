"""`tessera` as people and scripts use it: on terminals, in pipes, without a daemon."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import cases  # noqa: E402
from terminal import Terminal  # noqa: E402

TESSERA, TESSERAD, DOCUMENTS = sys.argv[1:4]
del sys.argv[1:4]
SGR = re.compile(r"\x1b\[[0-9;]*m")


def run(*arguments, status=0, **options):
    """Runs `tessera`, checks its exit status, and returns what it printed."""
    done = subprocess.run([TESSERA, *arguments], text=True, check=False, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, **options)
    if done.returncode != status:
        raise AssertionError(f"{arguments}: exit status {done.returncode}, not {status}:\n"
                             f"{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


class WithDaemon(unittest.TestCase):
    """A daemon with a worker that decodes all the time."""

    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="tessera-cli-"))
        cls.address = f"unix:{cls.folder}/tesserad.sock"
        cls.processes = []
        cls.start(TESSERAD, f"--listen={cls.address}", "--device=cpu", "--pool-bytes=512MiB",
                  "--metrics=", "--log-level=error")
        cls.until("the daemon serves", lambda: subprocess.run(
            [TESSERA, "status", f"--address={cls.address}"], capture_output=True,
            check=False).returncode == 0)
        cls.start(TESSERA, "worker", f"--address={cls.address}", "--sequences=5", "--prompt=64",
                  "--steps=100000", "--check-every=100000", "--name=busy")
        cls.until("the worker decodes", lambda: len(cls.sequences()) == 5)

    @classmethod
    def tearDownClass(cls):
        for process in reversed(cls.processes):
            process.kill()
            process.wait()
        shutil.rmtree(cls.folder)

    @classmethod
    def start(cls, *command):
        # pylint: disable=consider-using-with
        cls.processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))

    @classmethod
    def until(cls, what, condition, seconds=30):
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"not in {seconds} s: {what}")

    @classmethod
    def sequences(cls):
        status = json.loads(run("status", "--json", f"--address={cls.address}"))
        return [sequence["id"] for sequence in status["sequences"]["sequences"]]

    def terminal(self, *arguments, **options):
        environment = {"TESSERA_ADDRESS": self.address, **options.pop("environment", {})}
        terminal = Terminal([TESSERA, *arguments], environment=environment, **options)
        self.addCleanup(terminal.close)
        return terminal

    def check_size(self, terminal):
        frame = [SGR.sub("", line) for line in terminal.frame()]
        self.assertLessEqual(len(frame), terminal.rows)
        for line in frame:
            self.assertLessEqual(len(line), terminal.columns, line)
        return frame


class Top(WithDaemon):
    def watch(self, **options):
        top = self.terminal("top", "--interval-ms=200", **options)
        top.wait_for(lambda frame: any("memory" in line for line in frame), "a frame")
        return top

    def test_fits_terminals_of_every_size(self):
        for columns, rows in (80, 24), (40, 10), (20, 4), (200, 50):
            with self.subTest(f"{columns}x{rows}"):
                top = self.watch(columns=columns, rows=rows)
                frame = self.check_size(top)
                self.assertTrue(frame[0].startswith("tesserad"))
                self.assertTrue(frame[1].startswith("memory"))
                top.press(b"q")
                self.assertEqual(top.finish(), 0)
                self.assertTrue(top.is_restored())

    def test_shows_rates_per_sequence(self):
        top = self.watch()

        def is_decoding(frame):
            rows = [SGR.sub("", line) for line in frame if re.match(r"s[0-9]", line)]
            return len(rows) >= 5 and all(re.search(r" [0-9.]+k? +[0-9.]+k? ", row) for row in rows)

        top.wait_for(lambda frame: any("tokens/s" in line for line in frame), "a column of rates")
        top.wait_for(is_decoding, "rows with rates")
        self.check_size(top)

    def test_follows_the_size(self):
        top = self.watch(columns=120, rows=40)
        top.resize(60, 12)
        os.kill(top.process.pid, signal.SIGWINCH)
        top.wait_for(lambda frame: 0 < len(frame) <= 12, "a smaller frame")
        self.check_size(top)

    def test_keys_change_what_is_shown(self):
        top = self.watch()
        for keys, wanted in ((b"h", "this help"), (b"x", "tokens/s"), (b"\t", "transport"),
                             (b"\x1b[C", "appended/s"), (b"1", "tokens/s"), (b"b", "sort: tiles"),
                             (b"\x1b[B", "q quit"), (b"\x1b", "q quit")):
            top.press(keys)
            top.wait_for(lambda frame, wanted=wanted: wanted in "\n".join(frame), wanted)
        top.press(b"q")
        self.assertEqual(top.finish(), 0)
        self.assertTrue(top.is_restored())

    def test_every_end_restores_the_terminal(self):
        for end, status in ((b"\x03", 0), (signal.SIGTERM, -signal.SIGTERM),
                            (signal.SIGHUP, -signal.SIGHUP), (signal.SIGINT, 0)):
            with self.subTest(str(end)):
                top = self.watch()
                if isinstance(end, bytes):
                    top.press(end)
                else:
                    os.kill(top.process.pid, end)
                self.assertEqual(top.finish(), status)
                self.assertTrue(top.is_restored())

    def test_a_stop_restores_the_terminal_until_it_continues(self):
        top = self.watch()
        # The shell's part: without one, the group is orphaned and the kernel ignores Ctrl-Z.
        os.kill(top.process.pid, signal.SIGTSTP)
        self.until("it left the screen", lambda: top.read() or top.raw.count(b"\x1b[?1049l") == 1)
        os.kill(top.process.pid, signal.SIGCONT)
        self.until("it is back", lambda: top.read() or top.raw.count(b"\x1b[?1049h") == 2)
        top.press(b"q")
        self.assertEqual(top.finish(), 0)
        self.assertTrue(top.is_restored())

    def test_colours_are_for_terminals_that_want_them(self):
        top = self.watch()
        self.assertTrue(SGR.search("\n".join(top.frame())))
        for environment in {"NO_COLOR": "1"}, {"TERM": "dumb"}:
            top = self.watch(environment=environment)
            self.assertFalse(SGR.search("\n".join(top.frame())), environment)
        self.assertNotIn("\x1b", run("top", "--once", f"--address={self.address}"))

    def test_once_prints_rates_without_a_terminal(self):
        text = run("top", "--once", "--interval-ms=200", f"--address={self.address}")
        self.assertIn("tokens/s", text)
        self.assertIn("format", text)
        self.assertEqual(text.count("tesserad"), 1)


class LostDaemon(WithDaemon):
    def test_top_shows_the_last_state_and_why_it_is_old(self):
        top = self.terminal("top", "--interval-ms=200")
        top.wait_for(lambda frame: any("memory" in line for line in frame), "a frame")
        self.processes[0].kill()
        top.wait_for(lambda frame: "no daemon answers" in "\n".join(frame), "the reason")
        self.assertTrue(any("memory" in line for line in self.check_size(top)))
        top.press(b"q")
        self.assertEqual(top.finish(), 0)
        self.assertTrue(top.is_restored())


class Tables(WithDaemon):
    def test_fit_the_terminal_unless_they_are_asked_to_be_wide(self):
        sequence = self.sequences()[0]
        for command in (["status"], ["describe", sequence], ["prefixes"], ["policies"],
                        ["policies", "mosaickv"]):
            for columns in 80, 50:
                shown = self.terminal(*command, columns=columns)
                self.assertEqual(shown.finish(), 0)
                for line in SGR.sub("", shown.raw.decode()).split("\r\n"):
                    self.assertLessEqual(len(line), columns, f"{command}: {line}")
        # Nothing is lost of what people read there.
        words = " ".join(SGR.sub("", shown.raw.decode()).split())
        self.assertIn("Share of the channels", words)
        self.assertNotIn("~", words)
        wide = self.terminal("status", "--wide", columns=50)
        self.assertEqual(wide.finish(), 0)
        self.assertGreater(max(map(len, wide.raw.decode().split("\r\n"))), 100)

    def test_short_ids_name_sequences(self):
        sequence = self.sequences()[0]
        self.assertRegex(sequence, r"^s[0-9]+$")
        number = json.loads(run("describe", sequence, "--json",
                                f"--address={self.address}"))["sequence_id"]
        for name in sequence, sequence[1:], str(number):
            self.assertIn(f"sequence {sequence} ",
                          run("describe", name, f"--address={self.address}"))

    def test_an_output_that_cannot_be_written_is_a_failure(self):
        with open("/dev/full", "w", encoding="utf-8") as full:
            for command in (["status"], ["status", "--json"], ["prefixes"], ["policies"], ["help"],
                            ["--version"]):
                if command[0] in ("status", "prefixes"):
                    command.append(f"--address={self.address}")
                done = subprocess.run([TESSERA, *command], stdout=full, text=True,
                                      stderr=subprocess.PIPE, check=False)
                self.assertEqual(done.returncode, 1, command)
                self.assertIn("cannot write the output: No space left", done.stderr)

    def test_a_closed_output_is_a_failure(self):
        done = subprocess.run(["sh", "-c", f"'{TESSERA}' status '--address={self.address}' >&-"],
                              text=True, stderr=subprocess.PIPE, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn("cannot write the output", done.stderr)

    def test_a_reader_that_leaves_is_quiet(self):
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run([TESSERA, "status", f"--address={self.address}"], stdout=write,
                              stderr=subprocess.PIPE, check=False)
        os.close(write)
        self.assertEqual((done.returncode, done.stderr), (1, b""))

    def test_the_doctor_finds_a_healthy_daemon_and_a_missing_one(self):
        text = run("doctor", f"--address={self.address}")
        for line in "socket: ", "daemon: tesserad ", "pool: ", "daemon files: ", "files: ":
            self.assertRegex(text, rf"(?m)^(ok|warning) +{line}")
        text = run("doctor", "--address=unix:/nowhere/s", status=1)
        self.assertRegex(text, r"(?m)^failed +socket: /nowhere/s: No such file")
        self.assertIn("-> start tesserad, or name its address", text)

    def test_the_environment_names_the_daemon(self):
        environment = {**os.environ, "TESSERA_ADDRESS": self.address}
        self.assertIn("tesserad", run("status", env=environment))
        self.assertIn("unix:/nowhere",
                      run("status", "--address=unix:/nowhere", env=environment, status=1))


def matches(value, shape, path="$"):
    """Why a value differs from its documented shape, as a list of sentences."""
    if isinstance(shape, dict) and "*" in shape:  # any keys, all with this shape
        if not isinstance(value, dict):
            return [f"{path} is no object"]
        return [why for key, one in value.items()
                for why in matches(one, shape["*"], f"{path}.{key}")]
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return [f"{path} is no object"]
        optional = {key.rstrip("?") for key in shape if key.endswith("?")}
        named = {key.rstrip("?"): one for key, one in shape.items()}
        problems = [f"{path}.{key} is {'missing' if key in named else 'not documented'}"
                    for key in sorted(set(named) ^ set(value))]
        for key in sorted(set(named) & set(value)):
            if not (key in optional and value[key] is None):
                problems += matches(value[key], named[key], f"{path}.{key}")
        return problems
    if isinstance(shape, list):
        if not isinstance(value, list):
            return [f"{path} is no list"]
        return [why for i, one in enumerate(value)
                for why in matches(one, shape[0], f"{path}[{i}]")]
    kinds = {"string": str, "number": (int, float), "bool": bool}
    if shape in kinds:
        good = isinstance(value, kinds[shape]) and (shape == "bool") == isinstance(value, bool)
        return [] if good else [f"{path} is {value!r}, not a {shape}"]
    return [] if value in shape.split("|") else [f"{path} is {value!r}, none of {shape}"]


class Json(WithDaemon):
    """deploy/docs/json.md says what the commands print."""

    def shapes(self):
        page = (cases.ROOT / "deploy/docs/json.md").read_text(encoding="utf-8")
        found = re.findall(r"^## `tessera ([^`]+)`\n.*?^```json\n(.*?)^```$", page,
                           re.DOTALL | re.MULTILINE)
        return {command: json.loads(shape) for command, shape in found}

    def test_every_documented_shape_is_that_of_the_output(self):
        shapes = self.shapes()
        self.assertGreaterEqual(set(shapes), {
            "status --json", "describe SEQUENCE --json", "prefixes --json",
            "policies --json", "explain POLICY --json"})
        for command, shape in shapes.items():
            words = command.replace("SEQUENCE", self.sequences()[0]).replace(
                "POLICY", "chunkkv:budget=0.5+mosaickv").split()
            local = words[0] in ("policies", "explain")
            text = run(*words, *([] if local else [f"--address={self.address}"]))
            self.assertEqual(matches(json.loads(text), shape), [], command)

    def test_the_comparison_finds_what_is_wrong(self):
        shape = {"a": "number", "b?": {"c": "x|y"}, "d": ["bool"], "e": {"*": "number"}}
        good = {"a": 1, "b": None, "d": [True], "e": {"any": 2}}
        self.assertEqual(matches(good, shape), [])
        for change in ({"a": "1"}, {"a": True}, {"b": {"c": "z"}}, {"d": [1]}, {"e": {"any": "2"}},
                       {"f": 1}):
            self.assertNotEqual(matches({**good, **change}, shape), [], change)
        self.assertNotEqual(matches({"a": 1}, shape), [])


class WithoutDaemon(unittest.TestCase):
    def test_policies_and_explain_need_none(self):
        environment = {**os.environ, "TESSERA_ADDRESS": "unix:/nowhere"}
        self.assertIn("mosaickv", run("policies", env=environment))
        self.assertIn("min_segment", run("policies", "mosaickv", env=environment))
        for command in ["explain"], ["policies", "check"]:
            text = run(*command, "mosaickv:keep=0.25", "--tokens=4000", env=environment)
            self.assertIn("shorter than min_segment 4096", text)
        self.assertIn("did you mean \"keep\"?",
                      run("explain", "mosaickv:kep=0.25", env=environment, status=2))

    def test_explain_reads_the_geometry_of_a_checkpoint(self):
        with tempfile.TemporaryDirectory() as folder:
            config = pathlib.Path(folder) / "config.json"
            config.write_text(json.dumps({
                "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
                "hidden_size": 512, "torch_dtype": "float16"}), encoding="utf-8")
            explained = json.loads(run("explain", "dense", f"--model={config}", "--tokens=64",
                                       "--json"))
            self.assertEqual(explained["dense_bytes"], 2 * 2 * 64 * 64 * 2 * 2)
            self.assertEqual(explained["type"], "fp16")
            self.assertIn("cannot open \"/nope\"",
                          run("explain", "dense", "--model=/nope", status=2))

    def test_wrong_usage_says_what_is_right(self):
        for arguments, message in (
                (["describe"], "tessera describe: missing SEQUENCE; 'tessera status' lists"),
                (["describe", "s1", "s2"], "unexpected argument \"s2\"; usage: tessera describe"),
                (["describe", "x"], "\"x\" is not a sequence, as in s51"),
                (["status", "--jsn"], "unknown flag --jsn"),
                (["status", "--jsn"], "did you mean \"json\"?"),
                (["stauts"], "did you mean \"status\"?"),
                (["generate", "--model=/nope", "text"], "cannot open \"/nope\" (--model)"),
                (["bench", "nothing"], "unknown benchmark \"nothing\""),
                (["help", "nothing"], "no command or topic \"nothing\"")):
            self.assertIn(message, run(*arguments, status=2))

    def test_version_and_help(self):
        self.assertRegex(run("--version"), r"^tessera [0-9]+\.[0-9]+\.[0-9]+\n$")
        self.assertEqual(run("help"), run("--help"))
        self.assertEqual(run("help", "describe"), run("describe", "--help"))
        self.assertIn("--tls-ca=FILE", run("help", "connection"))
        self.assertIn("Rows:", run("help", "bench", "serve"))

    def test_grpc_is_silent_unless_it_is_asked(self):
        text = run("health", "--address=127.0.0.1:1", status=1)
        self.assertEqual(text.count("\n"), 1, text)


class Documents(unittest.TestCase):
    def test_manual_pages_have_no_faults(self):
        groff = shutil.which("groff")
        if groff is None:
            self.skipTest("groff is not installed")
        for page in "tessera.1", "tesserad.8":
            done = subprocess.run([groff, "-man", "-Tutf8", "-ww", "-z", f"{DOCUMENTS}/{page}"],
                                  capture_output=True, text=True, check=False)
            self.assertEqual((done.returncode, done.stderr), (0, ""), page)

    def test_documents_are_those_of_the_programs(self):
        pages = pathlib.Path(DOCUMENTS)
        self.assertEqual((pages / "tessera.1").read_text(encoding="utf-8"), run("help", "manual"))
        self.assertEqual((pages / "tessera.bash").read_text(encoding="utf-8"),
                         run("completion", "bash"))
        page = (pages / "tesserad.8").read_text(encoding="utf-8")
        page = page.replace("\\(aq", "'").replace("\\", "")  # troff's escapes
        done = subprocess.run([TESSERAD, "--help"], text=True, check=True, stdout=subprocess.PIPE)
        flags = re.findall(r"^  (--[a-z-]+)\S*(?: -h)? +(.*)$", done.stdout, re.MULTILINE)
        self.assertGreater(len(flags), 30)
        for name, help_text in flags:
            self.assertIn(f"fB{name}", page)
            self.assertIn(help_text, page)

    def complete(self, script, function, *words):
        line = f"""
          source {DOCUMENTS}/{script}
          COMP_WORDS=({" ".join(f"'{word}'" for word in words)}) COMP_CWORD={len(words) - 1}
          {function}
          printf '%s\\n' "${{COMPREPLY[@]}}"
        """
        done = subprocess.run(["bash", "--norc", "-c", line], capture_output=True, text=True,
                              check=False)
        self.assertEqual(done.stderr, "")
        return done.stdout.split()

    def test_bash_completes_commands_flags_and_files(self):
        if shutil.which("bash") is None:
            self.skipTest("bash is not installed")
        tessera = ("tessera.bash", "_tessera", "tessera")
        self.assertEqual(self.complete(*tessera, "des"), ["describe"])
        self.assertEqual(self.complete(*tessera, "status", "--js"), ["--json"])
        self.assertEqual(self.complete(*tessera, "describe", "--tls-c"),
                         ["--tls-ca=", "--tls-certificate="])
        self.assertEqual(self.complete(*tessera, "bench", "ser"), ["serve"])
        self.assertEqual(self.complete(*tessera, "worker", "--transport", "=", "r"), ["rpc"])
        file = DOCUMENTS + "/tesserad.8"
        self.assertEqual(self.complete(*tessera, "status", "--tls-ca", "=", file), [file])
        self.assertEqual(self.complete("tesserad.bash", "_tesserad", "tesserad", "--pool-b"),
                         ["--pool-bytes="])


if __name__ == "__main__":
    cases.main()
