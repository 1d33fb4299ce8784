"""The shared libraries that programs load, and the Debian packages that own them."""

import pathlib
import re
import subprocess
from dataclasses import dataclass

FIELDS = ("Package", "Version", "Architecture", "source:Package", "source:Version", "Maintainer",
          "Homepage")


@dataclass(frozen=True)
class Package:
    """An installed Debian package."""

    name: str
    version: str
    architecture: str
    source: str
    source_version: str
    maintainer: str
    homepage: str

    @property
    def copyright(self):
        """The file with its licences, or None."""
        path = pathlib.Path("/usr/share/doc") / self.name / "copyright"
        return path if path.exists() else None


def libraries_of(programs):
    """The libraries that the loader maps for `programs`, itself included, by the loader's paths."""
    found = set()
    for program in programs:
        shown = subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout
        missing = re.findall(r"^\s*(\S+) => not found", shown, re.MULTILINE)
        if missing:
            raise RuntimeError(f"{program} needs {', '.join(missing)}, which this machine lacks")
        found.update(re.findall(r"(/\S+) \(0x", shown))
    return sorted(pathlib.Path(path) for path in found)


def _names_of(path):
    """The names under which dpkg may know a file: /lib is a link to /usr/lib since Debian 12."""
    real = path.resolve()
    names = []
    for name in (str(path), str(path.parent.resolve() / path.name), str(real)):
        names.append(name)
        if name.startswith("/usr/"):
            names.append(name[len("/usr"):])
    return dict.fromkeys(names)


def owners_of(paths):
    """{path: Package, or None where no package owns the file}."""
    names = {path: _names_of(path) for path in paths}
    every = sorted({name for some in names.values() for name in some})
    # The exit code is 1 as soon as one name is unknown, and most files have several.
    shown = subprocess.run(["dpkg-query", "--search", *every], check=False, capture_output=True,
                           text=True).stdout
    owner = {}
    for line in shown.splitlines():
        match = re.match(r"([a-z0-9][^:,\s]*)(?::\w+)?: (/.*)", line)
        if match:
            owner[match[2]] = match[1]
    packages = installed(sorted(set(owner.values())))
    result = {}
    for path, some in names.items():
        owned = next((owner[name] for name in some if name in owner), None)
        result[path] = packages.get(owned)
    return result


def installed(names):
    """{name: Package} for those of `names` that are installed."""
    if not names:
        return {}
    form = "\t".join("${%s}" % field for field in FIELDS) + "\t${db:Status-Status}\n"
    shown = subprocess.run(["dpkg-query", "--show", f"--showformat={form}", *names], check=False,
                           capture_output=True, text=True).stdout
    packages = {}
    for line in shown.splitlines():
        *values, status = line.split("\t")
        if status == "installed":
            packages[values[0]] = Package(*values)
    return packages


def distribution():
    """The fields of /etc/os-release, e.g. {"ID": "debian", "VERSION_CODENAME": "bookworm"}."""
    text = pathlib.Path("/etc/os-release").read_text(encoding="utf-8")
    return {key: value.strip('"') for key, value in re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE)}
