"""A certificate for tests, as a Secret of one has it."""

import shutil
import subprocess
import unittest


def make(folder):
    """{tls.crt, tls.key, ca.crt: text}; skips the test without openssl."""
    if shutil.which("openssl") is None:
        raise unittest.SkipTest("openssl is missing")
    key, certificate = folder / "made.key", folder / "made.crt"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days=1",
                    "-subj=/CN=tessera", f"-keyout={key}", f"-out={certificate}"],
                   capture_output=True, check=True)
    return {"tls.crt": certificate.read_text(), "tls.key": key.read_text(),
            "ca.crt": certificate.read_text()}
