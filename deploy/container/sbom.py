"""The bill of materials of an image: SPDX 2.3 as JSON.

It names each Debian package that a library comes from, each file of the image with its checksums,
and what the compiler put into the programs (headers, the CUDA runtime). The same content gives the
same document, so an image that contains it is reproducible.
"""

import hashlib
import json
import re
import time
import urllib.parse
import uuid

DOCUMENT = "SPDXRef-DOCUMENT"
IMAGE = "SPDXRef-image"
TESSERA = "SPDXRef-tessera"
NOT_STATED = "NOASSERTION"


def _identifier(kind, name):
    return f"SPDXRef-{kind}-" + re.sub(r"[^A-Za-z0-9.-]", "-", name.replace("+", "plus"))


def _digest(algorithm, data):
    return hashlib.new(algorithm, data).hexdigest()


class Bill:
    def __init__(self, target, version, distribution):
        self.name = f"tessera-{target}-{version}"
        self.distribution = distribution
        self.packages = {}
        self.files = []
        self.relations = set()
        self._add_package(IMAGE, f"tessera-{target}", version,
                          primaryPackagePurpose="CONTAINER", filesAnalyzed=True)
        self._add_package(TESSERA, "tessera", version, primaryPackagePurpose="APPLICATION",
                          licenseConcluded="Apache-2.0", licenseDeclared="Apache-2.0")
        self._relate(DOCUMENT, "DESCRIBES", IMAGE)
        self._relate(IMAGE, "CONTAINS", TESSERA)

    def add_files(self, files, owners):
        """files: {path in the image: content}; owners: {path: debian.Package}, else it is ours."""
        sums = []
        for number, (path, data) in enumerate(sorted(files.items())):
            identifier = f"SPDXRef-file-{number}"
            sums.append(_digest("sha1", data))
            self.files.append({
                "SPDXID": identifier, "fileName": "." + path,
                "checksums": [{"algorithm": "SHA1", "checksumValue": sums[-1]},
                              {"algorithm": "SHA256", "checksumValue": _digest("sha256", data)}],
                "licenseConcluded": NOT_STATED, "copyrightText": NOT_STATED})
            self._relate(IMAGE, "CONTAINS", identifier)
            if path in owners:
                package = self._add_debian(owners[path])
                self._relate(IMAGE, "CONTAINS", package)
                self._relate(identifier, "OTHER", package, "the file comes from this package")
        self.packages[IMAGE]["packageVerificationCode"] = {
            "packageVerificationCodeValue": _digest("sha1", "".join(sorted(sums)).encode())}

    def add_build_dependency(self, package):
        """A Debian package whose headers the programs were compiled with."""
        self._relate(self._add_debian(package), "BUILD_DEPENDENCY_OF", TESSERA)

    def add_static_library(self, name, version):
        identifier = _identifier("static", name)
        self._add_package(identifier, name, version, primaryPackagePurpose="LIBRARY")
        self._relate(TESSERA, "STATIC_LINK", identifier)

    def text(self, created):
        """The document; `created` in seconds since 1970."""
        result = {
            "spdxVersion": "SPDX-2.3", "dataLicense": "CC0-1.0", "SPDXID": DOCUMENT,
            "name": self.name,
            "creationInfo": {"created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(created)),
                             "creators": ["Tool: tessera-container-collect"]},
            "packages": [self.packages[key] for key in sorted(self.packages)],
            "files": self.files,
            "relationships": [dict(relation) for relation in sorted(self.relations)],
        }
        content = json.dumps(result, sort_keys=True)
        result["documentNamespace"] = f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, content)}"
        return json.dumps(result, indent=1, sort_keys=True) + "\n"

    def _add_package(self, identifier, name, version, **fields):
        self.packages[identifier] = {
            "SPDXID": identifier, "name": name, "versionInfo": version, "supplier": NOT_STATED,
            "downloadLocation": NOT_STATED, "filesAnalyzed": False, "copyrightText": NOT_STATED,
            "licenseConcluded": NOT_STATED, "licenseDeclared": NOT_STATED, **fields}

    def _add_debian(self, package):
        identifier = _identifier("deb", package.name)
        if identifier in self.packages:
            return identifier
        quote = urllib.parse.quote
        purl = (f"pkg:deb/{self.distribution['ID']}/{quote(package.name)}@{quote(package.version)}"
                f"?arch={package.architecture}"
                f"&distro={self.distribution.get('VERSION_CODENAME', '')}")
        fields = {"homepage": package.homepage} if package.homepage else {}
        maintainer = re.fullmatch(r"(.*\S) <(\S+@\S+)>", package.maintainer)
        if maintainer:
            fields["supplier"] = f"Organization: {maintainer[1]} ({maintainer[2]})"
        self._add_package(
            identifier, package.name, package.version,
            sourceInfo=f"built from the source package {package.source} {package.source_version}",
            externalRefs=[{"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl",
                           "referenceLocator": purl}], **fields)
        return identifier

    def _relate(self, one, kind, other, comment=None):
        relation = [("relatedSpdxElement", other), ("relationshipType", kind),
                    ("spdxElementId", one)]
        if comment:
            relation.append(("comment", comment))
        self.relations.add(tuple(relation))
