"""The documents say what is true: links, sizes, quoted messages, and configuration that loads."""

import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "layers"))

import tree  # noqa: E402

ROOT = pathlib.Path(sys.argv[1]).resolve()
TESSERAD = sys.argv[2] if len(sys.argv) > 2 else None
DOCS = "deploy/docs"

# The longest that a page may be, in lines; the first pattern that matches counts.
MAX_LINES = (
    (r"README\.md", 150),
    (r"client/README\.md|client/python/README\.md", 200),
    (r"daemon/policies/README\.md", 250),
    (r"kernels/format/README\.md", 150),
    (r"deploy/docs/(CONTRIBUTING|CHANGELOG|SECURITY)\.md", 100),
    (r"deploy/.*\.md|helm/tessera/README\.md", 300),
    (r"kernels/cuda/MEASURED\.md|client/eval/RESULTS\.md", 10000),
    (r".*/README\.md", 120),
)

LINK = re.compile(r"\]\(([^)\s]+)\)")
# A block that is quoted from a program, which is compiled and tested.
QUOTE = re.compile(r"^<!-- from (\S+) -->\n```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LITERALS = re.compile(r'"((?:\\.|[^"\\\n])*)"')


def pages():
    return [file for file in tree.walk(ROOT) if file.suffix == ".md"]


def read(file):
    return (ROOT / file).read_text(encoding="utf-8")


def anchors(text):
    """The anchors that a page's headings have, as GitHub and others make them."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", heading.lower())
        found.add(plain.strip().replace(" ", "-"))
    return found


class Documents(unittest.TestCase):
    def test_links_lead_somewhere(self):
        checked = 0
        for file in pages():
            text = read(file)
            for target in LINK.findall(FENCE.sub("", text)):
                if re.match(r"[a-z]+:", target):
                    continue
                path, _, anchor = target.partition("#")
                there = (ROOT / file).parent / path if path else ROOT / file
                checked += 1
                self.assertTrue(there.exists(), f"{file}: {target}")
                if anchor and there.suffix == ".md":
                    self.assertIn(anchor, anchors(there.read_text(encoding="utf-8")),
                                  f"{file}: {target}")
        self.assertGreater(checked, 50)

    def test_pages_keep_their_size(self):
        for file in pages():
            for pattern, limit in MAX_LINES:
                if re.fullmatch(pattern, file.as_posix()):
                    lines = read(file).count("\n")
                    self.assertLessEqual(lines, limit, f"{file} has {lines} lines, limit {limit}")
                    break

    def test_every_page_for_users_is_in_the_index(self):
        index = read(f"{DOCS}/README.md")
        for file in pages():
            if file.parent.as_posix() == DOCS and file.name != "README.md":
                self.assertIn(f"({file.name})", index)

    def test_quoted_messages_exist(self):
        source = " ".join(
            "".join(LITERALS.findall(read(file))) for file in tree.walk(ROOT)
            if file.suffix in (".cc", ".h") and file.parts[0] in ("client", "daemon", "kernels"))
        rows = re.findall(r"^\| `([^`]+)` \|", read(f"{DOCS}/troubleshooting.md"), re.MULTILINE)
        self.assertGreater(len(rows), 15)
        for row in rows:
            for fragment in row.split("..."):
                wanted = fragment.strip().replace('"', '\\"')
                with self.subTest(fragment):
                    self.assertTrue(wanted in source, "no message contains this")

    def test_quoted_code_is_that_of_the_programs(self):
        quoted = 0
        for file in pages():
            text = read(file)
            blocks = QUOTE.findall(text)
            self.assertEqual(len(blocks), len(re.findall(r"^<!-- from ", text, re.MULTILINE)),
                             f"{file}: a mark without a block of code after it")
            for program, block in blocks:
                quoted += 1
                with self.subTest(f"{file}: {program}"):
                    self.assertTrue("\n" + block in "\n" + read(program),
                                    f"not a contiguous part of {program}:\n{block}")
        self.assertGreater(quoted, 5)

    @unittest.skipIf(TESSERAD is None, "no tesserad given")
    def test_configurations_load(self):
        blocks = re.findall(r"^```json\n(.*?)^```$", read(f"{DOCS}/operations.md"),
                            re.DOTALL | re.MULTILINE)
        self.assertGreater(len(blocks), 0)
        examples = sorted((ROOT / "deploy/examples").glob("*.json"))
        self.assertGreater(len(examples), 2)
        for block in blocks + [file.read_text(encoding="utf-8") for file in examples]:
            with tempfile.TemporaryDirectory() as folder:
                # The example's files, which a test machine does not have.
                def local(match, folder=folder):
                    file = pathlib.Path(folder) / match[1]
                    file.write_text(match[1] + "\n")
                    file.chmod(0o600)
                    return f'"{file}"'

                block = re.sub(r'"/etc/tessera/([\w.]+)"', local, block)
                config = pathlib.Path(folder) / "config.json"
                config.write_text(block)
                # A GPU that no machine has is not asked for its memory.
                flags = (["--device=cuda:1023", "--check-config"] if "{uuid}" in block else
                         ["--device=cpu", "--print-config"])
                done = subprocess.run([TESSERAD, f"--config={config}", *flags],
                                      capture_output=True, text=True, check=False)
                self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
