"""The pods of pod_test.py in containers, with the image of deploy/container/build."""

import argparse
import pathlib
import sys
import tempfile
import unittest

import pod_test
import cases
import container_pod
import podman

build = None
containers = None


def setUpModule():
    global containers
    podman.skip_unless_possible()
    folder = tempfile.TemporaryDirectory(prefix="tessera-images-", dir="/var/tmp")
    unittest.addModuleCleanup(folder.cleanup)
    containers = podman.Containers(pathlib.Path(folder.name))
    unittest.addModuleCleanup(containers.remove_all)
    containers.build(cases.ROOT / "deploy/container/build", build, "cpu",
                     containers.folder / "cpu")


class PodsInContainers(pod_test.Pods):
    test_with_metrics = None  # test_with_tls_and_tokens has them, too

    def make_pod(self, spec, name, config_maps, secrets):
        return container_pod.ContainerPod(spec, self.folder / name, config_maps, secrets,
                                          containers)


del pod_test.Pods  # unittest would run the cases of the base class, too

if __name__ == "__main__":
    podman.enter_own_mounts()
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=pathlib.Path, required=True)
    options, sys.argv[1:] = parser.parse_known_args()
    build = options.build.resolve()
    cases.main()
